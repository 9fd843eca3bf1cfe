"""What is kept of plans: bounded by what it weighs, whatever the calls are."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from mpicoll.algorithms import find
from mpicoll.runtime import plan

RANKS = 64


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    plan.recipe.cache_clear()
    yield
    plan.recipe.cache_clear()


def uneven(number: int) -> plan.Recipe:
    """Return the recipe of an all-to-all with counts that no other number has."""
    counts = (1000 + number,) + (1,) * (RANKS - 1)
    return plan.recipe(find("alltoall", "pairwise"), 0, 0, RANKS, counts, 0, 1, "", counts)


def test_equal_calls_share_a_recipe() -> None:
    assert uneven(1) is uneven(1)
    assert uneven(1) is not uneven(2)


def test_the_weight_is_that_of_the_memory() -> None:
    """So many bytes as KEPT takes them to be, for long chains and for many messages at once."""
    for name in ("pairwise", "linear"):
        algorithm, counts = find("alltoall", name), tuple(range(1000, 1256))
        gc.collect()
        tracemalloc.start()
        made = plan.recipe(algorithm, 0, 5, 256, counts, 0, 1, "", counts)
        gc.collect()
        nbytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 100 < nbytes / plan._weight(made.program) < 300


def test_calls_with_counts_of_their_own_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = plan._weight(uneven(0).program) + RANKS // 2
    room = 10
    monkeypatch.setattr(plan, "KEPT", room * weight)
    monkeypatch.setattr(plan, "_kept", 0)
    plan.recipe.cache_clear()
    gc.collect()
    tracemalloc.start()
    one = 0
    most = 0
    for number in range(60):
        uneven(number)
        now, _ = tracemalloc.get_traced_memory()
        one = one or now
        most = max(most, now)
        assert plan.recipe.cache_info().currsize <= room
    tracemalloc.stop()
    assert most < 2 * room * one
    assert plan.recipe.cache_info().currsize  # the last ones are kept
    assert uneven(59) is uneven(59)


def test_one_that_is_too_large_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "KEPT", 1)
    assert uneven(1) is uneven(1)
    uneven(2)
    assert plan.recipe.cache_info().currsize == 1
