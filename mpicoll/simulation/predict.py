"""The time of an algorithm at any size: its schedules built, their symmetry used, replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.simulation import lockstep
from mpicoll.simulation import replay as full
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import (
    MOST,
    TICK,
    TOO_LONG,
    Integers,
    Machine,
    Reals,
    TooLongError,
    grown,
)
from mpicoll.simulation.program import Program
from mpicoll.simulation.sample import sample
from mpicoll.simulation.schedules import MESSAGES, How, LeftOutError, Schedules, cut_of
from mpicoll.simulation.symmetry import ROW

LARGE = 1 << 22  #: messages times sizes that a full replay takes at once
UNEVEN = "a row of ranks whose time does not grow evenly within the limits"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds until the last rank is done, one per size asked for, and how they came about."""

    seconds: tuple[float, ...]
    how: tuple[How, ...]


class Prepared:
    """An algorithm's schedules for some sizes, ready to be replayed on any machine.

    Sizes are bytes of the vector, or of all blocks together. They are cut into equal shares,
    fractions of a byte too: what each of 16 ranks has of 8 bytes is half a byte. ``segment`` is
    the most bytes of a pipelined piece, 0 for whole blocks. Raises LeftOutError where symmetry
    does not help and building all schedules would take longer than ``patience`` seconds.
    ``how`` insists on a way; but for "merged" and "sampled", the ticks are the same.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sizes: Sequence[int],
        segment: int,
        ranks: int,
        patience: float = 30.0,
        how: How | None = None,
    ) -> None:
        self._sizes = tuple(sizes)
        self._how = how
        self._parts: list[_Part] = []
        cuts = {nbytes: cut_of(algorithm, nbytes, segment, ranks) for nbytes in sizes}
        for cut in sorted(set(cuts.values())):
            group = [nbytes for nbytes in cuts if cuts[nbytes] == cut]
            schedules = Schedules(algorithm, ranks, cut)
            way, program = schedules.program(patience, how)
            scales = np.array([nbytes / schedules.units for nbytes in group])
            self._parts.append(_Part(group, way, program, scales))

    def run(self, fabric: Fabric, machine: Machine) -> Prediction:
        """Replay them."""
        seconds: dict[int, float] = {}
        ways: dict[int, How] = {}
        for part in self._parts:  # before any is replayed
            if isinstance(part.program, Schedules):
                _refuse_row(part.program, fabric)
        for part in self._parts:
            program, how, some = part.program, part.how, None
            if isinstance(program, lockstep.March) and self._how in (None, "sampled"):
                some = sample(program, fabric)
            if some is None:
                ends = _replayed(program, fabric, machine, part.scales)
            else:
                how, (steps, larger, counts) = "sampled", some
                ends = lockstep.replay(steps, larger, machine, part.scales, counts).max(axis=1)
            if (ends < 0).any() or (ends > MOST).any():
                raise TooLongError(TOO_LONG)
            for nbytes, last in zip(part.sizes, ends.tolist(), strict=True):
                seconds[nbytes] = last * TICK
                ways[nbytes] = how
        return Prediction(
            tuple(seconds[nbytes] for nbytes in self._sizes),
            tuple(ways[nbytes] for nbytes in self._sizes),
        )


class _Part(NamedTuple):
    """Sizes that are replayed together, and how."""

    sizes: list[int]
    how: How
    program: lockstep.March | Program | Schedules
    scales: Reals


def predict(
    algorithm: Algorithm,
    sizes: Sequence[int],
    segment: int,
    fabric: Fabric,
    machine: Machine,
    patience: float = 30.0,
    how: How | None = None,
) -> Prediction:
    """Return the predicted times; see `Prepared`."""
    return Prepared(algorithm, sizes, segment, fabric.size, patience, how).run(fabric, machine)


def _replayed(
    program: lockstep.March | Program | Schedules,
    fabric: Fabric,
    machine: Machine,
    scales: Reals,
) -> Integers:
    """Return the ticks until the last rank is done, one per size."""
    if isinstance(program, Schedules):
        return _row(program, fabric, machine, scales)
    if isinstance(program, lockstep.March):
        last: Integers = lockstep.replay(program, fabric, machine, scales).max(axis=1)
        return last
    at_once = max(1, LARGE // max(1, program.source.size))
    parts = [scales[low : low + at_once] for low in range(0, scales.size, at_once)]
    ends = [full.replay(program, fabric, machine, part).max(axis=1) for part in parts]
    result: Integers = np.concatenate(ends)
    return result


def _row(schedules: Schedules, fabric: Fabric, machine: Machine, scales: Reals) -> Integers:
    """Replay shorter rows of ranks, and count on once the time grows alike with each period.

    All that reaches a rank comes through its neighbours, so what one more period of ranks adds
    stays the same once the pipeline is filled.
    """
    period, size = fabric.repeat, fabric.size
    length = _shortest(schedules, fabric)
    while length + 2 * period < size and (length + 2 * period) * schedules.pieces <= MESSAGES:
        lengths = [length, length + period, length + 2 * period]
        ends = [_short(schedules, one, fabric, machine, scales) for one in lengths]
        gain = ends[1] - ends[0]
        if (ends[2] - ends[1] == gain).all():
            result = grown(ends[2], (size - lengths[2]) // period, gain)
            return result
        length += max(1, length // period) * period
    if size * schedules.pieces > MESSAGES:
        raise LeftOutError(UNEVEN)
    return _short(schedules, size, fabric, machine, scales)


def _shortest(schedules: Schedules, fabric: Fabric) -> int:
    """Return how many ranks the first of the shorter rows has."""
    period = fabric.repeat
    return max(2 * schedules.pieces, 64) // period * period + 2 * period + fabric.size % period


def _refuse_row(schedules: Schedules, fabric: Fabric) -> None:
    """Refuse a row that is too long, and of which shorter ones are too."""
    least = min(_shortest(schedules, fabric) + 2 * fabric.repeat, fabric.size)
    if least * schedules.pieces > MESSAGES:
        raise LeftOutError(UNEVEN)


def _short(
    schedules: Schedules, size: int, fabric: Fabric, machine: Machine, scales: Reals
) -> Integers:
    program = schedules.shorter(size).classes((ROW,))
    assert program is not None  # the longer row is one
    units = scales * schedules.units / (size * schedules.pieces)
    return _replayed(program, fabric.resized(size), machine, units)
