"""Ranks on nodes, nodes on a network: what a message waits for and whom it shares links with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpicoll.simulation.machine import Integers, Reals, ticks


class Network(Protocol):
    """Links between nodes. Full duplex links are two, one each way."""

    nodes: int
    #: Shifting all nodes by this many maps links onto links; ``nodes`` where nothing less does.
    period: int
    #: Bytes per second of every link.
    rates: Reals

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
        links, seconds = self.ways(self.node(source), self.node(target))
        if folded:
            links = self._folded(links)
        message, hop = np.nonzero(links >= 0)
        link = links[message, hop]
        key = link if level is None else level[message] * self.rates.size + link
        kinds, key = np.unique(key, return_inverse=True)
        weight = units[message]
        load = np.bincount(key, weight, kinds.size)[key]
        crowd = np.bincount(key, minlength=kinds.size)[key]
        wire = np.zeros(units.size)
        np.maximum.at(wire, message, np.minimum(load, crowd * weight) / self.rates[link])
        return ticks(seconds), wire

    def ways(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the links from node to node, (messages, hops), -1 for none, and seconds."""
        nodes = self.network.nodes
        away = source != target
        inner, seconds = self.network.routes(source[away], target[away])
        links = np.full((source.size, 2 + inner.shape[1]), -1)
        latency = np.full(source.size, self._local.latency)
        latency[away] = seconds
        links[:, 0] = np.where(away, source, 2 * nodes + source)
        links[away, 1] = nodes + target[away]
        links[away, 2:] = np.where(inner >= 0, 3 * nodes + inner, -1)
        return links, latency

    def _folded(self, links: Integers) -> Integers:
        nodes, period = self.network.nodes, self.network.period
        kind, node = np.divmod(links, nodes)
        own = kind * nodes + node % period
        inner = 3 * nodes + self.network.folded(np.maximum(links - 3 * nodes, 0))
        result: Integers = np.where(links < 0, -1, np.where(links < 3 * nodes, own, inner))
        return result
