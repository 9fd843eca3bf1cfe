"""Train a small network on handwritten digits, data parallel over all ranks.

    mpiexec -n 8 python jobs/train.py [options]

Every rank holds the whole network and takes its share of each batch; the gradients are averaged
by mpicoll's Allreduce. Its result has the same bits on every rank, so the parameters, sent once
before step 0, stay equal without being sent again. The end of the run checks that, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpicoll

HIDDEN = (128, 64)
MOMENTUM = 0.9

Array = np.ndarray[Any, np.dtype[Any]]


class Data(NamedTuple):
    """Samples, one per row, and their labels; the last fifth of a fixed shuffle is held out."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array
    digest: str


class Network:
    """A multilayer perceptron whose parameters lie in one flat buffer, and so its gradients.

    The loss rides along as the last element of the gradients' buffer: one Allreduce for both.
    """

    def __init__(self, layers: list[int], dtype: str, seed: int) -> None:
        shapes: list[tuple[int, ...]] = []
        for fan_in, fan_out in itertools.pairwise(layers):
            shapes += [(fan_in, fan_out), (fan_out,)]
        size = sum(int(np.prod(shape)) for shape in shapes)
        self.params: Array = np.zeros(size, dtype)
        self.velocity: Array = np.zeros(size, dtype)
        self.message: Array = np.zeros(size + 1, dtype)
        self.grads = self.message[:-1]
        self._params = split(self.params, shapes)
        self._grads = split(self.grads, shapes)
        rng = np.random.default_rng(seed)
        for weight in self._params[::2]:
            weight[:] = rng.normal(0, np.sqrt(2 / len(weight)), weight.shape)

    def forward(self, x: Array) -> list[Array]:
        """Return the values of every layer, the last one as logits."""
        values = [x]
        for weight, bias in zip(self._params[::2], self._params[1::2], strict=True):
            values.append(np.maximum(values[-1] @ weight + bias, 0))
        values[-1] = values[-2] @ weight + bias  # no ReLU after the last layer
        return values

    def backward(self, x: Array, y: Array, batch: int) -> None:
        """Fill the message with this share's part of the batch's mean gradient and mean loss.

        Dividing by the size of the whole batch, not of the share, makes the sum over ranks the
        mean whatever the shares are: uneven ones and empty ones need no weights.
        """
        values = self.forward(x)
        logits = values[-1] - values[-1].max(axis=1, keepdims=True)
        chance = np.exp(logits)
        chance /= chance.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        self.message[-1] = -np.log(chance[rows, y] + 1e-12).sum() / batch
        chance[rows, y] -= 1
        delta = chance / batch
        for layer in range(len(values) - 2, -1, -1):
            self._grads[2 * layer][:] = values[layer].T @ delta
            self._grads[2 * layer + 1][:] = delta.sum(axis=0)
            delta = (delta @ self._params[2 * layer].T) * (values[layer] > 0)

    def update(self, rate: float) -> None:
        """Take one step of stochastic gradient descent with momentum."""
        self.velocity *= MOMENTUM
        self.velocity -= rate * self.grads
        self.params += self.velocity

    def digest(self) -> bytes:
        """Return a hash of every bit that training has made."""
        return hashlib.sha256(self.params.tobytes() + self.velocity.tobytes()).digest()


class Progress:
    """Shows how far training is: a bar on a terminal, else a line every two seconds."""

    def __init__(self, shown: bool, step: int, total: int, per_epoch: int) -> None:
        self._shown, self._total, self._per_epoch, self._next = shown, total, per_epoch, 0.0
        self._bar: Any = None
        # Open MPI gives a rank a terminal even where mpiexec has none: TERM=dumb says so.
        terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if shown and terminal and importlib.util.find_spec("rich"):
            from rich import progress

            columns = ("{task.description}", progress.BarColumn(), "{task.completed}/{task.total}")
            self._bar = progress.Progress(*columns, refresh_per_second=4)
            self._task = self._bar.add_task("training", total=total, completed=step)
            self._bar.start()

    def show(self, step: int, loss: float) -> None:
        """Note that a step is done."""
        now = time.perf_counter()
        if not self._shown or (now < self._next and step < self._total):
            return
        text = f"epoch {(step - 1) // self._per_epoch + 1}, loss {loss:.4f}"
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        else:
            print(f"step {step}/{self._total}, {text}", flush=True)
        self._next = now + (0.2 if self._bar else 2)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()


def split(flat: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """Return views of a flat buffer, one after the other, in the given shapes."""
    bounds = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    parts = np.split(flat, bounds)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def share(comm: mpicoll.Comm, rows: Array) -> Array:
    """Return this rank's part of the rows: sizes differ by one at most, and may be zero."""
    bounds = [len(rows) * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
    return rows[bounds[0] : bounds[1]]


def on_root(comm: mpicoll.Comm, work: Callable[[], Any]) -> Any:
    """Do something that can fail on rank 0 alone and return its result there, None elsewhere.

    If it fails, rank 0 says why, and every rank leaves: none waits for one that has gone.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work()
        except (OSError, ValueError, ImportError) as caught:
            error = str(caught)
    error = comm.bcast(error, root=0)
    if error is not None:
        leave(comm, error)
    return result


def leave(comm: mpicoll.Comm, error: str) -> None:
    """End the run on every rank with status 1; called by all of them, heard from rank 0."""
    if comm.rank == 0:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    comm.Barrier()  # mpiexec ends the others when one rank fails: not before rank 0 has spoken
    raise SystemExit(1)


def broadcast(comm: mpicoll.Comm, array: Array | None) -> Array:
    """Return rank 0's array on every rank."""
    shape, dtype = comm.bcast(None if array is None else (array.shape, array.dtype.str), root=0)
    if array is None:
        array = np.empty(shape, dtype)
    comm.Bcast(array, root=0)
    return array


def read_npz(path: Path, names: set[str]) -> dict[str, Array]:
    """Return what an .npz file holds; it must be sound and have the named arrays."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{path} is not an .npz file, or a damaged one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as caught:
        raise ValueError(f"{path} cannot be read: {caught}") from caught
    if not names <= arrays.keys():
        raise ValueError(f"{path} must hold {sorted(names)}, it has {sorted(arrays)}")
    return arrays


def read_samples(path: Path | None) -> tuple[Array, Array]:
    """Return samples and labels: those of a file, or the digits that scikit-learn brings."""
    if path is None:
        if not importlib.util.find_spec("sklearn"):
            raise ImportError(
                "the digits come with scikit-learn, which is not installed: "
                "pip install scikit-learn, or give --data FILE.npz"
            )
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.ascontiguousarray(digits.data), digits.target
    arrays = read_npz(path, {"x", "y"})
    x, y = arrays["x"], arrays["y"]
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: x must be numbers and y integers, not {x.dtype} and {y.dtype}")
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or len(x) < 5 or x.size == 0:
        raise ValueError(f"{path}: x and y must be 5 samples or more, not {x.shape}, {y.shape}")
    if not np.isfinite(x).all() or set(y.tolist()) != set(range(y.max() + 1)):
        raise ValueError(f"{path}: x must be finite, and y labels 0, 1, ... without a gap")
    return x.reshape(len(x), -1), y


def load_data(comm: mpicoll.Comm, path: Path | None, dtype: str) -> Data:
    """Read the samples on rank 0 and share them; the split is the same whatever the seed."""
    samples = on_root(comm, lambda: read_samples(path))
    x, y = (broadcast(comm, array) for array in samples or (None, None))
    digest = hashlib.sha256(repr((x.shape, x.dtype.str)).encode() + x.tobytes() + y.tobytes())
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [len(x) - len(x) // 5])
    x = (x / max(np.abs(x[train]).max(), 1e-12)).astype(dtype)
    y = y.astype(np.int64)
    return Data(x[train], y[train], x[test], y[test], digest.hexdigest()[:16])


def read_checkpoint(path: Path, config: dict[str, Any], net: Network) -> int:
    """Take parameters and momentum from a checkpoint, if there is one, and return its step."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} for the checkpoint")
    if not path.exists():
        return 0
    arrays = read_npz(path, {"config", "step", "params", "velocity"})
    saved = json.loads(str(arrays["config"]))
    for name in ("data", "layers", "dtype", "batch", "seed", "lr"):
        if saved.get(name) != config[name]:
            raise ValueError(
                f"the checkpoint {path} is of another run: {name} was {saved.get(name)}, "
                f"is {config[name]}; give another --checkpoint or remove it"
            )
    for name in ("ranks", "algorithm"):
        if saved.get(name) != config[name]:
            print(f"note: {name} was {saved.get(name)}, is {config[name]}: last bits may differ")
    net.params[:], net.velocity[:] = arrays["params"], arrays["velocity"]
    return int(arrays["step"])


def write_checkpoint(path: Path, config: dict[str, Any], net: Network, step: int) -> None:
    """Replace the checkpoint as one act: a killed run leaves the old one or the new one.

    The shuffle of an epoch follows from seed and epoch, so seed and step are all its state.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.savez(
            file,
            config=np.array(json.dumps(config)),
            step=np.array(step),
            params=net.params,
            velocity=net.velocity,
        )
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name must outlive a crash too
    os.close(folder)


def train(
    comm: mpicoll.Comm,
    net: Network,
    data: Data,
    opts: argparse.Namespace,
    step: int,
    save: Callable[[int], None],
) -> dict[str, str]:
    """Train from a step on; return what the final table says about speed."""
    per_epoch = -(-len(data.y) // opts.batch)
    total = min(opts.epochs * per_epoch, opts.steps or sys.maxsize)
    progress = Progress(comm.rank == 0, step, total, per_epoch)
    samples, waited, start = 0, 0.0, time.perf_counter()
    order, epoch = np.empty(0, np.int64), -1
    while step < total:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = np.random.default_rng((opts.seed, epoch)).permutation(len(data.y))
        first = step % per_epoch * opts.batch
        batch = order[first : first + opts.batch]
        rows = share(comm, batch)
        net.backward(data.x[rows], data.y[rows], len(batch))
        before = time.perf_counter()
        comm.Allreduce(MPI.IN_PLACE, net.message, op=MPI.SUM, algorithm=opts.algorithm)
        waited += time.perf_counter() - before
        if not np.isfinite(net.message[-1]):  # the same bits on every rank, so all leave
            leave(comm, f"the loss is not finite any more at step {step}: try a lower --lr")
        net.update(opts.lr)
        step += 1
        samples += len(batch)
        progress.show(step, float(net.message[-1]))
        if opts.checkpoint and (step % opts.checkpoint_every == 0 or step == total):
            save(step)
    progress.close()
    seconds = max(time.perf_counter() - start, 1e-9)
    part = comm.allreduce(waited / seconds) / comm.size
    speed = f"{samples / seconds:.0f}"
    return {"samples per second": speed, "time in communication": f"{part:.0%}"}


def accuracy(comm: mpicoll.Comm, net: Network, data: Data) -> float:
    """Return the share of held-out samples that the network gets right; every rank does some."""
    rows = share(comm, np.arange(len(data.y_test)))
    right = np.zeros(1, np.int64)
    right[0] = (net.forward(data.x_test[rows])[-1].argmax(axis=1) == data.y_test[rows]).sum()
    comm.Allreduce(MPI.IN_PLACE, right, op=MPI.SUM)
    return float(right[0] / len(data.y_test))


def identical(comm: mpicoll.Comm, net: Network) -> bool:
    """Return whether the parameters have the same bits on all ranks, the same answer on each."""
    own = np.frombuffer(net.digest(), np.uint8)
    digests = np.empty((comm.size, own.size), np.uint8)
    comm.Allgather(own, digests)
    return bool((digests == digests[0]).all())


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def read_options(comm: mpicoll.Comm) -> argparse.Namespace:
    """Read the command line: every rank alike, and rank 0 alone speaks about it."""
    about = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser("train.py", description=about[0], epilog=about[2])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE.npz", help="samples x and labels y (the digits)")
    add("--epochs", type=positive, default=30, help="passes over the data (%(default)s)")
    add("--steps", type=positive, help="stop after that many batches")
    add("--batch", type=positive, default=64, help="samples of a batch, all ranks (%(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate (%(default)s)")
    add("--seed", type=int, default=1, help="of first parameters and shuffles (%(default)s)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="(%(default)s)")
    add("--algorithm", help="of the gradients' Allreduce (chosen by size)")
    add("--checkpoint", type=Path, metavar="FILE", help="resume from it, and keep it up to date")
    add("--checkpoint-every", type=positive, default=100, metavar="STEPS", help="(%(default)s)")
    with contextlib.ExitStack() as stack:
        if comm.rank != 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            return parser.parse_args()
        except SystemExit:
            comm.Barrier()  # as in leave
            raise


def abort_on_error() -> None:
    """Make a rank that fails unexpectedly end the run: the others would wait for it for ever."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        print(f"train.py: rank {MPI.COMM_WORLD.rank} failed:\n{text}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook


def main() -> int:
    """Run the job and return its exit status."""
    abort_on_error()
    np.seterr(over="ignore", invalid="ignore")  # the loss shows it, once
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    opts = read_options(comm)
    data = load_data(comm, opts.data, opts.dtype)
    layers = [data.x.shape[1], *HIDDEN, int(max(data.y.max(), data.y_test.max())) + 1]
    net = Network(layers, opts.dtype, opts.seed)
    try:
        comm.Allreduce(MPI.IN_PLACE, net.message, op=MPI.SUM, algorithm=opts.algorithm)
    except ValueError as error:  # no such algorithm: every rank is told so alike
        leave(comm, str(error))
    names = ("dtype", "batch", "seed", "lr", "algorithm")
    config = {"data": data.digest, "layers": layers, "ranks": comm.size}
    config |= {name: getattr(opts, name) for name in names}
    step = 0
    if opts.checkpoint:
        step = on_root(comm, lambda: read_checkpoint(opts.checkpoint, config, net))
        step = comm.bcast(step, root=0)
    if comm.rank == 0:
        print(f"{len(data.y)} samples on {comm.size} rank(s), from step {step}", flush=True)
    comm.Bcast(net.params, root=0)
    comm.Bcast(net.velocity, root=0)

    def save(step: int) -> None:
        on_root(comm, lambda: write_checkpoint(opts.checkpoint, config, net, step))

    speed = train(comm, net, data, opts, step, save)
    correct = accuracy(comm, net, data)
    same = identical(comm, net)
    table = {
        "test accuracy": f"{correct:.4f}",
        **speed,
        "parameters identical on all ranks": "yes" if same else "NO",
        "sha256 of the parameters": net.digest().hex()[:16],
    }
    if comm.rank == 0:
        print("\n".join(f"{name + ':':36}{value}" for name, value in table.items()), flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
