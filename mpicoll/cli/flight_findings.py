"""What the dumps of all ranks say together, in plain words, the cause first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mpicoll.cli.flight_graph import (
    LAST,
    End,
    Node,
    Scene,
    Target,
    circles,
    graph,
    runs,
    waiters,
)
from mpicoll.cli.flight_words import (
    ago,
    clock,
    ended,
    idle_since,
    listed,
    named,
    present,
    short,
    spans,
    who,
)
from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime.flight import SIGNALLED
from mpicoll.runtime.record import Record
from mpicoll.schedule.contracts import REDUCTIONS, ROOTED

#: Collectives for which all ranks pass as many bytes; the v-forms of the others need not.
UNIFORM = frozenset({"allreduce", "bcast", "exscan", "reduce", "scan"})
#: Seconds between the first and the last dump above which they tell of different moments.
MOMENT = 5.0
BYTES = "bytes"  #: what a call without a datatype counts
_LINKS = 6  # of a chain of waits that are named


@dataclass(frozen=True, slots=True)
class Row:
    """A call as some ranks passed it."""

    ranks: str
    collective: str
    algorithm: str
    operator: str
    dtype: str
    count: int
    nbytes: int
    root: int
    site: str


_PASSED = tuple(field.name for field in fields(Row) if field.name != "ranks")


@dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion: ``ranks`` are those at fault, ``waiting`` those that wait because of them.

    ``kind`` is "mismatch", "deadlock", "failed", "missing", "behind", "ended" (its program),
    "stalled" or "together". Ranks are those of the world; ``since`` is the wall clock, 0.0 where
    it is not known, ``sequence`` `LAST` at the end of the program. ``rows`` are the calls of a
    mismatch.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    communicator: str = ""
    sequence: int = 0
    since: float = 0.0
    rows: tuple[Row, ...] = ()


def conclude(scene: Scene) -> list[Finding]:
    """Return what is wrong, the cause before what follows from it; nothing if all is well."""
    edges = graph(scene)
    found = [*_mismatches(scene), *_deadlocks(scene, edges), *_failures(scene)]
    ends = {target for targets in edges.values() for target in targets if isinstance(target, End)}
    found += [*_missing(scene, edges, ends), *_behind(scene, edges, ends)]
    if not found:
        found += [*_stalled(scene, edges, ends), *_together(scene, edges)]
    return found


# -- mismatch ---------------------------------------------------------------------------


def _mismatches(scene: Scene) -> Iterable[Finding]:
    """Yield the first call of each communicator that the ranks did not pass alike."""
    seen = set[str]()
    for (identity, sequence), calls in sorted(scene.calls.items(), key=lambda item: item[0]):
        if identity in seen:
            continue
        differ = _differences(list(calls.values()))
        if not differ:
            continue
        seen.add(identity)
        name = scene.groups[identity].name
        what = " and ".join(differ)
        rows = _rows(calls)
        text = (
            f"The ranks do not call the same: at call #{sequence} on {name} they pass "
            f"different {what}. {'; '.join(_passed(row) for row in rows[:4])}."
        )
        start = min(scene.dumps[rank].wall_of(call.start) for rank, call in calls.items())
        yield Finding("mismatch", text, tuple(calls), (), identity, sequence, start, rows)


def _differences(calls: Sequence[Record]) -> list[str]:
    """Return what calls of one sequence number differ in, in the plural."""
    if len({call.collective for call in calls}) > 1:
        return ["collectives"]
    # What was refused, or has just begun, has not been described.
    told = [call for call in calls if call.algorithm and not (call.error and not runs(call))]
    if len(told) < 2:
        return []
    collective = told[0].collective
    names = {"algorithm": "algorithms"}
    if collective in ROOTED:
        names |= {"root": "roots"}
    if collective in REDUCTIONS:
        names |= {"operator": "operators", "dtype": "datatypes"}
    if collective in UNIFORM:
        names |= {"nbytes": "counts"}
    return [
        words for field, words in names.items() if len({getattr(call, field) for call in told}) > 1
    ]


def _rows(calls: dict[int, Record]) -> tuple[Row, ...]:
    """Return the different calls, those of most ranks first."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[tuple(getattr(call, field) for field in _PASSED)].append(rank)
    rows = sorted(alike.items(), key=lambda item: (-len(item[1]), item[1]))
    return tuple(Row(spans(ranks), *passed) for passed, ranks in rows)


def _passed(row: Row) -> str:
    root = f", root {row.root}" if row.root >= 0 else ""
    operator = f", {row.operator}" if row.operator else ""
    by = f" by {row.algorithm}" if row.algorithm else ""
    count = f", {row.count} {row.dtype or BYTES}" if row.dtype or row.count else ""
    return f"{who(row.ranks)}: {row.collective}{by}{count}{operator}{root} at {short(row.site)}"


# -- who waits for whom -----------------------------------------------------------------


def _deadlocks(scene: Scene, edges: dict[Node, list[Target]]) -> Iterable[Finding]:
    for circle in circles(edges):
        lines = []
        for node, after in zip(circle, [*circle[1:], circle[0]], strict=True):
            lines.append(f"rank {node.rank} is in {named(scene, node)} and waits for {after.rank}")
        names = list(dict.fromkeys(scene.groups[node.communicator].name for node in circle))
        order = ""
        if len(names) > 1:
            order = f" They take {listed(names)} in different order; let all take the same."
        since = max(scene.since(node) for node in circle)
        text = f"Deadlock since {clock(since)}: {'; '.join(lines)}.{order}"
        held = waiters(edges, circle)
        ranks = tuple(sorted({node.rank for node in circle}))
        others = tuple(sorted({node.rank for node in held} - set(ranks)))
        yield Finding(
            "deadlock", text, ranks, others, circle[0].communicator, circle[0].sequence, since
        )


def _failures(scene: Scene) -> Iterable[Finding]:
    """Yield the calls that ended with an error and that no later call of the rank followed."""
    failed: list[tuple[int, Record]] = []
    for rank in scene.dumps:
        last = scene.last(rank)
        if last is not None and last.error and not scene.inside(rank):
            failed.append((rank, last))
    # A rank that gave up because another did is not the cause.
    own = [one for one in failed if not one[1].error.startswith("PeerError")] or failed
    alike: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for rank, last in own:
        alike[last.error, last.communicator, last.sequence].append(rank)
    for (error, identity, sequence), ranks in alike.items():
        node = Node(ranks[0], identity, sequence)
        since = min(ended(scene, rank, scene.record(Node(rank, *node[1:]))) for rank in ranks)
        text = f"{who(ranks)} left {named(scene, node)} with an error at {clock(since)}: {error}"
        yield Finding("failed", text, tuple(ranks), (), identity, sequence, since)


def _missing(scene: Scene, edges: dict[Node, list[Target]], ends: set[End]) -> Iterable[Finding]:
    ranks = scene.missing
    if not ranks:
        return
    text = f"{who(ranks)} of {scene.world} left no dump: {_silence(scene, len(ranks) == 1)}"
    wanted = [end for end in ends if end.kind == "missing"]
    held, since, first = _held(scene, edges, wanted)
    if first is None:
        text += " No other rank waits for it." if len(ranks) == 1 else " No other rank waits."
        yield Finding("missing", text, ranks)
        return
    text += f" {_waiting(scene, held, first, since)}"
    yield Finding("missing", text, ranks, _ranks(held), first.communicator, first.sequence, since)


def _silence(scene: Scene, alone: bool) -> str:
    """Say what ranks without a dump may be in; it depends on why the others dumped."""
    reasons = [dump.reason for dump in scene.dumps.values()]
    word = "it is" if alone else "they are"
    dead = f"{word} dead, stopped, in C code that lets no Python run,"
    if SIGNALLED in reasons:
        return f"{dead} or on a host that writes elsewhere."
    signal = "Send SIGUSR1 while the job hangs, and read again."
    if any(reason.startswith(CollectiveTimeout.__name__) for reason in reasons):
        own = "its" if alone else "their"
        return (
            f"{dead} on a host that writes elsewhere, or in {own} own code where a limit does not "
            f"ask: on another host, or where SIGUSR1 has another handler. {signal}"
        )
    return f"{word} dead, or met no error, and nobody has asked. {signal}"


def _behind(scene: Scene, edges: dict[Node, list[Target]], ends: set[End]) -> Iterable[Finding]:
    """Yield the ranks that others wait for, in their own code or at the end of their program;
    together where they are alike."""
    alike: dict[tuple[Any, ...], list[End]] = defaultdict(list)
    for end in sorted(ends):
        if end.kind in ("behind", "ended"):
            last = scene.last(end.rank)
            call = (last.communicator, last.sequence, last.site) if last else ()
            alike[end.kind, call].append(end)
    # Who has ended waits at its end for those who wait for it.
    calls = {node: targets for node, targets in edges.items() if node.sequence != LAST}
    for (kind, _), group in alike.items():
        ranks = tuple(end.rank for end in group)
        held, begun, first = _held(scene, edges if kind == "behind" else calls, group)
        if first is None:
            continue
        since = min(idle_since(scene, rank) for rank in ranks)
        is_, has = ("is", "has") if len(ranks) == 1 else ("are", "have")
        its = "its" if len(ranks) == 1 else "their"
        what = f"{is_} behind" if kind == "behind" else f"{has} ended {its} program"
        text = (
            f"{who(ranks)} {what}. {_waiting(scene, held, first, begun)} "
            f"{_alone(scene, ranks, kind)}"
        )
        yield Finding(kind, text, ranks, _ranks(held), first.communicator, first.sequence, since)


def _alone(scene: Scene, ranks: tuple[int, ...], kind: str) -> str:
    """Say what ranks that are behind, or have ended, did last, and where they are."""
    they, has, its = ("It", "has", "its") if len(ranks) == 1 else ("They", "have", "their")
    rank = ranks[0]
    last, dump = scene.last(rank), scene.dumps[rank]
    if last is None:
        text = f"{they} {has} completed no call" + (" yet" if kind == "behind" else "")
    else:
        end = ended(scene, rank, last)
        word = "left with an error" if last.error else "completed"
        node = Node(rank, last.communicator, last.sequence)
        text = f"{they} {word} {named(scene, node)} at {clock(end)}"
        if kind == "behind":
            text += (
                f", {ago(dump.wall - end)} before the dump, and {has} been in {its} own code since"
            )
    if kind == "behind" and (place := present(scene, rank)):
        whose = "" if len(ranks) == 1 else f" (rank {rank})"
        text += f"; now at {place}{whose}"
    return text + (", and made no call after that." if kind == "ended" and last else ".")


def _stalled(scene: Scene, edges: dict[Node, list[Target]], ends: set[End]) -> Iterable[Finding]:
    stalled = sorted(end.rank for end in ends if end.kind == "stalled")
    for node in sorted(edges):
        if node.rank in stalled and End("stalled", node.rank) in edges[node]:
            since = scene.since(node)
            text = (
                f"Rank {node.rank} is in {named(scene, node)} since {clock(since)}, and all that "
                "it waits for have left that call: a message is under way or lost, or the dumps "
                "are of different moments. Dump again: what has not moved is stuck."
            )
            yield Finding(
                "stalled", text, (node.rank,), (), node.communicator, node.sequence, since
            )


def _together(scene: Scene, edges: dict[Node, list[Target]]) -> Iterable[Finding]:
    """Yield the calls that run with nobody behind: they may just be running."""
    calls: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for node, targets in edges.items():
        if not any(isinstance(target, End) for target in targets):
            calls[node[1:]].append(node)
    for (identity, sequence), nodes in sorted(calls.items()):
        steps = {scene.record(node).step for node in nodes}
        first = min(nodes, key=scene.since)
        since = scene.since(first)
        total = scene.record(first).steps
        ranks = tuple(sorted(node.rank for node in nodes))
        at = f", at step {spans(sorted(steps))} of {total}" if total else ""
        text = (
            f"{who(ranks)} are in {named(scene, first)} together since {clock(since)}{at}, and "
            "nobody is behind: it was running when it was dumped, or messages do not get through. "
            "Dump again: what has not moved is stuck."
        )
        yield Finding("together", text, ranks, (), identity, sequence, since)


def moments(scene: Scene) -> str:
    """Return a warning where the dumps are of different moments."""
    dumps = sorted(scene.dumps.values(), key=lambda dump: dump.wall)
    if not dumps or dumps[-1].wall - dumps[0].wall <= MOMENT:
        return ""
    first, last = dumps[0], dumps[-1]
    return (
        f"the dumps are of different moments: rank {first.rank} was dumped at "
        f"{clock(first.wall)}, rank {last.rank} at {clock(last.wall)}. Who was dumped early may "
        "look behind and not be"
    )


# -- words ------------------------------------------------------------------------------


def _held(
    scene: Scene, edges: dict[Node, list[Target]], ends: Sequence[End]
) -> tuple[dict[Node, tuple[Target, int]], float, Node | None]:
    """Return who waits for ``ends``, since when, and the call that first did so itself."""
    held = waiters(edges, ends)
    direct = [node for node, (_, steps) in held.items() if steps == 1]
    first = min(direct, key=scene.since, default=None)
    return held, min(map(scene.since, held), default=0.0), first


def _waiting(
    scene: Scene,
    held: dict[Node, tuple[Target, int]],
    first: Node,
    since: float,
) -> str:
    """Say who waits in which call, since when, and by which chain."""
    ranks = _ranks(held)
    same = _ranks(node for node in held if node[1:] == first[1:])
    others = tuple(rank for rank in ranks if rank not in set(same))
    dumped = max(scene.dumps[rank].wall for rank in ranks)
    word = "waits" if len(same) == 1 else "wait"
    also = f", and so {who(others).lower()} in other calls," if others else ""
    text = (
        f"{who(same)} {word} in {named(scene, first)}{also} since {clock(since)} "
        f"({ago(dumped - since)})."
    )
    far = max(held, key=lambda node: (held[node][1], -node.rank))
    if held[far][1] > 1:
        chain: list[int] = []
        at: Target = far
        while isinstance(at, Node):
            chain.append(at.rank)
            at = held[at][0]
        chain.append(at.rank)
        names = [str(rank) for rank in chain]
        if len(names) > 2 * _LINKS:
            names[_LINKS:-_LINKS] = ["…"]
        text += f" Who waits for whom: {' → '.join(names)}."
    return text


def _ranks(nodes: Iterable[Node]) -> tuple[int, ...]:
    return tuple(sorted({node.rank for node in nodes}))
