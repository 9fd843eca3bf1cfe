"""Expert dispatch against loops in one process, bit for bit, and its gradients.

The reference knows the tokens of all ranks and nothing of messages. Experts work on each
element alone, so that a row has the same bits wherever it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI
from test_hypothesis import drawn

import mpicoll
from mpicoll.parallel.experts import ExpertDispatch
from mpicoll.schedule.partition import offsets, split

Array = np.ndarray[Any, Any]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
CAPACITIES = [(None, "rank"), (1.0, "rank"), (1.25, "rank"), (0.5, "world"), (1.1, "world")]
ALGORITHMS = [
    name
    for name in mpicoll.algorithms.names("alltoall")
    if not mpicoll.algorithms.find("alltoall", name).uniform
]


# -- the reference ----------------------------------------------------------------------


class Case(NamedTuple):
    """What all ranks pass: one array per rank in each list."""

    tokens: list[Array]
    experts: list[Array]
    weights: list[Array]
    count: int

    @property
    def choices(self) -> int:
        return self.experts[0].shape[1]


def accumulator(dtype: Any) -> Any:
    return np.float32 if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def expert(number: int, rows: Array) -> Array:
    """Apply an expert: nothing but operations on single elements, in the dtype of the rows."""
    factor = rows.dtype.type(1 + number / 4)
    return (rows * factor + rows.dtype.type(number)).astype(rows.dtype)


def expert_backward(number: int, gradient: Array) -> Array:
    return (gradient * gradient.dtype.type(1 + number / 4)).astype(gradient.dtype)


def capacity(factor: float, tokens: int, case: Case) -> int:
    return math.ceil(Fraction(str(factor)) * tokens * case.choices / case.count)


def kept_of(case: Case, factor: float | None, over: str) -> list[Array]:
    """Return what is kept on each rank, choice by choice in the order of priority."""
    kept, taken = [], np.zeros(case.count, int)
    total = sum(map(len, case.tokens))
    for numbers in case.experts:
        if over == "rank":
            taken[:] = 0
        mine = np.zeros(numbers.shape, bool)
        for choice in range(case.choices):
            for token, number in enumerate(numbers[:, choice]):
                seen = len(numbers) if over == "rank" else total
                mine[token, choice] = factor is None or taken[number] < capacity(
                    factor, seen, case
                )
                taken[number] += mine[token, choice]
        kept.append(mine)
    return kept


def arrived(
    case: Case, kept: list[Array], number: int, rows: Callable[[int, int, int], Array]
) -> Array:
    """Return what an expert gets, ``rows(rank, token, choice)``, by rank and token."""
    found = [
        rows(rank, int(token), int(choice))
        for rank, numbers in enumerate(case.experts)
        for token, choice in np.argwhere((numbers == number) & kept[rank])
    ]
    like = case.tokens[0]
    return np.array(found, like.dtype).reshape(len(found), like.shape[1])


def weighted(case: Case, kept: Array, rank: int, gradients: bool = False) -> Array:
    """Return the sums of a rank's tokens; with ``gradients``, those of the tokens' gradient."""
    tokens, dtype = case.tokens[rank], case.tokens[rank].dtype
    wide = accumulator(dtype)
    result = np.zeros(tokens.shape, dtype)
    for token, row in enumerate(tokens):
        total = np.zeros(row.shape, wide)
        for choice, number in enumerate(case.experts[rank][token]):
            if kept[token, choice]:
                part = output(case, rank, token, choice)
                if gradients:
                    upwards = output_gradient(case, rank, token, choice)
                    total += expert_backward(number, upwards).astype(wide)
                else:
                    total += part.astype(wide) * case.weights[rank][token, choice].astype(wide)
        result[token] = total.astype(dtype)
    return result


def output(case: Case, rank: int, token: int, choice: int) -> Array:
    return expert(int(case.experts[rank][token, choice]), case.tokens[rank][token])


def upstream(case: Case, rank: int, token: int | None = None) -> Array:
    """Return a gradient of the sums, or of one: any numbers of their shape and dtype."""
    tokens = case.tokens[rank][... if token is None else token]
    return (tokens * tokens.dtype.type(0.5) + tokens.dtype.type(1)).astype(tokens.dtype)


def output_gradient(case: Case, rank: int, token: int, choice: int) -> Array:
    dtype = case.tokens[rank].dtype
    wide = accumulator(dtype)
    weight = case.weights[rank][token, choice].astype(wide)
    return (upstream(case, rank, token).astype(wide) * weight).astype(dtype)


def weight_gradient(case: Case, kept: Array, rank: int) -> Array:
    wide = accumulator(case.tokens[rank].dtype)
    result = np.zeros(kept.shape, wide)
    for (token, choice), is_kept in np.ndenumerate(kept):
        if is_kept:
            row = output(case, rank, token, choice).astype(wide)
            result[token, choice] = (upstream(case, rank, token).astype(wide) * row).sum()
    return result.astype(case.weights[rank].dtype)


# -- cases ------------------------------------------------------------------------------

SPREADS: dict[str, Callable[[int], int]] = {
    "uneven": lambda rank: (3 * rank) % 7,  # rank 0 has none
    "even": lambda rank: 4,
    "none": lambda rank: 0,
    "last": lambda rank: 9 if rank == LAST else 0,
}


def random_case(
    rng: np.random.Generator,
    count: int,
    choices: int,
    dtype: Any,
    hidden: int = 5,
    spread: str = "uneven",
    weights: Any = np.float32,
    size: int = SIZE,
) -> Case:
    tokens, experts, scales = [], [], []
    for rank in range(size):
        n = SPREADS[spread](rank)
        tokens.append(rng.standard_normal((n, hidden)).astype(dtype))
        experts.append(np.argsort(rng.random((n, count)), axis=1)[:, :choices])
        scales.append(rng.random((n, choices)).astype(weights))
    return Case(tokens, experts, scales, count)


def same_bits(result: Array, expected: Array) -> str:
    """Say what differs, or nothing."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return f"{result.dtype}{result.shape}, expected {expected.dtype}{expected.shape}"
    if result.tobytes() == np.ascontiguousarray(expected).tobytes():
        return ""
    return f"{result.tolist()}, expected {expected.tolist()}"


def differing(dispatch: ExpertDispatch, case: Case, factor: float | None, over: str) -> str:
    """Run a case there and back, forwards and backwards; say what is not as it should be."""
    rank = dispatch.comm.rank
    kept = kept_of(case, factor, over)
    sent = dispatch.dispatch(case.tokens[rank], case.experts[rank], case.weights[rank])
    outputs, parts = np.empty_like(sent.tokens), {}
    for number, rows in sent:
        outputs[rows] = expert(number, sent.tokens[rows])
        parts[number] = sent.tokens[rows]
    combined = sent.combine(outputs)
    of_outputs, of_weights = combined.backward(upstream(case, rank))
    of_inputs = np.empty_like(of_outputs)
    for number, rows in sent:
        of_inputs[rows] = expert_backward(number, of_outputs[rows])

    wanted = case.experts[rank][~kept[rank]]
    pairs = [
        ("kept", sent.kept, kept[rank]),
        ("dropped", sent.dropped, np.bincount(wanted, minlength=case.count)),
        ("combined", combined.tokens, weighted(case, kept[rank], rank)),
        ("gradient of weights", of_weights, weight_gradient(case, kept[rank], rank)),
        (
            "gradient of tokens",
            sent.backward(of_inputs),
            weighted(case, kept[rank], rank, gradients=True),
        ),
    ]
    for number, rows in sent:
        inputs = arrived(case, kept, number, lambda at, token, _: case.tokens[at][token])
        backwards = arrived(case, kept, number, lambda *at: output_gradient(case, *at))
        pairs.append((f"tokens of expert {number}", parts[number], inputs))
        pairs.append((f"gradient of expert {number}", of_outputs[rows], backwards))
    return "; ".join(f"{name}: {said}" for name, *both in pairs if (said := same_bits(*both)))


# -- there and back ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("count", [1, 3, 7, 2 * SIZE])
@pytest.mark.parametrize(("factor", "over"), CAPACITIES)
def test_bits_of_the_reference(
    world: mpicoll.Comm,
    rng: np.random.Generator,
    dtype: Any,
    count: int,
    factor: float | None,
    over: Any,
) -> None:
    dispatch = ExpertDispatch(count, world, capacity_factor=factor, capacity_over=over)
    for choices in {1, min(3, count)}:
        case = random_case(rng, count, choices, dtype)
        assert not differing(dispatch, case, factor, over)


@pytest.mark.parametrize("hidden", [0, 1, 2, 33])
@pytest.mark.parametrize("spread", SPREADS)
def test_sizes(world: mpicoll.Comm, rng: np.random.Generator, hidden: int, spread: str) -> None:
    for weights in (np.float64, ml_dtypes.bfloat16):
        case = random_case(rng, 5, 2, np.float32, hidden, spread, weights)
        dispatch = ExpertDispatch(5, world, capacity_factor=1.1, capacity_over="world")
        assert not differing(dispatch, case, 1.1, "world")


@pytest.mark.parametrize(
    "owners", [[4] + [0] * LAST, [0] * LAST + [4], [1] * min(4, SIZE) + [0] * (SIZE - 4)]
)
def test_owners(world: mpicoll.Comm, rng: np.random.Generator, owners: list[int]) -> None:
    dispatch = ExpertDispatch(sum(owners), world, owners=owners)
    first = offsets(owners)
    assert dispatch.mine == range(first[RANK], first[RANK + 1])
    case = random_case(rng, sum(owners), 1, np.float32)
    assert not differing(dispatch, case, None, "rank")


def test_owners_are_even_by_themselves(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(SIZE + 1, world)
    assert len(dispatch.mine) == split(SIZE + 1, SIZE)[RANK]
    assert dispatch.experts == SIZE + 1


@pytest.mark.parametrize("hot", [0, 4])
def test_all_tokens_to_one_expert(world: mpicoll.Comm, hot: int) -> None:
    dispatch = ExpertDispatch(5, world)
    n = 3 + RANK
    sent = dispatch.dispatch(np.full((n, 2), RANK, np.float32), np.full(n, hot))
    total = sum(3 + rank for rank in range(SIZE))
    expected = [total if number == hot else 0 for number in dispatch.mine]
    assert sent.counts.tolist() == expected
    if hot in dispatch.mine:
        ranks = np.repeat(np.arange(SIZE), [3 + rank for rank in range(SIZE)])
        np.testing.assert_array_equal(sent.tokens[:, 0], ranks)
    np.testing.assert_array_equal(sent.combine(sent.tokens).tokens, np.full((n, 2), RANK))
    load = sent.load()
    assert load.expert_imbalance == 5
    assert load.rank_imbalance == SIZE
    assert str(load).endswith(f"dropped 0 of {total}")


@pytest.mark.parametrize("kind", ["plain", "part"])
def test_communicators(kind: str, rng: np.random.Generator) -> None:
    comm: MPI.Intracomm = MPI.COMM_WORLD
    if kind == "part":
        comm = MPI.COMM_WORLD.Split(RANK % 2, -RANK)
    dispatch = ExpertDispatch(3, comm)
    case = random_case(rng, 3, 2, np.float32, size=comm.size)
    assert not differing(dispatch, case, None, "rank")
    if kind == "part":
        comm.Free()


def test_without_a_communicator_it_is_the_world() -> None:
    assert ExpertDispatch(2).comm.size == SIZE


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_do_not_depend_on_the_exchange(
    world: mpicoll.Comm, rng: np.random.Generator, algorithm: str
) -> None:
    case = random_case(rng, 7, 3, np.float16)
    for _ in range(2):
        dispatch = ExpertDispatch(7, world, algorithm=algorithm)
        assert not differing(dispatch, case, None, "rank")


def test_without_weights_they_are_one(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(3, world)
    tokens = np.arange(8, dtype=np.float32).reshape(4, 2) + RANK
    sent = dispatch.dispatch(tokens, [[0, 1], [1, 2], [2, 0], [1, 0]])
    combined = sent.combine(sent.tokens)
    np.testing.assert_array_equal(combined.tokens, 2 * tokens)
    of_outputs, of_weights = combined.backward(np.ones_like(tokens))
    assert (of_outputs == 1).all()
    assert of_weights.dtype == np.float32
    np.testing.assert_array_equal(of_weights, np.repeat(tokens.sum(axis=1), 2).reshape(4, 2))


def test_one_axis_is_one_choice(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(3, world)
    tokens = np.arange(6.0).reshape(3, 2)
    sent = dispatch.dispatch(tokens, np.array([2, 0, 2], np.uint8), [0.5, 2.0, 4.0])
    combined = sent.combine(sent.tokens)
    np.testing.assert_array_equal(combined.tokens, tokens * [[0.5], [2], [4]])
    _, of_weights = combined.backward(np.ones((3, 2)))
    np.testing.assert_array_equal(of_weights, tokens.sum(axis=1))
    assert dispatch.dispatch(np.zeros((0, 2)), []).kept.shape == (0, 1)


def test_outputs_of_another_width_and_dtype(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(4, world)
    sent = dispatch.dispatch(np.full((5, 3), RANK, np.float32), np.arange(5) % 4)
    outputs = np.repeat(sent.tokens[:, :1].astype(np.float64), 7, axis=1)
    combined = sent.combine(outputs)
    np.testing.assert_array_equal(combined.tokens, np.full((5, 7), float(RANK)))
    assert combined.tokens.dtype == np.float64


def test_restore_and_deliver_are_inverse(world: mpicoll.Comm, rng: np.random.Generator) -> None:
    dispatch = ExpertDispatch(5, world, capacity_factor=0.75)
    case = random_case(rng, 5, 2, np.float32, hidden=3)
    sent = dispatch.dispatch(case.tokens[RANK], case.experts[RANK])
    restored = sent.restore(sent.tokens)
    expected = np.where(sent.kept[..., None], case.tokens[RANK][:, None], 0)
    assert not same_bits(restored, expected.astype(np.float32))
    assert not same_bits(sent.deliver(restored), sent.tokens)


def test_strided_input_and_arrays_that_change_afterwards(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(2, world)
    tokens = np.arange(24.0).reshape(6, 4)[::2, ::-2]
    weights = np.full((6, 1), 3.0)[::2]
    sent = dispatch.dispatch(tokens, np.array([[1], [0], [1]]), weights)
    expected = 3 * tokens
    tokens[:] = weights[:] = -1
    wide = np.zeros((len(sent.tokens), 4))
    wide[:, ::-2] = sent.tokens
    np.testing.assert_array_equal(sent.combine(wide[:, ::-2]).tokens, expected)


def test_16_bits_are_rounded_once(world: mpicoll.Comm) -> None:
    """1 + 2^-8 + 2^-8 in bfloat16: hop by hop each half step would be lost."""
    dispatch = ExpertDispatch(3, world)
    tokens = np.ones((2, 4), ml_dtypes.bfloat16)
    weights = np.full((2, 3), [1, 2**-8, 2**-8])
    sent = dispatch.dispatch(tokens, np.full((2, 3), [0, 1, 2]), weights)
    assert (sent.combine(sent.tokens).tokens == 1 + 2**-7).all()


def test_what_is_dropped_adds_nothing_whatever_it_is(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(2, world, capacity_factor=0.5)
    tokens = np.ones((4, 2), np.float32)
    weights = [1, np.nan, np.inf, np.nan]
    sent = dispatch.dispatch(tokens, [1, 1, 1, 1], weights)
    assert sent.capacity == 1
    assert sent.kept.ravel().tolist() == [True, False, False, False]
    assert sent.dropped.tolist() == [0, 3]
    combined = sent.combine(np.full_like(sent.tokens, 5))
    np.testing.assert_array_equal(combined.tokens, [[5, 5], [0, 0], [0, 0], [0, 0]])
    _, of_weights = combined.backward(np.full_like(tokens, np.nan))
    np.testing.assert_array_equal(of_weights, [np.nan, 0, 0, 0])
    np.testing.assert_array_equal(sent.backward(sent.tokens), [[1, 1], [0, 0], [0, 0], [0, 0]])
    load = sent.load()
    np.testing.assert_array_equal(load.rows, [[0, 1]] * SIZE)
    np.testing.assert_array_equal(load.dropped, [[0, 3]] * SIZE)


def test_capacity_over_the_world_takes_lower_ranks_first(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(2, world, capacity_factor=1.0, capacity_over="world")
    sent = dispatch.dispatch(np.zeros((2, 1)), [1, 1])
    assert sent.capacity == SIZE
    expected = np.clip(SIZE - 2 * np.arange(SIZE), 0, 2)
    load = sent.load()
    np.testing.assert_array_equal(load.rows[:, 1], expected)
    np.testing.assert_array_equal(load.dropped[:, 1], 2 - expected)


def test_capacity_of_a_rank_keeps_first_choices(world: mpicoll.Comm) -> None:
    """Token 1 comes after token 0, its first choice before token 0's second."""
    dispatch = ExpertDispatch(4, world, capacity_factor=1.0)
    sent = dispatch.dispatch(np.zeros((2, 1)), [[0, 1], [1, 2]])
    assert sent.kept.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("factor", "tokens", "choices", "count", "expected"),
    [
        (1.1, 10, 1, 11, 1),
        (1.25, 8, 2, 4, 5),
        (1, 7, 1, 2, 4),
        (0.01, 1, 1, 9, 1),
        (1, 0, 1, 3, 0),
    ],
)
def test_capacity(
    world: mpicoll.Comm, factor: float, tokens: int, choices: int, count: int, expected: int
) -> None:
    dispatch = ExpertDispatch(count, world, capacity_factor=factor)
    numbers = np.tile(np.arange(choices), (tokens, 1))
    assert dispatch.dispatch(np.zeros((tokens, 1)), numbers).capacity == expected


def test_what_is_sent(world: mpicoll.Comm, rng: np.random.Generator) -> None:
    """A dispatch is one exchange of sizes and one of rows, and each row is sent once."""
    dispatch = ExpertDispatch(2 * SIZE, world, algorithm="pairwise")
    case = random_case(rng, 2 * SIZE, 2, np.float32, hidden=3, spread="even")
    before = world.stats["alltoall", "pairwise"].bytes_sent
    calls = world.stats.total.calls
    dispatch.dispatch(case.tokens[RANK], case.experts[RANK])
    assert world.stats.total.calls - calls == 2
    away = (case.experts[RANK] // 2 != RANK).sum()
    sent = world.stats["alltoall", "pairwise"].bytes_sent - before
    assert sent in (12 * away, 12 * away + 64 * (SIZE - 1))  # where sizes went pairwise too


# -- load -------------------------------------------------------------------------------


def test_load_of_an_even_and_an_empty_dispatch(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(2 * SIZE, world)
    even = dispatch.dispatch(np.zeros((4 * SIZE, 1)), np.arange(4 * SIZE) % (2 * SIZE)).load()
    assert even.per_expert.tolist() == [2 * SIZE] * (2 * SIZE)
    assert even.per_rank.tolist() == [4 * SIZE] * SIZE
    assert even.expert_imbalance == even.rank_imbalance == 1
    empty = dispatch.dispatch(np.zeros((0, 1)), []).load()
    assert empty.expert_imbalance == empty.rank_imbalance == 1
    assert str(empty) == "hottest over mean: expert 0 1.00, rank 0 1.00; dropped 0 of 0"


def router(rng: np.random.Generator, n: int, count: int, dtype: Any) -> Array:
    """Return probabilities in sixteenths, so that sums and shares are exact."""
    return (rng.multinomial(16, [1 / count] * count, n) / 16).astype(dtype)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_balance_loss_and_its_differences(
    world: mpicoll.Comm, rng: np.random.Generator, choices: int, dtype: Any
) -> None:
    """Everything is a dyadic fraction, so both loss and difference quotient are exact."""
    count, bounds = 4, offsets(split(16, SIZE))
    probabilities = router(rng, 16, count, dtype)
    experts = np.argsort(rng.random((16, count)), axis=1)[:, :choices]
    mine = slice(bounds[RANK], bounds[RANK + 1])
    dispatch = ExpertDispatch(count, world)

    def loss(router: Array) -> float:
        return dispatch.balance_loss(router[mine], experts[mine], scale=0.5).loss

    shares = np.bincount(experts.ravel(), minlength=count) / (16 * choices)
    expected = 0.5 * count * (shares * probabilities.astype(float).mean(axis=0)).sum()
    result = dispatch.balance_loss(probabilities[mine], experts[mine], scale=0.5)
    assert result.loss == expected
    np.testing.assert_array_equal(result.fractions, shares)
    np.testing.assert_array_equal(result.means, probabilities.astype(float).mean(axis=0))
    assert result.gradient.dtype == dtype
    assert result.gradient.shape == probabilities[mine].shape
    gradient = np.concatenate(world.allgather(result.gradient)).astype(float)
    moves = np.zeros((2, 16, count))
    moves[0, 0, 1] = moves[1, 15, 3] = 1 / 16
    losses = [loss((probabilities + move).astype(dtype)) for move in moves]
    for move, moved in zip(moves, losses, strict=True):
        assert moved - result.loss == (move * gradient).sum()


def test_balance_loss_keeps_its_bound(world: mpicoll.Comm, rng: np.random.Generator) -> None:
    """All terms are positive, so the relative error is that of the longest chain of roundings."""
    count, bounds = 5, offsets([(3 * rank) % 7 + 1 for rank in range(SIZE)])
    raw = rng.random((bounds[-1], count))
    probabilities = raw / raw.sum(axis=1, keepdims=True)
    experts = rng.integers(0, count, bounds[-1])
    mine = slice(bounds[RANK], bounds[RANK + 1])
    result = ExpertDispatch(count, world).balance_loss(probabilities[mine], experts[mine])
    shares = np.bincount(experts, minlength=count).tolist()
    exact = sum(
        Fraction(share) * sum(map(Fraction, column))
        for share, column in zip(shares, probabilities.T.tolist(), strict=True)
    ) * Fraction(count, bounds[-1] ** 2)
    # A sum over tokens and one over experts; two quotients, two products, the scale.
    roundings = bounds[-1] + count + 5
    unit = Fraction(1, 2**53)
    assert abs(Fraction(result.loss) - exact) <= roundings * unit / (1 - roundings * unit) * exact
    assert len(set(world.allgather(result.loss))) == 1


def test_balance_loss_of_even_and_no_tokens(world: mpicoll.Comm) -> None:
    dispatch = ExpertDispatch(4, world)
    even = dispatch.balance_loss(np.full((4, 4), 0.25), np.arange(4), scale=0.25)
    assert even.loss == 0.25
    np.testing.assert_array_equal(even.gradient, np.full((4, 4), 0.25 / (4 * SIZE)))
    none = dispatch.balance_loss(np.zeros((0, 4), np.float32), np.zeros((0, 2), int))
    assert none.loss == 0
    assert none.gradient.shape == (0, 4)


# -- gradients --------------------------------------------------------------------------


def test_differences_of_a_quadratic_are_the_gradient(
    world: mpicoll.Comm, rng: np.random.Generator
) -> None:
    """Experts square, data are small integers: central differences are exact in float64.

    All are positive, so that no gradient of what was kept is zero.
    """
    count, n, hidden, choices = 5, 3, 2, 2
    dispatch = ExpertDispatch(count, world, capacity_factor=1.0)
    tokens = rng.integers(1, 6, (SIZE, n, hidden))[RANK].astype(float)
    weights = rng.integers(1, 6, (SIZE, n, choices))[RANK].astype(float)
    slopes = rng.integers(1, 6, (SIZE, n, hidden))[RANK].astype(float)
    experts = np.argsort(rng.random((SIZE, n, count)), axis=2)[RANK, :, :choices]

    def loss(tokens: Array, weights: Array) -> float:
        """The loss of this rank's tokens; those of others move at the same time."""
        sent = dispatch.dispatch(tokens, experts, weights)
        return float((sent.combine(sent.tokens**2).tokens * slopes).sum())

    sent = dispatch.dispatch(tokens, experts, weights)
    of_outputs, of_weights = sent.combine(sent.tokens**2).backward(slopes)
    of_tokens = sent.backward(2 * sent.tokens * of_outputs)
    slopes_of = [np.empty_like(tokens), np.empty_like(weights)]
    for at, of in enumerate(slopes_of):
        for place in np.ndindex(of.shape):
            ends = []
            for step in (1, -1):
                moved = [tokens.copy(), weights.copy()]
                moved[at][place] += step
                ends.append(loss(*moved))
            of[place] = (ends[0] - ends[1]) / 2
    np.testing.assert_array_equal(of_tokens, slopes_of[0])
    np.testing.assert_array_equal(of_weights, slopes_of[1])
    assert of_tokens.any()
    assert of_weights.any()


# -- random routings --------------------------------------------------------------------


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]]]:
    """Draw the number of experts, of choices, and for each rank the choices of its tokens."""
    count = draw(st.integers(1, 2 * SIZE + 1))
    choices = draw(st.integers(1, min(3, count)))
    numbers = st.integers(0, count - 1)
    token = st.lists(numbers, min_size=choices, max_size=choices, unique=True)
    ranks = st.lists(st.lists(token, max_size=6), min_size=SIZE, max_size=SIZE)
    return count, choices, draw(ranks)


@drawn(
    routing=routings(),
    factor=st.sampled_from([None, 0.3, 1.0, 1.25]),
    over=st.sampled_from(["rank", "world"]),
    hidden=st.integers(0, 3),
    dtype=st.sampled_from([np.dtype(dtype).name for dtype in DTYPES]),
)
def test_random_routings(
    comm: mpicoll.Comm,
    routing: tuple[int, int, list[list[list[int]]]],
    factor: float | None,
    over: Any,
    hidden: int,
    dtype: str,
) -> str:
    count, choices, ranks = routing
    case = Case(
        [
            (np.arange(len(one) * hidden).reshape(len(one), hidden) / 8 + rank).astype(dtype)
            for rank, one in enumerate(ranks)
        ],
        [np.array(one, int).reshape(len(one), choices) for one in ranks],
        [np.arange(1, len(one) * choices + 1).reshape(len(one), choices) / 3 for one in ranks],
        count,
    )
    dispatch = ExpertDispatch(count, comm, capacity_factor=factor, capacity_over=over)
    return differing(dispatch, case, factor, over)


# -- what is refused, on all ranks -------------------------------------------------------

GOOD = (np.zeros((2, 3), np.float32), np.array([[0, 1], [2, 0]]), np.ones((2, 2)))


def differing_on_ranks(match: str) -> AbstractContextManager[Any]:
    """Expect the error of ranks that differ; a single rank never does, and gets none."""
    return pytest.raises(ValueError, match=match) if SIZE > 1 else nullcontext()


class Unreadable:
    def __array__(self, *args: Any, **keywords: Any) -> Array:
        raise RuntimeError("no array")


@pytest.mark.parametrize(
    ("place", "wrong", "match"),
    [
        (0, np.zeros((2, 3), np.int32), "tokens of int32; expected float16, bfloat16, float32"),
        (0, np.zeros((2, 3), ">f4"), "tokens of >f4"),
        (0, np.zeros(2, np.float32), r"tokens of shape \(2,\); expected \(any, any\)"),
        (0, Unreadable(), "RuntimeError: no array"),
        (1, np.zeros((2, 2)), "expert numbers of float64; expected integers"),
        (1, np.zeros((2, 2), bool), "expert numbers of bool"),
        (1, np.zeros((3, 2), int), r"expert numbers of shape \(3, 2\); expected \(2, choices\)"),
        (1, np.zeros((2, 1, 1), int), r"expert numbers of shape \(2, 1, 1\)"),
        (1, np.zeros((2, 0), int), "0 choices per token; expected 1 to 3"),
        (1, np.zeros((2, 4), int), "4 choices per token; expected 1 to 3"),
        (1, [[0, 1], [3, 0]], "expert number 3 for token 1, choice 0; expected 0 to 2"),
        (1, [[0, -1], [2, 0]], "expert number -1 for token 0, choice 1"),
        (1, np.array([[0, 2**64 - 1], [2, 0]], np.uint64), f"expert number {2**64 - 1}"),
        (1, [[0, 1], [2, 2]], "expert number 2 twice for token 1"),
        (2, np.ones((2, 1)), r"weights of shape \(2, 1\); expected .*, \(2, 2\)"),
        (2, np.ones((2, 2), int), "weights of int64; expected floating-point numbers"),
    ],
)
@pytest.mark.parametrize("over", ["rank", "world"])
def test_dispatch_refuses_on_all_ranks(
    world: mpicoll.Comm, place: int, wrong: Any, match: str, over: Any
) -> None:
    dispatch = ExpertDispatch(3, world, capacity_factor=2, capacity_over=over)
    passed = list(GOOD)
    if RANK == LAST:
        passed[place] = wrong
    with pytest.raises(ValueError, match=f"dispatch on rank {RANK}: rank {LAST} passed {match}"):
        dispatch.dispatch(*passed)
    assert (dispatch.dispatch(*GOOD).kept).all()


@pytest.mark.parametrize(
    ("place", "other"),
    [(0, np.zeros((2, 4), np.float32)), (0, np.zeros((2, 3))), (1, np.array([[0], [1]]))],
    ids=["size", "dtype", "choices"],
)
def test_dispatch_refuses_what_differs(world: mpicoll.Comm, place: int, other: Array) -> None:
    dispatch = ExpertDispatch(3, world)
    passed = list(GOOD[:2])
    if RANK == LAST:
        passed[place] = other
    with differing_on_ranks(f"rank {LAST} has .*; all ranks must pass the same"):
        dispatch.dispatch(*passed)


@pytest.mark.parametrize(
    ("call", "name", "match"),
    [
        ("combine", "combine", r"outputs of shape \(\d+, 3\); expected \(\d+, any\)"),
        ("restore", "restore", r"outputs of shape \(\d+, 3\); expected \(\d+, any\)"),
        ("backward", "dispatch backward", r"gradient of shape \(\d+, 3\); expected \(\d+, 3\)"),
        ("deliver", "deliver", r"rows of shape \(\d+, 3\); expected \(2, 2, any\)"),
    ],
)
def test_the_way_back_refuses_on_all_ranks(
    world: mpicoll.Comm, call: str, name: str, match: str
) -> None:
    sent = ExpertDispatch(3, world).dispatch(*GOOD)
    rows = np.zeros((2, 2, 3), np.float32) if call == "deliver" else sent.tokens
    wrong = np.zeros((len(sent.tokens) + 1, 3), np.float32) if RANK == 0 else rows
    with pytest.raises(ValueError, match=f"{name} on rank {RANK}: rank 0 passed {match}"):
        getattr(sent, call)(wrong)
    getattr(sent, call)(rows)


def test_gradients_have_the_dtype_of_what_they_are_of(world: mpicoll.Comm) -> None:
    sent = ExpertDispatch(3, world).dispatch(*GOOD)
    with pytest.raises(ValueError, match="rank 0 passed gradient of float64; expected float32"):
        sent.backward(sent.tokens.astype(float) if RANK == 0 else sent.tokens)
    combined = sent.combine(sent.tokens)
    wrong = np.zeros((2, 4), np.float32) if RANK == LAST else combined.tokens
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 4\); expected \(2, 3\)"):
        combined.backward(wrong)


def test_ranks_that_do_different_things(world: mpicoll.Comm) -> None:
    first = ExpertDispatch(3, world)
    second = ExpertDispatch(3, world)
    sent = first.dispatch(*GOOD)
    for other in (first.dispatch(*GOOD), second.dispatch(*GOOD)):
        with differing_on_ranks(r"rank 1 has dispatch \d+ .* rank 0 has dispatch"):
            (sent if RANK else other).combine((sent if RANK else other).tokens)
    with differing_on_ranks("rank 1 has restore where rank 0 has combine"):
        (sent.restore if RANK else sent.combine)(sent.tokens)
    with differing_on_ranks("rank 1 has rows of float64 of size 3 where rank 0"):
        sent.combine(sent.tokens.astype(float) if RANK == 1 else sent.tokens)


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"experts": 0}, "experts 0; expected a number from 1 on"),
        ({"experts": 2.5}, "experts 2.5; expected a number"),
        ({"owners": [3] * (SIZE + 1)}, f"owners .*; expected {SIZE} counts that add up to 3"),
        ({"owners": [4] + [0] * LAST}, "counts that add up to 3 experts"),
        ({"owners": 3}, "TypeError"),
        ({"capacity_factor": 0}, "capacity_factor 0; expected a number above 0, or None"),
        ({"capacity_factor": math.inf}, "capacity_factor inf"),
        ({"capacity_factor": math.nan}, "capacity_factor nan"),
        ({"capacity_over": "node"}, 'capacity_over \'node\'; expected "rank" or "world"'),
        ({"algorithm": "rong"}, "AlgorithmError: .*no algorithm 'rong'"),
        ({"algorithm": "bruck"}, "algorithm 'bruck', which wants blocks of equal size"),
    ],
)
def test_settings_are_refused_on_all_ranks(
    world: mpicoll.Comm, keywords: dict[str, Any], match: str
) -> None:
    given: dict[str, Any] = {"experts": 3} | (keywords if RANK == LAST else {})
    with pytest.raises(ValueError, match=f"ExpertDispatch on rank {RANK}: rank {LAST} .*{match}"):
        ExpertDispatch(comm=world, **given)


def test_settings_that_differ(world: mpicoll.Comm) -> None:
    with differing_on_ranks("rank 1 has factor 5/4 where rank 0 has factor None"):
        ExpertDispatch(3, world, capacity_factor=1.25 if RANK == 1 else None)


@pytest.mark.parametrize(
    ("probabilities", "experts", "match"),
    [
        (np.zeros((2, 3), int), [0, 1], "probabilities of int64; expected floating-point"),
        (np.zeros((2, 2)), [0, 1], r"probabilities of shape \(2, 2\); expected \(any, 3\)"),
        (np.zeros((2, 3)), [0, 3], "expert number 3 for token 1, choice 0"),
    ],
)
def test_balance_loss_refuses_on_all_ranks(
    world: mpicoll.Comm, probabilities: Array, experts: list[int], match: str
) -> None:
    good = np.full((2, 3), 1 / 3), [0, 1]
    passed = (probabilities, experts) if RANK == LAST else good
    dispatch = ExpertDispatch(3, world)
    with pytest.raises(
        ValueError, match=f"balance_loss on rank {RANK}: rank {LAST} passed {match}"
    ):
        dispatch.balance_loss(*passed)


def test_balance_loss_refuses_other_numbers_of_choices(world: mpicoll.Comm) -> None:
    experts = np.array([[0, 1]] if RANK == LAST else [[0]])
    with differing_on_ranks("has 2 choices per token where rank 0 has 1 choices"):
        ExpertDispatch(3, world).balance_loss(np.full((1, 3), 1 / 3), experts)
