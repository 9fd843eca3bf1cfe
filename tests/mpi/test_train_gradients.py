"""jobs/train.py: gradients of every strategy equal those of one process within a derived bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jobs_path
import numpy as np
import pytest
from training.bounds import Bounded, Format
from training.clock import Clock, Split
from training.contrastive import Contrast, views
from training.data import share
from training.moe import Mixture
from training.network import Perceptron
from training.stores import make_store
from training.tasks import Classify
from training.verify import Single
from training_cases import (
    WIDTHS,
    Keep,
    classified,
    classified_loss,
    contrasted,
    contrasted_loss,
    flat,
    held_to_bound,
    held_to_slope,
    make_data,
    mixed,
    mixed_loss,
)

from mpicoll import Comm
from mpicoll.parallel import SGD

assert jobs_path.JOBS.is_dir()
DTYPES = ["float32", "float64"]
#: Of the whole batch: even or not, fewer samples than ranks, a single one.
BATCHES = [1, 2, 13, 24]
ROWS = np.random.default_rng(3).permutation(40)

Array = np.ndarray[Any, np.dtype[Any]]


@contextmanager
def freed(task: Any) -> Iterator[Any]:
    """Free the communicators of a task."""
    yield task
    task.store.free()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_classify(strategy: str, dtype: str, batch: int, world: Comm) -> None:
    data, net = make_data(dtype), Perceptron(WIDTHS)
    layers = net.initial(5, dtype)
    params = flat(layers)
    rows = ROWS[:batch]
    with freed(
        Classify(net, make_store(strategy, layers, Keep(), world, Clock()), data, world)
    ) as task:
        task.learn(share(world, rows), batch, 0)
        held_to_bound(task.store.whole(), classified(net, params, data.x[rows], data.y[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_contrastive(dtype: str, batch: int, world: Comm) -> None:
    data, net = make_data(dtype), Perceptron(WIDTHS)
    layers = net.initial(5, dtype)
    params = flat(layers)
    rows = ROWS[:batch]
    with freed(
        Contrast(net, make_store("ddp", layers, Keep(), world, Clock()), data, world, Clock(), 9)
    ) as task:
        task.learn(share(world, rows), batch, 2)
        pairs = views(data.x[rows], rows, 9, 2)
        held_to_bound(task.store.whole(), contrasted(net, params, *pairs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_moe(dtype: str, batch: int, world: Comm) -> None:
    data = make_data(dtype)
    rows = ROWS[:batch]
    with freed(Mixture(data, Keep(), world, Clock(), 5, dtype)) as task:
        params = {name: one.copy() for name, one in task.store.whole().items()}
        task.learn(share(world, rows), batch, 0)
        held_to_bound(task.store.whole(), mixed(params, data.x[rows], data.y[rows]))


def test_views_do_not_depend_on_the_share() -> None:
    x = np.random.default_rng(0).standard_normal((6, 3))
    rows = np.array([4, 9, 1, 0, 7, 2])
    whole = views(x, rows, 1, 2)
    part = views(x[2:5], rows[2:5], 1, 2)
    assert all((a[2:5] == b).all() for a, b in zip(whole, part, strict=True))
    assert (whole[0] != whole[1]).any()


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 63.0])
    monkeypatch.setattr("training.clock.time.perf_counter", lambda: next(times))
    clock = Clock()
    with clock.step():  # computes from 0 to 1
        with clock.communication(under_way=True):  # a call until 3
            pass
        # A call from 7 on, after computing meanwhile; within it computing from 15 to 31.
        with clock.communication(under_way=False), clock.computing():
            pass
    assert clock.split == Split(1 + 4 + 16, 2 + 8 + 32, 4 + 16)
    assert clock.split.whole == 63
    assert clock.split.since(Split(1, 2, 4)) == Split(20, 40, 16)
    assert clock.split.per_step(2).startswith("31500.00 ms = 10500.00 compute + 21000.00")


# -- the references themselves ------------------------------------------------------------


def test_references_are_the_slopes_of_their_losses(rng: np.random.Generator, world: Comm) -> None:
    data, net = make_data("float32"), Perceptron(WIDTHS)
    params = flat(net.initial(5, "float32"))
    x, y = data.x[ROWS[:13]], data.y[ROWS[:13]]
    held_to_slope(classified_loss(net, x, y), params, classified(net, params, x, y), rng)
    pairs = views(x, ROWS[:13], 9, 2)
    held_to_slope(contrasted_loss(net, *pairs), params, contrasted(net, params, *pairs), rng)
    with freed(Mixture(data, Keep(), world, Clock(), 5, "float32")) as task:
        params = {name: one.copy() for name, one in task.store.whole().items()}
    held_to_slope(mixed_loss(x, y), params, mixed(params, x, y), rng)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold_for_each_operation(dtype: str, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((9, 9)).astype(dtype) for _ in range(2))
    rules: dict[str, Any] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
        "@": lambda a, b: a @ b,
        "exp": lambda a, b: np.exp(a),
        "sqrt": lambda a, b: np.sqrt(a * a),
        "relu": lambda a, b: np.maximum(a @ b, 0),
        "sum": lambda a, b: a.sum(axis=1) * 0.1,
        "max": lambda a, b: (a @ b).max(axis=0),
        "chain": lambda a, b: np.exp(a @ b / 3 - 1).sum(axis=0) / (a * a + 0.7).sum(axis=1),
    }
    for name, rule in rules.items():
        exact = rule(a.astype(np.longdouble), b.astype(np.longdouble))
        bounded = rule(Bounded.exact(a), Bounded.exact(b))
        assert (np.abs(rule(a, b) - exact) <= bounded.error).all(), name
        # And no looser than some roundings of what it is made of.
        assert (bounded.error <= 1e3 * Format.of(dtype).unit * (1 + bounded.size**2)).all(), name


# -- --verify -----------------------------------------------------------------------------


def steps_of(single: Single, net: Perceptron, spoil: float, what: str) -> str | None:
    """Take steps in float32, spoil the last one by a factor, and return the complaint."""
    data = make_data("float32")
    params = flat(net.initial(5, "float32"))
    velocity = {name: np.zeros_like(one) for name, one in params.items()}
    problem = None
    for step in range(5):
        rows = ROWS[step * 5 : step * 5 + 8]
        before = {name: one.copy() for name, one in params.items()}
        # Row by row, as eight ranks would have it.
        gradients = {name: np.zeros_like(one) for name, one in params.items()}
        for row in rows:
            one_row = classified(net, before, data.x[[row]], data.y[[row]])
            for name, one in one_row.items():
                gradients[name] += (one.value / len(rows)).astype(np.float32)
        if step == 4 and what == "gradient":
            gradients["layer0.weight"][0] *= np.float32(spoil)
        for name, one in params.items():
            velocity[name] = velocity[name] * np.float32(0.9) + gradients[name]
            one -= np.float32(0.05) * velocity[name]
        if step == 4 and what == "parameter":
            params["layer1.bias"][0] *= np.float32(spoil)
        assert problem is None
        problem = single.step(rows, before, gradients if what == "gradient" else None, params)
    return problem


@pytest.mark.parametrize("what", ["gradient", "parameter"])
@pytest.mark.parametrize("spoil", [1.0, 1.01, np.nan])
def test_verify_sees_what_is_wrong(what: str, spoil: float) -> None:
    net = Perceptron(WIDTHS)
    single = Single(net, SGD(0.05, 0.9), make_data("float32"))
    problem = steps_of(single, net, spoil, what)
    if spoil == 1:
        assert problem is None
        assert single.table()["one process, steps compared"] == "5"
    else:
        assert problem is not None
        assert problem.startswith(f"step 5: the {what} 'layer")
