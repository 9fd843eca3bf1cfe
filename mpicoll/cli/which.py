"""Three questions that lead to the right collective, and cheaper ones that may do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from mpicoll.cli import launch, plans
from mpicoll.cli.common import human_bytes

NBYTES = 1 << 20
FLOWS = ("one-to-all", "all-to-one", "all-to-all")

_Command = TypeVar("_Command", bound=Callable[..., Any])

_CODE = {
    "bcast": "mpicoll.broadcast(x, root)",
    "scatter": "mpicoll.scatter(x, root)",
    "reduce": 'mpicoll.reduce(x, "sum", root)',
    "gather": "mpicoll.gather(x, root)",
    "allreduce": 'mpicoll.allreduce(x, "sum")',
    "reduce_scatter": 'mpicoll.reduce_scatter(x, "sum")',
    "allgather": "mpicoll.allgather(x)",
    "alltoall": "mpicoll.alltoall(x)",
    "barrier": "mpicoll.barrier()",
    "scan": "comm.Scan(x, y)",
    "exscan": "comm.Exscan(x, y)",
}


def options(command: _Command) -> _Command:
    """Add the answers as options, for use without a dialogue."""
    for add in (
        click.option("--same/--different", default=None, help="--which: what each rank gets."),
        click.option("--reduced/--kept", default=None, help="--which: summed, or kept apart."),
        click.option("--flow", type=click.Choice(FLOWS), help="--which: who sends, who gets."),
    ):
        command = add(command)
    return command


def collective(flow: str, reduced: bool, same: bool) -> str:
    """Return the collective that the answers lead to."""
    if flow == "one-to-all":
        return "bcast" if same else "scatter"
    if flow == "all-to-one":
        return "reduce" if reduced else "gather"
    if reduced:
        return "allreduce" if same else "reduce_scatter"
    return "allgather" if same else "alltoall"


def ask(
    screen: Console, flow: str | None, reduced: bool | None, same: bool | None, ranks: int
) -> dict[str, Any]:
    """Ask what is not yet answered, show the collective, and return it."""
    started = launch.found()
    talks = sys.stdin.isatty() and (started is None or (started.size or 1) == 1)
    if flow is None:
        _must_talk(talks, "--flow one-to-all, all-to-one or all-to-all")
        flow = click.prompt("1. Who sends, and who gets?", type=click.Choice(FLOWS))
    if reduced is None and flow != "one-to-all":
        _must_talk(talks, "--reduced (summed, maximum, …) or --kept (kept apart)")
        reduced = click.confirm("2. Is what they send summed (or maximum, …) into one?")
    if same is None and flow != "all-to-one":
        _must_talk(talks, "--same or --different (what each rank gets)")
        same = click.confirm("3. Does every rank get the same? (no: its own piece)")
    assert flow is not None
    found = collective(flow, bool(reduced), bool(same))
    screen.print(f"[bold green]{found}[/]: {plans.DOES[found]}")
    screen.print(f"  {_CODE[found]}\n")
    cheap = show_cheaper(screen, found, ranks)
    screen.print(f"[dim]mpicoll explain {found} shows how it runs.[/dim]")
    return {"collective": found, "code": _CODE[found], "cheaper": cheap}


def _must_talk(talks: bool, option: str) -> None:
    if not talks:
        raise click.UsageError(f"there is no terminal to ask on; answer with {option}")


def show_cheaper(screen: Console, found: str, ranks: int) -> list[dict[str, Any]]:
    """Warn of cheaper collectives that may do; return them."""
    if ranks == 1 or ranks > 512 or found == "barrier":
        return []
    own = plans.sent_by_all(found, ranks, NBYTES)
    rows = plans.cheaper(found, ranks, NBYTES)
    if not rows:
        return []
    screen.print(
        f"A cheaper one would do, if … (bytes that {ranks} ranks send together, for "
        f"{human_bytes(NBYTES)}; {found}: {human_bytes(own)})"
    )
    table = Table.grid(padding=(0, 2))
    for instead, when, need in rows:
        table.add_row(f"  {when}:", f"[bold]{instead}[/]", f"{human_bytes(need)}")
    screen.print(table)
    screen.print()
    return [
        {"collective": instead, "when": when, "bytes_sent_by_all": need, "instead_of": own}
        for instead, when, need in rows
    ]
