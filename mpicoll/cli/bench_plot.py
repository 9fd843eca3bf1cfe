"""The plot of a benchmark: busbw and the ratio to the MPI's own, by size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicoll.cli.bench_report import AGAIN, NATIVE
from mpicoll.cli.common import human_bytes


def draw(rows: Sequence[dict[str, Any]], header: Sequence[str], file: Path) -> None:
    """Write a row of two panels per collective to ``file``."""
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    figure = Figure(figsize=(11, 1.2 + 3.6 * len(collectives)), layout="constrained")
    figure.suptitle("\n".join(header), fontsize=7, color="#666", x=0.01, ha="left")
    grid = figure.subplots(len(collectives), 2, squeeze=False)
    for (left, right), collective in zip(grid, collectives, strict=True):
        found = [row for row in rows if row["collective"] == collective]
        _bandwidth(left, collective, found)
        _ratio(right, found)
    figure.savefig(file, dpi=150)


def _series(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return rows by contender; the automatic choice is one, whatever it ran."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(row["algorithm"].split(":")[0], []).append(row)
    return series


def _bandwidth(axes: Any, collective: str, rows: Sequence[dict[str, Any]]) -> None:
    for name, points in _series(rows).items():
        if name == AGAIN:
            continue
        style = {"color": "#444", "linestyle": "--"} if name == NATIVE else {}
        axes.plot(
            [point["bytes"] for point in points],
            [point["busbw"] / 1e9 for point in points],
            marker="o",
            markersize=3.5,
            label=name,
            **style,
        )
    axes.set_title(collective, loc="left", fontweight="bold")
    axes.set_ylabel("busbw, GB/s")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    _by_size(axes, rows)


def _ratio(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    series = _series(rows)
    series.pop(NATIVE, None)
    noise = series.pop(AGAIN, [])
    axes.axhline(1, color="#444", linestyle="--", linewidth=1)
    if noise:
        axes.fill_between(
            [point["bytes"] for point in noise],
            [point["interval"][0] for point in noise],
            [point["interval"][1] for point in noise],
            color="#ddd",
            label="A/A noise",
        )
        for name, points in series.items():
            low, high = zip(*(point["interval"] for point in points), strict=True)
            middle = [point["ratio"]["median"] for point in points]
            errors = [
                [max(0.0, m - v) for m, v in zip(middle, low, strict=True)],
                [max(0.0, v - m) for m, v in zip(middle, high, strict=True)],
            ]
            sizes = [point["bytes"] for point in points]
            axes.errorbar(sizes, middle, errors, marker="o", markersize=3.5, capsize=2, label=name)
        axes.legend(frameon=False, fontsize=8)
    axes.set_title("time / native (below 1: faster)", loc="left")
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
