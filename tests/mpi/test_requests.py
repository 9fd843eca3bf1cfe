"""Requests of non-blocking and persistent collectives: mpi4py's methods, and what they promise."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from breaking import METHODS, calls
from childjob import run_job
from mpi4py import MPI
from wrong_calls import POISON, WRONG, Wrong

from mpicoll import Comm, Prequest, Request, SettingError
from mpicoll.runtime import progress
from mpicoll.runtime.requests import FORGOTTEN, free_forgotten

if TYPE_CHECKING:
    from pathlib import Path

    from harness import Ranks

Array = np.ndarray[Any, Any]

#: The methods of lists that complete requests, and those that only ask.
COMPLETE = [
    f"{how}{which}" for how in ("Wait", "Test", "wait", "test") for which in ("all", "any", "some")
]
ASK = [f"{how}_status_{which}" for how in ("Get", "get") for which in ("all", "any", "some")]
ALONE = MPI.COMM_WORLD.size == 1
#: mpi4py has its own since this version.
ASKED_NATIVELY = MPI.Get_version() >= (4, 1)


def started(comm: Any, value: float = 1.0, n: int = 3) -> tuple[Request, Array]:
    """Start a sum over all ranks; return its request and where the result comes."""
    out = np.full(n, POISON)
    return comm.Iallreduce(np.full(n, float(value)), out), out


def failing(comm: Any) -> Request:
    """Start a collective whose error comes at Wait, since the ranks have to agree first."""
    request: Request = comm.Ireduce_scatter(np.ones(2 * comm.size + 1), np.empty(2))
    return request


def all_over(requests: list[Any]) -> None:
    """Drive collectives until all are complete, and leave their requests as they are."""
    for one in requests:
        while not one.Get_status():
            progress.progress()


def first(ranks: Ranks, start: Callable[[], Any], check: Callable[[Any], None]) -> Any:
    """Start on all ranks but 0, check there while it is in flight, then start on rank 0.

    Returns what ``start`` does. On one rank nothing is ever in flight.
    """
    made = None
    if ranks.rank:
        made = start()
        check(made)
    ranks.comm.Barrier()
    return made if ranks.rank else start()


def works(comm: Any) -> None:
    """Use a communicator on all ranks."""
    total = np.zeros(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size


@pytest.fixture
def twin(world: Comm) -> Iterator[Any]:
    made = world.Dup()
    yield made
    made.Free()


@pytest.fixture(params=["driven", "thread"])
def either(request: pytest.FixtureRequest, world: Comm) -> Iterator[Any]:
    """Communicators whose operations are driven by calls, and by a thread."""
    made = Comm(
        MPI.Intracomm(world).Dup(), progress=None if request.param == "driven" else "thread"
    )
    yield made
    made.Free()


# -- one request ------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True], ids=["mpicoll", "mpi4py"])
def test_one_request(world: Comm, native: bool) -> None:
    comm = MPI.Intracomm(world) if native else world
    request, out = started(comm)
    assert request
    assert request.Wait() is True
    assert not request
    assert out.tolist() == [comm.size] * 3
    assert request.Wait() is True
    assert request.Test() is True
    assert request.wait() is None
    assert request.test() == (True, None)
    assert request.Get_status() is True
    assert request.get_status() is True


@pytest.mark.parametrize("kind", ["Request", "Prequest"])
def test_no_method_of_mpi4py_is_missing(kind: str) -> None:
    """But for C handles, and parts of point-to-point messages."""
    ours, theirs = {"Request": Request, "Prequest": Prequest}[kind], getattr(MPI, kind)
    missing = {name for name in dir(theirs) if name[0] != "_" and not hasattr(ours, name)}
    handles = {"f2py", "fromhandle", "fromint", "handle", "py2f", "toint"}
    assert missing - handles == {name for name in missing if name.startswith(("Parr", "Pready"))}


def test_the_status_is_that_of_no_message(either: Any) -> None:
    for ask in ("Wait", "Test", "wait", "test", "Get_status", "get_status"):
        request, _ = started(either)
        if ask.lower() in ("test", "get_status"):
            while not request.Get_status():
                pass
        status = MPI.Status()
        status.Set_source(7)
        status.Set_tag(7)
        status.Set_cancelled(True)
        getattr(request, ask)(status)
        assert (status.source, status.tag) == (MPI.ANY_SOURCE, MPI.ANY_TAG), ask
        assert (status.count, status.error) == (0, MPI.SUCCESS), ask
        assert not status.Is_cancelled()
        request.Wait()


@pytest.mark.parametrize("n", [0, 3, 40_000])
@pytest.mark.parametrize("ask", ["Test", "test", "Get_status", "get_status"])
def test_tests_alone_complete_it(either: Any, ask: str, n: int) -> None:
    request, out = started(either, either.rank + 1.0, n)
    done: Any = False
    while not done:
        done = getattr(request, ask)()
        done = done[0] if ask == "test" else done
    assert (out == either.size * (either.size + 1) / 2).all()
    request.Wait()


def test_what_is_under_way_can_not_be_freed_or_cancelled(ranks: Ranks, either: Any) -> None:
    def check(made: Any) -> None:
        for call in ("Free", "free"):
            with pytest.raises(MPI.Exception, match="under way can not be freed") as error:
                getattr(made[0], call)()
            assert error.value.Get_error_class() == MPI.ERR_REQUEST
        assert made[0]
        assert made[0].Test() is False

    request, out = first(ranks, lambda: started(either), check)
    for call in ("Cancel", "cancel"):
        with pytest.raises(MPI.Exception, match="can not be cancelled") as error:
            getattr(request, call)()
        assert error.value.Get_error_class() == MPI.ERR_REQUEST
    request.Wait()
    assert out.tolist() == [either.size] * 3
    request.Free()
    assert not request


def test_a_request_that_is_complete_can_be_freed(world: Comm) -> None:
    request, out = started(world)
    while not request.Get_status():
        pass
    request.Free()
    assert not request
    assert out.tolist() == [world.size] * 3
    assert request.Wait() is True


# -- many requests ----------------------------------------------------------------------


class Mixed:
    """Two collectives, a message from the left and one to the right, and no request."""

    def __init__(self, ranks: Ranks, comm: Any) -> None:
        self.size = comm.size
        self.left, right = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
        one, self.one = started(comm, 1.0)
        self.got = np.full(2, POISON)
        receive = ranks.comm.Irecv(self.got, self.left, 5)
        self.two = np.full(comm.size, POISON)
        two = comm.Iallgather(np.array([comm.rank * 1.0]), self.two)
        send = ranks.comm.Isend(np.full(2, ranks.rank * 1.0), right, 5)
        self.requests = [one, receive, MPI.REQUEST_NULL, two, send]
        self.active = {0, 1, 3, 4}

    def check(self) -> None:
        assert self.one.tolist() == [self.size] * 3
        assert self.two.tolist() == list(range(self.size))
        assert self.got.tolist() == [self.left] * 2
        assert all(not one for one in self.requests)


def test_waitall(ranks: Ranks, either: Any) -> None:
    mixed = Mixed(ranks, either)
    statuses: list[MPI.Status] = []
    assert Request.Waitall(mixed.requests, statuses) is True
    mixed.check()
    assert len(statuses) == 5
    assert (statuses[1].source, statuses[1].tag, statuses[1].count) == (mixed.left, 5, 16)
    assert statuses[0].source == MPI.ANY_SOURCE
    assert Request.Waitall(mixed.requests) is True


def test_testall(ranks: Ranks, either: Any) -> None:
    def check(mixed: Any) -> None:
        assert Request.Testall(mixed.requests) is False
        assert all(bool(mixed.requests[number]) for number in (0, 3))

    mixed = first(ranks, lambda: Mixed(ranks, either), check)
    statuses: list[MPI.Status] = []
    while not Request.Testall(mixed.requests, statuses):
        pass
    mixed.check()
    assert (statuses[1].source, statuses[1].tag) == (mixed.left, 5)


@pytest.mark.parametrize("how", ["Waitany", "Testany"])
def test_any(ranks: Ranks, either: Any, how: str) -> None:
    mixed = Mixed(ranks, either)
    found: list[int] = []
    status = MPI.Status()
    while True:
        if how == "Waitany":
            number = Request.Waitany(mixed.requests, status)
        else:
            number, done = Request.Testany(mixed.requests, status)
            if not done:
                assert number == MPI.UNDEFINED
                continue
        if number == MPI.UNDEFINED:
            break
        if number == 1:
            assert (status.source, status.tag) == (mixed.left, 5)
        found.append(number)
    assert sorted(found) == sorted(mixed.active)
    mixed.check()


@pytest.mark.parametrize("how", ["Waitsome", "Testsome"])
def test_some(ranks: Ranks, either: Any, how: str) -> None:
    mixed = Mixed(ranks, either)
    found: list[int] = []
    while True:
        statuses: list[MPI.Status] = []
        some = getattr(Request, how)(mixed.requests, statuses)
        if some is None:
            break
        assert some or how == "Testsome"
        for number, status in zip(some, statuses, strict=False):
            if number == 1:
                assert (status.source, status.tag) == (mixed.left, 5)
        found += some
    assert sorted(found) == sorted(mixed.active)
    mixed.check()


def test_waitall_of_objects(ranks: Ranks, world: Comm) -> None:
    left, right = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    one, out = started(world)
    requests = [ranks.comm.isend({"rank": ranks.rank}, right, 6), one]
    requests.append(ranks.comm.irecv(source=left, tag=6))
    assert Request.waitall(requests) == [None, None, {"rank": left}]
    assert out.tolist() == [world.size] * 3


@pytest.mark.parametrize("kind", [Request, MPI.Request], ids=["mpicoll", "mpi4py"])
def test_lists_of_nothing(world: Comm, kind: Any) -> None:
    for nothing in ([], [MPI.REQUEST_NULL] * 2):
        assert kind.Waitall(nothing) is True
        assert kind.Testall(nothing) is True
        assert kind.Waitany(nothing) == MPI.UNDEFINED
        assert kind.Testany(nothing) == (MPI.UNDEFINED, True)
        assert kind.Waitsome(nothing) is None
        assert kind.Testsome(nothing) is None


@pytest.mark.parametrize("how", ["Waitall", "waitall", "Testall", "testall"])
def test_errors_are_raised_when_all_are_over(either: Any, how: str) -> None:
    """The first of them; the others complete."""
    requests: list[Any] = [failing(either), started(either)[0], failing(either)]
    right, out = started(either)
    requests.append(right)
    if how in ("Testall", "testall"):
        all_over(requests)
    with pytest.raises(
        ValueError, match=f"Ireduce_scatter on rank {either.rank}: mismatch in send"
    ):
        getattr(Request, how)(requests)
    assert not any(requests)
    assert out.tolist() == [either.size] * 3


@pytest.mark.parametrize("how", ["Waitsome", "waitsome", "Testsome", "testsome"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_an_error_costs_no_indices(either: Any, how: str, wrong: int) -> None:
    """Those that are complete are told; then it is raised, once."""
    requests = [started(either)[0], MPI.COMM_SELF.Ibarrier(), started(either)[0]]
    requests.insert(wrong, failing(either))
    all_over(requests)
    found = getattr(Request, how)(requests)
    indices = found if how[0].isupper() else found[0]
    assert sorted(indices) == sorted({0, 1, 2, 3} - {wrong})
    assert [bool(one) for one in requests] == [number == wrong for number in range(4)]
    with pytest.raises(ValueError, match="mismatch in send"):
        getattr(Request, how)(requests)
    found = getattr(Request, how)(requests)
    assert (found if how[0].isupper() else found[0]) is None


@pytest.mark.parametrize("how", [*COMPLETE, *ASK])
def test_any_iterable_is_a_list(ranks: Ranks, either: Any, how: str) -> None:
    """It can be gone through once; one rank comes late, so that there is something to wait for."""
    if ranks.rank == 0:
        time.sleep(0.01)
    requests, outs = zip(*(started(either, value) for value in range(3)), strict=True)
    calls = 0
    while any(requests):
        answer = getattr(Request, how)(one for one in requests)
        calls += 1
        if how in ASK and answer not in (False, (MPI.UNDEFINED, False), []):
            Request.Waitall(iter(requests))
        assert calls < {"Waitall": 2, "Waitany": 4, "Waitsome": 4}.get(how.capitalize(), 1e6)
    assert [out.tolist() for out in outs] == [[value * either.size] * 3 for value in range(3)]


@pytest.mark.parametrize("bad", [None, 5, "Request"])
@pytest.mark.parametrize("how", [*COMPLETE, *ASK, "Startall"])
def test_what_is_no_request_is_refused(world: Comm, how: str, bad: Any) -> None:
    plan = world.Allreduce_init(np.ones(1), np.empty(1))
    what = "a persistent request" if how == "Startall" else "a request"
    if how != "Startall":
        plan.Start()
    with pytest.raises(
        TypeError,
        match=rf"requests\[1\] is of type {type(bad).__name__}, expected {what} of mpicoll or",
    ):
        getattr(Prequest, how)([plan, bad, MPI.REQUEST_NULL])
    assert (plan._operation is None) == (how == "Startall")  # neither begun nor given up
    with pytest.raises(TypeError, match="not iterable"):
        getattr(Prequest, how)(bad if bad != "Request" else plan)
    plan.Wait()
    plan.Free()


def test_startall_takes_no_other_requests(world: Comm) -> None:
    request, _ = started(world)
    with pytest.raises(TypeError, match=r"requests\[0\] is of type .*, expected a persistent"):
        Prequest.Startall([request])  # type: ignore[list-item]
    request.Wait()


# Requests of mpi4py alone, by both.


def to_myself(pickled: bool) -> list[MPI.Request]:
    """Return requests of a message of this rank, all complete, and a null one."""
    comm = MPI.COMM_SELF
    if pickled:
        requests = [comm.irecv(source=0, tag=3), MPI.REQUEST_NULL, comm.isend("sent", 0, 3)]
    else:
        got, sent = np.empty(2), np.ones(2)
        requests = [comm.Irecv(got, 0, 3), MPI.REQUEST_NULL, comm.Isend(sent, 0, 3)]
    all_over(requests)
    return requests


def answer(kind: Any, how: str, requests: list[MPI.Request], statuses: int | None) -> Any:
    """Return what a method says, what it does to the requests, and the tags of the statuses."""
    given: Any = None if statuses is None else [MPI.Status() for _ in range(statuses)]
    if how.endswith("any"):
        said = getattr(kind, how)(requests, given[0] if given else None)
    else:
        said = getattr(kind, how)(requests, given)
    active = [bool(one) for one in requests]
    for one in requests:
        one.wait()
    return said, active, given and [one.tag for one in given]


@pytest.mark.parametrize("pickled", [False, True], ids=["buffers", "objects"])
@pytest.mark.parametrize("how", [*COMPLETE, *ASK])
def test_mpi4py_gives_the_same_answers(how: str, pickled: bool) -> None:
    if how in ASK and not ASKED_NATIVELY:
        return
    for statuses in (None, 0, 5):
        done = [answer(kind, how, to_myself(pickled), statuses) for kind in (MPI.Request, Request)]
        assert done[0] == done[1], statuses
        for nothing in ([], [MPI.REQUEST_NULL] * 2):
            native = answer(MPI.Request, how, nothing, statuses)
            assert answer(Request, how, nothing, statuses) == native, statuses
    if not how.lower().startswith("wait"):
        receive = MPI.COMM_SELF.irecv(source=0, tag=3)
        under_way = getattr(MPI.Request, how)([receive])
        assert getattr(Request, how)([receive]) == under_way
        MPI.COMM_SELF.send(None, 0, 3)
        receive.wait()


@pytest.mark.parametrize("how", [one for one in COMPLETE if one.islower()])
def test_objects_of_mixed_lists(ranks: Ranks, either: Any, how: str) -> None:
    left, right = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    ours, out = started(either)
    requests: list[Any] = [ours, ranks.comm.irecv(source=left, tag=6), MPI.REQUEST_NULL]
    requests += [started(either)[0], ranks.comm.isend({"rank": ranks.rank}, right, 6)]
    found: dict[int, Any] = {}
    while any(requests):
        said = getattr(Request, how)(requests)
        if how.endswith("any"):
            if said[0] != MPI.UNDEFINED:
                found[said[0]] = said[-1]
        elif how.endswith("some"):
            found.update(zip(*said, strict=True))
        elif how == "waitall" or said[0]:
            objects = said if how == "waitall" else said[1]
            found = {number: one for number, one in enumerate(objects) if number != 2}
        else:
            assert said == (False, None)
    assert found == {0: None, 1: {"rank": left}, 3: None, 4: None}
    assert out.tolist() == [either.size] * 3


@pytest.mark.parametrize("how", ASK)
def test_asking_leaves_requests_as_they_are(ranks: Ranks, either: Any, how: str) -> None:
    """Those that have failed too; what is wrong is for who completes them."""

    def asked(requests: list[Any]) -> Any:
        return getattr(Request, how)(requests)

    nobody: Any = {"all": False, "any": (MPI.UNDEFINED, False), "some": []}[how[11:]]
    request = first(
        ranks, lambda: started(either)[0], lambda request: _is(asked([request]), nobody)
    )
    wrong = failing(either)
    all_over([request, wrong])
    everybody: Any = {"all": True, "any": (0, True), "some": [0, 1]}[how[11:]]
    for _ in range(2):
        assert asked([wrong, request]) == everybody
        assert wrong
        assert request
    statuses: Any = MPI.Status() if how.endswith("any") else []
    getattr(Request, how)([wrong, request], statuses)
    assert how.endswith("any") or [one.tag for one in statuses] == [MPI.ANY_TAG] * 2
    mixed = [wrong, MPI.REQUEST_NULL, request]
    if ASKED_NATIVELY or how.endswith("all"):
        assert asked(mixed) == ([0, 2] if how.endswith("some") else everybody)
    else:
        with pytest.raises(NotImplementedError):
            asked(mixed)
    with pytest.raises(ValueError, match="mismatch in send"):
        wrong.Wait()
    request.Wait()
    none: Any = {"all": True, "any": (MPI.UNDEFINED, True), "some": None}[how[11:]]
    assert asked([wrong, request]) == none


def _is(found: object, wanted: object) -> None:
    assert found == wanted


# -- mpi4py's own functions -------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome"]
)
def test_mpi4py_is_told_whose_they_are(world: Comm, how: str) -> None:
    request, out = started(world)
    words = (
        "Cannot convert a collective of mpicoll (mpicoll.Request.Waitall and its kin take it, "
        "those of MPI.Request do not) to mpi4py.MPI.Request"
    )
    with pytest.raises(TypeError, match=re.escape(words)):
        getattr(MPI.Request, how)([request])
    request.Wait()
    assert out.tolist() == [world.size] * 3


def test_a_thread_is_woken_each_time(world: Comm, full: bool) -> None:
    """Nobody else drives: the ranks wait inside the MPI, again and again."""
    comm = Comm(MPI.Intracomm(world).Dup(), progress="thread")
    one, every = np.empty(3), np.empty(comm.size)
    for number in range(10_000 if full else 500):
        mine = np.array([1.0 * number])
        requests = [comm.Iallreduce(np.ones(3), one), comm.Iallgather(mine, every)]
        MPI.Request.Waitall(requests)
        assert one.tolist() == [comm.size] * 3
        assert every.tolist() == [number] * comm.size
    comm.Free()


def test_a_fault_does_not_end_the_thread(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for what it drove is told, and it drives the next ones."""
    comm = Comm(MPI.Intracomm(world).Dup(), progress="thread")
    advance = progress.Operation.advance

    def broken(operation: progress.Operation, begin: bool = False) -> bool:
        if threading.current_thread().name == "mpicoll":
            raise ZeroDivisionError
        return advance(operation, begin)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Operation, "advance", broken)
        request, _ = started(comm)
        operation: Any = request._operation
        until = time.monotonic() + 20
        while not operation.done:
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(ZeroDivisionError):
            request.Wait()
    request, out = started(comm)
    MPI.Request.Waitall([request])  # nobody but the thread drives
    assert out.tolist() == [comm.size] * 3
    comm.Free()


@pytest.mark.parametrize("progress", [None, "thread"])
def test_mpi4py_is_told_of_persistent_ones(world: Comm, progress: Any) -> None:
    comm = Comm(MPI.Intracomm(world).Dup(), progress=progress)
    out = np.full(3, POISON)
    plan: Any = comm.Allreduce_init(np.ones(3), out)
    with pytest.raises(TypeError, match=re.escape("mpicoll.Prequest")):
        MPI.Prequest.Startall([plan])
    plan.Start()
    with pytest.raises(TypeError, match=re.escape("mpicoll.Prequest")):
        MPI.Request.Waitall([plan])
    plan.Wait()
    assert out.tolist() == [world.size] * 3
    plan.Free()
    comm.Free()


def test_mpi4py_waits_for_those_of_a_thread(ranks: Ranks, world: Comm) -> None:
    comm = Comm(MPI.Intracomm(world).Dup(), progress="thread")
    for _ in range(20):
        mixed = Mixed(ranks, comm)
        # MPICH 5.0.2 aborts in Waitall over a generalised request beside MPI.REQUEST_NULL.
        MPI.Request.Waitall([mixed.requests[number] for number in sorted(mixed.active)])
        assert mixed.one.tolist() == [comm.size] * 3
        assert mixed.two.tolist() == list(range(comm.size))
        assert not any(mixed.requests[number] for number in mixed.active)  # as mpi4py's own
        assert Request.Testany([mixed.requests[number] for number in mixed.active]) == (
            MPI.UNDEFINED,
            True,
        )
    mixed = Mixed(ranks, comm)
    found = [MPI.Request.Waitany(mixed.requests) for _ in range(5)]
    assert sorted(found[:4]) == [0, 1, 3, 4]
    assert found[4] == MPI.UNDEFINED
    mixed = Mixed(ranks, comm)
    while not MPI.Request.Testall(mixed.requests):
        pass
    assert mixed.one.tolist() == [comm.size] * 3
    comm.Free()


# -- memory -----------------------------------------------------------------------------


def test_buffers_live_as_long_as_the_operation(ranks: Ranks, either: Any) -> None:
    buffers: list[weakref.ref[Any]] = []

    def start() -> Request:
        one, out = np.ones(1000), np.empty(1000)
        buffers.extend([weakref.ref(one), weakref.ref(out)])
        return either.Iallreduce(one, out)

    def check(request: Request) -> None:
        gc.collect()
        assert all(ref() is not None for ref in buffers)
        assert request.Test() is False

    request = first(ranks, start, check)
    request.Wait()
    del request
    gc.collect()
    if not either._link.threaded:  # the thread may still look at what it has completed
        assert all(ref() is None for ref in buffers)


def test_buffers_of_a_plan_live_until_it_is_freed(world: Comm) -> None:
    one, out = np.ones(1000), np.empty(1000)
    buffers = weakref.ref(one), weakref.ref(out)
    request = world.Allreduce_init(one, out)
    del one, out
    gc.collect()
    for _ in range(2):
        request.Start()
        request.Wait()
        result = buffers[1]()
        assert result is not None
        assert (result == world.size).all()
    del result
    request.Free()
    gc.collect()
    assert all(ref() is None for ref in buffers)


def test_no_memory_is_kept(either: Any) -> None:
    """64 requests of 100 kB: less than two of them are left when all are over."""
    started(either, n=12_500)[0].Wait()
    gc.collect()
    tracemalloc.start()
    for _ in range(64):
        started(either, n=12_500)[0].Wait()
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 200_000


def test_datatypes_may_be_freed_once_it_is_started(ranks: Ranks, either: Any) -> None:
    def vector() -> MPI.Datatype:
        return MPI.DOUBLE.Create_vector(2, 1, 2).Commit()

    size, rank = either.size, either.rank
    sent = np.array([rank, POISON, rank + 0.5, POISON])
    got = np.full((size, 2), POISON)
    wide = np.full(4, POISON)
    if rank == 0:
        wide[:] = 1.0, 2.0, 3.0, 4.0

    def start() -> list[Request]:
        one, two = vector(), vector()
        requests = [either.Iallgather([sent, 1, one], got), either.Ibcast([wide, 1, two])]
        one.Free()
        two.Free()
        vector().Free()  # takes the place of one of them
        return requests

    requests = first(ranks, start, lambda _: gc.collect())
    Request.Waitall(requests)
    assert got.tolist() == [[peer, peer + 0.5] for peer in range(size)]
    assert wide.tolist() == ([1, 2, 3, 4] if rank == 0 else [1, POISON, 3, POISON])


def test_datatypes_of_operators_may_be_freed(either: Any) -> None:
    """Dense ones, which nothing is packed by: operators are still called with them."""

    def fold(given: Any, kept: Any, datatype: MPI.Datatype) -> None:
        one, other = (np.frombuffer(memory, np.float64) for memory in (given, kept))
        other += one

    op = MPI.Op.Create(fold, commute=True)
    sent = np.array([1.0, either.rank])
    wanted = [either.size, sum(range(either.size))]
    for name in ("Iallreduce", "Allreduce_init"):
        got = np.full(2, POISON)
        pair = MPI.DOUBLE.Create_contiguous(2).Commit()
        request = getattr(either, name)([sent, 1, pair], [got, 1, pair], op=op)
        pair.Free()
        if name == "Allreduce_init":
            request.Start()
        request.Wait()
        assert got.tolist() == wanted
        if name == "Allreduce_init":
            request.Free()
    op.Free()


def test_datatypes_of_a_plan_may_be_freed(world: Comm) -> None:
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    data = np.full(4, POISON)
    request = world.Bcast_init([data, 1, vector])
    vector.Free()
    for value in (1.0, 2.0):
        if world.rank == 0:
            data[:] = value
        request.Start()
        request.Wait()
        assert data[[0, 2]].tolist() == [value] * 2
        if world.rank:
            assert data[[1, 3]].tolist() == [POISON] * 2
    request.Free()


@pytest.mark.parametrize("what", ["pickled", "native", "derived"])
def test_a_native_call_with_something_in_flight(ranks: Ranks, world: Comm, what: str) -> None:
    """One rank waits after it, the others before."""
    n = 300_000
    out = np.empty(n)
    comm: Any = world.Create_cart([world.size], [True])
    request = comm.Iallreduce(np.ones(n), out)
    if ranks.rank:
        request.Wait()
    if what == "pickled":
        assert comm.allreduce(1) == comm.size
    elif what == "native":
        gathered = np.empty(2)
        comm.Neighbor_allgather(np.array([1.0 * ranks.rank]), gathered)
        assert gathered.tolist() == [(ranks.rank + step) % comm.size for step in (-1, 1)]
    else:
        comm.Dup().Free()
    request.Wait()
    assert (out == comm.size).all()
    comm.Free()


@pytest.mark.parametrize("what", ["neighbours", "group"])
def test_what_is_not_of_all_ranks_waits_for_none(ranks: Ranks, world: Comm, what: str) -> None:
    """The last rank starts the collective when the first has gone through another call."""
    n, last = 300_000, world.size - 1
    out, gathered = np.empty(n), np.empty(2)
    ring: Any = world.Create_cart([world.size], [True])
    plain = MPI.Intracomm(world)
    if ranks.rank == last > 0:
        plain.recv(source=0)
    request = ring.Iallreduce(np.ones(n), out)
    if what == "neighbours":
        other = ring.Ineighbor_allgather(np.array([1.0 * ranks.rank]), gathered)
    elif ranks.rank < max(1, last):
        group = ring.Get_group().Incl(range(max(1, last)))
        ring.Create_group(group).Free()
    if ranks.rank == 0 < last:
        plain.send(None, last)
    request.Wait()
    if what == "neighbours":
        other.Wait()
        assert gathered.tolist() == [(ranks.rank + step) % ring.size for step in (-1, 1)]
    assert (out == ring.size).all()
    ring.Free()


def test_waitall_of_objects_drives(ranks: Ranks, world: Comm) -> None:
    """Rank 1 sends the object when a collective is complete that rank 0 has to drive."""
    n = 300_000
    out, plain = np.empty(n), MPI.Intracomm(world)
    request = world.Iallreduce(np.ones(n), out)
    if ranks.rank == 0 < world.size - 1:
        assert Request.waitall([plain.irecv(source=1), request]) == ["late", None]
    else:
        request.Wait()
        if ranks.rank == 1:
            plain.send("late", 0)
    assert (out == world.size).all()


@pytest.mark.parametrize("some", [False, True], ids=["Waitany", "Waitsome"])
def test_inactive_persistent_requests_of_mpi4py(ranks: Ranks, world: Comm, some: bool) -> None:
    """They are passed over, as in mpi4py's own lists."""
    got = np.empty(1)
    comm = MPI.Intracomm(world)
    inactive = comm.Recv_init(got, ranks.rank, 6)
    persistent = comm.Recv_init(got, ranks.rank, 7)
    persistent.Start()
    sent = comm.Isend(np.ones(1), ranks.rank, 7)
    ours, out = started(world)
    requests = [inactive, ours, persistent]
    seen: list[int] = []
    while True:
        if some:
            found = Request.Waitsome(requests)
            if found is None:
                break
            seen += found
        else:
            number = Request.Waitany(requests)
            if number == MPI.UNDEFINED:
                break
            seen.append(number)
    assert sorted(seen) == [1, 2]
    assert out.tolist() == [world.size] * 3
    sent.Wait()
    inactive.Free()
    persistent.Free()


def test_statuses_of_the_caller_are_filled_in(ranks: Ranks, world: Comm) -> None:
    comm = MPI.Intracomm(world)
    got = np.empty(2)
    ours, _ = started(world)
    theirs = comm.Irecv(got, ranks.rank, 5)
    sent = comm.Isend(np.ones(2), ranks.rank, 5)
    mine = [MPI.Status() for _ in range(2)]
    while not Request.Testall([ours, theirs], given := list(mine)):
        pass
    assert all(one is other for one, other in zip(given, mine, strict=True))
    assert (mine[0].Get_count(), mine[1].Get_count(MPI.DOUBLE)) == (0, 2)
    sent.Wait()


# -- dropped, and freed under way -------------------------------------------------------


def test_a_dropped_request_warns_and_is_completed(ranks: Ranks, either: Any) -> None:
    results: list[Array] = []

    def start() -> Request:
        request, out = started(either)
        results.append(out)
        return request

    if ranks.rank:
        request = start()
        with pytest.warns(ResourceWarning, match=r"dropped before allreduce #1, .*test_requests"):
            del request
    ranks.comm.Barrier()
    if not ranks.rank:
        start().Wait()
    works(either)
    while progress.active(either._link):
        progress.progress()
    assert results[0].tolist() == [either.size] * 3


def test_a_dropped_request_is_completed_by_free(ranks: Ranks, world: Comm) -> None:
    comm = world.Dup()
    out = np.full(3, POISON)
    if ranks.rank:
        request = comm.Iallreduce(np.ones(3), out)
        with pytest.warns(ResourceWarning, match="dropped"):
            del request
    ranks.comm.Barrier()
    if not ranks.rank:
        comm.Iallreduce(np.ones(3), out).Wait()
    comm.Free()
    assert out.tolist() == [world.size] * 3


def test_free_completes_what_is_in_flight(world: Comm) -> None:
    comm = world.Dup()
    made = [started(comm, value) for value in range(8)]
    comm.Free()
    assert comm == MPI.COMM_NULL
    for value, (request, out) in enumerate(made):
        assert out.tolist() == [value * world.size] * 3
        request.Wait()
        assert not request


@pytest.mark.parametrize("started_before", [False, True], ids=["never started", "started"])
def test_a_dropped_plan_warns_and_is_freed(either: Any, started_before: bool) -> None:
    """When the next one is made, which has its tag then."""
    either._link.tags.allow(1)
    for _ in range(3):
        one, out = np.ones(1000), np.empty(1000)
        buffers = weakref.ref(one), weakref.ref(out)
        plan = either.Allreduce_init(one, out)
        if started_before:
            plan.Start()
            plan.Wait()
        del one, out
        made = r"Allreduce_init #\d+, made at .*test_requests.py:\d+, was dropped without Free"
        with pytest.warns(ResourceWarning, match=made):
            del plan
        gc.collect()
        assert all(ref() is not None for ref in buffers)
        either.Allreduce_init(np.ones(1), np.empty(1)).Free()
        assert not FORGOTTEN
        gc.collect()
        assert either._link.threaded or all(ref() is None for ref in buffers)


def test_a_plan_that_is_dropped_under_way(ranks: Ranks, either: Any) -> None:
    """It is completed, and freed when that is done."""
    out = np.full(3, POISON)
    plan: Any = either.Allreduce_init(np.ones(3), out)

    def start() -> Any:
        nonlocal plan
        plan.Start()
        with pytest.warns(ResourceWarning) as warned:
            plan = None
        texts = {str(one.message)[:16] for one in warned}
        assert texts <= {"a request was dr", "Allreduce_init #"}
        assert "Allreduce_init #" in texts

    def check(_: None) -> None:
        free_forgotten()
        assert len(FORGOTTEN) == 1

    first(ranks, start, check)
    while progress.active(either._link):
        progress.progress()
    assert out.tolist() == [either.size] * 3
    free_forgotten()
    assert not FORGOTTEN
    assert not either._link.tags._live


def test_a_plan_that_was_freed_is_dropped_quietly(world: Comm) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = world.Allreduce_init(np.ones(1), np.empty(1))
        plan.Free()
        del plan
        gc.collect()
    assert not FORGOTTEN


def test_a_dropped_plan_is_freed_with_its_communicator(world: Comm) -> None:
    comm = world.Dup()
    plan = comm.Allreduce_init(np.ones(1), np.empty(1))
    with pytest.warns(ResourceWarning, match="dropped without Free"):
        del plan
    comm.Free()
    assert not FORGOTTEN


DROPPED_AT_THE_END = """
import sys
import numpy as np, mpicoll
from mpi4py import MPI
comm = mpicoll.Comm(MPI.COMM_WORLD, progress=sys.argv[1] or None)
x, y = np.ones(4), np.empty(4)
plans = [comm.Allreduce_init(x, y) for _ in range(3)]
for plan in plans[1:]:
    plan.Start()
plan.Wait()
cycle = [comm.Barrier_init()]
cycle.append(cycle)
if "dropped" in sys.argv[2]:
    del plans[0]
if "Finalize" in sys.argv[2]:
    MPI.Finalize()
    del plans, plan, cycle
"""


@pytest.mark.parametrize("end", ["exit", "dropped", "Finalize", "dropped, Finalize"])
@pytest.mark.parametrize("thread", ["", "thread"])
def test_plans_that_are_left_at_the_end(tmp_path: Path, thread: str, end: str) -> None:
    """Nothing is raised when the process ends, or when they are dropped after MPI."""
    if not ALONE:
        return
    done = run_job(2, DROPPED_AT_THE_END, tmp_path, thread, end, PYTHONWARNINGS="default")
    assert done.status == 0, done.err
    assert "Error" not in done.err
    assert "ignored" not in done.err
    assert done.err.count("was dropped without Free") == 2 * ("dropped" in end), done.err


AFTER_A_TIME_OUT = """
import gc, sys, time, warnings
import numpy as np, mpicoll
from mpi4py import MPI
from mpicoll.runtime.persistent import PersistentExecution
warnings.simplefilter("error")
PersistentExecution.free = lambda execution: print("its MPI requests are under way")
comm = mpicoll.Comm(MPI.COMM_WORLD, timeout=1, progress=sys.argv[1] or None)
def start(n):
    return comm.Iallreduce(np.ones(n), np.empty(n))
plan, lost = [comm.Allreduce_init(np.ones(4), np.empty(4)) for _ in range(2)]
if comm.rank == 1:
    time.sleep(60)  # it is aborted
request, other = start(4), start(100_000)
plan.Start()
lost.Start()
dropped = start(100_000)
for one in (request, plan):
    try:
        one.Wait()
    except mpicoll.CollectiveTimeout as error:
        print(type(error).__name__)
    assert one
for one in (request, plan, other):
    one.Free()
    assert not one
del request, other, plan, lost, dropped, one
gc.collect()
print("given up", flush=True)
"""


@pytest.mark.parametrize("thread", ["", "thread"])
def test_requests_can_be_given_up_after_a_time_out(tmp_path: Path, thread: str) -> None:
    """Freed or dropped, without a warning; their buffers live on."""
    if not ALONE:
        return
    done = run_job(2, AFTER_A_TIME_OUT, tmp_path, thread)
    assert done.out.split("\n")[:3] == ["CollectiveTimeout", "PoisonedError", "given up"], done
    assert "Warning" not in done.err
    assert "ignored" not in done.err


# -- the three forms --------------------------------------------------------------------


def arrays(arguments: Any) -> list[Array]:
    """Return the arrays among arguments."""
    if isinstance(arguments, np.ndarray):
        return [arguments]
    if isinstance(arguments, (list, tuple)):
        return [array for one in arguments for array in arrays(one)]
    return []


def fill(arguments: Any, rank: int, turn: int) -> None:
    for number, array in enumerate(arrays(arguments)):
        array[:] = np.arange(array.size) % 17 + 100 * rank + 10 * turn + number


@pytest.mark.parametrize("name", METHODS)
def test_three_forms_give_the_same(name: str, either: Any) -> None:
    for n in (0, 1, 5, 3000):
        same_in_three_forms(either, name, n)


def same_in_three_forms(either: Any, name: str, n: int) -> None:
    arguments = calls(either, n)[name]
    expected = []
    for turn in range(3):
        fill(arguments, either.rank, turn)
        getattr(either, name)(*arguments)
        expected.append([array.copy() for array in arrays(arguments)])
    plan: Prequest = getattr(either, f"{name}_init")(*arguments)
    for turn in range(3):
        fill(arguments, either.rank, turn)
        getattr(either, f"I{name.lower()}")(*arguments).Wait()
        for array, right in zip(arrays(arguments), expected[turn], strict=True):
            assert array.tobytes() == right.tobytes(), f"I{name.lower()}"
        fill(arguments, either.rank, turn)
        plan.Start()
        plan.Wait()
        for array, right in zip(arrays(arguments), expected[turn], strict=True):
            assert array.tobytes() == right.tobytes(), f"{name}_init, start {turn}"
    plan.Free()


# -- persistent -------------------------------------------------------------------------


def test_a_plan_in_its_states(ranks: Ranks, world: Comm) -> None:
    out = np.empty(3)
    plan = world.Allreduce_init(np.ones(3), out)
    assert plan
    assert plan.Wait() is True  # not started: nothing to wait for, as MPI rules
    assert plan.Test() is True

    def check(plan: Any) -> None:
        with pytest.raises(MPI.Exception, match="is active; wait for it") as error:
            plan.Start()
        assert error.value.Get_error_class() == MPI.ERR_REQUEST
        with pytest.raises(MPI.Exception, match="under way can not be freed"):
            plan.Free()
        with pytest.raises(MPI.Exception, match="can not be cancelled"):
            plan.Cancel()
        assert plan.Test() is False

    def start() -> Any:
        plan.Start()
        return plan

    first(ranks, start, check)
    plan.Wait()
    assert plan
    assert out.tolist() == [world.size] * 3
    plan.Free()
    assert not plan
    plan.Free()
    with pytest.raises(MPI.Exception, match="was freed") as error:
        plan.Start()
    assert error.value.Get_error_class() == MPI.ERR_REQUEST


def test_plans_start_in_any_order(world: Comm, rng: np.random.Generator) -> None:
    """Each rank starts them in an order of its own, and waits in another."""
    own = np.random.default_rng([int(rng.integers(1 << 30)), world.rank])
    inputs = [np.empty(4) for _ in range(6)]
    outputs = [np.empty(4) for _ in range(6)]
    plans = [world.Allreduce_init(*sides) for sides in zip(inputs, outputs, strict=True)]
    for turn in range(5):
        for number, one in enumerate(inputs):
            one[:] = 10 * turn + number + world.rank
        for number in own.permutation(6):
            plans[number].Start()
        if turn % 2:
            Prequest.Waitall(plans)
        else:
            for number in own.permutation(6):
                plans[number].Wait()
        ranks_sum = world.size * (world.size - 1) // 2
        for number, out in enumerate(outputs):
            assert out.tolist() == [world.size * (10 * turn + number) + ranks_sum] * 4
    for number in own.permutation(6):
        plans[number].Free()


def test_startall_of_both_kinds(ranks: Ranks, world: Comm) -> None:
    left, right = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    sent, got, out = np.full(1, ranks.rank * 1.0), np.empty(1), np.empty(1)
    requests: list[Any] = [
        ranks.comm.Recv_init(got, left, 8),
        world.Allreduce_init(np.ones(1), out),
        ranks.comm.Send_init(sent, right, 8),
    ]
    for turn in range(3):
        sent[:], got[:], out[:] = ranks.rank + turn, POISON, POISON
        Prequest.Startall(requests)
        Request.Waitall(requests)
        assert (got[0], out[0]) == (left + turn, world.size)
    for request in requests:
        request.Free()


def test_more_plans_than_tags(twin: Any) -> None:
    twin._link.tags.allow(4)

    def made(value: float) -> tuple[Prequest, Array]:
        out = np.empty(2)
        return twin.Allreduce_init(np.full(2, float(value)), out), out

    alive = [made(value) for value in range(4)]
    for _ in range(2):
        with pytest.raises(MPI.Exception, match="4 persistent plans are alive"):
            made(0)
    for turn in range(20):
        # Each rank frees another one: its tag is free when all ranks have freed theirs.
        number = (turn + twin.rank) % 4
        alive[number][0].Free()
        if twin.size > 1:
            with pytest.raises(MPI.Exception, match="persistent plans are alive"):
                made(0)
        for other in range(4):
            if other != number:
                alive[other][0].Free()
        alive = [made(turn + value) for value in range(4)]
        for plan, _ in alive:
            plan.Start()
        for value, (plan, out) in enumerate(alive):
            plan.Wait()
            assert out.tolist() == [twin.size * (turn + value)] * 2
    for plan, _ in alive:
        plan.Free()


class Failing(MPI.Intracomm):
    """Makes persistent requests, but for one of them; keeps those that it has made."""

    made: list[MPI.Prequest]
    fatal: int

    def Recv_init(self, *args: Any) -> MPI.Prequest:
        return self._make(super().Recv_init, args)

    def Send_init(self, *args: Any) -> MPI.Prequest:
        return self._make(super().Send_init, args)

    def _make(self, make: Callable[..., MPI.Prequest], args: Any) -> MPI.Prequest:
        if len(self.made) == self.fatal:
            raise MPI.Exception(MPI.ERR_NO_MEM)
        self.made.append(make(*args))
        return self.made[-1]


def test_a_plan_that_can_not_be_set_up_leaves_nothing(
    twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its MPI requests can not be made: those before it are freed."""
    for fatal in range(100):
        failing = Failing(twin._link.hidden)
        failing.made, failing.fatal = [], fatal
        with monkeypatch.context() as patch:
            patch.setattr(twin._link, "hidden", failing)
            try:
                plan = twin.Allreduce_init(np.ones(50), np.empty(50), algorithm="ring")
            except MPI.Exception:
                assert len(failing.made) == fatal
                assert not any(failing.made), f"request {fatal}: one before it is left"
                assert not twin._link.tags._live
                continue
        plan.Free()
        assert fatal == len(failing.made) == 4 * (twin.size - 1)
        assert not any(failing.made)
        break
    works(twin)


def test_a_plan_that_was_refused_gives_its_tag_back(twin: Any) -> None:
    twin._link.tags.allow(2)
    for _ in range(6):
        with pytest.raises(ValueError, match=f"Allreduce_init on rank {twin.rank}: mismatch"):
            twin.Allreduce_init(np.ones(3), np.empty(2))
    plan = twin.Barrier_init()
    plan.Start()
    plan.Wait()
    plan.Free()


# -- errors -----------------------------------------------------------------------------


class InForm:
    """A communicator whose ``Allreduce`` and the like are another form of it."""

    def __init__(self, comm: Any, form: str) -> None:
        self._comm, self._form = comm, form

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            return getattr(self._comm, name)
        return getattr(self._comm, f"I{name.lower()}" if self._form == "I" else f"{name}_init")


@pytest.mark.parametrize("form", ["I", "_init"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_raise_at_once(wrong: Wrong, form: str, world: Comm) -> None:
    target = np.full(64, POISON)
    before = world.stats.total.bytes_sent
    with pytest.raises(wrong.error) as caught:
        wrong.call(InForm(world, form), target)
    assert re.search(wrong.words, str(caught.value))
    assert re.search(rf"(\bI[a-z_]+|_init) on rank {world.rank}: ", str(caught.value))
    if wrong.code:
        assert caught.value.Get_error_class() == wrong.code  # type: ignore[attr-defined]
    assert (target == POISON).all()
    assert world.stats.total.bytes_sent == before
    assert not progress.active()
    works(world)


def test_unknown_keywords(world: Comm) -> None:
    for name in ("Allreduce", "Iallreduce", "Allreduce_init"):
        with pytest.raises(TypeError, match="unexpected keyword argument alg; known: algorithm"):
            getattr(world, name)(np.ones(1), np.empty(1), alg="ring")
    works(world)


# -- time limits ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Allreduce", "Iallreduce", "Allreduce_init"])
@pytest.mark.parametrize("value", [-1, "soon", float("nan"), float("inf"), [1]])
def test_limits_that_are_none(twin: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} on rank {twin.rank}: a time limit is a number"):
        getattr(twin, name)(np.ones(1), np.empty(1), timeout=value)
    assert twin._link.plain
    works(twin)


@pytest.mark.parametrize("value", [-1, "soon", float("nan")])
def test_limits_of_a_communicator_that_are_none(world: Comm, value: Any) -> None:
    with pytest.raises(ValueError, match="a time limit is a number of seconds"):
        Comm(world, timeout=value)
    assert world._link.settings.timeout is None


def test_limits_that_are_kept(twin: Any) -> None:
    """A limit that is long enough changes nothing; 0 is none, in place of another one."""
    for value in (0, 0.0, "0", 60, 60.5, "60"):
        out = np.full(3, POISON)
        twin.Allreduce(np.ones(3), out, timeout=value)
        assert out.tolist() == [twin.size] * 3
        request = twin.Iallreduce(np.ones(3), out, timeout=value)
        request.Wait()
        plan = twin.Allreduce_init(np.ones(3), out, timeout=value)
        plan.Start()
        plan.Wait()
        plan.Free()
    limited = Comm(MPI.Intracomm(twin).Dup(), timeout=60)
    assert limited._link.settings.timeout == 60
    derived = limited.Dup()
    assert derived._link.settings.timeout == 60
    none = Comm(derived, timeout=0)
    assert none._link.settings.timeout is None
    for comm in (limited, derived):
        works(comm)
        started(comm)[0].Wait()
        comm.Free()


def test_limits_of_the_environment(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's counts; a wrap's own word goes before it."""
    monkeypatch.setenv("MPICOLL_TIMEOUT", "45" if world.rank == 0 else "nonsense")
    plain = MPI.COMM_WORLD.Dup()
    assert Comm(plain)._link.settings.timeout == 45
    works(Comm(plain))
    other = MPI.COMM_WORLD.Dup()
    assert Comm(other, timeout=0)._link.settings.timeout is None
    works(Comm(other))
    plain.Free()
    other.Free()
    monkeypatch.setenv("MPICOLL_TIMEOUT", "0")
    plain = MPI.COMM_WORLD.Dup()
    assert Comm(plain)._link.settings.timeout is None
    plain.Free()


def test_a_wrong_limit_of_the_environment(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.rank == 0:
        monkeypatch.setenv("MPICOLL_TIMEOUT", "soon")
    plain = MPI.COMM_WORLD.Dup()
    with pytest.raises(SettingError, match="MPICOLL_TIMEOUT=soon: a time limit is a number"):
        Comm(plain)
    plain.Free()
    assert world.rank or os.environ["MPICOLL_TIMEOUT"] == "soon"
    works(world)


def test_progress_that_is_unknown(world: Comm) -> None:
    with pytest.raises(ValueError, match="progress='threads'; known: None, 'thread'"):
        Comm(world, progress="threads")  # type: ignore[arg-type]
