"""Networks by formula: a fat tree, a torus, a dragonfly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpicoll.simulation.machine import Integers, Reals

NONE = -(1 << 60)  #: no link, also once a node's number is added
SHORT = 128  #: places along an axis of a torus, up to which all ways along it are kept


class FatTree:
    """Leaf switches of ``leaf`` nodes under a core that does not block.

    A leaf's way up, and its way down, carries what all its nodes send, divided by
    ``oversubscription``; how it is spread over cables is not modelled.
    """

    def __init__(
        self,
        nodes: int,
        leaf: int,
        rate: float,
        latency: float,
        hop: float,
        oversubscription: float = 1.0,
    ) -> None:
        self.nodes = nodes
        self._leaf = leaf
        self._leaves = -(-nodes // leaf)
        self.hops = 2
        self._rate, self._latency, self._hop = rate, latency, hop
        self._oversubscription = oversubscription
        self.period = leaf if nodes % leaf == 0 else nodes
        self.rates: Reals = np.full(2 * self._leaves, rate * leaf / oversubscription)

    def whole(self) -> FatTree:
        """Return the tree with all leaves full."""
        others = self._rate, self._latency, self._hop, self._oversubscription
        return FatTree(self._leaves * self._leaf, self._leaf, *others)

    def routes(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return up and down, unless both are under one leaf; two more switches then."""
        one, other = source // self._leaf, target // self._leaf
        away = one != other
        links = np.where(away[:, None], np.stack([one, self._leaves + other], 1), -1)
        return links, np.where(away, self._latency + 2 * self._hop, self._latency)

    def folded(self, links: Integers) -> Integers:
        """Return the links of the first leaf."""
        result: Integers = links // self._leaves * self._leaves
        return result if self.period < self.nodes else links

    def __str__(self) -> str:
        return (
            f"fat tree of {self._leaves} x {self._leaf} nodes, "
            f"oversubscription {self._oversubscription:g}"
        )


class Torus:
    """A three-dimensional torus; node x + X (y + Y z); messages go along x, then y, then z.

    They take the shorter way round, in the direction of growing numbers if both are as long.
    """

    def __init__(
        self, nodes: int, shape: tuple[int, int, int], rate: float, latency: float, hop: float
    ) -> None:
        self.nodes = nodes
        self._shape = shape
        self.hops = sum(length // 2 for length in shape)
        self._rate, self._latency, self._hop = rate, latency, hop
        full = math.prod(shape) == nodes
        self.period = shape[0] * shape[1] if full else nodes
        self._places = math.prod(shape)
        self.rates: Reals = np.full(6 * self._places, rate)
        # The ways along an axis, from every place to every other, if they are not too many.
        self._known: list[Integers | None] = [None] * 3
        for axis, length in enumerate(shape):
            if length <= SHORT:
                links = np.empty((length // 2, length**2), np.int64)
                self._round(axis, *np.divmod(np.arange(length**2), length), links)
                self._known[axis] = links

    def whole(self) -> Torus:
        """Return the torus with a node at every place."""
        return Torus(self._places, self._shape, self._rate, self._latency, self._hop)

    def routes(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the links node by node."""
        hops = np.zeros(source.size, np.int64)
        here = source
        stride = 1
        turns = []
        for axis, length in enumerate(self._shape):
            place = here // stride % length
            ahead = (target // stride % length - place) % length
            rest = here - place * stride
            steps = np.minimum(ahead, length - ahead)
            turns.append((axis, place, ahead, rest, int(steps.max(initial=0))))
            here = rest + (place + ahead) % length * stride
            hops += steps
            stride *= length
        links = np.empty((sum(turn[-1] for turn in turns), source.size), np.int64)
        row = 0
        for axis, place, ahead, rest, most in turns:
            part = links[row : row + most]
            self._round(axis, place, ahead, part)
            part += rest
            row += most
        np.maximum(links, -1, out=links)
        return links.T, self._latency + self._hop * np.maximum(hops - 1, 0)

    def _round(self, axis: int, place: Integers, ahead: Integers, links: Integers) -> None:
        """Set the links from places along an axis to those ``ahead``, (hops, messages).

        They are those of the node that is at 0 along the other axes.
        """
        length = self._shape[axis]
        known = self._known[axis]
        if known is not None:
            np.take(known[: len(links)], place * length + ahead, 1, links, "clip")
            return
        stride = math.prod(self._shape[:axis])
        back = ahead > length - ahead
        step = np.arange(len(links))[:, None]
        node = (place + np.where(back, -step, step)) % length * stride
        some = step < np.minimum(ahead, length - ahead)
        links[:] = np.where(some, (2 * axis + back) * self._places + node, NONE)

    def folded(self, links: Integers) -> Integers:
        """Return the links of the first plane."""
        direction, node = np.divmod(links, self._places)
        result: Integers = direction * self._places + node % self.period
        return result

    def __str__(self) -> str:
        return f"torus of {' x '.join(map(str, self._shape))}, messages along x, y, z"


@dataclass(frozen=True, slots=True)
class Dragons:
    """The shape of a dragonfly: nodes per router, routers per group, global links per router."""

    nodes: int
    routers: int
    links: int


def balanced(nodes: int) -> Dragons:
    """Return the smallest balanced shape that has room: as many global links as nodes, twice
    as many routers."""
    each = 1
    while each * 2 * each * (2 * each * each + 1) < nodes:
        each += 1
    return Dragons(each, 2 * each, each)


class Dragonfly:
    """Groups of routers, all joined within a group, and every group joined to every other.

    Messages take the shortest way: at most a link to the router with the cable to the other
    group, that cable, and a link to the target's router. The cables to the d-th next group are
    at the same router of every group; several to one group count as one of their sum.

    Source: J. Kim, W. J. Dally, S. Scott, D. Abts, "Technology-Driven, Highly-Scalable
    Dragonfly Topology", International Symposium on Computer Architecture (2008).
    """

    def __init__(
        self, nodes: int, shape: Dragons, rate: float, latency: float, hop: float
    ) -> None:
        self.nodes = nodes
        self._shape = shape
        self.hops = 3
        self._rate, self._latency, self._hop = rate, latency, hop
        in_group = shape.nodes * shape.routers
        self._groups = -(-nodes // in_group)
        self.period = in_group if nodes % in_group == 0 else nodes
        self._cables = max(1, shape.routers * shape.links // max(1, self._groups - 1))
        inner = self._groups * shape.routers**2
        cables = np.full(self._groups**2, rate * self._cables)
        self.rates: Reals = np.concatenate([np.full(inner, rate), cables])

    def whole(self) -> Dragonfly:
        """Return the dragonfly with all groups full."""
        nodes = self._groups * self._shape.nodes * self._shape.routers
        return Dragonfly(nodes, self._shape, self._rate, self._latency, self._hop)

    def routes(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the link in the first group, the cable, and the link in the other group."""
        count = self._shape.routers
        first, start = np.divmod(source // self._shape.nodes, count)
        last, end = np.divmod(target // self._shape.nodes, count)
        apart = (last - first) % self._groups
        away = apart > 0
        leave = np.where(away, self._router(apart), end)
        enter = np.where(away, self._router(-apart % self._groups), end)
        inner = self._groups * count**2
        links = np.full((source.size, 3), -1)
        links[:, 0] = np.where(start != leave, (first * count + start) * count + leave, -1)
        links[:, 1] = np.where(away, inner + first * self._groups + apart, -1)
        links[:, 2] = np.where(away & (enter != end), (last * count + enter) * count + end, -1)
        return links, self._latency + self._hop * (links >= 0).sum(1)

    def folded(self, links: Integers) -> Integers:
        """Return the links of the first group."""
        inner = self._groups * self._shape.routers**2
        if self.period == self.nodes:
            return links
        within = links % self._shape.routers**2
        result: Integers = np.where(links < inner, within, inner + (links - inner) % self._groups)
        return result

    def _router(self, apart: Integers) -> Integers:
        """Return the router with the cables to the group ``apart`` groups further."""
        result: Integers = (apart - 1) * self._cables // self._shape.links % self._shape.routers
        return result

    def __str__(self) -> str:
        shape = self._shape
        return (
            f"dragonfly of {self._groups} groups with {shape.routers} routers of {shape.nodes} "
            f"nodes and {shape.links} global links each, shortest ways"
        )
