"""Times data parallel training against PyTorch's DistributedDataParallel on Gloo.

    OMP_NUM_THREADS=1 mpiexec -n 4 python jobs/bench_ddp.py      (needs torch)

The same perceptron in torch on the same batches, in the same processes, by turns:

    alone     without communication
    theirs    DistributedDataParallel on a Gloo process group
    ours      a hook hands each gradient, when it is accumulated, to mpicoll's DataParallel

with buckets of the same size, and in both the gradients after a step are views of the buckets.
Every round runs theirs and ours twice, in an order of its own. The ratio of the two runs of one
(A/A) is the noise: what equal programs differ by. Times are those of the slowest rank; ratios
are those of the sums of a round. All are medians over rounds, with quartiles.

1. Time per step: forward, backward with its hooks, update.
2. The part of it that communication adds: a step less "alone" of the same round.
3. Communication by itself: the mean of the same buckets over ranks, all started, then waited for.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, util
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.parallel import DataParallel

WARM_UP = 2
MIB = 1 << 20

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Calls: TypeAlias = "dict[str, Callable[[], Any]]"


def say(comm: MPI.Intracomm, text: str = "") -> None:
    """Print on rank 0."""
    if comm.rank == 0:
        print(text, flush=True)


def slowest(comm: MPI.Intracomm, call: Callable[[], Any]) -> float:
    """Return the seconds of a call on the rank where it takes longest."""
    comm.Barrier()
    start = time.perf_counter()
    call()
    return float(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))


def by_turns(comm: MPI.Intracomm, rounds: int, calls: Calls) -> dict[str, list[float]]:
    """Return the seconds of every call by round; each round has its own order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = [*calls]
    for number in range(WARM_UP + rounds):
        # An order that is drawn anew, alike on all ranks: no call always follows the same one.
        for at in np.random.default_rng(number).permutation(len(names)):
            name = names[at]
            seconds = slowest(comm, calls[name])
            if number >= WARM_UP:
                times[name].append(seconds)
    return times


class Trained:
    """A module, its optimizer, and the step that all contestants take."""

    def __init__(self, torch: Any, module: Any, finish: Callable[[], None] | None = None) -> None:
        self._torch, self.module, self._finish = torch, module, finish
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        self._loss = torch.nn.CrossEntropyLoss()
        self.losses: list[float] = []

    def step(self, x: Any, y: Any) -> None:
        """Go forward, backward, and update."""
        self._optimizer.zero_grad()
        loss = self._loss(self.module(x), y)
        loss.backward()
        if self._finish is not None:
            self._finish()
        self._optimizer.step()
        self.losses.append(float(loss.detach()))


def perceptron(torch: Any, width: int, depth: int) -> Any:
    """Return the network, the same on all ranks."""
    torch.manual_seed(1)
    layers: list[Any] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def with_theirs(torch: Any, module: Any, bucket_bytes: int) -> Trained:
    """Reduce the gradients by torch's hooks."""
    wrapped = torch.nn.parallel.DistributedDataParallel(
        module, bucket_cap_mb=bucket_bytes / MIB, gradient_as_bucket_view=True
    )
    return Trained(torch, wrapped)


def with_ours(torch: Any, module: Any, comm: mpicoll.Comm, bucket_bytes: int) -> Trained:
    """Reduce the gradients by mpicoll, in hooks."""
    params = dict(module.named_parameters())
    arrays = {name: param.detach().numpy() for name, param in params.items()}
    parallel = DataParallel(arrays, comm, bucket_bytes)
    means = {name: torch.from_numpy(parallel.gradients[name]) for name in params}

    def hook(name: str, param: Any) -> None:
        parallel.ready(name, param.grad.numpy())
        # Copied; freed at once, its memory is taken again by the next layer's gradient. All of
        # them kept until the end would be new pages from the system in each step.
        param.grad = None

    def finish() -> None:
        parallel.finish()
        for name, param in params.items():
            param.grad = means[name]

    for name, param in params.items():
        param.register_post_accumulate_grad_hook(partial(hook, name))
    return Trained(torch, module, finish)


def join(torch: Any, comm: MPI.Intracomm) -> None:
    """Start torch.distributed on the ranks of MPI, with a store at rank 0."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if node.size == comm.size:  # a container's own name often has no address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1"
    else:
        host = comm.bcast(socket.gethostname(), root=0)
    node.Free()
    store = partial(torch.distributed.TCPStore, host, wait_for_workers=False)
    mine = store(port=0, is_master=True) if comm.rank == 0 else None
    port = comm.bcast(mine.port if mine else None, root=0)
    mine = mine or store(port=port, is_master=False)
    torch.distributed.init_process_group("gloo", store=mine, rank=comm.rank, world_size=comm.size)


def bucket_sizes(module: Any, bucket_bytes: int) -> list[int]:
    """Return the elements of each bucket, filled from the last parameter to the first."""
    sizes = [0]
    for count in reversed([param.numel() for param in module.parameters()]):
        if sizes[-1] and 4 * (sizes[-1] + count) > bucket_bytes:
            sizes.append(0)
        sizes[-1] += count
    return sizes


def reduce_theirs(torch: Any, buckets: list[Any], size: int) -> None:
    """Take the mean of buckets over the ranks by Gloo, as DistributedDataParallel does."""
    works = []
    for bucket in buckets:
        bucket.div_(size)
        works.append(torch.distributed.all_reduce(bucket, async_op=True))
    for work in works:
        work.wait()


def reduce_ours(comm: mpicoll.Comm, buckets: list[Array]) -> None:
    """Take the mean of buckets over the ranks by mpicoll."""
    requests = [comm.Iallreduce(MPI.IN_PLACE, one, op=mpicoll.AVG) for one in buckets]
    for request in requests:
        request.Wait()


# -- the report -------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> str:
    """Return the median, and the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:9.3f}  ({low:.3f} to {high:.3f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the ratio of two series, round by round."""
    if min(*over, *under) <= 0:  # the difference of two steps may be
        return "    noise hides it: more --rounds, or a machine that does nothing else"
    return quartiles([a / b for a, b in zip(over, under, strict=True)])


def report(comm: MPI.Intracomm, title: str, found: dict[str, list[float]]) -> None:
    """Print times in ms, the ratio, and what equal programs differ by."""
    say(comm, f"\n{title}")
    for name in ("alone", "theirs", "ours"):
        if name in found:
            say(comm, f"  {name:24}{quartiles([1e3 * one for one in found[name]])} ms")
    sums = [
        [a + b for a, b in zip(found[name], found[f"{name} again"], strict=True)]
        for name in ("ours", "theirs")
    ]
    say(comm, f"  {'ours / theirs':24}{ratio(*sums)}")
    for name in ("theirs", "ours"):
        say(comm, f"  A/A of {name:17}{ratio(found[name], found[f'{name} again'])}")


def less_alone(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what communication adds to a step, round by round."""
    return {
        name: [a - b for a, b in zip(times, found["alone"], strict=True)]
        for name, times in found.items()
        if name != "alone"
    }


def twice(theirs: Callable[[], Any], ours: Callable[[], Any]) -> Calls:
    """Return the calls of a round: each twice, for the noise."""
    return {"theirs": theirs, "ours": ours, "theirs again": theirs, "ours again": ours}


def steps(torch: Any, comm: MPI.Intracomm, mine: mpicoll.Comm, opts: argparse.Namespace) -> None:
    """Time steps of training, and compare the losses."""
    make = partial(perceptron, torch, opts.width, opts.depth)
    bucket_bytes = int(opts.bucket_mib * MIB)
    alone = Trained(torch, make())
    theirs = with_theirs(torch, make(), bucket_bytes)
    ours = with_ours(torch, make(), mine, bucket_bytes)
    rng = np.random.default_rng(comm.rank)
    x = torch.from_numpy(rng.standard_normal((opts.batch, opts.width), np.float32))
    y = torch.from_numpy(rng.integers(0, 10, opts.batch))
    calls = twice(partial(theirs.step, x, y), partial(ours.step, x, y))
    calls["alone"] = partial(alone.step, x, y)
    found = by_turns(comm, opts.rounds, calls)
    report(comm, "time per step", found)
    report(comm, "what communication adds to it", less_alone(found))
    apart = max(abs(a - b) for a, b in zip(theirs.losses, ours.losses, strict=True))
    apart = comm.allreduce(apart, op=MPI.MAX)
    say(
        comm,
        f"  losses of {len(ours.losses)} steps, theirs and ours, differ by {apart:.1e} at most",
    )


def communication(
    torch: Any, comm: MPI.Intracomm, mine: mpicoll.Comm, opts: argparse.Namespace
) -> None:
    """Time the reduction of the buckets by itself."""
    sizes = bucket_sizes(perceptron(torch, opts.width, opts.depth), int(opts.bucket_mib * MIB))
    tensors = [torch.zeros(size) for size in sizes]
    arrays = [np.zeros(size, np.float32) for size in sizes]
    calls = twice(
        partial(reduce_theirs, torch, tensors, comm.size), partial(reduce_ours, mine, arrays)
    )
    mib = ", ".join(f"{4 * size / MIB:.1f}" for size in sizes)
    title = f"communication by itself, buckets of {mib} MiB"
    report(comm, title, by_turns(comm, opts.rounds, calls))


def read_options(comm: MPI.Intracomm) -> argparse.Namespace:
    """Read the command line on rank 0."""
    parser = argparse.ArgumentParser("bench_ddp.py", description=str(__doc__).split("\n\n")[0])
    add = parser.add_argument
    add("--width", type=int, default=1024, help="of the layers (%(default)s)")
    add("--depth", type=int, default=10, help="hidden layers (%(default)s)")
    add("--batch", type=int, default=32, help="samples per rank (%(default)s)")
    add("--bucket-mib", type=float, default=25.0, help="(%(default)s)")
    add("--rounds", type=int, default=20, help="at least 2 (%(default)s)")
    add("--progress", choices=["thread"], help="drive mpicoll's calls by a thread")
    opts: argparse.Namespace | None = None
    status = 0
    if comm.rank == 0:
        try:
            opts = parser.parse_args()
            if opts.rounds < 2:
                parser.error("--rounds must be at least 2")
            if not util.find_spec("torch"):
                parser.error("needs torch: pip install torch")
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    given: tuple[argparse.Namespace | None, int] = comm.bcast((opts, status), root=0)
    opts, status = given
    if opts is None or status:
        raise SystemExit(status)
    return opts


def main() -> None:
    """Print the three tables."""
    mpicoll.abort_on_exception()
    comm = MPI.COMM_WORLD
    opts = read_options(comm)
    torch = import_module("torch")
    import_module("torch.distributed")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    join(torch, comm)
    mine = mpicoll.Comm(comm.Dup(), progress=opts.progress)
    count = sum(param.numel() for param in perceptron(torch, opts.width, opts.depth).parameters())
    library = MPI.Get_library_version().splitlines()[0][:40].strip()
    say(
        comm,
        f"{comm.size} ranks, {len(os.sched_getaffinity(0))} cores to use, torch "
        f"{torch.__version__}, {library}\n{count / 1e6:.1f} M parameters, batch {opts.batch} per "
        f"rank, buckets of {opts.bucket_mib:g} MiB, {opts.rounds} rounds",
    )
    steps(torch, comm, mine, opts)
    communication(torch, comm, mine, opts)
    comm.Barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
