"""The model of the cases with parameters on the device, and its training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import like_cupy as cupy
import numpy as np
import pytest
import sharding_cases as cases
from mpi4py import MPI

from mpicoll.parallel import Adam, ShardedOptimizer, ShardedParameters

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
Arrays = dict[str, Any]
Names = Collection[str]

#: Every parameter; the device holds all of them, some, or all of one rank's.
EVERY = tuple(cases.flat(cases.layers()))
SOME = ("rows.weight", "rows.table", "half.scale", "out.phase", "out.temperature", "out.strided")
PLACES: dict[str, Names] = {
    "device": EVERY,
    "some": SOME,
    "one rank": EVERY if RANK == 0 else (),
}
in_places = pytest.mark.parametrize("where", PLACES)
by_stage = pytest.mark.parametrize("stage", [1, 2, 3])
by_protocol = pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])


def there(array: Any) -> Any:
    """Return a copy on the device, in the same memory order and with gaps if it has some."""
    if array.flags.c_contiguous:
        return cupy.asarray(array)
    if array.flags.f_contiguous:
        return cupy.asarray(np.ascontiguousarray(array.T)).T
    room = cupy.zeros([2 * length for length in array.shape], array.dtype)
    view = room[tuple(slice(None, None, -2) for _ in array.shape)]
    view[...] = cupy.asarray(np.ascontiguousarray(array))
    return view


def placed(arrays: Mapping[str, Any], names: Names) -> Arrays:
    return {name: there(one) if name in names else one for name, one in arrays.items()}


def on_host(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what decides whether arrays are alike."""
    found = {}
    for name, one in arrays.items():
        host = cupy.asnumpy(one)
        found[name] = host.dtype, host.shape, np.array(host, order="C").tobytes()
    return found


class Training:
    """The model of the cases, some of whose parameters are on the device."""

    def __init__(
        self, stage: int, names: Names, comm: Any = None, optimizer: Any = None, **options: Any
    ) -> None:
        self.names = names
        self.model = cases.layers(seed=options.pop("seed", 1))
        self.params = placed(cases.flat(self.model), names)
        optimizer = optimizer or Adam(0.01, weight_decay=0.1)
        options = {"frozen": cases.FROZEN, **options}
        if stage == 3:
            options.pop("bucket_bytes", None)
            layers = {layer: self.own(layer, self.params) for layer in self.model}
            self.sharded: Any = ShardedParameters(layers, optimizer, comm, **options)
        else:
            self.sharded = ShardedOptimizer(self.params, optimizer, comm, stage=stage, **options)

    def own(self, layer: str, arrays: Mapping[str, Any]) -> Arrays:
        """Return a layer's arrays by their short names."""
        cut = len(layer) + 1
        return {name[cut:]: a for name, a in arrays.items() if name.startswith(f"{layer}.")}

    def hand_over(self, gradients: Arrays, skip: str = "") -> None:
        """Bring gradients, last layer first, but those of one layer."""
        given = placed(gradients, self.names)
        for layer in reversed(self.model):
            if layer == skip:
                continue
            if isinstance(self.sharded, ShardedOptimizer):
                for name in reversed(self.own(layer, given)):
                    self.sharded.ready(f"{layer}.{name}", given[f"{layer}.{name}"])
                continue
            with self.sharded.gather(layer):
                self.sharded.ready(layer, self.own(layer, given))

    def accumulate(self) -> None:
        if isinstance(self.sharded, ShardedOptimizer):
            self.sharded.accumulate()

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return all parameters, whole, as this rank sees them."""
        if isinstance(self.sharded, ShardedOptimizer):
            assert not self.names or type(self.params[next(iter(self.names))]) is cupy.ndarray
            return on_host(self.params)
        found: dict[str, tuple[Any, ...]] = {}
        for layer in self.sharded.layers:
            with self.sharded.gather(layer) as arrays:
                for name, one in arrays.items():
                    expected = cupy.ndarray if f"{layer}.{name}" in self.names else np.ndarray
                    assert type(one) is expected
                    found |= on_host({f"{layer}.{name}": one})
        return found


def grads(step: int, whole: bool = False) -> Arrays:
    return cases.gradients(cases.flat(cases.layers()), RANK, step, whole)
