"""The tuning table: which algorithm was measured to be fastest, for which calls.

It may also have, for device memory, up to how many bytes a call is faster through the host.

A table is a JSON file of data. It is checked field by field when it is loaded and never
executed. The checks are written by hand: the core has no library for JSON Schema, and a schema
can not say that ranges do not overlap or that an algorithm exists.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from mpicoll.algorithms import parse_name
from mpicoll.errors import AlgorithmError, SettingError
from mpicoll.schedule.contracts import COLLECTIVES

KIND = "mpicoll tuning table"
FORMS = (1, 2)  #: of the file that are read; raised when a field changes its meaning
MEMORIES = ("host", "device")  #: values of a communicator's memory hint
LARGEST = 1 << 62  #: a "to" that stands for any size

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ranked:
    """An algorithm (with Bruck's radix behind its name), its segment in bytes and its time."""

    algorithm: str
    segment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """Calls of one collective on ``ranks`` ranks with ``low`` to ``high`` bytes.

    ``ranked`` are the candidates in order of preference: a call takes the first that can
    serve it.
    """

    collective: str
    ranks: int
    memory: str
    low: int
    high: int
    ranked: tuple[Ranked, ...]

    @property
    def key(self) -> tuple[str, int, str]:
        """What the entry is for, but for the size."""
        return self.collective, self.ranks, self.memory


@dataclass(frozen=True, slots=True)
class Crossover:
    """How a rank's part of a call on ``ranks`` ranks travels, where the MPI takes device pointers.

    Buffers of at most ``nbytes`` on that rank, those it sends and those it receives together,
    go through the host, longer ones by pointers.
    """

    ranks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """A tuning table. Its hash is computed once, since it is part of every call's settings."""

    entries: tuple[Entry, ...]
    mpi: str = ""
    mpicoll: str = ""
    crossovers: tuple[Crossover, ...] = ()
    _rows: Mapping[tuple[str, int, str], tuple[list[int], list[Entry]]] = field(
        init=False, repr=False, compare=False
    )
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the entries by what they are for."""
        rows: dict[tuple[str, int, str], tuple[list[int], list[Entry]]] = {}
        for entry in sorted(self.entries, key=lambda one: one.low):
            lows, found = rows.setdefault(entry.key, ([], []))
            lows.append(entry.low)
            found.append(entry)
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_hash", hash(self._parts))

    def __hash__(self) -> int:
        """Return the hash of the entries."""
        return self._hash

    def __reduce__(self) -> tuple[type[Table], tuple[Any, ...]]:
        """Leave the hash behind: that of a string differs between processes."""
        return Table, self._parts

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.entries, self.mpi, self.mpicoll, self.crossovers

    def crossover(self, ranks: int) -> int | None:
        """Return the bytes of the crossover on ``ranks`` ranks, None where none was measured."""
        return next((one.nbytes for one in self.crossovers if one.ranks == ranks), None)

    def find(self, collective: str, ranks: int, memory: str, nbytes: int) -> Entry | None:
        """Return the entry for a call, if there is one."""
        row = self._rows.get((collective, ranks, memory))
        if row is None:
            return None
        lows, entries = row
        at = bisect_right(lows, nbytes) - 1
        return entries[at] if at >= 0 and nbytes <= entries[at].high else None


# -- writing ------------------------------------------------------------------------------


def dump(table: Table) -> str:
    """Return the text of a table's file: of form 1 unless it has crossovers."""
    entries = [
        {
            "collective": entry.collective,
            "ranks": entry.ranks,
            "memory": entry.memory,
            "from": entry.low,
            "to": entry.high if entry.high < LARGEST else None,
            "ranked": [
                {"algorithm": one.algorithm, "segment": one.segment, "seconds": one.seconds}
                for one in entry.ranked
            ],
        }
        for entry in table.entries
    ]
    crossovers = [
        {"ranks": one.ranks, "memory": "device", "bytes": one.nbytes} for one in table.crossovers
    ]
    head = {
        "kind": KIND,
        "form": 2 if crossovers else 1,
        "mpicoll": table.mpicoll,
        "mpi": table.mpi,
    }
    lists = ({"crossovers": crossovers} if crossovers else {}) | {"entries": entries}
    body = "".join(f',\n "{name}": {_rows(items)}' for name, items in lists.items())
    return f"{json.dumps(head, ensure_ascii=False)[:-1]}{body}}}\n"


def _rows(items: Sequence[dict[str, Any]]) -> str:
    """Return a list with one item a line."""
    rows = ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in items)
    return f"[\n{rows}\n ]" if rows else "[]"


def merged(old: Table | None, new: Table) -> Table:
    """Return ``new`` with what ``old`` has for other calls."""
    if old is None:
        return new
    keys = {entry.key for entry in new.entries}
    kept = tuple(entry for entry in old.entries if entry.key not in keys)
    order = sorted((*kept, *new.entries), key=lambda one: (*one.key, one.low))
    ranks = {one.ranks for one in new.crossovers}
    others = (one for one in old.crossovers if one.ranks not in ranks)
    crossovers = sorted((*others, *new.crossovers), key=lambda one: one.ranks)
    return Table(tuple(order), new.mpi, new.mpicoll, tuple(crossovers))


# -- reading ------------------------------------------------------------------------------


def load(text: str, file: str, mpi: str = "") -> Table:
    """Return the table in ``text``; ``file`` is named in errors.

    ``mpi`` is name and version of the MPI that runs, "" if it does not matter. A table
    that was measured with an MPI of another name is refused: its times mean nothing here.
    Everything that is wrong raises SettingError with the file, the entry and the reason.
    """
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except ValueError as error:
        raise SettingError(f"{file}: not JSON: {error}") from None
    except RecursionError:
        raise SettingError(f"{file}: not a table: nested too deeply") from None
    try:
        return _table(data, mpi)
    except _Fault as fault:
        raise SettingError(f"{file}: {fault}") from None


class _Fault(Exception):
    """What is wrong, without the file."""


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is there twice")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _table(data: Any, mpi: str) -> Table:
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise _Fault(f'not a tuning table: the field "kind" is not {KIND!r}')
    form = data.get("form")
    if type(form) is not int or form not in FORMS:
        known = " and ".join(map(str, FORMS))
        raise _Fault(
            f"form {form!r}, this mpicoll reads forms {known}; make it anew with mpicoll tune"
        )
    lists = ("entries",) if form == 1 else ("entries", "crossovers")
    _fields(data, ("kind", "form", "mpicoll", "mpi", *lists), "the table")
    theirs = _text(data["mpi"], "mpi")
    if mpi and _family(theirs) != _family(mpi):
        raise _Fault(f"measured with {theirs}, this is {mpi}; make one with mpicoll tune")
    entries = _list(data, "entries", "entry", _entry)
    _apart(entries)
    crossovers = _list(data, "crossovers", "crossover", _crossover) if form > 1 else []
    for number, one in enumerate(crossovers):
        if one.ranks in [other.ranks for other in crossovers[:number]]:
            raise _Fault(f"crossover {number}: there is another one for {one.ranks} ranks")
    mpicoll = _text(data["mpicoll"], "mpicoll")
    return Table(tuple(entries), theirs, mpicoll, tuple(crossovers))


def _list(data: dict[str, Any], name: str, each: str, read: Callable[[Any], _T]) -> list[_T]:
    """Return the items of a list; what is wrong with one is said with its number."""
    if not isinstance(data[name], list):
        raise _Fault(f'"{name}" is {_kind(data[name])}, expected a list')
    found = []
    for number, item in enumerate(data[name]):
        try:
            found.append(read(item))
        except _Fault as fault:
            raise _Fault(f"{each} {number}: {fault}") from None
    return found


def _family(mpi: str) -> str:
    """Return the name of an MPI without its version: "Open MPI" of "Open MPI v5.0.8"."""
    words = mpi.split()
    at = next((i for i, word in enumerate(words) if any(map(str.isdigit, word))), len(words))
    return " ".join(words[:at]).lower()


def _entry(item: Any) -> Entry:
    _fields(item, ("collective", "ranks", "memory", "from", "to", "ranked"), "it")
    collective = _text(item["collective"], "collective", COLLECTIVES)
    low = _whole(item["from"], "from", 0)
    high = LARGEST if item["to"] is None else _whole(item["to"], "to", low)
    if not isinstance(item["ranked"], list) or not item["ranked"]:
        raise _Fault('"ranked" is not a list of at least one algorithm')
    ranked = tuple(_ranked(collective, one) for one in item["ranked"])
    return Entry(
        collective,
        _whole(item["ranks"], "ranks", 1),
        _text(item["memory"], "memory", MEMORIES),
        low,
        high,
        ranked,
    )


def _crossover(item: Any) -> Crossover:
    _fields(item, ("ranks", "memory", "bytes"), "it")
    _text(item["memory"], "memory", ("device",))
    return Crossover(_whole(item["ranks"], "ranks", 1), _whole(item["bytes"], "bytes", 0))


def _ranked(collective: str, item: Any) -> Ranked:
    _fields(item, ("algorithm", "segment", "seconds"), "an item of ranked")
    name = _text(item["algorithm"], "algorithm")
    try:
        parse_name(collective, name)
    except AlgorithmError as error:
        raise _Fault(str(error)) from None
    seconds = item["seconds"]
    if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
        raise _Fault(f'"seconds" is {seconds!r}, expected a number from 0 on')
    return Ranked(name, _whole(item["segment"], "segment", 0), float(seconds))


def _apart(entries: Sequence[Entry]) -> None:
    """Refuse entries for the same calls."""
    order = sorted(range(len(entries)), key=lambda at: (*entries[at].key, entries[at].low))
    for one, next_one in pairwise(order):
        first, second = entries[one], entries[next_one]
        if first.key == second.key and second.low <= first.high:
            raise _Fault(
                f"entries {one} and {next_one} overlap: {first.collective} on {first.ranks} "
                f"ranks, {first.memory} memory, {second.low} bytes is in both"
            )


def _fields(item: Any, names: tuple[str, ...], what: str) -> None:
    if not isinstance(item, dict):
        raise _Fault(f"{what} is {_kind(item)}, expected an object")
    missing = [name for name in names if name not in item]
    if missing:
        raise _Fault(f'{what} has no field "{missing[0]}"')
    unknown = sorted(set(item) - set(names))
    if unknown:
        raise _Fault(f'{what} has an unknown field "{unknown[0]}"; known: {", ".join(names)}')


def _text(value: Any, name: str, known: Sequence[str] = ()) -> str:
    if not isinstance(value, str):
        raise _Fault(f'"{name}" is {_kind(value)}, expected a string')
    if known and value not in known:
        raise _Fault(f'"{name}" is {value!r}; known: {", ".join(known)}')
    return value


def _whole(value: Any, name: str, least: int) -> int:
    if type(value) is not int or not least <= value < LARGEST:
        raise _Fault(f'"{name}" is {value!r}, expected a whole number from {least} on')
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return kinds.get(type(value), "null" if value is None else "a number")
