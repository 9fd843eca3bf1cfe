"""How programs end: with a failure on one rank, under time limits, after a time-out.

The jobs are started where the tests run on one rank: once is enough for each of them. A job
that does not end fails its test by a time-out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from childjob import Ended, run_command, run_job
from mpi4py import MPI

from mpicoll import CollectiveTimeout, Comm, PoisonedError

ALONE = MPI.COMM_WORLD.size == 1

START = """
import sys, threading, time
import numpy as np
from mpi4py import MPI
import mpicoll
x, y = np.ones(4), np.empty(4)
def wrap(**wishes):
    global comm, last
    comm = mpicoll.Comm(MPI.COMM_WORLD, **wishes)
    last = comm.rank == comm.size - 1
def after(): pass
"""
FAIL = """
if last: raise ValueError("boom")
after()
sys.stdout.write("end\\n")
"""

#: Programs whose last rank fails after the last collective; the others have nothing left to do.
FAILING = {
    "plain": "wrap(); comm.Allreduce(x, y)",
    "a limit": "wrap(timeout=20); comm.Allreduce(x, y)",
    "a limit of one call": "wrap(); comm.Iallreduce(x, y, timeout=20).Wait()",
    "a thread": "wrap(progress='thread'); comm.Iallreduce(x, y).Wait()",
    "other communicators": "wrap(); one = comm.Dup(); comm.Split(comm.rank % 2).Allreduce(x, y)",
    # More messages than MPICH sends without another call of it.
    "many communicators": "wrap(); made = [comm.Dup() for _ in range(40)]",
    "a request that is dropped": "wrap(); after = lambda: comm.Iallreduce(x, y)",
    "a request of all": "wrap(); x, y = np.ones(1 << 18), np.empty(1 << 18)\n"
    "request = comm.Iallreduce(x, y); after = lambda: request.Wait()",
    "a communicator that is freed": "wrap(); one = comm.Dup(); one.Barrier(); after = one.Free",
    "a plan": "wrap(); plan = comm.Allreduce_init(x, y); plan.Start(); plan.Wait()",
}


@pytest.mark.parametrize(
    ("name", "traced"), [*((name, False) for name in FAILING), ("other communicators", True)]
)
def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path, name: str, traced: bool) -> None:
    """The job ends as one of mpi4py's own collectives does."""
    if not ALONE:
        return
    more = {"MPICOLL_TRACE": str(tmp_path / "trace")} if traced else {}
    done = run_job(3, f"{START}{FAILING[name]}{FAIL}", tmp_path, **more)
    assert done.status != 0
    assert done.err.count("ValueError: boom") == done.err.count("Traceback") == 1
    assert done.out.split() == ["end", "end"]


def test_a_child_that_fails_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    if not ALONE:
        return
    body = """
import os
wrap()
comm.Allreduce(x, y)
if last:
    child = os.fork()
    if not child:
        import atexit
        atexit.register(os._exit, 1)  # before MPI ends: it is not the child's
        from mpicoll.runtime import ending
        atexit.register(ending._at_exit)
        raise ValueError("of the child")
    os.waitpid(child, 0)
comm.Allreduce(x, y)
time.sleep(0.5 * last)
"""
    done = run_job(3, START + body, tmp_path)
    assert done.status == 0, done.err
    assert "of the child" in done.err


def test_a_test_that_fails_on_one_rank_leaves_nobody_waiting(tmp_path: Path) -> None:
    if not ALONE:
        return
    (tmp_path / "test_one.py").write_text(
        f"{START}\ndef test_one():\n    wrap()\n    comm.Allreduce(x, y)\n    assert not last\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"]
    done = run_command(2, command, tmp_path)
    assert done.status != 0
    assert "1 passed" in done.out
    assert "1 failed" in done.out


THREADS = """
made = [MPI.COMM_WORLD.Dup() for _ in range(6)]
def use(one):
    mpicoll.Comm(one).Allreduce(np.ones(4), np.empty(4))
threads = [threading.Thread(target=use, args=(one,)) for one in made]
for thread in threads if MPI.COMM_WORLD.rank else threads[::-1]:
    thread.start()
    time.sleep(0.1)
for thread in threads: thread.join()
names = sorted((mpicoll.Comm(one)._link.identity, number) for number, one in enumerate(made))
assert len(set(MPI.COMM_WORLD.allgather(str(names)))) == 1, names
"""
#: Programs in which nothing goes wrong, though ranks differ in what they have seen.
WELL = {
    # Complete before it is waited for on the one rank, and not on the other.
    "a limit of one call": "wrap(); request = comm.Ibcast(x, timeout=20)\n"
    "time.sleep(0.3 * last); request.Wait()",
    "a limit on one rank": "wrap(); comm.Allreduce(x, y, timeout=20 if last else 0)",
    "threads that make communicators": THREADS,
    "a failure that was caught at a prompt": "wrap(); comm.Allreduce(x, y)\n"
    "if last: sys.last_value = ValueError()",
    "communicators that are left": "wrap(); comm.Dup().Allreduce(x, y); comm.Dup().Barrier()",
    "a call at the end": "import atexit; wrap()\n"
    "atexit.register(lambda: comm.Allreduce(x, y))\ncomm.Iallreduce(x, y)",
}


@pytest.mark.parametrize("body", WELL.values(), ids=WELL.keys())
def test_ranks_that_differ_end_well(tmp_path: Path, body: str) -> None:
    if not ALONE:
        return
    done = run_job(2, START + body, tmp_path)
    assert done.status == 0, done.err
    assert "Traceback" not in done.err


def test_a_call_that_nobody_joins_is_named_at_the_end(tmp_path: Path) -> None:
    """Rank 0 has dropped the request of a call that the other rank never makes."""
    if not ALONE:
        return
    body = "wrap(timeout=1)\nif not last: comm.Iallreduce(x, y)"
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert "mpicoll: allreduce #1 by " in done.err
    assert "Traceback" not in done.err
    assert "Exception ignored" not in done.err


#: What a program does to its streams before the end that follows a time-out.
STREAMS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "no streams": "sys.stdout, sys.stderr = None, object()",
}


def _after_a_limit(tmp_path: Path, body: str) -> Ended:
    """Run a program after a time-out on rank 0; the other one is in its own code meanwhile."""
    start = (
        "wrap(timeout=0.5)\nif last: time.sleep(60)\n"
        "try:\n    comm.Allreduce(x, y)\n    sys.exit('no time-out')\n"
        "except mpicoll.CollectiveTimeout:\n    pass\n"
    )
    return run_job(2, START + start + body, tmp_path)


@pytest.mark.parametrize("body", STREAMS.values(), ids=STREAMS.keys())
def test_the_end_after_a_limit_needs_no_stream(tmp_path: Path, body: str) -> None:
    if not ALONE:
        return
    done = _after_a_limit(tmp_path, body)
    assert done.status != 0
    assert "no time-out" not in done.err


def test_an_abort_that_hangs_after_a_limit_is_bounded(tmp_path: Path) -> None:
    if not ALONE:
        return
    # A call that keeps the GIL, as MPI_Abort does.
    body = """
import ctypes, types
from mpicoll.runtime import watchdog
print("hangs", flush=True)
world = types.SimpleNamespace(Abort=lambda status: ctypes.PyDLL(None).sleep(10_000))
watchdog.ABORT_SECONDS = watchdog.LEAVE_SECONDS = 0.5
watchdog.MPI = types.SimpleNamespace(COMM_WORLD=world, BYTE=MPI.BYTE, ANY_SOURCE=MPI.ANY_SOURCE,
                                     Status=MPI.Status)
"""
    done = _after_a_limit(tmp_path, body)
    assert done.status != 0
    assert "hangs" in done.out


def test_a_traceback_is_shown_where_no_file_can_be_opened(tmp_path: Path) -> None:
    if not ALONE:
        return
    body = """
import os, resource
wrap()
mpicoll.abort_on_exception()
if last:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    while True: kept.append(os.dup(0))
comm.Allreduce(x, y)
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert done.err.count("OSError: [Errno 24] Too many open files") == 1


MAKE = {
    "Dup": lambda c: c.Dup(),
    "Clone": lambda c: c.Clone(),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_NULL),
    "Idup": lambda c: c.Idup(),
    "Split": lambda c: c.Split(0),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda c: c.Create(c.Get_group()),
    "Create_group": lambda c: c.Create_group(c.Get_group()),
    "Create_cart": lambda c: c.Create_cart([c.size]),
    "Create_graph": lambda c: c.Create_graph([0] * c.size, []),
    "Create_dist_graph": lambda c: c.Create_dist_graph([], [], []),
    "Create_dist_graph_adjacent": lambda c: c.Create_dist_graph_adjacent([], []),
    "bcast": lambda c: c.bcast(None),
    "Sub": lambda c: c.Sub([True]),
    "neighbor_allgather": lambda c: c.neighbor_allgather(1),
    "Neighbor_allgather": lambda c: c.Neighbor_allgather(np.ones(1), np.ones(2)),
    "Ineighbor_allgather": lambda c: c.Ineighbor_allgather(np.ones(1), np.ones(2)),
}


@pytest.mark.parametrize("name", MAKE)
def test_nothing_waits_on_a_communicator_that_has_timed_out(world: Comm, name: str) -> None:
    comm: Any = Comm(world.Create_cart([world.size]), timeout=60)
    link = comm._link
    link.poison = "timed out, for this test"
    try:
        with pytest.raises(PoisonedError, match="for this test"):
            MAKE[name](comm)
    finally:
        link.poison = ""
    comm.Free()


def test_free_raises_a_time_out(tmp_path: Path) -> None:
    if not ALONE:
        return
    body = f"""
wrap(timeout=0.5)
one = comm.Dup()
if last: time.sleep(60)
try:
    one.Free()
except mpicoll.{CollectiveTimeout.__name__} as error:
    print("raised", one != MPI.COMM_NULL)
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert "raised True" in done.out
    assert "Traceback" not in done.err


def test_a_call_keeps_its_limit_where_another_one_completes_it(tmp_path: Path) -> None:
    if not ALONE:
        return
    body = """
wrap()
if last:
    time.sleep(60)
request = comm.Iallreduce(x, y, timeout=0.5)
try:
    comm.bcast(None)
except mpicoll.CollectiveTimeout as error:
    print("raised", error.collective)
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert "raised allreduce" in done.out


def test_the_signal_for_dumps_does_no_harm_at_the_end(tmp_path: Path) -> None:
    """The last rank is in MPI_Finalize, where no handler of Python is left, and others are not."""
    if not ALONE:
        return
    body = """
import os, signal
wrap()
every = comm.allgather(os.getpid())
comm.Barrier()
if last:
    raise ValueError("boom")
time.sleep(1.5)
os.kill(every[-1], signal.SIGUSR1)
time.sleep(0.5)
print("alive", comm.size)
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert "alive 2" in done.out
    assert "ser defined signal" not in done.err
    assert "signal 10" not in done.err


def test_a_limit_names_who_has_ended_by_an_exception(tmp_path: Path) -> None:
    if not ALONE:
        return
    body = """
wrap(timeout=1)
comm.Allreduce(x, y)
if last: raise ValueError("boom")
try:
    comm.Allreduce(x, y)
except mpicoll.CollectiveTimeout as error:
    assert not error.silent
    print(error)
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert "  rank 1: has ended by an exception\n" in done.out
    assert "all ranks answered" not in done.out
