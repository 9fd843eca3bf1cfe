"""Reads the dumps of the flight recorder: those of all ranks of one run, each held to its form."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll.runtime.flight import FORM
from mpicoll.runtime.record import Record

#: Seconds by which the clocks of two hosts may differ before a dump is taken for an older run's.
SLACK = 5.0
#: More ranks than any communicator has; a broken file must not fill the memory.
_MOST_RANKS = 1 << 24


class Frame(NamedTuple):
    """A place in the stack of a rank; ``ours`` if it is in this package."""

    file: str
    line: int
    function: str
    ours: bool


class Group(NamedTuple):
    """A communicator: its name, and the world rank of each of its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank wrote; times of its calls are of its own counter."""

    file: str
    rank: int
    world: int
    job: str
    joined: float
    host: str
    pid: int
    mpi: str
    version: str
    reason: str
    counter: float
    wall: float
    stack: tuple[Frame, ...]
    groups: dict[str, Group]
    calls: tuple[Record, ...]

    def wall_of(self, counter: float) -> float:
        """Return the wall clock at a time of the counter."""
        return self.wall + counter - self.counter

    @property
    def inside(self) -> bool:
        """Whether the main thread was in this package, so waiting in a collective."""
        return bool(self.stack) and self.stack[0].ours


class Found(NamedTuple):
    """The dumps of one run by rank, and what is wrong with the other files."""

    dumps: dict[int, Dump]
    faults: tuple[str, ...]


def read(folder: Path) -> Found:
    """Return the dumps in ``folder``; files that are not of one run are named and left out."""
    dumps, faults = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            dumps.append(parse(path.name, path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            faults.append(f"{path.name}: {error}")
    chosen, left = of_one_run(dumps)
    return Found(chosen, (*faults, *left))


def of_one_run(dumps: list[Dump]) -> tuple[dict[int, Dump], list[str]]:
    """Return the dumps of the newest run by rank, and why the others are left out."""
    if not dumps:
        return {}, []
    newest = max(dumps, key=lambda dump: dump.wall)
    same = [dump for dump in dumps if (dump.world, dump.job) == (newest.world, newest.job)]
    # All ranks wrap their first communicator together, and dump after that.
    joined = max(dump.joined for dump in same)
    faults, chosen = [], dict[int, Dump]()
    for dump in sorted(dumps, key=lambda dump: (-dump.wall, dump.file)):
        if dump not in same:
            job = f" (job {dump.job})" if dump.job else ""
            faults.append(f"{dump.file}: of another run, with {dump.world} rank(s){job}")
        elif dump.wall < joined - SLACK:
            faults.append(f"{dump.file}: of an earlier run, written before this one began")
        elif dump.rank in chosen:
            faults.append(f"{dump.file}: older than {chosen[dump.rank].file}, of the same rank")
        else:
            chosen[dump.rank] = dump
    return dict(sorted(chosen.items())), faults


def parse(file: str, text: str) -> Dump:
    """Return the dump that ``text`` is; raise ValueError if it is none or broken."""
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"broken: no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("kind") != "mpicoll flight":
        raise ValueError("not a dump of the flight recorder")
    if data.get("form") != FORM:
        raise ValueError(
            f"of form {data.get('form')}, written by mpicoll {data.get('mpicoll')}; this one "
            f"reads form {FORM}"
        )
    try:
        return _dump(file, data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"broken: {what}") from None


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word} is no finite number")
    return number


def _whole(word: str) -> int:
    if len(word) > 20:  # a 64-bit integer has so many
        raise ValueError(f"{word[:20]}… is too large a number")
    return int(word)


def _dump(file: str, data: dict[str, Any]) -> Dump:
    clock = _typed(data, "clock", dict)
    groups = {
        _typed(one, "identity", str): Group(_typed(one, "name", str), _ranks(one))
        for one in _typed(data, "communicators", list)
    }
    calls = tuple(_record(one) for one in _typed(data, "calls", list))
    for call in calls:
        known = groups.get(call.communicator)
        if known and not all(0 <= rank < len(known.ranks) for rank in call.waits):
            raise ValueError(f"a call waits for ranks {call.waits} of {len(known.ranks)}")
    rank, world = _typed(data, "rank", int), _typed(data, "world", int)
    if not 0 <= rank < world <= _MOST_RANKS:
        raise ValueError(f"rank {rank} of {world}")
    return Dump(
        file=file,
        rank=rank,
        world=world,
        job=_typed(data, "job", str),
        joined=_number(data, "joined"),
        host=_typed(data, "host", str),
        pid=_typed(data, "pid", int),
        mpi=_typed(data, "mpi", str),
        version=_typed(data, "mpicoll", str),
        reason=_typed(data, "reason", str),
        counter=_number(clock, "counter"),
        wall=_number(clock, "wall"),
        stack=tuple(_frame(one) for one in _typed(data, "stack", list)),
        groups=groups,
        # A communicator that was freed long ago may be forgotten, and its calls say nothing.
        calls=tuple(call for call in calls if call.communicator in groups),
    )


def _typed(data: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _number(data: dict[str, Any], name: str) -> float:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {type(value).__name__}, expected a number")
    return float(value)


def _ranks(data: dict[str, Any]) -> tuple[int, ...]:
    """Return ranks from their runs (first, count, stride)."""
    found: list[int] = []
    for first, count, stride in _typed(data, "ranks", list):
        if not 0 < count <= _MOST_RANKS - len(found):
            raise ValueError(f"a run of {count} ranks")
        found += [first + step * stride for step in range(count)]
    return tuple(found)


def _frame(data: dict[str, Any]) -> Frame:
    return Frame(
        _typed(data, "file", str),
        _typed(data, "line", int),
        _typed(data, "function", str),
        _typed(data, "ours", bool),
    )


_KINDS: dict[str, type[Any]] = {"str": str, "int": int}


def _record(data: dict[str, Any]) -> Record:
    values: dict[str, Any] = {}
    for field in fields(Record):
        if field.name == "stages":
            continue
        if field.name == "waits":
            values["waits"] = tuple(_typed(data, "waits", list))
        elif field.type == "float":
            values[field.name] = _number(data, field.name)
        else:
            values[field.name] = _typed(data, field.name, _KINDS[str(field.type)])
    return Record(**values)
