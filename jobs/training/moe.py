"""A mixture of experts: shared layers on every rank, experts spread over the ranks.

    h = relu(x W + b)                       shared
    p = softmax(h R), two largest chosen    shared (the router)
    m = h + sum of w[k] expert[k](h)        w: the two chances, divided by their sum
    logits = m V + c                        shared

An expert is relu(h A + a) B + d. The loss is the mean cross-entropy of the batch plus the
load-balancing loss of Switch Transformer. Gradients of the shared layers are summed over ranks;
an expert has the tokens of all ranks, so its gradients are whole where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpicoll
from mpicoll.parallel import Combined, Dispatched, ExpertDispatch, FlatOptimizer
from training import checkpoint
from training.clock import Clock
from training.console import on_root
from training.data import Data, share
from training.network import Layers, log_loss, one_hot, softmax
from training.stores import Replicated, Whole, load_arrays
from training.tasks import summed

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WIDTH = 64
EXPERT_WIDTH = 32
EXPERTS = 8
CHOICES = 2
BALANCE = 0.01


def weights(rng: np.random.Generator, fan_in: int, fan_out: int, dtype: str) -> Array:
    """Return first weights."""
    drawn: Array = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out)).astype(dtype)
    return drawn


def initial_shared(seed: int, inputs: int, classes: int, dtype: str) -> Layers:
    """Return the first parameters of the shared layers."""
    rng = np.random.default_rng([seed, 0])
    return {
        "input": {"weight": weights(rng, inputs, WIDTH, dtype), "bias": np.zeros(WIDTH, dtype)},
        "router": {"weight": weights(rng, WIDTH, EXPERTS, dtype)},
        "head": {
            "weight": weights(rng, WIDTH, classes, dtype),
            "bias": np.zeros(classes, dtype),
        },
    }


def initial_expert(seed: int, expert: int, dtype: str) -> dict[str, Array]:
    """Return the first parameters of an expert, wherever it is."""
    rng = np.random.default_rng([seed, 1, expert])
    return {
        "weight1": weights(rng, WIDTH, EXPERT_WIDTH, dtype),
        "bias1": np.zeros(EXPERT_WIDTH, dtype),
        "weight2": weights(rng, EXPERT_WIDTH, WIDTH, dtype),
        "bias2": np.zeros(WIDTH, dtype),
    }


class MixtureStore(Replicated):
    """The shared layers of every rank and the experts of this one."""

    def __init__(
        self,
        layers: Layers,
        optimizer: FlatOptimizer,
        comm: mpicoll.Comm,
        clock: Clock,
        dispatch: ExpertDispatch,
        seed: int,
        dtype: str,
    ) -> None:
        super().__init__(layers, optimizer, comm, clock)
        self._mine = dispatch.mine
        self.experts = {n: initial_expert(seed, n, dtype) for n in dispatch.mine}
        self._own = Whole(
            {f"expert{n}.{name}": a for n, one in self.experts.items() for name, a in one.items()},
            optimizer,
        )
        self.expert_gradients: dict[str, Array] = {}

    def step(self) -> None:
        super().step()
        self._own.update(self.expert_gradients)

    def whole(self) -> dict[str, Array]:
        params = super().whole()
        for part in self.comm.allgather(dict(self._own.params)):
            params |= part
        return params

    def save(self, path: Path, config: checkpoint.Config, step: int) -> None:
        arrays = self.trained.arrays()
        for part in self.comm.gather(self._own.arrays(), root=0) or ():
            arrays |= part
        on_root(self.comm, lambda: checkpoint.write(path, config, step, arrays))

    def load(self, path: Path, config: checkpoint.Config) -> int:
        step, arrays = load_arrays(self.comm, path, config, self.trained.arrays())
        if step:
            for name, array in self._own.arrays().items():
                array[...] = arrays[name]
        return step


class Values(NamedTuple):
    """What forward has computed and backward needs; names as in the formulas."""

    h: Array
    p: Array
    chosen: Array
    w: Array
    total: Array
    sent: Dispatched
    inner: dict[int, Array]
    combined: Combined
    m: Array
    logits: Array


class Mixture:
    """Labels by a mixture of experts: moe."""

    def __init__(
        self,
        data: Data,
        optimizer: FlatOptimizer,
        comm: mpicoll.Comm,
        clock: Clock,
        seed: int,
        dtype: str,
    ) -> None:
        self._data, self._comm, self._clock = data, comm, clock
        self.dispatch = ExpertDispatch(EXPERTS, comm)
        layers = initial_shared(seed, data.x.shape[1], data.classes, dtype)
        self.store = MixtureStore(layers, optimizer, comm, clock, self.dispatch, seed, dtype)
        self._layers = layers

    def learn(self, rows: Array, batch: int, epoch: int) -> float:
        loss = self.backward(self._data.x[rows], self._data.y[rows], batch)
        self.store.step()
        return loss

    def accuracy(self) -> float:
        rows = share(self._comm, np.arange(len(self._data.y_test)))
        logits = self._forward(self._data.x_test[rows]).logits
        right = int((logits.argmax(axis=1) == self._data.y_test[rows]).sum())
        return summed(self._comm, right) / len(self._data.y_test)

    # -- the network ------------------------------------------------------------------

    def _forward(self, x: Array) -> Values:
        """Return every value that backward needs."""
        layers = self._layers
        h = np.maximum(x @ layers["input"]["weight"] + layers["input"]["bias"], 0)
        p = softmax(h @ layers["router"]["weight"])
        chosen = np.argsort(-p, axis=1, kind="stable")[:, :CHOICES]
        top = np.take_along_axis(p, chosen, axis=1)
        total = top.sum(axis=1, keepdims=True)
        with self._clock.communication(under_way=False):
            sent = self.dispatch.dispatch(h, chosen, top / total)
        inner: dict[int, Array] = {}
        outputs = np.empty((len(sent.tokens), WIDTH), h.dtype)
        for expert, part in sent:
            one = self.store.experts[expert]
            inner[expert] = np.maximum(sent.tokens[part] @ one["weight1"] + one["bias1"], 0)
            outputs[part] = inner[expert] @ one["weight2"] + one["bias2"]
        with self._clock.communication(under_way=False):
            combined = sent.combine(outputs)
        m = h + combined.tokens
        logits = m @ layers["head"]["weight"] + layers["head"]["bias"]
        return Values(h, p, chosen, top / total, total, sent, inner, combined, m, logits)

    def backward(self, x: Array, y: Array, batch: int) -> float:
        """Hand over all gradients of this rank's share; return its summed cross-entropy."""
        v = self._forward(x)
        layers, store = self._layers, self.store
        chances = softmax(v.logits)
        delta = (chances - one_hot(y, chances.shape[1], chances.dtype)) / batch
        store.ready("head", {"weight": v.m.T @ delta, "bias": delta.sum(axis=0)})
        by_m = delta @ layers["head"]["weight"].T
        with self._clock.communication(under_way=True):
            by_output, by_w = v.combined.backward(by_m)
        by_tokens = self._experts_backward(v, by_output)
        with self._clock.communication(under_way=True):
            by_h = by_m + v.sent.backward(by_tokens)
            balance = self.dispatch.balance_loss(v.p, v.chosen, BALANCE)
        by_p = balance.gradient
        by_top = (by_w - (by_w * v.w).sum(axis=1, keepdims=True)) / v.total
        for choice in range(CHOICES):
            by_p[np.arange(len(x)), v.chosen[:, choice]] += by_top[:, choice]
        by_score = v.p * (by_p - (by_p * v.p).sum(axis=1, keepdims=True))
        store.ready("router", {"weight": v.h.T @ by_score})
        by_h = (by_h + by_score @ layers["router"]["weight"].T) * np.heaviside(v.h, 0)
        store.ready("input", {"weight": x.T @ by_h, "bias": by_h.sum(axis=0)})
        return log_loss(chances, y)

    def _experts_backward(self, v: Values, by_output: Array) -> Array:
        """Keep the gradients of this rank's experts; return that of their tokens."""
        sent = v.sent
        by_tokens = np.empty_like(sent.tokens)
        for expert, part in sent:
            one, inner, delta = self.store.experts[expert], v.inner[expert], by_output[part]
            by_inner = delta @ one["weight2"].T * np.heaviside(inner, 0)
            by_tokens[part] = by_inner @ one["weight1"].T
            self.store.expert_gradients |= {
                f"expert{expert}.weight1": sent.tokens[part].T @ by_inner,
                f"expert{expert}.bias1": by_inner.sum(axis=0),
                f"expert{expert}.weight2": inner.T @ delta,
                f"expert{expert}.bias2": delta.sum(axis=0),
            }
        return by_tokens
