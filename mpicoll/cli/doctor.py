"""`mpicoll doctor`: the environment in one page, with what is wrong and what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

import mpicoll
from mpicoll.cli import device_words, doctor_page, launch
from mpicoll.cli.common import console, json_option, write_json
from mpicoll.cli.devices import as_json, nodes_of, pointers
from mpicoll.cli.doctor_advice import KINDS, THREAD_VARIABLES, Advice, advice, source_folder
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
    facts["source"] = source_folder(Path(mpicoll.__file__).parent)
    facts["variables"] |= variables
    settings = Settings() if fault else parse(variables, found)
    facts["settings"] = dict(settings.algorithms)
    facts["choice"] = _choice(settings, variables)
    places = gather_places(comm)
    aware = variables.get(PREFIX + "CUDA_AWARE", "")
    nodes, direct = nodes_of(places), pointers(aware, places)
    facts |= {"devices": as_json(nodes), "cuda_aware": [one._asdict() for one in direct]}
    wrong = advice(comm.size, facts, fault)
    wrong += [Advice("warning", text) for text in device_words.warnings(nodes, aware)]
    wrong += [Advice("note", text) for text in device_words.notes(nodes, aware)]
    wrong.sort(key=lambda item: KINDS.index(item.kind))
    facts["advice"] = [item._asdict() for item in wrong]
    screen = console(json_file)
    if launch.speaks():
        doctor_page.show(screen, comm.size, facts, nodes, direct, wrong)
    write_json(json_file, "doctor", facts)
    if comm.bcast(any(item.kind == "error" for item in wrong), root=0):
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
        for name in (*sorted(SCRIPT_VARIABLES), *THREAD_VARIABLES)
        if name in os.environ
    }
