"""Gloo, the CPU back end of torch.distributed, in the same processes. Loads mpi4py."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.cli.bench_rivals import afterwards, near, overflows
from mpicoll.cli.cases import Case
from mpicoll.cli.common import refuse
from mpicoll.cli.memory import Array
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender
from mpicoll.cli.world import native
from mpicoll.comm import Comm

TIME_LIMIT = timedelta(seconds=300)  #: of one call; Gloo then raises

#: Item types that Gloo moves and adds up; others it refuses, some on the root only.
DTYPES = frozenset(
    ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
)
WITHOUT = frozenset(("scan", "exscan"))  #: collectives that Gloo does not have


class Gloo:
    """The default process group of torch.distributed, made here with the ranks of ``comm``."""

    name = "gloo"

    def __init__(self, comm: Comm, stack: ExitStack) -> None:
        self._world = native(comm)
        leave = "or leave gloo out of --compare"
        self._torch = self._all_or_none(
            lambda: import_module("torch"), "needs PyTorch", f"pip install torch, {leave}"
        )
        self._distributed: Any = import_module("torch.distributed")
        self._torch.set_num_threads(1)  # as many ranks as cores are the usual case
        place = stack.enter_context(tempfile.TemporaryDirectory()) if comm.rank == 0 else ""
        place = self._world.bcast(place, root=0)
        self._all_or_none(
            lambda: self._begin(place), "did not start", f"set GLOO_SOCKET_IFNAME, {leave}"
        )
        afterwards(stack, self._end)

    def _begin(self, place: str) -> None:
        distributed, world = self._distributed, self._world
        store = _file(distributed, world, place) if _one_node(world) else _port(distributed, world)
        distributed.init_process_group(
            "gloo", store=store, rank=world.rank, world_size=world.size, timeout=TIME_LIMIT
        )
        distributed.barrier()  # connections are made at the first call

    def _end(self) -> None:
        self._world.Barrier()
        self._distributed.destroy_process_group()

    def _all_or_none(self, action: Callable[[], Any], what: str, remedy: str) -> Any:
        """Return what ``action`` does; where it fails on one rank, refuse on all."""
        made, fault = None, ""
        try:
            made = action()
        except Exception as error:
            fault = f"rank {self._world.rank}: {str(error) or type(error).__name__}"
        first = next(filter(None, self._world.allgather(fault)), "")
        if first:
            refuse(f"--compare gloo {what} ({first}); {remedy}")
        return made

    def refusal(self, case: Case, form: str) -> str:
        """Return why it takes no part: no such collective, type or form."""
        shape = case.shape
        if shape.collective in WITHOUT:
            return f"Gloo has no {shape.collective}"
        if form == "persistent":
            return "Gloo has no persistent form"
        if shape.collective != "barrier" and shape.dtype.name not in DTYPES:
            return f"Gloo does not take {shape.dtype}"
        if overflows(case, self._world.size):
            return f"sums of {shape.dtype} over {self._world.size} ranks overflow"
        return ""

    def contender(self, case: Case, form: str, stack: ExitStack) -> Contender:
        """Return its call. What works in place gets its input anew before, not timed."""
        call, prepare = self._call(case)
        if form == "nonblocking":
            call = _waited(call)
        wrong = partial(near, case, self._world.size)
        return Contender(self.name, call, case.poison, wrong, prepare)

    def _call(self, case: Case) -> tuple[Callable[..., Any], Callable[[], None] | None]:
        has, collective = self._distributed, case.shape.collective
        arguments, root = case.arguments, case.shape.root
        if collective == "barrier":
            return has.barrier, None
        if collective == "bcast":
            return partial(has.broadcast, self._tensor(arguments[0]), src=root), None
        send, result = arguments[0], arguments[1]
        if collective in ("allreduce", "reduce"):
            result = np.empty_like(send) if result is None else result
            tensor = self._tensor(result)
            call = has.all_reduce if collective == "allreduce" else partial(has.reduce, dst=root)
            return partial(call, tensor), partial(np.copyto, result, send)
        if collective == "gather":
            return partial(has.gather, self._tensor(send), self._blocks(result), dst=root), None
        if collective == "scatter":
            return partial(has.scatter, self._tensor(result), self._blocks(send), src=root), None
        call = {
            "allgather": _either(has, "all_gather_single", "all_gather_into_tensor"),
            "reduce_scatter": _either(has, "reduce_scatter_single", "reduce_scatter_tensor"),
            "alltoall": has.all_to_all_single,
        }[collective]
        return partial(call, self._tensor(result), self._tensor(send)), None

    def _tensor(self, array: Array) -> Any:
        """Return a tensor over the same memory."""
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def _blocks(self, array: Array | None) -> list[Any] | None:
        """Return one tensor per rank on the root, None elsewhere."""
        if array is None:
            return None
        return [self._tensor(block) for block in np.split(array, self._world.size)]


def _waited(call: Callable[..., Any]) -> Callable[[], object]:
    """Return the call in its non-blocking form, waited for."""
    return lambda: call(async_op=True).wait()


def _either(module: Any, new: str, old: str) -> Any:
    """Return a function by its name, or by the one it had before."""
    return getattr(module, new, None) or getattr(module, old)


def _one_node(world: MPI.Intracomm) -> bool:
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return bool(world.allreduce(size == world.size, MPI.LAND))


def _file(distributed: Any, world: MPI.Intracomm, place: str) -> Any:
    """Return a file where the ranks of one node meet."""
    return distributed.FileStore(str(Path(place, "gloo")), world.size)


def _port(distributed: Any, world: MPI.Intracomm) -> Any:
    """Return a port of rank 0 where the ranks of several nodes meet."""
    make = partial(distributed.TCPStore, world_size=world.size, wait_for_workers=False)
    store, host, port, fault = None, socket.gethostname(), 0, ""
    if world.rank == 0:
        try:
            store = make(host, 0, is_master=True)
            port = store.port
        except Exception as error:  # the others wait to be told
            fault = str(error)
    host, port, fault = world.bcast((host, port, fault), root=0)
    if fault:
        raise RuntimeError(fault)
    return store or make(host, port, is_master=False)
