"""Buffer specifications, as mpi4py takes them, made into dense bytes.

Schedules work on dense memory: the bytes of the type signature, item after item, block
after block in rank order. Where the caller's memory is that already, `Buffer.source` and
`Buffer.target` are views of it. Else (gaps between blocks, derived datatypes) the source is
a packed copy, and the target is scratch whose `finish` unpacks it and touches nothing but
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime import device
from mpicoll.runtime.datatypes import Item, describe, lookup, of_array, of_dtype
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
        still unpacks by it.
        """
        owned: list[MPI.Datatype] = []
        if all(piece.item.dense for piece in self._pieces):
            return owned
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


# -- parsing ------------------------------------------------------------------------------


def parse_send(spec: Any, *, blocks: int = 1) -> Buffer:
    """Parse a send buffer of ``blocks`` equal blocks; see `parse_recv`."""
    return _simple(spec, blocks, readonly=True)


def parse_recv(spec: Any, *, blocks: int = 1) -> Buffer:
    """Parse a receive buffer of ``blocks`` equal blocks.

    Forms: an array or any object with the buffer protocol; ``[array, datatype]``,
    ``[array, count]``, ``[array, count, datatype]``, ``[array, (count, displacement),
    datatype]``, ``[array, count, displacement, datatype]``. A count is that of one block.
    Datatypes may be typecodes. MPI.BOTTOM and None want count and datatype.

    Raises what mpi4py raises (BufferError, KeyError, TypeError, ValueError), and
    ValueError when the counts do not fit into the memory, which mpi4py does not see.
    """
    return _simple(spec, blocks, readonly=False)


def parse_send_v(spec: Any, blocks: int) -> Buffer:
    """Parse a send buffer with counts and displacements; see `parse_recv_v`."""
    return _vector(spec, blocks, readonly=True)


def parse_recv_v(spec: Any, blocks: int) -> Buffer:
    """Parse a receive buffer with counts and displacements.

    Forms: an array, cut as evenly as it goes; ``[array, counts]``, ``[array, (counts,
    displs)]``, each with a datatype behind it, and ``[array, counts, displs, datatype]``.
    One count stands for all blocks, one displacement for the distance of blocks; without
    displacements the blocks are dense.
    """
    return _vector(spec, blocks, readonly=False)


def parse_send_w(spec: Any, blocks: int) -> Buffer:
    """Parse a send buffer with a datatype per block; see `parse_recv_w`."""
    return _wide(spec, blocks, readonly=True)


def parse_recv_w(spec: Any, blocks: int) -> Buffer:
    """Parse a receive buffer with a datatype per block.

    Forms: ``[array, counts, displs, types]``, ``[array, (counts, displs), types]`` with
    displacements in bytes, and ``[array, types]``, one item each at the beginning.
    """
    return _wide(spec, blocks, readonly=False)


def _simple(spec: Any, blocks: int, readonly: bool) -> Buffer:
    if type(spec) is np.ndarray:
        fast = of_array(spec)
        if fast is not None and spec.flags.forc and (readonly or spec.flags.writeable):
            count = _inferred(spec.nbytes, fast, blocks)
            whole = Memory(MPI.Get_address(spec), spec.nbytes, not spec.flags.writeable, spec)
            return _blocked(whole, fast, count, 0, blocks, fits=True)
    data, count, displ, datatype = _unpacked(spec, (tuple, list))
    memory, item = _basic(data, datatype, readonly)
    start = 0
    if displ is not None:
        displ = index(displ)
        if displ < 0:
            raise ValueError(f"message: negative displacement {displ}")
        if displ > 0 and item.extent <= 0:
            raise ValueError(f"message: cannot handle displacement, datatype extent {item.extent}")
        start = displ * item.extent
        if memory.length is not None and start > memory.length:
            raise ValueError(
                f"message: displacement {displ} out of bounds, number of datatype entries "
                f"{memory.length // item.extent}"
            )
    if count is None:
        count = _inferred((memory.length or 0) - start, item, blocks)
    else:
        count = index(count)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count > 0 and data is None:
            raise ValueError(f"message: buffer is None but count is {count}")
    return _blocked(memory, item, count, start, blocks)


def _blocked(
    memory: Memory | DeviceMemory,
    item: Item,
    count: int,
    start: int,
    blocks: int,
    fits: bool = False,
) -> Buffer:
    piece = Piece(start, count * blocks, item)
    return Buffer(memory, item, (count,) * blocks, (piece,), fits)


def _vector(spec: Any, blocks: int, readonly: bool) -> Buffer:
    data, counts, displs, datatype = _unpacked(spec, tuple)
    memory, item = _basic(data, datatype, readonly)
    if counts is None:
        total = _inferred(memory.length or 0, item, 1)
        counts = [total // blocks + (block < total % blocks) for block in range(blocks)]
    else:
        counts = _integers("counts", counts, blocks, step=False)
    if min(counts) < 0:
        raise CallError(MPI.ERR_COUNT, f"negative count {min(counts)} in {list(counts)}")
    if displs is None:
        displs = [0, *accumulate(counts)][:blocks]
    else:
        displs = _integers("displacements", displs, blocks, step=True)
    pieces = tuple(
        [
            Piece(displ * item.extent, count, item)
            for count, displ in zip(counts, displs, strict=True)
        ]
    )
    return Buffer(memory, item, tuple(counts), pieces)


def _wide(spec: Any, blocks: int, readonly: bool) -> Buffer:
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    counts: Any = [1] * blocks
    displs: Any = [0] * blocks
    if len(spec) == 2:
        data, types = spec
    elif len(spec) == 3:
        data, (counts, displs), types = spec
    else:
        data, counts, displs, types = spec
    if len(types) != blocks:
        raise ValueError(f"message: expecting {blocks} datatypes, got {len(types)}")
    memory = _BOTTOM if _is_bottom(data) else _memory(data, readonly)
    counts = _integers("counts", [1] * blocks if counts is None else counts, blocks)
    if min(counts) < 0:
        raise CallError(MPI.ERR_COUNT, f"negative count {min(counts)} in {list(counts)}")
    displs = _integers("displacements", [0] * blocks if displs is None else displs, blocks)
    for one in types:
        if not isinstance(one, MPI.Datatype):
            raise TypeError(f"message: expecting datatypes, got {type(one).__name__}")
    items = [describe(one) for one in types]
    pieces = tuple([Piece(*one) for one in zip(displs, counts, items, strict=True)])
    return Buffer(memory, items[0], tuple(counts), pieces)


def _unpacked(spec: Any, nested: type | tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """Return data, count, displacement and datatype of a specification."""
    if not isinstance(spec, (list, tuple)):
        if spec is None:
            raise TypeError("message: expecting buffer or list/tuple")
        return spec, None, None, None
    if not 2 <= len(spec) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    if len(spec) == 4:
        return tuple(spec)
    data, count = spec[:2]
    datatype = spec[2] if len(spec) == 3 else None
    displ = None
    if len(spec) == 2 and isinstance(count, (MPI.Datatype, str)):
        return data, None, None, count
    if isinstance(count, nested):
        count, displ = cast(Any, count)
    return data, count, displ, datatype


def _basic(data: Any, datatype: Any, readonly: bool) -> tuple[Memory | DeviceMemory, Item]:
    if _is_bottom(data):
        if datatype is None:
            raise KeyError("cannot map None to MPI datatype")  # as mpi4py has it
        return (_NOTHING if data is None else _BOTTOM), describe(_datatype(datatype))
    memory = _memory(data, readonly)
    if datatype is not None:
        return memory, describe(_datatype(datatype))
    if isinstance(memory, DeviceMemory):
        return memory, of_dtype(memory.dtype)
    return memory, lookup(memory.owner)


def _is_bottom(data: object) -> bool:
    return data is None or data is MPI.BOTTOM


_BOTTOM = Memory(0, None, False, None)
_NOTHING = Memory(0, 0, False, None)


def _datatype(datatype: Any) -> MPI.Datatype:
    if isinstance(datatype, MPI.Datatype):
        return datatype
    try:
        found: MPI.Datatype = MPI._typedict[datatype]
    except KeyError:
        raise KeyError(f"cannot map {datatype!r} to MPI datatype") from None
    return found


def _memory(data: Any, readonly: bool) -> Memory | DeviceMemory:
    """Return the memory of an array or an object with the buffer protocol."""
    if not isinstance(data, np.ndarray):
        data = _as_array(data)
        if isinstance(data, DeviceMemory):
            if data.readonly and not readonly:
                raise BufferError("message: buffer is not writable")
            return data
    if not data.flags.forc:
        raise BufferError("message: buffer is not contiguous; np.ascontiguousarray(x) makes it so")
    if not readonly and not data.flags.writeable:
        raise BufferError("message: buffer is not writable")
    base = data if type(data) is np.ndarray else data.view(np.ndarray)
    address = MPI.Get_address(base)
    return Memory(address, base.nbytes, not base.flags.writeable, base)


def _as_array(data: Any) -> Any:
    try:
        return np.asarray(memoryview(data))
    except TypeError:
        pass
    except ValueError as error:
        raise BufferError(f"message: {error}") from None
    found = device.recognised(data)
    if found is not None:
        return found
    if hasattr(data, "__dlpack__"):
        array = np.from_dlpack(data)
        if array.flags.writeable or array.nbytes == 0:
            return array
        if _says_writable(data):
            return array
        # The older protocol can not say that memory is writable and NumPy then assumes not.
        memory = MPI.memory.fromaddress(MPI.Get_address(cast(Any, array)), array.nbytes)
        return np.ndarray(array.shape, array.dtype, cast(Any, memory), strides=array.strides)
    raise TypeError("message: expecting buffer or list/tuple")


def _says_writable(data: Any) -> bool:
    """Whether the object's DLPack capsule has the flag that tells read-only memory."""
    try:
        return "dltensor_versioned" in repr(data.__dlpack__(max_version=(1, 0)))
    except TypeError:
        return False


def _inferred(length: int, item: Item, blocks: int) -> int:
    """Return how many items per block ``length`` bytes hold; refuse a remainder."""
    if length == 0:
        return 0
    if item.extent <= 0:
        raise ValueError(f"message: cannot infer count, datatype extent {item.extent}")
    total, rest = divmod(length, item.extent)
    if rest:
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of "
            f"datatype extent {item.extent}"
        )
    count, rest = divmod(total, blocks)
    if rest:
        raise ValueError(
            f"message: cannot infer count, number of entries {total} is not a multiple of "
            f"required number of blocks {blocks}"
        )
    return count


def _integers(what: str, values: Any, blocks: int, step: bool | None = None) -> list[int]:
    """Return one integer per block.

    Where mpi4py takes a single one, ``step`` says what it means: the same for all blocks
    (False), or the distance from one to the next (True).
    """
    if step is not None:
        try:
            single = index(values)
        except TypeError:
            pass  # a sequence
        else:
            return [single * block if step else single for block in range(blocks)]
    numbers = [index(value) for value in values]
    if len(numbers) != blocks:
        raise ValueError(f"message: expecting {blocks} {what}, got {len(numbers)}")
    return numbers


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
