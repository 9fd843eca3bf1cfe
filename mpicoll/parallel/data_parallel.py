"""Data parallel training: every rank holds all parameters, and gradients are averaged.

Gradients are packed into buckets in reverse order of use; each bucket is reduced while backward
goes on to the next (S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020). Buckets are started strictly in one order, so ranks whose gradients come in
different orders never meet in different buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.buckets import Bucket, Slot, layout
from mpicoll.parallel.compression import Compression
from mpicoll.parallel.library import EXPECTED, Array, is_array, place, total_squares
from mpicoll.parallel.owned import Owner
from mpicoll.parallel.parameters import described, digested, hook_of, problem_of
from mpicoll.runtime.operators import AVG, AverageOp
from mpicoll.schedule.partition import offsets, split

#: The size that the paper found good, and torch's default.
BUCKET_BYTES = 25 << 20

_OPS: dict[str, MPI.Op | AverageOp] = {"mean": AVG, "sum": MPI.SUM}


class DataParallel(Owner):
    """Averages the gradients of all ranks, bucket by bucket, while backward goes on.

    ``params`` are the parameters by name, in order of use; arrays of any shape, memory order and
    floating or complex dtype, which the caller updates in place; NumPy's, or CuPy's of one
    device, whose gradients and buckets stay there. Collective: the ranks compare names, shapes,
    dtypes and options, then take rank 0's values. Per step::

        for name, grad in backward():      # any order, reverse order of use is fastest
            data_parallel.ready(name, grad)
        for name, grad in data_parallel.finish().items():
            params[name] -= rate * grad

    Since every rank starts from the same bits and gets the same bits of each mean, an update
    that computes the same everywhere leaves all parameters bitwise equal; `verify` shows it.

    ``bucket_bytes`` bounds a bucket, which holds one dtype; a larger parameter has its own.
    ``op`` is "mean", or "sum" where losses are already divided by the size of the whole batch
    (exact for uneven shares). ``compress`` "bf16" or "fp16" sends float32 gradients at half size;
    the bound is in `mpicoll.parallel.compression`, whose `Compression` is the hook for others.

    Sent per step: one allreduce per bucket, each gradient once. The buckets are kept from step
    to step; allreduces in flight have scratch of their own. Means are sums divided by the number
    of ranks (`mpicoll.AVG`); those of 16-bit floats are folded and divided in float32 and
    rounded once. Messages go over a duplicate of ``comm``, so collectives of the caller in
    between, such as those of `SyncBatchNorm`, never meet them. `free` frees it.

    Raises ValueError on every rank if arguments differ or one rank's are wrong, naming the first.
    """

    def __init__(
        self,
        params: Mapping[str, Array],
        comm: MPI.Intracomm | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        op: str = "mean",
        compress: str | Compression | None = None,
    ) -> None:
        """Compare parameters, make the buckets, and broadcast from rank 0; collective."""
        given = wrapped(comm)
        hook, problem = hook_of(compress)
        problem = problem or problem_of(params, bucket_bytes, op, _OPS)
        entries: list[str] = []
        if problem is None:
            options = (f"bucket_bytes={bucket_bytes}", f"op={op!r}")
            entries = [*options, f"compress={hook.name if hook else None!r}"]
            entries += described(params)
        agree(given, "DataParallel", entries, problem=problem)
        self.comm: Comm = given.Dup()
        self.params: Mapping[str, Array] = MappingProxyType(dict(params))
        self._op = _OPS[op]
        self._buckets = [
            Bucket(names, self.params, hook) for names in layout(self.params, bucket_bytes)
        ]
        slots = {slot.name: slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = {name: slots[name] for name in self.params}
        #: Views into the buckets: the means after `finish`, until the next `ready`.
        self.gradients: Mapping[str, Array] = MappingProxyType(
            {name: slot.view for name, slot in self._slots.items()}
        )
        self._started = self._ended = 0
        self._accumulating = self._broken = False
        self.broadcast()

    # -- parameters -------------------------------------------------------------------

    def broadcast(self, root: int = 0) -> None:
        """Set the parameters of all ranks to those of one, as after loading a checkpoint.

        Collective, between steps: one broadcast per bucket, in the memory of the gradients.
        Raises RuntimeError within a step or with accumulated gradients.
        """
        if any(slot.filled for slot in self._slots.values()):
            raise RuntimeError(self._said("broadcast within a step; call finish first"))
        for bucket in self._buckets:
            if self.comm.rank == root:
                for slot in bucket.slots:
                    slot.view[...] = self.params[slot.name]
            self.comm.Bcast(bucket.flat, root)
            for slot in bucket.slots:
                self.params[slot.name][...] = slot.view
            bucket.flat[...] = 0

    def verify(self) -> None:
        """Show that the parameters have the same bits on all ranks; collective.

        One allgather of 24 bytes per rank. Raises ValueError on every rank, naming the first
        parameter that differs from rank 0's.
        """
        agree(self.comm, "verify", [digested(*item) for item in self.params.items()])

    # -- one step ---------------------------------------------------------------------

    def ready(self, name: str, grad: Array | None = None) -> None:
        """Hand over the gradient of a parameter; copied, and added to what was accumulated.

        It is sent with its bucket as soon as all gradients of that bucket are ready and all
        buckets before it have been started. Without ``grad``, or with ``gradients[name]``
        itself, the caller has written the gradient (or the accumulated sum) there: no copy.

        Raises ValueError for an unknown name, a second call in one step (a parameter that is
        used twice has one gradient: the sum), another shape or dtype than the parameter's. Then
        nothing is sent and nothing changed; the other ranks come to wait for this one in
        `finish`. Go on here by another `ready` or with `finish`, for which the parameter
        is unused; or end the job, which ``python -m mpi4py`` does when an error is not caught.
        """
        self._refuse_if_broken()
        slot = self._slot(name)
        if grad is None or grad is slot.view:
            slot.filled = True
        else:
            self._check(name, grad)
            slot.add(grad)
        if self._accumulating:
            return
        slot.ready = True
        slot.bucket.missing -= 1
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start()
        self._complete("Test")

    def finish(self) -> Mapping[str, Array]:
        """Send what is left, wait for all buckets, and return the means by name; collective.

        A parameter that was never ready on this rank counts as zero, or as what was accumulated
        before; one that is unused on all ranks has a gradient of zeros. The arrays are
        `gradients`: views, the caller's to change until the next `ready`. Within `no_sync`
        nothing is sent and they are this rank's sums so far.

        What an allreduce raises, such as CollectiveTimeout, comes out of here or of `ready`; from
        then on both raise RuntimeError.
        """
        self._refuse_if_broken()
        if self._accumulating:
            return self.gradients
        for bucket in self._buckets:
            if bucket.missing:
                bucket.complete()
        while self._started < len(self._buckets):
            self._start()
        self._complete("Wait")
        self._started = self._ended = 0
        for bucket in self._buckets:
            bucket.restart()
        return self.gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: `ready` adds them up on this rank.

        The next step outside adds its own and reduces the sums, so that N batches within and
        one outside give the mean over ranks of the sum over N + 1 batches (not of their mean), as
        in torch. All ranks must accumulate alike: a rank that is within sends nothing.

        Raises RuntimeError within a step: `finish` comes first.
        """
        if any(slot.ready for slot in self._slots.values()):
            raise RuntimeError(self._said("no_sync within a step; call finish first"))
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def clip(self, max_norm: float) -> float:
        """Scale the means so that their global norm is at most ``max_norm``; return it unscaled.

        Collective, after `finish`, with the same ``max_norm`` on all ranks. Every rank squares
        its share of the elements in float64; one allreduce of 8 bytes gives all ranks the same
        bits of the norm. It bounds the norm up to the rounding of the scaled gradients. A norm
        that is infinite makes NaN of what is infinite and zero of the rest; with a NaN nothing
        is scaled. Raises ValueError for a ``max_norm`` that is not above zero, RuntimeError
        within a step; both before anything is sent.
        """
        if not max_norm > 0:
            raise ValueError(self._said(f"max_norm {max_norm!r}; expected a number above 0"))
        if any(slot.filled for slot in self._slots.values()):
            raise RuntimeError(self._said("clip within a step; call finish first"))
        shares = []
        for bucket in self._buckets:
            bounds = offsets(split(bucket.flat.size, self.comm.size))
            shares.append(bucket.flat[slice(*bounds[self.comm.rank : self.comm.rank + 2])])
        total = np.array([total_squares(shares)], np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, total)
        norm = math.sqrt(total[0])
        if norm > max_norm:
            for bucket in self._buckets:
                bucket.scale(max_norm / norm)
        return norm

    # -- end --------------------------------------------------------------------------

    def free(self) -> None:
        """Free the duplicate of the communicator; collective, between steps."""
        if self._started:
            raise RuntimeError(self._said("free within a step; call finish first"))
        self.comm.Free()

    # -- inner ------------------------------------------------------------------------

    def _said(self, what: str) -> str:
        return f"DataParallel on rank {self.comm.rank}: {what}"

    def _slot(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            names = [repr(known) for known in self._slots]
            known = ", ".join(names[:10] + ["…"] * (len(names) > 10)) or "none"
            raise ValueError(self._said(f"unknown parameter {name!r}; known: {known}"))
        if slot.ready:
            raise ValueError(
                self._said(
                    f"the gradient of {name!r} is ready for the second time; hand over the sum "
                    "of a parameter that is used twice, and call finish after each step"
                )
            )
        return slot

    def _check(self, name: str, grad: Array) -> None:
        param = self.params[name]
        what = f"the gradient of {name!r}"
        if not is_array(grad):
            kind = type(grad).__name__
            raise ValueError(self._said(f"{what} is of type {kind}; expected {EXPECTED}"))
        if place(grad) != place(param):
            where = f"{what} is on {place(grad)}; expected {place(param)}, as the parameter; "
            where += "copy it there, by cupy.asarray or its method get"
            raise ValueError(self._said(where))
        if grad.shape != param.shape or grad.dtype != param.dtype:
            raise ValueError(
                self._said(
                    f"{what} has shape {grad.shape} and dtype {grad.dtype}; expected "
                    f"{param.shape} and {param.dtype}, as the parameter has"
                )
            )

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        bucket.compress()
        bucket.request = self.comm.Iallreduce(MPI.IN_PLACE, bucket.message, op=self._op)
        self._started += 1

    def _complete(self, how: str) -> None:
        """End buckets in order: all by "Wait", those that have been reduced by "Test".

        Most of what is in flight moves only when mpicoll is called, so `ready` tests.
        """
        while self._ended < self._started:
            bucket = self._buckets[self._ended]
            try:
                if not getattr(bucket.request, how)():
                    return
            except Exception:
                self._broken = True
                raise
            bucket.request = None
            bucket.expand()
            self._ended += 1

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError(
                self._said("an allreduce failed before, so gradients are lost; make a new one")
            )
