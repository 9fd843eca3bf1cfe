"""Space-time diagrams of schedules: SVG by hand, PNG by Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mpicoll.cli.spacetime import Arrow, Diagram, diagram
from mpicoll.schedule.ir import Schedule

#: Okabe and Ito's colours, told apart by people who see fewer colours too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
REDUCE = "#222222"

_LEFT, _TOP, _BOTTOM = 64, 92, 44
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #222 }
.title { font-size: 17px; font-weight: 600 }
.quiet { fill: #777; font-size: 12px }
.rank { font-weight: 600; text-anchor: middle }
.time { text-anchor: end }
.lane { stroke: #bbb; stroke-width: 1.5 }
.row { stroke: #eee }
"""


def _pitch(size: int) -> int:
    return 90 if size <= 10 else max(24, 900 // size)


def _width(arrow: Arrow, largest: int) -> float:
    return 1.2 + 2.3 * arrow.count / max(1, largest)


def svg(title: str, schedules: Sequence[Schedule]) -> str:
    """Return a diagram: ranks are columns, time goes down, an arrow is a message.

    Width of a line: elements of the message. Every arrow has a tooltip.
    """
    plan = diagram(schedules)
    across = _pitch(plan.size)
    down = max(36, min(76, 900 // max(1, plan.time)))
    width = max(_LEFT + across * (plan.size - 1) + 64, 640)
    height = _TOP + down * plan.time + _BOTTOM
    colours = _colours(plan)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        "<defs>" + "".join(_head(number, colour) for number, colour in enumerate(COLOURS)),
        "</defs>",
        f'<text class="title" x="24" y="30">{escape(title)}</text>',
        *_legend(colours),
    ]
    for time in range(plan.time + 1):
        y = _TOP + down * time
        right = _LEFT + across * (plan.size - 1)
        parts.append(f'<line class="row" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text class="quiet time" x="{_LEFT - 22}" y="{y + 4}">{time}</text>')
    for rank in range(plan.size):
        x = _LEFT + across * rank
        bottom = _TOP + down * plan.time
        parts.append(f'<text class="rank" x="{x}" y="{_TOP - 14}">{rank}</text>')
        parts.append(f'<line class="lane" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>')
    largest = max((arrow.count for arrow in plan.arrows), default=1)
    for arrow in plan.arrows:
        number = colours[arrow.phase]
        x1, y1 = _LEFT + across * arrow.source, _TOP + down * arrow.sent
        x2, y2 = _LEFT + across * arrow.target, _TOP + down * arrow.arrived
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        gap = 7 / length
        ends = (
            f'x1="{x1 + (x2 - x1) * gap:.1f}" y1="{y1 + (y2 - y1) * gap:.1f}" '
            f'x2="{x2 - (x2 - x1) * gap:.1f}" y2="{y2 - (y2 - y1) * gap:.1f}"'
        )
        parts.append(
            f'<line {ends} stroke="{COLOURS[number]}" stroke-opacity="0.85" '
            f'stroke-width="{_width(arrow, largest):.1f}" marker-end="url(#a{number})">'
            f"<title>{escape(_tooltip(arrow))}</title></line>"
        )
    for mark in plan.marks:
        x, y = _LEFT + across * mark.rank, _TOP + down * mark.time
        fill = REDUCE if mark.reduces else "#fff"
        word = "reduces" if mark.reduces else "copies"
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{REDUCE}">'
            f"<title>rank {mark.rank} {word} {mark.count} elements</title></circle>"
        )
    parts.append(
        f'<text class="quiet" x="24" y="{height - 14}">ranks across, time down (a message '
        "takes one unit); thicker: more elements</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colours(plan: Diagram) -> dict[str, int]:
    return {phase: number % len(COLOURS) for number, phase in enumerate(plan.phases)}


def _head(number: int, colour: str) -> str:
    return (
        f'<marker id="a{number}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0.8 L8 4 L0 7.2 z" fill="{colour}"/></marker>'
    )


def _legend(colours: dict[str, int]) -> list[str]:
    x, parts = 24, []
    for phase, number in colours.items():
        parts.append(
            f'<line x1="{x}" y1="50" x2="{x + 22}" y2="50" stroke="{COLOURS[number]}" '
            f'stroke-width="3"/><text x="{x + 28}" y="54">{escape(phase or "message")}</text>'
        )
        x += 48 + 8 * len(phase or "message")
    for fill, word in ((REDUCE, "reduces"), ("#fff", "copies")):
        parts.append(
            f'<circle cx="{x + 6}" cy="50" r="4.5" fill="{fill}" stroke="{REDUCE}"/>'
            f'<text x="{x + 16}" y="54">{word}</text>'
        )
        x += 88
    return parts


def _tooltip(arrow: Arrow) -> str:
    return f"rank {arrow.source} → rank {arrow.target}: {arrow.count} elements, {arrow.span}" + (
        f" ({arrow.phase})" if arrow.phase else ""
    )


def png(title: str, schedules: Sequence[Schedule], file: Path) -> None:
    """Write the same diagram as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    plan = diagram(schedules)
    colours = _colours(plan)
    figure = Figure(
        figsize=(max(6.0, 1 + 0.9 * min(plan.size, 16)), max(3.0, 1.6 + 0.55 * plan.time)),
        layout="constrained",
    )
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", pad=24)
    largest = max((arrow.count for arrow in plan.arrows), default=1)
    for rank in range(plan.size):
        axes.plot([rank, rank], [0, plan.time], color="#bbb", zorder=1)
    for arrow in plan.arrows:
        axes.annotate(
            "",
            (arrow.target, arrow.arrived),
            (arrow.source, arrow.sent),
            arrowprops={
                "arrowstyle": "-|>",
                "color": COLOURS[colours[arrow.phase]],
                "linewidth": _width(arrow, largest),
                "shrinkA": 4,
                "shrinkB": 4,
            },
        )
    for mark in plan.marks:
        fill = REDUCE if mark.reduces else "white"
        axes.plot(mark.rank, mark.time, "o", color=REDUCE, markerfacecolor=fill, zorder=3)
    axes.set_ylim(plan.time + 0.3, -0.4)
    axes.set_xticks(range(plan.size))
    axes.set_yticks(range(plan.time + 1))
    axes.set_xlabel("rank")
    axes.set_ylabel("time, in messages")
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color="#eee")
    lines = [
        Line2D([], [], color=COLOURS[number], label=phase or "message", linewidth=2.5)
        for phase, number in colours.items()
    ]
    dots = [
        Line2D([], [], marker="o", linestyle="", color=REDUCE, markerfacecolor=fill, label=word)
        for fill, word in ((REDUCE, "reduces"), ("white", "copies"))
    ]
    axes.legend(
        handles=[*lines, *dots], loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False
    )
    figure.savefig(file, format="png", dpi=150)
