"""`mpicoll tune`: measure which algorithm is fastest, and write a table that decides."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from mpicoll._version import __version__
from mpicoll.cli import tune_report
from mpicoll.cli.common import (
    Name,
    Sizes,
    console,
    fault_of,
    json_option,
    progress_bar,
    refuse,
    write_json,
)
from mpicoll.cli.memory import HOST, Memory
from mpicoll.errors import SettingError
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.selection.table import Crossover, Entry, Table, dump, load, merged

if TYPE_CHECKING:
    from mpicoll.cli.calibrate import Sample
    from mpicoll.comm import Comm
    from mpicoll.selection.calibration import Place
    from mpicoll.selection.model import Rates


@click.command(short_help="Measure which algorithm is fastest here, for MPICOLL_TUNING.")
@click.option(
    "--collectives",
    "-c",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Names with commas between: allreduce,bcast.",
)
@click.option(
    "--sizes",
    default="8:8M:8",
    type=Sizes(),
    show_default=True,
    help="FIRST:LAST[:FACTOR], factor 4 if not given, or a list: 8,64K,16M.",
)
@click.option(
    "--ranks",
    metavar="P,P,…",
    help="Groups of the first P ranks that are measured, such as 2,4,8; all ranks if not given.",
)
@click.option(
    "--memory",
    type=click.Choice(["host", "device"]),
    default="host",
    show_default=True,
    help="The communicators that the table is for: their memory= hint. With device it is measured "
    "on CuPy's arrays, with the crossover to device pointers.",
)
@click.option(
    "--seconds",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0),
    metavar="S",
    help="Time for each collective and size; at least 10 rounds of the fastest.",
)
@click.option(
    "--out",
    default="tuning.json",
    show_default=True,
    metavar="FILE",
    help="The table; entries for other calls that are in it stay.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Measure the rates of the cost model only: half a minute. No table is written.",
)
@json_option
def tune(
    collectives: str,
    sizes: tuple[int, ...],
    ranks: str | None,
    memory: str,
    seconds: float,
    out: str,
    quick: bool,
    json_file: str | None,
) -> None:
    """Measure which algorithm is fastest here, and write a table of it.

    \b
      mpiexec -n 8 mpicoll tune                             everything, about a minute
      mpiexec -n 8 mpicoll tune --ranks 2,4,8               for groups of 2, 4 and 8 ranks
      mpiexec -n 8 mpicoll tune -c allreduce,bcast --sizes 1K:64M --out my.json
      mpiexec -n 8 mpicoll tune --quick                     the rates of the cost model only
      mpiexec -n 4 mpicoll tune --memory device             for arrays on a GPU
      MPICOLL_TUNING=tuning.json mpiexec -n 8 python train.py

    First the rates of the cost model are measured: what a step, a message, a byte takes, and
    what each algorithm takes beyond them. They
    are kept in the user's cache folder, for this kind of host, this MPI and about as many
    ranks; without a table they decide, and with one they fill its gaps. Then all algorithms of
    each collective and size take turns, and the table says which is fastest. At run time it
    decides for the collectives, ranks and sizes that it has; set MPICOLL_TUNING=FILE.

    With --memory device, the rates are left alone, and the crossover is measured before: up to
    how many bytes a call is faster through the host than by device pointers.

    \b
    size      bytes of the vector on one rank, or of all blocks together
    default   what runs without a table, and its median time
    best      the fastest; the default unless another is faster beyond the noise
    gain      time of the default divided by that of the best in the same round, the
              median over rounds, with its 95 % interval
    """
    names = _names(collectives)
    from mpicoll.cli.facts import gather_facts, header
    from mpicoll.cli.world import open_world

    if memory == "device" and quick:
        refuse("--quick measures the rates of the cost model, on host memory: leave out --memory")
    comm = open_world(json_file, None if quick else out)
    groups = _groups(ranks, comm.size)
    place = _memory(comm, memory)
    screen = console(json_file)
    old = None if quick else _old(comm, out)
    facts = gather_facts(comm) | {"memory": place.words}
    for line in (*header(facts), *filter(None, [place.words])):
        screen.print(line)
    if comm.size == 1:
        screen.print("[dim]One rank sends nothing. More: mpiexec -n 8 mpicoll tune[/dim]")
    results: list[dict[str, Any]] = []
    entries: list[Entry] = []
    rates: list[dict[str, Any]] = []
    crossovers: list[dict[str, Any]] = []
    for size in groups:
        with _group(comm, size) as group, ExitStack() as stack:
            if group is None:
                continue
            mine, told = _calibrate(screen, group, place)
            rates.append(told)
            if place.name == "device":
                group, crossed = _cross(screen, group, place, seconds, stack)
                crossovers.append(crossed)
            if not quick:
                rows, found = _tune(screen, group, names, sizes, seconds, place, mine)
                results += rows
                entries += found
    kept = False
    if not quick and comm.rank == 0:
        made = Table(tuple(entries), facts["mpi"], __version__, _measured(crossovers))
        tune_report.conclude(screen, results)
        kept = _write(screen, out, _right(screen, old, out, memory, results, crossovers), made)
        if kept:
            new = load(Path(out).read_text(encoding="utf-8"), out)
            screen.print(tune_report.written(out, new, memory))
    write_json(
        json_file,
        "tune",
        {
            "environment": facts,
            "rates": rates,
            "out": out if kept else None,
            "crossovers": crossovers,
            "results": results,
        },
    )
    rows = [*rates, *results, *(row for crossed in crossovers for row in crossed["results"])]
    if comm.bcast(any(row["faults"] for row in rows), root=0):
        raise click.exceptions.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    """Return the collectives of a list with commas, each once."""
    if text.strip().lower() == "all":
        return tuple(COLLECTIVES)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError("--collectives: no name is given; examples: all, allreduce,bcast")
    known = Name()
    try:
        return tuple(dict.fromkeys(known.convert(word, None, None) for word in words))
    except click.BadParameter as error:
        raise click.UsageError(f"--collectives: {error.message}") from None


def _groups(text: str | None, world: int) -> tuple[int, ...]:
    """Return the sizes of groups, growing."""
    if text is None:
        return (world,)
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise click.UsageError(f"--ranks {text}: expected numbers such as 2,4,8") from None
    if not 1 <= found[0] <= found[-1] <= world:
        raise click.UsageError(f"--ranks {text}: expected numbers from 1 to {world}, the ranks")
    return tuple(found)


def _old(comm: Comm, out: str) -> Table | None:
    """Return the table that is in ``out``; what is there and is none is not overwritten."""
    from mpicoll.runtime.place import library

    found: Table | None = None
    fault = ""
    if comm.rank == 0 and Path(out).exists():
        try:
            found = load(Path(out).read_text(encoding="utf-8"), out, library())
        except (SettingError, OSError, ValueError) as error:
            fault = f"{error}. It is left as it is: remove it, or name another --out"
    refuse(comm.bcast(fault or fault_of(out), root=0))
    return found


@contextmanager
def _group(comm: Comm, size: int) -> Iterator[Comm | None]:
    """Hand the first ``size`` ranks a communicator; the others wait, asleep, until the end."""
    from mpicoll.cli.world import native

    if size == comm.size:
        yield comm
        return
    group = comm.Split(int(comm.rank >= size))
    inside = comm.rank < size
    yield group if inside else None
    # Not after an error: the rank that has failed ends the job, and waits for nobody.
    done = native(comm).Ibarrier()
    while not done.Test():
        time.sleep(0.01 if not inside else 0)
    group.Free()


def _memory(comm: Comm, name: str) -> Memory:
    """Return the memory to measure on; without a device it is a usage error."""
    if name == "host":
        return HOST
    from mpicoll.cli.cuda import need
    from mpicoll.cli.tune_crossover import DOUBLE

    return need(comm, DOUBLE, "--memory device")


def _calibrate(screen: Console, comm: Comm, memory: Memory) -> tuple[Rates, dict[str, Any]]:
    """Measure the rates, keep them and show them; return them, for --json too.

    They are those of host memory: for a device those that are kept are looked up.
    """
    from mpicoll.cli.calibrate import PROBES, correct, fit, measure, time_all
    from mpicoll.cli.world import native
    from mpicoll.runtime.place import place
    from mpicoll.selection.calibration import lookup, store

    where = comm.bcast(place(native(comm)), root=0)
    samples: list[Sample] = []
    if comm.size > 1 and memory.name != "device":
        samples = measure(comm, 0.1)
        probes = [one for one in samples if not one.fault]
        with progress_bar(screen) as progress:
            task = progress.add_task("", total=len(COLLECTIVES))

            def shown(name: str) -> None:
                progress.update(task, advance=1, description=f"rates: {name}, {comm.size} ranks")

            samples += time_all(comm, shown)
    faults = {one.label: one.fault for one in samples if one.fault}
    if not samples or not probes:
        rates = comm.bcast(lookup(where), root=0)
        tune_report.show_kept(screen, comm.size, faults)
        return rates, _told(where, rates, None, "", faults)
    rates, off = fit(probes, comm.size, where.load)
    rates = replace(rates, corrections=correct(samples[len(PROBES) :], comm.size, rates))
    file = ""
    if comm.rank == 0:
        try:
            file = str(store(where, rates))
        except OSError as error:
            screen.print(f"[yellow]the rates can not be kept:[/] {error}")
    rates = comm.bcast(rates, root=0)
    tune_report.show_rates(screen, comm.size, rates, off, file, faults)
    return rates, _told(where, rates, off, file, faults)


def _told(
    where: Place, rates: Rates, off: float | None, file: str, faults: dict[str, str]
) -> dict[str, Any]:
    """Return the rates for --json; ``off`` is None where they were not measured now."""
    from mpicoll.selection.calibration import listed

    return {
        "measured": off is not None,
        "ranks": where.ranks,
        "ranks_per_core": where.load,
        "host": where.host,
        "mpi": where.mpi,
        "seconds": {
            "step": rates.step,
            "message": rates.message,
            "byte": rates.byte,
            "local_byte": rates.local,
        },
        "corrections": listed(rates.corrections),
        "off_by": off,
        "file": file,
        "faults": faults,
    }


def _cross(
    screen: Console, comm: Comm, memory: Memory, seconds: float, stack: ExitStack
) -> tuple[Comm, dict[str, Any]]:
    """Measure the crossover and show it; return a communicator that has it, and what to tell."""
    from mpicoll.cli.tune_crossover import boundary, measure, with_crossover

    told: dict[str, Any] = {"ranks": comm.size, "bytes": None, "results": []}
    if comm.size > 1 and memory.addressed:
        rows = told["results"] = measure(comm, memory, seconds)
        if not any(row["faults"] for row in rows):
            told["bytes"] = boundary(rows)
    tune_report.show_crossover(screen, told)
    return with_crossover(comm, told["bytes"], stack), told


def _measured(crossovers: Sequence[dict[str, Any]]) -> tuple[Crossover, ...]:
    """Return the crossovers that were found, for the table."""
    return tuple(
        Crossover(one["ranks"], one["bytes"]) for one in crossovers if one["bytes"] is not None
    )


def _right(
    screen: Console,
    old: Table | None,
    out: str,
    memory: str,
    results: Sequence[dict[str, Any]],
    crossovers: Sequence[dict[str, Any]],
) -> Table | None:
    """Return ``old`` without what this run measured anew and found no right data for.

    It stands in the file as fastest; what makes wrong data now can not be called that.
    """
    if old is None:
        return None
    wrong = {one["ranks"] for one in crossovers if any(row["faults"] for row in one["results"])}
    rows: dict[tuple[str, int, str], list[bool]] = {}
    for row in results:
        key = row["collective"], row["ranks"], memory
        rows.setdefault(key, []).append(bool(row["ranked"]))
    lost = {key for key, right in rows.items() if not any(right)}
    for one in old.crossovers:
        if one.ranks in wrong:
            tune_report.dropped(screen, out, f"the crossover of {one.nbytes} B", one.ranks)
    for name, ranks, _ in sorted({entry.key for entry in old.entries} & lost):
        tune_report.dropped(screen, out, f"what it had for {name}", ranks)
    return replace(
        old,
        entries=tuple(entry for entry in old.entries if entry.key not in lost),
        crossovers=tuple(one for one in old.crossovers if one.ranks not in wrong),
    )


def _write(screen: Console, out: str, old: Table | None, made: Table) -> bool:
    """Write the table; a file is not made for nothing."""
    if old is None and not made.entries and not made.crossovers:
        screen.print(f"[bold red]All data were wrong:[/] {out} is not written.")
        return False
    Path(out).write_text(dump(merged(old, made)), encoding="utf-8")
    return True


def _tune(
    screen: Console,
    comm: Comm,
    names: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    memory: Memory,
    rates: Rates,
) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Measure all collectives and sizes on one group; show them; return rows and entries."""
    from mpicoll.cli.tune_measure import entries_of, measure, shapes

    wanted = {name: shapes(name, comm.size, sizes) for name in names}
    progress = progress_bar(screen)
    rows: list[dict[str, Any]] = []
    entries: list[Entry] = []
    with progress:
        task = progress.add_task("", total=sum(map(len, wanted.values())))
        for name, cases in wanted.items():
            mine = []
            for shape in cases:
                progress.update(task, description=f"{name}, {comm.size} ranks")
                mine.append(measure(comm, shape, seconds, rates, memory))
                progress.advance(task)
            tune_report.show(screen, mine)
            rows += mine
            entries += entries_of(mine, memory.name)
    return rows, entries
