"""Proof of a schedule without MPI: matching, deadlock, overlap and contract.

`prove` stitches the schedules of all ranks and runs them on symbols. Elements are not
looked at one by one: memory is a list of intervals, each holding "element x is value
x + shift of term t", so a proof costs time per message, not per element.

Sends are taken to be synchronous, the worst an MPI may do: a send completes only when
its receive is posted. What passes here can not deadlock by buffering less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from mpicoll.errors import ScheduleError
from mpicoll.schedule.contracts import Contract, View
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Buffer, Copy, Reduce, Schedule, Span, Step

#: "any": each rank's operand once; "rank": in rank order, any bracketing; "sequential":
#: one fold from the left over all ranks, rounded once if the accumulator is wider.
Order: TypeAlias = Literal["any", "rank", "sequential"]


class Piece(NamedTuple):
    """``length`` elements of one term, the first of which has index ``first``."""

    length: int
    term: int
    first: int


class Terms:
    """Interned reduction trees; equal numbers mean equal trees, so equal bits."""

    def __init__(self, size: int) -> None:
        self.ranks: list[tuple[int, ...]] = [(rank,) for rank in range(size)]
        self._folds: dict[tuple[int, ...], int] = {}

    def fold(self, operands: tuple[int, ...]) -> int:
        """Return the term that folds ``operands`` from the left."""
        if len(operands) == 1:
            return operands[0]
        if operands not in self._folds:
            self._folds[operands] = len(self.ranks)
            self.ranks.append(tuple(chain.from_iterable(self.ranks[term] for term in operands)))
        return self._folds[operands]

    def sequential(self, ranks: tuple[int, ...]) -> int | None:
        """Return the one fold over the inputs of ``ranks``, or None if nobody made it."""
        return ranks[0] if len(ranks) == 1 else self._folds.get(ranks)


class Memory:
    """One buffer of one rank: disjoint sorted intervals; what is in none is undefined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[Piece] = []

    def write(self, start: int, pieces: Sequence[Piece]) -> None:
        """Overwrite from ``start`` on."""
        at = bisect_right(self._starts, start) - 1
        lengths = [piece.length for piece in pieces]
        if at >= 0 and self._starts[at] == start and lengths == [self._pieces[at].length]:
            self._pieces[at] = pieces[0]  # in the place of one piece, the common case
            return
        stop = start + sum(lengths)
        first = self._split(start)
        last = self._split(stop)
        self._starts[first:last] = accumulate(lengths[:-1], initial=start) if pieces else ()
        self._pieces[first:last] = pieces

    def read(self, start: int, stop: int) -> list[Piece] | None:
        """Return the pieces of a range, or None if part of it is undefined."""
        if start == stop:
            return []
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and stop <= self._starts[at] + self._pieces[at].length:
            _, term, first = self._pieces[at]  # part of one piece, the common case
            return [Piece(stop - start, term, first + start - self._starts[at])]
        found = []
        while start < stop:
            if not 0 <= at < len(self._starts):
                return None
            skip = start - self._starts[at]
            piece = self._pieces[at]
            if not 0 <= skip < piece.length:
                return None
            count = min(piece.length - skip, stop - start)
            found.append(Piece(count, piece.term, piece.first + skip))
            start += count
            at += 1
        return found

    def _split(self, position: int) -> int:
        """Make ``position`` a boundary; return the first interval at or after it."""
        at = bisect_right(self._starts, position) - 1
        if at < 0:
            return 0
        skip = position - self._starts[at]
        if skip == 0:
            return at
        count, term, index = self._pieces[at]
        if skip < count:
            self._pieces[at] = Piece(skip, term, index)
            self._starts.insert(at + 1, position)
            self._pieces.insert(at + 1, Piece(count - skip, term, index + skip))
        return at + 1


@dataclass(slots=True)
class _Rank:
    """The state of one rank during the proof."""

    schedule: Schedule
    view: View
    alias: int | None
    limits: dict[Buffer, int]
    memory: dict[Buffer, Memory] = field(
        default_factory=lambda: {INPUT: Memory(), OUTPUT: Memory(), WORK: Memory()}
    )
    step: int = -1
    waiting: int = 0
    heard: int = 0


class _Message(NamedTuple):
    step: int
    pieces: list[Piece]
    length: int
    heard: int


class _Posted(NamedTuple):
    step: int
    span: Span


def prove(
    contract: Contract,
    schedules: Sequence[Schedule],
    *,
    order: Order = "any",
    in_place: bool = False,
) -> None:
    """Prove that ``schedules``, one per rank, keep ``contract``; raise ScheduleError if not.

    ``order`` is what the reductions must hold to. ``in_place`` proves the form in which
    input and output share memory, where the collective has one.
    """
    _Proof(contract, schedules, order, in_place).run()


class _Proof:
    def __init__(
        self, contract: Contract, schedules: Sequence[Schedule], order: Order, in_place: bool
    ) -> None:
        size = len(contract.views)
        if len(schedules) != size:
            raise ScheduleError(f"{len(schedules)} schedules for {size} ranks")
        self.contract = contract
        self.order = order
        self.terms = Terms(size)
        self.ranks = [
            _Rank(
                schedule,
                view,
                view.alias if in_place else None,
                {INPUT: view.input, OUTPUT: view.output, WORK: schedule.work},
            )
            for schedule, view in zip(schedules, contract.views, strict=True)
        ]
        self.sends: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self.ready = deque(range(size))

    def run(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.heard = 1 << number
            for held in rank.view.before:
                self._write(number, held.span, [Piece(held.span.count, held.ranks[0], held.first)])
        while self.ready:
            number = self.ready.popleft()
            if self.ranks[number].waiting == 0:
                self._next_step(number)
        self._all_matched()
        self._all_kept()

    # -- one rank ---------------------------------------------------------------------

    def _next_step(self, number: int) -> None:
        rank = self.ranks[number]
        rank.step += 1
        if rank.step >= len(rank.schedule.steps):
            return
        step = rank.schedule.steps[rank.step]
        if step.communicates:
            self._no_overlap(number, step)
        rank.waiting = len(step.recvs) + len(step.sends)
        if rank.waiting == 0:
            self.ready.append(number)
        for recv in step.recvs:
            self._peer(number, recv.peer)
            self.recvs[recv.peer, number].append(_Posted(rank.step, recv.span))
        for send in step.sends:
            self._peer(number, send.peer)
            pieces = self._read(number, send.span, "sends")
            self.sends[number, send.peer].append(
                _Message(rank.step, pieces, send.span.count, rank.heard)
            )
        for item in step.local:
            if isinstance(item, Copy):
                self._copy(number, item)
            else:
                self._reduce(number, item)
        for recv in step.recvs:
            self._match(recv.peer, number)
        for send in step.sends:
            self._match(number, send.peer)

    def _peer(self, number: int, peer: int) -> None:
        if not 0 <= peer < len(self.ranks) or peer == number:
            self._fail(number, f"names peer {peer}, not another rank of {len(self.ranks)}")

    def _no_overlap(self, number: int, step: Step) -> None:
        """Refuse spans in flight that meet a write, and local work that meets a receive."""
        rank = self.ranks[number]
        writes = [self._place(rank, recv.span) for recv in step.recvs]
        reads = [self._place(rank, send.span) for send in step.sends]
        targets: list[Span] = []
        touched: list[Span] = []
        for item in step.local:
            sources = (item.source,) if isinstance(item, Copy) else item.operands
            places = [self._place(rank, span) for span in (item.target, *sources)]
            if isinstance(item, Copy) and places[0] == places[1]:
                continue
            targets.append(places[0])
            touched += places
        clash = (
            (_overlap(writes) if len(writes) > 1 else None)
            or _overlap(writes, reads)
            or _overlap(writes, touched)
            or _overlap(reads, targets)
        )
        if clash:
            self._fail(number, f"touches {clash[0]} while {clash[1]} is in flight")

    def _copy(self, number: int, item: Copy) -> None:
        rank = self.ranks[number]
        target, source = self._place(rank, item.target), self._place(rank, item.source)
        if item.target.buffer is INPUT:
            self._fail(number, f"writes {item.target}, which is the caller's send buffer")
        if item.target.count != item.source.count:
            self._fail(number, f"copies {item.source} to {item.target} of another count")
        if _meet(target, source):
            if item.target == item.source:
                self._fail(number, f"copies {item.source} onto itself")
            if target != source:
                self._fail(number, f"copies {source} to {target}, which overlap")
            self._bounds(number, item.target)
            self._bounds(number, item.source)
            return  # in place; executors skip it too
        self._write(number, item.target, self._read(number, item.source, "copies"))

    def _reduce(self, number: int, item: Reduce) -> None:
        rank = self.ranks[number]
        if len(item.operands) < 2:
            self._fail(number, f"reduces {len(item.operands)} operands, expected 2 or more")
        target = self._place(rank, item.target)
        columns = []
        meeting = 0
        for operand in item.operands:
            place = self._place(rank, operand)
            if operand.count != item.target.count:
                self._fail(number, f"reduces {operand} into {item.target} of another count")
            if _meet(place, target):
                meeting += 1
                if meeting > 1 or place != target or len(item.operands) > 2:
                    self._fail(number, f"reduces {operand} into {item.target}, which overlap")
            columns.append(self._read(number, operand, "reduces"))
        self._write(number, item.target, self._fold(number, item, columns))

    def _fold(self, number: int, item: Reduce, columns: list[list[Piece]]) -> list[Piece]:
        """Combine operands piece by piece; all must be of the same index."""
        result = []
        heads = [deque(column) for column in columns]
        while heads[0]:
            tops = [head[0] for head in heads]
            if len({top.first for top in tops}) > 1:
                indices = ", ".join(str(top.first) for top in tops)
                self._fail(number, f"reduces into {item.target} elements of indices {indices}")
            count = min(top.length for top in tops)
            term = self.terms.fold(tuple(top.term for top in tops))
            result.append(Piece(count, term, tops[0].first))
            for head, top in zip(heads, tops, strict=True):
                if top.length > count:
                    head[0] = Piece(top.length - count, top.term, top.first + count)
                else:
                    head.popleft()
        return result

    # -- messages ---------------------------------------------------------------------

    def _match(self, source: int, target: int) -> None:
        sends, recvs = self.sends[source, target], self.recvs[source, target]
        while sends and recvs:
            message, posted = sends.popleft(), recvs.popleft()
            if message.length != posted.span.count:
                self._fail(
                    target,
                    f"expects {posted.span.count} elements from rank {source} in step "
                    f"{posted.step}, which sends {message.length} in its step {message.step}",
                )
            self._write(target, posted.span, message.pieces)
            if message.length:  # executors send nothing for an empty message
                self.ranks[target].heard |= message.heard
            for number in (source, target):
                self.ranks[number].waiting -= 1
                if self.ranks[number].waiting == 0:
                    self.ready.append(number)

    def _all_matched(self) -> None:
        stuck = [
            number
            for number, rank in enumerate(self.ranks)
            if rank.step < len(rank.schedule.steps)
        ]
        if not stuck:
            return
        waits = [
            f"rank {source} in step {messages[0].step} for rank {target} to receive"
            for (source, target), messages in self.sends.items()
            if messages
        ] + [
            f"rank {target} in step {posted[0].step} for a message of rank {source}"
            for (source, target), posted in self.recvs.items()
            if posted
        ]
        raise ScheduleError(
            f"{self.contract.collective} does not end on ranks "
            f"{', '.join(map(str, stuck))}; waiting: {'; '.join(sorted(waits)[:8])}"
        )

    # -- memory -----------------------------------------------------------------------

    def _place(self, rank: _Rank, span: Span) -> Span:
        """Return where ``span`` lies when input and output share memory."""
        if rank.alias is None:
            return span
        buffer, start, stop = span.buffer, span.start, span.stop
        if rank.alias >= 0 and buffer is INPUT:
            return Span(OUTPUT, start + rank.alias, stop + rank.alias)
        if rank.alias < 0 and buffer is OUTPUT:
            shift = -1 - rank.alias
            return Span(INPUT, start + shift, stop + shift)
        return span

    def _bounds(self, number: int, span: Span) -> None:
        limit = self.ranks[number].limits[span.buffer]
        if not 0 <= span.start <= span.stop <= limit:
            self._fail(number, f"names {span}, outside of {limit} elements")

    def _read(self, number: int, span: Span, verb: str) -> list[Piece]:
        self._bounds(number, span)
        rank = self.ranks[number]
        place = self._place(rank, span)
        pieces = rank.memory[place.buffer].read(place.start, place.stop)
        if pieces is None:
            self._fail(number, f"{verb} {span}, part of which is undefined")
        return pieces

    def _write(self, number: int, span: Span, pieces: Sequence[Piece]) -> None:
        self._bounds(number, span)
        rank = self.ranks[number]
        place = self._place(rank, span)
        if pieces and rank.step >= 0 and INPUT in (span.buffer, place.buffer):
            self._fail(number, f"writes {span}, which is the caller's send buffer")
        rank.memory[place.buffer].write(place.start, pieces)

    # -- promises ---------------------------------------------------------------------

    def _all_kept(self) -> None:
        first: list[Piece] | None = None
        for number, rank in enumerate(self.ranks):
            if self.contract.synchronises and rank.heard != (1 << len(self.ranks)) - 1:
                missing = [r for r in range(len(self.ranks)) if not rank.heard >> r & 1]
                self._fail(number, f"ends without having heard of ranks {missing}")
            for held in rank.view.after:
                pieces = self._read(number, held.span, "must end with")
                index = held.first
                for piece in pieces:
                    self._kept(number, held.ranks, index, piece)
                    index += piece.length
                if self.contract.collective == "allreduce":
                    # Law 3: the same bits on all ranks, so the same tree per element.
                    first = first or _merged(pieces)
                    if _merged(pieces) != first:
                        self._fail(number, "brackets the reduction differently from rank 0")

    def _kept(self, number: int, ranks: tuple[int, ...], index: int, piece: Piece) -> None:
        got = self.terms.ranks[piece.term]
        if piece.first != index:
            self._fail(number, f"ends with element {piece.first} where {index} is promised")
        if not self.contract.reduces or self.order == "any":
            right = tuple(sorted(got)) == ranks
        elif self.order == "rank":
            right = got == ranks
        else:
            right = piece.term == self.terms.sequential(ranks)
        if not right:
            self._fail(
                number,
                f"ends with a reduction over ranks {got} at element {index}; promised is "
                f"{ranks} in order {self.order!r}",
            )

    def _fail(self, number: int, what: str) -> NoReturn:
        rank = self.ranks[number]
        inside = 0 <= rank.step < len(rank.schedule.steps)
        where = f"rank {number}, step {rank.step}" if inside else f"rank {number}"
        raise ScheduleError(f"{self.contract.collective}: {where}: {what}")


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one term, so that equal contents compare equal."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].term == piece.term:
            merged[-1] = Piece(merged[-1].length + piece.length, piece.term, merged[-1].first)
        else:
            merged.append(piece)
    return merged


def _meet(one: Span, other: Span) -> bool:
    return (
        one.buffer is other.buffer
        and one.start < other.stop
        and other.start < one.stop
        and one.count > 0
        and other.count > 0
    )


def _overlap(ones: list[Span], others: list[Span] | None = None) -> tuple[Span, Span] | None:
    """Return two spans that share an element, one of each list or both of the only one."""
    if others is None:
        spans = [(span.buffer.value, span.start, span.stop, 0) for span in ones if span.count]
    elif len(ones) == len(others) == 1:
        return (ones[0], others[0]) if _meet(ones[0], others[0]) else None
    elif ones and others:
        spans = [(span.buffer.value, span.start, span.stop, 0) for span in ones if span.count]
        spans += [(span.buffer.value, span.start, span.stop, 1) for span in others if span.count]
    else:
        return None
    spans.sort()
    # Sorted by start: remember the span of each list that reaches furthest.
    furthest: dict[tuple[str, int], tuple[int, int]] = {}
    for buffer, start, stop, which in spans:
        reach = furthest.get((buffer, 0 if others is None else 1 - which))
        if reach is not None and reach[1] > start:
            return Span(Buffer(buffer), start, stop), Span(Buffer(buffer), *reach)
        mine = furthest.get((buffer, which))
        if mine is None or mine[1] < stop:
            furthest[buffer, which] = (start, stop)
    return None
