"""The plot of a benchmark in the terminal: bars of busbw and of the ratio to a rival, by size."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2, log10
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpicoll.cli.bench_report import is_again, series
from mpicoll.cli.common import human_bytes, human_rate, three

WIDTH = 64  #: columns that all bars of a line share
REACH = 3.0  #: least span of the ratio's axis, in powers of two to either side


def show(screen: Console, rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> None:
    """Print one line per size and contender of one collective."""
    shown = [row for row in rows if not is_again(row)]
    if shown[0]["collective"] == "barrier" or not any(row["busbw"] > 0 for row in shown):
        screen.print("[dim]No plot: nothing is sent.[/dim]\n")
        return
    low, high = decades([row["busbw"] for row in shown if row["busbw"] > 0])
    reach = octaves([one["ratio"]["median"] for row in shown for one in row["against"].values()])
    width = WIDTH // (1 + len(rivals))
    board = _frame(low, high, reach, rivals, width)
    colors = {name: f"color({2 + at % 5})" for at, name in enumerate(series(shown))}
    last = None
    for row in shown:
        size, name = row["bytes"], row["algorithm"].split(":")[0]
        end = along(row["busbw"], low, high)
        board.add_row(
            human_bytes(size) if size != last else "",
            name,
            Bar(1.0, 0.0, end, width=width, color=colors[name]),
            *(_ratio_bar(row["against"].get(rival), reach, width) for rival in rivals),
        )
        last = size
    screen.print(board)
    screen.print()


def decades(rates: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten, as exponents, between which the bars lie."""
    low = float(floor(log10(min(rates))))
    return low, max(low + 1.0, log10(max(rates)))


def octaves(ratios: Sequence[float]) -> float:
    """Return how far the ratio's axis reaches, in powers of two to either side of 1."""
    return max([REACH, *(abs(log2(ratio)) for ratio in ratios)])


def along(rate: float, low: float, high: float) -> float:
    """Return where on its axis a rate lies, 0 to 1."""
    if rate <= 0:
        return 0.0
    return min(1.0, max(0.0, (log10(rate) - low) / (high - low)))


def _ratio_bar(found: dict[str, Any] | None, reach: float, width: int) -> Bar | Text:
    """Return a bar from the middle, where the ratio is 1, to the ratio."""
    if found is None:
        return Text("│".center(width))
    ratio = reach + log2(found["ratio"]["median"])
    color = {"faster": "green", "slower": "red", "same": "default"}[found["verdict"]]
    return Bar(2 * reach, min(reach, ratio), max(reach, ratio), width=width, color=color)


def _frame(low: float, high: float, reach: float, rivals: Sequence[str], width: int) -> Table:
    """Return a table whose heads are the axes."""
    board = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    board.add_column("size", justify="right", no_wrap=True)
    board.add_column("", no_wrap=True)
    ends = [f"{human_rate(10**low)}", f"{human_rate(10**high)}"]
    heads = [("busbw, log" if width > 30 else "busbw", *ends)]
    heads += [(f"/ {rival}", three(2**-reach), three(2**reach)) for rival in rivals]
    for words, left, right in heads:
        room = max(0, width - len(left) - len(right))
        words = words if len(words) < room else ""
        board.add_column(f"{left}{words.center(room)}{right}", no_wrap=True, width=width)
    return board
