"""A test of the harness, by hand: what a rank that hangs or fails looks like.

``MPICOLL_TEST_TIMEOUT=5 mpiexec -n 3 python -m pytest --with-mpi tests/mpi/hang.py``
ends in about ten seconds with the stacks of all ranks, the last rank in ``time.sleep``,
the others in the agreement; ``-k wait`` shows a collective that one rank never enters,
``-k raise`` a failure of one rank, ``-k gil`` a rank that never lets Python run.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from mpicoll import Comm


def test_raise(world: Comm) -> None:
    assert world.rank != world.size - 1, "this rank alone"


def test_sleep(world: Comm) -> None:
    if world.rank == world.size - 1:
        time.sleep(1000)


def test_wait(world: Comm) -> None:
    if world.rank != world.size - 1:
        world.Allreduce(np.ones(3), np.empty(3))
    else:
        raise RuntimeError("this rank never enters")


def test_gil(world: Comm) -> None:
    if world.rank == world.size - 1:
        ctypes.PyDLL(None).sleep(1000)
