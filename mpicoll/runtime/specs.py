"""Buffer specifications, as mpi4py takes them, made into a `Buffer`.

Memory comes as a NumPy array, by the buffer protocol, or, from libraries that have arrays
of their own, by DLPack or their array interface, on the host or on a device.
"""

from __future__ import annotations

from itertools import accumulate
from operator import index
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime import device, dlpack
from mpicoll.runtime.buffers import Buffer, Memory, Piece
from mpicoll.runtime.datatypes import Item, describe, lookup, of_array, of_dtype
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.staging import DeviceMemory


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
    memory = _BOTTOM if _is_bottom(data) else _memory(data, readonly, typed=True)
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
    memory = _memory(data, readonly, typed=datatype is not None)
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


def _memory(data: Any, readonly: bool, typed: bool) -> Memory | DeviceMemory:
    """Return the memory of an array or an object with the buffer protocol.

    ``typed`` says that the caller names the datatype of its items.
    """
    given = data
    if not isinstance(data, np.ndarray):
        data = _as_array(data, typed)
        if isinstance(data, DeviceMemory):
            if data.readonly and not readonly:
                raise BufferError("message: buffer is not writable")
            return data
    if not data.flags.forc:
        how = "x.contiguous()" if hasattr(given, "contiguous") else "np.ascontiguousarray(x)"
        raise BufferError(f"message: buffer is not contiguous; {how} makes it so")
    if not readonly and not data.flags.writeable:
        raise BufferError("message: buffer is not writable")
    base = data if type(data) is np.ndarray else data.view(np.ndarray)
    address = MPI.Get_address(base)
    return Memory(address, base.nbytes, not base.flags.writeable, base)


def _as_array(data: Any, typed: bool) -> Any:
    """Return a NumPy array on the memory of an object, or its memory on a device."""
    try:
        return np.asarray(memoryview(data))
    except TypeError:
        pass
    except ValueError as error:
        raise BufferError(f"message: {error}") from None
    found = device.recognised(data, typed=typed)
    if found is not None:
        return found
    if hasattr(data, "__dlpack__"):
        return dlpack.array(dlpack.borrow(data, typed=typed))
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
