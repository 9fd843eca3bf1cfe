"""Loads mpi4py for the command line, and MPI only if it can start.

An MPI that is not that of the launcher may end the process while it starts, with a message
that helps nobody; so the two are compared first.
"""

from __future__ import annotations

import sys
import warnings

import click
import mpi4py

from mpicoll.cli import launch

if "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True

from mpi4py import MPI

if not MPI.Is_initialized():
    _fault = launch.mismatch(MPI.get_vendor()[0])
    if _fault:
        raise click.ClickException(_fault)
    with warnings.catch_warnings():
        # What it warns of is said by launch.disagreement, once and with what to do.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)

__all__ = ["MPI"]
