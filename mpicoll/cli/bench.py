"""`mpicoll bench`: time the algorithms against the MPI's own collectives, by turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpicoll.algorithms import find, names
from mpicoll.cli.bench_report import AGAIN, NATIVE, add_rows, conclude, table
from mpicoll.cli.common import (
    Name,
    Sizes,
    console,
    json_option,
    refuse,
    write_json,
)
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.selection.choose import Wanted, unfit

if TYPE_CHECKING:
    from mpicoll.cli.cases import Case, Shape
    from mpicoll.cli.timing import Contender
    from mpicoll.comm import Comm

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int8", "complex128")


@click.command()
@click.argument("collectives", nargs=-1, required=True, type=Name([*COLLECTIVES, "all"]))
@click.option(
    "--sizes",
    default="8:4M",
    type=Sizes(),
    show_default=True,
    help="FIRST:LAST[:FACTOR], factor 4 if not given, or a list: 8,64K,16M.",
)
@click.option(
    "--algorithms",
    "-a",
    default="auto",
    show_default=True,
    help="auto, all, or names: ring,direct.",
)
@click.option(
    "--compare", type=click.Choice(["native", "none"]), default="native", show_default=True
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True)
@click.option(
    "--repeats",
    default=200,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Rounds at most.",
)
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="S",
    help="Time for each size; fewer rounds where one takes long, but at least 10.",
)
@click.option("--plot", metavar="FILE", help="Draw busbw and ratio (PNG, SVG or PDF).")
@json_option
def bench(
    collectives: tuple[str, ...],
    sizes: tuple[int, ...],
    algorithms: str,
    compare: str,
    dtype: str,
    repeats: int,
    seconds: float,
    plot: str | None,
    json_file: str | None,
) -> None:
    """Time collectives: size, time, bandwidth, ratio to the MPI's own.

    \b
      mpiexec -n 8 mpicoll bench allreduce
      mpiexec -n 8 mpicoll bench allreduce bcast --sizes 1K:64M --algorithms all
      mpiexec -n 8 mpicoll bench alltoall -a pairwise,bruck --plot alltoall.png --json a.json

    \b
    size     bytes of the vector on one rank, or of all blocks together
    algbw    size / median time
    busbw    algbw times what makes it comparable to the wire, as nccl-tests has it:
             allreduce 2(P-1)/P; gather, scatter, allgather, reduce_scatter and
             alltoall (P-1)/P; others 1
    / native time divided by the MPI's own in the same round, the median over rounds, with its
             95 % interval; below 1 is faster. ≈ is within the noise of native against itself.
    """
    wanted = tuple(COLLECTIVES) if "all" in collectives else tuple(dict.fromkeys(collectives))
    chosen = _algorithms(wanted, algorithms)
    if plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            refuse("--plot needs Matplotlib: pip install 'mpicoll[plot]'")
    from mpicoll.cli.facts import gather_facts, header
    from mpicoll.cli.timing import FEWEST, POLICY, WARM_UP
    from mpicoll.cli.world import open_world

    comm = open_world(json_file, plot)
    screen = console(json_file)
    facts = gather_facts(comm)
    for line in header(facts):
        screen.print(line)
    rounds = f"at most {repeats} rounds or {seconds:g} s a size, at least {min(FEWEST, repeats)}"
    screen.print(f"\n[dim]{POLICY} {WARM_UP} calls to warm up, {rounds}; {dtype}.[/dim]\n")
    results: list[dict[str, Any]] = []
    for name in wanted:
        board = table(compare == "native")
        rows: list[dict[str, Any]] = []
        for shape in _shapes(name, comm.size, sizes, dtype):
            found = _measure(comm, shape, chosen[name], compare, repeats, seconds)
            add_rows(board, found)
            rows += found
        results += rows
        screen.print(f"[bold]{name}[/bold], {comm.size} rank{'s' * (comm.size != 1)}")
        screen.print(board)
        conclude(screen, rows)
    if plot is not None and comm.rank == 0:
        from mpicoll.cli.bench_plot import draw

        draw(results, header(facts), Path(plot))
        screen.print(f"{plot}: busbw and ratio by size")
    write_json(
        json_file,
        "bench",
        {
            "environment": facts,
            "policy": {"text": POLICY, "warm_up": WARM_UP, "repeats": repeats, "seconds": seconds},
            "results": results,
        },
    )
    if comm.bcast(any(row["fault"] for row in results), root=0):
        raise click.exceptions.Exit(1)


def _algorithms(collectives: tuple[str, ...], text: str) -> dict[str, list[str]]:
    """Return the names that are timed; one that none of the collectives has is an error."""
    if text == "all":
        return {collective: list(names(collective)) for collective in collectives}
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if not any(name in ("auto", *names(collective)) for collective in collectives):
            find(collectives[0], name)
    return {
        collective: [name for name in wanted if name in ("auto", *names(collective))] or ["auto"]
        for collective in collectives
    }


def _shapes(collective: str, size: int, sizes: tuple[int, ...], dtype: str) -> list[Shape]:
    """Return what is timed; sizes that blocks of equal length make the same are one."""
    import numpy as np

    from mpicoll.cli.cases import even

    wanted = (0,) if collective == "barrier" else sizes
    return list(dict.fromkeys(even(collective, size, n, np.dtype(dtype)) for n in wanted))


def _measure(
    comm: Comm,
    shape: Shape,
    algorithms: list[str],
    compare: str,
    repeats: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Time everything for one size; return a row per contender."""
    from mpicoll.cli import timing
    from mpicoll.cli.cases import Case, bus_factor
    from mpicoll.cli.world import native

    collective = shape.collective
    case = Case(comm, shape)
    contenders, labels = [], {}
    if compare == "native":
        _probe(comm, case)
        for name in (NATIVE, AGAIN):
            contenders.append(_contender(name, case, native(comm)))
    for name in algorithms:
        if name != "auto" and unfit(find(collective, name), Wanted(collective, comm.size)):
            continue
        keywords = {} if name == "auto" else {"algorithm": name}
        contenders.append(_contender(name, case, comm, **keywords))
        labels[name] = name if name != "auto" else f"auto: {_automatic(comm, case)}"
    measured = timing.race(native(comm), contenders, seconds, repeats)
    factor = bus_factor(collective, comm.size)
    rows = []
    for item in measured:
        times = item.summary()
        algbw = shape.nbytes / times["median"]
        row: dict[str, Any] = {
            "collective": collective,
            "bytes": shape.nbytes,
            "algorithm": labels.get(item.name, item.name),
            "rounds": item.seconds.size,
            "seconds": times,
            "algbw": algbw,
            "busbw": algbw * factor,
            "fault": item.fault,
        }
        if compare == "native" and item.name != NATIVE:
            base = measured[0].seconds
            row["ratio"] = timing.ratio(item.seconds, base)
            row["interval"] = timing.spread_of_median(item.seconds, base)
            noise = timing.spread_of_median(measured[1].seconds, base)
            row["verdict"] = _verdict(row["interval"], noise)
        rows.append(row)
    return rows


def _probe(comm: Comm, case: Case) -> None:
    """Refuse to compare where the MPI has no such collective, as for 16-bit floats."""
    from mpicoll.cli.mpi import MPI
    from mpicoll.cli.world import native

    try:
        case.invoke(native(comm))
    except (KeyError, ValueError, TypeError, MPI.Exception) as error:
        refuse(
            f"this MPI's own {case.shape.collective} does not take {case.shape.dtype} "
            f"({error}); leave it out with --compare none"
        )


def _contender(name: str, case: Case, comm: Any, **keywords: Any) -> Contender:
    from mpicoll.cli.timing import Contender

    call = case.bound(comm, **keywords)
    return Contender(name, call, case.poison, case.wrong)


def _automatic(comm: Comm, case: Case) -> str:
    """Run one call without a name and see in the counters which algorithm ran."""
    comm.stats.reset()
    case.invoke(comm)
    return next(
        (name for collective, name in comm.stats if collective == case.shape.collective), "?"
    )


def _verdict(interval: tuple[float, float], noise: tuple[float, float]) -> str:
    """Return faster or slower where the interval lies outside of the noise, else same."""
    if interval[1] < min(1.0, noise[0]):
        return "faster"
    return "slower" if interval[0] > max(1.0, noise[1]) else "same"
