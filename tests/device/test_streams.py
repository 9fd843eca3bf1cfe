"""Streams and devices as callers have them: several of each, current ones, per-thread ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deferred import BACKEND, POLICIES, Array, address_of, array, empty, host
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.runtime import staging

ITEMS = 700
FORMS = ["blocking", "non-blocking", "persistent"]

forms = pytest.mark.parametrize("form", FORMS)
protocols = pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])


def started(comm: Comm, form: str, x: Array, result: Array) -> Callable[[], object]:
    """Start an allreduce; return what waits for it."""
    if form == "blocking":
        comm.Allreduce(x, result)
        return lambda: None
    if form == "non-blocking":
        return comm.Iallreduce(x, result).Wait
    plan = comm.Allreduce_init(x, result)
    plan.Start()

    def end() -> None:
        plan.Wait()
        plan.Free()

    return end


def total(comm: Comm, value: float) -> float:
    """Return the sum of ``value`` plus the rank over all ranks."""
    return comm.size * value + comm.size * (comm.size - 1) / 2


@forms
@protocols
def test_several_devices_of_one_process(form: str, pointers: bool, world: Comm) -> None:
    """Each call works on the device of its arrays, whichever is current, and on its streams.

    The deferred device refuses a stream the memory of another device. Several calls on
    each are in flight at once; what is current changes at every turn.
    """
    for policy in POLICIES:
        BACKEND.use(policy, pointers)
        made = []
        for number in range(6):
            device = (number + world.rank) % 3
            BACKEND.device = (number // 2) % 3  # often not that of the arrays
            BACKEND.new_stream(device)
            x = array(np.full(ITEMS, float(number + world.rank)), device)
            result = empty((ITEMS,), np.float64, device)
            made.append((started(world, form, x, result), result, number, device))
        for wait, result, number, device in reversed(made):
            BACKEND.device = (number + 1) % 3
            wait()
            BACKEND.new_stream(device)
            assert (host(result) == total(world, number)).all()


@protocols
def test_a_plan_sees_the_stream_of_each_start(pointers: bool, world: Comm) -> None:
    for policy in POLICIES:
        BACKEND.use(policy, pointers)
        x, result = empty((ITEMS,), np.float64, 1), empty((ITEMS,), np.float64, 1)
        plan = world.Allreduce_init(x, result)
        for turn in range(4):
            BACKEND.device = turn % 2
            BACKEND.new_stream(1)
            filled = array(np.full(ITEMS, float(turn + world.rank)), 1)
            stream = BACKEND.current(x, 1)
            BACKEND.copy(x.address, filled.address, x.nbytes, stream)  # type: ignore[arg-type]
            plan.Start()
            BACKEND.new_stream(1)
            plan.Wait()
            assert (host(result) == total(world, turn)).all()
        plan.Free()


@protocols
def test_host_and_device_buffers_of_any_device_meet(pointers: bool, world: Comm) -> None:
    """One rank on the host, the next on a device, each on its own one."""
    BACKEND.use("by chance", pointers)
    x, where = np.full(ITEMS, float(world.rank)), world.rank % 3
    given: Any = x if where == 2 else array(x, where)
    result: Any = np.empty(ITEMS) if where == 2 else empty((ITEMS,), np.float64, where)
    for algorithm in ("ring", "recursive_doubling", "direct"):
        world.Allreduce(given, result, algorithm=algorithm)
        found = result if where == 2 else host(result)
        assert (found == total(world, 0)).all()


def run_in_threads(*works: Callable[[], object]) -> None:
    """Run each on a thread of its own; raise what one of them has raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@forms
@protocols
def test_the_default_stream_of_a_thread(form: str, pointers: bool, world: Comm) -> None:
    BACKEND.use("late", pointers)
    BACKEND.per_thread()
    x, result = array(np.full(ITEMS, float(world.rank))), empty((ITEMS,), np.float64)
    started(world, form, x, result)()
    assert (host(result) == total(world, 0)).all()


def test_another_thread_may_begin_what_a_thread_has_called() -> None:
    """Its own default stream has none of the caller's work."""
    for again in (False, True):
        BACKEND.use("late", True)
        BACKEND.per_thread()
        x = array(np.full(ITEMS, 3.0))
        lane = staging.Lane(BACKEND, 0, x)
        if again:
            x = array(np.full(ITEMS, 3.0))
            lane.again()
        found = empty((ITEMS,), np.float64)

        def begin(lane: staging.Lane = lane, x: Array = x, found: Array = found) -> None:
            BACKEND.per_thread()
            lane.enter()
            lane.copy(found.address, x.address, x.nbytes)
            assert lane.left(wait=True)

        run_in_threads(begin)
        lane.close()
        assert (host(found) == 3.0).all()


@protocols
def test_a_checked_call_that_another_thread_completes(pointers: bool, world: Comm) -> None:
    """The ranks compare their arguments first, so the call begins where it is waited for."""
    comm = Comm(MPI.Intracomm(world).Dup(), check=True)
    BACKEND.use("late", pointers)
    for form in ("non-blocking", "persistent"):
        BACKEND.per_thread()
        x, result = array(np.full(ITEMS, float(comm.rank))), empty((ITEMS,), np.float64)
        run_in_threads(started(comm, form, x, result))
        assert (host(result) == total(comm, 0)).all()
    comm.Free()


@protocols
def test_threads_with_streams_of_their_own(pointers: bool, world: Comm) -> None:
    """Two threads at once, each with its communicator, its device and its default stream."""
    BACKEND.use("by chance", pointers)
    comms = [Comm(MPI.Intracomm(world).Dup()) for _ in range(2)]

    def calls(number: int) -> None:
        comm = comms[number]
        BACKEND.device = number
        BACKEND.per_thread(number)
        for turn in range(10):
            value = float(10 * turn + number)
            x = array(np.full(ITEMS, value + comm.rank), number)
            result = empty((ITEMS,), np.float64, number)
            started(comm, FORMS[turn % 3], x, result)()
            assert (host(result) == total(comm, value)).all()

    run_in_threads(*[lambda number=number: calls(number) for number in range(2)])
    for comm in comms:
        comm.Free()


@pytest.mark.parametrize("way", ["main", "up"])
def test_a_call_left_half_way_waits_before_it_gives_memory_back(way: str) -> None:
    BACKEND.use("late", True)
    x = empty((ITEMS,), np.float64)
    lane = staging.Lane(BACKEND, 0, x)
    lane.hosted = way == "main"
    lane.enter()
    if way == "main":
        memory = lane.scratch(x.nbytes)
        assert isinstance(memory, np.ndarray)
        memory.view(np.float64)[:] = 7.0
        lane.copy(x.address, address_of(memory), x.nbytes)
    else:
        segment = lane.pool.take(x.nbytes)
        memory = segment.memory[: x.nbytes]
        memory.view(np.float64)[:] = 7.0
        lane.up(lane.region(x.address, x.nbytes, x), segment)
    lane.close()
    memory[:] = 0  # it may be another call's by now
    assert (host(x) == 7.0).all()
