"""Ranks on nodes, nodes on a network: what a message waits for and whom it shares links with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from mpicoll.simulation.machine import Integers, Reals, ticks

BLOCK = 1 << 14  #: messages whose links are looked at together
FEW = 16  #: times as many links as messages have are few messages
KEPT = 1 << 25  #: links of messages that are kept, and not looked for once more


class Network(Protocol):
    """Links between nodes. Full duplex links are two, one each way."""

    nodes: int
    #: Shifting all nodes by this many maps links onto links; ``nodes`` where nothing less does.
    period: int
    #: Links that a message passes at most.
    hops: int
    #: Bytes per second of every link.
    rates: Reals

    def whole(self) -> Network:
        """Return the network with the fewest nodes more that make it repeat, or itself."""

    def routes(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the links from node to node, (messages, hops), -1 for none, and seconds."""

    def folded(self, links: Integers) -> Integers:
        """Return for every link the one that it is shifted onto among the first nodes' links."""

    def __str__(self) -> str:
        """Describe the network in a few words."""


@dataclass(frozen=True, slots=True)
class Local:
    """Messages within a node: seconds each, and bytes per second of the node's memory."""

    latency: float = 0.3e-6
    rate: float = 10e9


class Fabric:
    """``size`` ranks, ``per_node`` on each node in rank order, and the network between them."""

    def __init__(
        self, size: int, per_node: int, network: Network, port: float, local: Local = Local()
    ) -> None:
        self.size = size
        self.per_node = per_node
        self.network = network
        self._local, self._port = local, port
        nodes = network.nodes
        #: Bytes per second of links: of nodes the ports out, the ports in, the memories; then
        #: those of the network.
        self.rates = np.concatenate(
            [np.full(2 * nodes, port), np.full(nodes, local.rate), network.rates]
        )
        #: Ranks by which all can be shifted.
        self.repeat = per_node * network.period
        whole = size == nodes * per_node
        #: Ranks after which everything repeats; ``size`` where nothing does.
        self.period = self.repeat if whole else size
        self._fold: Integers | None = None

    def whole(self) -> Fabric | None:
        """Return as few ranks more as make the network repeat; None where nothing does."""
        network = self.network.whole()
        if network.period == network.nodes:
            return None
        size = network.nodes * self.per_node
        return Fabric(size, self.per_node, network, self._port, self._local)

    def resized(self, size: int) -> Fabric:
        """Return the first ``size`` ranks on the same network."""
        return Fabric(size, self.per_node, self.network, self._port, self._local)

    def node(self, ranks: Integers) -> Integers:
        """Return the nodes of ranks."""
        return ranks // self.per_node

    def engaged(self, ranks: Integers) -> Integers:
        """Return for each of some different ranks how many of them are on its node."""
        nodes = self.node(ranks)
        counts = np.bincount(nodes)
        result: Integers = counts[nodes]
        return result

    def transfer(
        self,
        source: Integers,
        target: Integers,
        units: Integers,
        level: Integers | None = None,
        folded: bool = False,
    ) -> tuple[Integers, Reals]:
        """Return ticks of latency, and seconds for each byte of a unit, of messages.

        Those of the same ``level`` share links: a message takes as long as the slowest of its
        links needs for all it has to carry, or, where that is less, for as many messages of
        this length as it has. ``folded`` if the messages are those of the first ``period``
        ranks, of which those of the others are shifted copies.
        """
        ends = self.node(source), self.node(target)
        blocks = [slice(low, low + BLOCK) for low in range(0, units.size, BLOCK)]
        seconds, wire = np.zeros(units.size), np.zeros(units.size)
        if not blocks:
            return ticks(seconds), wire
        kept: dict[int, Integers] = {}

        def columns(block: slice) -> Integers:
            """Return the links of a block of messages, (hops, messages)."""
            found = kept.get(block.start)
            if found is None:
                links, seconds[block] = self.ways(ends[0][block], ends[1][block])
                found = links.T
                if sum(map(np.size, kept.values())) < KEPT:
                    kept[block.start] = found
            return found

        number, rates = self._numbered(map(columns, blocks), folded)
        if level is None:
            level = np.zeros(units.size, np.int64)
        levels = int(level.max()) + 1
        base = level * rates.size
        usual = np.zeros(levels, np.int64)
        usual[level] = units
        alike = bool((units == usual[level]).all())
        load, crowd = np.zeros(levels * rates.size), np.zeros(levels * rates.size, np.int64)
        for block in blocks:
            keys = number(columns(block)) + base[block]
            crowd += np.bincount(keys.ravel(), minlength=crowd.size)
            if not alike:
                weight = np.tile(units[block], len(keys))
                load += np.bincount(keys.ravel(), weight, load.size)
        # Where those of a level are as long, what a link carries is so many times that.
        slow = (crowd.reshape(levels, -1) * usual[:, None] / rates).ravel()
        for block in blocks:
            links = number(columns(block))
            keys = links + base[block]
            if alike:
                busy = slow[keys]
            else:
                busy = np.minimum(load[keys], crowd[keys] * units[block]) / rates[links]
            wire[block] = busy.max(axis=0)
        return ticks(seconds), wire

    def _numbered(
        self, parts: Iterable[Integers], folded: bool
    ) -> tuple[Callable[[Integers], Integers], Reals]:
        """Return what gives links that are in use a number from 1 on, and rates by number.

        Number 0 is no link, and keeps no message waiting.
        """
        size = self.rates.size
        parts = iter(parts)
        first = next(parts)
        # A whole block has more, of two ends each: there is no other one.
        if first.size < min(size // FEW, BLOCK) and not folded:
            used = np.unique(np.append(first, -1))
            rates = np.append(np.inf, self.rates[used[1:]])
            return lambda links: np.searchsorted(used, links), rates
        stands = self._folds() if folded else np.append(np.arange(size), size)
        flags = np.zeros(size + 1, bool)
        for links in chain([first], parts):
            flags[stands[links]] = True
        flags[size] = False
        number = np.cumsum(flags)
        number[~flags] = 0
        return number[stands].__getitem__, np.append(np.inf, self.rates[flags[:size]])

    def _folds(self) -> Integers:
        """Return which link of the first period each one is shifted onto."""
        if self._fold is None:
            size = self.rates.size
            self._fold = np.append(self._folded(np.arange(size)), size)
        return self._fold

    def ways(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the links from node to node, (messages, hops), -1 for none, and seconds."""
        nodes = self.network.nodes
        away = source != target
        inner, seconds = self.network.routes(source[away], target[away])
        links = np.full((2 + inner.shape[1], source.size), -1).T
        latency = np.full(source.size, self._local.latency)
        latency[away] = seconds
        links[:, 0] = np.where(away, source, 2 * nodes + source)
        links[away, 1] = nodes + target[away]
        shift = (inner >= 0) * (3 * nodes)
        if away.all():
            np.add(inner, shift, out=links[:, 2:])
        else:
            links[away, 2:] = inner + shift
        return links, latency

    def _folded(self, links: Integers) -> Integers:
        nodes, period = self.network.nodes, self.network.period
        kind, node = np.divmod(links, nodes)
        own = kind * nodes + node % period
        inner = 3 * nodes + self.network.folded(np.maximum(links - 3 * nodes, 0))
        result: Integers = np.where(links < 3 * nodes, own, inner)
        return result
