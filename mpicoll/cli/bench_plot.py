"""The plot of a benchmark: busbw, and the ratio to each rival, by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicoll.cli.bench_report import again, is_again, series
from mpicoll.cli.common import human_bytes


def draw(
    rows: Sequence[dict[str, Any]],
    header: Sequence[str],
    file: Path,
    rivals: Sequence[str],
    limit: Mapping[str, Any],
) -> None:
    """Write a row of panels per collective to ``file``: busbw, then the ratio to each rival."""
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    across = 1 + len(rivals)
    figure = Figure(figsize=(5.5 * across, 1.2 + 3.6 * len(collectives)), layout="constrained")
    figure.suptitle("\n".join(header), fontsize=7, color="#666", x=0.01, ha="left")
    grid = figure.subplots(len(collectives), across, squeeze=False)
    for (left, *others), collective in zip(grid, collectives, strict=True):
        found = [row for row in rows if row["collective"] == collective]
        if collective == "barrier":
            left.set_axis_off()  # nothing is sent
            left.set_title(collective, loc="left", fontweight="bold")
        else:
            _bandwidth(left, collective, found, rivals, limit)
        # A rival takes no part in what it does not have.
        for axes, rival in zip(others, rivals, strict=True):
            if any(rival in row["against"] for row in found):
                _ratio(axes, found, rival)
            else:
                axes.set_axis_off()
    figure.savefig(file, dpi=150)


def _bandwidth(
    axes: Any,
    collective: str,
    rows: Sequence[dict[str, Any]],
    rivals: Sequence[str],
    limit: Mapping[str, Any],
) -> None:
    for name, points in series([row for row in rows if not is_again(row)]).items():
        axes.plot(
            [point["bytes"] for point in points],
            [point["busbw"] / 1e9 for point in points],
            marker="o",
            markersize=3.5,
            label=name,
            **({"color": "#444", "linestyle": "--"} if name == "native" else {}),
            **({"color": "#999", "linestyle": ":"} if name in rivals and name != "native" else {}),
        )
    kind = rows[0]["limit"]
    if kind is not None:
        axes.axhline(
            limit[kind]["rate"] / 1e9,
            color="#b00",
            linewidth=1,
            label=f"limit: {kind.replace('_', ' ')}",
        )
    axes.set_title(collective, loc="left", fontweight="bold")
    axes.set_ylabel("busbw, GB/s")
    if any(row["busbw"] > 0 for row in rows):
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    _by_size(axes, rows)


def _ratio(axes: Any, rows: Sequence[dict[str, Any]], rival: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.axhline(1, color="#444", linestyle="--", linewidth=1)
    noise = [row for row in rows if row["algorithm"] == again(rival)]
    axes.fill_between(
        [point["bytes"] for point in noise],
        [point["against"][rival]["interval"][0] for point in noise],
        [point["against"][rival]["interval"][1] for point in noise],
        color="#ddd",
        label="A/A noise",
    )
    for name, points in series([row for row in rows if not is_again(row)]).items():
        found = [point["against"][rival] for point in points if rival in point["against"]]
        if not found:
            continue
        middle = [one["ratio"]["median"] for one in found]
        low, high = zip(*(one["interval"] for one in found), strict=True)
        errors = [
            [max(0.0, m - v) for m, v in zip(middle, low, strict=True)],
            [max(0.0, v - m) for m, v in zip(middle, high, strict=True)],
        ]
        sizes = [point["bytes"] for point in points]
        axes.errorbar(sizes, middle, errors, marker="o", markersize=3.5, capsize=2, label=name)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"time / {rival} (below 1: faster)", loc="left")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    _by_size(axes, rows)


def _by_size(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    sizes = sorted({row["bytes"] for row in rows})
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    shown = sizes[:: -(-len(sizes) // 8)]
    axes.set_xticks(shown, [human_bytes(size) for size in shown], fontsize=8)
    axes.grid(color="#eee")
    axes.spines[["top", "right"]].set_visible(False)
