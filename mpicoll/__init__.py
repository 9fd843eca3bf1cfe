"""Hand-written MPI collectives on mpi4py that can be read, proven and timed.

``comm = mpicoll.Comm(MPI.COMM_WORLD)`` gives mpi4py code our collectives;
``mpicoll.allreduce(x)`` and its kin take and return arrays.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpicoll._version import __version__
from mpicoll.errors import (
    AlgorithmError,
    CollectiveTimeout,
    MismatchError,
    MpicollError,
    PeerError,
    PoisonedError,
    ScheduleError,
    SettingError,
    ShortMessageError,
)

if TYPE_CHECKING:
    from mpicoll.arrays import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from mpicoll.comm import Cartcomm, Comm, Distgraphcomm, Graphcomm
    from mpicoll.runtime.abort import abort_on_exception
    from mpicoll.runtime.device_support import bind_device
    from mpicoll.runtime.operators import AVG, create_op
    from mpicoll.runtime.requests import Prequest, Request
    from mpicoll.runtime.trace import trace_region

# Names that need mpi4py are loaded when first used, so that schedules can be built,
# proven and drawn on a machine that has no MPI.
_LAZY = {
    "AVG": "mpicoll.runtime.operators",
    "Cartcomm": "mpicoll.comm",
    "Comm": "mpicoll.comm",
    "Distgraphcomm": "mpicoll.comm",
    "Graphcomm": "mpicoll.comm",
    "Prequest": "mpicoll.runtime.requests",
    "Request": "mpicoll.runtime.requests",
    "abort_on_exception": "mpicoll.runtime.abort",
    "allgather": "mpicoll.arrays",
    "allreduce": "mpicoll.arrays",
    "alltoall": "mpicoll.arrays",
    "barrier": "mpicoll.arrays",
    "bind_device": "mpicoll.runtime.device_support",
    "broadcast": "mpicoll.arrays",
    "create_op": "mpicoll.runtime.operators",
    "gather": "mpicoll.arrays",
    "reduce": "mpicoll.arrays",
    "reduce_scatter": "mpicoll.arrays",
    "scatter": "mpicoll.arrays",
    "trace_region": "mpicoll.runtime.trace",
}

__all__ = [
    "AVG",
    "AlgorithmError",
    "Cartcomm",
    "CollectiveTimeout",
    "Comm",
    "Distgraphcomm",
    "Graphcomm",
    "MismatchError",
    "MpicollError",
    "PeerError",
    "PoisonedError",
    "Prequest",
    "Request",
    "ScheduleError",
    "SettingError",
    "ShortMessageError",
    "__version__",
    "abort_on_exception",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bind_device",
    "broadcast",
    "create_op",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "trace_region",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what is for users: the names of `__all__`, and modules that are loaded."""
    special = [name for name in globals() if name.startswith("__")]
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *special, *(name for name in loaded if name[0] != "_")})
