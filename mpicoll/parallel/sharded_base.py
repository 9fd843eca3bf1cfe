"""What the sharded optimizers share: gradients in flight, the step, saving, memory."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree
from mpicoll.parallel.flat import Group
from mpicoll.parallel.library import Array, total_squares
from mpicoll.parallel.optimizers import FlatOptimizer
from mpicoll.parallel.owned import Owner
from mpicoll.parallel.sharded_load import load_state
from mpicoll.parallel.sharded_save import save_file, save_shards
from mpicoll.parallel.sharded_state import Part
from mpicoll.parallel.shards import Flight, Ledger, Shard
from mpicoll.runtime.operators import AVG
from mpicoll.selection.choose import OrderWish

#: Buckets of gradients, and of updated parameters, that travel at a time.
IN_FLIGHT = 2


class Sharded(Owner):
    """Common part of `ShardedOptimizer` and `ShardedParameters`."""

    def __init__(
        self, comm: Comm, groups: Sequence[Group], optimizer: FlatOptimizer, order: OrderWish
    ) -> None:
        #: A duplicate, so that our messages never meet the caller's.
        self.comm: Comm = comm.Dup()
        self.optimizer = optimizer
        #: Steps taken.
        self.steps = 0
        size = self.comm.size
        self._shards = [Shard(group, self.comm.rank, size, optimizer.slots) for group in groups]
        self._order = order
        self._ledger = Ledger()
        self._flights: deque[tuple[Shard, Flight]] = deque()
        self._faults: list[str] = []

    # -- gradients --------------------------------------------------------------------

    def _reduce(self, shard: Shard, full: Array) -> None:
        """Begin the reduce-scatter of a whole group's gradients, counted as a buffer."""
        received = self._ledger.add("buffers", shard.group.xp.empty(shard.share, full.dtype))
        request = self.comm.Ireduce_scatter_block(full, received, AVG, order=self._order)
        self._flights.append((shard, Flight(request, full, received)))
        while len(self._flights) > IN_FLIGHT:
            self._land()

    def _poll(self) -> None:
        """Let what is in flight get on, which it does only when it is called."""
        for _, flight in self._flights:
            flight.poll()

    def _land(self) -> None:
        """End the oldest reduce-scatter, and add its result to the shard's gradient."""
        shard, flight = self._flights.popleft()
        flight.land()
        full, received = flight.arrays
        self._ledger.remove("buffers", full)
        self._ledger.remove("buffers", received)
        with np.errstate(all="ignore"):
            received = received.astype(shard.group.update, copy=False)
            if shard.gradient is None:
                shard.gradient = self._ledger.add("gradients", received)
            else:
                shard.gradient += received

    def _drop_gradients(self) -> None:
        for shard in self._shards:
            if shard.gradient is not None:
                self._ledger.remove("gradients", shard.gradient)
                shard.gradient = None
        self._faults.clear()

    # -- step -------------------------------------------------------------------------

    def _step(
        self, missing: Sequence[str], settings: Sequence[str], max_norm: float | None, scale: float
    ) -> float | None:
        """Agree, clip, update and publish; every reduction has been started."""
        while self._flights:
            self._land()
        problem = None
        if self._faults:
            problem = "; ".join(self._faults[:3])
        elif missing:
            names = ", ".join(map(repr, missing[:3])) + (" and more" if len(missing) > 3 else "")
            problem = f"no gradient of {names}; with missing='zero' it counts as zero"
        try:
            agree(self.comm, "step", [*settings, *self._settings()], problem=problem)
            norm = None if max_norm is None else self._norm(max_norm, scale)
            factor = 1 / scale
            if norm is not None and max_norm is not None and norm > max_norm:
                factor *= max_norm / norm
            self.steps += 1
            self._update(factor)
        finally:
            self._drop_gradients()
        return norm

    def _settings(self) -> list[str]:
        return [
            f"step {self.steps}",
            f"optimizer {json.dumps(self.optimizer.settings(), default=repr)}",
        ]

    def _norm(self, max_norm: float, scale: float) -> float:
        """Return the norm of all gradients; the same bits on all ranks."""
        held = (one.gradient for one in self._shards if one.gradient is not None)
        total = np.array([total_squares(held)], np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, total)
        norm = math.sqrt(total[0]) / scale
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"step on rank {self.comm.rank}: the norm of the gradients is {norm}; nothing "
                "is changed, the gradients are dropped"
            )
        return norm

    def _update(self, factor: float) -> None:
        raise NotImplementedError

    # -- save and load ----------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, whole: bool = False) -> None:
        """Save parameters and optimizer state; collective, between steps.

        A folder with one file per shard and a manifest, on a file system that all ranks
        share; or, ``whole``, one ``.npz`` file, written by rank 0, to which the others
        send one group at a time. Either replaces an older one only when it is complete and on
        disk. Arrays of a device are copied to the host one by one, to the same files. Raises
        SavedStateError on all ranks if one cannot write or has gradients.
        """
        settings, fault = self.optimizer.settings(), self._busy("save")
        write = save_file if whole else save_shards
        write(self.comm, os.fspath(path), self._parts(), self.steps, settings, fault)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what `save` wrote, at this or another number of ranks, stage or bucket size.

        Collective, between steps; from arrays of the host to those of a device too, and back. The
        names of all parameters, their shapes and dtypes
        and the kind of optimizer must be the same; its numbers, such as the learning rate, stay
        those of this object. Raises SavedStateError on all ranks, with nothing changed, for
        what is foreign, incomplete or damaged.
        """
        fault, kind = self._busy("load"), str(self.optimizer.settings().get("kind"))
        steps, parts = load_state(self.comm, os.fspath(path), self._parts(), kind, fault)
        self.steps = steps
        for shard, part in zip(self._shards, parts, strict=True):
            shard.master = part.arrays.get("master", shard.master)
            shard.state = {name: part.arrays[name] for name in shard.state}
        self._publish(part.arrays["value"] for part in parts)

    def _busy(self, what: str) -> str:
        """Return why this rank is not between two steps, or an empty string."""
        held = bool(self._flights) or any(one.gradient is not None for one in self._shards)
        return f"it holds gradients; {what} between steps" if held or self._faults else ""

    def _parts(self) -> list[Part]:
        """Return what is saved of each shard, by kind."""
        parts = []
        for shard in self._shards:
            arrays = {"value": self._value(shard), **shard.state}
            if shard.master is not None:
                arrays["master"] = shard.master
            parts.append(Part(shard.group, shard.low, arrays))
        return parts

    def _value(self, shard: Shard) -> Array:
        raise NotImplementedError

    def _publish(self, values: Iterable[Array]) -> None:
        raise NotImplementedError

    # -- memory, end ------------------------------------------------------------------

    def memory(self, peak: bool = False) -> dict[str, int]:
        """Return the bytes that this rank holds, by kind; with ``peak`` the most there were.

        "parameters", "master" (float32 copies of 16-bit floats), "optimizer" (the slots),
        "gradients", "gathered" (layers in use or prefetched), "buffers" (what travels); on the
        host and on the device together.
        """
        counted = self._ledger.peak if peak else self._ledger.now
        masters = [one.master.nbytes for one in self._shards if one.master is not None]
        return {
            "parameters": self._parameter_bytes(),
            "master": sum(masters),
            "optimizer": sum(a.nbytes for one in self._shards for a in one.state.values()),
            **{kind: counted.get(kind, 0) for kind in ("gradients", "gathered", "buffers")},
        }

    def _parameter_bytes(self) -> int:
        raise NotImplementedError

    def free(self) -> None:
        """Complete what is in flight and free the duplicate of the communicator; collective."""
        while self._flights:
            self._land()
        self._drop_gradients()
        self.comm.Free()
