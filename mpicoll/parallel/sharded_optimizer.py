"""ZeRO stages 1 and 2: whole parameters, sharded optimizer state and gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
from mpi4py import MPI

from mpicoll.parallel.agreement import wrapped
from mpicoll.parallel.flat import Group, bits, check, elements, plan
from mpicoll.parallel.library import Array
from mpicoll.parallel.optimizers import FlatOptimizer
from mpicoll.parallel.sharded_base import IN_FLIGHT, Sharded
from mpicoll.parallel.sharded_checks import (
    Missing,
    agree_groups,
    gradient_fault,
    options_fault,
    stage_fault,
    step_settings,
    wire_dtype,
)
from mpicoll.parallel.shards import Flight, Shard
from mpicoll.selection.choose import OrderWish

#: As in `DataParallel`.
BUCKET_BYTES = 25 << 20


class ShardedOptimizer(Sharded):
    """An optimizer whose state, and with ``stage=2`` whose gradients, are cut into shards.

    ``params`` are arrays by name in order of use, which `step` updates in place; NumPy's, or
    CuPy's of one device, where their gradients and all that is kept for them lie too: float16,
    bfloat16, float32, float64, complex64 or complex128, of any shape and memory order; those
    named in ``frozen`` may hold any numbers, and are only kept alike and saved. 16-bit floats
    have float32 copies, in shards, on which the optimizer works. Per step::

        for name, gradient in backward():     # any order; reverse order of use is fastest
            optimizer.ready(name, gradient)
        optimizer.step(max_norm=1.0)

    or ``optimizer.step(gradients)``. After it all parameters have the same bits on all ranks:
    each element is computed on one rank and sent to the others.

    Stage 1 keeps the gradients of all parameters on this rank until `step`; stage 2 sends each
    bucket as soon as it is full, in one order on all ranks, and keeps its mean in shards.
    Sent per step, with n the bytes of all parameters: reduce-scatter and allgather, n (P-1)/P
    each, by buckets of ``bucket_bytes``; an allgather of 24 bytes per rank that compares what
    the ranks passed; and with ``max_norm`` an allreduce of 8 bytes.

    ``wire="float32"`` sends the gradients of 16-bit floats in float32. ``order="rank"`` gives
    the bits of a sum from left to right over ranks. ``root`` is the rank whose values all start
    from; None trusts that they are alike. Messages go over a duplicate of ``comm``; `free`
    frees it.

    Raises ValueError on every rank if arguments differ or one rank's are wrong.
    """

    def __init__(
        self,
        params: Mapping[str, Array],
        optimizer: FlatOptimizer,
        comm: MPI.Intracomm | None = None,
        *,
        stage: Literal[1, 2] = 2,
        frozen: Iterable[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        wire: str | None = None,
        order: OrderWish = None,
        root: int | None = 0,
    ) -> None:
        """Compare arguments, cut the shards, take the root's values; collective."""
        given = wrapped(comm)
        still = frozenset(frozen)
        problem = options_fault(wire, order, root, given.size) or check(params, still, True)
        problem = problem or stage_fault(stage, bucket_bytes)
        groups: list[Group] = []
        if not problem:
            groups = plan(params, still, wire_dtype(wire), bucket_bytes, names=[*params][::-1])
        options = [f"stage={stage!r}", f"order={order!r}", f"root={root!r}"]
        agree_groups(given, "ShardedOptimizer", groups, optimizer, options, problem)
        super().__init__(given, groups, optimizer, order)
        self.params = dict(params)
        self.stage = stage
        self._trained = [one for one in self._shards if one.group.trainable]
        self._places = {
            entry.name: (number, entry)
            for number, shard in enumerate(self._trained)
            for entry in shard.group.entries
        }
        self._full: dict[int, Array] = {}
        self._filled: set[str] = set()
        self._ready: set[str] = set()
        self._missing: set[str] = set()
        self._left = [len(one.group.entries) for one in self._trained]
        self._started = 0
        if root is not None:
            self._align(root)
        for shard in self._trained:
            shard.adopt(self._value(shard))

    def _align(self, root: int) -> None:
        for shard in self._shards:
            full = shard.group.xp.empty(shard.group.count, shard.group.element)
            shard.group.read(self.params, 0, full)
            self.comm.Bcast(bits(full), root)
            shard.group.write(full, self.params)

    # -- gradients --------------------------------------------------------------------

    def ready(self, name: str, gradient: Array) -> None:
        """Hand over the gradient of a parameter, which is copied.

        In stage 2 its bucket is sent when it is full and all buckets before it are sent; then
        the call may wait for an earlier bucket, and so for the other ranks.

        Raises ValueError for an unknown or frozen name, a second call in one pass, another
        shape or place, or a dtype that the parameter's does not hold exactly. Nothing is sent
        then, and `step` raises on all ranks.
        """
        fault = self._fault(name, gradient)
        if fault:
            self._faults.append(fault)
            raise ValueError(f"ready on rank {self.comm.rank}: {fault}")
        number, entry = self._places[name]
        full = self._open(number)
        target = full[entry.start : entry.stop]
        given = elements(gradient)
        with np.errstate(all="ignore"):
            if name in self._filled:
                target += given
            else:
                target[...] = given
        self._filled.add(name)
        self._ready.add(name)
        self._left[number] -= 1
        if self.stage == 2:
            self._start(only_full=True)
            self._poll()

    def accumulate(self) -> None:
        """End a batch whose gradients are to be added to those of the next; collective.

        Stage 2 sends what is left and keeps the mean over ranks in shards, stage 1 adds on this
        rank and sends nothing. The gradient of the step is the sum over batches of the
        mean over ranks. `step` ends the last batch.
        """
        self._end_pass()

    def step(
        self,
        gradients: Mapping[str, Array] | None = None,
        *,
        max_norm: float | None = None,
        loss_scale: float = 1.0,
        missing: Missing = "error",
    ) -> float | None:
        """Update all parameters by the mean of the gradients; return their norm; collective.

        ``gradients`` are handed over as by `ready`, what was ready before aside. They are divided
        by ``loss_scale``, then scaled so that the norm over all parameters is at most
        ``max_norm``; without one no norm is computed and None comes back.

        Raises ValueError on all ranks if a gradient is missing or was refused on one, or if
        arguments or the optimizer's numbers differ; FloatingPointError on all ranks if there
        is a ``max_norm`` and the norm is not finite. Then nothing is changed, the
        gradients are dropped, and the next step can be taken.
        """
        for name, gradient in (gradients or {}).items():
            try:
                self.ready(name, gradient)
            except ValueError:
                continue  # kept in _faults, for all ranks to raise
        self._end_pass()
        if self.stage == 1:
            self._start(only_full=False)
        lost = sorted(self._missing) if missing == "error" else []
        self._started = 0
        self._filled.clear()
        self._missing.clear()
        settings = step_settings(max_norm, loss_scale, missing, self._faults)
        return self._step(lost, settings, max_norm, loss_scale)

    def _fault(self, name: str, gradient: object) -> str:
        place = self._places.get(name)
        if place is None:
            why = "which is frozen" if name in self.params else "which is no parameter"
            return f"a gradient of {name!r}, {why}"
        if name in self._ready:
            return f"the gradient of {name!r} twice; accumulate() ends a batch, step() the last"
        return gradient_fault(self._trained[place[0]].group, name, gradient)

    def _open(self, number: int) -> Array:
        """Return the buffer of a bucket's gradients, made when first needed."""
        full = self._full.get(number)
        if full is None:
            group = self._trained[number].group
            full = group.xp.empty(group.padded(self.comm.size), group.wire)
            full[group.count :] = 0
            self._full[number] = self._ledger.add(self._kind, full)
        return full

    @property
    def _kind(self) -> str:
        return "gradients" if self.stage == 1 else "buffers"

    def _start(self, only_full: bool) -> None:
        """Send the next buckets, in their order, and no other on any rank."""
        while self._started < len(self._trained):
            number = self._started
            if only_full and self._left[number]:
                return
            full = self._open(number)
            for entry in self._trained[number].group.entries:
                if entry.name not in self._filled:
                    full[entry.start : entry.stop] = 0
            del self._full[number]
            if self.stage == 1:  # from here on it is a buffer that travels
                self._ledger.remove("gradients", full)
                self._ledger.add("buffers", full)
            self._started += 1
            self._reduce(self._trained[number], full)

    def _end_pass(self) -> None:
        self._missing |= self._places.keys() - self._ready
        if self.stage == 2:
            self._start(only_full=False)
            self._started = 0
            self._filled.clear()
        self._ready.clear()
        self._left = [len(one.group.entries) for one in self._trained]

    # -- update -----------------------------------------------------------------------

    def _busy(self, what: str) -> str:
        self._refuse_within_pass(what)
        held = f"it holds gradients; {what} between steps" if self._full else ""
        return held or super()._busy(what)

    def _refuse_within_pass(self, what: str) -> None:
        """Raise here and now: the ranks may have begun different numbers of buckets."""
        if self._ready:
            raise RuntimeError(
                f"{what} on rank {self.comm.rank}: within a step; call step() first"
            )

    def free(self) -> None:
        """Free the duplicate of the communicator; collective, between steps.

        Raises RuntimeError within a step.
        """
        self._refuse_within_pass("free")
        super().free()

    def _value(self, shard: Shard) -> Array:
        """Return this rank's elements, taken from the caller's arrays."""
        value: Array = shard.group.xp.empty(shard.share, shard.group.element)
        shard.group.read(self.params, shard.low, value)
        return value

    def _update(self, factor: float) -> None:
        def updated() -> Iterator[Array]:
            for shard in self._trained:
                value = self._value(shard)
                shard.update(value, self.optimizer, factor, self.steps)
                yield value

        self._allgather(self._trained, updated())

    def _publish(self, values: Iterable[Array]) -> None:
        self._allgather(self._shards, values)

    def _allgather(self, shards: Iterable[Shard], values: Iterable[Array]) -> None:
        """Send each updated shard to all ranks, while the next is being updated."""
        flights: deque[tuple[Shard, Flight]] = deque()
        for shard, value in zip(shards, values, strict=True):
            full = shard.group.xp.empty(shard.group.padded(self.comm.size), value.dtype)
            self._ledger.add("buffers", full)
            request = self.comm.Iallgather(bits(value), bits(full))
            flights.append((shard, Flight(request, full, value)))
            if len(flights) == IN_FLIGHT:
                self._arrive(*flights.popleft())
        while flights:
            self._arrive(*flights.popleft())

    def _arrive(self, shard: Shard, flight: Flight) -> None:
        flight.land()
        shard.group.write(flight.arrays[0], self.params)
        self._ledger.remove("buffers", flight.arrays[0])

    def _parameter_bytes(self) -> int:
        return sum(value.nbytes for value in self.params.values())
