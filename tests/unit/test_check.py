"""The checker objects: to hand-written faults, and to mutants of every algorithm.

Whether a mutant is at fault is decided by `fault`, which shares no code with the
checker: it follows single elements in plain dicts through one run of the schedules,
with synchronous sends, in a random order of events. A message is read when it is posted
or just before it arrives, and arrives before or after the local work of the step, as
it happens, so that what the rules of the form fail to forbid shows in the values.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import proofs
import pytest

from mpicoll.algorithms import Algorithm, every
from mpicoll.errors import ScheduleError
from mpicoll.schedule.check import Memory, Order, Piece, prove
from mpicoll.schedule.contracts import ROOTED, Contract, contract
from mpicoll.schedule.draw import text
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Call,
    Copy,
    Local,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)
from mpicoll.schedule.partition import split

ALGORITHMS = every()
IDS = [f"{item.collective}-{item.name}" for item in ALGORITHMS]
ORDERS: tuple[Order, ...] = ("any", "rank", "sequential")
SIZES = (2, 3, 4, 5, 8)
MUTANTS = 4  # per case and kind of mutation

# -- the oracle -----------------------------------------------------------------------

Cell: TypeAlias = tuple[str, int]
Tree: TypeAlias = "int | tuple[Tree, ...]"
Value: TypeAlias = tuple[int, Tree]  # the index in the vector, and how ranks were folded


class Broken(Exception):
    """A rule does not hold."""


@dataclass
class Parcel:
    """A message from its posting on."""

    cells: list[Cell]
    posted: list[Value]
    known: set[int]


class Machine:
    """All ranks, element by element."""

    def __init__(
        self,
        promise: Contract,
        schedules: Sequence[Schedule],
        in_place: bool,
        rng: random.Random,
    ) -> None:
        self.promise, self.schedules, self.rng = promise, schedules, rng
        self.size = len(schedules)
        self.alias = [view.alias if in_place else None for view in promise.views]
        self.memory: list[dict[Cell, Value]] = [{} for _ in schedules]
        self.arriving: list[set[Cell]] = [set() for _ in schedules]
        self.leaving: list[set[Cell]] = [set() for _ in schedules]
        self.known = [{rank} for rank in range(self.size)]
        self.entered = [-1] * self.size
        self.unfinished = [0] * self.size
        self.outbox: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.inbox: dict[tuple[int, int], list[list[Cell]]] = defaultdict(list)
        self.events: list[tuple[str, int, int]] = [("enter", r, 0) for r in range(self.size)]
        for rank, view in enumerate(promise.views):
            for held in view.before:
                for i, cell in enumerate(self.cells(rank, held.span)):
                    self.memory[rank][cell] = held.first + i, held.ranks[0]

    def cells(self, rank: int, span: Span) -> list[Cell]:
        view, name = self.promise.views[rank], span.buffer.value
        limits = {"input": view.input, "output": view.output, "work": self.schedules[rank].work}
        if span.start > span.stop or span.start < 0 or span.stop > limits[name]:
            raise Broken(f"bounds of {span} on rank {rank}")
        alias, shift = self.alias[rank], 0
        if alias is not None and alias >= 0 and name == "input":
            name, shift = "output", alias
        elif alias is not None and alias < 0 and name == "output":
            name, shift = "input", -alias - 1
        return [(name, i + shift) for i in range(span.start, span.stop)]

    def targets(self, rank: int, span: Span) -> list[Cell]:
        cells = self.cells(rank, span)
        if cells and (span.buffer.value == "input" or cells[0][0] == "input"):
            raise Broken(f"write of the input on rank {rank}")
        return cells

    def values(self, rank: int, cells: list[Cell]) -> list[Value]:
        if not self.arriving[rank].isdisjoint(cells):
            raise Broken(f"read of what arrives on rank {rank}")
        try:
            return [self.memory[rank][cell] for cell in cells]
        except KeyError as error:
            raise Broken(f"undefined {error} on rank {rank}") from None

    def run(self) -> None:
        while self.events:
            at = self.rng.randrange(len(self.events))
            self.events[at], self.events[-1] = self.events[-1], self.events[at]
            what, one, other = self.events.pop()
            if what == "enter":
                self.enter(one)
            elif what == "work":
                for item in self.schedules[one].steps[self.entered[one]].local:
                    self.work(one, item)
                self.finish(one)
            else:
                self.deliver(one, other)
        for rank, schedule in enumerate(self.schedules):
            if self.entered[rank] < len(schedule.steps):
                raise Broken(f"rank {rank} is stuck")

    def enter(self, rank: int) -> None:
        self.arriving[rank].clear()
        self.leaving[rank].clear()
        self.entered[rank] += 1
        if self.entered[rank] == len(self.schedules[rank].steps):
            return
        step = self.schedules[rank].steps[self.entered[rank]]
        self.unfinished[rank] = 1 + len(step.recvs) + len(step.sends)
        for recv in step.recvs:
            cells = self.targets(rank, recv.span)
            if not self.arriving[rank].isdisjoint(cells):
                raise Broken(f"two receives into one place on rank {rank}")
            self.arriving[rank].update(cells)
            for cell in cells:
                self.memory[rank].pop(cell, None)
            self.post(rank, recv.peer)
            self.inbox[recv.peer, rank].append(cells)
            self.events.append(("deliver", recv.peer, rank))
        for send in step.sends:
            cells = self.cells(rank, send.span)
            values = self.values(rank, cells)
            self.leaving[rank].update(cells)
            self.post(rank, send.peer)
            self.outbox[rank, send.peer].append(Parcel(cells, values, set(self.known[rank])))
            self.events.append(("deliver", rank, send.peer))
        self.events.append(("work", rank, 0))

    def post(self, rank: int, peer: int) -> None:
        if peer == rank or peer not in range(self.size):
            raise Broken(f"peer {peer} of rank {rank}")

    def deliver(self, source: int, target: int) -> None:
        """Deliver one message, if both ends are posted; there is an event for each end."""
        if not (self.outbox[source, target] and self.inbox[source, target]):
            return
        parcel = self.outbox[source, target].pop(0)
        cells = self.inbox[source, target].pop(0)
        if len(cells) != len(parcel.cells):
            raise Broken(f"counts differ from {source} to {target}")
        late = [self.memory[source].get(cell, (-1, -1)) for cell in parcel.cells]
        values = parcel.posted if self.rng.random() < 0.5 else late
        self.memory[target].update(zip(cells, values, strict=True))
        if cells:
            self.known[target] |= parcel.known
        self.finish(source)
        self.finish(target)

    def finish(self, rank: int) -> None:
        self.unfinished[rank] -= 1
        if self.unfinished[rank] == 0:
            self.events.append(("enter", rank, 0))

    def work(self, rank: int, item: Local) -> None:
        spans = item.operands if isinstance(item, Reduce) else (item.source,)
        columns = [self.cells(rank, span) for span in spans]
        target = self.cells(rank, item.target)
        if any(len(column) != len(target) for column in columns):
            raise Broken("counts of local work differ")
        meeting = [column for column in columns if not set(column).isdisjoint(target)]
        if isinstance(item, Copy):
            if item.target == item.source and target:
                raise Broken("a copy onto itself")
            if columns[0] == target and target:
                return
            if meeting:
                raise Broken("a copy overlaps itself")
        elif len(columns) < 2:
            raise Broken("a fold of one operand")
        elif meeting and (meeting != [target] or len(columns) > 2):
            raise Broken("a fold overlaps its target")
        results = []
        for operands in zip(*(self.values(rank, column) for column in columns), strict=True):
            if len({index for index, _ in operands}) != 1:
                raise Broken("a fold of different elements")
            trees = tuple(tree for _, tree in operands)
            results.append((operands[0][0], trees if len(trees) > 1 else trees[0]))
        target = self.targets(rank, item.target)
        if not (self.arriving[rank] | self.leaving[rank]).isdisjoint(target):
            raise Broken(f"a write of what is in flight on rank {rank}")
        self.memory[rank].update(zip(target, results, strict=True))


def leaves(tree: Tree) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return [leaf for branch in tree for leaf in leaves(branch)]


def fault(
    promise: Contract,
    schedules: Sequence[Schedule],
    order: Order,
    in_place: bool,
    rng: random.Random,
) -> str:
    """Return what is wrong with the schedules, or an empty string."""
    try:
        machine = Machine(promise, schedules, in_place, rng)
        machine.run()
        machine.arriving = [set() for _ in schedules]
        results = []
        for rank, view in enumerate(promise.views):
            if promise.synchronises and machine.known[rank] != set(range(len(schedules))):
                raise Broken(f"rank {rank} did not hear of all")
            for held in view.after:
                values = machine.values(rank, machine.cells(rank, held.span))
                for i, (index, tree) in enumerate(values):
                    ranks: Tree = held.ranks if len(held.ranks) > 1 else held.ranks[0]
                    got = leaves(tree)
                    right = (
                        sorted(got) == list(held.ranks)
                        if order == "any" or not promise.reduces
                        else got == list(held.ranks)
                        if order == "rank"
                        else tree == ranks
                    )
                    if index != held.first + i or not right:
                        raise Broken(f"{index}, {tree} on rank {rank}, not {held}")
                results.append(values)
        if promise.collective == "allreduce" and any(item != results[0] for item in results):
            raise Broken("bits differ between ranks")
    except Broken as error:
        return str(error)
    return ""


# -- mutations ------------------------------------------------------------------------

Op: TypeAlias = "Recv | Send | Copy | Reduce"


@dataclass
class Draft:
    """A schedule that can be edited: per step the receives, sends and local work."""

    steps: list[tuple[list[Recv], list[Send], list[Local]]]
    work: int

    def lists(self) -> Iterator[list[Op]]:
        for step in self.steps:
            yield from step  # type: ignore[misc]  # lists of one kind are lists of ops here


OTHERS = {INPUT: (OUTPUT, WORK), OUTPUT: (INPUT, WORK), WORK: (INPUT, OUTPUT)}
Mutation: TypeAlias = Callable[[list[Draft], random.Random], bool]
MUTATIONS: dict[str, Mutation] = {}


def mutation(change: Mutation) -> Mutation:
    MUTATIONS[change.__name__] = change
    return change


def drafts(schedules: Sequence[Schedule]) -> list[Draft]:
    return [
        Draft([(list(s.recvs), list(s.sends), list(s.local)) for s in item.steps], item.work)
        for item in schedules
    ]


def finished(group: Sequence[Draft]) -> list[Schedule]:
    return [
        Schedule(tuple(Step(tuple(r), tuple(s), tuple(w)) for r, s, w in item.steps), item.work)
        for item in group
    ]


def choose(
    group: list[Draft], rng: random.Random, *kinds: type
) -> tuple[list[Op], int] | tuple[None, int]:
    """Return the list that holds a random op of one of the kinds, and its place there."""
    found = [
        (ops, at)
        for draft in group
        for ops in draft.lists()
        for at, op in enumerate(ops)
        if isinstance(op, kinds)
    ]
    return rng.choice(found) if found else (None, 0)


def some_steps(group: list[Draft], rng: random.Random, at_least: int) -> Draft | None:
    found = [draft for draft in group if len(draft.steps) >= at_least]
    return rng.choice(found) if found else None


def moved(span: Span, low: int, high: int) -> Span:
    return Span(span.buffer, span.start + low, span.stop + high)


def respan(op: Op, rng: random.Random, change: Callable[[Span], Span]) -> Op:
    """Return ``op`` with one of its spans changed."""
    if isinstance(op, Recv | Send):
        return op._replace(span=change(op.span))
    if isinstance(op, Copy):
        if rng.random() < 0.5:
            return op._replace(target=change(op.target))
        return op._replace(source=change(op.source))
    at = rng.randrange(-1, len(op.operands))
    if at < 0:
        return op._replace(target=change(op.target))
    operands = list(op.operands)
    operands[at] = change(operands[at])
    return op._replace(operands=tuple(operands))


def deletes(kind: type) -> Mutation:
    def delete(group: list[Draft], rng: random.Random) -> bool:
        ops, at = choose(group, rng, kind)
        if ops is None:
            return False
        del ops[at]
        return True

    return delete


for _kind in (Recv, Send, Copy, Reduce):
    MUTATIONS[f"delete_{_kind.__name__.lower()}"] = deletes(_kind)


@mutation
def duplicate(group: list[Draft], rng: random.Random) -> bool:
    ops, at = choose(group, rng, Recv, Send, Copy, Reduce)
    if ops is None:
        return False
    ops.insert(at, ops[at])
    return True


@mutation
def swap_operands(group: list[Draft], rng: random.Random) -> bool:
    ops, at = choose(group, rng, Reduce)
    if ops is None:
        return False
    op = ops[at]
    assert isinstance(op, Reduce)
    one, other = rng.sample(range(len(op.operands)), 2)
    operands = list(op.operands)
    operands[one], operands[other] = operands[other], operands[one]
    ops[at] = op._replace(operands=tuple(operands))
    return True


@mutation
def swap_steps(group: list[Draft], rng: random.Random) -> bool:
    draft = some_steps(group, rng, 2)
    if draft is None:
        return False
    one, other = rng.sample(range(len(draft.steps)), 2)
    draft.steps[one], draft.steps[other] = draft.steps[other], draft.steps[one]
    return True


@mutation
def drop_step(group: list[Draft], rng: random.Random) -> bool:
    draft = some_steps(group, rng, 1)
    if draft is None:
        return False
    del draft.steps[rng.randrange(len(draft.steps))]
    return True


@mutation
def merge_steps(group: list[Draft], rng: random.Random) -> bool:
    """Do two neighbouring steps at once."""
    draft = some_steps(group, rng, 2)
    if draft is None:
        return False
    at = rng.randrange(len(draft.steps) - 1)
    one, other = draft.steps[at : at + 2]
    draft.steps[at : at + 2] = [(one[0] + other[0], one[1] + other[1], one[2] + other[2])]
    return True


@mutation
def split_step(group: list[Draft], rng: random.Random) -> bool:
    """Do the sends before or after the receives, or the local work after the messages."""
    draft = some_steps(group, rng, 1)
    if draft is None:
        return False
    at = rng.randrange(len(draft.steps))
    recvs, sends, local = draft.steps[at]
    draft.steps[at : at + 1] = rng.choice(
        [
            [([], sends, local), (recvs, [], [])],
            [(recvs, [], local), ([], sends, [])],
            [(recvs, sends, []), ([], [], local)],
        ]
    )
    return True


@mutation
def retarget(group: list[Draft], rng: random.Random) -> bool:
    ops, at = choose(group, rng, Recv, Send)
    if ops is None:
        return False
    op = ops[at]
    assert isinstance(op, Recv | Send)
    ops[at] = op._replace(peer=rng.randrange(-1, len(group) + 1))
    return True


@mutation
def shift(group: list[Draft], rng: random.Random) -> bool:
    ops, at = choose(group, rng, Recv, Send, Copy, Reduce)
    if ops is None:
        return False
    by = rng.choice((-1, 1))
    ops[at] = respan(ops[at], rng, lambda span: moved(span, by, by))
    return True


@mutation
def resize(group: list[Draft], rng: random.Random) -> bool:
    """Shrink or grow one span at one end."""
    ops, at = choose(group, rng, Recv, Send, Copy, Reduce)
    if ops is None:
        return False
    low, high = rng.choice(((1, 0), (0, -1), (-1, 0), (0, 1)))
    ops[at] = respan(ops[at], rng, lambda span: moved(span, low, high))
    return True


@mutation
def shrink_work(group: list[Draft], rng: random.Random) -> bool:
    """Leave out the first or last element of local work."""
    ops, at = choose(group, rng, Copy, Reduce)
    if ops is None:
        return False
    op, low = ops[at], rng.choice((0, 1))
    if isinstance(op, Copy):
        ops[at] = Copy(moved(op.target, low, low - 1), moved(op.source, low, low - 1))
    elif isinstance(op, Reduce):
        operands = tuple(moved(span, low, low - 1) for span in op.operands)
        ops[at] = Reduce(moved(op.target, low, low - 1), operands)
    return True


@mutation
def shrink_message(group: list[Draft], rng: random.Random) -> bool:
    """Leave out the first or last element of a message, at both ends."""
    source, target = rng.randrange(len(group)), rng.randrange(len(group))
    sends = [(step[1], at) for step in group[source].steps for at in range(len(step[1]))]
    sends = [(ops, at) for ops, at in sends if ops[at].peer == target]
    recvs = [(step[0], at) for step in group[target].steps for at in range(len(step[0]))]
    recvs = [(ops, at) for ops, at in recvs if ops[at].peer == source]
    if not sends or not recvs:
        return False
    low = rng.choice((0, 1))
    (outs, one), (ins, other) = rng.choice(list(zip(sends, recvs, strict=False)))
    outs[one] = outs[one]._replace(span=moved(outs[one].span, low, low - 1))
    ins[other] = ins[other]._replace(span=moved(ins[other].span, low, low - 1))
    return True


@mutation
def change_buffer(group: list[Draft], rng: random.Random) -> bool:
    ops, at = choose(group, rng, Recv, Send, Copy, Reduce)
    if ops is None:
        return False
    ops[at] = respan(
        ops[at],
        rng,
        lambda span: Span(rng.choice(OTHERS[span.buffer]), span.start, span.stop),
    )
    return True


def moves(by: int) -> Mutation:
    def move(group: list[Draft], rng: random.Random) -> bool:
        draft = some_steps(group, rng, 2)
        if draft is None:
            return False
        at = rng.randrange(len(draft.steps))
        local = draft.steps[at][2]
        if not local or not 0 <= at + by < len(draft.steps):
            return False
        there = draft.steps[at + by][2]
        there.insert(len(there) if by < 0 else 0, local.pop(0 if by < 0 else -1))
        return True

    return move


MUTATIONS["move_earlier"] = moves(-1)
MUTATIONS["move_later"] = moves(1)


@mutation
def swap_targets(group: list[Draft], rng: random.Random) -> bool:
    """Let two receives of a rank arrive in each other's place."""
    draft = rng.choice(group)
    recvs = [(step[0], at) for step in draft.steps for at in range(len(step[0]))]
    if len(recvs) < 2:
        return False
    (ones, one), (others, other) = rng.sample(recvs, 2)
    mine, theirs = ones[one], others[other]
    ones[one] = mine._replace(span=theirs.span)
    others[other] = theirs._replace(span=mine.span)
    return True


@mutation
def reorder(group: list[Draft], rng: random.Random) -> bool:
    """Swap two ops of one kind in one step."""
    found = [ops for draft in group for ops in draft.lists() if len(ops) > 1]
    if not found:
        return False
    ops = rng.choice(found)
    one, other = rng.sample(range(len(ops)), 2)
    ops[one], ops[other] = ops[other], ops[one]
    return True


@mutation
def swap_ranks(group: list[Draft], rng: random.Random) -> bool:
    if len(group) < 2:
        return False
    one, other = rng.sample(range(len(group)), 2)
    group[one], group[other] = group[other], group[one]
    return True


@mutation
def less_work(group: list[Draft], rng: random.Random) -> bool:
    draft = rng.choice(group)
    draft.work -= 1
    return draft.work >= 0


# -- mutants of all algorithms ----------------------------------------------------------


def groups(algorithm: Algorithm, size: int, rng: random.Random) -> Iterator[list[Call]]:
    """Yield the calls of all ranks for a few small cases."""
    if algorithm.collective == "alltoall":
        yield proofs.alltoall_calls(algorithm, [(2,) * size] * size, rng.choice((2, 3)))
        if not algorithm.uniform:
            table = [tuple(rng.randrange(4) for _ in range(size)) for _ in range(size)]
            yield proofs.alltoall_calls(algorithm, table)
        return
    root = rng.randrange(size) if algorithm.collective in ROOTED else 0
    for segment in (0, 2) if algorithm.segmented else (0,):
        if algorithm.collective == "barrier":
            counts: tuple[int, ...] = (1,)
        elif algorithm.collective not in proofs.BLOCKED:
            counts = (rng.choice((size + 1, 2 * size, 3)),)
        elif algorithm.uniform:
            counts = (2,) * size
        else:
            counts = rng.choice((split(2 * size + 1, size), tuple(rng.choices(range(4), k=size))))
        yield [Call(rank, size, counts, root, segment) for rank in range(size)]


def objection(promise: Contract, schedules: list[Schedule], order: Order, in_place: bool) -> str:
    """Return what the checker says, or an empty string."""
    try:
        prove(promise, schedules, order=order, in_place=in_place)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_mutants(algorithm: Algorithm) -> None:
    """The checker and the oracle agree on every mutant."""
    rng = random.Random(f"{algorithm.collective} {algorithm.name}")
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for size in SIZES:
        for group in groups(algorithm, size, rng):
            promise = contract(algorithm.collective, group)
            schedules = proofs.build(algorithm, group)
            plain = finished(drafts(schedules))
            forms = [False]
            if any(view.alias is not None for view in promise.views):
                forms.append(True)
            for in_place in forms:
                assert not objection(promise, schedules, algorithm.order, in_place)
                assert not fault(promise, schedules, algorithm.order, in_place, rng)
            for name, change in MUTATIONS.items():
                for _ in range(MUTANTS):
                    draft = drafts(schedules)
                    if not change(draft, rng):
                        continue
                    kind = name
                    if rng.random() < 0.2:
                        MUTATIONS[second := rng.choice(list(MUTATIONS))](draft, rng)
                        kind = f"{name} and {second}"
                    mutant = finished(draft)
                    if mutant == plain:
                        continue
                    order = rng.choice((algorithm.order, algorithm.order, *ORDERS))
                    in_place = rng.choice(forms)
                    said = objection(promise, mutant, order, in_place)
                    wrong = fault(promise, mutant, order, in_place, rng)
                    assert bool(said) == bool(wrong), (
                        f"{kind}, {group[0]}, order={order!r}, in_place={in_place}: the checker "
                        f"says {said!r}, the oracle {wrong!r}\n"
                        + text(algorithm.collective, algorithm.name, mutant)
                    )
                    seen[kind] += 1
                    refused[kind] += bool(said)
    for kind in ("delete_recv", "delete_send"):
        assert refused[kind] == seen[kind], "a message with one end is never harmless"
    assert refused.total() > 0.6 * seen.total()


# -- hand-written faults ----------------------------------------------------------------


def inp(start: int, stop: int) -> Span:
    return Span(INPUT, start, stop)


def out(start: int, stop: int) -> Span:
    return Span(OUTPUT, start, stop)


def work(start: int, stop: int) -> Span:
    return Span(WORK, start, stop)


def plan(*steps: Sequence[Op], scratch: int = 8) -> Schedule:
    """Return the schedule of these steps, each a list of ops of all kinds."""
    return Schedule(
        tuple(
            Step(
                tuple(op for op in ops if isinstance(op, Recv)),
                tuple(op for op in ops if isinstance(op, Send)),
                tuple(op for op in ops if isinstance(op, Copy | Reduce)),
            )
            for ops in steps
        ),
        scratch,
    )


def promised(collective: str, size: int, *counts: int) -> Contract:
    return contract(collective, [Call(rank, size, counts) for rank in range(size)])


Case: TypeAlias = tuple[Contract, list[Schedule]]
ALLREDUCE = promised("allreduce", 2, 4)
EXCHANGE = [(Recv(1 - rank, work(0, 4)), Send(1 - rank, inp(0, 4))) for rank in range(2)]
FOLD = [
    Reduce(out(0, 4), (inp(0, 4), work(0, 4))),
    Reduce(out(0, 4), (work(0, 4), inp(0, 4))),
]  # with these an allreduce of two ranks is right
TO_1, FROM_0 = [Send(1, out(0, 4))], [Recv(0, out(0, 4))]  # and with these a broadcast
A, B, C = inp(0, 2), work(0, 2), work(2, 4)  # the operands of `folding`


def bcasting(*ranks: Schedule) -> Case:
    return promised("bcast", len(ranks), 4), list(ranks)


def after_bcast(*ops: Op, scratch: int = 8) -> Case:
    """Return a right broadcast, after which rank 1 does ``ops`` in one more step."""
    return bcasting(plan(TO_1), plan(FROM_0, ops, scratch=scratch))


def reducing(*ops: Op) -> Case:
    """Return an allreduce whose rank 1 does ``ops`` after the exchange."""
    return ALLREDUCE, [plan(EXCHANGE[0], [FOLD[0]]), plan(EXCHANGE[1], ops)]


def exchanging(*steps: Sequence[Op]) -> Case:
    """Return an allreduce whose rank 1 does ``steps`` all in all."""
    return ALLREDUCE, [plan(EXCHANGE[0], [FOLD[0]]), plan(*steps)]


def folding(*ops: Op) -> Case:
    """Return a reduce of A, B and C, which rank 0 does by ``ops``."""
    gather = [Recv(1, B), Recv(2, C)]
    return promised("reduce", 3, 2), [plan(gather, ops), *[plan([Send(0, A)])] * 2]


def gathering(*ranks: Schedule) -> Case:
    """Return an allgather of blocks of two elements."""
    return promised("allgather", len(ranks), *[2] * len(ranks)), list(ranks)


def barrier(*ranks: Schedule) -> Case:
    return promised("barrier", len(ranks), 1), list(ranks)


def unbuffered_ring(size: int) -> Case:
    """Return an allgather that only works if sends are buffered."""
    schedules = []
    for rank in range(size):
        steps: list[list[Op]] = [[Copy(out(2 * rank, 2 * rank + 2), inp(0, 2))]]
        for k in range(size - 1):
            mine, theirs = 2 * ((rank - k) % size), 2 * ((rank - k - 1) % size)
            steps.append([Send((rank + 1) % size, out(mine, mine + 2))])
            steps.append([Recv((rank - 1) % size, out(theirs, theirs + 2))])
        schedules.append(plan(*steps))
    return gathering(*schedules)


IN_FLIGHT = r"touches \S+ while \S+ is in flight"
UNDEFINED = r"part of which is undefined"
CALLERS = r"which is the caller's send buffer"

MATCHING = {
    "unmatched send": (
        bcasting(plan(TO_1, TO_1), plan(FROM_0)),
        r"bcast does not end on ranks 0; waiting: rank 0 in step 1 for rank 1 to receive",
    ),
    "unmatched receive": (
        bcasting(plan(TO_1), plan(FROM_0, FROM_0)),
        r"bcast does not end on ranks 1; waiting: rank 1 in step 1 for a message of rank 0",
    ),
    "count": (
        bcasting(plan([Send(1, out(0, 3))]), plan(FROM_0)),
        r"rank 1, step 0: expects 4 elements from rank 0 in step 0, which sends 3 in its step 0",
    ),
    "longer message": (
        bcasting(plan(TO_1), plan([Recv(0, out(0, 3))])),
        r"expects 3 elements from rank 0 in step 0, which sends 4 in its step 0",
    ),
    "order of messages": (
        bcasting(
            plan([Send(1, out(0, 1)), Send(1, out(1, 4))]),
            plan([Recv(0, out(1, 4)), Recv(0, out(0, 1))]),
        ),
        r"expects 3 elements from rank 0 in step 0, which sends 1",
    ),
    "message to itself": (after_bcast(Send(1, out(0, 4))), r"rank 1, step 1: names peer 1, not"),
    "no such peer": (after_bcast(Send(2, out(0, 4))), r"peer 2, not another rank of 2"),
    "negative peer": (after_bcast(Recv(-1, work(0, 4))), r"peer -1, not another rank of 2"),
    "two synchronous sends": (unbuffered_ring(2), r"does not end on ranks 0, 1"),
    "cycle of synchronous sends": (
        unbuffered_ring(5),
        r"does not end on ranks 0, 1, 2, 3, 4; waiting: rank 0 in step 1 for rank 1 to receive",
    ),
    "two receives first": (
        bcasting(plan([Recv(1, work(0, 1))], TO_1), plan(FROM_0, [Send(0, out(0, 1))])),
        r"rank 0 in step 0 for a message of rank 1; rank 1 in step 0 for a message of rank 0",
    ),
}

FLIGHT = {
    "receives overlap": (
        bcasting(
            plan([Send(1, out(0, 3)), Send(1, out(2, 4))]),
            plan([Recv(0, out(0, 3)), Recv(0, out(2, 4))]),
        ),
        IN_FLIGHT,
    ),
    "a receive within another": (
        bcasting(
            plan([Send(1, out(0, 4)), Send(1, out(1, 2))]),
            plan([Recv(0, out(0, 4)), Recv(0, out(1, 2))]),
        ),
        IN_FLIGHT,
    ),
    "receive and send overlap": (
        bcasting(
            plan(TO_1, [Recv(1, work(0, 1)), Send(1, out(3, 4))]),
            plan(FROM_0, [Recv(0, out(3, 4)), Send(0, out(3, 4))]),
        ),
        IN_FLIGHT,
    ),
    "receive into the longer of two sends": (
        bcasting(
            plan(TO_1, [Recv(1, work(0, 4)), Recv(1, work(4, 5)), Send(1, out(0, 1))]),
            plan(FROM_0, [Send(0, out(0, 4)), Send(0, out(1, 2)), Recv(0, out(3, 4))]),
        ),
        IN_FLIGHT,
    ),
    "local write of what is sent": (
        exchanging(
            [Copy(out(0, 4), inp(0, 4))],
            [Recv(0, work(0, 4)), Send(0, out(0, 4)), Copy(out(3, 4), inp(3, 4))],
            [FOLD[1]],
        ),
        IN_FLIGHT,
    ),
    "local read of what arrives": (
        bcasting(plan(TO_1, TO_1), plan(FROM_0, [*FROM_0, Copy(work(0, 1), out(3, 4))])),
        IN_FLIGHT,
    ),
    "local write of what arrives": (
        bcasting(
            plan(TO_1, TO_1), plan(FROM_0, [Recv(0, work(0, 4)), Copy(work(2, 4), out(2, 4))])
        ),
        IN_FLIGHT,
    ),
    "fold of what arrives": (exchanging([*EXCHANGE[1], FOLD[1]]), IN_FLIGHT),
}

MEMORY = {
    "sends what is undefined": (
        bcasting(plan([Send(1, work(0, 4))]), plan(FROM_0)),
        r"rank 0, step 0: sends work\[0:4\], " + UNDEFINED,
    ),
    "sends what is undefined in part": (
        bcasting(plan([Copy(work(0, 3), out(0, 3))], [Send(1, work(0, 4))]), plan(FROM_0)),
        r"rank 0, step 1: sends work\[0:4\], " + UNDEFINED,
    ),
    "copies what is undefined": (
        after_bcast(Copy(work(0, 1), work(1, 2))),
        r"copies work\[1:2\], " + UNDEFINED,
    ),
    "reduces what is undefined": (
        reducing(Reduce(out(0, 4), (work(0, 4), work(4, 8)))),
        r"reduces work\[4:8\], " + UNDEFINED,
    ),
    "leaves the output undefined": (
        bcasting(plan([Send(1, out(0, 3))]), plan([Recv(0, out(0, 3))])),
        r"bcast: rank 1: must end with output\[0:4\], " + UNDEFINED,
    ),
    "does nothing": ((ALLREDUCE, [plan()] * 2), r"rank 0: must end with output\[0:4\]"),
    "receives into the input": (
        exchanging([Send(0, inp(0, 4))], [Recv(0, inp(0, 4))]),
        r"rank 1, step 1: writes input\[0:4\], " + CALLERS,
    ),
    "copies into the input": (reducing(FOLD[1], Copy(inp(0, 4), out(0, 4))), CALLERS),
    "reduces into the input": (reducing(Reduce(inp(0, 4), (work(0, 4), inp(0, 4)))), CALLERS),
    "output too short": (
        after_bcast(Copy(out(4, 5), out(0, 1))),
        r"names output\[4:5\], outside of 4 elements",
    ),
    "input too short": (
        reducing(Copy(out(0, 2), inp(3, 5))),
        r"names input\[3:5\], outside of 4 elements",
    ),
    "scratch too short": (
        after_bcast(Copy(work(0, 4), out(0, 4)), scratch=3),
        r"names work\[0:4\], outside of 3 elements",
    ),
    "before the start": (
        after_bcast(Copy(work(0, 1), out(-1, 0))),
        r"names output\[-1:0\], outside of 4 elements",
    ),
    "stop before start": (after_bcast(Copy(work(1, 0), out(1, 0))), r"names output\[1:0\]"),
    "receives out of bounds": (
        bcasting(plan(TO_1), plan([Recv(0, out(1, 5))])),
        r"names output\[1:5\], outside of 4 elements",
    ),
    "empty but outside": (after_bcast(Copy(work(9, 9), out(4, 4))), r"names work\[9:9\]"),
}

LOCAL = {
    "copy of another count": (after_bcast(Copy(work(0, 2), out(0, 3))), r"of another count"),
    "copy overlaps": (
        after_bcast(Copy(out(1, 3), out(0, 2))),
        r"copies output\[0:2\] to output\[1:3\], which overlap",
    ),
    "copy onto itself": (
        after_bcast(Copy(out(0, 4), out(0, 4))),
        r"copies output\[0:4\] onto itself",
    ),
    "fold of one": (
        reducing(Reduce(out(0, 4), (inp(0, 4),))),
        r"reduces 1 operands, expected 2 or more",
    ),
    "fold of none": (reducing(Reduce(out(0, 4), ())), r"reduces 0 operands"),
    "fold of another count": (
        reducing(Reduce(out(0, 4), (work(0, 4), inp(0, 3)))),
        r"reduces input\[0:3\] into output\[0:4\] of another count",
    ),
    "fold overlaps in part": (
        reducing(Copy(work(4, 8), inp(0, 4)), Reduce(work(2, 6), (work(0, 4), work(4, 8)))),
        r"reduces work\[0:4\] into work\[2:6\], which overlap",
    ),
    "fold of three into one of them": (
        folding(Reduce(B, (A, B, C)), Copy(out(0, 2), B)),
        r"reduces work\[0:2\] into work\[0:2\], which overlap",
    ),
    "fold of a span with itself into itself": (
        folding(Reduce(out(0, 2), (A, B, C)), Reduce(B, (B, B))),
        r"reduces work\[0:2\] into work\[0:2\], which overlap",
    ),
    "fold of different elements": (
        reducing(Reduce(out(0, 2), (work(0, 2), inp(2, 4)))),
        r"reduces into output\[0:2\] elements of indices 0, 2",
    ),
}

RESULT = {
    "wrong index": (
        reducing(
            Reduce(work(4, 8), (work(0, 4), inp(0, 4))),
            Copy(out(0, 2), work(6, 8)),
            Copy(out(2, 4), work(4, 6)),
        ),
        r"allreduce: rank 1: ends with element 2 where 0 is promised",
    ),
    "wrong index behind right ones": (
        bcasting(
            plan(TO_1),
            plan(
                [Recv(0, work(0, 4))], [Copy(out(0, 3), work(0, 3)), Copy(out(3, 4), work(2, 3))]
            ),
        ),
        r"ends with element 2 where 3 is promised",
    ),
    "wrong rank": (
        gathering(
            plan([Recv(1, out(0, 2)), Send(1, inp(0, 2)), Copy(out(2, 4), inp(0, 2))]),
            plan([Recv(0, out(0, 2)), Send(0, inp(0, 2)), Copy(out(2, 4), inp(0, 2))]),
        ),
        r"rank 0: ends with a reduction over ranks \(1,\) at element 0; promised is \(0,\)",
    ),
    "an operand missing": (
        reducing(Copy(out(0, 4), inp(0, 4))),
        r"ranks \(1,\) at element 0; promised is \(0, 1\) in order 'any'",
    ),
    "an operand missing at the last element": (
        reducing(FOLD[1], Copy(out(3, 4), inp(3, 4))),
        r"ranks \(1,\) at element 3; promised is \(0, 1\)",
    ),
    "an operand twice": (
        reducing(
            Reduce(work(4, 8), (work(0, 4), inp(0, 4))),
            Reduce(out(0, 4), (work(4, 8), work(0, 4))),
        ),
        r"ranks \(0, 1, 0\) at element 0; promised is \(0, 1\)",
    ),
    "an operand twice, another missing": (
        folding(Reduce(out(0, 2), (A, B, B))),
        r"ranks \(0, 1, 1\) at element 0; promised is \(0, 1, 2\)",
    ),
    "fold where nothing is reduced": (
        bcasting(
            plan(TO_1),
            plan([Recv(0, work(0, 4))], [Reduce(out(0, 4), (work(0, 4), work(0, 4)))]),
        ),
        r"ranks \(0, 0\) at element 0; promised is \(0,\)",
    ),
    "ranks differ in bits": (
        reducing(Reduce(out(0, 4), (inp(0, 4), work(0, 4)))),
        r"rank 1: brackets the reduction differently from rank 0",
    ),
    "ranks differ in bits at the last element": (
        reducing(
            Reduce(out(0, 3), (work(0, 3), inp(0, 3))),
            Reduce(out(3, 4), (inp(3, 4), work(3, 4))),
        ),
        r"rank 1: brackets the reduction differently from rank 0",
    ),
}

HEARD = {
    "silence": (barrier(plan(), plan()), r"barrier: rank 0: ends without having heard of .*\[1\]"),
    "one way": (
        barrier(plan([Send(1, inp(0, 1))]), plan([Recv(0, work(0, 1))])),
        r"rank 0: ends without having heard of ranks \[1\]",
    ),
    "one round of two": (
        barrier(
            plan([Send(1, inp(0, 1)), Recv(2, work(0, 1))]),
            plan([Send(2, inp(0, 1)), Recv(0, work(0, 1))]),
            plan([Send(0, inp(0, 1)), Recv(1, work(0, 1))]),
        ),
        r"rank 0: ends without having heard of ranks \[1\]",
    ),
    "news that come too late": (
        barrier(
            plan([Recv(1, work(0, 1)), Send(1, inp(0, 1))]),
            plan([Recv(0, work(0, 1)), Send(0, inp(0, 1)), Recv(2, work(1, 2))]),
            plan([Send(1, inp(0, 1))]),
        ),
        r"rank 0: ends without having heard of ranks \[2\]",
    ),
    "empty messages, which nobody sends": (
        barrier(
            plan([Send(1, inp(0, 0)), Recv(1, work(0, 0))]),
            plan([Send(0, inp(0, 0)), Recv(0, work(0, 0))]),
        ),
        r"rank 0: ends without having heard of ranks \[1\]",
    ),
}

FAULTS = {**MATCHING, **FLIGHT, **MEMORY, **LOCAL, **RESULT, **HEARD}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    (promise, schedules), message = FAULTS[name]
    with pytest.raises(ScheduleError, match=message):
        prove(promise, schedules)
    assert fault(promise, schedules, "any", False, random.Random(name))


@pytest.mark.parametrize("number", [1, 3])
def test_number_of_schedules(number: int) -> None:
    with pytest.raises(ScheduleError, match=f"{number} schedules for 2 ranks"):
        prove(promised("bcast", 2, 0), [plan()] * number)


FOLDS: dict[str, tuple[Case, tuple[Order, ...]]] = {
    "one fold in rank order": (
        folding(Reduce(out(0, 2), (A, B, C))),
        ("any", "rank", "sequential"),
    ),
    "one fold in another order": (folding(Reduce(out(0, 2), (A, C, B))), ("any",)),
    "the first rank last": (folding(Reduce(out(0, 2), (B, C, A))), ("any",)),
    "from the left": (
        folding(Reduce(work(4, 6), (A, B)), Reduce(out(0, 2), (work(4, 6), C))),
        ("any", "rank"),
    ),
    "from the right": (
        folding(Reduce(work(4, 6), (B, C)), Reduce(out(0, 2), (A, work(4, 6)))),
        ("any", "rank"),
    ),
    "outside in": (
        folding(Reduce(work(4, 6), (A, C)), Reduce(out(0, 2), (work(4, 6), B))),
        ("any",),
    ),
    "in the place of an operand": (
        folding(Reduce(C, (B, C)), Reduce(C, (A, C)), Copy(out(0, 2), C)),
        ("any", "rank"),
    ),
    "half in order": (
        folding(
            Reduce(out(0, 1), (inp(0, 1), work(0, 1), work(2, 3))),
            Reduce(out(1, 2), (inp(1, 2), work(3, 4), work(1, 2))),
        ),
        ("any",),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FOLDS)
def test_order_of_a_fold(name: str, order: Order) -> None:
    (promise, schedules), kept = FOLDS[name]
    if order in kept:
        prove(promise, schedules, order=order)
    else:
        with pytest.raises(ScheduleError, match=rf"promised is \(0, 1, 2\) in order '{order}'"):
            prove(promise, schedules, order=order)
    assert bool(fault(promise, schedules, order, False, random.Random(1))) == (order not in kept)


LATE = plan([Recv(0, work(0, 4))], [Send(0, inp(0, 4))], [FOLD[1]])  # hears, then answers

#: Faults when input and output share memory, and whether they are none when they do not.
IN_PLACE = {
    "receives into what is sent": (
        (
            ALLREDUCE,
            [
                plan(
                    [Recv(1, out(0, 4)), Send(1, inp(0, 4))],
                    [Reduce(out(0, 4), (inp(0, 4), out(0, 4)))],
                ),
                plan(EXCHANGE[1], [FOLD[1]]),
            ],
        ),
        IN_FLIGHT,
        True,
    ),
    "receives before the input is read": (
        (
            ALLREDUCE,
            [
                plan(
                    [Send(1, inp(0, 4))],
                    [Recv(1, out(0, 4))],
                    [Reduce(out(0, 4), (inp(0, 4), out(0, 4)))],
                ),
                LATE,
            ],
        ),
        r"rank 0, step 2: reduces output\[0:4\] into output\[0:4\], which overlap",
        True,
    ),
    "writes before the input is sent": (
        (
            ALLREDUCE,
            [
                plan([Recv(1, work(0, 4))], [FOLD[0]], [Send(1, inp(0, 4))]),
                plan([Send(0, inp(0, 4))], [Recv(0, work(0, 4))], [FOLD[1]]),
            ],
        ),
        r"ranks \(0, 1, 1\) at element 0; promised is \(0, 1\)",
        True,
    ),
    "shifts the input within the output": (
        gathering(
            plan(
                [Copy(out(1, 3), inp(0, 2))],
                [Copy(work(0, 2), out(1, 3)), Copy(out(0, 2), work(0, 2))],
                [Recv(1, out(2, 4)), Send(1, out(0, 2))],
            ),
            plan([Copy(out(2, 4), inp(0, 2))], [Recv(0, out(0, 2)), Send(0, out(2, 4))]),
        ),
        r"rank 0, step 0: copies output\[0:2\] to output\[1:3\], which overlap",
        True,
    ),
    "writes the scatterer's input": (
        (
            promised("scatter", 2, 2, 2),
            [
                plan(
                    [Send(1, inp(2, 4)), Copy(work(0, 2), inp(0, 2))],
                    [Copy(out(0, 2), work(0, 2))],
                ),
                plan([Recv(0, out(0, 2))]),
            ],
        ),
        r"rank 0, step 1: writes output\[0:2\], " + CALLERS,
        True,
    ),
    "writes what it calls input": (
        reducing(Reduce(inp(0, 4), (work(0, 4), inp(0, 4)))),
        r"rank 1, step 1: writes input\[0:4\], " + CALLERS,
        False,
    ),
    "copies onto itself, but outside": (
        (promised("allreduce", 1, 4), [plan([Copy(out(0, 5), inp(0, 5))])]),
        r"names output\[0:5\], outside of 4 elements",
        False,
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_fault_in_place(name: str) -> None:
    (promise, schedules), message, only_in_place = IN_PLACE[name]
    with pytest.raises(ScheduleError, match=message):
        prove(promise, schedules, in_place=True)
    assert fault(promise, schedules, "any", True, random.Random(name))
    if only_in_place:
        prove(promise, schedules)


def test_local_work_overlaps_messages() -> None:
    """Work on other spans than those in flight is fine, and so is reading what is sent."""
    root = plan([Send(1, out(0, 2)), Copy(work(0, 4), out(0, 4))], [Send(1, out(2, 4))])
    leaf = plan([Recv(0, work(0, 2))], [Recv(0, out(2, 4)), Copy(out(0, 2), work(0, 2))])
    prove(*bcasting(root, leaf))


def test_copy_in_place_is_no_work() -> None:
    """A copy of the input to where it is may meet messages in flight; executors skip it."""
    promise, schedules = gathering(
        plan([Recv(1, out(2, 4)), Send(1, inp(0, 2)), Copy(out(0, 2), inp(0, 2))]),
        plan([Recv(0, out(0, 2)), Send(0, inp(0, 2)), Copy(out(2, 4), inp(0, 2))]),
    )
    for in_place in (False, True):
        prove(promise, schedules, in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_first_rank_of_an_exscan_has_no_output(in_place: bool) -> None:
    """Its buffer is left as it is."""
    promise, send = promised("exscan", 2, 4), [Send(1, inp(0, 4))]
    last = plan([Recv(0, work(0, 4))], [Copy(out(0, 4), work(0, 4))])
    prove(promise, [plan(send), last], in_place=in_place)
    with pytest.raises(ScheduleError, match=r"names output\[0:4\], outside of 0 elements"):
        prove(promise, [plan(send, [Copy(out(0, 4), inp(0, 4))]), last], in_place=in_place)


def test_swapped_operands_where_order_is_promised() -> None:
    rng = random.Random(5)
    swapped = 0
    for algorithm in (item for item in ALGORITHMS if item.order != "any"):
        for size in SIZES:
            for group in groups(algorithm, size, rng):
                draft = drafts(proofs.build(algorithm, group))
                if MUTATIONS["swap_operands"](draft, rng):
                    promise = contract(algorithm.collective, group)
                    with pytest.raises(ScheduleError, match="promised is"):
                        prove(promise, finished(draft), order=algorithm.order)
                    swapped += 1
    assert swapped > 0


# -- intervals --------------------------------------------------------------------------


def test_memory_is_a_dict_of_elements() -> None:
    rng = random.Random(7)
    for _ in range(300):
        memory, plain = Memory(), {}
        for term in range(rng.randrange(1, 15)):
            start = rng.randrange(20)
            if rng.random() < 0.6:
                pieces = [
                    Piece(rng.randrange(1, 6), term, rng.randrange(100))
                    for _ in range(rng.randrange(4))
                ]
                memory.write(start, pieces)
                for length, name, first in pieces:
                    for i in range(length):
                        plain[start + i] = name, first + i
                    start += length
            stop = start + rng.randrange(8)
            read = memory.read(start, stop)
            values = [plain.get(i) for i in range(start, stop)]
            if read is None:
                assert None in values
            else:
                assert [(t, f + i) for n, t, f in read for i in range(n)] == values
