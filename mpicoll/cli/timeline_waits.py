"""Who waits for whom: every moment of waiting is given to the rank that made it last.

A rank waits in a step for the peer whose message, or whose readiness for one, comes last. What
that peer did meanwhile says why: it had not yet called ("late"); it was at work between its
messages ("busy"); it waited itself, and then the same is asked of it; or it had posted, and the
message was under way ("moving").
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from mpicoll.cli.intervals import Interval, common
from mpicoll.cli.timeline import Call, Stage


class Wait(NamedTuple):
    """``seconds`` from ``start`` on that ``rank`` waits for ``cause``: late, busy or moving."""

    rank: int
    cause: int
    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


class End(NamedTuple):
    """The other end of a message: a step of a peer; ``comes`` if the message is from there."""

    peer: int
    step: int
    comes: bool


#: The other ends of the messages of each step of each rank.
Partners: TypeAlias = dict[int, list[list[End]]]


def partners(calls: Mapping[int, Call]) -> Partners:
    """Return which step of which peer each message of a step belongs to.

    Messages between two ranks keep their order, so the k-th sent is the k-th received. Where
    the peer's part is missing, the message is left out.
    """
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        for number, stage in enumerate(call.stages):
            for peer in stage.targets:
                sent[rank, peer].append(number)
            for peer in stage.sources:
                received[peer, rank].append(number)
    found: Partners = {rank: [[] for _ in call.stages] for rank, call in calls.items()}
    for pair, from_steps in sent.items():
        for mine, other in zip(from_steps, received[pair], strict=False):
            source, target = pair
            found[source][mine].append(End(target, other, comes=False))
            found[target][other].append(End(source, mine, comes=True))
    return found


def messages(calls: Mapping[int, Call]) -> Iterator[tuple[int, Stage, int, Stage]]:
    """Yield (source, its step, target, its step) of every message whose two ends are known."""
    for rank, steps in partners(calls).items():
        for stage, ends in zip(calls[rank].stages, steps, strict=True):
            for peer, step, comes in ends:
                if comes:
                    yield peer, calls[peer].stages[step], rank, stage


def waiting(call: Call) -> list[tuple[int, Interval]]:
    """Return when the rank did nothing but wait, with the number of the step.

    A blocking call waits whenever a step's local work is done. A non-blocking one waits only
    while the user is in its Wait.
    """
    whole = [(n, (one.worked, one.done)) for n, one in enumerate(call.stages)]
    if call.blocking:
        return [(n, span) for n, span in whole if span[1] > span[0]]
    return [(n, part) for n, span in whole for part in common([span], call.waits)]


def blame(calls: Mapping[int, Call]) -> list[Wait]:
    """Return all waiting in one collective, each moment once, with its cause."""
    known = partners(calls)
    found: list[Wait] = []
    for rank, call in calls.items():
        for number, (start, end) in waiting(call):
            found += _causes(calls, known, rank, number, start, end)
    return found


def _causes(
    calls: Mapping[int, Call], known: Partners, waiter: int, number: int, start: float, end: float
) -> Iterator[Wait]:
    """Yield the causes of one wait, from ``start`` to ``end`` in step ``number``."""
    # A list and not recursion: a chain may pass through all ranks.
    open_: list[tuple[int, int, float, float]] = [(waiter, number, start, end)]
    while open_:
        rank, number, a, b = open_.pop()
        last = _last(calls, known, rank, number)
        if last is None:
            yield Wait(waiter, rank, "moving", a, b)
            continue
        peer, step = last
        call = calls[peer]
        ready = min(max(call.stages[step].posted, a), b)
        if ready < b:
            yield Wait(waiter, peer, "moving", ready, b)
        called = min(max(call.start, a), ready)
        if a < called:
            yield Wait(waiter, peer, "late", a, called)
        for theirs, low, high in _doing(call.stages, called, ready):
            if theirs is None:
                yield Wait(waiter, peer, "busy", low, high)
            else:
                open_.append((peer, theirs, low, high))


def _last(
    calls: Mapping[int, Call], known: Partners, rank: int, number: int
) -> tuple[int, int] | None:
    """Return the peer and its step that came last in a step.

    A peer that posted its receive after the step was done did not hold it up: the message
    was taken by the MPI before.
    """
    done = calls[rank].stages[number].done
    times = [
        (calls[peer].stages[step].posted, peer, step)
        for peer, step, comes in known[rank][number]
        if comes or calls[peer].stages[step].posted <= done
    ]
    if not times:
        return None
    _, peer, step = max(times)
    return peer, step


def _doing(
    stages: Sequence[Stage], start: float, end: float
) -> Iterator[tuple[int | None, float, float]]:
    """Yield what a rank did from ``start`` to ``end``: waited in a step (its number), or not."""
    if start >= end:
        return
    first = bisect_left(stages, start, key=lambda stage: stage.done)
    at = start
    for number in range(first, len(stages)):
        low, high = max(stages[number].worked, at), min(stages[number].done, end)
        if low >= end:
            break
        if low < high:
            if at < low:
                yield None, at, low
            yield number, low, high
            at = high
    if at < end:
        yield None, at, end
