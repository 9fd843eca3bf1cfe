"""A call on device memory that is interrupted: as tests/mpi/test_interrupt.py has it."""

from __future__ import annotations

import numpy as np
import pytest
from deferred import BACKEND, POLICIES, array, empty, host
from harness import Ranks
from interrupting import Interrupted, Interrupts

from mpicoll import Comm, PeerError
from mpicoll.runtime import staging

ITEMS = 7
NOWHERE = 1 << 30
FILES = {"device_run.py", "executor.py", "link.py", "progress.py"}


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
def test_an_interrupt_at_every_place(
    pointers: bool, algorithm: str, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised; the others get a right result or PeerError, and so does the next call."""
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    total = world.size * (world.size + 1) / 2
    for victim in sorted({0, ranks.size - 1}):
        place, hit = 0, True
        while hit:
            BACKEND.use(POLICIES[place % 3], pointers)
            x, out = array(np.full(ITEMS, world.rank + 1.0)), array(np.full(ITEMS, -7.0))
            error: Exception | None = None
            mine = ranks.rank == victim
            with Interrupts(place if mine else NOWHERE, FILES, {"course"}) as interrupts:
                try:
                    world.Allreduce(x, out, algorithm=algorithm)
                except (Interrupted, PeerError) as caught:
                    error = caught
            other = empty((ITEMS,), np.float64)
            world.Allreduce(x, other, algorithm=algorithm)
            assert (host(other) == total).all(), (place, interrupts.where)
            if mine:
                assert isinstance(error, Interrupted) == interrupts.hit, (place, interrupts.where)
            assert error is not None or (host(out) == total).all(), (place, interrupts.where)
            hit = ranks.comm.bcast(interrupts.hit, victim)
            place += 1
        assert place > 20
