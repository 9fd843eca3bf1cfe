"""Optimizer state, gradients and parameters cut into one shard per rank.

`ShardedOptimizer` is ZeRO's stages 1 and 2, `ShardedParameters` stage 3 (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20), as in FSDP (Zhao
et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023).
"""

from __future__ import annotations

from mpicoll.parallel.optimizers import SGD, Adam, FlatOptimizer
from mpicoll.parallel.sharded_optimizer import ShardedOptimizer
from mpicoll.parallel.sharded_parameters import ShardedParameters
from mpicoll.parallel.sharded_state import SavedStateError

__all__ = [
    "SGD",
    "Adam",
    "FlatOptimizer",
    "SavedStateError",
    "ShardedOptimizer",
    "ShardedParameters",
]
