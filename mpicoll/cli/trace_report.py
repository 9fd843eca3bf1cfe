"""The tables of `mpicoll trace`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpicoll.cli.common import human_seconds

FAULTS = 10  #: that are shown, at most


def show(screen: Console, report: dict[str, Any], top: int) -> None:
    """Print the report: what is wrong, then from the whole to the pairs."""
    _faults(screen, report)
    _head(screen, report)
    if not report["collectives"]:
        screen.print("No collective in this time.\n")
        return
    _collectives(screen, report)
    _slowest(screen, report)
    if report["pairs"]:
        _pairs(screen, report["pairs"], top)
        _ranks(screen, report["by_rank"], top)
    if report["hidden"]:
        _hidden(screen, report)
    if report["regions"]:
        _regions(screen, report, top)


def _faults(screen: Console, report: dict[str, Any]) -> None:
    for fault in report["faults"][:FAULTS]:
        screen.print(f"[yellow]warning:[/] {escape(fault)}")
    if len(report["faults"]) > FAULTS:
        screen.print(f"[yellow]warning:[/] and {len(report['faults']) - FAULTS} more")
    for note in report["notes"]:
        screen.print(f"[dim]note:[/] {escape(note)}")
    if report["faults"] or report["notes"]:
        screen.print()


def _head(screen: Console, report: dict[str, Any]) -> None:
    clocks = report["clocks"]
    ranks, hosts = len(report["ranks"]), report["hosts"]
    screen.print(
        f"{ranks} rank{'s' * (ranks != 1)} on {hosts} node{'s' * (hosts != 1)}, "
        f"{human_seconds(report['seconds'])}; writing the trace took "
        f"{_percent(report['cost'], 1)} of the run"
    )
    if clocks["error"]:
        screen.print(
            f"[dim]Clocks were up to {human_seconds(clocks['offset'])} apart and drifted by "
            f"{clocks['drift'] * 1e6:.3g} µs a second; both are removed. What is left is at most "
            f"{human_seconds(clocks['error'])}: shorter waits mean nothing.[/]\n"
        )
    else:
        screen.print("[dim]All ranks read one clock.[/]\n")


def _table(title: str, left: int, *heads: str) -> Table:
    """Return a table whose first ``left`` columns are text."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for number, head in enumerate(heads):
        made.add_column(head, justify="left" if number < left else "right", no_wrap=True)
    return made


def _collectives(screen: Console, report: dict[str, Any]) -> None:
    board = _table(
        "Time per collective, mean over ranks",
        2,
        *("collective", "algorithm", "calls", "median", "total", "share"),
        *("late", "busy", "moving"),
    )
    for row in report["collectives"]:
        failed = f" [red]{row['errors']} failed[/]" if row["errors"] else ""
        waits = [_percent(row["share"], 1)]
        waits += [human_seconds(row[kind]) for kind in ("late", "busy", "moving")]
        board.add_row(
            _called(row) + failed,
            row["algorithm"],
            str(row["calls"]),
            human_seconds(row["median"]),
            human_seconds(row["seconds"]),
            *(waits if row["form"] == "blocking" or report["waits_known"] else ["—"] * 4),
        )
    screen.print(board)
    screen.print(
        "[dim]share: of the whole time, in a blocking call or in the Wait of another. late,\n"
        "busy, moving: waiting in it for a rank that had not called, was at work, had sent.[/]\n"
    )


def _called(row: dict[str, Any]) -> str:
    """Return the collective as mpi4py names it: allreduce, iallreduce, allreduce_init."""
    name = str(row["collective"])
    return {"non-blocking": f"i{name}", "persistent": f"{name}_init"}.get(row["form"], name)


def _slowest(screen: Console, report: dict[str, Any]) -> None:
    slowest = report["slowest"]
    if slowest is None:
        screen.print("No rank waited for another.\n")
        return
    time = human_seconds(slowest["seconds"])
    screen.print(
        f"[bold]Rank {slowest['rank']} is waited for most[/]: {time}, "
        f"{_percent(slowest['share'], 1)} of what ranks wait for ranks; it was the last to call "
        f"in {slowest['last']} of {slowest['calls']} collectives.\n"
    )


def _pairs(screen: Console, pairs: list[dict[str, Any]], top: int) -> None:
    board = _table(
        "Who waits for whom", 0, *("rank", "waits for", "late", "busy", "in collectives")
    )
    for row in pairs[:top]:
        board.add_row(
            *(str(row["rank"]), str(row["waits_for"])),
            *(human_seconds(row["late"]), human_seconds(row["busy"]), str(row["calls"])),
        )
    screen.print(board)
    _more(screen, len(pairs) - top, "pair")


def _ranks(screen: Console, rows: list[dict[str, Any]], top: int) -> None:
    board = _table(
        "Ranks, by how much the others wait for them",
        0,
        *("rank", "made wait", "last", "waits", "in collectives"),
    )
    board.add_column("node", overflow="ellipsis", no_wrap=True)
    order = sorted(rows, key=lambda row: (-row["caused"], row["rank"]))
    for row in order[:top]:
        board.add_row(
            str(row["rank"]),
            human_seconds(row["caused"]),
            f"{row['last']}×",
            *(human_seconds(row["waited"]), human_seconds(row["in_collectives"]), row["host"]),
        )
    screen.print(board)
    _more(screen, len(rows) - top, "rank")


def _hidden(screen: Console, report: dict[str, Any]) -> None:
    board = _table(
        "Hidden share of calls that do not block",
        2,
        *("collective", "algorithm", "calls", "span", "in Wait", "hidden", "in regions"),
    )
    unknown = False
    for row in report["hidden"]:
        unknown |= row["hidden"] is None
        board.add_row(
            _called(row),
            *(row["algorithm"], str(row["calls"]), human_seconds(row["seconds"])),
            "—" if row["waited"] is None else human_seconds(row["waited"]),
            "—" if row["hidden"] is None else _percent(row["hidden"], 1),
            _percent(row["in_regions"], 1),
        )
    screen.print(board)
    text = "span: from the call to its completion, mean over ranks of the sum"
    text += "; no Wait is in this trace" * unknown
    screen.print(f"[dim]{text}.[/]\n")


def _regions(screen: Console, report: dict[str, Any], top: int) -> None:
    board = _table("Regions, mean over ranks", 1, *("region", "times", "median", "total", "share"))
    for row in report["regions"][:top]:
        board.add_row(
            escape(row["name"]),
            str(row["count"]),
            *(human_seconds(row["median"]), human_seconds(row["seconds"])),
            _percent(row["seconds"], report["seconds"]),
        )
    screen.print(board)
    _more(screen, len(report["regions"]) - top, "region")


def _more(screen: Console, count: int, what: str) -> None:
    screen.print(f"[dim]and {count} more {what}{'s' * (count != 1)}: --top[/]\n" * (count > 0))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f} %"
