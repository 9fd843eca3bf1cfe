"""The MPI side of the command line. Loads mpi4py; sub-commands import it when they run."""

from __future__ import annotations

import sys

import click

from mpicoll.cli import launch
from mpicoll.cli.common import fault_of
from mpicoll.cli.mpi import MPI
from mpicoll.comm import Comm


def open_world(*files: str | None, warn: bool = True) -> Comm:
    """Return the wrapped world.

    ``files`` will be written by rank 0; what it finds wrong with them ends all ranks. A
    launcher whose ranks do not see each other is warned of.
    """
    world = MPI.COMM_WORLD
    fault = next(filter(None, map(fault_of, files)), "") if world.rank == 0 else ""
    fault = world.bcast(fault, root=0)
    if fault:
        raise click.UsageError(fault)
    warning = launch.disagreement(world.size)
    if warn and warning and launch.speaks():
        print(f"mpicoll: warning: {warning}", file=sys.stderr)
    return Comm(world)


def native(comm: Comm) -> MPI.Intracomm:
    """Return the same communicator with the MPI's own collectives."""
    return MPI.Intracomm(comm)
