"""`mpicoll doctor`: the environment in one page, with what is wrong and what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpicoll.cli import device_words, launch
from mpicoll.cli.common import console, json_option, write_json
from mpicoll.cli.devices import Node, Pointers, as_json, nodes_of, pointers
from mpicoll.errors import SettingError
from mpicoll.selection.model import CROWDED, DEFAULT
from mpicoll.selection.settings import (
    PREFIX,
    SCRIPT_VARIABLES,
    Found,
    Settings,
    parse,
    read,
)

if TYPE_CHECKING:
    from mpicoll.comm import Comm

KINDS = ("error", "warning", "note")  #: the worst first
NODES = 8  #: that are shown one by one
_YIELD = ", or set OMPI_MCA_mpi_yield_when_idle=1"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Advice(NamedTuple):
    """Something wrong: "error" gives wrong worlds or no run, "warning" slow ones."""

    kind: str
    text: str


@click.command()
@click.option(
    "--flight",
    "folder",
    metavar="DIR",
    help="Say what the dumps of the flight recorder in DIR mean: who is behind, at which call.",
)
@json_option
def doctor(folder: str | None, json_file: str | None) -> None:
    """Show the environment on one page, and what is wrong with it.

    \b
      mpicoll doctor                    MPI, versions, variables
      mpiexec -n 8 mpicoll doctor       also: do the ranks see each other, where do they run?
      srun -n 64 mpicoll doctor --json doctor.json
      mpicoll doctor --flight mpicoll-flight    who hangs? reads the dumps of all ranks

    MPI and launcher, thread level, ranks per node, binding, oversubscription, devices and who
    uses which, whether device pointers go to the MPI, variables and the settings they make,
    versions, kernels. Exit status 1 if something is wrong.
    """
    if folder is not None:
        # Needs no MPI, and no world: the job that is looked at may still hang.
        from mpicoll.cli.flight import report

        report(folder, json_file)
        return

    from mpicoll.cli.facts import gather_facts, gather_places, kernels
    from mpicoll.cli.mpi import MPI
    from mpicoll.runtime.place import place

    variables, found = read(os.environ, place(MPI.COMM_WORLD))
    fault = _fault(variables, found)
    comm = _world(json_file, variables if fault else {})
    facts = gather_facts(comm)
    facts |= {"kernels": kernels(), "executor": "python", "variables": _variables()}
    facts["variables"] |= variables
    settings = Settings() if fault else parse(variables, found)
    facts["settings"] = dict(settings.algorithms)
    facts["choice"] = _choice(settings, variables)
    places = gather_places(comm)
    aware = variables.get(PREFIX + "CUDA_AWARE", "")
    nodes, direct = nodes_of(places), pointers(aware, places)
    facts |= {"devices": as_json(nodes), "cuda_aware": [one._asdict() for one in direct]}
    advice = _advice(comm, facts, fault)
    advice += [Advice("warning", text) for text in device_words.warnings(nodes, aware)]
    advice += [Advice("note", text) for text in device_words.notes(nodes, aware)]
    advice.sort(key=lambda item: KINDS.index(item.kind))
    facts["advice"] = [item._asdict() for item in advice]
    screen = console(json_file)
    if launch.speaks():
        _show(screen, comm, facts, nodes, direct, advice)
    write_json(json_file, "doctor", facts)
    wrong = comm.bcast(any(item.kind == "error" for item in advice), root=0)
    if wrong:
        raise click.exceptions.Exit(1)


def _world(json_file: str | None, hidden: dict[str, str]) -> Comm:
    """Return the wrapped world, without the warning that the page itself gives.

    Variables with a fault are hidden from it, since it would refuse them.
    """
    from mpicoll.cli.world import open_world

    for name in hidden:
        del os.environ[name]
    try:
        return open_world(json_file, warn=False)
    finally:
        os.environ.update(hidden)


def _choice(settings: Settings, variables: dict[str, str]) -> str:
    """Say what the automatic choice of algorithms rests on."""
    rates = settings.rates
    given = replace(rates, load=1.0) in (DEFAULT, CROWDED)
    text = (
        f"cost model, rates {'of the package' if given else 'measured here'}: "
        f"{1e6 * rates.step:.3g} µs a step, {1e6 * rates.message:.3g} µs a message, "
        f"{1e-9 / rates.byte:.3g} GB/s sent, {1e-9 / rates.local:.3g} GB/s reduced"
    )
    if settings.tuning is not None:
        table = f"{variables.get(PREFIX + 'TUNING', '')}, {len(settings.tuning.entries)} entries"
        text = f"tuning table {table}; where it has none, {text}"
    return text


def _fault(variables: dict[str, str], found: Found) -> str:
    try:
        parse(variables, found)
    except SettingError as error:
        return str(error)
    return ""


def _variables() -> dict[str, str]:
    """Return the variables of the set-up scripts and those that decide about threads."""
    return {
        name: os.environ[name]
        for name in (*sorted(SCRIPT_VARIABLES), *_THREAD_VARIABLES)
        if name in os.environ
    }


def _advice(comm: Comm, facts: dict[str, Any], fault: str) -> list[Advice]:
    """Return what is wrong, but with devices."""
    found = []
    if text := launch.disagreement(comm.size):
        found.append(Advice("error", text))
    if fault:
        found.append(Advice("error", fault))
    crowded = [node for node in facts["nodes"] if node["oversubscribed"]]
    if crowded:
        node = crowded[0]
        found.append(
            Advice(
                "warning",
                f"oversubscribed: {node['ranks']} ranks on {node['cores']} core(s) of "
                f"{node['name']}. Ranks wait by spinning, so times say little: start fewer ranks"
                + _YIELD
                * facts["mpi"].startswith("Open MPI"),
            )
        )
    each = max(node["ranks"] for node in facts["nodes"])
    if each > 1 and not any(name in os.environ for name in _THREAD_VARIABLES):
        found.append(
            Advice(
                "warning",
                f"{each} ranks a node, and OMP_NUM_THREADS is not set: threads of NumPy's BLAS "
                "may fight with other ranks; OMP_NUM_THREADS=1 is a good start",
            )
        )
    if len({node["ranks"] for node in facts["nodes"]}) > 1:
        found.append(Advice("warning", "the nodes have different numbers of ranks"))
    if comm.size == 1 and launch.found() is None:
        found.append(
            Advice("note", "one rank, started alone; more with: mpiexec -n 8 mpicoll doctor")
        )
    return found


def _show(
    screen: Console,
    comm: Comm,
    facts: dict[str, Any],
    nodes: list[Node],
    direct: list[Pointers],
    advice: list[Advice],
) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("MPI", f"{facts['mpi']} (standard {facts['mpi_standard']})")
    started = launch.found()
    told = f", which says {started.size} ranks" if started and started.size else ""
    table.add_row("launcher", f"{facts['launcher']}{told}")
    table.add_row("world", f"{comm.size} ranks see each other" if comm.size > 1 else "1 rank")
    table.add_row("threads", f"MPI_THREAD_{facts['thread_level']}")
    table.add_row("", "")
    for number, node in enumerate(facts["nodes"][:NODES]):
        over = " [yellow](oversubscribed)[/]" if node["oversubscribed"] else ""
        table.add_row(
            "nodes" if number == 0 else "",
            f"{node['name']}: {node['ranks']} rank{'s' * (node['ranks'] != 1)}, "
            f"{node['cores']} core{'s' * (node['cores'] != 1)} to use, {node['binding']}{over}",
        )
    if len(facts["nodes"]) > NODES:
        table.add_row("", f"and {len(facts['nodes']) - NODES} more")
    table.add_row("processor", facts["cpu"])
    table.add_row("devices", escape("\n".join(device_words.lines(nodes))))
    table.add_row("CUDA-aware", escape("\n".join(device_words.pointer_lines(direct))))
    table.add_row("", "")
    versions = facts["versions"]
    table.add_row("versions", ", ".join(f"{name} {number}" for name, number in versions.items()))
    table.add_row("running", f"executor: {facts['executor']}; {facts['kernels']}")
    table.add_row("", "")
    variables = [f"{name}={value}" for name, value in sorted(facts["variables"].items())]
    table.add_row("variables", "\n".join(variables) or f"no {PREFIX}… variable is set")
    settings = [f"{name} by {algorithm}" for name, algorithm in facts["settings"].items()]
    rest = "everything by the automatic choice" if not settings else "the rest automatic"
    table.add_row("settings", ", ".join([*settings, rest]))
    table.add_row("choice", facts["choice"])
    screen.print(table)
    screen.print()
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for kind, text in advice:
        screen.print(f"[{colours[kind]}]{kind}:[/] {escape(text)}")
    if not any(kind in ("error", "warning") for kind, _ in advice):
        screen.print("[green]nothing is wrong[/]")
