"""`mpicoll bench`: time the algorithms against the MPI's own collectives, by turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from mpicoll.algorithms import find, names
from mpicoll.cli.bench_report import FORMS, RIVALS, add_rows, conclude, show_limit, table
from mpicoll.cli.common import Name, Sizes, console, json_option, refuse, write_json
from mpicoll.schedule.contracts import COLLECTIVES

if TYPE_CHECKING:
    from mpicoll.cli.bench_rivals import Rival
    from mpicoll.cli.bench_run import Race
    from mpicoll.comm import Comm

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8"),
)
_OF_A_STUDY = frozenset(("study", "compare", "repeats", "seconds", "json_file"))


class Rivals(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Names of rivals with commas between them, or none."""

    name = "rivals"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> tuple[str, ...]:
        """Return the names, each once."""
        if isinstance(value, tuple):
            return value
        found = tuple(dict.fromkeys(word.strip().lower() for word in str(value).split(",")))
        for word in found:
            if word not in (*RIVALS, "none") or (word == "none" and len(found) > 1):
                known = ", ".join(RIVALS)
                self.fail(f"{value!r}: expected some of {known} with commas, or none", param, ctx)
        return () if found == ("none",) else found


@click.command(short_help="Time collectives, beside the MPI's own.")
@click.argument("collectives", nargs=-1, type=Name([*COLLECTIVES, "all"]))
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
    "--compare",
    default="native",
    type=Rivals(),
    show_default=True,
    help="native (the MPI's own), gloo (of torch.distributed), both with a comma, or none. With "
    "--device cuda none unless named: an MPI's own collective may crash on device memory.",
)
@click.option("--form", type=click.Choice(list(FORMS)), default="blocking", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True)
@click.option(
    "--device",
    type=click.Choice(["host", "cuda"]),
    default="host",
    show_default=True,
    help="Where buffers lie; cuda are arrays of CuPy, timed by events.",
)
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
    help="Time for each size or comparison; fewer rounds where one takes long, but at least 10.",
)
@click.option(
    "--plot",
    metavar="FILE",
    multiple=True,
    help="Draw busbw and ratio (PNG, SVG or PDF); - draws in the terminal.",
)
@click.option("--study", is_flag=True, help="Show what decides real speed, in five comparisons.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    collectives: tuple[str, ...],
    sizes: tuple[int, ...],
    algorithms: str,
    compare: tuple[str, ...],
    form: str,
    dtype: str,
    device: str,
    repeats: int,
    seconds: float,
    plot: tuple[str, ...],
    study: bool,
    json_file: str | None,
) -> None:
    """Time collectives: size, time, bandwidth, share of the limit, ratio to rivals.

    \b
      mpiexec -n 8 mpicoll bench allreduce
      mpiexec -n 8 mpicoll bench allreduce bcast --sizes 1K:64M --algorithms all
      mpiexec -n 8 mpicoll bench alltoall -a pairwise,bruck --plot alltoall.png --json a.json
      mpiexec -n 8 mpicoll bench allreduce --compare native,gloo --dtype bfloat16 --plot -
      mpiexec -n 8 mpicoll bench allreduce --form persistent
      mpiexec -n 4 mpicoll bench allreduce --device cuda
      mpiexec -n 8 mpicoll bench --study

    \b
    size     bytes of the vector on one rank, or of all blocks together
    algbw    size / median time
    busbw    algbw times what makes it comparable to the wire, as nccl-tests has it:
             allreduce 2(P-1)/P; gather, scatter, allgather, reduce_scatter and
             alltoall (P-1)/P; others 1
    share    busbw / what plain messages reach in the same run: one way for bcast,
             reduce, gather and scatter, both ways at once for the others
    / native time divided by the MPI's own in the same round, the median over rounds, with its
             95 % interval; below 1 is faster. ≈ is within the noise of native against itself.
    """
    _can_be_done(ctx, collectives, study)
    compare = _compared(ctx, compare, device)
    wanted = tuple(COLLECTIVES) if "all" in collectives else tuple(dict.fromkeys(collectives))
    chosen = _algorithms(wanted, algorithms) if wanted else {}
    pictures = [file for file in plot if file != "-"]
    if pictures:
        _need_matplotlib()
    from mpicoll.cli.bench_rivals import open_rivals
    from mpicoll.cli.bench_run import Race
    from mpicoll.cli.facts import gather_facts, header
    from mpicoll.cli.world import open_world

    world = open_world(json_file, *pictures)
    screen = console(json_file)
    with ExitStack() as stack:
        comm, race = world, Race(form, dtype, seconds, repeats)
        if device == "cuda":
            comm, race = _on_device(world, race, stack)
        rivals = open_rivals(comm, compare, stack)
        facts = gather_facts(comm) | {"memory": race.memory.words}
        for line in (*header(facts), *filter(None, [race.memory.words])):
            screen.print(line)
        policy = _policy(screen, race, "comparison" if study else "size")
        data: dict[str, Any] = {"environment": facts, "policy": policy}
        if study:
            from mpicoll.cli.bench_study import run_studies

            data["studies"] = run_studies(screen, comm, bool(rivals), seconds, repeats)
        else:
            data |= _tables(screen, comm, chosen, sizes, rivals, race, "-" in plot)
    if world.rank == 0:
        _draw(screen, data, header(facts), pictures, compare)
    write_json(json_file, "bench", data)
    if _faults(data):
        raise click.exceptions.Exit(1)


def _compared(ctx: click.Context, compare: tuple[str, ...], device: str) -> tuple[str, ...]:
    """Return the rivals that were asked for; Gloo takes no device memory."""
    if device == "host":
        return compare
    if "gloo" in compare:
        refuse(f"--compare gloo: Gloo takes host memory only; leave it out with --device {device}")
    named = ctx.get_parameter_source("compare") is not ParameterSource.DEFAULT
    return compare if named else ()


def _on_device(comm: Comm, race: Race, stack: ExitStack) -> tuple[Comm, Race]:
    """Return a communicator for device memory and the race on it; without one refuse."""
    from mpicoll.cli.bench_rivals import afterwards
    from mpicoll.cli.bench_run import item_of
    from mpicoll.cli.cuda import need
    from mpicoll.comm import Comm

    memory = need(comm, item_of(race.dtype), "--device cuda")
    mine = Comm(comm.Dup(), memory="device")
    afterwards(stack, mine.Free)
    return mine, replace(race, memory=memory)


def _can_be_done(ctx: click.Context, collectives: tuple[str, ...], study: bool) -> None:
    """Refuse what does not go together."""
    if not study:
        if not collectives:
            raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
        return
    given = [
        "COLLECTIVE" if name == "collectives" else f"--{name}"
        for name in ctx.params
        if name not in _OF_A_STUDY
        and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and ctx.params[name] != ()
    ]
    if given:
        refuse(f"--study has its own calls; leave out {', '.join(given)}")
    if "gloo" in ctx.params["compare"]:
        refuse("--study compares with native or none, not with gloo")


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


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        refuse("--plot FILE needs Matplotlib: pip install 'mpicoll[plot]'; --plot - does not")


def _policy(screen: Console, race: Race, each: str) -> dict[str, Any]:
    """Say how it is timed, and return it."""
    from mpicoll.cli.timing import FEWEST, POLICY, WARM_UP

    text = f"{POLICY} {race.memory.policy}".rstrip()
    rounds = f"at most {race.repeats} rounds or {race.seconds:g} s a {each}"
    screen.print(
        f"\n[dim]{text} {WARM_UP} calls to warm up, {rounds}, at least "
        f"{min(FEWEST, race.repeats)}; {race.form}, {race.dtype}. {FORMS[race.form]}[/dim]\n"
    )
    return {
        "text": text,
        "warm_up": WARM_UP,
        "repeats": race.repeats,
        "seconds": race.seconds,
        "form": race.form,
        "dtype": race.dtype,
        "memory": race.memory.name,
    }


def _tables(
    screen: Console,
    comm: Comm,
    chosen: dict[str, list[str]],
    sizes: tuple[int, ...],
    rivals: Sequence[Rival],
    race: Race,
    bars: bool,
) -> dict[str, Any]:
    """Time and show one collective after the other; return the limit and all rows."""
    from mpicoll.cli.bench_bars import show
    from mpicoll.cli.bench_limit import measure_limit
    from mpicoll.cli.bench_run import measure, shapes, taking_part
    from mpicoll.cli.world import native

    limit = measure_limit(native(comm), race.seconds, race.repeats, race.memory)
    show_limit(screen, limit, race.memory)
    results: list[dict[str, Any]] = []
    left_out: dict[str, list[str]] = {}
    for name, algorithms in chosen.items():
        wanted = shapes(name, comm.size, sizes, race.dtype)
        kept, left_out[name] = taking_part(comm, wanted[0], rivals, race)
        shown = [rival.name for rival in kept]
        board, rows = table(shown), []
        for shape in wanted:
            found = measure(comm, shape, algorithms, kept, race, limit)
            add_rows(board, found, shown)
            rows += found
        screen.print(f"[bold]{name}[/bold], {comm.size} rank{'s' * (comm.size != 1)}")
        screen.print(board)
        for words in left_out[name]:
            screen.print(f"[yellow]Timed without: {words}.[/yellow]")
        conclude(screen, rows, shown)
        if bars:
            show(screen, rows, shown)
        results += rows
    return {"limit": limit, "left_out": left_out, "results": results}


def _draw(
    screen: Console,
    data: dict[str, Any],
    head: list[str],
    files: Sequence[str],
    rivals: Sequence[str],
) -> None:
    for file in files:
        from mpicoll.cli.bench_plot import draw

        draw(data["results"], head, Path(file), rivals, data["limit"])
        screen.print(f"{file}: busbw and ratio by size")


def _faults(data: dict[str, Any]) -> bool:
    """Whether any data were wrong; what is looked at is equal on all ranks."""
    lines = [line for study in data.get("studies", ()) for line in study["lines"]]
    limits = list(data.get("limit", {}).values())
    return any(one["fault"] for one in (*data.get("results", ()), *lines, *limits))
