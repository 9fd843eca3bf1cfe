"""A timeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

One process per rank; its threads are the blocking calls, the others (as many as were in flight
at once) and the regions of the user. Inside of a call stand its steps and their waiting; arrows
are messages. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicoll.cli.intervals import lanes
from mpicoll.cli.timeline import Call, Rank, Timeline
from mpicoll.cli.timeline_waits import messages

#: Messages that get an arrow, at most: a viewer can not hold any number.
ARROWS = 200_000
_CALLS, _OTHERS, _REGIONS = 0, 100, 200  # first thread of each kind


def write(timeline: Timeline, file: Path) -> int:
    """Write the trace to ``file`` and return the number of events."""
    count = 0
    with open(file, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ns","traceEvents":[')
        for event in events(timeline):
            out.write(",\n" if count else "\n")
            json.dump(event, out, ensure_ascii=False, separators=(",", ":"))
            count += 1
        out.write("\n]}\n")
    return count


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield all events; times are microseconds."""
    place: dict[int, int] = {}
    for rank in timeline.ranks.values():
        name = f"rank {rank.rank} ({rank.host})"
        yield _about("process_name", rank.rank, 0, name=name)
        yield _about("process_sort_index", rank.rank, 0, sort_index=rank.rank)
        for call, thread in _threads(rank):
            place[id(call)] = thread
            yield from _call(timeline, call, thread)
        found = lanes([(one.start, one.end) for one in rank.regions])
        for region, lane in zip(rank.regions, found, strict=True):
            thread = _REGIONS + lane
            yield _span(region.name, "region", rank.rank, thread, region.start, region.end)
        yield from _names(rank, {*found}, {place[id(call)] for call in rank.calls})
    yield from _arrows(timeline, place)


def _threads(rank: Rank) -> Iterator[tuple[Call, int]]:
    for first, blocking in ((_CALLS, True), (_OTHERS, False)):
        calls = [call for call in rank.calls if call.blocking == blocking]
        found = lanes([(call.start, call.end) for call in calls])
        for call, lane in zip(calls, found, strict=True):
            yield call, first + lane


def _names(rank: Rank, regions: set[int], threads: set[int]) -> Iterator[dict[str, Any]]:
    for thread in sorted(threads | {_REGIONS + lane for lane in regions}):
        if thread >= _REGIONS:
            name = "regions"
        else:
            name = "blocking" if thread < _OTHERS else "non-blocking"
        yield _about("thread_name", rank.rank, thread, name=name)
        yield _about("thread_sort_index", rank.rank, thread, sort_index=thread)


def _call(timeline: Timeline, call: Call, thread: int) -> Iterator[dict[str, Any]]:
    about: dict[str, Any] = {
        "communicator": timeline.names[call.key],
        "sequence": call.sequence,
        "form": call.form,
        "operator": call.operator,
        "dtype": call.dtype,
        "count": call.count,
        "bytes": call.nbytes,
        "root": call.root if call.root >= 0 else None,
        "site": call.site,
        "error": call.error,
    }
    about = {name: value for name, value in about.items() if value not in ("", None)}
    name = f"{call.collective} {call.algorithm}".strip()
    yield _span(name, call.collective, call.rank, thread, call.start, call.end, about)
    for stage in call.stages:
        details = {
            "from": list(stage.sources),
            "to": list(stage.targets),
            "bytes_received": stage.bytes_received,
            "bytes_sent": stage.bytes_sent,
        }
        where = (call.rank, thread)
        yield _span(f"step {stage.step}", "step", *where, stage.posted, stage.done, details)
        if stage.worked < stage.done:
            yield _span("wait", "wait", *where, stage.worked, stage.done)


def _arrows(timeline: Timeline, place: dict[int, int]) -> Iterator[dict[str, Any]]:
    number = 0
    for calls in timeline.matched():
        for source, sent, target, received in messages(calls):
            if number >= ARROWS:
                return
            number += 1
            common = {"name": "message", "cat": "message", "id": number}
            for kind, rank, t in (("s", source, sent.posted), ("f", target, received.done)):
                where = {"pid": rank, "tid": place[id(calls[rank])], "ts": _us(t)}
                yield {**common, "ph": kind, **where, **({"bp": "e"} if kind == "f" else {})}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _span(
    name: str,
    category: str,
    rank: int,
    thread: int,
    start: float,
    end: float,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    event: dict[str, Any] = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
    # The end is rounded and not the length, so that what lies inside stays inside.
    event |= {"ts": _us(start), "dur": round(_us(end) - _us(start), 3)}
    return {**event, "args": about} if about else event


def _about(kind: str, rank: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": values}
