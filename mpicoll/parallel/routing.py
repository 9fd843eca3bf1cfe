"""The local half of expert dispatch: checks, order, capacity and sums; nothing is sent here.

Who goes where is decided on the host. Rows, weights and their sums stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mpicoll import kernels
from mpicoll.parallel.library import (
    Array,
    as_array,
    beside,
    dense,
    gather,
    library,
    narrow,
    place,
    to_host,
    widen,
)

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

#: What tokens, outputs and gradients may be made of.
DTYPES = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))

# Errors here say what was passed; who raises them puts "rank r passed" before.


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Where tokens want to go: expert numbers and weights, (tokens, choices) each.

    The numbers are on the host, the weights where the tokens are.
    ``flat`` says that both came with one axis; the gradient of the weights goes out so.
    """

    experts: Ints
    weights: Array | None
    flat: bool

    @property
    def count(self) -> int:
        """The number of choices of each token."""
        return int(self.experts.shape[1])


def choices_of(
    experts: npt.ArrayLike, weights: npt.ArrayLike | None, rows: Array, count: int
) -> Choices:
    """Return the choices of each of ``rows`` among ``count`` experts; raises ValueError.

    Numbers on a device are waited for.
    """
    given, tokens = to_host(as_array(experts)), len(rows)
    if given.dtype.kind not in "iu" and given.size:
        raise ValueError(f"expert numbers of {given.dtype}; expected integers")
    if given.ndim not in (1, 2) or len(given) != tokens:
        raise ValueError(
            f"expert numbers of shape {given.shape}; expected ({tokens}, choices), or "
            f"({tokens},) for one choice"
        )
    numbers = given.reshape(tokens, 1) if given.ndim == 1 else given
    if not 1 <= numbers.shape[1] <= count:
        raise ValueError(f"{numbers.shape[1]} choices per token; expected 1 to {count}")
    _refuse_wrong_numbers(numbers, count)
    kept = None
    if weights is not None:
        kept = _weights(weights, given, rows).reshape(numbers.shape).copy()
    return Choices(numbers.astype(np.int64), kept, given.ndim == 1)


def _refuse_wrong_numbers(numbers: Array, count: int) -> None:
    wrong = np.argwhere((numbers < 0) | (numbers >= count))
    if len(wrong):
        token, choice = map(int, wrong[0])
        raise ValueError(
            f"expert number {numbers[token, choice]} for token {token}, choice {choice}; "
            f"expected 0 to {count - 1}"
        )
    ordered = np.sort(numbers, axis=1)
    twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if len(twice):
        token, choice = map(int, twice[0])
        raise ValueError(
            f"expert number {ordered[token, choice]} twice for token {token}; the choices of a "
            "token must differ"
        )


def _weights(weights: npt.ArrayLike, experts: Array, rows: Array) -> Array:
    given = placed(weights, "weights", rows)
    if given.shape != experts.shape:
        raise ValueError(
            f"weights of shape {given.shape}; expected that of the expert numbers, {experts.shape}"
        )
    return floats(given, "weights")


def floats(array: Array, what: str) -> Array:
    """Refuse what is not floating point; bfloat16 is."""
    if array.dtype.kind != "f" and array.dtype not in DTYPES:
        raise ValueError(f"{what} of {array.dtype}; expected floating-point numbers")
    return array


def placed(values: npt.ArrayLike, what: str, tokens: Array) -> Array:
    """Return an array where the tokens are; one that is elsewhere is not moved unasked."""
    array = as_array(values, tokens)
    if place(array) != place(tokens):
        raise ValueError(f"{what} on {place(array)}; expected {place(tokens)}, as the tokens")
    return array


def rows_of(
    rows: npt.ArrayLike,
    what: str,
    shape: Sequence[int | None],
    dtype: np.dtype[Any] | None = None,
    tokens: Array | None = None,
) -> Array:
    """Return ``rows`` as a dense array; None stands for any extent, and for any of `DTYPES`.

    With ``tokens`` they have to be where those are.
    """
    array = as_array(rows) if tokens is None else placed(rows, what, tokens)
    allowed = DTYPES if dtype is None else (dtype,)
    if array.dtype not in allowed:
        names = ", ".join(one.name for one in allowed)
        raise ValueError(f"{what} of {array.dtype}; expected {names}")
    if array.ndim != len(shape) or any(
        expected not in (None, extent) for extent, expected in zip(array.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{what} of shape {array.shape}; expected ({wanted})")
    return dense(array)


# -- who goes where ---------------------------------------------------------------------


def factor_of(given: float | Fraction) -> Fraction:
    """Return a capacity factor as the decimal that is written, so that 1.1 is 11/10."""
    if not 0 < given < math.inf:
        raise ValueError(f"capacity_factor {given}; expected a number above 0, or None")
    return given if isinstance(given, Fraction) else Fraction(str(float(given)))


def capacity_of(factor: Fraction, tokens: int, choices: int, experts: int) -> int:
    """Return ``ceil(factor * tokens * choices / experts)``, exactly."""
    return math.ceil(factor * tokens * choices / experts)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Which choices are kept, and the order in which their rows are sent.

    ``order`` lists kept choices as ``token * choices + choice``, by expert and in each by
    token; ``where`` is its inverse, (tokens, choices), with -1 for what was dropped.
    ``counts`` are rows per expert.
    """

    order: Ints
    where: Ints
    counts: Ints

    @property
    def tokens(self) -> Ints:
        """The token of each row."""
        tokens: Ints = self.order // self.where.shape[1]
        return tokens

    @property
    def kept(self) -> Flags:
        """Whether a choice was kept, (tokens, choices)."""
        return self.where >= 0


def count_of(numbers: Ints, experts: int) -> Ints:
    """Return how many choices name each expert."""
    return np.bincount(numbers.reshape(-1), minlength=experts).astype(np.int64)


def assign(numbers: Ints, experts: int, limits: Ints | None = None) -> Assignment:
    """Order the choices by expert; with ``limits``, keep so many per expert.

    First choices are kept before second ones, and so on; among equals the earlier token
    (GShard, Algorithm 1).
    """
    tokens, choices = numbers.shape
    order = _sorted(numbers.reshape(-1), experts)
    counts = count_of(numbers, experts)
    if limits is not None:
        by_choice = numbers.T.reshape(-1)
        queue = _sorted(by_choice, experts)
        first = np.concatenate(([0], np.cumsum(counts)))
        position = np.arange(len(queue)) - first[by_choice[queue]]
        kept = np.empty(len(queue), np.bool_)
        kept[queue] = position < limits[by_choice[queue]]
        order = order[kept.reshape(choices, tokens).T.reshape(-1)[order]]
        counts = np.minimum(counts, limits)
    where = np.full(tokens * choices, -1, np.int64)
    where[order] = np.arange(len(order))
    return Assignment(order, where.reshape(tokens, choices), counts)


def _sorted(numbers: Ints, experts: int) -> Ints:
    # NumPy sorts 16-bit integers in linear time.
    short = numbers.astype(np.uint16) if experts <= 1 << 16 else numbers
    return np.argsort(short, kind="stable").astype(np.int64, copy=False)


def accepted(offered: Ints, limit: int) -> Ints:
    """Return how many of ``offered``, (ranks, experts), an expert takes; lower ranks first."""
    before = np.cumsum(offered, axis=0) - offered
    taken: Ints = np.clip(limit - before, 0, offered)
    return taken


def by_expert(counts: Ints) -> Ints | None:
    """Return the order that brings rows, which arrive by rank, to experts.

    ``counts`` is (ranks, experts). Rows of an expert stay in the order of ranks. None where
    they lie right already.
    """
    ranks, experts = counts.shape
    if ranks == 1 or experts <= 1:
        return None
    expert = np.repeat(np.tile(np.arange(experts), ranks), counts.reshape(-1))
    return _sorted(expert, experts)


# -- sums -------------------------------------------------------------------------------


def widened(rows: Array) -> Array:
    """Return 16-bit floats as float32, others as they are."""
    if kernels.half(rows.dtype) is None:
        return rows
    result: Array = library(rows).empty(rows.shape, np.float32)
    widen(result, dense(rows))
    return result


def narrowed(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``values`` rounded to ``dtype``, once."""
    if kernels.half(dtype) is None or values.dtype != np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype, copy=False)
    result: Array = library(values).empty(values.shape, dtype)
    narrow(result, dense(values))
    return result


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which rows of ``dtype`` are summed: float32 for 16-bit ones."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def sum_choices(rows: Array, where: Ints, weights: Array | None) -> Array:
    """Return for each token the sum of its rows, times their weights, first choice first.

    A choice that was dropped adds nothing, whatever its weight. Done in `accumulator`, and
    rounded once to the dtype of ``rows``. Each product and each sum is an operation of its
    own, so a device gives the bits of the host, but for subnormal float32.
    """
    shape = len(where), rows.shape[1]
    total: Array = library(rows).zeros(shape, accumulator(rows.dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        for choice, at in enumerate(where.T):
            kept = np.flatnonzero(at >= 0)
            every = len(kept) == len(at)
            part = widened(gather(rows, at if every else at[kept]))
            if weights is not None:
                scale = weights[:, choice] if every else gather(weights[:, choice], kept)
                part *= scale[:, None].astype(total.dtype)
            if every:
                total += part
            else:
                total[beside(kept, total)] += part
    return narrowed(total, rows.dtype)
