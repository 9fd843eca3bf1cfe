"""`mpicoll demo`: what each rank holds before and after a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import mpicoll
from mpicoll.cli.common import Name, console, json_option, write_json

if TYPE_CHECKING:
    from mpicoll.comm import Comm

SHOWN = 16  #: values of a vector that are printed in full


class Demo(NamedTuple):
    """One collective: what it does, the line of code, and this rank's before and after.

    Values are lists; a list of lists is a vector cut into blocks; None is nothing.
    """

    what: str
    code: str
    run: Callable[[Comm], tuple[Any, Any]]


def _array(values: Any) -> Any:
    return np.array(values, np.int64)


def _broadcast(comm: Comm) -> tuple[Any, Any]:
    x = [10, 20, 30] if comm.rank == 0 else [0, 0, 0]
    return (x if comm.rank == 0 else None), mpicoll.broadcast(_array(x), comm=comm)


def _reduce(comm: Comm) -> tuple[Any, Any]:
    x = [comm.rank + 1]
    return x, mpicoll.reduce(_array(x), comm=comm)


def _allreduce(comm: Comm) -> tuple[Any, Any]:
    x = [comm.rank + 1, 10 * (comm.rank + 1)]
    return x, mpicoll.allreduce(_array(x), comm=comm)


def _gather(comm: Comm) -> tuple[Any, Any]:
    x = 10 * comm.rank
    return [x], mpicoll.gather(_array(x), comm=comm)


def _allgather(comm: Comm) -> tuple[Any, Any]:
    x = 10 * comm.rank
    return [x], mpicoll.allgather(_array(x), comm=comm)


def _scatter(comm: Comm) -> tuple[Any, Any]:
    x = [10 * rank for rank in range(comm.size)] if comm.rank == 0 else None
    return x, [mpicoll.scatter(None if x is None else _array(x), comm=comm)]


def _reduce_scatter(comm: Comm) -> tuple[Any, Any]:
    x = [10 * comm.rank + block for block in range(comm.size)]
    return x, mpicoll.reduce_scatter(_array(x), comm=comm)


def _alltoall(comm: Comm) -> tuple[Any, Any]:
    x = [10 * comm.rank + peer for peer in range(comm.size)]
    return x, mpicoll.alltoall(_array(x), comm=comm)[0]


def _alltoall_uneven(comm: Comm) -> tuple[Any, Any]:
    splits = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    x = [[10 * comm.rank + peer] * count for peer, count in enumerate(splits)]
    sent = _array([item for part in x for item in part])
    rows, counts = mpicoll.alltoall(sent, splits, comm=comm)
    received, values = [], list(rows)
    for count in counts:
        received.append(values[:count])
        values = values[count:]
    return x, received


def _scan(comm: Comm) -> tuple[Any, Any]:
    x = [comm.rank + 1]
    after = np.zeros(1, np.int64)
    comm.Scan(_array(x), after)
    return x, after


def _exscan(comm: Comm) -> tuple[Any, Any]:
    x = [comm.rank + 1]
    after = np.zeros(1, np.int64)
    comm.Exscan(_array(x), after)
    return x, (after if comm.rank else None)


DEMOS = {
    "broadcast": Demo("every rank gets what rank 0 has", "mpicoll.broadcast(x)", _broadcast),
    "reduce": Demo("rank 0 gets the sum over all ranks", "mpicoll.reduce(x)", _reduce),
    "allreduce": Demo(
        "every rank gets the sum over all ranks", "mpicoll.allreduce(x)", _allreduce
    ),
    "gather": Demo("rank 0 gets one block of each rank", "mpicoll.gather(x)", _gather),
    "allgather": Demo(
        "every rank gets one block of each rank", "mpicoll.allgather(x)", _allgather
    ),
    "scatter": Demo("block r of rank 0 goes to rank r", "mpicoll.scatter(x)", _scatter),
    "reduce_scatter": Demo(
        "block r of the sum over all ranks goes to rank r",
        "mpicoll.reduce_scatter(x)",
        _reduce_scatter,
    ),
    "alltoall": Demo("block d of every rank goes to rank d", "mpicoll.alltoall(x)", _alltoall),
    "alltoall_uneven": Demo(
        "blocks of any length, here (r + d) % 3 values from rank r to rank d",
        "mpicoll.alltoall(x, splits)",
        _alltoall_uneven,
    ),
    "scan": Demo("rank r gets the sum over ranks 0 to r", "comm.Scan(x, y)", _scan),
    "exscan": Demo("rank r gets the sum over ranks 0 to r - 1", "comm.Exscan(x, y)", _exscan),
}


@click.command()
@click.argument(
    "collective", default="all", metavar="[COLLECTIVE|all]", type=Name(["all", *DEMOS])
)
@json_option
def demo(collective: str, json_file: str | None) -> None:
    """Show what each rank holds before and after a collective.

    \b
    Small values, so that you can follow each one:
      mpiexec -n 4 mpicoll demo                    all of them
      mpiexec -n 4 mpicoll demo reduce-scatter     one
      mpicoll demo alltoall                        works alone too, with one rank

    Known: broadcast, reduce, allreduce, gather, allgather, scatter, reduce_scatter,
    alltoall, alltoall_uneven, scan, exscan.
    """
    from mpicoll.cli.world import open_world

    comm = open_world(json_file)
    out = console(json_file)
    results = []
    for name in DEMOS if collective == "all" else [collective]:
        before, after = map(_plain, DEMOS[name].run(comm))
        rows = comm.gather((before, after), root=0)
        if rows is not None:
            results.append(_result(name, rows))
            _show(out, name, rows)
    if comm.size == 1:
        out.print("One rank has nobody to talk to; see more with: mpiexec -n 4 mpicoll demo")
    write_json(json_file, "demo", {"ranks": comm.size, "demos": results})


def _plain(value: Any) -> Any:
    """Return lists of Python numbers."""
    if value is None:
        return None
    return [
        [int(item) for item in part] if isinstance(part, list) else int(part) for part in value
    ]


def _result(name: str, rows: list[tuple[Any, Any]]) -> dict[str, Any]:
    return {
        "collective": name,
        "what": DEMOS[name].what,
        "before": [before for before, _ in rows],
        "after": [after for _, after in rows],
    }


def _show(out: Console, name: str, rows: list[tuple[Any, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", justify="right", style="bold")
    table.add_column("before", style="cyan")
    table.add_column("")
    table.add_column("after", style="green")
    for rank, (before, after) in enumerate(rows):
        table.add_row(str(rank), _words(before), "→", _words(after))
    out.print(f"[bold]{name}[/bold]: {DEMOS[name].what}")
    out.print(f"  [dim]{DEMOS[name].code}[/dim]")
    out.print()
    out.print(table)
    out.print()


def _words(value: Any) -> str:
    """Return a vector as a reader writes it; blocks are parted by bars."""
    if value is None:
        return "—"
    if value and isinstance(value[0], list):
        return "\\[" + " | ".join(", ".join(map(str, part)) or "·" for part in value) + "]"
    words = [str(item) for item in value]
    if len(words) > SHOWN:
        words = [*words[: SHOWN // 2], "…", *words[-SHOWN // 4 :]]
    return "\\[" + ", ".join(words) + "]"
