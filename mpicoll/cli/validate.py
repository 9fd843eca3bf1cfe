"""`mpicoll validate`: every algorithm against the MPI's own result; an acceptance test."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from mpicoll.algorithms import Algorithm, every
from mpicoll.cli import launch
from mpicoll.cli.common import (
    Name,
    console,
    human_seconds,
    json_option,
    progress_bar,
    write_json,
)
from mpicoll.errors import MpicollError
from mpicoll.schedule.contracts import REDUCTIONS, ROOTED

if TYPE_CHECKING:
    from mpicoll.cli.cases import Shape
    from mpicoll.comm import Comm

SEGMENT = 16 << 10  #: bytes, so that the longer vectors are cut
DTYPES = ("float64", "int32")
ALL_DTYPES = (*DTYPES, "float32", "int64", "uint8", "complex128")


@click.command()
@click.argument("collectives", nargs=-1, type=Name())
@click.option("--full", is_flag=True, help="More types, sizes up to 8 MiB, every root; minutes.")
@click.option(
    "--limit",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds an algorithm may take before the run is ended as hanging.",
)
@json_option
def validate(
    collectives: tuple[str, ...], full: bool, limit: float, json_file: str | None
) -> None:
    """Check every collective and algorithm against the MPI's own. Exit status 1 if any fails.

    \b
      mpiexec -n 8 mpicoll validate                     an acceptance test, under a minute
      mpiexec -n 8 mpicoll validate allreduce bcast     some collectives
      srun -n 64 mpicoll validate --full                everything

    Each case poisons the output, runs the algorithm and the MPI's own collective on the same
    data, and compares both with the result that the definition gives, on every rank. Blocks of
    equal and of different length, empty ones included; first and last rank as root; sum and
    maximum; pipelines are cut into segments.
    """
    from mpicoll.cli.facts import gather_facts, header
    from mpicoll.cli.world import open_world

    comm = open_world(json_file)
    screen = console(json_file)
    facts = gather_facts(comm)
    for line in header(facts):
        screen.print(line)
    screen.print()
    wanted = [one for one in every() if not collectives or one.collective in collectives]
    rows = _run_all(comm, screen, wanted, full, limit)
    failed = [row for row in rows if row["faults"]]
    if comm.rank == 0:
        _show(screen, rows)
    write_json(
        json_file, "validate", {"environment": facts, "results": rows, "passed": not failed}
    )
    if comm.bcast(bool(failed), root=0):
        raise click.exceptions.Exit(1)


def _run_all(
    comm: Comm, screen: Console, wanted: list[Algorithm], full: bool, limit: float
) -> list[dict[str, Any]]:
    """Run the cases of all algorithms; a row for each, complete on rank 0."""
    progress = progress_bar(screen)
    rows: list[dict[str, Any]] = []
    screen.print(f"[bold]{_HEAD}[/]")
    with progress:
        task = progress.add_task("", total=len(wanted))
        for algorithm in wanted:
            progress.update(task, description=f"{algorithm.collective} {algorithm.name}")
            rows.append(_run(comm, algorithm, full, limit))
            screen.print(_line(rows))
            progress.advance(task)
    return rows


def _run(comm: Comm, algorithm: Algorithm, full: bool, limit: float) -> dict[str, Any]:
    """Run the cases of one algorithm; end the job if they hang."""
    from mpicoll.cli.cases import Case
    from mpicoll.cli.world import native

    keywords: dict[str, Any] = {"algorithm": algorithm.name}
    if algorithm.segmented:
        keywords["segment"] = SEGMENT
    state = {"case": ""}
    started = time.perf_counter()
    timer = threading.Timer(limit, _hang, (comm, algorithm, state, limit))
    timer.daemon = True
    if comm.rank == 0:
        timer.start()
    cases, faults = 0, []
    for shape in shapes(algorithm, comm.size, full):
        state["case"] = describe(shape)
        case = Case(comm, shape)
        found = []
        for who, run, named in (("", comm, keywords), ("the MPI's own: ", native(comm), {})):
            case.poison()
            try:
                case.invoke(run, **named)
            except MpicollError as error:  # if others wait for this rank, the timer ends it
                found.append(f"{who}{error}")
                continue
            if wrong := case.wrong():
                found.append(f"{who}{wrong}")
        cases += 1
        if any(gathered := native(comm).allgather(found)):
            first = next(filter(None, gathered))
            faults.append(f"{describe(shape)}: {'; '.join(first)}")
    timer.cancel()
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "cases": cases,
        "faults": faults,
        "seconds": time.perf_counter() - started,
    }


def _hang(comm: Comm, algorithm: Algorithm, state: dict[str, str], limit: float) -> None:
    """Say which case hangs, and end all ranks: nothing hangs in silence."""
    print(
        f"mpicoll: {algorithm.collective} {algorithm.name} did not end within {limit:g} s "
        f"(--limit); case: {state['case']}",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(launch.LAST_WORD)
    comm.Abort(1)


def shapes(algorithm: Algorithm, size: int, full: bool) -> Iterator[Shape]:
    """Yield the cases of one algorithm."""
    import numpy as np

    from mpicoll.cli.cases import Shape, even, odd

    collective = algorithm.collective
    if collective == "barrier":
        yield Shape(collective, (0,), np.dtype(np.uint8))
        return
    roots: tuple[int, ...] = (0,)
    if collective in ROOTED:
        roots = tuple(range(size)) if full else tuple(dict.fromkeys((0, size - 1)))
    ops = ("sum", "max") if collective in REDUCTIONS else ("sum",)
    counts = (0, 1, size + 1, 4099, 100_003, 1 << 20) if full else (0, 1, size + 1, 20_011)
    for name in ALL_DTYPES if full else DTYPES:
        dtype = np.dtype(name)
        for count in counts:
            base = even(collective, size, count * dtype.itemsize, dtype)
            if count == 0:
                base = Shape(collective, (0,) * len(base.counts), dtype)
            uneven = None if algorithm.uniform else odd(collective, size, count, dtype)
            for shape in (base, uneven):
                for root in roots if shape else ():
                    for op in ops if dtype.kind != "c" else ("sum",):
                        assert shape is not None
                        yield Shape(collective, shape.counts, dtype, root, shape.uneven, op)


def describe(shape: Shape) -> str:
    """Return a case in words."""
    words = [shape.dtype.name]
    if shape.uneven or len(shape.counts) > 1:
        kind = "uneven" if shape.uneven else "equal"
        words.append(f"{sum(shape.counts)} elements in {kind} blocks")
    else:
        words.append(f"{shape.counts[0]} elements")
    if shape.collective in ROOTED:
        words.append(f"root {shape.root}")
    if shape.collective in REDUCTIONS:
        words.append(shape.op)
    return ", ".join(words)


_HEAD = f"{'collective':<16}{'algorithm':<22}{'cases':>7}{'passed':>8}{'failed':>8}{'time':>11}"


def _line(rows: list[dict[str, Any]]) -> str:
    """Return the last row as text; a collective is named where its first algorithm is."""
    row = rows[-1]
    first = len(rows) == 1 or rows[-2]["collective"] != row["collective"]
    failed = len(row["faults"])
    return (
        f"[bold]{row['collective'] if first else '':<16}[/]{row['algorithm']:<22}"
        f"{row['cases']:>7}[green]{row['cases'] - failed:>8}[/]"
        + (f"[bold red]{failed:>8}[/]" if failed else f"{'—':>8}")
        + f"{human_seconds(row['seconds']):>11}"
    )


def _show(screen: Console, rows: list[dict[str, Any]]) -> None:
    screen.print()
    for row in rows:
        for fault in row["faults"][:3]:
            screen.print(f"[bold red]{row['collective']} {row['algorithm']}:[/] {fault}")
        if len(row["faults"]) > 3:
            screen.print(f"  and {len(row['faults']) - 3} more")
    cases = sum(row["cases"] for row in rows)
    failed = sum(len(row["faults"]) for row in rows)
    seconds = human_seconds(sum(row["seconds"] for row in rows))
    collectives = len({row["collective"] for row in rows})
    told = f"{cases} cases of {len(rows)} algorithms of {collectives} collectives in {seconds}"
    if failed:
        screen.print(f"[bold red]{failed} of {told} FAILED[/]")
    else:
        screen.print(f"[bold green]all passed:[/] {told}")
