"""Buffer specifications, as mpi4py takes them, made into dense bytes.

Schedules work on dense memory: the bytes of the type signature, item after item, block
after block in rank order. Where the caller's memory is that already, `Buffer.source` and
`Buffer.target` are views of it. Else (gaps between blocks, derived datatypes) the source is
a packed copy, and the target is scratch whose `finish` unpacks it and touches nothing but
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import index
from typing import Any, TypeAlias, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.datatypes import Item, describe, lookup, of_array
from mpicoll.runtime.executor import MESSAGE_LIMIT, Bytes
from mpicoll.runtime.faults import CallError

Finish: TypeAlias = Callable[[], None] | None

_EMPTY: Bytes = np.empty(0, np.uint8)


class Buffer:
    """One side of a collective call: memory, item type, counts and displacements.

    ``counts`` are items per block and ``displs`` item displacements, one block in most
    calls and one per rank in those with blocks; in the w-forms every block has an item
    type of its own and ``displs`` are bytes.
    """

    __slots__ = ("_memory", "_starts", "address", "block_bytes", "counts", "items", "nbytes")

    def __init__(
        self,
        memory: Memory,
        items: Sequence[Item],
        counts: Sequence[int],
        starts: Sequence[int],
        fits: bool = False,
    ) -> None:
        """Join the parts; ``starts`` are bytes from the address of ``memory``.

        ``fits`` says that the counts were inferred from the length of the memory.
        """
        self._memory = memory
        self._starts = starts
        self.address = memory.address
        self.items = items
        self.counts = tuple(counts)
        self.block_bytes = tuple(
            count * item.nbytes for count, item in zip(counts, items, strict=True)
        )
        self.nbytes = sum(self.block_bytes)
        if memory.length is not None and not fits:
            self._inside(memory.length)

    @property
    def item(self) -> Item:
        """The item type of the first block, that of all but in the w-forms."""
        return self.items[0]

    @property
    def count(self) -> int:
        """The items of the first block."""
        return self.counts[0]

    def source(self) -> Bytes:
        """Return the dense bytes to send, or those now in a receive buffer."""
        view = self._dense()
        if view is not None:
            return view
        packed = np.empty(self.nbytes, np.uint8)
        for (low, high), count, start, item in self._blocks(packed.size):
            self._memory.pack(start, count, item, packed[low:high])
        return packed

    def target(self) -> tuple[Bytes, Finish]:
        """Return dense bytes to receive into, and what moves them to their places."""
        view = self._dense()
        if view is not None:
            return view, None
        packed = np.empty(self.nbytes, np.uint8)

        def finish() -> None:
            for (low, high), count, start, item in self._blocks(packed.size):
                self._memory.unpack(start, count, item, packed[low:high])

        return packed, finish

    def extents(self, block: int | None = None) -> tuple[int, int]:
        """Return first and last + 1 address of the data, or of one block of it."""
        if len(self.counts) == 1:
            # The one block of most calls; the same as below, several times faster.
            reach = (self.counts[0] - 1) * self.items[0].extent
            if not self.nbytes:
                return 0, 0
            start = self.address + self._starts[0]
            low = start + self.items[0].true_lb + min(0, reach)
            return low, start + self.items[0].true_ub + max(0, reach)
        ends = [
            (
                self.address + start + min(0, (count - 1) * item.extent) + item.true_lb,
                self.address + start + max(0, (count - 1) * item.extent) + item.true_ub,
            )
            for number, (count, start, item) in enumerate(
                zip(self.counts, self._starts, self.items, strict=True)
            )
            if count and item.nbytes and block in (None, number)
        ]
        if not ends:
            return 0, 0
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _dense(self) -> Bytes | None:
        """Return a view when the data lies densely in memory, block after block."""
        if self.nbytes == 0:
            return _EMPTY
        if len(self.counts) == 1:
            item = self.items[0]
            return self._memory.view(self._starts[0], self.nbytes) if item.dense else None
        start = None
        for count, begin, item in zip(self.counts, self._starts, self.items, strict=True):
            if count == 0:
                continue
            if not item.dense or (start is not None and begin != start):
                return None
            if start is None:
                first = begin
            start = begin + count * item.nbytes
        return self._memory.view(first, self.nbytes)

    def _blocks(self, nbytes: int) -> list[tuple[tuple[int, int], int, int, Item]]:
        ends = list(accumulate(self.block_bytes))
        return [
            ((end - size, end), count, start, item)
            for size, end, count, start, item in zip(
                self.block_bytes, ends, self.counts, self._starts, self.items, strict=True
            )
            if count
        ]

    def _inside(self, length: int) -> None:
        low, high = self.extents()
        if (low < self.address + min(0, length) and high > low) or high > self.address + length:
            raise ValueError(
                f"message: buffer too small: it has {length} bytes, the counts want bytes "
                f"{low - self.address} to {high - self.address}"
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
            flat = (owner if owner.flags.c_contiguous else owner.T).reshape(-1).view(np.uint8)
            return flat[start : start + nbytes]
        memory = MPI.memory.fromaddress(self.address + start, nbytes, self.readonly)
        return np.frombuffer(cast(Any, memory), np.uint8)

    def pack(self, start: int, count: int, item: Item, packed: Bytes) -> None:
        """Copy ``count`` items at byte ``start`` to dense bytes."""
        if item.dense:
            packed[:] = self.view(start, packed.size)
            return
        for low, part in _parts(count, item):
            memory, datatype = self._reach(start + low * item.extent, part, item, True)
            try:
                at = packed[low * item.nbytes : (low + part) * item.nbytes]
                datatype.Pack(memory, at, 0, MPI.COMM_SELF)
            finally:
                datatype.Free()

    def unpack(self, start: int, count: int, item: Item, packed: Bytes) -> None:
        """Copy dense bytes to ``count`` items at byte ``start``, and touch nothing else."""
        if item.dense:
            self.view(start, packed.size)[:] = packed
            return
        for low, part in _parts(count, item):
            memory, datatype = self._reach(start + low * item.extent, part, item, False)
            try:
                at = packed[low * item.nbytes : (low + part) * item.nbytes]
                datatype.Unpack(at, 0, memory, MPI.COMM_SELF)
            finally:
                datatype.Free()

    def _reach(
        self, start: int, count: int, item: Item, readonly: bool
    ) -> tuple[MPI.memory, MPI.Datatype]:
        """Return memory and a datatype that together are ``count`` items at ``start``.

        mpi4py counts what fits into the memory it is given, and takes no address 0, as
        MPI.BOTTOM has; so the items become one, moved to begin where its data does.
        """
        assert item.datatype is not None
        row = item.datatype.Create_contiguous(count)
        low, nbytes = row.Get_true_extent()
        moved = row.Create_hindexed([1], [-low])
        whole = moved.Create_resized(0, nbytes)
        row.Free()
        moved.Free()
        whole.Commit()
        return MPI.memory.fromaddress(self.address + start + low, nbytes, readonly), whole


def _parts(count: int, item: Item) -> list[tuple[int, int]]:
    """Cut items into (first, count) so that no MPI call sees more than 32 bits."""
    limit = max(1, MESSAGE_LIMIT // max(1, item.nbytes, abs(item.extent)))
    return [(low, min(limit, count - low)) for low in range(0, count, limit)]


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
            memory = Memory(
                spec.__array_interface__["data"][0], spec.nbytes, not spec.flags.writeable, spec
            )
            return _blocked(memory, fast, count, 0, blocks, fits=True)
    data, count, displ, datatype = _unpacked(spec, (tuple, list))
    memory, item = _basic(data, datatype, readonly)
    start = 0
    if displ is not None:
        displ = index(displ)
        if displ < 0:
            raise ValueError(f"message: negative displacement {displ}")
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
    memory: Memory, item: Item, count: int, start: int, blocks: int, fits: bool = False
) -> Buffer:
    if blocks == 1:
        return Buffer(memory, (item,), (count,), (start,), fits)
    step = count * item.extent
    return Buffer(
        memory,
        (item,) * blocks,
        (count,) * blocks,
        [start + block * step for block in range(blocks)],
        fits,
    )


def _vector(spec: Any, blocks: int, readonly: bool) -> Buffer:
    data, counts, displs, datatype = _unpacked(spec, tuple)
    memory, item = _basic(data, datatype, readonly)
    if counts is None:
        total = _inferred(memory.length or 0, item, 1)
        counts = [total // blocks + (block < total % blocks) for block in range(blocks)]
    else:
        counts = _integers("counts", counts, blocks, repeated=True)
    if min(counts) < 0:
        raise CallError(MPI.ERR_COUNT, f"negative count {min(counts)} in {list(counts)}")
    if displs is None:
        displs = [0, *accumulate(counts)][:blocks]
    elif _is_integer(displs):
        displs = [block * index(displs) for block in range(blocks)]
    else:
        displs = _integers("displacements", displs, blocks)
    return Buffer(memory, (item,) * blocks, counts, [displ * item.extent for displ in displs])


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
    counts = _integers("counts", counts, blocks)
    if min(counts) < 0:
        raise CallError(MPI.ERR_COUNT, f"negative count {min(counts)} in {list(counts)}")
    items = [describe(_datatype(one)) for one in types]
    return Buffer(memory, items, counts, _integers("displacements", displs, blocks))


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


def _basic(data: Any, datatype: Any, readonly: bool) -> tuple[Memory, Item]:
    if _is_bottom(data):
        if datatype is None:
            raise TypeError("message: MPI.BOTTOM and None want a datatype")
        return (_NOTHING if data is None else _BOTTOM), describe(_datatype(datatype))
    memory = _memory(data, readonly)
    if datatype is not None:
        return memory, describe(_datatype(datatype))
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


def _memory(data: Any, readonly: bool) -> Memory:
    """Return the memory of an array or an object with the buffer protocol."""
    if not isinstance(data, np.ndarray):
        data = _as_array(data)
    if not data.flags.forc:
        raise BufferError("message: buffer is not contiguous")
    if not readonly and not data.flags.writeable:
        raise BufferError("message: buffer is not writable")
    base = data if type(data) is np.ndarray else data.view(np.ndarray)
    return Memory(base.__array_interface__["data"][0], base.nbytes, not base.flags.writeable, base)


def _as_array(data: Any) -> Any:
    try:
        return np.asarray(memoryview(data))
    except TypeError:
        pass
    except ValueError as error:
        raise BufferError(f"message: {error}") from None
    if hasattr(data, "__cuda_array_interface__"):
        raise TypeError(
            f"message: {type(data).__name__} is a device array; this version takes host arrays"
        )
    if hasattr(data, "__dlpack__"):
        array = np.from_dlpack(data)
        if array.flags.writeable or array.nbytes == 0:
            return array
        # Older protocols can not say that memory is writable and NumPy then assumes not.
        address = array.__array_interface__["data"][0]
        memory = MPI.memory.fromaddress(address, array.nbytes)
        return np.ndarray(array.shape, array.dtype, cast(Any, memory), strides=array.strides)
    raise TypeError("message: expecting buffer or list/tuple")


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


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def _integers(what: str, values: Any, blocks: int, repeated: bool = False) -> list[int]:
    if repeated and _is_integer(values):
        return [index(values)] * blocks
    numbers = [index(value) for value in values]
    if len(numbers) != blocks:
        raise ValueError(f"message: expecting {blocks} {what}, got {len(numbers)}")
    return numbers


def check_aliasing(send: Buffer, recv: Buffer, block: int | None = None) -> bool:
    """Return whether send and receive side are the same memory, so that it is in place.

    With ``block`` set, that block of ``recv`` is what ``send`` is compared to. Any other
    overlap raises CallError (MPI.ERR_BUFFER), naming both ranges.
    """
    low, high = send.extents()
    first, last = recv.extents()
    if low == high or first == last or high <= first or last <= low:
        return False
    if (low, high) == recv.extents(block):
        return True
    raise CallError(
        MPI.ERR_BUFFER,
        f"send buffer (addresses {low:#x} to {high:#x}) and receive buffer ({first:#x} to "
        f"{last:#x}) overlap; use MPI.IN_PLACE or memory of its own",
    )
