"""Where the parameters are: on every rank (ddp), or with parts of them cut into shards (zero).

A store gives layers to the network, takes this rank's gradients, and takes the step. Gradients
are divided by the size of the whole batch, not of the share, so that uneven shares and empty ones
need no weights; where a store averages over ranks, ``scale`` makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

import mpicoll
from mpicoll.parallel import (
    DataParallel,
    FlatOptimizer,
    SavedStateError,
    ShardedOptimizer,
    ShardedParameters,
    broadcast_object,
)
from training import checkpoint
from training.clock import Clock
from training.console import leave, on_root
from training.network import Layers, Store

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

#: Two buckets for the digits in float32: one travels while backward computes the other.
BUCKET_BYTES = 36 << 10


class TrainedStore(Store, Protocol):
    """A store that is trained, saved and loaded; all methods are collective."""

    scale: float

    def step(self) -> None:
        """Update all parameters by the gradients of all ranks."""

    def whole(self) -> dict[str, Array]:
        """Return all parameters as "layer.name"; read them before the next step."""

    def save(self, path: Path, config: checkpoint.Config, step: int) -> None:
        """Write a checkpoint."""

    def load(self, path: Path, config: checkpoint.Config) -> int:
        """Load a checkpoint and return its step, 0 if there is none yet."""

    def free(self) -> None:
        """Free communicators."""


class Whole:
    """Whole arrays and their optimizer's state, updated as shards are."""

    def __init__(self, params: Mapping[str, Array], optimizer: FlatOptimizer) -> None:
        self.params, self._optimizer, self._steps = params, optimizer, 0
        self.state = {
            name: {slot: np.zeros(array.size, array.dtype) for slot in optimizer.slots}
            for name, array in params.items()
        }

    def update(self, gradients: Mapping[str, Array]) -> None:
        """Take a step; the gradients may be overwritten."""
        self._steps += 1
        for name, param in self.params.items():
            flat, gradient = param.reshape(-1), gradients[name].reshape(-1)
            self._optimizer.update(flat, gradient, self.state[name], self._steps)

    def arrays(self) -> dict[str, Array]:
        """Return what a checkpoint keeps."""
        kept = {f"value:{name}": array for name, array in self.params.items()}
        for name, slots in self.state.items():
            kept |= {f"{slot}:{name}": array for slot, array in slots.items()}
        return kept


class Replicated:
    """ddp: whole parameters on every rank, gradients summed in buckets during backward."""

    scale = 1.0

    def __init__(
        self, layers: Layers, optimizer: FlatOptimizer, comm: mpicoll.Comm, clock: Clock
    ) -> None:
        self._layers, self._clock = layers, clock
        params = {f"{at}.{name}": a for at, one in layers.items() for name, a in one.items()}
        self.parallel = DataParallel(params, comm, BUCKET_BYTES, op="sum")
        self.trained = Whole(params, optimizer)
        self.comm = comm

    def layer(self, name: str) -> AbstractContextManager[Mapping[str, Array]]:
        return nullcontext(self._layers[name])

    def ready(self, layer: str, gradients: Mapping[str, Array]) -> None:
        with self._clock.communication(under_way=True):
            for name, gradient in gradients.items():
                self.parallel.ready(f"{layer}.{name}", gradient)

    def step(self) -> None:
        with self._clock.communication(under_way=False):
            gradients = self.parallel.finish()
        self.trained.update(gradients)

    def whole(self) -> dict[str, Array]:
        return dict(self.parallel.params)

    def save(self, path: Path, config: checkpoint.Config, step: int) -> None:
        on_root(self.comm, lambda: checkpoint.write(path, config, step, self.trained.arrays()))

    def load(self, path: Path, config: checkpoint.Config) -> int:
        step, _ = load_arrays(self.comm, path, config, self.trained.arrays())
        return step

    def free(self) -> None:
        self.parallel.free()


def load_arrays(
    comm: mpicoll.Comm, path: Path, config: checkpoint.Config, targets: Mapping[str, Array]
) -> tuple[int, dict[str, Array]]:
    """Fill arrays on all ranks with those that rank 0 reads; return the step and the others."""

    def read() -> tuple[int, dict[str, Array]]:
        step, arrays = checkpoint.read(path, config)
        for name, array in targets.items() if step else ():
            if name not in arrays or arrays[name].shape != array.shape:
                raise ValueError(f"{path} has no array {name!r} of shape {array.shape}")
        return step, arrays

    step, arrays = broadcast_object(on_root(comm, read), comm)
    if step:
        for name, array in targets.items():
            array[...] = arrays.pop(name)
    return step, arrays


class Timed:
    """An optimizer whose time counts as computing, within a step that communicates."""

    def __init__(self, optimizer: FlatOptimizer, clock: Clock) -> None:
        self._optimizer, self._clock = optimizer, clock

    @property
    def slots(self) -> tuple[str, ...]:
        return self._optimizer.slots

    def settings(self) -> dict[str, Any]:
        return self._optimizer.settings()

    def update(self, value: Array, gradient: Array, state: dict[str, Array], step: int) -> None:
        with self._clock.computing():
            self._optimizer.update(value, gradient, state, step)


class _Zero:
    """What all stages have in common: checkpoints, which each of them loads."""

    comm: mpicoll.Comm
    sharded: ShardedOptimizer | ShardedParameters
    _clock: Clock

    def step(self) -> None:
        with self._clock.communication(under_way=False):
            self.sharded.step()

    def save(self, path: Path, config: checkpoint.Config, step: int) -> None:
        try:
            self.sharded.save(path, whole=True)
        except SavedStateError as error:  # the same on every rank
            leave(self.comm, str(error))

    def load(self, path: Path, config: checkpoint.Config) -> int:
        found = on_root(self.comm, lambda: checkpoint.read_beside(path, config))
        if broadcast_object(found, self.comm):
            try:
                self.sharded.load(path)
            except SavedStateError as error:  # the same on every rank
                leave(self.comm, str(error))
        return self.sharded.steps

    def free(self) -> None:
        self.sharded.free()


class Sharded(_Zero):
    """zero1 and zero2: whole parameters; momentum, and gradients in stage 2, in shards."""

    def __init__(
        self,
        layers: Layers,
        optimizer: FlatOptimizer,
        comm: mpicoll.Comm,
        clock: Clock,
        stage: Literal[1, 2],
    ) -> None:
        self.comm, self._clock, self._layers = comm, clock, layers
        self.scale = float(comm.size)
        params = {f"{at}.{name}": a for at, one in layers.items() for name, a in one.items()}
        self.sharded: ShardedOptimizer = ShardedOptimizer(
            params, Timed(optimizer, clock), comm, stage=stage, bucket_bytes=BUCKET_BYTES
        )
        self._params = params
        self._travels = stage == 2

    def layer(self, name: str) -> AbstractContextManager[Mapping[str, Array]]:
        return nullcontext(self._layers[name])

    def ready(self, layer: str, gradients: Mapping[str, Array]) -> None:
        with self._clock.communication(under_way=self._travels):
            for name, gradient in gradients.items():
                self.sharded.ready(f"{layer}.{name}", gradient)

    def whole(self) -> dict[str, Array]:
        return dict(self._params)


class Sliced(_Zero):
    """zero3: a shard of everything; a layer is gathered before it is used, and the next ahead."""

    def __init__(
        self, layers: Layers, optimizer: FlatOptimizer, comm: mpicoll.Comm, clock: Clock
    ) -> None:
        self.comm, self._clock = comm, clock
        self.scale = float(comm.size)
        self.sharded: ShardedParameters = ShardedParameters(layers, Timed(optimizer, clock), comm)

    @contextmanager
    def layer(self, name: str) -> Iterator[Mapping[str, Array]]:
        with ExitStack() as stack:
            with self._clock.communication(under_way=True):
                arrays = stack.enter_context(self.sharded.gather(name))
            yield arrays

    def ready(self, layer: str, gradients: Mapping[str, Array]) -> None:
        with self._clock.communication(under_way=True):
            self.sharded.ready(layer, gradients)

    def whole(self) -> dict[str, Array]:
        params: dict[str, Array] = {}
        for layer in self.sharded.layers:
            with self.sharded.gather(layer) as arrays:
                params |= {f"{layer}.{name}": array.copy() for name, array in arrays.items()}
        return params


def make_store(
    strategy: str, layers: Layers, optimizer: FlatOptimizer, comm: mpicoll.Comm, clock: Clock
) -> TrainedStore:
    """Return the store of a strategy; collective."""
    if strategy == "zero3":
        return Sliced(layers, optimizer, comm, clock)
    if strategy in ("zero1", "zero2"):
        return Sharded(layers, optimizer, comm, clock, 1 if strategy == "zero1" else 2)
    return Replicated(layers, optimizer, comm, clock)
