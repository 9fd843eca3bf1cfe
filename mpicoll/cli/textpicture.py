"""A schedule in the terminal: ranks across, time down, one short word per message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from mpicoll.cli.spacetime import Diagram, diagram
from mpicoll.schedule.ir import Schedule

LEGEND = "→1 sends to rank 1, ←1 receives from rank 1, +2 reduces 2 elements, =2 copies 2 elements"
_STYLES = {"→": "bold", "←": "cyan", "+": "green", "=": "dim"}
_FIRST = 6  # characters of the time
_NARROW, _WIDE = 7, 16  # characters of a cell, as room allows
_GAP = 2


def pictures(schedules: Sequence[Schedule], width: int) -> list[Text]:
    """Return the picture, cut into parts of as many ranks as fit side by side."""
    plan = diagram(schedules)
    cell = max(_NARROW, min(_WIDE, (width - _FIRST) // plan.size - _GAP))
    cells = _cells(plan, cell)
    widest = max((len(line) for lines in cells.values() for line in lines), default=1)
    fit = max(1, (width - _FIRST) // (max(widest, 3) + _GAP))
    # Equal parts look better than a full one and a rest.
    step = -(-plan.size // -(-plan.size // fit))
    return [
        _part(plan, cells, range(low, min(low + step, plan.size)))
        for low in range(0, plan.size, step)
    ]


def _part(plan: Diagram, cells: dict[tuple[int, int], list[str]], ranks: range) -> Text:
    """Return a heading, and per unit of time the phase if it is a new one and the cells."""
    widths = [
        max(3, *(len(line) for (_, at), lines in cells.items() if at == rank for line in lines))
        if any(at == rank for _, at in cells)
        else 3
        for rank in ranks
    ]
    phases: dict[int, set[str]] = defaultdict(set)
    for arrow in plan.arrows:
        if arrow.source in ranks or arrow.target in ranks:
            phases[arrow.sent].add(arrow.phase)
    text = Text("time  ", "dim", no_wrap=True)
    for rank, width in zip(ranks, widths, strict=True):
        text.append(f"r{rank}".ljust(width + _GAP), "bold underline")
    shown: set[str] = set()
    for time in range(plan.time + 1):
        rows = [cells.get((time, rank), []) for rank in ranks]
        new = phases[time] - shown
        shown = phases[time] or shown
        if new - {""}:
            text.append("\n      " + " + ".join(sorted(new)), "dim italic")
        for number, lines in enumerate(zip_longest(*rows, fillvalue="")):
            text.append(f"\n{'' if number else time:>4}  ", "dim")
            for line, width in zip(lines, widths, strict=True):
                for word in line.split(" "):
                    text.append(word, _STYLES.get(word[:1], ""))
                    text.append(" ")
                text.append(" " * (width + _GAP - len(line) - 1))
    text.append("\n")
    return text


def _cells(plan: Diagram, width: int) -> dict[tuple[int, int], list[str]]:
    """Return lines of words by time and rank: local work, then what is sent and received."""
    work: dict[tuple[int, int, str], int] = defaultdict(int)
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    recvs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for mark in plan.marks:
        work[mark.time, mark.rank, "+" if mark.reduces else "="] += mark.count
    for arrow in plan.arrows:
        sends[arrow.sent, arrow.source].append(arrow.target)
        recvs[arrow.arrived - 1, arrow.target].append(arrow.source)
    words: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (time, rank, sign), count in sorted(work.items(), key=lambda item: item[0][2] == "+"):
        words[time, rank].append(f"{sign}{count}")
    for sign, peers in (("→", sends), ("←", recvs)):
        for place, others in peers.items():
            words[place].append(_peers(sign, others))
    return {place: _lines(parts, width) for place, parts in words.items()}


def _peers(sign: str, others: list[int]) -> str:
    """Return messages to some peers in short; many are counted."""
    distinct = sorted(set(others))
    if len(distinct) <= 3:
        return sign + ",".join(map(str, distinct))
    return f"{sign}{len(distinct)} ranks"


def _lines(parts: list[str], width: int) -> list[str]:
    """Fill lines of at most ``width`` characters, or one word."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += " " + part
        else:
            lines.append(part)
    return lines
