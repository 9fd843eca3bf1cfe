"""Algorithms are entered once, found by name, and state their steps and bytes."""

from __future__ import annotations

import pytest

from mpicoll.algorithms import Algorithm, every, find, names
from mpicoll.algorithms.registry import algorithm
from mpicoll.errors import AlgorithmError
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.schedule.ir import Call, Schedule

ALGORITHMS = every()
IDS = [f"{item.collective}-{item.name}" for item in ALGORITHMS]


def build(call: Call) -> Schedule:
    """Do it in one go,
    or in two.

    Steps: 2 * lg + odd; one less on the root
    Sent: N * (P - 1) / P

    And so on.
    """
    return Schedule()


def bare(call: Call) -> Schedule:
    return Schedule()


EXAMPLE = Algorithm("allreduce", "example", build)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm(collective: str) -> None:
    known = names(collective)
    assert known
    assert list(known) == sorted(set(known))
    for name in known:
        found = find(collective, name)
        assert (found.collective, found.name) == (collective, name)
        assert found in ALGORITHMS


def test_every_is_sorted() -> None:
    keys = [(COLLECTIVES.index(item.collective), item.name) for item in ALGORITHMS]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_unknown_name_lists_the_known_ones() -> None:
    known = ", ".join(names("barrier"))
    with pytest.raises(AlgorithmError, match=f"barrier has no algorithm 'nosuch'; known: {known}"):
        find("barrier", "nosuch")
    with pytest.raises(ValueError, match="nosuch"):  # also what callers of NumPy expect
        find("allreduce", "nosuch")


def test_two_of_one_name() -> None:
    known = find("barrier", "dissemination")
    with pytest.raises(AlgorithmError, match="barrier has two algorithms named 'dissemination'"):
        algorithm("barrier", "dissemination")(build)
    assert find("barrier", "dissemination") is known


def test_formula_ends_at_a_semicolon() -> None:
    assert EXAMPLE.formula("Steps") == "2 * lg + odd"
    assert EXAMPLE.formula("Sent") == "N * (P - 1) / P"


@pytest.mark.parametrize(
    ("size", "steps"), [(1, 0), (2, 2), (3, 5), (4, 4), (5, 7), (8, 6), (9, 9), (128, 14)]
)
def test_evaluate(size: int, steps: int) -> None:
    assert EXAMPLE.evaluate("Steps", P=size) == steps
    assert EXAMPLE.evaluate("Sent", P=size, N=16) == 16 * (size - 1) / size


def test_no_formula() -> None:
    for label in ("Steps", "Sent"):
        with pytest.raises(AlgorithmError, match=rf"scan bare: .* no line '{label}: …'"):
            Algorithm("scan", "bare", bare).formula(label)


def test_summary() -> None:
    assert EXAMPLE.summary == "Do it in one go, or in two."
    assert Algorithm("scan", "bare", bare).summary == ""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_docstring(algorithm: Algorithm) -> None:
    assert algorithm.summary.endswith(".")
    for size in (1, 2, 3, 8):
        for label in ("Steps", "Sent"):
            assert algorithm.evaluate(label, P=size, N=12 * size) >= 0


def test_unknown_collective_lists_the_known_ones() -> None:
    with pytest.raises(AlgorithmError, match="no collective 'allreduc'; known: allgather, allred"):
        find("allreduc", "ring")
