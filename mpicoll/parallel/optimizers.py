"""Optimizers on flat arrays: SGD with momentum, Adam.

Every operation is elementwise and rounded by IEEE 754, so an element gets the same bits in
a shard of any length as in the whole array, and on a device as on the host, but for subnormal
float32, which CuPy takes for zero. An optimizer of your own has to keep to that: see
`FlatOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

import numpy as np

from mpicoll.parallel.library import Array, library, on_host

#: Elements that are updated at a time on the host, so that scratch stays in cache.
PIECE = 1 << 15


class FlatOptimizer(Protocol):
    """What updates flat arrays element by element."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that are kept per parameter; they start as zeros."""

    def settings(self) -> dict[str, Any]:
        """Return what all ranks must have alike, as JSON can say it."""

    def update(self, value: Array, gradient: Array, state: dict[str, Array], step: int) -> None:
        """Update ``value`` and ``state`` in place; ``step`` counts from 1.

        All are one-dimensional, dense, of one dtype (float32 or float64) and one length,
        0 included, and lie in one place: NumPy's arrays, or CuPy's where the parameters are
        CuPy's, to be updated on the current stream and without waiting for it. It is called
        once for each group of parameters. ``gradient`` may be used as scratch.
        """


def _pieces(value: Array) -> Iterator[slice]:
    """Yield what is updated at a time: on a device all, since each call there is a launch."""
    piece = PIECE if on_host(value) else max(1, value.size)
    return (slice(low, low + piece) for low in range(0, value.size, piece))


def _check(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    fits = isfinite(value) and value < high and (value > low if open_low else value >= low)
    if not fits:
        raise ValueError(
            f"{name} is {value}, expected {'more than' if open_low else 'at least'} {low:g}"
            + (f" and below {high:g}" if isfinite(high) else "")
        )


@dataclass(slots=True)
class SGD:
    """Stochastic gradient descent, with momentum and weight decay.

    ``velocity = momentum * velocity + g`` with ``g = gradient + weight_decay * value``, then
    ``value -= lr * velocity``, or of ``g + momentum * velocity`` with ``nesterov``. ``lr``
    may be set between steps, on all ranks alike. Raises ValueError for what is out of range.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0, np.inf)
        _check("momentum", self.momentum, 0, np.inf)
        _check("weight_decay", self.weight_decay, 0, np.inf)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def settings(self) -> dict[str, Any]:
        return {"kind": "SGD", **asdict(self)}

    def update(self, value: Array, gradient: Array, state: dict[str, Array], step: int) -> None:
        # Python's floats: a NumPy scalar would set the precision of the arithmetic.
        lr, momentum, decay = map(float, (self.lr, self.momentum, self.weight_decay))
        for piece in _pieces(value):
            x, g = value[piece], gradient[piece]
            if decay:
                g += decay * x
            if momentum:
                velocity = state["velocity"][piece]
                velocity *= momentum
                velocity += g
                g = g + momentum * velocity if self.nesterov else velocity
            x -= lr * g


@dataclass(slots=True)
class Adam:
    """Adam (Kingma and Ba, 2015), and AdamW (Loshchilov and Hutter, 2019).

    ``weight_decay`` is taken off the value apart from the gradient, as in AdamW, or added to
    the gradient when ``decoupled`` is False. ``lr`` may be set between steps, on all ranks
    alike. Raises ValueError for what is out of range.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0, np.inf)
        _check("beta1", self.beta1, 0, 1)
        _check("beta2", self.beta2, 0, 1)
        # What float32 holds, or an element that never had a gradient becomes 0 / 0.
        _check("eps", self.eps, float(np.finfo(np.float32).tiny), np.inf)
        _check("weight_decay", self.weight_decay, 0, np.inf)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def settings(self) -> dict[str, Any]:
        return {"kind": "Adam", **asdict(self)}

    def update(self, value: Array, gradient: Array, state: dict[str, Array], step: int) -> None:
        # Python's floats: a NumPy scalar would set the precision of the arithmetic.
        lr, beta1, beta2, eps = map(float, (self.lr, self.beta1, self.beta2, self.eps))
        decay = float(self.weight_decay)
        rate = lr / (1 - beta1**step)
        root = 1 / (1 - beta2**step) ** 0.5
        xp = library(value)
        for piece in _pieces(value):
            x, g = value[piece], gradient[piece]
            mean, square = state["mean"][piece], state["square"][piece]
            if decay and self.decoupled:
                x -= lr * decay * x
            elif decay:
                g += decay * x
            mean *= beta1
            mean += (1 - beta1) * g
            square *= beta2
            xp.square(g, out=g)
            g *= 1 - beta2
            square += g
            xp.sqrt(square, out=g)
            g *= root
            g += eps
            xp.divide(mean, g, out=g)
            g *= rate
            x -= g
