"""What a machine costs: the parameters of LogGP, and whole ticks of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.errors import MpicollError

Integers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]

#: Seconds of one tick. Sums and maxima of whole ticks are exact, whatever their order.
TICK = 1e-13


#: Ticks of anything, at most: some more than five days. 64 bits hold twice as many.
MOST = 1 << 62
TOO_LONG = "it takes more than five days, which is longer than is replayed"


class TooLongError(MpicollError):
    """A time that does not fit into the clocks of a replay."""


def grown(clocks: Integers, times: int, by: Integers) -> Integers:
    """Return clocks that grew several times; raise TooLongError before they would wrap."""
    if float(clocks.max(initial=0)) + float(times) * float(by.max(initial=0)) > MOST:
        raise TooLongError(TOO_LONG)
    later: Integers = clocks + times * by
    return later


def ticks(seconds: Reals | float) -> Integers:
    """Return seconds as whole ticks; raise TooLongError where they are too many."""
    found = np.rint(np.asarray(seconds) / TICK)
    if found.size and found.max() > MOST:
        raise TooLongError(TOO_LONG)
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor's side of LogGP, in seconds; the network's is `mpicoll.simulation.fabric`.

    ``overhead`` per message at each end, ``step`` per step with a message, ``call`` once on
    each rank, ``operation`` per local reduction or copy, ``gamma`` per byte reduced, ``copy``
    per byte copied. A message of more than ``eager`` bytes starts when both ends are there,
    a shorter one when its sender is. ``cores`` of a node are shared by its ranks that are at
    work in the same level; 0 gives every rank its own.
    """

    overhead: float = 0.5e-6
    step: float = 0.0
    call: float = 0.0
    operation: float = 0.0
    gamma: float = 0.1e-9
    copy: float = 0.05e-9
    eager: int = 64 << 10
    cores: int = 0

    def work(self, units: Integers, scales: Reals) -> Reals:
        """Return seconds of local work, (sizes, …).

        ``units`` are (…, 3), reduced, copied and operations; ``scales`` are bytes of a unit.
        """
        each = units[..., 0] * self.gamma + units[..., 1] * self.copy
        one = scales.reshape(-1, *[1] * each.ndim)
        result: Reals = one * each + units[..., 2] * self.operation
        return result

    def stretch(self, engaged: Integers) -> Reals:
        """Return by how much work takes longer where ``engaged`` ranks share a node's cores."""
        if self.cores == 0:
            return np.ones(engaged.shape)
        return np.maximum(1.0, engaged / self.cores)
