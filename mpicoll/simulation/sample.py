"""A few steps that stand for many, where exact clocks would take too long.

Where every rank sends to the one a distance further, at thousands of distances in turn, and the
network looks different at each, a replay of all steps follows each message. Then steps from all
over such a run are taken, and each is counted for those around it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.lockstep import March
from mpicoll.simulation.machine import Integers

LINKS = 1 << 27  #: messages times links on their way that an exact replay looks at
CLOCKS = 1 << 32  #: steps times ranks whose clocks an exact replay may have to set
SAMPLED = 1 << 25  #: the same of a sample
LONG = 64  #: steps of a run of which some stand for all, at least
FEWEST = 8  #: steps that stand for a run
MOST = 512
TURN = (5**0.5 - 1) / 2  #: of places in a stretch, each is far from those of the ones before
CLOSE = 8  #: the part of the ranks that may be added so that the network repeats


def sample(march: March, fabric: Fabric) -> tuple[March, Fabric, Integers] | None:
    """Return steps that stand for all, how many each stands for, and the ranks they are on.

    None where an exact replay is not too long. Ranks are added where that makes the network
    repeat, so that those of a period stand for all: it has as many distances, near to them.
    """
    runs = march.alike[march.steps]
    starts = np.flatnonzero(np.diff(runs, prepend=-1))
    lengths = np.diff(starts, append=runs.size)
    if lengths.max(initial=0) < LONG:
        return None
    if _links(march, fabric) <= LINKS and march.steps.size * march.among(fabric) <= CLOCKS:
        return None
    march, fabric = _whole(march, fabric)
    share = SAMPLED / max(SAMPLED, _links(march, fabric))
    picked, counts = [], []
    for first, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        some = length
        if length >= LONG:
            some = min(length, max(FEWEST, min(MOST, round(length * share))))
        ends = np.arange(some + 1) * length // some
        within = (0.5 + TURN * np.arange(some)) % 1
        picked.append(first + ends[:-1] + (within * np.diff(ends)).astype(np.int64))
        counts.append(np.diff(ends))
    steps = march.steps[np.concatenate(picked)]
    return replace(march, steps=steps), fabric, np.concatenate(counts)


def _links(march: March, fabric: Fabric) -> int:
    """Return how many links an exact replay looks at, those at both ends of a message too."""
    messages = sum(march.kinds[kind].units.size for kind in np.unique(march.steps).tolist())
    return int(messages * march.among(fabric) * (2 + fabric.network.hops))


def _whole(march: March, fabric: Fabric) -> tuple[March, Fabric]:
    """Return the march and the fabric with as many more ranks as make the network repeat."""
    larger = None if march.xor else fabric.whole()
    if larger is None or (larger.size - march.size) * CLOSE > march.size:
        return march, fabric
    more = larger.size - march.size

    def further(shifts: Integers) -> Integers:
        return np.where(2 * shifts > march.size, shifts + more, shifts)

    kinds = [
        slots._replace(sends=further(slots.sends), recvs=further(slots.recvs))
        for slots in march.kinds
    ]
    return replace(march, size=larger.size, kinds=tuple(kinds)), larger
