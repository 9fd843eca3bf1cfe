"""What a plan gets of the buffers of a call.

Most calls are given whole NumPy arrays that are dense. `plain` takes these as they are,
without a `Buffer`; what it does not take goes the long way, which takes all there is and
says what is wrong with the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.buffers import Chore
from mpicoll.runtime.datatypes import Item, of_array
from mpicoll.runtime.executor import Bytes


class Sides(NamedTuple):
    """Input and output as dense bytes, what fills the one and empties the other.

    ``alias`` is the byte of ``target`` where ``source`` begins when they share memory.
    """

    source: Bytes
    target: Bytes
    load: Chore = None
    finish: Chore = None
    alias: int | None = None


def plain(array: Any, written: bool) -> tuple[Item, Bytes] | None:
    """Return item type and bytes of a NumPy array that needs no `Buffer`, else None.

    It is dense, not empty, of a type that MPI has, and may be written to if it is ``written``.
    """
    if type(array) is not np.ndarray or not array.size:
        return None
    item, flags = of_array(array), array.flags
    if item is None or not flags.forc or (written and not flags.writeable):
        return None
    if array.ndim != 1:
        array = (array if flags.c_contiguous else array.T).reshape(-1)
    return item, array.view(np.uint8)


def plain_pair(sendbuf: Any, recvbuf: Any) -> tuple[Item, Bytes, Bytes, bool] | None:
    """Return item type and bytes of two plain arrays, and whether they begin at one place.

    None where their types differ, and where they overlap but begin at different places.
    """
    send, recv = plain(sendbuf, False), plain(recvbuf, True)
    if send is None or recv is None:
        return None
    item, source = send
    other, target = recv
    ahead = MPI.Get_address(source) - MPI.Get_address(target)
    if other is not item or (ahead and -source.size < ahead < target.size):
        return None
    return item, source, target, not ahead
