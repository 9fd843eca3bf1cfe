"""A case of the matrix whose buffers are on the deferred device, on some ranks or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deferred
import numpy as np
from deferred import BACKEND, Array, address_of
from exchange import Exchange
from kinds import Bytes, Rng
from layouts import Side
from mpi4py import MPI


class Image:
    """A memory of the host, and its place on the device."""

    def __init__(self, memory: Bytes) -> None:
        """Take poison of the same size; as well aligned as the memory is."""
        self.memory = memory
        self.before = memory.copy()
        self.passed = False
        raw = np.full(memory.size + 64, deferred.POISON, np.uint8)
        skip = (address_of(memory) - address_of(raw)) % 64
        self.inside = raw[skip : skip + memory.size]
        self.array = Array(address_of(self.inside), (memory.size,), np.uint8, owner=raw)

    def up(self) -> None:
        """Queue the copy up, on the current stream."""
        deferred.fill(self.array, self.before)

    def down(self) -> None:
        """Copy what a copy down on the current stream finds."""
        found = deferred.host(self.array)
        if self.memory.flags.writeable:
            self.memory[:] = found

    def holds(self, array: Any) -> bool:
        """Whether an array lies in the memory."""
        start = address_of(array) - address_of(self.memory)
        return start >= 0 and start + array.nbytes <= self.memory.size

    def of(self, array: Any) -> Array:
        """Return the device's counterpart of an array."""
        self.passed = True
        address = self.array.address + address_of(array) - address_of(self.memory)
        return Array(
            address,
            array.shape,
            array.dtype,
            None if array.flags.c_contiguous else array.strides,
            readonly=not array.flags.writeable,
            owner=self,
        )


class DeviceExchange(Exchange):
    """An exchange that passes device arrays to mpicoll; to the MPI's own calls as before."""

    image: Callable[[Bytes], Any] = Image
    new_stream: Callable[[], Any] = staticmethod(BACKEND.new_stream)
    _images: tuple[Any, ...] = ()

    def _sides(self, rng: Rng) -> tuple[Side | None, Side | None]:
        send, recv = super()._sides(rng)
        where = (self.case.number + 3 * self.rank) % 5
        on_device = [where != 3, where != 3]
        if where == 4:  # one side here, one there
            on_device[self.case.number // 5 % 2] = False
        if self.case.collective in ("gather", "reduce") and self.rank != self.case.root:
            on_device[1] = False  # not looked at
        sides = [
            side
            for side, on in zip((send, recv), on_device, strict=True)
            if side is not None and on
        ]
        self._images = tuple([type(self).image(side.memory) for side in sides])
        self._host = [
            (side.memory, side.memory.copy())
            for side in (send, recv)
            if side is not None and side not in sides
        ]
        return send, recv

    def _call(
        self, comm: MPI.Intracomm, form: str, args: list[Any], keywords: dict[str, Any]
    ) -> None:
        if not keywords:
            super()._call(comm, form, args, keywords)
            return
        args = [self._moved(one) for one in args]
        self.new_stream()
        if form == "persistent":
            self._persistent(comm, args, keywords)
        else:
            self._up()
            super()._call(comm, form, args, keywords)
        self.new_stream()  # the one that is current at Wait is not that of the start
        for image in self._images:
            if image.passed:
                image.down()

    def _persistent(self, comm: MPI.Intracomm, args: list[Any], keywords: dict[str, Any]) -> None:
        plan = getattr(comm, f"{self.case.method}_init")(*args, **keywords)
        for _ in range(2):
            self.new_stream()
            self._up()
            plan.Start()
            plan.Wait()
        plan.Free()

    def _up(self) -> None:
        for image in self._images:
            image.up()
        for memory, before in self._host:
            if memory.flags.writeable:
                memory[:] = before

    def _moved(self, spec: Any) -> Any:
        """Return a buffer specification with device arrays in place of the host's."""
        if isinstance(spec, (list, tuple)):
            return type(spec)([self._moved(one) for one in spec])
        try:
            array = np.asarray(memoryview(spec))
        except (TypeError, ValueError):
            if not isinstance(spec, np.ndarray):
                return spec
            array = spec  # of a dtype that has no buffer protocol
        for image in self._images:
            if array.nbytes and image.holds(array):
                return image.of(array)
        return spec
