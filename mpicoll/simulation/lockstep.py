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
from mpicoll.simulation.machine import Integers, Machine, Reals, grown, ticks
from mpicoll.simulation.program import Line
from mpicoll.simulation.symmetry import Bools, Kind

BATCH = 1 << 18  #: messages whose links are looked at together
HELD = 1 << 22  #: messages, times sizes, whose times are kept
LAPS = 4  #: laps of steps that may be worth counting


class Slots(NamedTuple):
    """The messages of one step, (residues, messages): peers, and for receives the send."""

    sends: Integers
    recvs: Integers
    matches: Integers
    units: Integers


@dataclass(frozen=True, slots=True)
class March:
    """Steps that all ranks take together; ranks of one residue have the same peers.

    ``steps`` has for each step its number among the ``kinds`` of steps; those that differ in
    their peers only have the same number in ``alike``.
    """

    size: int
    residues: int
    xor: bool
    steps: Integers
    kinds: tuple[Slots, ...]
    alike: Integers
    before: Integers
    during: Integers
    after: Integers

    def among(self, fabric: Fabric) -> int:
        """Return how many ranks stand for all: those of one period, where peers repeat too."""
        repeats = not self.xor and fabric.period % self.residues == 0
        return fabric.period if repeats else self.size


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
    plain, rows = _rows(line, peers)
    _, first, steps = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    _, alike = np.unique(plain[first], axis=0, return_inverse=True)
    send_first = np.concatenate([[0], np.cumsum(line.sends)])
    recv_first = np.concatenate([[0], np.cumsum(line.recvs)])
    out, come = np.split(peers, [line.send_peers.size], axis=1)
    # Nearly always the k-th message from a peer is its k-th one.
    even = len(kinds) == 1 and np.array_equal(line.sends, line.recvs)
    even = even and np.array_equal(out if xor else -out % size, come)
    if even and (line.send_units != line.recv_units).any():
        raise ScheduleError("a send and its receive differ in their number of elements")
    found = []
    for step in first.tolist():
        there = slice(send_first[step], send_first[step + 1])
        here = slice(recv_first[step], recv_first[step + 1])
        sends, recvs, units = out[:, there], come[:, here], line.send_units[there]
        if even:
            matches = np.arange(units.size)[None, :]
        else:
            matches = _matches(sends, recvs, size, xor)
            if (units[matches] != line.recv_units[here]).any():
                raise ScheduleError("a send and its receive differ in their number of elements")
        found.append(Slots(sends, recvs, matches, units))
    return March(
        size,
        len(kinds),
        xor,
        steps.reshape(-1),
        tuple(found),
        alike.reshape(-1),
        line.after[0],
        line.during[first],
        line.after[1:][first],
    )


def _rows(line: Line, peers: Integers) -> tuple[Integers, Integers]:
    """Return a row per step that says all about it but for its peers, and one with them."""

    def padded(counts: Integers, values: Integers) -> Integers:
        found = np.full((counts.size, int(counts.max(initial=0))), -1)
        found[np.arange(found.shape[1]) < counts[:, None]] = values
        return found

    total = line.send_peers.size
    counts = np.stack([line.sends, line.recvs], axis=1)
    sizes = padded(line.sends, line.send_units), padded(line.recvs, line.recv_units)
    plain = np.concatenate([line.during, line.after[1:], counts, *sizes], axis=1)
    sends = [padded(line.sends, row[:total]) for row in peers]
    recvs = [padded(line.recvs, row[total:]) for row in peers]
    return plain, np.concatenate([plain, *sends, *recvs], axis=1)


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


def _repeated(doing: Integers, lap: int) -> Integers:
    """Return for every step how often the ``lap`` steps from there on come, one time or more."""
    same = doing[lap:] == doing[:-lap]
    # The next step that is not the one a lap later.
    ends = np.append(np.where(same, doing.size, np.arange(same.size)), doing.size - lap)
    ends = np.minimum.accumulate(ends[::-1])[::-1]
    result = np.ones_like(doing)
    result[: ends.size] += (ends - np.arange(ends.size)) // lap
    return result


def replay(
    march: March,
    fabric: Fabric,
    machine: Machine,
    scales: Reals,
    counts: Integers | None = None,
) -> Integers:
    """Return when the ranks of one period are done, in ticks, (sizes, ranks).

    With ``counts``, one per step, each adds its time so many times.
    """
    return _Replay(march, fabric, machine, scales).run(counts)


class _Replay:
    def __init__(self, march: March, fabric: Fabric, machine: Machine, scales: Reals) -> None:
        self.march, self.fabric, self.machine, self.scales = march, fabric, machine, scales
        self.period = march.among(fabric)
        self.ranks = np.arange(self.period)
        self.stretch = machine.stretch(fabric.engaged(np.arange(march.size)))[: self.period]
        self.each = ticks(machine.overhead * self.stretch)
        self.fixed = ticks(machine.step * self.stretch)
        self.known: dict[int, int] = {}  # kinds, and what they do
        self.steps: list[_Step] = []
        self.same: dict[tuple[object, ...], int] = {}

    def run(self, counts: Integers | None) -> Integers:
        work = self.machine.work(self.march.before, self.scales)[:, None] * self.stretch
        clocks = ticks(self.machine.call) + ticks(work)
        steps = self.march.steps
        at = 0
        while at < steps.size:
            count = self._prepare(steps[at:])
            doing = np.array([self.known[kind] for kind in steps[at : at + count].tolist()])
            if counts is None:
                clocks = self._through(clocks, doing)
            else:
                clocks = self._counted(clocks, doing, counts[at : at + count])
            at += count
        return clocks

    def _counted(self, clocks: Integers, doing: Integers, counts: Integers) -> Integers:
        """Take steps once each; all clocks go on by the time of the slowest for the others."""
        for step, count in zip(doing.tolist(), counts.tolist(), strict=True):
            before = clocks.max(axis=1, keepdims=True)
            clocks = self._step(clocks, self.steps[step])
            clocks = grown(clocks, count - 1, clocks.max(axis=1, keepdims=True) - before)
        return clocks

    def _through(self, clocks: Integers, doing: Integers) -> Integers:
        """Take some steps, those that come again and again, alone or as a lap, as one."""
        single = _repeated(doing, 1)
        lap = self.period if self.period < self.march.size else doing.size
        laps = _repeated(doing, lap) if lap < doing.size else np.ones_like(doing)
        at = 0
        while at < doing.size:
            length, count = 1, int(single[at])
            if count == 1 and laps[at] > LAPS:
                length, count = lap, int(laps[at])
            those = [self.steps[step] for step in doing[at : at + length].tolist()]
            clocks = self._repeat(clocks, those, count)
            at += length * count
        return clocks

    def _repeat(self, clocks: Integers, steps: Sequence[_Step], count: int) -> Integers:
        """Take steps ``count`` times; count on once all clocks grow alike."""
        before = clocks
        for number in range(1, count + 1):
            last = clocks
            for step in steps:
                clocks = self._step(clocks, step)
            if count > 1 and (number < 4 or number % 16 == 0):
                gain = clocks - last
                if (gain == gain[:, :1]).all():
                    return grown(clocks, count - number, gain[:, :1])
            if number % self.period == 0:
                gain = clocks - before
                before = clocks
                laps, rest = divmod(count - number, self.period)
                if laps and (gain == gain[:, :1]).all():
                    return self._repeat(grown(clocks, laps, gain[:, :1]), steps, rest)
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

    def _prepare(self, coming: Integers) -> int:
        """Look at the links of the kinds of steps that come next; return for how many steps."""
        if sum(step.wire.size for step in self.steps) > HELD:
            self.known.clear()
            self.same.clear()
            self.steps.clear()
        kinds, first = np.unique(coming, return_index=True)
        order = np.argsort(first)
        new = [at for at in order.tolist() if int(kinds[at]) not in self.known]
        sends = [self.march.kinds[kinds[at]].sends.shape[1] for at in new]
        count = int(np.searchsorted(np.cumsum(sends) * self.period, BATCH, "right"))
        batch = [int(kinds[at]) for at in new[: max(1, count)]]
        if batch:
            self._look(batch)
        return coming.size if len(batch) == len(new) else int(first[new[len(batch)]])

    def _look(self, batch: list[int]) -> None:
        """Find what the kinds of steps do; many do the same."""
        march = self.march
        targets = [self._peers(march.kinds[kind].sends) for kind in batch]
        sizes = [target.size for target in targets]
        units = [np.repeat(march.kinds[kind].units, self.period) for kind in batch]
        latency, wire = self.fabric.transfer(
            np.concatenate([np.tile(self.ranks, target.shape[0]) for target in targets]),
            np.concatenate([target.ravel() for target in targets]),
            np.concatenate(units),
            np.repeat(np.arange(len(batch)), sizes),
            folded=self.period < march.size,
        )
        last = np.cumsum(sizes).tolist()
        for kind, target, end in zip(batch, targets, last, strict=True):
            part = slice(end - target.size, end)
            late, slow, slots = latency[part], wire[part], march.kinds[kind]
            ways = [(way % self.period).tobytes() for way in (slots.sends, slots.recvs)]
            key = (int(march.alike[kind]), *ways, slots.matches.tobytes())
            key += (late.tobytes(), slow.tobytes())
            if key not in self.same:
                self.same[key] = len(self.steps)
                self.steps.append(self._known(kind, target, late, slow))
            self.known[kind] = self.same[key]

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
