"""What a timeline says in numbers; plain data, as --json writes it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from mpicoll.cli.intervals import common, length, union
from mpicoll.cli.timeline import Call, Key, Timeline
from mpicoll.cli.timeline_waits import blame

KINDS = ("late", "busy", "moving")


class Row(NamedTuple):
    """What calls have in common that are one row of a table."""

    collective: str
    algorithm: str
    form: str


def _table() -> defaultdict[Any, defaultdict[str, float]]:
    return defaultdict(lambda: defaultdict(float))


@dataclass(slots=True)
class _Sums:
    """Seconds of waiting by kind, summed while the collectives are gone through."""

    by_row: defaultdict[Row, defaultdict[str, float]] = field(default_factory=_table)
    by_pair: defaultdict[tuple[int, int], defaultdict[str, float]] = field(default_factory=_table)
    calls: Counter[tuple[int, int]] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    whole: int = 0  #: collectives that all ranks of the communicator are in


def analyse(timeline: Timeline) -> dict[str, Any]:
    """Return the report; times are seconds, ``cost`` and shares parts of 1."""
    sums = _Sums()
    ranks = timeline.ranks.values()
    for calls in timeline.matched():
        _add(sums, calls, timeline.error)
    return {
        "seconds": timeline.seconds,
        "ranks": sorted(timeline.ranks),
        "hosts": len({one.host for one in ranks}),
        "clocks": {
            "error": timeline.error,
            "offset": timeline.offset,
            "drift": timeline.drift,
        },
        "collectives": _collectives(timeline, sums),
        "pairs": _pairs(sums),
        "by_rank": _by_rank(timeline, sums),
        "slowest": _slowest(sums),
        "hidden": _hidden(timeline),
        "regions": _regions(timeline),
        "cost": _share(max((one.cost for one in ranks), default=0.0), timeline.whole),
        "waits_known": any(one.waits_known for one in ranks),
        "faults": list(timeline.faults),
        "notes": list(timeline.notes),
    }


def _row(call: Call) -> Row:
    return Row(call.collective, call.algorithm, call.form)


def _add(sums: _Sums, calls: Mapping[int, Call], error: float) -> None:
    one = next(iter(calls.values()))
    pairs = set()
    for wait in blame(calls):
        sums.by_row[_row(one)][wait.kind] += wait.seconds
        sums.by_pair[wait.rank, wait.cause][wait.kind] += wait.seconds
        if wait.kind != "moving":
            pairs.add((wait.rank, wait.cause))
    for pair in pairs:
        sums.calls[pair] += 1
    if len(calls) == len(one.key[1]) > 1:
        sums.whole += 1
        first, *_, last = sorted((call.start, rank) for rank, call in calls.items())
        if last[0] - first[0] > error:
            sums.last[last[1]] += 1


def exposed(call: Call) -> float:
    """Return how long the rank was kept by a call: all of a blocking one, else the Wait."""
    if call.blocking:
        return call.end - call.start
    return length(common([(call.start, call.end)], call.waits))


def _collectives(timeline: Timeline, sums: _Sums) -> list[dict[str, Any]]:
    rows: dict[Row, list[Call]] = defaultdict(list)
    for rank in timeline.ranks.values():
        for call in rank.calls:
            rows[_row(call)].append(call)
    ranks = len(timeline.ranks)
    found = []
    for row, calls in rows.items():
        kept = sum(map(exposed, calls)) / ranks
        found.append(
            {
                **row._asdict(),
                "calls": len({(call.key, call.sequence) for call in calls}),
                "bytes": median(call.nbytes for call in calls),
                "median": median(call.end - call.start for call in calls),
                "seconds": sum(call.end - call.start for call in calls) / ranks,
                "exposed": kept,
                "share": kept / timeline.seconds if timeline.seconds else 0.0,
                **{kind: sums.by_row[row][kind] / ranks for kind in KINDS},
                "errors": sum(bool(call.error) for call in calls),
            }
        )
    return sorted(found, key=lambda one: -one["exposed"])


def _pairs(sums: _Sums) -> list[dict[str, Any]]:
    found = [
        {
            "rank": rank,
            "waits_for": cause,
            "late": kinds["late"],
            "busy": kinds["busy"],
            "calls": sums.calls[rank, cause],
        }
        for (rank, cause), kinds in sums.by_pair.items()
        if kinds["late"] + kinds["busy"] > 0
    ]
    return sorted(found, key=lambda one: (-one["late"] - one["busy"], one["rank"]))


def _by_rank(timeline: Timeline, sums: _Sums) -> list[dict[str, Any]]:
    waited: dict[int, float] = defaultdict(float)
    caused: dict[int, float] = defaultdict(float)
    for (rank, cause), kinds in sums.by_pair.items():
        waited[rank] += sum(kinds.values())
        caused[cause] += kinds["late"] + kinds["busy"]
    return [
        {
            "rank": number,
            "host": rank.host,
            "in_collectives": sum(map(exposed, rank.calls)),
            "waited": waited[number],
            "caused": caused[number],
            "last": sums.last[number],
        }
        for number, rank in sorted(timeline.ranks.items())
    ]


def _slowest(sums: _Sums) -> dict[str, Any] | None:
    """Return the rank that the others waited for most, None if there was no waiting."""
    caused: dict[int, float] = defaultdict(float)
    for (_, cause), kinds in sums.by_pair.items():
        caused[cause] += kinds["late"] + kinds["busy"]
    total = sum(caused.values())
    if not total:
        return None
    rank = max(caused, key=lambda one: (caused[one], -one))
    return {
        "rank": rank,
        "seconds": caused[rank],
        "share": caused[rank] / total,
        "last": sums.last[rank],
        "calls": sums.whole,
    }


def _hidden(timeline: Timeline) -> list[dict[str, Any]]:
    """Return by row how much of the calls that do not block was hidden.

    ``hidden`` is the share of their time not spent in their Wait, None where the trace does
    not say how long Wait took; ``in_regions`` the share under the user's own regions.
    """
    known = any(rank.waits_known for rank in timeline.ranks.values())
    rows: dict[Row, list[tuple[float, float, float]]] = defaultdict(list)
    numbers: dict[Row, set[tuple[Key, int]]] = defaultdict(set)
    for rank in timeline.ranks.values():
        phases = union((one.start, one.end) for one in rank.regions)
        for call in rank.calls:
            if not call.blocking:
                span = [(call.start, call.end)]
                covered = length(common(span, phases))
                rows[_row(call)].append((call.end - call.start, exposed(call), covered))
                numbers[_row(call)].add((call.key, call.sequence))
    found = []
    for row, times in sorted(rows.items()):
        whole, waited, covered = (sum(column) for column in zip(*times, strict=True))
        found.append(
            {
                **row._asdict(),
                "calls": len(numbers[row]),
                "seconds": whole / len(timeline.ranks),
                "waited": waited / len(timeline.ranks) if known else None,
                "hidden": _share(whole - waited, whole) if known else None,
                "in_regions": _share(covered, whole),
            }
        )
    return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _regions(timeline: Timeline) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for rank in timeline.ranks.values():
        for region in rank.regions:
            times[region.name].append(region.end - region.start)
    return [
        {
            "name": name,
            "count": len(found),
            "seconds": sum(found) / len(timeline.ranks),
            "median": median(found),
        }
        for name, found in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
