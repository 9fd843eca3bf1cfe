"""The choice of an algorithm: named, set, or automatic; what it may look at."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mpicoll.algorithms import find, names
from mpicoll.errors import AlgorithmError, SettingError
from mpicoll.schedule.contracts import COLLECTIVES, REDUCTIONS
from mpicoll.selection.choose import Wanted, choose, default, unfit
from mpicoll.selection.settings import Settings, gather, parse

SIZES = (1, 2, 3, 5, 8, 33, 128, 1000)
BYTES = (0, 1, 100, 10_000, 1_000_000, 1 << 32)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_default_exists_and_fits(collective: str) -> None:
    kinds = [Wanted(collective, size, nbytes) for size in SIZES for nbytes in (*BYTES, None)]
    if collective in REDUCTIONS:
        orders = (None,) if "scan" in collective else (None, "rank")
        kinds = [
            Wanted(collective, size, nbytes, commutative, wide, True, order)
            for size in SIZES
            for nbytes in BYTES
            for commutative in (True, False)
            for wide in (True, False)
            for order in orders
        ]
    if collective == "alltoall":
        kinds += [Wanted(collective, size, None, uniform=False) for size in SIZES]
    for wanted in kinds:
        algorithm = find(collective, default(wanted))
        assert unfit(algorithm, wanted) == "", wanted
        assert choose(wanted, Settings()).algorithm is algorithm


def test_wide_sums_round_once() -> None:
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        for nbytes in BYTES:
            wanted = Wanted(collective, 8, nbytes, wide=True)
            assert find(collective, default(wanted)).order == "sequential"


def test_choice_looks_at_nothing_that_ranks_may_differ_in() -> None:
    """Law 1: whoever adds a field here must say why all ranks have the same value."""
    assert [field.name for field in fields(Wanted)] == [
        *("collective", "size", "nbytes", "commutative", "wide", "uniform", "order")
    ]


def test_named_algorithm_wins_over_settings_and_default() -> None:
    settings = Settings((("bcast", "chain"),))
    assert choose(Wanted("bcast", 8, 10), settings).algorithm.name == "chain"
    assert choose(Wanted("bcast", 8, 10), settings, "binomial").algorithm.name == "binomial"
    assert choose(Wanted("reduce", 8, 10), settings).algorithm.name == "binomial"


def test_setting_that_can_not_serve_the_call_gives_the_default() -> None:
    settings = Settings((("allreduce", "ring"),))
    wanted = Wanted("allreduce", 8, 10, commutative=False)
    assert choose(wanted, settings).algorithm.name == default(wanted)


@pytest.mark.parametrize(
    ("wanted", "algorithm", "message"),
    [
        (Wanted("bcast", 4), "rings", "bcast has no algorithm 'rings'; known: binomial"),
        (Wanted("allreduce", 4, 8, commutative=False), "ring", "does not commute; fit: "),
        (Wanted("allreduce", 4, 8, order="rank"), "ring", "left to right .* direct, gather"),
        (Wanted("alltoall", 4, uniform=False), "bruck", "wants equal counts"),
    ],
)
def test_named_algorithm_that_does_not_fit(wanted: Wanted, algorithm: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        choose(wanted, Settings(), algorithm)


def test_radix() -> None:
    wanted = Wanted("alltoall", 8, 64)
    assert choose(wanted, Settings(), "bruck:4").radix == 4
    assert choose(wanted, Settings((("alltoall", "bruck:3"),))).radix == 3
    assert choose(wanted, Settings(), "bruck").radix == 2
    for name, message in (
        ("bruck:1", "radix '1'"),
        ("bruck:x", "radix 'x'"),
        ("linear:4", "no radix"),
    ):
        with pytest.raises(AlgorithmError, match=message):
            choose(wanted, Settings(), name)


def test_order_that_no_default_keeps() -> None:
    with pytest.raises(AlgorithmError, match="order='left'"):
        choose(Wanted("allreduce", 4, 8, order="left"), Settings())  # type: ignore[arg-type]


def test_segment_is_heeded_by_segmented_algorithms_only() -> None:
    assert choose(Wanted("bcast", 4, 8), Settings(), "chain", 100).segment_bytes == 100
    assert choose(Wanted("bcast", 4, 8), Settings(), "binomial", 100).segment_bytes == 0
    with pytest.raises(AlgorithmError, match="segment=-1"):
        choose(Wanted("bcast", 4, 8), Settings(), "chain", -1)


def test_settings() -> None:
    environment = {"MPICOLL_ALLREDUCE": "ring", "HOME": "x", "MPICOLL_VENV": "y"}
    assert gather(environment) == {"MPICOLL_ALLREDUCE": "ring"}
    assert parse(gather(environment)).algorithm("allreduce") == "ring"
    assert parse({}).algorithm("allreduce") is None
    assert parse({"MPICOLL_ALLREDUCE": "auto", "MPICOLL_BCAST": ""}) == Settings()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MPICOLL_ALLREDUCE": "rings"}, "MPICOLL_ALLREDUCE=rings: .* known: circulant"),
        ({"MPICOLL_ALREDUCE": "ring"}, "unknown variable MPICOLL_ALREDUCE; known: "),
    ],
)
def test_wrong_settings(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse(variables)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm(collective: str) -> None:
    assert names(collective)
