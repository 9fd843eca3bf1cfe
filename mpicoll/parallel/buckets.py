"""Buckets: the gradients of several parameters in one flat array, reduced in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.parallel.compression import Compression
from mpicoll.parallel.library import Array, library, place, scale

if TYPE_CHECKING:  # laying out buckets needs no MPI
    from mpicoll.runtime.requests import Request


def layout(params: Mapping[str, Array], bucket_bytes: int) -> list[list[str]]:
    """Return the names of each bucket, in the order in which the buckets are sent.

    Parameters are taken in reverse order of use, as backward has their gradients. A bucket
    holds one dtype in one place and at most ``bucket_bytes``, or one larger parameter; its turn
    comes with its last parameter. Depends only on what the ranks have agreed on.
    """
    done: list[tuple[int, list[str]]] = []
    filling: dict[tuple[str, np.dtype[Any]], tuple[int, int, list[str]]] = {}
    for at, (name, param) in enumerate(reversed(list(params.items()))):
        kind = place(param), param.dtype
        last, nbytes, names = filling.get(kind, (at, 0, []))
        if names and nbytes + param.nbytes > bucket_bytes:
            done.append((last, names))
            nbytes, names = 0, []
        filling[kind] = at, nbytes + param.nbytes, [*names, name]
    done += [(last, names) for last, _, names in filling.values()]
    return [names for _, names in sorted(done)]


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one gradient. ``filled``: it holds a sum; ``ready``: and awaits its turn."""

    name: str
    bucket: Bucket
    view: Array
    filled: bool = False
    ready: bool = False

    def add(self, grad: Array) -> None:
        """Set or, where there is a sum already, add a gradient."""
        # A warning that is turned into an error on one rank would leave the others waiting.
        with np.errstate(all="ignore"):
            if self.filled:
                self.view += grad
            else:
                self.view[...] = grad
        self.filled = True


class Bucket:
    """A flat array of one dtype with a slot per gradient, kept from step to step.

    ``message`` is what travels: the array itself, or what a hook makes of it.
    """

    def __init__(
        self, names: Sequence[str], params: Mapping[str, Array], hook: Compression | None
    ) -> None:
        first = params[names[0]]
        xp, count = library(first), sum(params[name].size for name in names)
        self.flat: Array = xp.zeros(count, first.dtype)
        self._hook = hook if first.dtype == np.float32 else None
        self.message = self.flat if self._hook is None else xp.zeros(count, self._hook.dtype)
        self.request: Request | None = None
        self.slots: list[Slot] = []
        start = 0
        for name in names:
            stop = start + params[name].size
            view = self.flat[start:stop].reshape(params[name].shape)
            self.slots.append(Slot(name, self, view))
            start = stop
        self.missing = len(self.slots)

    def compress(self) -> None:
        """Make the message, before it is sent."""
        if self._hook is not None:
            self._hook.compress(self.message, self.flat)

    def expand(self) -> None:
        """Take the message apart, when it has been reduced."""
        if self._hook is not None:
            self._hook.expand(self.flat, self.message)

    def complete(self) -> None:
        """Set what no gradient came for to zero."""
        for slot in self.slots:
            if not slot.filled:
                slot.view[...] = 0
        self.missing = 0

    def restart(self) -> None:
        """Forget what was ready: the next gradients are those of a new step."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.filled = slot.ready = False

    def scale(self, factor: float) -> None:
        """Multiply the gradients, 16-bit ones in float32."""
        scale(self.flat, factor)
