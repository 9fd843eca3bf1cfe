"""Many calls, many in flight, many communicators, several threads; ``--full`` makes them more."""

from __future__ import annotations

import gc
import resource
import threading
import warnings
from collections.abc import Callable
from itertools import count as counting
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from breaking import METHODS, calls
from mpi4py import MPI

from mpicoll import Comm, Request
from mpicoll.runtime import ending, executor, progress, watchdog

if TYPE_CHECKING:
    from harness import Ranks

#: What memory may grow by over any number of calls: a page or two of Python's own, in
#: objects, and in KiB of the process what one of its arenas has.
OBJECTS, KIBIBYTES = 500, 4096


def memory() -> tuple[int, int]:
    """Return how many objects Python has, and the most KiB the process ever had."""
    gc.collect()
    return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rounds(comm: Any, count: int) -> None:
    """Make ``count`` times four small calls, one of each form and a barrier."""
    one, out = np.ones(4), np.empty(4)
    plan = comm.Allreduce_init(one, out)
    for _ in range(count):
        comm.Allreduce(one, out)
        comm.Iallreduce(one, out).Wait()
        plan.Start()
        plan.Wait()
        comm.Barrier()
    plan.Free()


@pytest.mark.parametrize("kind", ["plain", "limit", "check", "thread"])
def test_many_small_calls(kind: str, world: Comm, full: bool) -> None:
    """A million with --full; memory stays flat."""
    count = (1_000_000 if full else 400 if kind == "check" else 1200) // 4
    options: dict[str, Any] = {
        "plain": {},
        "limit": {"timeout": 3600},
        "check": {"check": True},
        "thread": {"progress": "thread"},
    }[kind]
    comm = Comm(MPI.Intracomm(world).Dup(), **options)
    rounds(comm, 150)  # more calls than the flight recorder keeps
    objects, kibibytes = memory()
    rounds(comm, count)
    grown = memory()
    assert grown[0] - objects < OBJECTS
    assert grown[1] - kibibytes < KIBIBYTES
    assert not progress.active()
    assert comm.stats.total.calls >= 4 * (count + 150)
    comm.Free()


def test_large_memory_is_given_back(world: Comm, full: bool) -> None:
    """Buffers of 8 MB that non-blocking calls have held do not pile up."""
    data = np.ones(1_000_000)

    def once() -> None:
        Request.Waitall([world.Iallreduce(data, np.empty_like(data)) for _ in range(2)])

    for _ in range(3):
        once()
    _, before = memory()
    for _ in range(200 if full else 10):
        once()
    assert memory()[1] - before < 3 * 8192


@pytest.mark.parametrize("slots", [4, 8, 64])
def test_more_calls_than_tags(slots: int, world: Comm, full: bool) -> None:
    """All methods and forms, some in flight, some refused on one rank, over few tags."""
    comm = world.Dup()
    comm._link.tags.divide(slots)
    last = comm.rank == comm.size - 1
    wanted = np.arange(comm.size) * 1.0
    flying: list[tuple[Request, Any]] = []
    for number in range(20_000 if full else 300):
        name = METHODS[number % len(METHODS)]
        if number % 3 == 0:
            out = np.full(comm.size, -1.0)
            flying.append((comm.Iallgather(np.array([comm.rank * 1.0]), out), out))
        elif number % 7 == 1:
            # The root sends to a rank that refuses the call, and does not learn of it.
            data = np.full(3, float(number))
            try:
                comm.Bcast([data, 1000, MPI.DOUBLE] if last else data)
            except ValueError:
                assert last
            assert comm.size == 1 or last or (data == number).all()
        else:
            getattr(comm, name)(*calls(comm, 3)[name])
        while len(flying) > number % 11:
            request, out = flying.pop(number % len(flying))
            request.Wait()
            assert (out == wanted).all()
    for request, out in flying:
        request.Wait()
        assert (out == wanted).all()
    comm.Free()


@pytest.mark.parametrize("thread", [False, True], ids=["driven", "thread"])
def test_64_in_flight_on_overlapping_communicators(
    thread: bool, world: Comm, ranks: Ranks, full: bool
) -> None:
    """Every rank starts those of different communicators and completes all in its own order."""
    option: Any = "thread" if thread else None
    base = MPI.Intracomm(world)
    comms = [
        Comm(base.Dup(), progress=option),
        Comm(base.Split(ranks.rank % 2, ranks.rank), progress=option),
        Comm(base.Split(ranks.rank // 2, -ranks.rank), progress=option),
        Comm(base.Split(0, -ranks.rank), progress=option),
    ]
    for turn in range(200 if full else 4):
        own = np.random.default_rng([ranks.seed, turn, ranks.rank])
        # On each communicator 16, in the same order on all of its ranks.
        order = own.permutation(np.repeat(np.arange(4), 16))
        begun = [0] * 4
        flying: list[tuple[Any, np.ndarray[Any, Any], float]] = []
        for which in order:
            comm: Any = comms[which]
            number = begun[which]
            begun[which] += 1
            n = (1, 100, 20_000)[number % 3]
            out = np.full(n, -1.0)
            one = np.full(n, number + comm.rank * 1.0)
            if number % 2:
                request = comm.Iallreduce(one, out)
                result = number * comm.size + comm.size * (comm.size - 1) / 2
            else:
                out[:] = one
                request = comm.Ibcast(out, root=number % comm.size)
                result = number + number % comm.size
            flying.append((request, out, result))
        assert len(flying) == 64
        if turn % 4 == 3:
            Request.Waitall([flying[at][0] for at in own.permutation(64)])
        waiting = [flying[at] for at in own.permutation(64)]
        while waiting:
            if turn % 4 == 1:
                at = Request.Waitany([request for request, _, _ in waiting])
                at = 0 if at == MPI.UNDEFINED else at
            else:
                at = 0
            request, out, result = waiting.pop(at)
            request.Wait()
            assert (out == result).all()
    assert not progress.active()
    for comm in comms:
        comm.Free()


def in_threads(*work: Callable[[], None]) -> None:
    """Run each in a thread of its own; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[one]) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", ["plain", "limit", "check", "thread"])
def test_two_threads_on_two_communicators(kind: str, world: Comm, full: bool) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    options: dict[str, Any] = {
        "plain": {},
        "limit": {"timeout": 3600},
        "check": {"check": True},
        "thread": {"progress": "thread"},
    }[kind]
    one, two = (Comm(MPI.Intracomm(world).Dup(), **options) for _ in range(2))
    count = 20_000 if full else 60

    def sums() -> None:
        for number in range(count):
            n = (1, 3000)[number % 2]
            out = np.empty(n)
            one.Allreduce(np.full(n, number * 1.0), out)
            assert (out == number * one.size).all()

    def moves() -> None:
        for number in range(count):
            out = np.full(two.size, -1)
            request = two.Ialltoall(np.arange(two.size) + 100 * two.rank + number, out)
            total = np.empty(1)
            two.Allreduce(np.ones(1), total)
            request.Wait()
            assert out.tolist() == [100 * peer + two.rank + number for peer in range(two.size)]
            assert total[0] == two.size

    in_threads(sums, moves)
    assert not progress.active()
    one.Free()
    two.Free()


def test_communicators_made_and_freed(world: Comm, full: bool) -> None:
    """5000 with --full; MPIs have some 2000 at a time."""
    count = 5000 if full else 60

    def once(number: int) -> None:
        comm: Any = (world.Dup, lambda: world.Split(world.rank % 2), lambda: world.Split(0))[
            number % 3
        ]()
        comm = Comm(comm, timeout=60 if number % 4 == 1 else None, check=number % 4 == 2)
        out = np.empty(1)
        comm.Allreduce(np.ones(1), out)
        assert out[0] == comm.size
        request = comm.Iallreduce(np.ones(1), out)
        plan = comm.Barrier_init()
        plan.Start()
        plan.Wait()
        plan.Free()
        comm.Free()
        request.Wait()

    for number in range(40):  # what is remembered of freed ones is full then
        once(number)
    before = len(ending.LINKS), len(watchdog.WATCHED)
    objects, kibibytes = memory()
    for number in range(count):
        once(number)
    grown = memory()
    assert (len(ending.LINKS), len(watchdog.WATCHED)) == before
    assert grown[0] - objects < OBJECTS
    assert grown[1] - kibibytes < KIBIBYTES + (count if full else 0)  # MPIs keep some of each


def test_requests_dropped_by_the_hundred(world: Comm, full: bool) -> None:
    """None of them is lost, and none is kept."""
    comm: Any = world.Dup()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for number in range(20_000 if full else 300):
            out = np.full(2, -1.0)
            results = [*results[-20:], (out, number * comm.size)]
            comm.Iallreduce(np.full(2, number * 1.0), out)
    comm.Free()
    assert all((out == result).all() for out, result in results)
    assert not progress.active()


def test_a_million_plans_use_each_tag_again(world: Comm, full: bool) -> None:
    comm: Any = world.Dup()
    comm._link.tags.allow(16)
    one, out = np.ones(2), np.empty(2)
    for _ in range(100_000 if full else 100):
        plan = comm.Allreduce_init(one, out)
        plan.Start()
        plan.Wait()
        plan.Free()
    assert out.tolist() == [comm.size] * 2
    comm.Free()


def test_a_plan_may_be_started_on_either_side_of_a_turn_of_the_tags(world: Comm) -> None:
    """Ranks may start a plan before or after other calls; a turn in between waits for none."""
    comm = world.Dup()
    comm._link.tags.divide(8)
    out = np.zeros(3)
    plan = comm.Allreduce_init(np.ones(3), out)
    if comm.rank == 0:
        plan.Start()
    for _ in range(20):
        comm.Barrier()
    if comm.rank != 0:
        plan.Start()
    plan.Wait()
    assert out.tolist() == [comm.size] * 3
    plan.Free()
    comm.Free()


def test_few_scratches_are_kept(world: Comm) -> None:
    """Calls of growing size leave no trail of scratch behind."""
    comm = world.Dup()
    for count in range(8, 8 * 40, 8):
        x = np.ones(count * comm.size)
        comm.Allreduce(x, np.empty_like(x), algorithm="ring")
    assert len(comm._link.scratch) <= 8
    comm.Free()


def test_a_wait_naps_only_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that ends begins the wait anew, however long it has been."""
    naps: list[float] = []
    seconds = counting(step=0.01)
    monkeypatch.setattr(progress, "nap", naps.append)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    steps = [*([True] * 300), *([False] * 3), True, False, False]

    def done() -> bool:
        if not steps:
            return True
        executor.SETTLED[0] += steps.pop(0)
        return False

    progress.await_(done, lambda: None)
    assert naps == pytest.approx([0.01, 0.02, 0.03, 0.01, 0.02])


def test_abort_is_given_time_before_the_process_ends_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[tuple[str, float]] = []

    def note(what: str) -> Callable[[float], None]:
        return lambda number: happened.append((what, number))

    world = SimpleNamespace(Abort=note("abort"))
    monkeypatch.setattr(watchdog, "end_in", note("end in"))
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=note("exit")))
    monkeypatch.setattr(watchdog, "MPI", SimpleNamespace(COMM_WORLD=world))
    watchdog.leave([])
    assert happened == [("end in", 5.0), ("abort", 1), ("exit", 1)]
