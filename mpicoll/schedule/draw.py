"""Pictures of schedules: as text to read, and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from mpicoll.errors import ScheduleError
from mpicoll.schedule.cost import cost
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Buffer,
    Copy,
    Local,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)

VERSION = 1  #: of the form that `as_json` writes and `from_json` reads

_COLUMNS = 8  # the most ranks that are drawn side by side
_WIDTH = 36  # of a column, which one long item may exceed
_NAMES = {INPUT: "in", OUTPUT: "out", WORK: "work"}
_LEGEND = (
    "→ sends to, ← receives from, = local work while the step's messages are in flight;\n"
    "last: steps with a message, messages and elements sent"
)


def text(collective: str, name: str, schedules: Sequence[Schedule]) -> str:
    """Return a picture of the schedules of all ranks: a row per step, a column per rank.

    The steps of one row need not happen at one time: each rank goes on when its own
    messages are done. More than 8 ranks are drawn one after another.
    """
    size = len(schedules)
    ranks = f"{size} rank{'s' if size != 1 else ''}"
    body = _side_by_side(schedules) if size <= _COLUMNS else _by_rank(schedules)
    return "\n".join([f"{collective} {name}, {ranks}", _LEGEND, "", *body]) + "\n"


def _side_by_side(schedules: Sequence[Schedule]) -> Iterator[str]:
    """Yield the lines of a table whose columns are ranks."""
    rows: list[tuple[str, list[list[str]]]] = [
        ("step", [[f"rank {rank}"] for rank in range(len(schedules))])
    ]
    headings = {}
    heading = ""
    for number, steps in enumerate(zip_longest(*(schedule.steps for schedule in schedules))):
        phases = {step.phase for step in steps if step}
        if len(phases) == 1 and phases != {heading}:
            heading = phases.pop()
            headings[len(rows)] = heading
        rows.append((str(number), [_cell(step, heading) if step else [] for step in steps]))
    costs = [cost(schedule) for schedule in schedules]
    totals = len(rows)
    rows.append(("steps", [[str(item.steps)] for item in costs]))
    rows.append(("messages", [[str(item.messages_sent)] for item in costs]))
    rows.append(("elements", [[str(item.sent)] for item in costs]))
    widths = [
        max(len(line) for _, cells in rows for line in (*cells[rank], ""))
        for rank in range(len(schedules))
    ]
    rule = "─" * 9 + "".join("┼" + "─" * (width + 2) for width in widths)
    for number, (label, cells) in enumerate(rows):
        if number in (1, totals):
            yield rule
        if headings.get(number):
            yield headings[number]
        for at, line in enumerate(zip_longest(*cells, fillvalue="")):
            padded = "".join(
                f"│ {item:{width}} " for item, width in zip(line, widths, strict=True)
            )
            yield f"{'' if at else label:>8} {padded}".rstrip()


def _by_rank(schedules: Sequence[Schedule]) -> Iterator[str]:
    """Yield one paragraph per rank."""
    for rank, schedule in enumerate(schedules):
        yield f"rank {rank}"
        phase = ""
        for number, step in enumerate(schedule.steps):
            if step.phase != phase:
                phase = step.phase
                yield f"     {phase}"
            for at, line in enumerate(_cell(step, phase, 2 * _WIDTH)):
                yield f"{'' if at else number:>4} {line}"
        item = cost(schedule)
        yield f"   = {item.steps} steps, {item.messages_sent} messages, {item.sent} elements sent"
        yield ""


def _cell(step: Step, heading: str, width: int = _WIDTH) -> list[str]:
    """Return the lines of one step; its phase is named if the heading does not."""
    lines = [] if step.phase == heading else [f"({step.phase})"]
    lines += _filled(
        [f"→{send.peer} {_span(send.span)}" for send in step.sends]
        + [f"←{recv.peer} {_span(recv.span)}" for recv in step.recvs],
        "  ",
        width,
    )
    for item in step.local:
        lines += _filled(_words(item), " ", width)
    return lines


def _words(item: Local) -> list[str]:
    """Return local work in parts between which a line may break."""
    operands = (item.source,) if isinstance(item, Copy) else item.operands
    first, *others = map(_span, operands)
    return [f"{_span(item.target)} = {first}", *(f"op {operand}" for operand in others)]


def _filled(words: Iterable[str], gap: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
        else:
            lines.append("  " + word if word.startswith("op ") else word)
    return lines


def _span(span: Span) -> str:
    return f"{_NAMES[span.buffer]}[{span.start}:{span.stop}]"


def as_json(schedules: Sequence[Schedule]) -> dict[str, Any]:
    """Return the schedules of all ranks as dicts, lists, strings and numbers.

    A span is ``[buffer, start, stop]``; `from_json` is the inverse.
    """
    return {
        "version": VERSION,
        "schedules": [
            {"work": schedule.work, "steps": [_step_to_json(step) for step in schedule.steps]}
            for schedule in schedules
        ],
    }


def from_json(data: dict[str, Any]) -> list[Schedule]:
    """Return the schedules that `as_json` wrote; other data raises ScheduleError."""
    try:
        if data["version"] != VERSION:
            raise ScheduleError(f"schedules of version {data['version']}, expected {VERSION}")
        return [
            Schedule(tuple(map(_step_from_json, item["steps"])), int(item["work"]))
            for item in data["schedules"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"not the form that as_json writes: {error!r}") from error


def _step_to_json(step: Step) -> dict[str, Any]:
    return {
        "phase": step.phase,
        "recvs": [{"peer": peer, "span": _span_to_json(span)} for peer, span in step.recvs],
        "sends": [{"peer": peer, "span": _span_to_json(span)} for peer, span in step.sends],
        "local": [_local_to_json(item) for item in step.local],
    }


def _step_from_json(data: dict[str, Any]) -> Step:
    return Step(
        tuple(Recv(int(item["peer"]), _span_from_json(item["span"])) for item in data["recvs"]),
        tuple(Send(int(item["peer"]), _span_from_json(item["span"])) for item in data["sends"]),
        tuple(map(_local_from_json, data["local"])),
        str(data["phase"]),
    )


def _local_to_json(item: Local) -> dict[str, Any]:
    target = _span_to_json(item.target)
    if isinstance(item, Copy):
        return {"kind": "copy", "target": target, "source": _span_to_json(item.source)}
    return {"kind": "reduce", "target": target, "operands": [*map(_span_to_json, item.operands)]}


def _local_from_json(data: dict[str, Any]) -> Local:
    target = _span_from_json(data["target"])
    if data["kind"] == "copy":
        return Copy(target, _span_from_json(data["source"]))
    if data["kind"] == "reduce":
        return Reduce(target, tuple(map(_span_from_json, data["operands"])))
    raise ValueError(f"local work of kind {data['kind']!r}")


def _span_to_json(span: Span) -> list[Any]:
    return [span.buffer.value, span.start, span.stop]


def _span_from_json(data: list[Any]) -> Span:
    buffer, start, stop = data
    return Span(Buffer(buffer), int(start), int(stop))
