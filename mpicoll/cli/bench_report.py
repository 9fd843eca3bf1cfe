"""The tables of a benchmark."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from mpicoll.cli.common import human_bytes, human_rate, human_seconds, three

NATIVE, AGAIN = "native", "native again"
_STYLES = {"faster": "green", "slower": "red", "same": ""}
_MARKS = {"faster": "▼", "slower": "▲", "same": "≈"}


def table(compared: bool) -> Table:
    """Return a table without rows."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("algorithm", no_wrap=True)
    for head in ("min", "median", "p99", "algbw/s", "busbw/s"):
        made.add_column(head, justify="right", no_wrap=True)
    if compared:
        made.add_column("/ native", justify="left", no_wrap=True)
    return made


def add_rows(table: Table, rows: list[dict[str, Any]]) -> None:
    """Add the rows of one size."""
    shown = [row for row in rows if row["algorithm"] != AGAIN]
    for number, row in enumerate(shown):
        times = [human_seconds(row["seconds"][key]) for key in ("min", "median", "p99")]
        moves = row["collective"] != "barrier"
        widths = [human_rate(row[key]) if moves else "—" for key in ("algbw", "busbw")]
        ratio = []
        if len(table.columns) == 8:
            ratio = [_ratio(row) if "ratio" in row else "  1"]
        table.add_row(
            human_bytes(row["bytes"]) if number == 0 and moves else "",
            "[bold red]WRONG[/] " * bool(row["fault"]) + row["algorithm"],
            *times,
            *widths,
            *ratio,
            style="dim" if row["algorithm"] == NATIVE else "",
        )


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    verdict = row["verdict"]
    words = f"{_MARKS[verdict]} {three(row['ratio']['median'])} ({three(low)}–{three(high)})"
    style = _STYLES[verdict]
    return f"[{style}]{words}[/]" if style else words


def conclude(screen: Console, rows: list[dict[str, Any]]) -> None:
    """Say what the noise is, and what is wrong."""
    counts = [row["rounds"] for row in rows]
    faults = sum(bool(row["fault"]) for row in rows)
    notes = f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} rounds."
    if not faults:
        notes = f"The data of timed calls were right; {notes}"
    again = [row for row in rows if row["algorithm"] == AGAIN]
    if again:
        low = min(row["interval"][0] for row in again)
        high = max(row["interval"][1] for row in again)
        middle = [row["ratio"]["median"] for row in again]
        notes += (
            f" ▼ faster, ▲ slower, ≈ within the noise. A/A, native against itself: "
            f"{three(min(middle))} to {three(max(middle))}, 95 % intervals within "
            f"{three(low)}–{three(high)}."
        )
    screen.print(f"[dim]{notes}[/dim]")
    for row in rows:
        if row["fault"]:
            screen.print(
                f"[bold red]{human_bytes(row['bytes'])} {row['algorithm']}:[/] {row['fault']}"
            )
    screen.print()
