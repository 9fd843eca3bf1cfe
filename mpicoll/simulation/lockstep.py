"""The replay of schedules that are the same on all ranks, but for where they stand.

All ranks are in the same step at the same level. Where the network looks the same from
every ``period`` ranks on, so do the clocks, and those of one period stand for all. Where a
step comes many times, the clocks end up growing alike with each; from there on it is counted.
Both are exact: the ticks are those of the full replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpicoll.errors import ScheduleError
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import Integers, Machine, Reals, ticks
from mpicoll.simulation.symmetry import Bools, Kind

BATCH = 1 << 18  #: messages whose links are looked at together
HELD = 1 << 22  #: messages, times sizes, whose times are kept


class Slots(NamedTuple):
    """The messages of one step, (residues, messages): peers, and for receives the send."""

    sends: Integers
    recvs: Integers
    matches: Integers
    units: Integers


@dataclass(frozen=True, slots=True)
class March:
    """Steps that all ranks take together; ranks of one residue have the same peers.

    ``steps`` has for each step its number among the ``kinds`` of steps.
    """

    size: int
    residues: int
    xor: bool
    steps: Integers
    kinds: tuple[Slots, ...]
    before: Integers
    during: Integers
    after: Integers


def march(kinds: Sequence[Kind], size: int) -> March | None:
    """Return the steps that all ranks take together, or None where they do not."""
    lines = [kind.line for kind in kinds]
    if len(kinds) > 2 or (len(kinds) == 2 and not (kinds[1].members % 2 == 1).all()):
        return None
    if len(kinds) == 2 and (kinds[0].members.size != kinds[1].members.size or size <= 2):
        return None
    names = ("sends", "recvs", "send_units", "recv_units", "during", "after")
    if any(
        not np.array_equal(getattr(lines[0], name), getattr(line, name))
        for line in lines
        for name in names
    ):
        return None
    shifted = all(kind.shifted.all() for kind in kinds)
    xor = not shifted and len(kinds) == 1 and bool(kinds[0].flipped.all())
    if not shifted and not xor:
        return None
    peers = np.stack([kind.flips if xor else kind.shifts for kind in kinds])
    line = lines[0]
    rows = _rows(line.sends, line.recvs, peers, line.send_units, line.during, line.after[1:])
    _, first, steps = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    send_first = np.concatenate([[0], np.cumsum(line.sends)])
    recv_first = line.send_peers.size + np.concatenate([[0], np.cumsum(line.recvs)])
    found = []
    for step in first:
        sends = peers[:, send_first[step] : send_first[step + 1]]
        recvs = peers[:, recv_first[step] : recv_first[step + 1]]
        units = line.send_units[send_first[step] : send_first[step + 1]]
        wanted = line.recv_units[recv_first[step] - line.send_peers.size :][: recvs.shape[1]]
        matches = _matches(sends, recvs, size, xor)
        if (units[matches] != wanted).any():
            raise ScheduleError("a send and its receive differ in their number of elements")
        found.append(Slots(sends, recvs, matches, units))
    return March(
        size,
        len(kinds),
        xor,
        steps.reshape(-1),
        tuple(found),
        line.after[0],
        line.during[first],
        line.after[1:][first],
    )


def _rows(
    sends: Integers,
    recvs: Integers,
    peers: Integers,
    units: Integers,
    during: Integers,
    after: Integers,
) -> Integers:
    """Return a row per step that says all about it."""
    width = int(sends.max(initial=0)), int(recvs.max(initial=0))
    total = int(sends.sum())
    columns = [during, after]
    for counts, most, values in (
        *((sends, width[0], row[:total]) for row in (*peers, units)),
        *((recvs, width[1], row[total:]) for row in peers),
    ):
        padded = np.full((counts.size, most), -1)
        padded[np.arange(most) < counts[:, None]] = values
        columns.append(padded)
    return np.concatenate(columns, axis=1)


def _matches(sends: Integers, recvs: Integers, size: int, xor: bool) -> Integers:
    """Return for every receive which send of its peer it is, (residues, receives)."""
    residues = sends.shape[0]
    matches = np.zeros_like(recvs)
    if sends.shape[1] != recvs.shape[1]:
        raise ScheduleError("a send has no receive, or a receive no send")
    for residue in range(residues):
        free = {other: list(enumerate(sends[other].tolist())) for other in range(residues)}
        for place, peer in enumerate(recvs[residue].tolist()):
            way = peer if xor else -peer % size
            offers = free[(residue + peer) % residues if not xor else 0]
            fitting = next((offer for offer in offers if offer[1] == way), None)
            if fitting is None:
                raise ScheduleError("a send has no receive, or a receive no send")
            offers.remove(fitting)
            matches[residue, place] = fitting[0]
    return matches


class _Step(NamedTuple):
    """A kind of step on the ranks of a period, in ticks."""

    targets: Integers  # (sends, ranks)
    recvs: Integers  # (receives, ranks)
    matches: Integers  # (receives, ranks)
    wire: Integers  # (sizes, sends, ranks)
    latency: Integers  # (sends, ranks)
    meets: Bools  # (sizes, sends, 1): starts when both ends are there
    during: Integers  # (sizes, ranks)
    after: Integers  # (sizes, ranks)


def replay(march: March, fabric: Fabric, machine: Machine, scales: Reals) -> Integers:
    """Return when the ranks of one period are done, in ticks, (sizes, ranks)."""
    return _Replay(march, fabric, machine, scales).run()


class _Replay:
    def __init__(self, march: March, fabric: Fabric, machine: Machine, scales: Reals) -> None:
        self.march, self.fabric, self.machine, self.scales = march, fabric, machine, scales
        fits = not march.xor and fabric.period % march.residues == 0
        self.period = fabric.period if fits else march.size
        self.ranks = np.arange(self.period)
        self.stretch = machine.stretch(fabric.engaged(np.arange(march.size)))[: self.period]
        self.each = ticks(machine.overhead * self.stretch)
        self.fixed = ticks(machine.step * self.stretch)
        self.known: dict[int, _Step] = {}

    def run(self) -> Integers:
        work = self.machine.work(self.march.before, self.scales)[:, None] * self.stretch
        clocks = ticks(self.machine.call) + ticks(work)
        steps = self.march.steps
        starts = np.flatnonzero(np.diff(steps, prepend=-1))
        counts = np.diff(starts, append=steps.size)
        for at, count in zip(range(starts.size), counts.tolist(), strict=True):
            kind = int(steps[starts[at]])
            if kind not in self.known:
                self._prepare(steps[starts[at:]])
            clocks = self._repeat(clocks, self.known[kind], count)
        return clocks

    def _repeat(self, clocks: Integers, step: _Step, count: int) -> Integers:
        """Take a step ``count`` times; count on once all clocks grow alike."""
        before = clocks
        for number in range(1, count + 1):
            last, clocks = clocks, self._step(clocks, step)
            if number < 4 or number % 16 == 0:
                grown = clocks - last
                if (grown == grown[:, :1]).all():
                    result: Integers = clocks + (count - number) * grown[:, :1]
                    return result
            if number % self.period == 0:
                grown = clocks - before
                before = clocks
                laps, rest = divmod(count - number, self.period)
                if laps and (grown == grown[:, :1]).all():
                    return self._repeat(clocks + laps * grown[:, :1], step, rest)
        return clocks

    def _step(self, clocks: Integers, step: _Step) -> Integers:
        sends = step.targets.shape[0]
        places = np.arange(1, sends + 1)[:, None]
        post = clocks[:, None, :] + places * self.each
        if step.meets.any():
            both = np.maximum(post, clocks[:, step.targets])
            post = np.where(step.meets, both, post)
        sent = post + step.wire
        arrived = sent + step.latency
        done = clocks + sends * self.each + self.fixed + step.during
        for match, peer in zip(step.matches, step.recvs, strict=True):
            done = np.maximum(done, arrived[:, match, peer]) + self.each
        result: Integers = np.maximum(done, sent.max(axis=1)) + step.after
        return result

    def _prepare(self, coming: Integers) -> None:
        """Look at the links of the kinds of steps that come next, a batch at a time."""
        _, first = np.unique(coming, return_index=True)
        messages = 0
        batch: list[int] = []
        for kind in coming[np.sort(first)].tolist():
            if kind in self.known:
                continue
            messages += self.march.kinds[kind].sends.shape[1] * self.period
            if batch and messages > BATCH:
                break
            batch.append(kind)
        if sum(step.wire.size for step in self.known.values()) > HELD:
            self.known.clear()
        targets = [self._peers(self.march.kinds[kind].sends) for kind in batch]
        sizes = [target.size for target in targets]
        units = [np.repeat(self.march.kinds[kind].units, self.period) for kind in batch]
        latency, wire = self.fabric.transfer(
            np.concatenate([np.tile(self.ranks, target.shape[0]) for target in targets]),
            np.concatenate([target.ravel() for target in targets]),
            np.concatenate(units),
            np.repeat(np.arange(len(batch)), sizes),
            folded=self.period < self.march.size,
        )
        cuts = np.cumsum(sizes)[:-1]
        parts = zip(batch, targets, np.split(latency, cuts), np.split(wire, cuts), strict=True)
        for kind, target, late, slow in parts:
            self.known[kind] = self._known(kind, target, late, slow)

    def _known(self, kind: int, targets: Integers, latency: Integers, wire: Reals) -> _Step:
        slots, machine = self.march.kinds[kind], self.machine
        residues = self.ranks % self.march.residues
        work = [
            ticks(machine.work(units[kind], self.scales)[:, None] * self.stretch)
            for units in (self.march.during, self.march.after)
        ]
        return _Step(
            targets % self.period,
            self._peers(slots.recvs) % self.period,
            slots.matches[residues].T,
            ticks(self.scales[:, None] * wire).reshape(-1, *targets.shape),
            latency.reshape(targets.shape),
            (np.outer(self.scales, slots.units) > machine.eager)[:, :, None],
            work[0],
            work[1],
        )

    def _peers(self, slots: Integers) -> Integers:
        """Return the peers of the ranks of a period, (messages, ranks)."""
        ways = slots[self.ranks % self.march.residues].T
        result: Integers = (
            self.ranks ^ ways if self.march.xor else (self.ranks + ways) % self.march.size
        )
        return result
