"""The files of a trace, read and held to their form. Loads no MPI."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mpicoll.runtime.trace import CALL, FORM, file_name

NAMED = 5  #: faults of one file that are named, at most

#: step, posted, worked, done, sources, targets, bytes received, bytes sent.
RawStage: TypeAlias = tuple[int, int, int, int, list[int], list[int], int, int]


class Clock(NamedTuple):
    """This clock minus that of world rank ``reference``; nanoseconds."""

    reference: int
    run: str
    at: int
    offset: int
    error: int


class Join(NamedTuple):
    """A communicator that was wrapped."""

    line: int
    identity: str
    name: str
    rank: int
    ranks: tuple[int, ...]


class RawWait(NamedTuple):
    """Blocked in Wait."""

    communicator: str
    sequence: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as it was written: nanoseconds of the rank's own clock, ranks of the communicator."""

    line: int
    communicator: str
    sequence: int
    collective: str
    form: str
    algorithm: str
    operator: str
    dtype: str
    count: int
    nbytes: int
    root: int
    start: int
    end: int
    site: str
    error: str
    stages: list[RawStage]


@dataclass(slots=True)
class RankFile:
    """What a file says; ``rank`` is -1 if it says nothing that can be used."""

    path: Path
    rank: int = -1
    size: int = 0
    run: str = ""
    host: str = ""
    date: float = 0.0
    clocks: list[Clock] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    waits: list[RawWait] = field(default_factory=list)
    regions: list[tuple[str, int, int]] = field(default_factory=list)
    written: int = 0  #: calls, as the last line has it
    cost: float = 0.0
    ended: bool = False
    first: int = 0
    last: int = 0
    faults: list[str] = field(default_factory=list)


def read_file(path: Path) -> RankFile:
    """Read a file of one rank; what is wrong with it is in ``faults``.

    A last line that is cut off is none: the run was killed there.
    """
    file = RankFile(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        file.faults.append(f"{path.name} can not be read: {error.strerror}")
        return file
    whole, _, _ = data.rpartition(b"\n")
    lines = whole.split(b"\n")
    if fault := _head(file, lines[0]):
        file.faults.append(f"{path.name} {fault}, and is left out")
        return file
    wrong = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            _line(file, number, json.loads(line))
        except ValueError as error:  # of json too
            wrong.append(f"{path.name}, line {number}: {error}")
    file.faults += wrong[:NAMED]
    if len(wrong) > NAMED:
        file.faults.append(f"{path.name}: {len(wrong) - NAMED} more lines that are broken")
    if file.ended and not wrong and file.written != len(file.calls):
        file.faults.append(
            f"{path.name} has {len(file.calls)} calls, but {file.written} were written"
        )
    times = [t for call in file.calls for t in (call.start, call.end) if t]
    times += [t for region in file.regions for t in region[1:]]
    file.first, file.last = min(times, default=0), max(times, default=0)
    return file


def _head(file: RankFile, line: bytes) -> str:
    """Read the first line; return what is wrong with it."""
    try:
        head = json.loads(line)
        form = head["mpicoll_trace"]
        if form != FORM:
            return f"has form {form}, this mpicoll reads form {FORM}"
        rank, size = int(head["rank"]), int(head["size"])
        file.run, file.host, file.date = str(head["run"]), str(head["host"]), float(head["date"])
    except (ValueError, TypeError, KeyError):
        return "does not begin as a trace does"
    if file.path.name != file_name(rank):
        return f"says that it is the file of rank {rank}, expected {file_name(rank)}"
    if not 0 <= rank < size:
        return f"says that it is of rank {rank} of {size}"
    file.rank, file.size = rank, size
    return ""


def _line(file: RankFile, number: int, line: Any) -> None:
    if not isinstance(line, list) or not line or line[0] not in _READERS:
        raise ValueError("no line of a trace")
    try:
        _READERS[line[0]](file, number, *line[1:])
    except (TypeError, ValueError) as error:
        raise ValueError(f"no {line[0]!r} of a trace ({error})") from None


def _clock(
    file: RankFile, _: int, reference: int, run: str, at: int, offset: int, error: int
) -> None:
    file.clocks.append(Clock(int(reference), str(run), int(at), int(offset), int(error)))


def _comm(
    file: RankFile, line: int, identity: str, name: str, rank: int, ranks: list[int]
) -> None:
    file.joins.append(Join(line, identity, name, rank, tuple(int(one) for one in ranks)))


def _call(file: RankFile, line: int, *values: Any) -> None:
    if len(values) != len(CALL) + 1:
        raise ValueError(f"{len(values)} values, expected {len(CALL) + 1}")
    whole = [values[CALL.index(name)] for name in ("sequence", "count", "nbytes", "root")]
    start, end = values[CALL.index("start")], values[CALL.index("end")]
    _whole(*whole, start, end)
    if 0 < end < start or start <= 0:
        raise ValueError(f"from {start} to {end}")
    for step, posted, worked, done, sources, targets, received, sent in values[-1]:
        _whole(step, posted, worked, done, *sources, *targets, received, sent)
        if not posted <= worked <= done:
            raise ValueError(f"step {step}: posted, worked, done are not in this order")
    file.calls.append(RawCall(line, *values))


def _whole(*values: object) -> None:
    for value in values:
        if type(value) is not int:
            raise ValueError(f"{value!r} is no whole number")


def _wait(file: RankFile, _: int, communicator: str, sequence: int, start: int, end: int) -> None:
    file.waits.append(RawWait(communicator, sequence, int(start), int(end)))


def _region(file: RankFile, _: int, name: str, start: int, end: int) -> None:
    file.regions.append((str(name), int(start), int(end)))


def _end(file: RankFile, _: int, calls: int, cost: float) -> None:
    file.written, file.cost, file.ended = int(calls), float(cost), True


_READERS: dict[str, Callable[..., None]] = {
    "clock": _clock,
    "comm": _comm,
    "call": _call,
    "wait": _wait,
    "region": _region,
    "end": _end,
}
