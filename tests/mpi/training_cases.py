"""References for the gradients of jobs/train.py: dense, of one process, written once more.

They run on `Bounded` numbers, so each brings the bound of every evaluation with it, and their
losses on long doubles, whose difference quotients are independent of any backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jobs_path
import numpy as np
from training import moe
from training.bounds import Bounded
from training.contrastive import TEMPERATURE
from training.data import Data
from training.network import Perceptron, one_hot, softmax
from training.verify import MEAN_ROUNDINGS, Recorder, gradients_of

assert jobs_path.JOBS.is_dir()

Array = np.ndarray[Any, np.dtype[Any]]

WIDTHS = [7, 6, 5, 4]
SAMPLES = 40


def make_data(dtype: str) -> Data:
    """Return samples that all ranks make alike."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((SAMPLES, WIDTHS[0])).astype(dtype)
    y = np.arange(SAMPLES) % WIDTHS[-1]
    return Data(x, y, x[:9], y[:9], "test")


def flat(layers: dict[str, dict[str, Array]]) -> dict[str, Array]:
    """Return copies of the arrays of layers, as "layer.name"."""
    return {f"{at}.{name}": a.copy() for at, one in layers.items() for name, a in one.items()}


class Keep:
    """An optimizer that puts the gradient in the place of the parameter, where a test sees it."""

    slots: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        return {"kind": "Keep"}

    def update(self, value: Array, gradient: Array, state: dict[str, Array], step: int) -> None:
        value[...] = gradient


def held_to_bound(actual: dict[str, Array], expected: dict[str, Bounded]) -> None:
    """Hold gradients to those of one process; two evaluations differ by twice the bound."""
    assert actual.keys() == expected.keys()
    for name, bound in expected.items():
        apart = np.abs(actual[name].reshape(bound.value.shape) - bound.value)
        assert np.isfinite(bound.error).all(), name
        worst = (apart - 2 * bound.error).max(initial=-np.inf)
        assert (apart <= 2 * bound.error).all(), (name, worst, apart.max(), bound.error.max())


# -- one process, densely ---------------------------------------------------------------


def classified(net: Perceptron, params: dict[str, Array], x: Array, y: Array) -> Any:
    """Return the gradients of the mean cross-entropy."""
    return gradients_of(net, params, x, y)[1]


def normalised(z: Any) -> tuple[Any, Any]:
    length = np.sqrt((z * z).sum(axis=1, keepdims=True)) + 1e-6
    return z / length, length


def contrasted(net: Perceptron, params: dict[str, Array], first: Array, second: Array) -> Any:
    """Return the gradients of InfoNCE both ways, by the whole matrix of scores."""
    count = len(first)
    hot = np.eye(count)
    found = []
    passes = []
    for x in (first, second):
        store = Recorder({name: Bounded.exact(one) for name, one in params.items()})
        values: Any = net.forward(store, Bounded.exact(x))  # type: ignore[arg-type]
        passes.append((store, values, *normalised(values[-1])))
    z, other = passes[0][2], passes[1][2]
    scores = z @ other.T / TEMPERATURE
    by_score = softmax(scores) - hot + (softmax(scores.T) - hot).T
    by_score = by_score / (2 * count * TEMPERATURE)
    for (store, values, own, length), by_z in zip(
        passes, (by_score @ other, by_score.T @ z), strict=True
    ):
        by_output = (by_z - own * (by_z * own).sum(axis=1, keepdims=True)) / length
        net.backward(store, values, by_output)
        found.append(store.gradients)
    # Rows of both views may be summed in one order or another: one addition more, 2 n terms.
    return {name: (found[0][name] + found[1][name]).rounded(count) for name in found[0]}


def mixed(params: dict[str, Array], x: Array, y: Array) -> Any:
    """Return the gradients of the mixture of experts: every expert sees every sample."""
    at: Any = {name: Bounded.exact(one) for name, one in params.items()}
    n, experts = len(x), range(moe.EXPERTS)
    h = np.maximum(Bounded.exact(x) @ at["input.weight"] + at["input.bias"], 0)
    p = softmax(h @ at["router.weight"])
    hot = chosen_of(p)
    total = (p * hot).sum(axis=1, keepdims=True)
    w = p * hot / total
    inner, outputs = [], []
    for e in experts:
        one = f"expert{e}"
        inner.append(np.maximum(h @ at[f"{one}.weight1"] + at[f"{one}.bias1"], 0))
        outputs.append(inner[e] @ at[f"{one}.weight2"] + at[f"{one}.bias2"])
    m = h
    for e in experts:
        m = m + outputs[e] * w[:, e : e + 1]
    chances = softmax(m @ at["head.weight"] + at["head.bias"])
    delta = (chances - one_hot(y, chances.value.shape[1], float)) / n
    grads = {"head.weight": m.T @ delta, "head.bias": delta.sum(axis=0)}
    by_m = delta @ at["head.weight"].T
    by_h = by_m
    by_w: Any = np.zeros((n, moe.EXPERTS))
    for e in experts:
        one = f"expert{e}"
        by_out = by_m * w[:, e : e + 1]
        by_w = (by_m * outputs[e]).sum(axis=1, keepdims=True) * np.eye(moe.EXPERTS)[e] + by_w
        by_inner = by_out @ at[f"{one}.weight2"].T * np.heaviside(inner[e], 0)
        grads |= {f"{one}.weight1": h.T @ by_inner, f"{one}.bias1": by_inner.sum(axis=0)}
        grads |= {f"{one}.weight2": inner[e].T @ by_out, f"{one}.bias2": by_out.sum(axis=0)}
        by_h = by_h + by_inner @ at[f"{one}.weight1"].T
    by_top = (by_w - (by_w * w).sum(axis=1, keepdims=True)) / total
    slope = moe.BALANCE * moe.EXPERTS * hot.mean(axis=0) / moe.CHOICES / n
    by_p = by_top * hot + Bounded(slope, 0.0, p.form).rounded(4)
    by_score = p * (by_p - (by_p * p).sum(axis=1, keepdims=True))
    grads["router.weight"] = h.T @ by_score
    by_h = (by_h + by_score @ at["router.weight"].T) * np.heaviside(h, 0)
    grads |= {"input.weight": Bounded.exact(x).T @ by_h, "input.bias": by_h.sum(axis=0)}
    return {name: grads[name].rounded(MEAN_ROUNDINGS) for name in grads}


def chosen_of(p: Bounded) -> Array:
    """Return 1 for the two largest of each row; no evaluation may choose otherwise."""
    order = np.argsort(-p.value, axis=1)
    rows = np.arange(len(p.value))
    for near in range(moe.CHOICES):
        a, b = order[:, near], order[:, near + 1]
        gap = p.value[rows, a] - p.value[rows, b]
        assert (gap > 2 * (p.error[rows, a] + p.error[rows, b])).all(), "take another seed"
    hot = np.zeros(p.value.shape)
    hot[rows[:, None], order[:, : moe.CHOICES]] = 1
    return hot


# -- losses in long double --------------------------------------------------------------


def wide(params: dict[str, Array]) -> dict[str, Array]:
    return {name: one.astype(np.longdouble) for name, one in params.items()}


def mean_log_loss(logits: Array, y: Array) -> Any:
    top = logits.max(axis=1, keepdims=True)
    sums = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return (sums - logits[np.arange(len(y)), y]).mean()


def logits_of(net: Perceptron, params: dict[str, Array], x: Array) -> Array:
    return net.forward(Recorder(params), x.astype(np.longdouble))[-1]


def classified_loss(net: Perceptron, x: Array, y: Array) -> Callable[[dict[str, Array]], Any]:
    return lambda params: mean_log_loss(logits_of(net, params, x), y)


def contrasted_loss(
    net: Perceptron, first: Array, second: Array
) -> Callable[[dict[str, Array]], Any]:
    def loss(params: dict[str, Array]) -> Any:
        z, other = (normalised(logits_of(net, params, x))[0] for x in (first, second))
        scores, places = z @ other.T / TEMPERATURE, np.arange(len(first))
        return (mean_log_loss(scores, places) + mean_log_loss(scores.T, places)) / 2

    return loss


def mixed_loss(x: Array, y: Array) -> Callable[[dict[str, Array]], Any]:
    """Sample by sample; the shares of the balance loss are constants, as routing is."""

    def loss(params: dict[str, Array]) -> Any:
        rows, chances, counts = [], [], np.zeros(moe.EXPERTS)
        for sample in x.astype(np.longdouble):
            h = np.maximum(sample @ params["input.weight"] + params["input.bias"], 0)
            p = np.exp(h @ params["router.weight"])
            p /= p.sum()
            top = np.argsort(-p)[: moe.CHOICES]
            counts[top] += 1
            m = h.copy()
            for e in top:
                one = f"expert{e}"
                inner = np.maximum(h @ params[f"{one}.weight1"] + params[f"{one}.bias1"], 0)
                out = inner @ params[f"{one}.weight2"] + params[f"{one}.bias2"]
                m += p[e] / p[top].sum() * out
            rows.append(m @ params["head.weight"] + params["head.bias"])
            chances.append(p)
        shares = counts / counts.sum()
        balance = moe.BALANCE * moe.EXPERTS * (shares * np.mean(chances, axis=0)).sum()
        return mean_log_loss(np.array(rows), y) + balance

    return loss


def held_to_slope(
    loss: Callable[[dict[str, Array]], Any],
    params: dict[str, Array],
    gradients: dict[str, Bounded],
    rng: np.random.Generator,
) -> None:
    """Hold gradients to the central difference of a loss along a random direction.

    The error of a central difference is c h^2 + O(h^4), so that of step h is a third of what
    steps h and 2 h differ by; all of it is granted. Rounding in long double, 2^-63 / h, is below.
    """
    direction = {name: rng.standard_normal(one.shape) for name, one in params.items()}
    start = wide(params)

    def along(h: float) -> Any:
        there = {name: one + h * direction[name] for name, one in start.items()}
        back = {name: one - h * direction[name] for name, one in start.items()}
        return (loss(there) - loss(back)) / (2 * h)

    slope, coarser = along(2.0**-20), along(2.0**-19)
    found = sum((one.value * direction[name]).sum() for name, one in gradients.items())
    bound = sum((one.error * np.abs(direction[name])).sum() for name, one in gradients.items())
    assert abs(found - slope) <= abs(slope - coarser) + bound, (found, slope, coarser, bound)
