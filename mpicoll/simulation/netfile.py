"""A network described by a file: nodes, and links between them and switches."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.errors import SettingError
from mpicoll.simulation.machine import Integers, Reals

MOST = 4096  #: vertices of a graph; a way is kept for every pair of node and vertex
_LINK = {"between", "bandwidth", "latency"}


class Graph:
    """Links between nodes and switches; messages take a way with the fewest of them.

    Of several such ways it is that over the vertices that the file names first. ``ends`` are
    the two vertices of each link, which has a rate and a latency each way; nodes come first.
    """

    def __init__(
        self, names: list[str], nodes: int, ends: list[tuple[int, int]], rates: Reals, late: Reals
    ) -> None:
        self.nodes = self.period = nodes
        self.rates = np.concatenate([rates, rates])
        self._late = np.concatenate([late, late])
        self._names = names
        neighbours: list[list[tuple[int, int]]] = [[] for _ in names]
        for link, (one, other) in enumerate(ends):
            neighbours[one].append((other, link))
            neighbours[other].append((one, link + len(ends)))
        self._neighbours = [sorted(row) for row in neighbours]
        # From every vertex, the next one and the link on the way to each node.
        self._next = np.full((nodes, len(names)), -1, np.int32)
        self._link = np.full((nodes, len(names)), -1, np.int32)
        back = np.concatenate([np.arange(len(ends)) + len(ends), np.arange(len(ends))])
        for node in range(nodes):
            self._spread(node, back)
        self.hops = 2 * min(nodes, 2)  # from node to switch to node, or more, at most
        lost = np.argwhere(self._link[:, :nodes] < 0)
        lost = lost[lost[:, 0] != lost[:, 1]]
        if lost.size:
            raise SettingError(
                f"no way from {names[lost[0, 0]]!r} to {names[lost[0, 1]]!r}; links are missing"
            )

    def _spread(self, node: int, back: Integers) -> None:
        """Find the ways of all vertices to a node, breadth first."""
        seen = {node}
        queue = deque([node])
        while queue:
            here = queue.popleft()
            for there, link in self._neighbours[here]:
                if there not in seen:
                    seen.add(there)
                    queue.append(there)
                    self._next[node, there] = here
                    self._link[node, there] = back[link]

    def whole(self) -> Graph:
        """Return itself: nothing is known to repeat."""
        return self

    def routes(self, source: Integers, target: Integers) -> tuple[Integers, Reals]:
        """Return the links of the ways."""
        here = source.copy()
        columns = []
        while (here != target).any():
            going = here != target
            columns.append(np.where(going, self._link[target, here], -1))
            here = np.where(going, self._next[target, here], here)
        if not columns:
            return np.empty((source.size, 0), np.int64), np.zeros(source.size)
        links = np.stack(columns, axis=1).astype(np.int64)
        return links, np.where(links >= 0, self._late[links], 0.0).sum(axis=1)

    def folded(self, links: Integers) -> Integers:
        """Return the links: nothing is known to repeat."""
        return links

    def __str__(self) -> str:
        switches = len(self._names) - self.nodes
        return f"graph of {self.nodes} nodes, {switches} switches and {self.rates.size // 2} links"


def read(file: str, rate: float, latency: float) -> Graph:
    """Return the network of a JSON file.

    It has ``nodes``, a list of names in the order in which ranks fill them, and ``links``, each
    ``{"between": [name, name]}`` with ``bandwidth`` (GB/s) and ``latency`` (µs) if they are
    not ``rate`` and ``latency`` (bytes/s, seconds). Other names are switches. What is wrong
    raises SettingError.
    """
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} can not be read: {error}") from None
    except RecursionError:
        raise SettingError(f"{file}: no network: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise SettingError(f"{file}, line {error.lineno}: no JSON, {error.msg}") from None
    try:
        return _graph(data, rate, latency)
    except SettingError as error:
        raise SettingError(f"{file}: {error}") from None


def _graph(data: Any, rate: float, latency: float) -> Graph:
    if not isinstance(data, dict) or set(data) != {"nodes", "links"}:
        raise SettingError('expected {"nodes": […], "links": […]} and nothing else')
    names, links = data["nodes"], data["links"]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise SettingError('"nodes" is not a list of names')
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingError(f'"nodes" has {twice!r} twice')
    if not isinstance(links, list):
        raise SettingError('"links" is not a list')
    places = {name: at for at, name in enumerate(names)}
    ends: list[tuple[int, int]] = []
    linked: set[frozenset[int]] = set()
    rates, late = [], []
    for number, link in enumerate(links):
        where = f"links[{number}]"
        ends.append(_ends(link, where, places))
        pair = frozenset(ends[-1])
        if pair in linked:
            raise SettingError(f"{where}: these two have a link already; add up the bandwidths")
        linked.add(pair)
        rates.append(_number(link, "bandwidth", where, rate, 1e9, positive=True))
        late.append(_number(link, "latency", where, latency, 1e-6, positive=False))
    if len(places) > MOST:
        raise SettingError(f"{len(places)} nodes and switches; at most {MOST} are taken")
    return Graph(list(places), len(names), ends, np.array(rates), np.array(late))


def _ends(link: Any, where: str, places: dict[str, int]) -> tuple[int, int]:
    if not isinstance(link, dict) or "between" not in link or not set(link) <= _LINK:
        raise SettingError(f'{where}: expected {{"between": [name, name]}}, maybe with {_OTHERS}')
    pair = link["between"]
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, str) for n in pair)):
        raise SettingError(f'{where}: "between" is not two names')
    if pair[0] == pair[1]:
        raise SettingError(f"{where}: from {pair[0]!r} to itself")
    one, other = (places.setdefault(name, len(places)) for name in pair)
    return one, other


_OTHERS = '"bandwidth" (GB/s) and "latency" (µs)'


def _number(
    link: dict[str, Any], key: str, where: str, default: float, unit: float, *, positive: bool
) -> float:
    value = link.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{where}: {key} {value!r} is no number")
    if not (0 < value < 1e12 or (value == 0 and not positive)):
        least = "more than 0" if positive else "0 or more"
        raise SettingError(f"{where}: {key} {value!r}, expected {least}")
    return float(value) * unit
