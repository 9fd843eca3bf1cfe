"""`ExpertDispatch`: tokens to the experts of a mixture on other ranks, and back.

Rows travel grouped by expert, and each token's results are summed in the order of its
choices, so no result depends on the order in which messages arrive.

- D. Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and
  Automatic Sharding, ICLR 2021, arXiv:2006.16668. Algorithm 1: capacity, first choices first.
- W. Fedus, B. Zoph, N. Shazeer, Switch Transformers: Scaling to Trillion Parameter Models
  with Simple and Efficient Sparsity, JMLR 23 (2022), arXiv:2101.03961. Section 2.2:
  capacity factor, load-balancing loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpicoll.algorithms import find
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.expert_exchange import (
    Batch,
    Over,
    Plan,
    Settings,
    exchange_sizes,
    exchange_taken,
    problem_of,
)
from mpicoll.parallel.expert_load import BalanceLoss, Load, balance_loss
from mpicoll.parallel.library import Array, gather, library, scatter
from mpicoll.parallel.routing import (
    Choices,
    Flags,
    Ints,
    accepted,
    assign,
    by_expert,
    capacity_of,
    choices_of,
    count_of,
    factor_of,
    narrowed,
    rows_of,
    sum_choices,
    widened,
)
from mpicoll.schedule.partition import offsets, split

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["BalanceLoss", "Combined", "Dispatched", "ExpertDispatch", "Load"]

#: Numbers objects of a process. An object takes the highest number that any of its ranks has,
#: so those of one communicator have different ones, and ranks that mix them up see it.
_numbers = count()


class ExpertDispatch:
    """Send tokens to ``experts`` experts that are spread over the ranks of ``comm``.

    Rank r owns ``owners[r]`` experts, numbered on from those of the rank before; without
    ``owners`` they are spread as evenly as they go, the first ranks with one more. A rank
    may own none.

    With a ``capacity_factor`` an expert takes ``ceil(factor * tokens * choices / experts)``
    rows: with ``capacity_over="rank"`` from each rank, counted over the tokens of that rank
    (as GShard and Switch Transformer do, where each group of tokens is dispatched on its
    own); with "world" from all ranks together, counted over all tokens. First come the
    lower ranks ("world"), then first choices before second ones (GShard), then the earlier
    tokens; the rest is dropped. The factor is the decimal that is written: 1.1 is 11/10.

    ``algorithm`` names that of the exchange of rows, an Alltoallv.

    Tokens are NumPy's, or CuPy's, and then all rows stay on the device; each rank has its own
    where it wants, with the same results. Who goes where is decided on the host.

    Making one is collective (an allgather of 24 bytes per rank), and all ranks pass the
    same; raises ValueError on every rank if they do not or if one passes what means nothing.
    A plain mpi4py communicator is wrapped; None is the world.
    """

    def __init__(
        self,
        experts: int,
        comm: MPI.Intracomm | None = None,
        *,
        owners: Sequence[int] | None = None,
        capacity_factor: float | Fraction | None = None,
        capacity_over: Over = "rank",
        algorithm: str | None = None,
    ) -> None:
        """Agree on the arguments."""
        self.comm = wrapped(comm)
        problem, settings = None, Settings(1, (1,), None, "rank", None)
        try:
            shares = _shares(experts, owners, self.comm.size)
            factor = None if capacity_factor is None else factor_of(capacity_factor)
            if capacity_over not in ("rank", "world"):
                raise ValueError(f'capacity_over {capacity_over!r}; expected "rank" or "world"')
            if algorithm is not None and find("alltoall", algorithm).uniform:
                raise ValueError(f"algorithm {algorithm!r}, which wants blocks of equal size")
            settings = Settings(int(experts), shares, factor, capacity_over, algorithm)
        except Exception as error:  # whatever it is, the other ranks wait for this one
            problem = problem_of(error)
        entries = [f"{name} {value}" for name, value in settings._asdict().items()]
        number = max(agree(self.comm, "ExpertDispatch", entries, next(_numbers), problem))
        self.settings = settings._replace(number=number)
        self._calls = 0

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return self.settings.experts

    @property
    def mine(self) -> range:
        """The numbers of the experts of this rank."""
        return self.settings.owned(self.comm.rank)

    def dispatch(
        self,
        tokens: npt.ArrayLike,
        experts: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
    ) -> Dispatched:
        """Send ``tokens``, (n, hidden), to their ``experts``, (n, choices) or (n,).

        ``weights``, of the shape of ``experts``, are for `Dispatched.combine`; without
        them all are 1. n may differ between ranks and be 0; hidden size, dtype (float16,
        bfloat16, float32, float64) and the number of choices may not. Tokens of a device bring
        what arrives here to that device, also where n is 0; weights have to lie where the
        tokens do. Expert numbers may lie on either side: the counts are the host's, which
        waits for numbers of a device.

        Sends: an Alltoall of ``6 + max(owners)`` int64 to each rank; where the capacity is
        over the world one more of ``max(owners)``; then an Alltoallv of the rows that are
        kept, ``hidden * itemsize`` bytes for each choice.

        Raises ValueError, the same on every rank, before a row is sent: for expert numbers
        out of range, one expert twice in a token, wrong shapes and dtypes, and what differs
        between ranks.
        """
        self._calls += 1
        settings = self.settings
        batch = Batch.of(lambda: self._checked(tokens, experts, weights))
        choices, limits = batch.choices, None
        if settings.factor is not None and settings.over == "rank":
            capacity = self._capacity(len(batch.rows), choices)
            limits = np.full(self.experts, capacity)
        assignment = assign(choices.experts, self.experts, limits)
        every, sizes = exchange_sizes(self.comm, settings, self._calls, batch, assignment.counts)
        if settings.over == "world" and settings.factor is not None:
            capacity = self._capacity(every, choices)
            sizes = accepted(sizes, capacity)
            limits = exchange_taken(self.comm, settings, sizes)
            assignment = assign(choices.experts, self.experts, limits)
        plan = Plan(
            self.comm,
            settings,
            self._calls,
            choices,
            assignment,
            _per_rank(assignment.counts, settings.owners),
            sizes.sum(axis=1).tolist(),
            by_expert(sizes),
        )
        return Dispatched(
            plan.send(gather(batch.rows, assignment.tokens)),
            sizes.sum(axis=0),
            self.mine,
            None if limits is None else capacity,
            plan,
        )

    def balance_loss(
        self, probabilities: npt.ArrayLike, experts: npt.ArrayLike, scale: float = 1.0
    ) -> BalanceLoss:
        """Return the load-balancing loss of Switch Transformer, over the tokens of all ranks.

        ``scale * E * sum(f[e] * p[e])`` over E experts: f is the share of the choices that
        name e, dropped ones too, p the mean of its ``probabilities``, (n, E), which are the
        router's. 1 times ``scale`` where all is even, and 0 without tokens. f is taken as
        constant, so the gradient for each token is ``scale * E * f / tokens``, of this
        global loss: gradients of parameters are to be summed over ranks, not averaged.

        Sums are in float64; all ranks get the same bits. A device adds the probabilities of its
        rank in an order of its own, and the host waits for the sums. One Allreduce of ``4 + 2 E``
        float64. Raises ValueError on every rank where one passes what `dispatch` refuses,
        or probabilities of another shape or type.
        """
        return balance_loss(self.comm, probabilities, experts, self.experts, scale)

    def _checked(
        self, tokens: npt.ArrayLike, experts: npt.ArrayLike, weights: npt.ArrayLike | None
    ) -> tuple[Array, Choices]:
        rows = rows_of(tokens, "tokens", (None, None))
        return rows, choices_of(experts, weights, rows, self.experts)

    def _capacity(self, tokens: int, choices: Choices) -> int:
        assert self.settings.factor is not None
        return capacity_of(self.settings.factor, tokens, choices.count, self.experts)


def _shares(experts: object, owners: Sequence[int] | None, size: int) -> tuple[int, ...]:
    if not isinstance(experts, int | np.integer) or experts < 1:
        raise ValueError(f"experts {experts!r}; expected a number from 1 on")
    shares = split(int(experts), size) if owners is None else tuple(map(int, owners))
    if len(shares) != size or min(shares) < 0 or sum(shares) != experts:
        raise ValueError(
            f"owners {list(shares)}; expected {size} counts that add up to {experts} experts"
        )
    return shares


def _per_rank(counts: Ints, owners: Sequence[int]) -> list[int]:
    before = np.concatenate(([0], np.cumsum(counts)))
    rows: list[int] = np.diff(before[list(offsets(owners))]).tolist()
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """What arrived for the experts of this rank, and the way back.

    ``tokens``, (rows, hidden), is grouped by expert; the rows of an expert are in the order
    of their ranks, then of their tokens. ``counts`` are rows per own expert, ``experts``
    their numbers; ``capacity`` is the most rows of an expert (from this rank, or from all,
    as it is counted), None without a limit.

    ``tokens`` are where this rank's tokens are that were dispatched; rows that are given back
    have to lie there too, and what returns does. Counts and flags are on the host.

    `combine`, `restore`, `deliver`, `backward` and `load` are collective and may be called
    any number of times. All but `load` begin with an allgather of 24 bytes per rank, by which
    the ranks agree that they do the same; they raise the same ValueError on every rank if not.
    """

    tokens: Array
    counts: Ints
    experts: range
    capacity: int | None
    _plan: Plan

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each own expert, and where in ``tokens`` its rows are."""
        first = offsets(self.counts.tolist())
        for at, expert in enumerate(self.experts):
            yield expert, slice(first[at], first[at + 1])

    @property
    def kept(self) -> Flags:
        """Whether each choice of this rank's tokens was kept, (n, choices)."""
        return self._plan.assignment.kept

    @property
    def dropped(self) -> Ints:
        """How many choices of this rank's tokens were dropped, for each of all experts."""
        return count_of(self._plan.choices.experts[~self.kept], self._plan.settings.experts)

    def combine(self, outputs: npt.ArrayLike) -> Combined:
        """Bring one output row per row of ``tokens`` back and sum them with their weights.

        ``outputs`` is (rows, width), of any width and dtype of `ExpertDispatch.dispatch`. The
        sum of a token goes from its first choice to its last, each product and sum in
        float32 for 16-bit outputs (rounded once at the end) and in the dtype of the outputs
        for others; so the bits depend neither on the number of ranks nor on what arrives
        when. What was dropped adds nothing. Sends the rows back by an Alltoallv.
        """
        plan = self._plan
        rows = self._returned("combine", outputs)
        summed = sum_choices(rows, plan.assignment.where, plan.choices.weights)
        return Combined(summed, rows, plan)

    def restore(self, outputs: npt.ArrayLike) -> Array:
        """Bring output rows back without a sum: (n, choices, width), 0 where dropped."""
        rows = self._returned("restore", outputs)
        where = self._plan.assignment.where
        restored: Array = library(rows).zeros((where.size, rows.shape[1]), rows.dtype)
        scatter(restored, self._plan.assignment.order, rows)
        return restored.reshape(*where.shape, rows.shape[1])

    def deliver(self, rows: npt.ArrayLike) -> Array:
        """Send a row per choice, (n, choices, width), the way that the tokens went.

        The backward of `restore`. What it returns lies as ``tokens`` does; rows of dropped
        choices are not sent.
        """
        plan, where = self._plan, self._plan.assignment.where
        shape = *where.shape, None
        given = plan.agreed("deliver", lambda: rows_of(rows, "rows", shape, None, self.tokens))
        each = given.reshape(where.size, given.shape[-1])
        return plan.send(gather(each, plan.assignment.order))

    def backward(self, gradient: npt.ArrayLike) -> Array:
        """Return the gradient of the dispatched tokens, (n, hidden), from that of ``tokens``.

        The sum over the choices of a token, as in `combine` with weights 1. Sends the rows
        back by an Alltoallv.
        """
        rows = self._returned("dispatch backward", gradient, self.tokens)
        return sum_choices(rows, self._plan.assignment.where, None)

    def load(self) -> Load:
        """Return who sent how much to which expert; an Allgather of two int64 per expert."""
        plan = self._plan
        own = np.stack([plan.assignment.counts, self.dropped])
        every = np.empty((plan.comm.size, *own.shape), np.int64)
        plan.comm.Allgather(own, every)
        return Load(every[:, 0], every[:, 1], plan.settings.owners)

    def _returned(self, where: str, rows: npt.ArrayLike, like: Array | None = None) -> Array:
        """Return rows of the experts, at the ranks of their tokens."""
        shape = (len(self.tokens), None if like is None else like.shape[1])
        what, dtype = ("outputs", None) if like is None else ("gradient", like.dtype)
        given = self._plan.agreed(where, lambda: rows_of(rows, what, shape, dtype, self.tokens))
        return self._plan.back(given)


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """The sum of the experts' outputs for each token of this rank: ``tokens``, (n, width).

    ``rows`` are the outputs that came back, kept for the gradient of the weights.
    """

    tokens: Array
    rows: Array
    _plan: Plan

    def backward(self, gradient: npt.ArrayLike) -> tuple[Array, Array]:
        """Return the gradients of the outputs and of the weights from that of ``tokens``.

        The first lies as the outputs did, at their experts: weight times gradient, which is
        rounded once and sent by an Alltoallv. The second has shape and dtype of the weights
        (without weights the dtype of the sums), and is 0 for what was dropped.
        ``gradient`` has shape and dtype of ``tokens``. A device adds the products of a row for
        the second in an order of its own. Collective; raises as `Dispatched` says.
        """
        plan, like = self._plan, self.tokens
        given = plan.agreed(
            "combine backward",
            lambda: rows_of(gradient, "gradient", like.shape, like.dtype, like),
        )
        assignment, weights = plan.assignment, plan.choices.weights
        picked = gather(widened(given), assignment.tokens)
        slots: Array = library(given).zeros(assignment.where.size, picked.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            scatter(slots, assignment.order, (picked * widened(self.rows)).sum(axis=1))
            if weights is not None:
                scale = gather(weights.reshape(-1), assignment.order)
                picked *= scale[:, None].astype(picked.dtype)
        of_weights = slots if plan.choices.flat else slots.reshape(assignment.where.shape)
        if weights is not None:
            of_weights = narrowed(of_weights, weights.dtype)
        return plan.send(narrowed(picked, given.dtype)), of_weights
