"""Who waits for whom: the running calls of all dumps as a graph.

The running calls are the nodes of a graph: each points to what it waits for, that is another
running call, or a rank that is in its own code, has failed, has ended its program or wrote no
dump. Where its paths end, there is the cause; a circle through different calls is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from mpicoll.cli.flight_dumps import Dump, Group
from mpicoll.runtime.flight import FINALIZE
from mpicoll.runtime.record import Record

#: The number of the end of the program, as of a call that comes after all others.
LAST = 1 << 62


class Node(NamedTuple):
    """A running call of a rank, or its wait for the others at the end of the program."""

    rank: int
    communicator: str
    sequence: int


class End(NamedTuple):
    """Where a path of waits ends: "missing", "behind", "ended" or "stalled"."""

    kind: str
    rank: int


Target: TypeAlias = "Node | End"


class Place(NamedTuple):
    """How far a rank is on a communicator: the last call it completed, and those that run."""

    done: Record | None
    running: tuple[Record, ...]
    reached: int


def runs(record: Record) -> bool:
    """Whether a call waited when its rank was dumped; one that timed out did."""
    return not record.end or record.error.startswith("CollectiveTimeout")


class Scene:
    """All dumps of a run, looked at together."""

    def __init__(self, dumps: dict[int, Dump]) -> None:
        self.dumps = dumps
        self.world = max((dump.world for dump in dumps.values()), default=0)
        self.groups: dict[str, Group] = {}
        self.places: dict[str, dict[int, Place]] = defaultdict(dict)
        self.calls: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
        self.ended: set[int] = set()
        for rank, dump in dumps.items():
            self._add(rank, dump)

    def _add(self, rank: int, dump: Dump) -> None:
        own: dict[str, list[Record]] = {identity: [] for identity in dump.groups}
        for record in dump.calls:
            if record.collective == FINALIZE:
                self.ended.add(rank)
                self.calls[record.communicator, LAST][rank] = record
                continue
            own[record.communicator].append(record)
            self.calls[record.communicator, record.sequence][rank] = record
        for identity, records in own.items():
            self.groups.setdefault(identity, dump.groups[identity])
            done = [record for record in records if not runs(record)]
            self.places[identity][rank] = Place(
                max(done, key=lambda record: record.sequence, default=None),
                tuple(record for record in records if runs(record)),
                max((record.sequence for record in records), default=0),
            )

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the world without a dump."""
        return tuple(rank for rank in range(self.world) if rank not in self.dumps)

    def inside(self, rank: int) -> list[Node]:
        """Return the calls in which a rank waits: a blocking one, else those it may wait for."""
        running = [record for record in self.dumps[rank].calls if runs(record)]
        if rank in self.ended:
            ends = [record for record in running if record.collective == FINALIZE]
            return [Node(rank, record.communicator, LAST) for record in ends]
        blocking = [record for record in running if record.form == "blocking" or record.end]
        if blocking:
            running = [max(blocking, key=lambda record: record.start)]
        elif not self.dumps[rank].inside:
            return []
        return [Node(rank, record.communicator, record.sequence) for record in running]

    def last(self, rank: int) -> Record | None:
        """Return the call of a rank that ended last."""
        calls = [one for one in self.dumps[rank].calls if one.collective != FINALIZE]
        ended = [record for record in calls if not runs(record)]
        return max(ended, key=lambda record: record.end, default=None)

    def record(self, node: Node) -> Record:
        """Return the call of a node."""
        return self.calls[node.communicator, node.sequence][node.rank]

    def since(self, node: Node) -> float:
        """Return the wall clock at which a call began."""
        return self.dumps[node.rank].wall_of(self.record(node).start)

    def targets(self, node: Node) -> list[Target]:
        """Return what a running call waits for."""
        identity, sequence = node.communicator, node.sequence
        record, ranks = self.record(node), self.dumps[node.rank].groups[identity].ranks
        found: list[Target] = []
        together = False
        for peer in [ranks[wait] for wait in record.waits] or ranks:
            if peer == node.rank:
                continue
            if peer not in self.dumps:
                found.append(End("missing", peer))
                continue
            place = self.places[identity].get(peer)
            if place is None or place.reached < sequence:
                if peer not in self.ended:
                    found += self.inside(peer) or [End("behind", peer)]
                elif sequence == LAST:
                    together = True
                else:
                    found.append(End("ended", peer))
                continue
            theirs = self.calls[identity, sequence].get(peer)
            if theirs is not None and runs(theirs):
                # Who waits for nobody in particular is not held up by those who came as well.
                together = together or not record.waits
                found += [Node(peer, identity, sequence)] if record.waits else []
            elif theirs is not None and theirs.error:
                found.append(End("behind", peer))
        return found if found or together else [End("stalled", node.rank)]


# -- the graph --------------------------------------------------------------------------


def graph(scene: Scene) -> dict[Node, list[Target]]:
    """Return what each call in which a rank waits is waiting for."""
    todo = deque(node for rank in scene.dumps for node in scene.inside(rank))
    found: dict[Node, list[Target]] = {}
    while todo:
        node = todo.popleft()
        if node not in found:
            found[node] = list(dict.fromkeys(scene.targets(node)))
            todo += [target for target in found[node] if isinstance(target, Node)]
    return found


def waiters(
    edges: dict[Node, list[Target]], ends: Iterable[Target]
) -> dict[Node, tuple[Target, int]]:
    """Return the nodes that wait for ``ends``: the next on the way there, and how far it is."""
    back: dict[Target, list[Node]] = defaultdict(list)
    for node, targets in edges.items():
        for target in targets:
            back[target].append(node)
    found: dict[Node, tuple[Target, int]] = {}
    todo: deque[tuple[Target, int]] = deque((end, 0) for end in ends)
    while todo:
        target, steps = todo.popleft()
        for node in back[target]:
            if node not in found:
                found[node] = target, steps + 1
                todo.append((node, steps + 1))
    return found


def circles(edges: dict[Node, list[Target]]) -> Iterator[list[Node]]:
    """Yield a circle of waits through different calls from each knot that has one."""
    for knot in _knots(edges):
        members = set(knot)
        for node in sorted(knot):
            for target in edges[node]:
                if isinstance(target, Node) and target in members and target[1:] != node[1:]:
                    way = _way(edges, members, target, node)
                    first = way.index(min(way))
                    yield way[first:] + way[:first]
                    break
            else:
                continue
            break


def _way(
    edges: dict[Node, list[Target]], members: set[Node], first: Node, last: Node
) -> list[Node]:
    """Return the shortest way from ``first`` to ``last`` inside a knot."""
    came: dict[Node, Node] = {first: first}
    todo = deque([first])
    while last not in came:
        node = todo.popleft()
        for target in edges[node]:
            if isinstance(target, Node) and target in members and target not in came:
                came[target] = node
                todo.append(target)
    way = [last]
    while way[-1] != first:
        way.append(came[way[-1]])
    return way[::-1]


def _knots(edges: dict[Node, list[Target]]) -> Iterator[list[Node]]:
    """Yield the strongly connected parts of more than one node (Tarjan, without recursion)."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    open_: set[Node] = set()
    for start in edges:
        work = [(start, iter(edges[start]))] if start not in order else []
        while work:
            node, targets = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
                open_.add(node)
            for target in targets:
                if not isinstance(target, Node):
                    continue
                if target not in order:
                    work.append((target, iter(edges[target])))
                    break
                if target in open_:
                    low[node] = min(low[node], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    knot = [stack.pop()]
                    while knot[-1] != node:
                        knot.append(stack.pop())
                    open_.difference_update(knot)
                    if len(knot) > 1:
                        yield knot
