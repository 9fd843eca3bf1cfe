"""The rates of the cost model, from the times of a few calls: a fit of α, β and γ.

What is timed are our own algorithms through the whole stack, so that the part of Python and
of crowded cores is in the rates. Then every algorithm is timed at a few sizes, for what it takes
beyond what the rates say of it. Loads mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.algorithms import Algorithm, find, names
from mpicoll.cli import timing
from mpicoll.cli.cases import Case, even
from mpicoll.cli.world import native
from mpicoll.comm import Comm
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.selection.calibration import FARTHEST
from mpicoll.selection.choose import Wanted, served
from mpicoll.selection.model import (
    CROWDED,
    DEFAULT,
    KIB,
    Corrections,
    Rates,
    kind,
    seconds,
)

Vector: TypeAlias = npt.NDArray[np.float64]

#: What is timed: few steps and many, one message a step and many, bytes that are only sent
#: and bytes that are also reduced.
PROBES = (
    ("barrier", "dissemination", 0),
    ("allgather", "ring", 1 << 10),
    ("alltoall", "linear", 1 << 10),
    ("reduce_scatter", "direct", 1 << 10),
    ("bcast", "binomial", 64),
    ("gather", "linear", 1 << 10),
    ("allreduce", "recursive_doubling", 64),
    ("allgather", "ring", 1 << 20),
    ("alltoall", "linear", 1 << 20),
    ("bcast", "binomial", 1 << 17),
    ("bcast", "binomial", 1 << 21),
    ("allreduce", "recursive_doubling", 1 << 16),
    ("allreduce", "recursive_doubling", 1 << 20),
    ("reduce_scatter", "direct", 1 << 20),
    ("allreduce", "circulant", 1 << 21),
)

TRUST = 1.0  #: weight of what is known beforehand: a message is half a step, and so on

#: Sizes at which every algorithm is timed, and segments of those that cut what is large.
SIZES = (8, 4 * KIB, 64 * KIB, 512 * KIB, 4096 * KIB)
CUTS = (256 * KIB, 1024 * KIB)
EACH = 0.06  #: seconds for one algorithm and size, in the mean
#: How far times are believed, the rest being left to the rates: a size stands for all between
#: it and the next, and some calls were disturbed.
BELIEF = 0.8

LIMITS = (1e-9, 0.1)  #: seconds for a step or a message
BYTE_LIMITS = (1e-13, 1e-5)  #: seconds for a byte


class Sample(NamedTuple):
    """One probe, its median time, and what was wrong with its data."""

    collective: str
    algorithm: str
    nbytes: int
    seconds: float
    fault: str = ""
    segment: int = 0

    @property
    def label(self) -> str:
        """What is named where data are wrong."""
        return f"{self.collective} {self.algorithm}"


def measure(comm: Comm, each: float) -> list[Sample]:
    """Time the probes, for ``each`` seconds in the mean; collective, equal on all ranks."""
    samples = []
    for collective, name, nbytes in PROBES:
        shape = even(collective, comm.size, nbytes, np.dtype(np.float64))
        case = Case(comm, shape)
        call = case.bound(comm, algorithm=name)
        contender = timing.Contender(name, call, case.poison, case.wrong)
        found = timing.race(native(comm), [contender], each, 100)[0]
        median = float(np.median(found.seconds))
        samples.append(Sample(collective, name, shape.nbytes, max(median, 1e-9), found.fault))
    return samples


def time_all(comm: Comm, shown: Callable[[str], None] = lambda name: None) -> list[Sample]:
    """Time every algorithm at a few sizes; collective, equal on all ranks.

    Those of one collective and size take turns. ``shown`` is told the name of each collective
    that has been timed.
    """
    samples = []
    for collective in COLLECTIVES:
        known = [find(collective, name) for name in names(collective)]
        known = [one for one in known if served(one, Wanted(collective, comm.size))]
        if len(known) > 1:  # else there is nothing to choose
            double = np.dtype(np.float64)
            # Blocks of equal length may make several sizes one.
            sizes = [even(collective, comm.size, nbytes, double).nbytes for nbytes in SIZES]
            for nbytes in dict.fromkeys(sizes):
                samples += _timed(comm, known, nbytes)
        shown(collective)
    return samples


def correct(samples: Sequence[Sample], size: int, rates: Rates) -> Corrections:
    """Return what samples took over what ``rates`` predict, drawn towards 1.

    What makes wrong data takes the longest that there is.
    """
    curves: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
    for one in samples:
        algorithm = find(one.collective, one.algorithm)
        factor = one.seconds / seconds(algorithm, size, one.nbytes, one.segment, rates)
        factor = min(FARTHEST, max(1 / FARTHEST, factor))
        factor = FARTHEST if one.fault else float(factor**BELIEF)
        cuts = curves.setdefault((one.collective, one.algorithm), {})
        cuts.setdefault(one.segment, []).append((one.nbytes, factor))
    found = {
        key: {cut: tuple(curve) for cut, curve in cuts.items()} for key, cuts in curves.items()
    }
    return Corrections(found, kind(size))


def _timed(comm: Comm, known: Sequence[Algorithm], nbytes: int) -> list[Sample]:
    """Time algorithms of one collective; those that cut large blocks with and without."""
    collective = known[0].collective
    shape = even(collective, comm.size, nbytes, np.dtype(np.float64))
    case = Case(comm, shape)
    block = shape.nbytes // comm.size
    whole = block if collective in ("allreduce", "reduce_scatter") else shape.nbytes
    running = [(one, 0) for one in known]
    running += [(one, cut) for cut in CUTS for one in known if one.segmented and whole > cut]
    contenders = []
    for one, cut in running:
        keywords = {"segment": cut} if one.segmented else {}
        call = case.bound(comm, algorithm=one.name, **keywords)
        contenders.append(timing.Contender(f"{one.name} {cut}", call, case.poison, case.wrong))
    found = timing.race(native(comm), contenders, EACH * len(running), 100)
    times = [max(float(np.median(result.seconds)), 1e-9) for result in found]
    return [
        Sample(collective, one.name, shape.nbytes, time, result.fault, cut)
        for (one, cut), time, result in zip(running, times, found, strict=True)
    ]


def fit(samples: Sequence[Sample], size: int, load: float) -> tuple[Rates, float]:
    """Return the rates that predict the samples best, and the median factor they are off by.

    Levenberg and Marquardt's method on the logarithms of rates and times; samples that are
    far off weigh less, since some calls were disturbed. Two weak samples more say that a
    message to a step, and a local byte to one that is sent, are as in the defaults.
    """
    start = replace(CROWDED if load > 1 else DEFAULT, load=load)
    x = first = np.log([start.step, start.message, start.byte, start.local])
    low = np.log([LIMITS[0], LIMITS[0], BYTE_LIMITS[0], BYTE_LIMITS[0]])
    high = np.log([LIMITS[1], LIMITS[1], BYTE_LIMITS[1], BYTE_LIMITS[1]])
    damping = 1e-2

    def residuals(x: Vector) -> Vector:
        moved = x - first
        known = TRUST * np.array([moved[1] - moved[0], moved[3] - moved[2]])
        return np.concatenate([_off(x, samples, size, load), known])

    off = residuals(x)
    for _ in range(60):
        weights = 1 / np.sqrt(1 + (off / 0.3) ** 2)
        slopes = np.stack(
            [(residuals(x + step) - off) / 1e-4 for step in 1e-4 * np.eye(4)], axis=1
        )
        normal = slopes.T @ (weights[:, None] * slopes)
        move = np.linalg.solve(normal + damping * np.eye(4), -slopes.T @ (weights * off))
        tried = np.clip(x + move, low, high)
        new = residuals(tried)
        if np.sum(_rho(new)) < np.sum(_rho(off)):
            x, off, damping = tried, new, damping / 3
        else:
            damping = min(1e6, damping * 5)
    return _rates(x, load), float(np.exp(np.median(np.abs(off[:-2]))))


def _rho(off: Vector) -> Vector:
    return np.sqrt(1 + (off / 0.3) ** 2) - 1


def _rates(x: Vector, load: float) -> Rates:
    step, message, byte, local = (float(value) for value in np.exp(x))
    return Rates(step, message, byte, local, load)


def _off(x: Vector, samples: Sequence[Sample], size: int, load: float) -> Vector:
    """Return the logarithm of predicted over measured time."""
    rates = _rates(x, load)
    return np.log(
        [
            seconds(find(one.collective, one.algorithm), size, one.nbytes, 0, rates) / one.seconds
            for one in samples
        ]
    )
