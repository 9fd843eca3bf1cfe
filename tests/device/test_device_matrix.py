"""The matrix of tests/mpi with buffers on the device: on all ranks, on some, on one side.

By both protocols, whatever the device does early or late, and through the host as a whole.
"""

from __future__ import annotations

import cases
import pytest
import quirks
from cases import attempt, cover
from deferred import BACKEND, POLICIES
from device_exchange import DeviceExchange
from exchange import METHODS
from harness import Ranks

from mpicoll import Comm
from mpicoll.runtime import staging
from mpicoll.schedule.contracts import REDUCTIONS

SHOWN = 12


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize("method", METHODS)
def test_device_matrix(
    method: str,
    pointers: bool,
    world: Comm,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "Exchange", DeviceExchange)
    # What data has to move where is known without the MPI's own call.
    native = quirks.native
    monkeypatch.setattr(
        quirks, "native", lambda case, size: case.collective in REDUCTIONS and native(case, size)
    )
    failures, tried = [], 0
    for case in cover(method, world.size, ranks.seed):
        if case.number % 2 != pointers:
            continue
        tried += 1
        BACKEND.use(POLICIES[case.number // 2 % 3], pointers)
        # Some go through the host as a whole, and not on all ranks.
        hosted = (case.number + ranks.rank) % 7 == 0
        monkeypatch.setattr(staging, "SMALL_BYTES", 1 << 20 if hosted else 0)
        wrong, _ = attempt(case, world, ranks.seed)
        if wrong:
            failures.append(f"{BACKEND.policy}: {case}: {wrong}")
    assert tried
    assert not failures, f"MPICOLL_TEST_SEED={ranks.seed}: {len(failures)}\n" + "\n".join(
        failures[:SHOWN]
    )
