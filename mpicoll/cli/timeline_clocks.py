"""One clock for all ranks: offsets and drift, from comparisons that the trace has. No MPI."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from mpicoll.cli.trace_files import Clock, RankFile


@dataclass(frozen=True, slots=True)
class Link:
    """Takes times of one clock to another: offsets at some times, straight lines between."""

    at: tuple[int, ...]
    offset: tuple[int, ...]
    error: int

    def __call__(self, t: float) -> float:
        at, offset = self.at, self.offset
        if len(at) == 1 or t <= at[0]:
            return t - offset[0]
        for number in range(1, len(at)):
            if t <= at[number]:
                before, gone = at[number - 1], t - at[number - 1]
                slope = (offset[number] - offset[number - 1]) / (at[number] - before)
                return t - offset[number - 1] - slope * gone
        return t - offset[-1]

    def back(self) -> Link:
        """Return the way from the other clock to this one."""
        return Link(
            tuple(at - offset for at, offset in zip(self.at, self.offset, strict=True)),
            tuple(-offset for offset in self.offset),
            self.error,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """The links from a rank's clock to the reference's, one after the other."""

    links: tuple[Link, ...] = ()

    def __call__(self, t: float) -> float:
        for link in self.links:
            t = link(t)
        return t

    @property
    def error(self) -> int:
        """How wrong this can be, in nanoseconds."""
        return sum(link.error for link in self.links)

    @property
    def offset(self) -> int:
        """The largest offset that is removed."""
        return sum(max(map(abs, link.offset)) for link in self.links)

    @property
    def drift(self) -> float:
        """How much faster or slower the clock ran, from the first comparison to the last."""
        return sum(
            abs(link.offset[-1] - link.offset[0]) / (link.at[-1] - link.at[0])
            for link in self.links
            if len(link.at) > 1
        )


def ways(files: list[RankFile]) -> tuple[dict[int, Way], float]:
    """Return the way of each rank's times to one clock, and how far two may be apart (ns).

    A rank may have compared its clock with that of several, one per communicator it was
    first met on; the shortest chain to the one that most were compared with counts.
    """
    edges: dict[int, dict[int, Link]] = defaultdict(dict)
    for file in files:
        samples: dict[int, list[Clock]] = defaultdict(list)
        for clock in file.clocks:
            if clock.reference != file.rank:
                samples[clock.reference].append(clock)
        for reference, taken in samples.items():
            link = _link(taken)
            edges[file.rank][reference] = link
            edges[reference].setdefault(file.rank, link.back())
    present = [file.rank for file in files]
    counts = Counter(clock.reference for file in files for clock in file.clocks)
    root = min(present, key=lambda rank: (-counts[rank], rank))
    found, queue = {root: Way()}, [root]
    for rank in queue:
        for other in sorted(edges[rank]):
            if other not in found:
                found[other] = Way((edges[other][rank], *found[rank].links))
                queue.append(other)
    errors = sorted((found[rank].error for rank in present if rank in found), reverse=True)
    return found, float(sum(errors[:2]))


def _link(samples: list[Clock]) -> Link:
    rising = sorted({clock.at: clock for clock in samples}.values(), key=lambda clock: clock.at)
    return Link(
        tuple(clock.at for clock in rising),
        tuple(clock.offset for clock in rising),
        max(clock.error for clock in rising),
    )
