"""Every algorithm keeps its contract, and takes the steps and bytes it says."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace

import proofs
import pytest

from mpicoll.algorithms import Algorithm, every
from mpicoll.schedule.contracts import ROOTED
from mpicoll.schedule.cost import cost
from mpicoll.schedule.ir import Call, Schedule

ALGORITHMS = every()
IDS = [f"{item.collective}-{item.name}" for item in ALGORITHMS]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 32, 33)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave out the search for cycles, which proofs have none of: a fifth of their time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_contract(algorithm: Algorithm) -> None:
    for size in proofs.SIZES:
        assert proofs.prove_all(algorithm, size) > 0


def _even(algorithm: Algorithm, size: int, block: int, segment: int, root: int) -> list[Call]:
    collective = algorithm.collective
    if collective == "barrier":
        return [Call(rank, size, (1,)) for rank in range(size)]
    if collective == "alltoall":
        return proofs.alltoall_calls(algorithm, [(block,) * size] * size)
    if collective in ("allgather", "gather", "reduce_scatter", "scatter"):
        return [Call(rank, size, (block,) * size, root, segment) for rank in range(size)]
    return [Call(rank, size, (block * size,), root, segment) for rank in range(size)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
@pytest.mark.parametrize("segments", [1, 3])
def test_steps_and_bytes(algorithm: Algorithm, segments: int) -> None:
    """Hold the docstring to counting: the most steps and the most bytes of any rank."""
    if segments > 1 and not algorithm.segmented:
        segments = 1
    for size in SIZES:
        for root in {0, size - 1} if algorithm.collective in ROOTED else {0}:
            # A block has 96 * size elements, so every cut that any algorithm makes of it
            # or of the whole vector into blocks or segments is even.
            block = 96 * size
            cut = block if algorithm.collective == "allreduce" else block * size
            if algorithm.collective in ("reduce_scatter", "allgather"):
                cut = block
            segment = cut // segments if algorithm.segmented else 0
            group = _even(algorithm, size, block, segment, root)
            costs = [cost(schedule) for schedule in proofs.build(algorithm, group)]
            names = {"P": size, "N": block * size, "S": segments}
            steps = algorithm.evaluate("Steps", **names)
            sent = algorithm.evaluate("Sent", **names) if size > 1 else 0
            where = f"{algorithm.collective} {algorithm.name}, P = {size}, S = {segments}"
            assert max(item.steps for item in costs) == steps, where
            assert math.isclose(max(item.sent for item in costs), sent), where
            assert sum(c.sent for c in costs) == sum(c.received for c in costs), where


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_docstring_cites_a_source(algorithm: Algorithm) -> None:
    assert "Source: " in (algorithm.build.__doc__ or "")


def test_a_proof_is_shared_only_by_equal_programs() -> None:
    """A fault that is in one of two equal programs is found, whichever comes first.

    Where one element is sent, a segment of 1 changes nothing: its proof is shared.
    """
    chain = next(item for item in ALGORITHMS if (item.collective, item.name) == ("bcast", "chain"))
    group = [Call(rank, 5, (1,), 0, 0) for rank in range(5)]
    cut = [Call(rank, 5, (1,), 0, 1) for rank in range(5)]
    assert proofs.build(chain, group) == proofs.build(chain, cut)
    assert proofs.prove_all(chain, 5) > 0
    for call in (group[4], cut[4]):

        def damaged(own: Call, at: Call = call) -> Schedule:
            return Schedule() if own == at else chain.build(own)

        with pytest.raises(AssertionError, match=f"segment={call.segment}, .* does not end"):
            proofs.prove_all(replace(chain, build=damaged), 5)
