"""Proof of a schedule without MPI: matching, deadlock, overlap and contract.

`prove` stitches the schedules of all ranks and runs them on symbols. Elements are not
looked at one by one: memory is a list of intervals, each holding "element x is value
x + shift of term t", so a proof costs time per message, not per element.

Sends are taken to be synchronous, the worst an MPI may do: a send completes only when
its receive is posted. What passes here can not deadlock by buffering less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from mpicoll.errors import ScheduleError
from mpicoll.schedule.check_memory import Memory, Piece, Terms
from mpicoll.schedule.contracts import Contract, Held, View
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Buffer, Copy, Reduce, Schedule, Span, Step

__all__ = ["Memory", "Order", "Piece", "Terms", "prove"]

#: "any": each rank's operand once; "rank": in rank order, any bracketing; "sequential":
#: one fold from the left over all ranks, rounded once if the accumulator is wider.
Order: TypeAlias = Literal["any", "rank", "sequential"]


class _Fold(NamedTuple):
    """What a reduction read, kept as long as nothing that was defined is overwritten."""

    operands: tuple[Span, ...]
    columns: list[list[Piece]]


class _Home(NamedTuple):
    """Where a buffer lies: elements of ``memory`` from ``shift`` on, ``limit`` of them."""

    memory: Memory
    shift: int
    limit: int
    buffer: Buffer  #: the one whose memory it is; in place, input and output share one


@dataclass(slots=True)
class _Rank:
    """The state of one rank during the proof."""

    schedule: Schedule
    view: View
    homes: dict[Buffer, _Home]
    step: int = -1
    waiting: int = 0
    heard: int = 0
    shares: bool = False  #: input and output lie in one memory
    last: _Fold | None = None

    def place(self, span: Span) -> Span:
        """Return where ``span`` lies when input and output share memory."""
        if not self.shares:
            return span
        home = self.homes[span.buffer]
        if home.buffer is span.buffer:
            return span
        return Span(home.buffer, span.start + home.shift, span.stop + home.shift)


def _rank(schedule: Schedule, view: View, in_place: bool) -> _Rank:
    """Return the state before the first step."""
    homes = {
        INPUT: _Home(Memory(), 0, view.input, INPUT),
        OUTPUT: _Home(Memory(), 0, view.output, OUTPUT),
        WORK: _Home(Memory(), 0, schedule.work, WORK),
    }
    if not in_place or view.alias is None:
        return _Rank(schedule, view, homes)
    if view.alias >= 0:
        homes[INPUT] = _Home(homes[OUTPUT].memory, view.alias, view.input, OUTPUT)
    else:
        homes[OUTPUT] = _Home(homes[INPUT].memory, -1 - view.alias, view.output, INPUT)
    return _Rank(schedule, view, homes, shares=True)


class _Message(NamedTuple):
    pieces: list[Piece]
    length: int
    heard: int


class _Channel(NamedTuple):
    """What is posted from one rank to another and not yet matched."""

    sends: list[_Message]
    recvs: list[Span]


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
            _rank(schedule, view, in_place)
            for schedule, view in zip(schedules, contract.views, strict=True)
        ]
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.ready = deque(range(size))

    def run(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.heard = 1 << number
            for held in rank.view.before:
                count = held.span.count  # memory takes no empty pieces
                pieces = [Piece(count, held.ranks[0], held.first)] if count else []
                self._write(number, held.span, pieces)
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
        recvs, sends = step.recvs, step.sends
        rank.waiting = len(recvs) + len(sends)
        if rank.waiting == 0:
            self.ready.append(number)
        elif rank.waiting > 1 or step.local:  # a message alone meets nothing
            self._no_overlap(number, step)
        channels = []
        for peer, span in recvs:
            channel = self.channels.get((peer, number)) or self._open(number, peer, number)
            channel.recvs.append(span)
            channels.append((peer, number, channel))
        for peer, span in sends:
            channel = self.channels.get((number, peer)) or self._open(number, number, peer)
            pieces = self._read(number, span, "sends")
            channel.sends.append(_Message(pieces, span.stop - span.start, rank.heard))
            channels.append((number, peer, channel))
        for item in step.local:
            if isinstance(item, Copy):
                self._copy(number, item)
            else:
                self._reduce(number, item)
        for source, target, channel in channels:
            if channel.sends and channel.recvs:
                self._match(source, target, channel)

    def _open(self, number: int, source: int, target: int) -> _Channel:
        """Return a channel for the first message that ``number``, one of its ends, posts."""
        peer = target if source == number else source
        if not 0 <= peer < len(self.ranks) or source == target:
            self._fail(number, f"names peer {peer}, not another rank of {len(self.ranks)}")
        return self.channels.setdefault((source, target), _Channel([], []))

    def _no_overlap(self, number: int, step: Step) -> None:
        """Refuse spans in flight that meet a write, and local work that meets a receive."""
        place = self.ranks[number].place
        writes = [place(recv.span) for recv in step.recvs]
        reads = [place(send.span) for send in step.sends]
        targets: list[Span] = []
        touched: list[Span] = []
        for item in step.local:
            sources = (item.source,) if isinstance(item, Copy) else item.operands
            places = [place(span) for span in (item.target, *sources)]
            if isinstance(item, Copy) and places[0] == places[1]:
                continue
            targets.append(places[0])
            touched += places
        clash = (
            (_overlap(writes) if len(writes) > 1 else None)
            or (_overlap(writes, reads) if writes and reads else None)
            or (_overlap(writes, touched) if writes and touched else None)
            or (_overlap(reads, targets) if reads and targets else None)
        )
        if clash:
            self._fail(number, f"touches {clash[0]} while {clash[1]} is in flight")

    def _copy(self, number: int, item: Copy) -> None:
        rank = self.ranks[number]
        target, source = rank.place(item.target), rank.place(item.source)
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
        target = rank.place(item.target)
        count = item.target.count
        columns = self._known(rank, rank.last, item, target) if rank.last else []
        meeting = 0
        for operand in item.operands[len(columns) :]:
            place = rank.place(operand) if rank.shares else operand
            if operand.stop - operand.start != count:
                self._fail(number, f"reduces {operand} into {item.target} of another count")
            if place.buffer is target.buffer and _meet(place, target):
                meeting += 1
                if meeting > 1 or place != target or len(item.operands) > 2:
                    self._fail(number, f"reduces {operand} into {item.target}, which overlap")
            columns.append(self._read(number, operand, "reduces"))
        rank.last = _Fold(item.operands, columns)
        self._write(number, item.target, self._fold(number, item, columns))

    def _known(self, rank: _Rank, last: _Fold, item: Reduce, target: Span) -> list[list[Piece]]:
        """Return what the first operands hold, if the last reduction had just them.

        Folds over more and more ranks would read them again and again. All of these are
        defined, so a target that is not can not overlap them.
        """
        if (
            last.operands == item.operands[: len(last.operands)]
            and last.operands[0].count == item.target.count
            and rank.homes[target.buffer].memory.undefined(target.start, target.stop)
        ):
            return last.columns.copy()
        return []

    def _fold(self, number: int, item: Reduce, columns: list[list[Piece]]) -> list[Piece]:
        """Combine operands piece by piece; all must be of the same index."""
        result = []
        for row in zip(*columns, strict=False):  # the common case: all operands are cut alike
            lengths, terms, firsts = zip(*row, strict=True)
            if len(set(lengths)) > 1 or len(set(firsts)) > 1:
                break
            result.append(Piece(lengths[0], self.terms.fold(terms), firsts[0]))
        else:
            return result
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

    def _match(self, source: int, target: int, channel: _Channel) -> None:
        ranks = self.ranks
        while channel.sends and channel.recvs:
            pieces, length, heard = channel.sends.pop(0)
            span = channel.recvs.pop(0)
            if length != span.stop - span.start:
                # Neither rank leaves its step before all messages of it are matched.
                self._fail(
                    target,
                    f"expects {span.count} elements from rank {source} in step "
                    f"{ranks[target].step}, which sends {length} in its step {ranks[source].step}",
                )
            self._write(target, span, pieces)
            if length:  # executors send nothing for an empty message
                ranks[target].heard |= heard
            for number in (source, target):
                ranks[number].waiting -= 1
                if ranks[number].waiting == 0:
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
            f"rank {source} in step {self.ranks[source].step} for rank {target} to receive"
            for (source, target), channel in self.channels.items()
            if channel.sends
        ] + [
            f"rank {target} in step {self.ranks[target].step} for a message of rank {source}"
            for (source, target), channel in self.channels.items()
            if channel.recvs
        ]
        raise ScheduleError(
            f"{self.contract.collective} does not end on ranks "
            f"{', '.join(map(str, stuck))}; waiting: {'; '.join(sorted(waits)[:8])}"
        )

    # -- memory -----------------------------------------------------------------------

    def _bounds(self, number: int, span: Span) -> None:
        limit = self.ranks[number].homes[span.buffer].limit
        if not 0 <= span.start <= span.stop <= limit:
            self._fail(number, f"names {span}, outside of {limit} elements")

    def _read(self, number: int, span: Span, verb: str) -> list[Piece]:
        memory, shift, limit, _ = self.ranks[number].homes[span.buffer]
        if not 0 <= span.start <= span.stop <= limit:
            self._bounds(number, span)
        pieces = memory.read(span.start + shift, span.stop + shift)
        if pieces is None:
            self._fail(number, f"{verb} {span}, part of which is undefined")
        return pieces

    def _write(self, number: int, span: Span, pieces: Sequence[Piece]) -> None:
        rank = self.ranks[number]
        memory, shift, limit, buffer = rank.homes[span.buffer]
        if not 0 <= span.start <= span.stop <= limit:
            self._bounds(number, span)
        if pieces and rank.step >= 0 and (span.buffer is INPUT or buffer is INPUT):
            self._fail(number, f"writes {span}, which is the caller's send buffer")
        if memory.write(span.start + shift, pieces):
            rank.last = None

    # -- promises ---------------------------------------------------------------------

    def _all_kept(self) -> None:
        first: list[Piece] | None = None
        seen: tuple[tuple[Held, ...], list[Piece]] | None = None
        for number, rank in enumerate(self.ranks):
            if self.contract.synchronises and rank.heard != (1 << len(self.ranks)) - 1:
                missing = [r for r in range(len(self.ranks)) if not rank.heard >> r & 1]
                self._fail(number, f"ends without having heard of ranks {missing}")
            # Many ranks promise the same and end alike: what the rank before kept, all of
            # its promises and its whole output compared, need not be looked at again.
            after, (memory, shift, limit, _) = rank.view.after, rank.homes[OUTPUT]
            output = memory.read(shift, shift + limit)
            if output is not None and (after, output) == seen:
                continue
            for held in after:
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
            if output is not None and all(held.span.buffer is OUTPUT for held in after):
                seen = after, output

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


_SORTED = {INPUT: 0, OUTPUT: 1, WORK: 2}


def _meet(one: Span, other: Span) -> bool:
    return (
        one.buffer is other.buffer
        and one.start < other.stop
        and other.start < one.stop
        and one.start < one.stop
        and other.start < other.stop
    )


def _overlap(ones: list[Span], others: list[Span] | None = None) -> tuple[Span, Span] | None:
    """Return two spans that share an element, one of each list or both of the only one."""
    if others is not None:
        if len(ones) * len(others) <= 9:  # the common case
            meeting = [(one, other) for one in ones for other in others if _meet(one, other)]
            if not meeting or len(ones) == len(others) == 1:
                return meeting[0] if meeting else None
        elif {span.buffer for span in ones}.isdisjoint([span.buffer for span in others]):
            return None
    lists = enumerate((ones,) if others is None else (ones, others))
    spans = sorted(
        (_SORTED[span.buffer], span.start, span.stop, which)
        for which, part in lists
        for span in part
        if span.start != span.stop
    )
    # Sorted by start: remember the span of each list that reaches furthest.
    furthest: dict[tuple[int, int], tuple[int, int]] = {}
    for buffer, start, stop, which in spans:
        reach = furthest.get((buffer, 0 if others is None else 1 - which))
        if reach is not None and reach[1] > start:
            where = list(_SORTED)[buffer]
            return Span(where, start, stop), Span(where, *reach)
        mine = furthest.get((buffer, which))
        if mine is None or mine[1] < stop:
            furthest[buffer, which] = (start, stop)
    return None
