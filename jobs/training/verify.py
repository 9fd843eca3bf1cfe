"""--verify: one process takes the same steps, and the ranks match it within a derived bound.

Trajectories of two trainings that round differently part, slowly at first, and no useful bound
holds over many steps. So the single process starts every step from the parameters that the ranks
have, and takes it on the whole batch. Its momentum is its own from step to step: errors in it
shrink by the factor of momentum, so their bound stays a bound. Parameters after the step must
differ by no more than the bound, and so must gradients where the store shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mpicoll.parallel import SGD
from training.bounds import Bounded
from training.data import Data
from training.network import Perceptron, classify

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Params: TypeAlias = "Mapping[str, Any]"

#: The ranks may multiply by P / batch, then divide by P: two roundings more than 1 / batch.
MEAN_ROUNDINGS = 2


class Recorder:
    """A store of one process: given parameters, and the gradients that came back."""

    def __init__(self, params: Params) -> None:
        self._params = params
        self.gradients: dict[str, Any] = {}

    @contextmanager
    def layer(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Give the parameters of a layer."""
        cut = len(name) + 1
        yield {at[cut:]: a for at, a in self._params.items() if at.startswith(f"{name}.")}

    def ready(self, layer: str, gradients: Mapping[str, Any]) -> None:
        """Keep gradients."""
        self.gradients |= {f"{layer}.{name}": one for name, one in gradients.items()}


def gradients_of(
    net: Perceptron, params: Params, x: Array, y: Array
) -> tuple[dict[str, Array], dict[str, Bounded]]:
    """Return the gradients of a batch by one process, and the bounds of every evaluation."""
    plain, bounded = Recorder(params), Recorder({n: Bounded.exact(a) for n, a in params.items()})
    classify(net, plain, x, y, 1 / len(y))
    # The same code, on numbers that carry the bound of their error.
    classify(net, bounded, Bounded.exact(x), y, 1 / len(y))  # type: ignore[arg-type]
    bounds = {name: one.rounded(MEAN_ROUNDINGS) for name, one in bounded.gradients.items()}
    return plain.gradients, bounds


@dataclass(slots=True)
class Worst:
    """The largest difference found, and the largest share of its bound."""

    difference: float = 0.0
    share: float = 0.0
    of: str = "nothing"

    def see(self, what: str, actual: Array, expected: Array, bound: Bounded) -> None:
        """Compare two evaluations: they differ by twice the bound at most."""
        difference = np.abs(actual.astype(np.float64) - expected)
        limit = 2 * bound.error
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(difference == 0, 0.0, difference / limit)
        # What is not a number must not pass for a small one.
        share = float(np.where(np.isnan(shares), np.inf, shares).max(initial=0.0))
        largest = float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))
        self.difference = max(self.difference, largest)
        if share > self.share:
            self.share, self.of = share, what


class Single:
    """The one process that takes the same steps."""

    def __init__(self, net: Perceptron, optimizer: SGD, data: Data) -> None:
        self._net, self._optimizer, self._data = net, optimizer, data
        self._velocity: dict[str, Array] = {}
        self._bounds: dict[str, Bounded] = {}
        self.steps = 0
        self.gradients, self.parameters = Worst(), Worst()

    def step(
        self, rows: Array, before: Params, gradients: Params | None, after: Params
    ) -> str | None:
        """Take a step from ``before``; return what of the ranks' result is out of bounds."""
        plain, bounds = gradients_of(self._net, before, self._data.x[rows], self._data.y[rows])
        self.steps += 1
        for name, param in before.items():
            if gradients is not None:
                self.gradients.see(name, gradients[name], plain[name], bounds[name])
            own = np.array(param)
            if name not in self._velocity:
                self._velocity[name] = np.zeros_like(own)
                self._bounds[name] = Bounded.exact(self._velocity[name])
            bound = self._bounds[name] = (
                self._bounds[name] * self._optimizer.momentum + bounds[name]
            )
            state = {"velocity": self._velocity[name].reshape(-1)}
            self._optimizer.update(
                own.reshape(-1), plain[name].reshape(-1).copy(), state, self.steps
            )
            limit = Bounded.exact(param) - bound * self._optimizer.lr
            self.parameters.see(name, after[name], own, limit)
        for kind, worst in (("gradient", self.gradients), ("parameter", self.parameters)):
            if worst.share > 1:
                return (
                    f"step {self.steps}: the {kind} {worst.of!r} differs from that of one "
                    f"process by {worst.share:.3g} times the bound of rounding"
                )
        return None

    def table(self) -> dict[str, str]:
        """Return what the final table says."""
        rows = {}
        for kind, worst in (("gradients", self.gradients), ("parameters", self.parameters)):
            if worst.of != "nothing" or worst.share:
                rows[f"one process, {kind}"] = (
                    f"within {worst.difference:.1e}, {worst.share:.1%} of the bound at most"
                )
        return {"one process, steps compared": str(self.steps), **rows}
