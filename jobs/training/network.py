"""A multilayer perceptron, one layer at a time: no parameters of its own, and no communication.

Where a layer's parameters are, and what becomes of their gradients, is the store's business. The
arithmetic is plain NumPy ufuncs, so that it runs on `bounds.Bounded` numbers too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Layers: TypeAlias = "dict[str, dict[str, Array]]"


class Store(Protocol):
    """Gives the parameters of a layer, and takes their gradients."""

    def layer(self, name: str) -> AbstractContextManager[Mapping[str, Array]]:
        """Give the parameters of a layer by name, until the block ends."""

    def ready(self, layer: str, gradients: Mapping[str, Array]) -> None:
        """Take this rank's part of the gradients of a layer."""


class Perceptron:
    """Dense layers of the given widths, with a ReLU between them."""

    def __init__(self, widths: list[int]) -> None:
        self.widths = widths
        self.layers = [f"layer{number}" for number in range(len(widths) - 1)]

    def initial(self, seed: int, dtype: str) -> Layers:
        """Return first parameters, the same for the same seed."""
        rng = np.random.default_rng(seed)
        layers: Layers = {}
        for name, (fan_in, fan_out) in zip(
            self.layers, itertools.pairwise(self.widths), strict=True
        ):
            weight = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out)).astype(dtype)
            layers[name] = {"weight": weight, "bias": np.zeros(fan_out, dtype)}
        return layers

    def forward(self, store: Store, x: Array) -> list[Array]:
        """Return the input of every layer, and last the output of the last."""
        values = [x]
        for name in self.layers:
            with store.layer(name) as arrays:
                output = values[-1] @ arrays["weight"] + arrays["bias"]
            values.append(output if name == self.layers[-1] else np.maximum(output, 0))
        return values

    def backward(self, store: Store, values: list[Array], delta: Array) -> None:
        """Hand over all gradients, from that of the output; the last layer's first."""
        for number in range(len(self.layers) - 1, -1, -1):
            name = self.layers[number]
            with store.layer(name) as arrays:
                gradients = {"weight": values[number].T @ delta, "bias": delta.sum(axis=0)}
                # Before the layer below is computed: the message travels meanwhile.
                store.ready(name, gradients)
                if number:
                    delta = delta @ arrays["weight"].T * np.heaviside(values[number], 0)


def softmax(logits: Array) -> Array:
    """Return the chances of every row's classes."""
    chances: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = chances / chances.sum(axis=1, keepdims=True)
    return chances


def one_hot(y: Array, classes: int, dtype: Any) -> Array:
    """Return a row per label: one in its place, else zeros."""
    rows: Array = np.eye(classes, dtype=dtype)[y]
    return rows


def log_loss(chances: Array, y: Array) -> float:
    """Return the summed loss of rows with these chances."""
    return float(-np.log(chances[np.arange(len(y)), y] + 1e-12).sum())


def classify(net: Perceptron, store: Store, x: Array, y: Array, scale: float) -> Array:
    """Hand over the gradients of ``scale`` times the summed loss; return the chances."""
    values = net.forward(store, x)
    chances = softmax(values[-1])
    hot = one_hot(y, net.widths[-1], values[-1].dtype)
    net.backward(store, values, (chances - hot) * scale)
    return chances
