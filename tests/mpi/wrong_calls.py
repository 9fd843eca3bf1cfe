"""Wrong calls, which all ranks make alike, and what is to come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import AlgorithmError

#: What stands in memory that is not to be written.
POISON = -7.0
Target = Any


class Wrong(NamedTuple):
    """A wrong call, which all ranks make; ``words`` are a pattern of the message.

    ``native`` says that mpi4py may make it too: it refuses it before anything is sent.
    """

    call: Callable[[Any, Target], Any]
    error: type[Exception]
    words: str
    code: int = 0
    native: bool = True


def ones(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count)


def frozen(count: int) -> np.ndarray[Any, Any]:
    array = np.ones(count)
    array.flags.writeable = False
    return array


def many(c: Any, value: int = 1) -> list[int]:
    return [value] * c.size


D = MPI.DOUBLE
WRONG = {
    # The root
    "root too high": Wrong(
        lambda c, t: c.Bcast(t, c.size), MPI.Exception, r"root \d+, expected.* 0 to", MPI.ERR_ROOT
    ),
    "root far too high": Wrong(
        lambda c, t: c.Reduce(ones(3), t[:3], root=10**6),
        MPI.Exception,
        "root 1000000",
        MPI.ERR_ROOT,
    ),
    "root negative": Wrong(
        lambda c, t: c.Scatter(ones(c.size), t[:1], root=-77),
        MPI.Exception,
        "root -77",
        MPI.ERR_ROOT,
    ),
    # Counts
    "negative count": Wrong(
        lambda c, t: c.Allreduce([ones(3), -1, D], [t, -1, D]), ValueError, "negative count -1"
    ),
    "negative counts": Wrong(
        lambda c, t: c.Allgatherv(ones(1), [t, many(c, -1), D]),
        MPI.Exception,
        "negative count -1",
        MPI.ERR_COUNT,
        native=False,  # Open MPI looks at the own count alone
    ),
    "negative receive counts": Wrong(
        lambda c, t: c.Reduce_scatter(ones(c.size), t[:1], many(c, -1)),
        (MPI.Exception, ValueError),  # type: ignore[arg-type]
        "-",
        native=False,
    ),
    "fractional counts": Wrong(
        lambda c, t: c.Reduce_scatter(ones(c.size), t[:1], [1.5] * c.size),
        TypeError,
        "float",
    ),
    "number of counts": Wrong(
        lambda c, t: c.Reduce_scatter(ones(c.size), t[:1], [1] * (c.size + 1)),
        ValueError,
        r"\d+ receive counts for \d+ ranks",
    ),
    "too few counts": Wrong(
        lambda c, t: c.Allgatherv(ones(1), [t, [1] * (c.size + 1), D]),
        ValueError,
        r"expecting \d+ .*counts, got \d+",
    ),
    "too few displacements": Wrong(
        lambda c, t: c.Alltoallv(
            [ones(c.size), many(c), D], [t, (many(c), [0] * (c.size + 1)), D]
        ),
        ValueError,
        "displ",
    ),
    "count beyond the memory": Wrong(
        lambda c, t: c.Bcast([t, 1000, D]),
        ValueError,
        "too small.* 512 bytes",
        native=False,  # mpi4py does not see it, and MPI writes beyond the memory
    ),
    "counts beyond the memory": Wrong(
        lambda c, t: c.Allgatherv(ones(100), [t, many(c, 100), D]),
        ValueError,
        "too small.* 512 bytes",
        native=False,
    ),
    "displacements beyond the memory": Wrong(
        lambda c, t: c.Allgatherv(ones(1), [t, (many(c), many(c, 64)), D]),
        ValueError,
        "too small",
        native=False,
    ),
    "displacements before the memory": Wrong(
        lambda c, t: c.Allgatherv(ones(1), [t, (many(c), many(c, -1)), D]),
        ValueError,
        "too small",
        native=False,
    ),
    "no whole number of items": Wrong(
        lambda c, t: c.Bcast([bytearray(13), D]), ValueError, "13 is not a multiple"
    ),
    # The other side
    "receives less than it reduces": Wrong(
        lambda c, t: c.Allreduce(ones(5), t[:4]), ValueError, "mismatch.* 5 .* 4"
    ),
    "scans into less": Wrong(lambda c, t: c.Scan(ones(5), t[:4]), ValueError, "mismatch.* 5 .* 4"),
    "receives other items": Wrong(
        lambda c, t: c.Allreduce(ones(3), t.view(np.int64)[:3]),
        ValueError,
        "mismatch in send and receive MPI datatypes",
    ),
    "gathers into too little": Wrong(
        lambda c, t: c.Allgather(ones(2), t[: c.size]),
        MPI.Exception,
        "16 bytes on the send side and 8 on the receive side",
        MPI.ERR_TRUNCATE,
        native=False,  # MPIs overwrite, hang or truncate
    ),
    "reduces to blocks of another sum": Wrong(
        lambda c, t: c.Reduce_scatter(ones(c.size + 3), t[:1], many(c)),
        ValueError,
        "mismatch in send count",
    ),
    "reduces to a block of another length": Wrong(
        lambda c, t: c.Reduce_scatter(ones(c.size), t[:2], many(c)),
        ValueError,
        "mismatch in receive count",
    ),
    # Memory
    "read-only receive buffer": Wrong(
        lambda c, t: c.Allreduce(ones(3), frozen(3)), BufferError, "(writable|read-only)"
    ),
    "read-only place": Wrong(
        lambda c, t: c.Allreduce(MPI.IN_PLACE, frozen(3)), BufferError, "(writable|read-only)"
    ),
    "bytes to receive into": Wrong(
        lambda c, t: c.Allgather(np.uint8(1), bytes(c.size)), BufferError, "(writable|read-only)"
    ),
    "strided send buffer": Wrong(
        lambda c, t: c.Allreduce(ones(6)[::2], t[:3]), BufferError, "contiguous"
    ),
    "strided receive buffer": Wrong(
        lambda c, t: c.Allreduce(ones(3), t[:6:2]), BufferError, "contiguous"
    ),
    "partial overlap": Wrong(
        lambda c, t: c.Allreduce(t[:4], t[2:6]),
        MPI.Exception,
        "overlap; use MPI.IN_PLACE",
        MPI.ERR_BUFFER,
        native=False,
    ),
    "overlap of blocks": Wrong(
        lambda c, t: c.Alltoall(t[: 2 * c.size], t[1 : 2 * c.size + 1]),
        MPI.Exception,
        "overlap",
        MPI.ERR_BUFFER,
        native=False,
    ),
    # Types
    "no buffer": Wrong(lambda c, t: c.Allreduce(object(), t), TypeError, "expecting buffer"),
    "None to receive into": Wrong(
        lambda c, t: c.Allreduce(ones(1), None), TypeError, "expecting buffer"
    ),
    "array of objects": Wrong(
        lambda c, t: c.Bcast(np.array([1, "a"], object)), KeyError, "cannot map"
    ),
    "array of text": Wrong(lambda c, t: c.Bcast(np.array(["ab"])), KeyError, "cannot map"),
    "other byte order": Wrong(lambda c, t: c.Bcast(np.ones(2, ">f8")), BufferError, "byte order"),
    "unknown typecode": Wrong(lambda c, t: c.Bcast([t, "nothing"]), KeyError, "nothing"),
    "no datatype": Wrong(
        lambda c, t: c.Bcast([t, 1, MPI.DATATYPE_NULL]),
        MPI.Exception,
        "",
        MPI.ERR_TYPE,
    ),
    "too many parts": Wrong(lambda c, t: c.Bcast([t, 1, 2, 3, 4]), ValueError, "2 to 4 items"),
    "operator of no kind": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], "sum"), TypeError, "str"
    ),
    "no operator": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], MPI.OP_NULL), MPI.Exception, "", MPI.ERR_OP
    ),
    "operator that the type does not allow": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], MPI.BAND),
        MPI.Exception,
        "BAND is not defined for MPI_DOUBLE",
        MPI.ERR_OP,
    ),
    "average of truth": Wrong(
        lambda c, t: c.Allreduce(np.array([True]), np.array([True]), mpicoll.AVG),
        MPI.Exception,
        "AVG has no meaning",
        MPI.ERR_OP,
        native=False,
    ),
    "average of a scan": Wrong(
        lambda c, t: c.Scan(ones(1), t[:1], mpicoll.AVG),
        MPI.Exception,
        "AVG has no meaning",
        MPI.ERR_OP,
        native=False,
    ),
    # The words that only mpicoll has
    "unknown algorithm": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], algorithm="rings"),
        AlgorithmError,
        "allreduce has no algorithm 'rings'; known: circulant, direct",
        native=False,
    ),
    "radix of an algorithm without": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], algorithm="ring:4"),
        AlgorithmError,
        "takes no radix",
        native=False,
    ),
    "radix of nothing": Wrong(
        lambda c, t: c.Alltoall(ones(c.size), t[: c.size], algorithm="bruck:1"),
        AlgorithmError,
        "radix '1'",
        native=False,
    ),
    "unknown order": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], order="left"),
        AlgorithmError,
        "order='left'; known: None, 'rank'",
        native=False,
    ),
    "negative segment": Wrong(
        lambda c, t: c.Allreduce(ones(1), t[:1], segment=-1),
        AlgorithmError,
        "segment=-1; expected 0 or more",
        native=False,
    ),
}
