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
from training.moe import EXPERT_WIDTH, EXPERTS, WIDTH, Mixture
from training.network import Perceptron
from training.report import digest, identical, speed
from training.stores import Replicated, make_store
from training.tasks import Classify, Task
from training.verify import Single

HIDDEN = (128, 64)
EMBEDDING = 64
MOMENTUM = 0.9
CHECK_EVERY = 10  # steps between looks at the loss of all ranks

#: The test accuracy that each strategy reaches on the digits with the options of its default.
ACCURACY = {
    "ddp": 0.96,
    "zero1": 0.96,
    "zero2": 0.96,
    "zero3": 0.96,
    "moe": 0.95,
    "contrastive": 0.94,
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
        task = Mixture(data, optimizer, comm, clock, opts.seed, opts.dtype)
        return task, [data.x.shape[1], WIDTH, EXPERT_WIDTH, EXPERTS, data.classes]
    outputs = EMBEDDING if opts.strategy == "contrastive" else data.classes
    net = Perceptron([data.x.shape[1], *HIDDEN, outputs])
    layers = net.initial(opts.seed, opts.dtype)
    store = make_store(opts.strategy, layers, optimizer, comm, clock)
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
        if step % CHECK_EVERY == 0 or step in (first + 1, total):
            loss = mean_loss(comm, seen, step)
            seen = [0.0, 0]
        if progress.due(step):
            times = clock.split.since(before).per_step(step - shown)
            shown, before = step, clock.split.since(Split())
            progress.show(step, f"epoch {epoch + 1}, loss {loss:.4f}, {times}")
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
    yield
    # Sums that the optimizer has left as they are.
    gradients = store.parallel.gradients if isinstance(store, Replicated) else None
    after = store.whole()
    problem = None
    if run.single is not None and parts is not None:
        problem = run.single.step(np.concatenate(parts), before, gradients, after)
    problem = broadcast_object(problem, comm)
    if problem is not None:
        leave(comm, f"--verify: {problem}")


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def natural(text: str) -> int:
    """Read an integer of at least 0."""
    return positive(text) if int(text) else 0


def rate(text: str) -> float:
    """Read a learning rate."""
    return SGD(float(text)).lr


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = str(__doc__).split("\n\n")
    reached = ", ".join(f"{name} {value:.2f}" for name, value in ACCURACY.items())
    parser = argparse.ArgumentParser(
        "train.py",
        description=about[0],
        epilog=f"{about[3].strip()} Test accuracy on the digits, at least: {reached}.",
    )
    add = parser.add_argument
    add("--strategy", choices=ACCURACY, default="ddp", metavar="NAME", help="see below (ddp)")
    add("--verify", action="store_true", help="compare each step with one process (ddp, zero)")
    add("--data", type=Path, metavar="FILE.npz", help="samples x and labels y (the digits)")
    add("--epochs", type=positive, help="passes over the data (30; contrastive: 60)")
    add("--steps", type=positive, help="stop after that many batches")
    add("--batch", type=positive, help="samples of a batch, all ranks (64; contrastive: 128)")
    add("--lr", type=rate, help="learning rate (0.05; contrastive: 0.1)")
    add("--seed", type=natural, default=1, help="of parameters and shuffles (%(default)s)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="(%(default)s)")
    add("--algorithm", metavar="NAME", help="of every Allreduce (chosen by size)")
    add("--checkpoint", type=Path, metavar="FILE", help="resume from it, and keep it up to date")
    add("--checkpoint-every", type=positive, default=100, metavar="STEPS", help="(%(default)s)")
    return parser


def read_options(comm: MPI.Intracomm) -> argparse.Namespace:
    """Read the command line: every rank alike, and rank 0 alone speaks about it."""
    parser = make_parser()
    with contextlib.ExitStack() as stack:
        if comm.rank != 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            opts = parser.parse_args()
            if opts.verify and opts.strategy not in VERIFIED:
                parser.error(f"--verify is for {', '.join(VERIFIED)}, not {opts.strategy}")
        except SystemExit:
            comm.Barrier()  # as in leave
            raise
    contrastive = opts.strategy == "contrastive"
    opts.epochs = opts.epochs or (60 if contrastive else 30)
    opts.batch = opts.batch or (128 if contrastive else 64)
    if opts.lr is None:
        opts.lr = 0.1 if contrastive else 0.05
    return opts


def wrap(opts: argparse.Namespace) -> mpicoll.Comm:
    """Return the world with our collectives; the algorithm is a setting of rank 0."""
    if opts.algorithm:
        os.environ["MPICOLL_ALLREDUCE"] = opts.algorithm
    try:
        return mpicoll.Comm(MPI.COMM_WORLD)
    except ValueError as error:  # no such algorithm: every rank is told so alike
        if MPI.COMM_WORLD.rank == 0:
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Barrier()
        raise SystemExit(1) from None


def resumed(
    comm: mpicoll.Comm, task: Task, opts: argparse.Namespace, config: dict[str, Any]
) -> int:
    """Load the checkpoint, if there is one, and return its step."""
    step = task.store.load(opts.checkpoint, config) if opts.checkpoint else 0
    if step and opts.verify:
        leave(comm, "--verify begins at step 0: leave out --checkpoint, or give a new one")
    return step


def main() -> int:
    """Run the job and return its exit status."""
    mpicoll.abort_on_exception()
    np.seterr(over="ignore", invalid="ignore")  # the loss shows it, once
    opts = read_options(MPI.COMM_WORLD)
    comm = wrap(opts)
    clock = Clock()
    data = load_data(comm, opts.data, opts.dtype)
    task, widths = make_task(comm, data, opts, clock)
    names = ("strategy", "dtype", "batch", "seed", "lr", "algorithm")
    config = {"data": data.digest, "layers": widths, "ranks": comm.size}
    config |= {name: getattr(opts, name) for name in names}
    step = resumed(comm, task, opts, config)
    say(comm, f"{len(data.y)} samples on {comm.size} rank(s), {opts.strategy}, from step {step}")
    single = None
    if opts.verify and isinstance(task, Classify):
        single = Single(task.net, SGD(opts.lr, MOMENTUM), data)
    run = Run(comm, task, data, opts, clock, single)
    speeds = train(run, step, lambda step: task.store.save(opts.checkpoint, config, step))
    correct = task.accuracy()
    own = digest(task.store.whole())
    same = identical(comm, own)
    task.store.free()
    table = {
        "test accuracy": f"{correct:.4f}",
        **speeds,
        **(single.table() if single else {}),
        "parameters identical on all ranks": "yes" if same else "NO",
        "sha256 of the parameters": own.hex()[:16],
    }
    say(comm, "\n".join(f"{name + ':':36}{value}" for name, value in table.items()))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
