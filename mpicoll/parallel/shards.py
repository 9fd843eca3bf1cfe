"""A rank's share of a group of parameters, arrays in flight, and the bytes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpicoll.comm import Comm
from mpicoll.parallel.flat import Group, bits, is_half
from mpicoll.parallel.library import Array, narrow, widen
from mpicoll.parallel.optimizers import FlatOptimizer
from mpicoll.runtime.requests import Request


class Ledger:
    """Bytes by kind, and the most there have been."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def add(self, kind: str, array: Array) -> Array:
        """Count an array in, and return it."""
        self.now[kind] = self.now.get(kind, 0) + array.nbytes
        self.peak[kind] = max(self.peak.get(kind, 0), self.now[kind])
        return array

    def remove(self, kind: str, array: Array) -> None:
        """Count an array out."""
        self.now[kind] -= array.nbytes


class Flight:
    """Arrays in the hands of a non-blocking collective, until `land` returns."""

    def __init__(self, request: Request, *arrays: Array) -> None:
        self.request = request
        self.arrays = arrays

    def land(self) -> None:
        """Wait for the end; harmless when it is reached already."""
        self.request.Wait()

    def poll(self) -> None:
        """Let the collective get on."""
        self.request.Test()


class Shard:
    """What one rank keeps of a group: elements ``low`` to ``high``, padding included.

    ``value`` is None where the caller's arrays hold the values; ``master`` is the float32
    copy of 16-bit floats; ``gradient`` is None between steps. All lie where the group does.
    """

    __slots__ = ("gradient", "group", "high", "low", "master", "state", "value")

    def __init__(self, group: Group, rank: int, size: int, slots: Sequence[str]) -> None:
        share = group.share(size)
        self.group = group
        self.low, self.high = rank * share, (rank + 1) * share
        self.value: Array | None = None
        self.master: Array | None = None
        self.gradient: Array | None = None
        names = slots if group.trainable else ()
        self.state = {name: group.xp.zeros(share, group.update) for name in names}

    @property
    def share(self) -> int:
        return self.high - self.low

    def adopt(self, value: Array) -> None:
        """Make the float32 copy of a 16-bit ``value``, if this group has one."""
        if self.group.trainable and is_half(self.group.dtype):
            self.master = self.group.xp.empty(self.share, np.float32)
            widen(self.master, value)

    def update(self, value: Array, optimizer: FlatOptimizer, factor: float, step: int) -> None:
        """Run the optimizer on ``value``, this rank's elements in the group's dtype."""
        gradient = self.gradient
        if gradient is None:
            gradient = self.group.xp.zeros(self.share, self.group.update)
        work = value if self.master is None else self.master
        # Warnings are off: one turned into an error on one rank leaves the others waiting.
        with np.errstate(all="ignore"):
            if factor != 1:
                gradient *= factor
            optimizer.update(work, gradient, self.state, step)
        if self.master is not None:
            narrow(value, self.master)


def spread(comm: Comm, shards: Sequence[Shard], values: Mapping[str, Array], root: int) -> None:
    """Give every rank its shard of the root's values, one scatter per group."""
    for shard in shards:
        group = shard.group
        shard.value = group.xp.empty(shard.share, group.element)
        full = None
        if comm.rank == root:
            full = group.xp.empty(group.padded(comm.size), group.element)
            group.read(values, 0, full)
        comm.Scatter(None if full is None else bits(full), bits(shard.value), root)
        shard.adopt(shard.value)
