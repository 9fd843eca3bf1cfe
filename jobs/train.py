"""Train a small network on handwritten digits over all ranks, by one of six strategies.

    mpiexec -n 8 python jobs/train.py [--strategy ddp|zero1|zero2|zero3|moe|contrastive] [options]

Every rank takes its share of each batch. At the end all ranks must hold the same parameters, bit
by bit.

ddp: whole parameters on every rank, gradients summed in buckets while backward goes on. zero1:
momentum in shards; zero2: gradients too; zero3: parameters too, each layer gathered before it is
used, the next one ahead. moe: a mixture of 8 experts, spread over the ranks, two per sample.
contrastive: an embedding by InfoNCE over the samples of all ranks, then a linear probe.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.parallel import SGD, EpochSampler, average_metrics, broadcast_object

# Under PYTHONSAFEPATH Python does not look beside the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from training.clock import Clock, Split
from training.console import Progress, leave, say
from training.contrastive import Contrast
from training.data import Data, load_data
from training.moe import Mixture
from training.network import Perceptron
from training.stores import Replicated, Sharded, Sliced, TrainedStore
from training.tasks import Classify, Task
from training.verify import Single

HIDDEN = (128, 64)
EMBEDDING = 32
MOMENTUM = 0.9
CHECK_EVERY = 10  # steps between looks at the loss of all ranks

#: The test accuracy that each strategy reaches on the digits with the options of its default.
ACCURACY = {
    "ddp": 0.96,
    "zero1": 0.96,
    "zero2": 0.96,
    "zero3": 0.96,
    "moe": 0.96,
    "contrastive": 0.90,
}
VERIFIED = ("ddp", "zero1", "zero2", "zero3")


class Run(NamedTuple):
    """What a training needs."""

    comm: mpicoll.Comm
    task: Task
    data: Data
    opts: argparse.Namespace
    clock: Clock
    single: Single | None


def make_task(
    comm: mpicoll.Comm, data: Data, opts: argparse.Namespace, clock: Clock
) -> tuple[Task, list[int]]:
    """Return what the strategy trains, and the widths of its layers."""
    optimizer = SGD(opts.lr, MOMENTUM)
    if opts.strategy == "moe":
        return Mixture(data, optimizer, comm, clock, opts.seed, opts.dtype), []
    outputs = EMBEDDING if opts.strategy == "contrastive" else data.classes
    net = Perceptron([data.x.shape[1], *HIDDEN, outputs])
    layers = net.initial(opts.seed, opts.dtype)
    store: TrainedStore
    if opts.strategy == "zero3":
        store = Sliced(layers, optimizer, comm, clock)
    elif opts.strategy in ("zero1", "zero2"):
        store = Sharded(layers, optimizer, comm, clock, 1 if opts.strategy == "zero1" else 2)
    else:
        store = Replicated(layers, optimizer, comm, clock)
    if opts.strategy == "contrastive":
        return Contrast(net, store, data, comm, clock, opts.seed), net.widths
    return Classify(net, store, data, comm), net.widths


def batches(run: Run, step: int) -> Iterator[tuple[int, Any, int]]:
    """Yield the epoch, this rank's rows and the size of each batch, from a step on, for ever."""
    count, batch = len(run.data.y), run.opts.batch
    sampler = EpochSampler(count, run.comm, seed=run.opts.seed)
    per_epoch = -(-count // batch)
    for epoch in itertools.count(step // per_epoch):
        done = step - epoch * per_epoch if epoch == step // per_epoch else 0
        for at, rows in enumerate(sampler.batches(epoch, batch)):
            if at >= done:
                yield epoch, rows, min(batch, count - at * batch)


def train(run: Run, step: int, save: Callable[[int], None]) -> dict[str, str]:
    """Train from a step on; return what the final table says about speed."""
    comm, opts, clock = run.comm, run.opts, run.clock
    total = min(opts.epochs * -(-len(run.data.y) // opts.batch), opts.steps or sys.maxsize)
    progress = Progress(comm.rank == 0, step, total)
    first, samples, seen, loss = step, 0, [0.0, 0], float("nan")
    shown, before = step, Split()
    for epoch, rows, batch in itertools.islice(batches(run, step), max(0, total - step)):
        verify = contextlib.nullcontext() if run.single is None else verified(run, rows)
        with verify, clock.step():
            seen[0] += run.task.learn(rows, batch, epoch)
        seen[1] += len(rows)
        samples += batch
        step += 1
        if step % CHECK_EVERY == 0 or step == total:
            loss = mean_loss(comm, seen, step)
            seen = [0.0, 0]

        def text() -> str:
            nonlocal shown, before
            times = clock.split.since(before).per_step(step - shown)
            shown, before = step, clock.split.since(Split())
            return f"epoch {epoch + 1}, loss {loss:.4f}, {times}"

        progress.show(step, text)
        if opts.checkpoint and (step % opts.checkpoint_every == 0 or step == total):
            save(step)
    progress.close()
    return speed(comm, clock.split, samples, step - first)


def mean_loss(comm: mpicoll.Comm, seen: list[Any], step: int) -> float:
    """Return the mean loss of all ranks' samples on rank 0; all leave if it is not finite."""
    share = seen[0] / max(1, seen[1])
    means = average_metrics({"loss": share}, seen[1], comm)
    loss = means["loss"] if means else 0.0
    if broadcast_object(not np.isfinite(loss), comm):
        leave(comm, f"the loss is not finite any more by step {step}: try a lower --lr")
    return loss


@contextlib.contextmanager
def verified(run: Run, rows: Any) -> Iterator[None]:
    """Compare the step of this block with that of one process, on rank 0."""
    comm, store = run.comm, run.task.store
    parts = comm.gather(rows, root=0)
    before = {name: array.copy() for name, array in store.whole().items()}
    if isinstance(store, Replicated):
        # The optimizer overwrites gradients, so they are taken when they arrive.
        taken = store.take_gradients()
    else:
        taken = None
    yield
    after = store.whole()
    problem = None
    if run.single is not None and parts is not None:
        problem = run.single.step(np.concatenate(parts), before, taken, after)
    problem = broadcast_object(problem, comm)
    if problem is not None:
        leave(comm, f"--verify: {problem}")


def speed(comm: mpicoll.Comm, split: Split, samples: int, steps: int) -> dict[str, str]:
    """Return the rows about time, means over ranks, on rank 0."""
    each = 1e3 / max(1, steps)
    whole = max(split.whole, 1e-9)
    means = average_metrics(
        {
            "rate": samples / whole,
            "part": split.communication / whole,
            "whole": split.whole * each,
            "compute": split.compute * each,
            "communication": split.communication * each,
            "overlap": split.overlap * each,
        },
        comm=comm,
    )
    if means is None:
        return {}
    return {
        "samples per second": f"{means['rate']:.0f}",
        "time in communication": f"{means['part']:.0%}",
        "time per step": f"{means['whole']:.2f} ms",
        "  compute": f"{means['compute']:.2f} ms",
        "  communication": f"{means['communication']:.2f} ms",
        "  overlap": f"{means['overlap']:.2f} ms of compute with messages under way",
    }


def digest(params: dict[str, Any]) -> bytes:
    """Return a hash of every bit of the parameters."""
    return hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).digest()


def identical(comm: mpicoll.Comm, own: bytes) -> bool:
    """Return whether the digests of all ranks are the same, the same answer on each."""
    digests = np.empty((comm.size, len(own)), np.uint8)
    comm.Allgather(np.frombuffer(own, np.uint8), digests)
    return bool((digests == digests[0]).all())
