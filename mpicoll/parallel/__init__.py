"""The patterns that people use collectives for: data parallel training and its helpers.

There is no autograd here: gradients are brought. Arrays are NumPy's, or CuPy's of the current
device: what is of their size stays there, on the caller's current stream, and a rank may have on
its device what another has on the host. Every constructor and function takes a wrapped or a plain
mpi4py intracommunicator, the world without one. Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll.parallel.batch_norm import BatchNormGradients, Moments, SyncBatchNorm
    from mpicoll.parallel.compression import Compression, HalfWire
    from mpicoll.parallel.data_parallel import DataParallel
    from mpicoll.parallel.experts import BalanceLoss, Combined, Dispatched, ExpertDispatch, Load
    from mpicoll.parallel.features import GatheredFeatures, gather_features
    from mpicoll.parallel.metrics import average_metrics
    from mpicoll.parallel.objects import Seeds, broadcast_object, share_seed
    from mpicoll.parallel.optimizers import SGD, Adam, FlatOptimizer
    from mpicoll.parallel.samples import EpochSampler, scatter_dataset
    from mpicoll.parallel.sharded_state import SavedStateError
    from mpicoll.parallel.sharding import ShardedOptimizer, ShardedParameters

_LAZY = {
    "Adam": "optimizers",
    "BalanceLoss": "experts",
    "BatchNormGradients": "batch_norm",
    "Combined": "experts",
    "Compression": "compression",
    "DataParallel": "data_parallel",
    "Dispatched": "experts",
    "EpochSampler": "samples",
    "ExpertDispatch": "experts",
    "FlatOptimizer": "optimizers",
    "GatheredFeatures": "features",
    "HalfWire": "compression",
    "Load": "experts",
    "Moments": "batch_norm",
    "SGD": "optimizers",
    "SavedStateError": "sharded_state",
    "Seeds": "objects",
    "ShardedOptimizer": "sharding",
    "ShardedParameters": "sharding",
    "SyncBatchNorm": "batch_norm",
    "average_metrics": "metrics",
    "broadcast_object": "objects",
    "gather_features": "features",
    "scatter_dataset": "samples",
    "share_seed": "objects",
}

__all__ = [
    "SGD",
    "Adam",
    "BalanceLoss",
    "BatchNormGradients",
    "Combined",
    "Compression",
    "DataParallel",
    "Dispatched",
    "EpochSampler",
    "ExpertDispatch",
    "FlatOptimizer",
    "GatheredFeatures",
    "HalfWire",
    "Load",
    "Moments",
    "SavedStateError",
    "Seeds",
    "ShardedOptimizer",
    "ShardedParameters",
    "SyncBatchNorm",
    "average_metrics",
    "broadcast_object",
    "gather_features",
    "scatter_dataset",
    "share_seed",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
