"""What `mpicoll tune` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicoll.cli.bench_report import MARKS
from mpicoll.cli.common import human_bytes, human_seconds, three
from mpicoll.selection.model import Rates
from mpicoll.selection.table import Table as Tuned

FAR = 1.3  #: times the best, from where on the default choice counts as far off


def show_rates(
    screen: Console, ranks: int, rates: Rates, off: float, file: str, faults: dict[str, str]
) -> None:
    """Show the rates of the cost model, where they are kept, and who is left out of them."""
    screen.print(
        f"\n[bold]Rates on {ranks} ranks[/bold], {rates.load:g} on a core: "
        f"step {human_seconds(rates.step)}, message {human_seconds(rates.message)}, "
        f"byte {rates.byte * 1e9:.3g} ns, byte reduced or copied {rates.local * 1e9:.3g} ns; "
        f"probes off by a factor {three(off)} (median)"
    )
    if file:
        screen.print(f"[dim]kept in {file}[/dim]", soft_wrap=True)
    _show_faults(screen, faults)
    screen.print()


def show_kept(screen: Console, ranks: int, faults: dict[str, str]) -> None:
    """Say that the rates were not measured."""
    screen.print(
        f"\n[bold]Rates on {ranks} rank{'s' * (ranks != 1)}[/bold]: not measured; those kept "
        "from host memory stand, or the defaults"
    )
    _show_faults(screen, faults)
    screen.print()


def _show_faults(screen: Console, faults: dict[str, str]) -> None:
    for name, fault in faults.items():
        screen.print(f"[bold red]WRONG {name}:[/] {fault}")


def dropped(screen: Console, out: str, what: str, ranks: int) -> None:
    """Say that something goes from the table, since data were wrong now."""
    screen.print(
        f"[bold red]Data were wrong:[/] {what} on {ranks} rank{'s' * (ranks != 1)} is dropped "
        f"from {out}."
    )


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
        table.add_row(
            human_bytes(row["bytes"]) if row["collective"] != "barrier" else "",
            row["default"],
            _time(row["default_seconds"]),
            "the same" if same else row["best"] or "none is right",
            "" if same else _time(row["best_seconds"]),
            "" if same else _gain(row["gain"], row["interval"]),
            style="dim" if same else "",
        )
    first = rows[0]
    screen.print(f"[bold]{first['collective']}[/bold], {first['ranks']} ranks")
    screen.print(table)
    for row in rows:
        for name, fault in row["faults"].items():
            screen.print(f"[bold red]WRONG {human_bytes(row['bytes'])} {name}:[/] {fault}")
    screen.print()


def _time(seconds: float | None) -> str:
    """Return a time; there is none for who makes wrong data."""
    return "wrong" if seconds is None else human_seconds(seconds)


def _gain(ratio: float | None, interval: Sequence[float] | None) -> str:
    if ratio is None or interval is None:
        return "—"
    low, high = interval
    return f"{three(ratio)} ({three(low)}–{three(high)})"


def show_crossover(screen: Console, told: Mapping[str, Any]) -> None:
    """Show how long both ways took by size, and the crossover, or why there is none."""
    from mpicoll.runtime.staging import SMALL_BYTES

    rows = told["results"]
    screen.print(f"\n[bold]Crossover to device pointers[/bold], {told['ranks']} ranks")
    by_hand = f"{human_bytes(SMALL_BYTES)}, as set by hand"
    if told["ranks"] == 1:
        screen.print("One rank sends nothing: there is none to tune.\n")
        return
    if not rows:
        screen.print(
            "This MPI takes no device pointers (MPICOLL_CUDA_AWARE=1 says that it does): there is "
            f"nothing to tune. Calls go through the host up to {by_hand}; longer ones message by "
            "message.\n"
        )
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("size", "through the host", "by pointers"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ratio", no_wrap=True)
    for row in rows:
        mark = MARKS[row["verdict"]] + " " if row["verdict"] else ""
        table.add_row(
            human_bytes(row["bytes"]),
            _time(row["staged_seconds"]),
            _time(row["pointers_seconds"]),
            mark + _gain(row["ratio"], row["interval"]),
        )
    screen.print(table)
    for row in rows:
        for name, fault in row["faults"].items():
            screen.print(f"[bold red]WRONG {human_bytes(row['bytes'])} {name}:[/] {fault}")
    if told["bytes"] is None:
        screen.print(f"[bold red]Data were wrong:[/] it stays at {by_hand}.\n")
        return
    screen.print(
        f"Calls of at most {human_bytes(told['bytes'])} on a rank go through the host, longer "
        "ones by device pointers.\n"
    )


def written(out: str, table: Tuned, memory: str) -> str:
    """Return what is said of a table that was written."""
    crossed = len(table.crossovers)
    more = f" and {crossed} crossover{'s' * (crossed != 1)}" if crossed else ""
    hint = "; its entries are for communicators with memory='device'" * (memory == "device")
    return f"{out}: {len(table.entries)} entries{more}. To use it: MPICOLL_TUNING={out}{hint}"


def conclude(screen: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Say what the table gains over the default choice, and how far that is from the best.

    Where the default makes wrong data, or all do, nothing is gained.
    """
    rows = [row for row in rows if row["gain"] is not None]
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
