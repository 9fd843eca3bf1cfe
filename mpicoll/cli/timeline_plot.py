"""A timeline as a picture: a row per rank, a colour per collective, waiting in light."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpicoll.cli.intervals import Interval
from mpicoll.cli.timeline import Call, Rank, Timeline
from mpicoll.cli.timeline_waits import waiting

ROWS = 64  #: ranks that are drawn, at most
_COLOURS = ("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
_REGION = "#bbb"


def draw(timeline: Timeline, report: dict[str, Any], file: Path, low: float, high: float) -> None:
    """Write a picture of ``low`` to ``high`` seconds to ``file``.

    Of many ranks those that made others wait most are drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    order = sorted(report["by_rank"], key=lambda row: (-row["caused"], row["rank"]))
    shown = sorted(row["rank"] for row in order[:ROWS])
    names = [row["collective"] for row in report["collectives"]]
    colours = {
        name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(sorted(dict.fromkeys(names)))
    }
    scale, unit = _unit(high - low)
    figure = Figure(figsize=(12, 1.6 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, number in enumerate(shown):
        _draw_rank(axes, row, timeline.ranks[number], colours, low, high, scale)
    slowest = report["slowest"]
    axes.set_yticks(range(len(shown)), [f"rank {number}" for number in shown], fontsize=8)
    if slowest and slowest["rank"] in shown:
        label = axes.get_yticklabels()[shown.index(slowest["rank"])]
        label.set_color("C3")
        label.set_fontweight("bold")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(low * scale, high * scale)
    axes.set_xlabel(unit)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    handles.append(Patch(color="#888", alpha=0.35, label="waiting in it (light)"))
    if report["regions"]:
        handles.append(Patch(color=_REGION, label="regions"))
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=8,
        ncols=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    more = f"; {len(shown)} of {len(timeline.ranks)} ranks" * (len(timeline.ranks) > len(shown))
    red = f"; rank {slowest['rank']}, red, is waited for most" if slowest else ""
    figure.suptitle(f"{len(timeline.ranks)} ranks{red}{more}", fontsize=9, x=0.01, ha="left")
    figure.savefig(file, dpi=150)


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if seconds >= 1e-3 else (1e6, "microseconds")


def _draw_rank(
    axes: Any,
    row: int,
    rank: Rank,
    colours: dict[str, str],
    low: float,
    high: float,
    scale: float,
) -> None:
    """Draw regions below, blocking calls in the middle, the others above."""

    def bars(spans: Iterable[Interval], top: float, height: float, **style: Any) -> None:
        cut = [(max(a, low), min(b, high)) for a, b in spans if b >= low and a <= high]
        widths = [(a * scale, (b - a) * scale) for a, b in cut]
        if widths:
            axes.broken_barh(widths, (row + top, height), linewidth=0, **style)

    bars(((one.start, one.end) for one in rank.regions), 0.26, 0.12, color=_REGION)
    for name, colour in colours.items():
        calls = [call for call in rank.calls if call.collective == name]
        for blocking, top, height in ((True, -0.12, 0.36), (False, -0.4, 0.24)):
            found: list[Call] = [call for call in calls if call.blocking == blocking]
            bars(((call.start, call.end) for call in found), top, height, color=colour)
            light = [span for call in found for _, span in waiting(call)]
            bars(light, top, height, color="white", alpha=0.65)
