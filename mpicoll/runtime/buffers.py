"""The memory of one side of a call: its blocks, as dense bytes, and what else lies there.

Schedules work on dense memory: the bytes of the type signature, item after item, block
after block in rank order. Where the caller's memory is that already, `Buffer.source` and
`Buffer.target` are views of it. Else (gaps between blocks, derived datatypes) the source is
a packed copy, and the target is scratch whose `finish` unpacks it and touches nothing but
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.datatypes import Item
from mpicoll.runtime.executor import MESSAGE_LIMIT, Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.staging import DeviceMemory

#: What has to be done at the start of a call (pack) or at its end (unpack); None is nothing.
Chore: TypeAlias = Callable[[], None] | None

_EMPTY: Bytes = np.empty(0, np.uint8)


class Piece(NamedTuple):
    """``total`` items one after another, from byte ``start`` of a memory."""

    start: int
    total: int
    item: Item

    @property
    def nbytes(self) -> int:
        """The bytes of the signature."""
        return self.total * self.item.nbytes

    def reach(self) -> tuple[int, int]:
        """Return first and last + 1 byte of the data."""
        start, total, item = self
        if item.dense:
            return start, start + total * item.nbytes
        far = (total - 1) * item.extent
        return start + item.true_lb + min(0, far), start + item.true_ub + max(0, far)


class Buffer:
    """One side of a collective call: memory, item type, and the blocks in it.

    ``counts`` are items per block and ``block_bytes`` bytes of their signature, one block
    in most calls and one per rank in those with blocks; ``item`` is the item type, in the
    w-forms that of the first block. Blocks of equal length lie one after another and are
    one piece of memory; else every block is a piece.
    """

    __slots__ = ("_memory", "_pieces", "address", "block_bytes", "counts", "item", "nbytes")

    def __init__(
        self,
        memory: Memory | DeviceMemory,
        item: Item,
        counts: tuple[int, ...],
        pieces: tuple[Piece, ...],
        fits: bool = False,
    ) -> None:
        """Join the parts; ``fits`` says that ``pieces`` were inferred from ``memory``."""
        self._memory = memory
        self._pieces = pieces
        self.address = memory.address
        self.item = item
        self.counts = counts
        if len(pieces) == 1:
            self.nbytes = pieces[0].nbytes
            self.block_bytes = (self.nbytes // len(counts),) * len(counts)
        else:
            self.block_bytes = tuple([piece.nbytes for piece in pieces])
            self.nbytes = sum(self.block_bytes)
        if memory.length is not None and not fits:
            self._inside(memory.length)

    @property
    def count(self) -> int:
        """The items of the first block."""
        return self.counts[0]

    @property
    def device(self) -> DeviceMemory | None:
        """The memory where it is on a device."""
        return self._memory if isinstance(self._memory, DeviceMemory) else None

    def source(self, copied: bool = False) -> tuple[Bytes, Chore]:
        """Return the dense bytes to send, or those in a receive buffer, and what loads them.

        Without a load they are a view; with ``copied`` they never are. A persistent plan
        loads again at every start.
        """
        view = self._dense()
        if view is not None and not copied:
            return view, None
        packed = self._scratch()
        if view is not None:
            return packed, partial(_fill, packed, view)
        return packed, partial(self._each, self._memory.pack, packed)

    def target(self, keep: bool = False) -> tuple[Bytes, Chore, Chore]:
        """Return dense bytes to receive into, what loads them, what moves them to their places.

        Only with ``keep`` is there a load: they then begin as what the buffer holds, so
        that what no message fills stays as it was, such as the tail of an in-place
        reduce-scatter.
        """
        view = self._dense()
        if view is not None:
            return view, None, None
        packed = self._scratch()
        load = partial(self._each, self._memory.pack, packed) if keep else None
        return packed, load, partial(self._each, self._memory.unpack, packed)

    def _scratch(self) -> Bytes:
        """Return dense memory for the data, near to where it is."""
        if self.device is not None:
            return cast(Bytes, self.device.scratch(self.nbytes))
        return np.empty(self.nbytes, np.uint8)

    def _each(self, move: Callable[[Piece, Bytes], None], packed: Bytes) -> None:
        low = 0
        for piece in self._pieces:
            high = low + piece.nbytes
            move(piece, packed[low:high])
            low = high

    def own_datatypes(self) -> list[MPI.Datatype]:
        """Go on with copies of derived datatypes, and return them.

        The caller may free a datatype as soon as a call has begun, but a request or a plan
        still unpacks by it, and operators are still called with it.
        """
        owned: list[MPI.Datatype] = []
        copies: dict[int, Item] = {}
        for piece in self._pieces:
            datatype = piece.item.datatype
            if datatype is None or datatype.is_predefined or datatype.handle in copies:
                continue
            owned.append(datatype.Dup())
            copies[datatype.handle] = piece.item._replace(datatype=owned[-1])

        def copy(item: Item) -> Item:
            return item if item.datatype is None else copies.get(item.datatype.handle, item)

        self._pieces = tuple([piece._replace(item=copy(piece.item)) for piece in self._pieces])
        self.item = copy(self.item)
        return owned

    def pieces(self, block: int | None = None) -> list[Piece]:
        """Return the pieces that hold data, those of one block if one is named."""
        if block is None:
            found: Sequence[Piece] = self._pieces
        elif len(self._pieces) == len(self.counts):
            found = self._pieces[block : block + 1]
        else:
            start, _, item = self._pieces[0]
            count = self.counts[block]
            found = [Piece(start + block * count * item.extent, count, item)]
        return [piece for piece in found if piece.nbytes]

    def extents(self, block: int | None = None) -> tuple[int, int]:
        """Return first and last + 1 address of the data, or of one block of it."""
        if block is None and len(self._pieces) == 1 and self.nbytes:
            low, high = self._pieces[0].reach()  # most calls; the rest would do, but slower
            return self.address + low, self.address + high
        reaches = [piece.reach() for piece in self.pieces(block)]
        if not reaches:
            return 0, 0
        low, high = min(low for low, _ in reaches), max(high for _, high in reaches)
        return self.address + low, self.address + high

    def paint(self, canvas: Bytes, address: int) -> None:
        """Set the bytes of ``canvas``, a picture of memory at ``address``, that are data."""
        offset = MPI.Get_address(cast(Any, canvas)) - address
        memory = Memory(self.address + offset, None, False, (canvas,))
        for piece in self.pieces():
            memory.unpack(piece, np.ones(piece.nbytes, np.uint8))

    def _dense(self) -> Bytes | None:
        """Return a view when the data lies densely in memory, block after block."""
        if self.nbytes == 0:
            return _EMPTY
        if len(self._pieces) == 1:
            start, _, item = self._pieces[0]
            return cast(Bytes, self._memory.view(start, self.nbytes)) if item.dense else None
        first = end = None
        for piece in self._pieces:
            if piece.total == 0:
                continue
            if not piece.item.dense or (end is not None and piece.start != end):
                return None
            if first is None:
                first = piece.start
            end = piece.start + piece.nbytes
        assert first is not None
        return cast(Bytes, self._memory.view(first, self.nbytes))

    def _inside(self, length: int) -> None:
        """Refuse counts that reach beyond the memory, which mpi4py does not see."""
        for piece in self._pieces:
            if not piece.nbytes:
                continue
            low, high = piece.reach()
            # ``[matrix[0, 3:], 1, column]`` is how many say column 3: what has gaps may go
            # on in the array that the memory is a part of.
            inside = (low >= 0 and high <= length) or (
                not piece.item.dense and self._memory.belongs(low, high)
            )
            if not inside:
                raise ValueError(
                    f"message: buffer too small: it has {length} bytes, the counts want bytes "
                    f"{low} to {high}"
                )


class Memory:
    """An address with an owner that keeps it alive; length None where nobody knows it."""

    __slots__ = ("address", "length", "owner", "readonly")

    def __init__(self, address: int, length: int | None, readonly: bool, owner: object) -> None:
        self.address = address
        self.length = length
        self.readonly = readonly
        self.owner = owner

    def view(self, start: int, nbytes: int) -> Bytes:
        """Return bytes ``start`` to ``start + nbytes`` as an array."""
        owner = self.owner
        if type(owner) is np.ndarray:
            if owner.ndim != 1:
                owner = (owner if owner.flags.c_contiguous else owner.T).reshape(-1)
            flat = owner.view(np.uint8)
            return flat if nbytes == self.length else flat[start : start + nbytes]
        memory = MPI.memory.fromaddress(self.address + start, nbytes, self.readonly)
        return np.frombuffer(cast(Any, memory), np.uint8)

    def belongs(self, low: int, high: int) -> bool:
        """Whether bytes ``low`` to ``high`` are in the array that this is a part of."""
        whole: Any = self.owner
        while isinstance(getattr(whole, "base", None), np.ndarray):
            whole = whole.base
        if not isinstance(whole, np.ndarray) or not whole.flags.forc:
            return False
        if whole.base is not None:
            return True  # a part of what NumPy does not know the size of
        first = MPI.Get_address(cast(Any, whole)) - self.address
        return first <= low and high <= first + whole.nbytes

    def pack(self, piece: Piece, packed: Bytes) -> None:
        """Copy the items of ``piece`` to dense bytes."""
        if piece.item.dense:
            packed[:] = self.view(piece.start, packed.size)
            return
        for memory, datatype, at in self._parts(piece, packed, readonly=True):
            datatype.Pack(memory, at, 0, MPI.COMM_SELF)

    def unpack(self, piece: Piece, packed: Bytes) -> None:
        """Copy dense bytes to the items of ``piece``, and touch nothing else."""
        if piece.item.dense:
            self.view(piece.start, packed.size)[:] = packed
            return
        for memory, datatype, at in self._parts(piece, packed, readonly=False):
            datatype.Unpack(at, 0, memory, MPI.COMM_SELF)

    def _parts(
        self, piece: Piece, packed: Bytes, readonly: bool
    ) -> Iterator[tuple[MPI.memory, MPI.Datatype, Bytes]]:
        """Cut a piece so that no MPI call sees more than 32 bits."""
        start, total, item = piece
        if not piece.nbytes:
            return
        assert item.datatype is not None
        limit = max(1, MESSAGE_LIMIT // max(item.nbytes, abs(item.extent)))
        for low in range(0, total, limit):
            part = min(limit, total - low)
            at = packed[low * item.nbytes : (low + part) * item.nbytes]
            address = self.address + start + low * item.extent
            if item.extent > 0 and address > 0:
                # mpi4py counts the items that fit into the memory it is given.
                extent = part * item.extent
                yield MPI.memory.fromaddress(address, extent, readonly), item.datatype, at
                continue
            whole, first, nbytes = _as_one(item.datatype, part)
            try:
                yield MPI.memory.fromaddress(address + first, nbytes, readonly), whole, at
            finally:
                whole.Free()


def _as_one(datatype: MPI.Datatype, count: int) -> tuple[MPI.Datatype, int, int]:
    """Return a datatype that is ``count`` items, moved to begin where their data does.

    With it go the byte where the data begins and its extent. For items that do not grow
    upwards, and for the address 0 of MPI.BOTTOM, which mpi4py does not take as memory.
    """
    row = datatype.Create_contiguous(count)
    low, nbytes = row.Get_true_extent()
    moved = row.Create_hindexed([1], [-low])
    whole = moved.Create_resized(0, nbytes)
    row.Free()
    moved.Free()
    whole.Commit()
    return whole, low, nbytes


def _fill(target: Bytes, source: Bytes) -> None:
    target[:] = source


def check_aliasing(send: Buffer, recv: Buffer, block: int | None = None) -> bool:
    """Return whether send and receive side are the same memory, so that it is in place.

    With ``block`` set, that block of ``recv`` is what ``send`` is compared to. Any other
    overlap raises CallError (MPI.ERR_BUFFER), naming both ranges. Data that interleaves,
    such as two columns of one matrix, does not overlap.
    """
    low, high = send.extents()
    first, last = recv.extents()
    if low == high or first == last or high <= first or last <= low:
        return False
    if (low, high) == recv.extents(block) and _layout(send) == _layout(recv, block):
        return True
    if not _touch(send, recv, min(low, first), max(high, last)):
        return False
    raise CallError(
        MPI.ERR_BUFFER,
        f"send buffer (addresses {low:#x} to {high:#x}) and receive buffer ({first:#x} to "
        f"{last:#x}) overlap; use MPI.IN_PLACE or memory of its own",
    )


def _layout(buffer: Buffer, block: int | None = None) -> list[tuple[int, int, int]]:
    return [
        (buffer.address + piece.start, piece.total, piece.nbytes) for piece in buffer.pieces(block)
    ]


#: The most memory that is looked at byte by byte for an overlap of data with gaps.
PAINTED_BYTES = 1 << 20


def _touch(one: Buffer, other: Buffer, low: int, high: int) -> bool:
    """Return whether two buffers share a byte; all their data is from ``low`` to ``high``."""
    pieces = [(buffer, piece) for buffer in (one, other) for piece in buffer.pieces()]
    if all(piece.item.dense for _, piece in pieces):
        ranges = sorted(
            (buffer.address + piece.reach()[0], buffer.address + piece.reach()[1], buffer is one)
            for buffer, piece in pieces
        )
        ends = {True: low, False: low}
        for first, last, side in ranges:
            if first < ends[not side]:
                return True
            ends[side] = max(ends[side], last)
        return False
    if high - low > PAINTED_BYTES:
        return False  # not worth the time of the call; the MPI's own do not look either
    canvases = [np.zeros(high - low, np.uint8) for _ in range(2)]
    for buffer, canvas in zip((one, other), canvases, strict=True):
        buffer.paint(canvas, low)
    return bool(np.any(canvases[0] & canvases[1]))
