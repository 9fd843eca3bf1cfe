"""The tables of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicoll.cli.common import human_bytes, human_rate, human_seconds, three
from mpicoll.cli.memory import HOST, Memory

RIVALS = ("native", "gloo")
FORMS = {
    "blocking": "",
    "nonblocking": "Non-blocking: from the start to the end of Wait, nothing in between.",
    "persistent": "Persistent: from Start to the end of Wait; _init is not timed.",
}
_STYLES = {"faster": "green", "slower": "red", "same": ""}
MARKS = {"faster": "▼", "slower": "▲", "same": "≈"}


def again(rival: str) -> str:
    """Return what the second run of a rival is called."""
    return f"{rival} again"


def is_again(row: Mapping[str, Any]) -> bool:
    """Whether a row is a rival against itself."""
    return str(row["algorithm"]) in map(again, RIVALS)


def series(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return rows by contender; the automatic choice is one, whatever it ran."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["algorithm"].split(":")[0], []).append(row)
    return found


def show_limit(screen: Console, limit: Mapping[str, Any], memory: Memory = HOST) -> None:
    """Say what plain messages and copies reach, and what share means."""
    from mpicoll.cli.bench_limit import DEFINITION, SIZES

    words = {
        "one_way": "one way {} (rank 0 to the last)",
        "both_ways": "both ways {} a rank (all at once)",
        "memcpy": "memcpy {} a rank (all at once)",
    }
    rates = [words[kind].format(f"{human_rate(one['rate'])}/s") for kind, one in limit.items()]
    sizes = ", ".join(map(human_bytes, SIZES))
    screen.print(f"[bold]limit[/bold]: {', '.join(rates)}")
    meaning = DEFINITION if "one_way" in limit else "One rank sends nothing: there is no share."
    where = "" if memory.addressed else " Messages are of host memory, memcpy is on the device."
    screen.print(f"[dim]Median times by turns, best of {sizes}.{where} {meaning}[/dim]\n")
    for kind, one in limit.items():
        if one["fault"]:
            screen.print(f"[bold red]{kind}:[/] {one['fault']}")


def table(rivals: Sequence[str]) -> Table:
    """Return a table without rows."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("algorithm", no_wrap=True)
    for head in ("min", "median", "p99", "algbw/s", "busbw/s", "share"):
        made.add_column(head, justify="right", no_wrap=True)
    for rival in rivals:
        made.add_column(f"/ {rival}", justify="left", no_wrap=True)
    return made


def add_rows(table: Table, rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> None:
    """Add the rows of one size."""
    shown = [row for row in rows if not is_again(row)]
    for number, row in enumerate(shown):
        times = [human_seconds(row["seconds"][key]) for key in ("min", "median", "p99")]
        moves = row["collective"] != "barrier"
        widths = [human_rate(row[key]) if moves else "—" for key in ("algbw", "busbw")]
        table.add_row(
            human_bytes(row["bytes"]) if number == 0 and moves else "",
            "[bold red]WRONG[/] " * bool(row["fault"]) + row["algorithm"],
            *times,
            *widths,
            "—" if row["share"] is None else percent(row["share"]),
            *(_ratio(row["against"].get(rival), len(rivals) == 1) for rival in rivals),
            style="dim" if row["algorithm"] in rivals else "",
        )


def percent(share: float) -> str:
    """Return a share with two digits, or that it is next to nothing."""
    if share < 0.001:
        return "<0.1%"
    return f"{100 * share:.2g}%" if share < 0.0995 else f"{100 * share:.0f}%"


def _ratio(found: Mapping[str, Any] | None, roomy: bool) -> str:
    """Return a ratio with its mark, and with its interval where there is room."""
    if found is None:
        return "  1"
    words = f"{MARKS[found['verdict']]} {three(found['ratio']['median'])}"
    if roomy:
        words += f" ({'–'.join(map(three, found['interval']))})"
    style = _STYLES[found["verdict"]]
    return f"[{style}]{words}[/]" if style else words


def conclude(screen: Console, rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> None:
    """Say what the noise is, and what is wrong."""
    counts = [row["rounds"] for row in rows]
    notes = [f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} rounds."]
    if not any(row["fault"] for row in rows):
        notes.insert(0, "The data of timed calls were right;")
    if rivals:
        notes.append("▼ faster, ▲ slower, ≈ within the noise.")
    for rival in rivals:
        found = [row["against"][rival] for row in rows if row["algorithm"] == again(rival)]
        middle = [one["ratio"]["median"] for one in found]
        notes.append(
            f"A/A, {rival} against itself: {three(min(middle))} to {three(max(middle))}, 95 % "
            f"intervals within {three(min(one['interval'][0] for one in found))}–"
            f"{three(max(one['interval'][1] for one in found))}."
        )
    screen.print(f"[dim]{' '.join(notes)}[/dim]")
    for row in rows:
        if row["fault"]:
            screen.print(
                f"[bold red]{human_bytes(row['bytes'])} {row['algorithm']}:[/] {row['fault']}"
            )
    screen.print()
