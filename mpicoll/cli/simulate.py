"""`mpicoll simulate`: the time of each algorithm on a machine that is described, not there."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mpicoll.algorithms import Algorithm, find, names
from mpicoll.cli import launch, networks, plans
from mpicoll.cli.common import (
    Name,
    Sizes,
    console,
    fault_of,
    human_bytes,
    human_seconds,
    json_option,
    progress_bar,
    refuse,
    write_json,
)
from mpicoll.selection.choose import Wanted, default_segment
from mpicoll.simulation import simgrid
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import Machine, TooLongError
from mpicoll.simulation.predict import predict
from mpicoll.simulation.schedules import LeftOutError

HOW = {
    "lockstep": "all ranks in step",
    "merged": "all ranks in step, wrapped ranges as one message",
    "sampled": "all ranks in step; of many steps with other distances some stand for all",
    "rows": "a row of ranks, counted on from a shorter one",
    "classes": "every message; schedules of a few ranks stand for all",
    "all": "every message of every rank",
}


@click.command(short_help="Predict times on a machine that is described.")
@click.argument("collective", type=Name())
@click.option("--ranks", "-n", default=1024, type=click.IntRange(1, 1 << 20), show_default=True)
@click.option(
    "--algorithms",
    "-a",
    default="all",
    show_default=True,
    help="all, auto, or names: ring,direct.",
)
@click.option("--sizes", default="8:128M:64", type=Sizes(), show_default=True, help="As in bench.")
@networks.options
@click.option(
    "--overhead", default=0.5, show_default=True, help="µs of a core, per message and end."
)
@click.option("--gamma", default=0.1, show_default=True, help="ns per byte reduced.")
@click.option("--copy", default=0.05, show_default=True, help="ns per byte copied.")
@click.option(
    "--eager",
    default=64,
    type=click.IntRange(0),
    show_default=True,
    help="KiB up to which a send needs no receive.",
)
@click.option(
    "--cores", default=0, type=click.IntRange(0), help="Of a node.  [default: one for every rank]"
)
@click.option(
    "--patience",
    default=30.0,
    show_default=True,
    help="s that building all schedules of one algorithm may take.",
)
@click.option(
    "--engine",
    type=click.Choice(["loggp", "simgrid"]),
    default="loggp",
    show_default=True,
    help="simgrid replays with SimGrid, on few ranks: a second opinion.",
)
@json_option
def simulate(
    collective: str,
    ranks: int,
    algorithms: str,
    sizes: tuple[int, ...],
    overhead: float,
    gamma: float,
    copy: float,
    eager: int,
    cores: int,
    patience: float,
    engine: str,
    json_file: str | None,
    **network: Any,
) -> None:
    """Predict the time of each algorithm by replaying its schedules on a described machine.

    Starts no MPI. Schedules of all ranks are replayed message by message; links, memory and
    cores are shared by what is under way at the same time (LogGP with contention).

    \b
      mpicoll simulate allreduce -n 131072 --ranks-per-node 8
      mpicoll simulate allreduce -n 131072 --ranks-per-node 8 --network torus --torus 32x32x16
      mpicoll simulate alltoall -n 4096 --network dragonfly --bandwidth 12.5 --latency 2
      mpicoll simulate bcast -n 64 --network cluster.json --sizes 1K:64M --json bcast.json
      mpicoll simulate allreduce -n 32 -a ring,circulant --engine simgrid

    \b
    sizes        bytes of the vector on one rank, or of all blocks together
    --latency    from node to node; --bandwidth is that of a node's port, and of a link
    fat-tree     leaf switches of --leaf nodes, 1/--oversubscription of their bandwidth upwards
    torus        three dimensions, messages along x, then y, then z
    dragonfly    groups of routers, all groups joined, shortest ways
    FILE.json    nodes and links: see docs/how-to/simulate.md, also for what is not modelled
    """
    refuse(fault_of(json_file))
    chosen = _algorithms(collective, algorithms, ranks, sizes)
    for name, value in (("--overhead", overhead), ("--gamma", gamma), ("--copy", copy)):
        refuse(f"{name} {value:g}, expected 0 or more" if not 0 <= value < 1e9 else "")
    refuse("" if patience >= 0 else f"--patience {patience:g}, expected 0 or more s")
    fabric = networks.fabric(ranks, network)
    machine = Machine(
        overhead=overhead * 1e-6,
        gamma=gamma * 1e-9,
        copy=copy * 1e-9,
        eager=eager << 10,
        cores=cores,
    )
    if engine == "simgrid":
        refuse(simgrid.fault(ranks))
    if not launch.speaks():
        return
    screen = console(json_file)
    described = networks.described(fabric, network, machine)
    screen.print(f"[bold]{collective}[/bold], {described}\n")
    wanted = (0,) if collective == "barrier" else sizes
    rows = []
    with progress_bar(screen) as progress:
        task = progress.add_task("", total=len(chosen))
        for name in chosen:
            progress.update(task, description=name)
            algorithm = find(collective, name)
            rows.append(_row(algorithm, wanted, fabric, machine, patience, engine))
            progress.advance(task)
    _show(screen, collective, rows, wanted)
    write_json(
        json_file,
        "simulate",
        {
            "collective": collective,
            "ranks": ranks,
            "engine": engine,
            "network": str(fabric.network),
            "options": network,
            "machine": asdict(machine),
            "results": rows,
            "winners": {str(n): _winner(rows, at) for at, n in enumerate(wanted)},
        },
    )


def _algorithms(collective: str, text: str, ranks: int, sizes: tuple[int, ...]) -> list[str]:
    """Return the names that are simulated; an unknown one is an error that names the known."""
    if text == "all":
        return list(names(collective))
    if text == "auto":
        return list(dict.fromkeys(plans.automatic(collective, ranks, size) for size in sizes))
    return [find(collective, name.strip()).name for name in text.split(",")]


def _row(
    algorithm: Algorithm,
    sizes: tuple[int, ...],
    fabric: Fabric,
    machine: Machine,
    patience: float,
    engine: str,
) -> dict[str, Any]:
    """Return an algorithm's times, or why there are none."""
    segment = default_segment(algorithm, Wanted(algorithm.collective, fabric.size))
    start = time.perf_counter()
    row: dict[str, Any] = {"algorithm": algorithm.name, "how": [], "left_out": ""}
    seconds: list[float] = []
    try:
        if engine == "simgrid":
            seconds = simgrid.seconds(algorithm, sizes, segment, fabric, machine)
        else:
            found = predict(algorithm, sizes, segment, fabric, machine, patience)
            seconds, row["how"] = list(found.seconds), list(found.how)
    except (LeftOutError, TooLongError) as error:
        row["left_out"] = str(error)
    row["seconds"] = dict(zip(map(str, sizes), seconds, strict=False))
    row["took"] = time.perf_counter() - start
    return row


def _winner(rows: list[dict[str, Any]], at: int) -> str | None:
    """Return the fastest algorithm for a size; the first by name of those that are equal."""
    times = {row["algorithm"]: list(row["seconds"].values())[at] for row in rows if row["seconds"]}
    return min(times, key=lambda name: times[name]) if times else None


def _runs(winners: list[str | None], sizes: tuple[int, ...]) -> str:
    """Return which algorithm wins from which size to which."""
    runs: list[tuple[str | None, list[int]]] = []
    for name, size in zip(winners, sizes, strict=True):
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].append(size)
    words = []
    for name, those in runs:
        ends = dict.fromkeys(human_bytes(size) for size in (those[0], those[-1]))
        words.append(f"{' to '.join(ends)}: [bold green]{name}[/]")
    return "; ".join(words)


def _show(
    screen: Console, collective: str, rows: list[dict[str, Any]], sizes: tuple[int, ...]
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for size in sizes:
        table.add_column(
            "time" if collective == "barrier" else human_bytes(size), justify="right", no_wrap=True
        )
    winners = [_winner(rows, at) for at in range(len(sizes))]
    for row in rows:
        cells = [
            f"[bold green]{human_seconds(seconds)}[/]"
            if row["algorithm"] == winners[at]
            else human_seconds(seconds)
            for at, seconds in enumerate(row["seconds"].values())
        ]
        table.add_row(row["algorithm"], *(cells or ["—"] * len(sizes)))
    screen.print(table)
    screen.print()
    if any(winners) and collective != "barrier":
        screen.print(f"[bold]winner[/bold]  {_runs(winners, sizes)}\n")
    for row in rows:
        if row["left_out"]:
            screen.print(f"[dim]{row['algorithm']} left out: {row['left_out']}[/dim]")
    for way in dict.fromkeys(way for row in rows for way in row["how"]):
        those = ", ".join(row["algorithm"] for row in rows if way in row["how"])
        screen.print(f"[dim]{HOW[way]}: {those}[/dim]")
    screen.print(
        "[dim]A prediction: what the model leaves out is in docs/how-to/simulate.md[/dim]"
    )
