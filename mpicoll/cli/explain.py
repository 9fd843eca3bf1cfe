"""`mpicoll explain`: who sends what to whom at which step, what it costs, when to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mpicoll.algorithms import Algorithm, find, names
from mpicoll.cli import plans, textpicture, which
from mpicoll.cli.common import (
    Name,
    console,
    fault_of,
    human_bytes,
    human_seconds,
    json_option,
    refuse,
    write_json,
)
from mpicoll.cli.compare import SIZES, TIMED_RANKS, compare, model
from mpicoll.errors import ScheduleError
from mpicoll.schedule import draw
from mpicoll.schedule.check import prove
from mpicoll.schedule.contracts import REDUCTIONS, ROOTED, contract
from mpicoll.schedule.cost import Machine
from mpicoll.schedule.ir import Schedule

PICTURED = 32  # ranks, at most, in the terminal
PROVEN = 128  # ranks up to which a proof takes no noticeable time


@click.command()
@click.argument("collective", required=False, type=Name())
@click.option("--algorithm", "-a", default="auto", help="A name, auto (the default), or all.")
@click.option("--ranks", "-n", default=8, type=click.IntRange(1, 4096), show_default=True)
@click.option(
    "--count",
    "-c",
    type=click.IntRange(0),
    help="Elements (float64) of a vector, or of all blocks together.  [default: 2 a rank]",
)
@click.option(
    "--segment", default=0, type=click.IntRange(0), help="Elements of a piece; 0: whole."
)
@click.option("--root", default=0, type=click.IntRange(0), show_default=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "spans", "svg", "png", "json"]),
    help="Picture: short, with every span, as drawing, or the schedule as data.  [default: text, "
    "or by the name of --out]",
)
@click.option("--out", metavar="FILE", help="Write the picture to a file.")
@click.option("--alpha", default=2.0, show_default=True, help="Model: µs per step.")
@click.option("--beta", default=0.1, show_default=True, help="Model: ns per byte sent.")
@click.option("--gamma", default=0.1, show_default=True, help="Model: ns per byte reduced.")
@click.option("--which", "ask", is_flag=True, help="Three questions lead to the collective.")
@which.options
@json_option
def explain(
    collective: str | None,
    algorithm: str,
    ranks: int,
    count: int | None,
    segment: int,
    root: int,
    form: str | None,
    out: str | None,
    alpha: float,
    beta: float,
    gamma: float,
    ask: bool,
    flow: str | None,
    reduced: bool | None,
    same: bool | None,
    json_file: str | None,
) -> None:
    """Show the schedule of an algorithm: picture, cost, order, source. Starts no MPI.

    \b
      mpicoll explain allreduce                                 what runs by default
      mpicoll explain allreduce -a ring -n 6                    a named algorithm
      mpicoll explain allreduce -a all -n 64                    all of them, compared
      mpicoll explain bcast -a chain -n 5 -c 12 --segment 3     pipelined
      mpicoll explain allreduce -a ring --out ring.svg          a drawing (png: mpicoll[plot])
      mpicoll explain --which                                   which collective do I need?
      mpicoll explain --which --flow all-to-all --reduced --same
    """
    form = form or (Path(out).suffix.lstrip(".") if out else "text")
    if form not in ("text", "spans", "svg", "png", "json"):
        form = "text"
    _refuse(collective, ask, ranks, root, form, out, json_file)
    screen = console(json_file)
    if ask:
        write_json(json_file, "explain", which.ask(screen, flow, reduced, same, ranks))
        return
    assert collective is not None
    machine = Machine(alpha * 1e-6, beta * 1e-9, gamma * 1e-9)
    if collective == "barrier":
        count = 1
    count = 2 * ranks if count is None else count
    chosen = plans.automatic(collective, ranks, count * plans.item_bytes(collective))
    if algorithm == "all":
        data = compare(screen, collective, ranks, machine, chosen)
    else:
        found = find(collective, chosen if algorithm == "auto" else algorithm)
        data = _explain(screen, found, ranks, count, root, segment, form, out, machine)
        if algorithm == "auto" and form == "text" and out is None:
            others = ", ".join(name for name in names(collective) if name != found.name)
            screen.print(
                f"[dim]{found.name} is the automatic choice for this size and {ranks} ranks."
                + (f" Others: {others}; compare: -a all." if others else "")
                + "[/dim]"
            )
    if form == "text" and out is None:
        data["cheaper"] = which.show_cheaper(screen, collective, ranks)
    write_json(json_file, "explain", data)


def _refuse(
    collective: str | None,
    ask: bool,
    ranks: int,
    root: int,
    form: str,
    out: str | None,
    json_file: str | None,
) -> None:
    """Say what is wrong with the arguments."""
    refuse(fault_of(json_file) or fault_of(out))
    if not ask and collective is None:
        refuse("which COLLECTIVE? Not sure: mpicoll explain --which")
    if root >= ranks:
        refuse(f"--root {root}, expected a rank from 0 to {ranks - 1}")
    if root and collective not in ROOTED:
        refuse(f"{collective} has no root; those that do: {', '.join(sorted(ROOTED))}")
    if form == "png":
        if out is None:
            refuse("a PNG needs a file: --out FILE")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            refuse("a PNG needs Matplotlib: pip install 'mpicoll[plot]' (SVG needs nothing)")


def _explain(
    screen: Console,
    algorithm: Algorithm,
    ranks: int,
    count: int,
    root: int,
    segment: int,
    form: str,
    out: str | None,
    machine: Machine,
) -> dict[str, Any]:
    calls = plans.calls(algorithm, ranks, count, root, segment)
    schedules = [algorithm.build(call) for call in calls]
    title = f"{algorithm.collective} {algorithm.name}, {ranks} rank{'s' * (ranks != 1)}"
    if form == "text" and out is None:
        screen.print(f"[bold]{title}[/bold], {count} element{'s' * (count != 1)}")
        does = plans.DOES[algorithm.collective]
        screen.print(f"{does[0].upper()}{does[1:]}. {algorithm.summary}\n")
        _picture(screen, schedules)
        proof = _proof(algorithm, calls, schedules)
        _facts(screen, algorithm, schedules, proof, machine)
    else:
        _drawing(screen, title, algorithm, schedules, form, out)
    item = plans.item_bytes(algorithm.collective)
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "ranks": ranks,
        "count": count,
        "item_bytes": item,
        "order": algorithm.order,
        "summary": algorithm.summary,
        "source": plans.source(algorithm),
        "cost": plans.most(schedules, item),
        **draw.as_json(schedules),
    }


def _drawing(
    screen: Console,
    title: str,
    algorithm: Algorithm,
    schedules: list[Schedule],
    form: str,
    out: str | None,
) -> None:
    """Write a picture to a file or to the standard output."""
    from mpicoll.cli import picture

    if form == "png":
        assert out is not None
        picture.png(title, schedules, Path(out))
    else:
        if form == "svg":
            text = picture.svg(title, schedules)
        elif form == "json":
            text = json.dumps(draw.as_json(schedules), indent=1) + "\n"
        else:
            text = draw.text(algorithm.collective, algorithm.name, schedules)
        if out is None:
            screen.file.write(text)
            return
        Path(out).write_text(text, encoding="utf-8")
    screen.print(f"{out}: {title}")


def _picture(screen: Console, schedules: list[Schedule]) -> None:
    if len(schedules) > PICTURED:
        screen.print(f"[dim]No picture of more than {PICTURED} ranks here; --out FILE.svg[/dim]\n")
        return
    if not any(schedule.steps for schedule in schedules):
        screen.print("[dim]Nothing to do.[/dim]\n")
        return
    for part in textpicture.pictures(schedules, screen.width):
        screen.print(part)
    screen.print(f"[dim]{textpicture.LEGEND}[/dim]\n")


def _proof(algorithm: Algorithm, calls: list[Any], schedules: list[Schedule]) -> str:
    if len(schedules) > PROVEN:
        return "not run here for so many ranks"
    try:
        prove(contract(algorithm.collective, calls), schedules, order=algorithm.order)
    except ScheduleError as error:
        return f"FAILED: {error}"
    return "every send has its receive, nothing deadlocks, the result is as promised"


def _facts(
    screen: Console,
    algorithm: Algorithm,
    schedules: list[Schedule],
    proof: str,
    machine: Machine,
) -> None:
    ranks = len(schedules)
    counted = plans.most(schedules, plans.item_bytes(algorithm.collective))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    formulas = f"(steps {algorithm.formula('Steps')}; bytes {algorithm.formula('Sent')})"
    table.add_row(
        "a rank at most",
        f"{counted['steps']} steps, {counted['messages']} messages, "
        f"{human_bytes(counted['bytes_sent'])} sent, "
        f"{human_bytes(counted['bytes_received'])} received, "
        f"{human_bytes(counted['scratch_bytes'])} scratch\n[dim]{formulas}[/dim]",
    )
    table.add_row("all ranks", f"{human_bytes(counted['bytes_sent_by_all'])} sent")
    if ranks <= TIMED_RANKS:
        times = [
            f"{human_bytes(size)} " + human_seconds(plans.timed(algorithm, ranks, size, machine))
            for size in SIZES
        ]
        table.add_row("predicted", ", ".join(times) + f"\n[dim]{model(machine)}[/dim]")
    if algorithm.collective in REDUCTIONS:
        table.add_row("order", plans.ORDERS[algorithm.order])
    table.add_row("proven", proof)
    if use := plans.use(algorithm):
        table.add_row("use", use)
    table.add_row("source", plans.source(algorithm))
    screen.print(table)
    screen.print()
