"""Expert dispatch with rows of the device: the bits that it gives on the host, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import like_cupy as cupy
import ml_dtypes
import numpy as np
import pytest
from deferred import BACKEND, POLICIES
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.parallel import ExpertDispatch

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["f2", BFLOAT16, "f4", "f8"]

#: Tokens of each rank, by its number.
SPREADS: dict[str, Callable[[int], int]] = {
    "uneven": lambda rank: (3 * rank + 2) % 7,
    "even": lambda rank: 5,
    "none": lambda rank: 0,
    "last": lambda rank: 8 * (rank == LAST),
}
#: Factor, over what it is counted, and how many tokens there are.
CAPACITIES = [
    (None, "rank", "uneven"),
    (0.5, "rank", "even"),
    (0.75, "world", "uneven"),
    (0.5, "world", "last"),
    (None, "rank", "none"),
]

Array = Any
Move = Callable[[Array], Array]


def here(array: Array) -> Array:
    return array.copy()


def side(where: str) -> Move:
    """Return what brings this rank's arrays to where the test wants its rows."""
    there = {"device": True, "even ranks": RANK % 2 == 0, "odd ranks": RANK % 2 == 1}[where]
    return cupy.asarray if there else here


def drawn(rng: np.random.Generator, n: int, count: int, dtype: Any, hidden: int = 5) -> Any:
    """Return tokens, numbers, weights and a gradient.

    All but the weights are small whole numbers, so that sums over a row are exact in any order.
    """
    numbers = np.argsort(rng.random((n, count)), axis=1)[:, :2]
    tokens, gradient = rng.integers(-8, 9, (2, n, hidden)).astype(dtype)
    return tokens, numbers, rng.random((n, 2)).astype(np.float32), gradient


def run(dispatch: ExpertDispatch, case: Any, rows: Move, numbers: Move) -> dict[str, Array]:
    """Go there and back, forwards and backwards, and return all that comes out, by name."""
    tokens, wanted, weights, gradient = case
    sent = dispatch.dispatch(rows(tokens), numbers(wanted), rows(weights))
    outputs = sent.tokens * 2
    for number, part in sent:
        outputs[part] += number
    combined = sent.combine(outputs)
    of_outputs, of_weights = combined.backward(rows(gradient))
    restored = sent.restore(outputs)
    found = {
        "arrived": sent.tokens,
        "combined": combined.tokens,
        "gradient of outputs": of_outputs,
        "gradient of weights": of_weights,
        "restored": restored,
        "delivered": sent.deliver(restored),
        "gradient of tokens": sent.backward(of_outputs * 2),
    }
    wanted_kind = type(rows(tokens))
    assert {name for name, one in found.items() if type(one) is not wanted_kind} == set()
    load = sent.load()
    return found | {
        "counts": sent.counts,
        "kept": sent.kept,
        "dropped": sent.dropped,
        "load": np.stack([load.rows, load.dropped]),
    }


def on_host(found: dict[str, Array]) -> dict[str, Array]:
    return {name: cupy.asnumpy(one) for name, one in found.items()}


def differing(found: dict[str, Array], expected: dict[str, Array]) -> dict[str, Array]:
    return {
        name: (one, expected[name])
        for name, one in on_host(found).items()
        if (one.dtype, one.shape, one.tobytes())
        != (expected[name].dtype, expected[name].shape, expected[name].tobytes())
    }


@contextmanager
def waits(expected: int) -> Iterator[None]:
    """Expect so many copies to the host, of all that are asked for by name."""
    taken, get = [], cupy.ndarray.get

    def counted(self: Any) -> Any:
        taken.append(self.shape)
        return get(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.ndarray, "get", counted)
        yield
    assert len(taken) == expected, taken


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["device", "even ranks", "odd ranks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_host(
    dtype: Any, where: str, policy: Any, pointers: bool, world: Comm, rng: np.random.Generator
) -> None:
    BACKEND.use(policy, pointers)
    count = 2 * SIZE + 1
    for factor, over, spread in CAPACITIES:
        options: Any = {"capacity_factor": factor, "capacity_over": over}
        dispatch = ExpertDispatch(count, world, **options)
        case = drawn(rng, SPREADS[spread](RANK), count, dtype)
        expected = run(dispatch, case, here, here)
        found = run(dispatch, case, side(where), cupy.asarray if over == "world" else here)
        assert not differing(found, expected)


@pytest.mark.parametrize("hidden", [0, 1, 33])
@pytest.mark.parametrize("owners", ["first", "last"])
def test_widths_and_owners(
    owners: str, hidden: int, world: Comm, rng: np.random.Generator
) -> None:
    BACKEND.use("late", False)
    shares = [4] + [0] * LAST
    dispatch = ExpertDispatch(4, world, owners=shares if owners == "first" else shares[::-1])
    case = drawn(rng, 3 + RANK, 4, np.float32, hidden)
    expected = run(dispatch, case, here, here)
    assert not differing(run(dispatch, case, side("even ranks"), cupy.asarray), expected)


@pytest.mark.parametrize("hot", [0, 4])
@pytest.mark.parametrize("where", ["device", "odd ranks"])
def test_all_tokens_to_one_expert(
    where: str, hot: int, world: Comm, rng: np.random.Generator
) -> None:
    BACKEND.use("late", True)
    tokens, _, weights, gradient = drawn(rng, 4 + RANK, 5, BFLOAT16)
    for factor in (None, 1.5):
        dispatch = ExpertDispatch(5, world, capacity_factor=factor)
        case = tokens, np.full((4 + RANK, 1), hot), weights[:, :1], gradient
        expected = run(dispatch, case, here, here)
        assert not differing(run(dispatch, case, side(where), here), expected)


def test_sums_over_a_row_keep_their_bound(world: Comm, rng: np.random.Generator) -> None:
    """A device may add the products of a row in another order; all else has the same bits."""
    BACKEND.use("late", True)
    hidden, count = 40, 2 * SIZE
    dispatch = ExpertDispatch(count, world)
    _, numbers, weights, _ = drawn(rng, 6, count, np.float32)
    tokens, gradient = rng.standard_normal((2, 6, hidden)).astype(np.float32)
    case = tokens, numbers, weights, gradient
    expected = run(dispatch, case, here, here)
    found = on_host(run(dispatch, case, cupy.asarray, here))
    assert set(differing(found, expected)) <= {"gradient of weights"}
    name = "gradient of weights"
    terms = np.abs(gradient[:, None] * expected["restored"]).sum(axis=2)
    # Products are rounded alike; two sums of so many terms, each in some order.
    bound = 2 * hidden * 2.0**-24 * terms * (1 + 1e-4)
    assert (np.abs(found[name] - expected[name]) <= bound).all()


def test_weights_may_change_afterwards(world: Comm) -> None:
    BACKEND.use("late", True)
    tokens, weights = cupy.ones((3, 2), np.float32), cupy.full((3, 1), 2, np.float32)
    sent = ExpertDispatch(2, world).dispatch(tokens, [[0], [1], [1]], weights)
    weights[...] = tokens[...] = 9
    assert cupy.asnumpy(sent.combine(sent.tokens).tokens).tolist() == [[2, 2]] * 3


def test_strided_rows_and_plain_lists(world: Comm) -> None:
    """What is no array has no place: it comes to where the tokens are."""
    BACKEND.use("late", True)
    plain = np.arange(24.0).reshape(6, 4)
    sent = ExpertDispatch(3, world).dispatch(
        cupy.asarray(plain)[::2, ::-2], [[2], [0], [2]], [[0.5], [2.0], [4.0]]
    )
    combined = sent.combine(sent.tokens)
    expected = plain[::2, ::-2] * [[0.5], [2], [4]]
    assert cupy.asnumpy(combined.tokens).tolist() == expected.tolist()
    _, of_weights = combined.backward([[1.0, 1.0]] * 3)
    assert type(of_weights) is cupy.ndarray
    assert cupy.asnumpy(of_weights).ravel().tolist() == plain[::2, ::-2].sum(axis=1).tolist()


def test_the_host_waits_for_nothing_but_numbers(world: Comm, rng: np.random.Generator) -> None:
    BACKEND.use("late", True)
    count = 2 * SIZE
    dispatch = ExpertDispatch(count, world, capacity_factor=1.0)
    case = drawn(rng, 6, count, np.float16)
    with waits(0):
        run(dispatch, case, cupy.asarray, here)
    with waits(1):
        run(dispatch, case, cupy.asarray, cupy.asarray)
    router = cupy.asarray(np.full((6, count), 0.25))
    with waits(1):
        dispatch.balance_loss(router, case[1])
    with waits(2):
        dispatch.balance_loss(router, cupy.asarray(case[1]))


# -- the load-balancing loss ------------------------------------------------------------


@pytest.mark.parametrize("where", ["device", "even ranks", "odd ranks"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_balance_loss(
    dtype: Any, policy: Any, where: str, world: Comm, rng: np.random.Generator
) -> None:
    """Of probabilities in sixteenths, whose sums are exact in any order."""
    BACKEND.use(policy, True)
    dispatch = ExpertDispatch(4, world)
    for spread, tokens in SPREADS.items():
        n = tokens(RANK)
        router = (rng.multinomial(16, [1 / 4] * 4, n) / 16).astype(dtype)
        numbers = np.argsort(rng.random((n, 4)), axis=1)[:, :2]
        expected = dispatch.balance_loss(router, numbers, 0.3)
        move = side(where)
        wanted = cupy.asarray(numbers) if spread == "even" else numbers
        found = dispatch.balance_loss(move(router), wanted, 0.3)
        assert type(found.gradient) is type(move(router))
        assert type(found.means) is type(found.fractions) is np.ndarray
        assert found.loss == expected.loss
        names = "gradient", "fractions", "means"
        both = [{name: getattr(one, name) for name in names} for one in (found, expected)]
        assert not differing(*both)


def test_balance_loss_keeps_its_bound(world: Comm, rng: np.random.Generator) -> None:
    BACKEND.use("late", True)
    n, count = 50, 5
    router = rng.random((n, count))
    numbers = rng.integers(0, count, n)
    dispatch = ExpertDispatch(count, world)
    expected = dispatch.balance_loss(router, numbers)
    found = dispatch.balance_loss(cupy.asarray(router), cupy.asarray(numbers))
    # All terms are positive: sums over tokens and experts, quotients, products, each twice.
    bound = 2 * (n * SIZE + count + 5) * 2.0**-53 * expected.loss
    assert abs(found.loss - expected.loss) <= bound
    assert len(set(world.allgather(found.loss))) == 1
    assert not differing({"gradient": found.gradient}, {"gradient": expected.gradient})


# -- what is refused, on all ranks ------------------------------------------------------

TOKENS, NUMBERS, WEIGHTS = np.ones((2, 3), np.float32), np.array([[0, 1], [2, 0]]), np.ones((2, 2))


def test_weights_of_another_place(world: Comm) -> None:
    BACKEND.use("late", True)
    dispatch = ExpertDispatch(3, world)
    for tokens, weights, match in [
        (cupy.asarray(TOKENS), WEIGHTS, "weights on host; expected device 0, as the tokens"),
        (TOKENS, cupy.asarray(WEIGHTS), "weights on device 0; expected host, as the tokens"),
    ]:
        passed = (tokens, NUMBERS, weights) if RANK == LAST else (TOKENS, NUMBERS, WEIGHTS)
        with pytest.raises(ValueError, match=f"rank {RANK}: rank {LAST} passed {match}"):
            dispatch.dispatch(*passed)
    assert dispatch.dispatch(TOKENS, NUMBERS, WEIGHTS).kept.all()


@pytest.mark.parametrize("call", ["combine", "restore", "deliver", "backward", "combined"])
def test_rows_of_another_place(call: str, world: Comm) -> None:
    BACKEND.use("late", True)
    sent = ExpertDispatch(3, world).dispatch(cupy.asarray(TOKENS), NUMBERS, cupy.asarray(WEIGHTS))
    rows, function = sent.tokens, getattr(sent, call, None)
    if call == "deliver":
        rows = cupy.ones((2, 2, 3), np.float32)
    elif call == "combined":
        rows, function = cupy.asarray(TOKENS), sent.combine(sent.tokens).backward
    assert function is not None
    match = f"rank {RANK}: rank {LAST} passed .* on host; expected device 0, as the tokens"
    with pytest.raises(ValueError, match=match):
        function(cupy.asnumpy(rows) if RANK == LAST else rows)
    function(rows)


def test_numbers_of_the_device_are_looked_at(world: Comm) -> None:
    BACKEND.use("late", True)
    wrong = cupy.asarray([[0, 1], [3, 0]]) if RANK == LAST else NUMBERS
    with pytest.raises(ValueError, match="expert number 3 for token 1, choice 0; expected 0 to 2"):
        ExpertDispatch(3, world).dispatch(cupy.asarray(TOKENS), wrong)
    with pytest.raises(ValueError, match="expert numbers of float64; expected integers"):
        ExpertDispatch(3, world).dispatch(TOKENS, cupy.ones((2, 2)))
