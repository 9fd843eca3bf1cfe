"""A trace in memory: the files of all ranks on one time axis. Loads no MPI."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mpicoll.cli.intervals import Interval, union
from mpicoll.cli.timeline_clocks import Way, ways
from mpicoll.cli.trace_files import RankFile, RawCall, read_file
from mpicoll.errors import MpicollError

#: A communicator in this trace: its identity, the world ranks, and which of that name it is.
Key: TypeAlias = tuple[str, tuple[int, ...], int]


class TraceError(MpicollError):
    """A folder has no trace that can be read."""


class Stage(NamedTuple):
    """A step of a call; peers are world ranks, one entry per message."""

    step: int
    posted: float
    worked: float
    done: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    bytes_received: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call of one rank. ``waits`` are the times in Wait of a non-blocking one."""

    rank: int
    key: Key
    sequence: int
    collective: str
    form: str
    algorithm: str
    operator: str
    dtype: str
    count: int
    nbytes: int
    root: int
    start: float
    end: float
    site: str
    error: str
    stages: tuple[Stage, ...]
    waits: tuple[Interval, ...] = ()

    @property
    def blocking(self) -> bool:
        """Whether the rank was in this call, and nowhere else, from start to end."""
        return self.form == "blocking"


class Region(NamedTuple):
    """A phase of the user's own."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank did, in the order of time."""

    rank: int
    host: str
    calls: tuple[Call, ...]
    regions: tuple[Region, ...]
    cost: float  #: seconds that the trace itself took
    ended: bool  #: whether the file has its last line
    waits_known: bool  #: whether it was written how long Wait took


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks; times are seconds since the first event, on one clock.

    ``error`` bounds how far the clocks of two ranks may still be apart; ``offset`` and
    ``drift`` (seconds per second) are the largest that were removed. ``faults`` are what
    was wrong with the files, ``notes`` what is good to know.
    """

    ranks: Mapping[int, Rank]
    names: Mapping[Key, str]
    seconds: float
    whole: float  #: seconds before a window was cut out
    size: int
    error: float
    offset: float
    drift: float
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def matched(self) -> list[dict[int, Call]]:
        """Return the calls by world rank, one mapping per collective, in order of time."""
        found: dict[tuple[Key, int], dict[int, Call]] = defaultdict(dict)
        for rank in self.ranks.values():
            for call in rank.calls:
                found[call.key, call.sequence][rank.rank] = call
        return sorted(found.values(), key=lambda calls: min(one.start for one in calls.values()))

    def window(self, low: float, high: float) -> Timeline:
        """Return the collectives, whole, and the regions that touch ``low`` to ``high``."""
        kept = {
            (call.key, call.sequence)
            for rank in self.ranks.values()
            for call in rank.calls
            if call.start <= high and call.end >= low
        }

        def touched(rank: Rank) -> Rank:
            calls = tuple(one for one in rank.calls if (one.key, one.sequence) in kept)
            regions = tuple(one for one in rank.regions if one.start <= high and one.end >= low)
            return replace(rank, calls=calls, regions=regions)

        return replace(
            self,
            ranks={number: touched(rank) for number, rank in self.ranks.items()},
            seconds=max(0.0, min(high, self.seconds) - max(low, 0.0)),
        )


def read(folder: Path) -> Timeline:
    """Read the trace of a folder; raise TraceError if there is none.

    Files that are broken, of another run or missing are named in ``faults``; the rest is
    read.
    """
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise TraceError(
            f"{folder} has no rank-*.jsonl; take a trace with MPICOLL_TRACE={folder} in the "
            "environment of the ranks"
        )
    files = [read_file(path) for path in paths]
    faults = [fault for file in files for fault in file.faults]
    usable = [file for file in files if file.rank >= 0]
    if not usable:
        raise TraceError("\n".join(faults))
    files, foreign = _one_run(usable)
    faults += foreign
    present = {file.rank for file in files}
    size = files[0].size
    wanted = {rank for file in files for one in file.joins for rank in one.ranks}
    if missing := sorted((wanted or set(range(size))) - present):
        faults.append(
            f"no file of rank{'s' * (len(missing) != 1)} {spans(missing)}; if the ranks do not "
            "share the folder, copy their rank-*.jsonl into one"
        )
    known, error = ways(files)
    return _merge(files, known, error, faults)


def spans(numbers: Iterable[int]) -> str:
    """Return sorted numbers as ``0-3, 7``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


# -- which files belong together --------------------------------------------------------


def _one_run(files: list[RankFile]) -> tuple[list[RankFile], list[str]]:
    """Return the files of the latest run, and what to say of the others.

    Ranks that compared their clocks are of one run.
    """
    parent: dict[str, str] = {}

    def root(run: str) -> str:
        while parent.setdefault(run, run) != run:
            run = parent[run]
        return run

    for file in files:
        for clock in file.clocks:
            parent[root(clock.run)] = root(file.run)
    latest = root(max(files, key=lambda file: file.date).run)
    ours = [file for file in files if root(file.run) == latest]
    sizes = Counter(file.size for file in ours)
    size = sizes.most_common(1)[0][0]
    kept = [file for file in ours if file.size == size and file.rank < size]
    faults = [
        f"{file.path.name} is of another run ({file.size} ranks) and left out; delete it"
        for file in files
        if file not in kept
    ]
    return kept, faults


# -- one timeline -----------------------------------------------------------------------


def _merge(
    files: list[RankFile], known: Mapping[int, Way], error: float, faults: list[str]
) -> Timeline:
    notes: list[str] = []
    names: dict[Key, str] = {}
    for file in files:
        if file.rank not in known:
            faults.append(
                f"the clock of rank {file.rank} was never compared with the others': its times "
                "are taken as they are"
            )
    way = {file.rank: known.get(file.rank, Way()) for file in files}
    times = [way[file.rank](t) for file in files for t in (file.first, file.last) if t]
    zero = min(times, default=0.0)

    def axis(rank: int) -> Callable[[float], float]:
        ahead = way[rank]
        return lambda t: (ahead(t) - zero) * 1e-9

    ranks = {file.rank: _rank(file, axis(file.rank), names, faults, notes) for file in files}
    if early := [rank.rank for rank in ranks.values() if not rank.ended]:
        notes.append(
            f"the trace of rank{'s' * (len(early) != 1)} {spans(early)} has no end: the run was "
            "ended from outside, or still goes on"
        )
    if once := sorted(rank for rank, one in way.items() if one.error and not one.drift):
        notes.append(
            f"the clock of rank{'s' * (len(once) != 1)} {spans(once)} was compared only once, at "
            "the start: its drift, some microseconds a second, is not removed"
        )
    seconds = (max(times, default=0.0) - zero) * 1e-9
    return Timeline(
        ranks=ranks,
        names=names,
        seconds=seconds,
        whole=seconds,
        size=files[0].size,
        error=error * 1e-9,
        offset=max((one.offset for one in way.values()), default=0) * 1e-9,
        drift=max((one.drift for one in way.values()), default=0.0),
        faults=tuple(faults),
        notes=tuple(notes),
    )


def _rank(
    file: RankFile,
    axis: Callable[[float], float],
    names: dict[Key, str],
    faults: list[str],
    notes: list[str],
) -> Rank:
    """Return a file on the time axis; calls that can not be placed are faults."""
    keys: dict[str, Key] = {}
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    joins = deque(file.joins)
    waits: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for wait in file.waits:
        waits[wait.communicator, wait.sequence].append((axis(wait.start), axis(wait.end)))
    calls = []
    for raw in file.calls:
        while joins and joins[0].line < raw.line:
            join = joins.popleft()
            seen[join.identity, join.ranks] += 1
            key = keys[join.identity] = (
                *(join.identity, join.ranks),
                seen[join.identity, join.ranks],
            )
            names[key] = join.name or join.identity
        if fault := _misplaced(raw, keys):
            faults.append(f"{file.path.name}, line {raw.line}: {fault}")
            continue
        key = keys[raw.communicator]
        if not raw.end:
            notes.append(
                f"rank {file.rank} was still in {raw.collective} {raw.sequence} of {names[key]} "
                "when its trace ended"
            )
        own = waits.get((raw.communicator, raw.sequence), [])
        calls.append(_call(file, raw, key, axis, tuple(union(own))))
    return Rank(
        rank=file.rank,
        host=file.host,
        calls=tuple(sorted(calls, key=lambda call: (call.start, -call.end))),
        regions=tuple(
            Region(name, axis(start), axis(end))
            for name, start, end in sorted(file.regions, key=lambda one: (one[1], -one[2]))
        ),
        cost=file.cost,
        ended=file.ended,
        waits_known=bool(file.waits),
    )


def _misplaced(raw: RawCall, keys: Mapping[str, Key]) -> str:
    """Return why a call can not be placed, or an empty string."""
    if raw.communicator not in keys:
        return f"a call on communicator {raw.communicator!r}, which was not joined before"
    size = len(keys[raw.communicator][1])
    for stage in raw.stages:
        for peer in (*stage[4], *stage[5]):
            if not 0 <= peer < size:
                return f"peer {peer}, but communicator {raw.communicator!r} has {size} ranks"
    return ""


def _call(
    file: RankFile,
    raw: RawCall,
    key: Key,
    axis: Callable[[float], float],
    waits: tuple[Interval, ...],
) -> Call:
    world = key[1]
    stages = tuple(
        Stage(
            *(step, axis(posted), axis(worked), axis(done)),
            tuple(world[peer] for peer in sources),
            tuple(world[peer] for peer in targets),
            *(received, sent),
        )
        for step, posted, worked, done, sources, targets, received, sent in raw.stages
    )
    return Call(
        rank=file.rank,
        key=key,
        sequence=raw.sequence,
        collective=raw.collective,
        form=raw.form,
        algorithm=raw.algorithm,
        operator=raw.operator,
        dtype=raw.dtype,
        count=raw.count,
        nbytes=raw.nbytes,
        root=raw.root,
        start=axis(raw.start),
        end=axis(raw.end or file.last),
        site=raw.site,
        error=raw.error,
        stages=stages,
        waits=waits,
    )
