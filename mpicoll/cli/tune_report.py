"""What `mpicoll tune` shows."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicoll.cli.common import human_bytes, human_seconds, three
from mpicoll.selection.model import Rates

FAR = 1.3  #: times the best, from where on the default choice counts as far off


def show_rates(screen: Console, ranks: int, rates: Rates, off: float, file: str) -> None:
    """Show the rates of the cost model and where they are kept."""
    screen.print(
        f"\n[bold]Rates on {ranks} ranks[/bold], {rates.load:g} on a core: "
        f"step {human_seconds(rates.step)}, message {human_seconds(rates.message)}, "
        f"byte {rates.byte * 1e9:.3g} ns, byte reduced or copied {rates.local * 1e9:.3g} ns; "
        f"probes off by a factor {three(off)} (median)"
    )
    if file:
        screen.print(f"[dim]kept in {file}[/dim]", soft_wrap=True)
    screen.print()


def show(screen: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Show the rows of one collective."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head, justify in (
        ("size", "right"),
        ("default", "left"),
        ("", "right"),
        ("best", "left"),
        ("", "right"),
        ("gain", "left"),
    ):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        same = row["best"] == row["default"]
        low, high = row["interval"]
        table.add_row(
            human_bytes(row["bytes"]) if row["collective"] != "barrier" else "",
            row["default"],
            human_seconds(row["default_seconds"]),
            "the same" if same else row["best"],
            "" if same else human_seconds(row["best_seconds"]),
            "" if same else f"{three(row['gain'])} ({three(low)}–{three(high)})",
            style="dim" if same else "",
        )
    first = rows[0]
    screen.print(f"[bold]{first['collective']}[/bold], {first['ranks']} ranks")
    screen.print(table)
    for row in rows:
        for name, fault in row["faults"].items():
            screen.print(f"[bold red]WRONG {human_bytes(row['bytes'])} {name}:[/] {fault}")
    screen.print()


def conclude(screen: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Say what the table gains over the default choice, and how far that is from the best."""
    if not rows:
        return
    gains = [row["gain"] for row in rows]
    better = [row for row in rows if row["best"] != row["default"]]
    mean = exp(sum(map(log, gains)) / len(gains))
    if not better:
        screen.print(
            f"The default choice is the best, within the noise, for all {len(rows)} collectives "
            "and sizes."
        )
        return
    screen.print(
        f"Over the default choice: another algorithm for {len(better)} of {len(rows)} collectives "
        f"and sizes; the default takes {three(mean)} times as long as the table (geometric mean)."
    )
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        mine = [row for row in rows if row["ranks"] == ranks]
        most = max(mine, key=lambda row: row["gain"])
        if most["gain"] <= 1:
            screen.print(f"{ranks} ranks: the default is the best everywhere, within the noise.")
            continue
        far = sum(row["gain"] > FAR for row in mine)
        screen.print(
            f"{ranks} ranks: the default is more than {FAR:g} times the best in {far} of "
            f"{len(mine)}; at most {three(most['gain'])} ({most['collective']}, "
            f"{human_bytes(most['bytes'])})."
        )
