"""Times of contenders that take turns, and what is read from them. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.cli.memory import HOST, Memory
from mpicoll.cli.mpi import MPI

Times: TypeAlias = npt.NDArray[np.float64]

WARM_UP = 3  #: calls of each contender that are not timed
FEWEST = 10  #: rounds, however long one takes
POLICY = (
    "In every round each contender makes one call, in an order drawn anew; a native barrier "
    "comes before each call and is not timed. The time of a call is that of the slowest rank."
)


@dataclass(frozen=True, slots=True)
class Contender:
    """What takes part: a name, its call, and a check of the data of a timed call.

    ``prepare`` comes before every call and is not timed: for one that works in place.
    """

    name: str
    call: Callable[[], object]
    poison: Callable[[], None]
    wrong: Callable[[], str]
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one contender by round, of the slowest rank, and the first fault."""

    name: str
    seconds: Times
    fault: str = ""

    def summary(self) -> dict[str, float]:
        """Return minimum, median and 99th percentile."""
        return {
            "min": float(self.seconds.min()),
            "median": float(np.median(self.seconds)),
            "p99": float(np.percentile(self.seconds, 99)),
        }


def race(
    world: MPI.Intracomm,
    contenders: Sequence[Contender],
    seconds: float,
    most: int,
    memory: Memory = HOST,
) -> list[Measured]:
    """Time the contenders by turns for about ``seconds`` in all, at most ``most`` rounds.

    ``memory``, where their buffers lie, says how. The data of the first and of the last timed
    call of each contender are checked, and their results poisoned before; that is not timed
    either.
    """
    rounds = _warm_up(world, contenders, seconds, most, memory)
    times = np.empty((len(contenders), rounds))
    faults = [""] * len(contenders)
    draw = np.random.default_rng(0)  # alike on all ranks
    for number in range(rounds):
        checked = number in (0, rounds - 1)
        for at in draw.permutation(len(contenders)):
            contender = contenders[at]
            if checked:
                contender.poison()
            if contender.prepare is not None:
                contender.prepare()
            world.Barrier()
            times[at, number] = memory.timed(contender.call)
            if checked and not faults[at]:
                faults[at] = contender.wrong()
    slowest = np.empty_like(times)
    world.Allreduce(times, slowest, MPI.MAX)
    found = world.allgather(faults)
    return [
        Measured(contender.name, slowest[at], next(filter(None, (row[at] for row in found)), ""))
        for at, contender in enumerate(contenders)
    ]


def _warm_up(
    world: MPI.Intracomm,
    contenders: Sequence[Contender],
    seconds: float,
    most: int,
    memory: Memory,
) -> int:
    """Call everything a few times; return how many rounds fit, alike on all ranks."""
    lap = 0.0
    for _ in range(WARM_UP):
        world.Barrier()
        start = perf_counter()
        for contender in contenders:
            if contender.prepare is not None:
                contender.prepare()
            memory.timed(contender.call)
            world.Barrier()
        lap = perf_counter() - start
    rounds = int(min(most, max(min(FEWEST, most), seconds / max(lap, 1e-7))))
    return int(world.bcast(rounds, root=0))


def ratio(one: Times, other: Times) -> dict[str, float]:
    """Return the median, and the middle 90 %, of the ratios of two contenders by round."""
    by_round = one / other
    low, median, high = np.percentile(by_round, (5, 50, 95))
    return {"median": float(median), "p5": float(low), "p95": float(high)}


def spread_of_median(one: Times, other: Times, draws: int = 200) -> tuple[float, float]:
    """Return the middle 95 % of the median ratio, by bootstrap over the rounds."""
    by_round = one / other
    random = np.random.default_rng(0)
    medians = np.median(random.choice(by_round, (draws, by_round.size)), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def verdict(interval: tuple[float, float], noise: tuple[float, float]) -> str:
    """Return faster or slower where the interval lies outside of the noise, else same."""
    if interval[1] < min(1.0, noise[0]):
        return "faster"
    return "slower" if interval[0] > max(1.0, noise[1]) else "same"
