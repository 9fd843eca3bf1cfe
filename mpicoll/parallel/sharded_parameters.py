"""ZeRO stage 3: parameters, gradients and optimizer state, all sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from mpicoll.parallel.agreement import wrapped
from mpicoll.parallel.flat import Group, bits, check, plan
from mpicoll.parallel.library import Array, on_host
from mpicoll.parallel.optimizers import FlatOptimizer
from mpicoll.parallel.sharded_base import Sharded
from mpicoll.parallel.sharded_checks import (
    Missing,
    agree_groups,
    gradient_fault,
    layers_fault,
    options_fault,
    step_settings,
    wire_dtype,
)
from mpicoll.parallel.shards import Flight, Shard, spread
from mpicoll.selection.choose import OrderWish


class _Layer:
    """A layer that is gathered: on its way, in use, or kept for the next use."""

    def __init__(self, flights: list[Flight], groups: list[Group]) -> None:
        self.flights = flights
        self.users = 0
        self.views: dict[str, Array] = {}
        for flight, group in zip(flights, groups, strict=True):
            full = flight.arrays[0].view()
            if on_host(full):  # read-only: what was written here would be lost
                full.flags.writeable = False
            self.views |= group.views(full)


class ShardedParameters(Sharded):
    """Parameters of which each rank keeps a shard; a layer is whole only while it is used.

    ``layers`` are arrays by name, by layer, in order of use; libraries, dtypes and ``frozen``
    (names "layer.name") as in `ShardedOptimizer`. Values are taken from rank ``root``; the other
    ranks need arrays of the same shape and dtype only, such as ``np.broadcast_to(zero, shape)``,
    or CuPy's of that name for shards on their device; nobody's arrays are kept or changed. Per
    step::

        for layer in layers:
            with params.gather(layer) as arrays:
                forward(layer, arrays)
        for layer in reversed(layers):
            with params.gather(layer) as arrays:
                params.ready(layer, backward(layer, arrays))
        params.step()

    Sent per step, with n the bytes of all parameters: an allgather per `gather`, so
    2 n (P-1)/P, and a reduce-scatter, n (P-1)/P. All ranks call in the same order.
    ``wire``, ``order`` and ``comm`` are those of `ShardedOptimizer`.

    Raises ValueError on every rank if arguments differ or one rank's are wrong.
    """

    def __init__(
        self,
        layers: Mapping[str, Mapping[str, Array]],
        optimizer: FlatOptimizer,
        comm: MPI.Intracomm | None = None,
        *,
        frozen: Iterable[str] = (),
        wire: str | None = None,
        order: OrderWish = None,
        root: int = 0,
    ) -> None:
        """Compare arguments and cut the shards; collective."""
        given = wrapped(comm)
        still = frozenset(frozen)
        problem = layers_fault(layers)
        named: dict[str, Array] = {}
        if not problem:
            named = {f"{at}.{name}": a for at, one in layers.items() for name, a in one.items()}
            problem = options_fault(wire, order, root, given.size) or check(named, still, False)
        if root is None:
            problem = problem or "root=None, expected a rank"
        groups: list[Group] = []
        plans: dict[str, list[Group]] = {}
        if not problem:
            for layer, one in layers.items():
                full_names = [f"{layer}.{name}" for name in one]
                plans[layer] = plan(
                    named, still, wire_dtype(wire), label=f"{layer}/", names=full_names
                )
                groups += plans[layer]
        options = [] if problem else [f"layer {layer!r}" for layer in layers]
        options += [f"order={order!r}", f"root={root!r}"]
        agree_groups(given, "ShardedParameters", groups, optimizer, options, problem)
        super().__init__(given, groups, optimizer, order)
        spread(self.comm, self._shards, named, root)
        shards = iter(self._shards)
        self._layers = {layer: [next(shards) for _ in plans[layer]] for layer in layers}
        self._order_of_use = [*layers]
        self._gathered: dict[str, _Layer] = {}
        self._last, self._direction = -1, 1
        self._reduced: set[str] = set()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in order of use."""
        return tuple(self._order_of_use)

    # -- gather -----------------------------------------------------------------------

    @contextmanager
    def gather(self, layer: str, prefetch: str | None = "") -> Iterator[dict[str, Array]]:
        """Give the whole arrays of a layer, by name, until the block ends; collective.

        They are the caller's until then, and only to be read: what is written is lost. NumPy's
        arrays refuse it; CuPy has no such flag. Afterwards the memory is given back, unless
        the caller keeps an array. Blocks may be nested, of one layer too, which is then gathered
        once. An exception in the block gives the layer back as usual; leaving a block sends
        nothing.

        Meanwhile the layer of use to come is gathered: the next in order of use, in the
        direction of the last two calls, turning round at the last layer. ``prefetch`` names
        another one, None none. A prefetched layer that is passed over is dropped.

        Raises ValueError for an unknown layer, before anything is sent.
        """
        for name in (layer, prefetch):
            if name and name not in self._layers:
                known = ", ".join(map(repr, self._layers)) or "none"
                raise ValueError(
                    f"gather on rank {self.comm.rank}: unknown layer {name!r}; known: {known}"
                )
        held = self._hold(layer, self._predict(layer) if prefetch == "" else prefetch)
        try:
            cut = len(layer) + 1
            yield {name[cut:]: view for name, view in held.views.items()}
        finally:
            held.users -= 1
            if not held.users:
                self._drop(layer)

    def _predict(self, layer: str) -> str | None:
        at, end = self._order_of_use.index(layer), len(self._order_of_use)
        move = at - self._last
        if abs(move) > 1:  # a jump, as from the last layer to the first
            self._direction = 1
        elif move:
            self._direction = move
        elif at in (0, end - 1):  # the turning point, used for the second time
            self._direction = 1 if at == 0 else -1
        self._last = at
        ahead = at + self._direction
        return self._order_of_use[ahead] if 0 <= ahead < end else None

    def _hold(self, layer: str, ahead: str | None) -> _Layer:
        for name in [*self._gathered]:
            if name not in (layer, ahead) and not self._gathered[name].users:
                self._drop(name)
        held = self._begin(layer)
        # After a layer's own, so that the order is the same on all ranks.
        if ahead is not None:
            self._begin(ahead)
        held.users += 1
        for flight in held.flights:
            flight.land()
        return held

    def _begin(self, layer: str) -> _Layer:
        held = self._gathered.get(layer)
        if held is None:
            flights = []
            shards = self._layers[layer]
            for shard in shards:
                value = self._value(shard)
                full = shard.group.xp.empty(shard.group.padded(self.comm.size), value.dtype)
                self._ledger.add("gathered", full)
                request = self.comm.Iallgather(bits(value), bits(full))
                flights.append(Flight(request, full, value))
            held = self._gathered[layer] = _Layer(flights, [one.group for one in shards])
        return held

    def _drop(self, layer: str) -> None:
        for flight in self._gathered.pop(layer).flights:
            flight.land()
            self._ledger.remove("gathered", flight.arrays[0])

    # -- gradients --------------------------------------------------------------------

    def ready(self, layer: str, gradients: Mapping[str, Array]) -> None:
        """Hand over the gradients of a layer's parameters, by name; copied; collective.

        The reduce-scatter goes on while the caller does; the mean over ranks stays in shards.
        Further calls before `step` add up.

        Raises ValueError for an unknown layer, before anything is sent, and for a wrong
        set of names, a shape, a place or a dtype; this rank then takes part with zeros, so that
        no call is mispaired, and `step` raises on all ranks.
        """
        shards = self._layers.get(layer)
        if shards is None:
            self._faults.append(f"gradients of an unknown layer {layer!r}")
            raise ValueError(f"ready on rank {self.comm.rank}: {self._faults[-1]}")
        named = {f"{layer}.{name}": gradient for name, gradient in gradients.items()}
        fault = self._layer_fault(layer, named)
        for shard in shards:
            group = shard.group
            if not group.trainable:
                continue
            full = group.xp.zeros(group.padded(self.comm.size), group.wire)
            self._ledger.add("buffers", full)
            if not fault:
                with np.errstate(all="ignore"):
                    group.read(named, 0, full)
            self._reduce(shard, full)
        self._reduced.add(layer)
        if fault:
            self._faults.append(fault)
            raise ValueError(f"ready on rank {self.comm.rank}: {fault}")
        self._poll()

    def _layer_fault(self, layer: str, named: Mapping[str, Array]) -> str:
        groups = {
            entry.name: shard.group
            for shard in self._layers[layer]
            for entry in shard.group.entries
        }
        expected = {name for name, group in groups.items() if group.trainable}
        for name in sorted(named.keys() - groups.keys()):
            return f"a gradient of {name!r}, which is no parameter"
        for name in sorted(expected - named.keys()):
            return f"no gradient of {name!r}"
        faults = (gradient_fault(groups[name], name, one) for name, one in named.items())
        return next((fault for fault in faults if fault), "")

    def step(
        self,
        *,
        max_norm: float | None = None,
        loss_scale: float = 1.0,
        missing: Missing = "error",
    ) -> float | None:
        """Update the shards by the mean of the gradients; return their norm; collective.

        Arguments and errors are those of `ShardedOptimizer.step`. A layer is missing if `ready`
        was not called for it. Raises ValueError also if called while a layer is in use.
        """
        trained = [
            layer
            for layer, shards in self._layers.items()
            if any(one.group.trainable for one in shards)
        ]
        lost = [layer for layer in trained if layer not in self._reduced]
        self._reduced.clear()
        used = self._let_go()
        if used:
            self._faults.append(f"step() while layer {used!r} is in use; leave its block first")
        settings = step_settings(max_norm, loss_scale, missing, self._faults)
        return self._step(lost if missing == "error" else [], settings, max_norm, loss_scale)

    def free(self) -> None:
        """Complete what is in flight and free the duplicate of the communicator; collective."""
        self._let_go()
        super().free()

    def _let_go(self) -> str:
        """Drop what was gathered ahead: it will be old. Return the layer that is in use."""
        for layer in [*self._gathered]:
            if not self._gathered[layer].users:
                self._drop(layer)
        return next(iter(self._gathered), "")

    def _busy(self, what: str) -> str:
        used = self._let_go()
        fault = f"{what}() while layer {used!r} is in use; leave its block first" if used else ""
        return fault or super()._busy(what)

    # -- update -----------------------------------------------------------------------

    def _value(self, shard: Shard) -> Array:
        assert shard.value is not None
        return shard.value

    def _update(self, factor: float) -> None:
        for shard in self._shards:
            if shard.group.trainable:
                shard.update(self._value(shard), self.optimizer, factor, self.steps)

    def _publish(self, values: Iterable[Array]) -> None:
        for shard, value in zip(self._shards, values, strict=True):
            shard.value = value

    def _parameter_bytes(self) -> int:
        return sum(self._value(one).nbytes for one in self._shards)
