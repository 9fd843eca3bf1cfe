"""How evenly experts are loaded, and the loss that makes a router spread its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree
from mpicoll.parallel.expert_exchange import problem_of
from mpicoll.parallel.library import Array, as_array, beside, dense, library, to_host
from mpicoll.parallel.routing import Choices, Ints, choices_of, count_of, floats, widened
from mpicoll.schedule.partition import offsets

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Rows that rank r sent to expert e, and choices that it dropped: (ranks, experts) each.

    ``owners`` are the experts of each rank.
    """

    rows: Ints
    dropped: Ints
    owners: tuple[int, ...]

    @property
    def per_expert(self) -> Ints:
        """Rows that each expert got."""
        rows: Ints = self.rows.sum(axis=0)
        return rows

    @property
    def per_rank(self) -> Ints:
        """Rows that the experts of each rank got."""
        before = np.concatenate(([0], np.cumsum(self.per_expert)))
        return np.diff(before[list(offsets(self.owners))])

    @property
    def expert_imbalance(self) -> float:
        """Rows of the hottest expert over the mean; 1 where there are none."""
        return _hottest_over_mean(self.per_expert)

    @property
    def rank_imbalance(self) -> float:
        """Rows of the hottest rank over the mean of all ranks; 1 where there are none."""
        return _hottest_over_mean(self.per_rank)

    def __str__(self) -> str:
        """Say it in a line."""
        lost = int(self.dropped.sum())
        return (
            f"hottest over mean: expert {int(self.per_expert.argmax())} "
            f"{self.expert_imbalance:.2f}, rank {int(self.per_rank.argmax())} "
            f"{self.rank_imbalance:.2f}; dropped {lost} of {int(self.rows.sum()) + lost}"
        )


def _hottest_over_mean(rows: Ints) -> float:
    total = int(rows.sum())
    return int(rows.max()) * len(rows) / total if total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class BalanceLoss:
    """The load-balancing loss over all ranks, and its gradient for this rank's tokens.

    ``gradient`` has shape and dtype of the probabilities, and is where they are; the others
    are on the host. ``fractions`` are the shares of the choices that name each expert,
    ``means`` the mean probability of each.
    """

    loss: float
    gradient: Array
    fractions: Floats
    means: Floats


def balance_loss(
    comm: Comm, probabilities: npt.ArrayLike, numbers: npt.ArrayLike, experts: int, scale: float
) -> BalanceLoss:
    """Return the loss of `ExpertDispatch.balance_loss`; collective, one Allreduce."""
    problem = None
    try:
        router, choices = _checked(probabilities, numbers, experts)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        problem = problem_of(error)
        router, choices = np.zeros((0, experts)), Choices(np.zeros((0, 1), np.int64), None, False)
    tokens, k = len(router), choices.count
    # All but the sums are whole numbers, exact up to 2**53. Equal k on all ranks is what
    # makes the square of the sum the sum of the squares times their number.
    sums = to_host(widened(router).sum(axis=0, dtype=np.float64))
    counts = count_of(choices.experts, experts)
    vector = np.concatenate(([problem is not None, k, k * k, tokens], counts, sums))
    total = np.empty_like(vector)
    comm.Allreduce(vector, total)
    if total[0] or total[1] ** 2 != total[2] * comm.size:
        agree(comm, "balance_loss", [f"{k} choices per token"], problem=problem)
        raise AssertionError("sums differ, words do not")
    every = max(1.0, total[3])
    fractions, means = total[4 : 4 + experts] / (every * k), total[4 + experts :] / every
    slope = beside((scale * experts * fractions / every).astype(router.dtype), router)
    return BalanceLoss(
        scale * experts * float(np.sum(fractions * means)),
        library(router).broadcast_to(slope, router.shape).copy(),
        fractions,
        means,
    )


def _checked(
    probabilities: npt.ArrayLike, numbers: npt.ArrayLike, experts: int
) -> tuple[Array, Choices]:
    router = floats(as_array(probabilities), "probabilities")
    if router.ndim != 2 or router.shape[1] != experts:
        raise ValueError(f"probabilities of shape {router.shape}; expected (any, {experts})")
    return dense(router), choices_of(numbers, None, router, experts)
