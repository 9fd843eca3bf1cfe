"""What is asked of a device: streams, events, memory, copies, folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.datatypes import DType, Item

if TYPE_CHECKING:
    from mpicoll.runtime.executor import Bytes
    from mpicoll.runtime.operators import Reducer

Stream: TypeAlias = Any
Event: TypeAlias = Any
Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Kernel(NamedTuple):
    """What a fold computes: the operator by name, and the type of the items.

    ``mean_of`` operands are divided by their number before they are rounded, ``host`` is
    the same fold on host memory.
    """

    operator: str
    dtype: DType
    mean_of: int
    host: Reducer


class Backend(Protocol):
    """What a device library has to offer. All but `over` and `pinned` return at once.

    Addresses are those of device memory or of pinned memory.
    """

    def current(self, owner: object, device: int) -> Stream:
        """Return the stream on which this thread's work on ``owner`` is queued now."""

    def streams(self, device: int) -> tuple[Stream, Stream]:
        """Return two streams that wait for no other."""

    def allocate(self, nbytes: int, stream: Stream) -> tuple[int, object]:
        """Return the address of device memory for work on ``stream``, and its owner."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return host memory that the device copies from and to by itself."""

    def record(self, stream: Stream) -> Event:
        """Return an event that is over when all work queued so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is queued from now on wait for an event."""

    def over(self, event: Event, wait: bool) -> bool:
        """Return whether an event is over; ``wait`` for it if asked to."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy."""

    def gather(self, target: int, source: int, layout: Layout, count: int, stream: Stream) -> None:
        """Queue a copy of the bytes of ``count`` items to dense memory."""

    def scatter(
        self, target: int, source: int, layout: Layout, count: int, stream: Stream
    ) -> None:
        """Queue a copy of dense bytes to their places in ``count`` items."""

    def kernel(self, reduction: Reducer) -> Kernel | None:
        """Return the kernel of an operator, None where there is none."""

    def fold(
        self, kernel: Kernel, target: int, operands: Sequence[int], nbytes: int, stream: Stream
    ) -> None:
        """Queue the fold of ``nbytes`` from the left; ``target`` may be one of the operands."""

    def divide(self, kernel: Kernel, target: int, nbytes: int, size: int, stream: Stream) -> None:
        """Queue the division of a result by a number of ranks."""

    def direct(self) -> bool:
        """Return whether the MPI takes device pointers, and surely so."""


class Layout(NamedTuple):
    """Where the bytes of one item lie: ``positions`` from its address, -1 - 2**62 for none."""

    positions: Positions
    extent: int


#: Of a byte that belongs to the signature and that the MPI does not move.
NOWHERE = -1 - (1 << 62)


def layout_of(item: Item) -> Layout:
    """Return where the bytes of an item lie, in the order of its signature.

    Asked of the MPI: it packs pictures of an item whose bytes are digits of their place.
    """
    from mpicoll.runtime.buffers import Memory, Piece

    low = min(0, item.true_lb)
    reach = max(item.true_ub, item.extent, 1) - low
    numbers = np.arange(1, reach + 1, dtype=np.int64)
    found = np.zeros(item.nbytes, np.int64)
    for digit in range(0, int(reach).bit_length(), 8):
        picture = (numbers >> digit & 255).astype(np.uint8)
        packed = np.zeros(item.nbytes, np.uint8)
        address = MPI.Get_address(cast(Any, picture)) - low
        Memory(address, None, True, picture).pack(Piece(0, 1, item), packed)
        found += packed.astype(np.int64) << digit
    return Layout(np.where(found > 0, found - 1 + low, NOWHERE), item.extent)
