"""`abort_on_exception`: a rank that fails ends the job, and says why once.

The jobs are started where the tests run on one rank: once is enough for each of them. A job
that does not end fails its test by a time-out.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from childjob import run_job
from mpi4py import MPI

from mpicoll.runtime import abort
from mpicoll.runtime.abort import Guard, abort_on_exception

ALONE = MPI.COMM_WORLD.size == 1

START = """
import sys, threading
from mpi4py import MPI
from mpicoll.runtime.abort import abort_on_exception
comm = MPI.COMM_WORLD
last = comm.rank == comm.size - 1
def wait():
    comm.Recv(bytearray(1), source=MPI.ANY_SOURCE)
def fail():
    if last:
        raise ValueError("boom")
    wait()
"""

BLOCKS = """
with abort_on_exception():
    with abort_on_exception():
        fail()
"""
BELOW = """
abort_on_exception()
with abort_on_exception():
    fail()
"""
THREAD = """
abort_on_exception()
if last:
    threading.Thread(target=fail, name='worker').start()
wait()
"""
HOOK = """
sys.excepthook = lambda *about: print('HOOK', repr(about[1]), file=sys.stderr)
abort_on_exception()
fail()
"""
MUTE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError
with abort_on_exception():
    if last:
        raise Mute
    wait()
"""
#: Forms in which the last rank fails while the others wait for a message that never comes.
FORMS = {
    "at the top": "abort_on_exception()\nfail()",
    "a block": "with abort_on_exception():\n    fail()",
    "a block in a block": BLOCKS,
    "a block below the top": BELOW,
    "a thread": THREAD,
    "another hook": HOOK,
    "a hook that fails": "sys.excepthook = lambda *about: 1 / 0\nabort_on_exception()\nfail()",
    "no stderr": "abort_on_exception()\nsys.stderr.close()\nfail()",
    "no words": MUTE,
}
FORM_AND_SIZE = [*((form, 2) for form in FORMS), ("at the top", 4), ("a block", 4)]


@pytest.mark.parametrize(("form", "size"), FORM_AND_SIZE)
def test_one_rank_fails(tmp_path: Path, form: str, size: int) -> None:
    if not ALONE:
        return
    done = run_job(size, START + FORMS[form], tmp_path)
    assert done.status != 0
    assert done.err.count(f"mpicoll: rank {size - 1} of {size} on ") == 1
    assert done.err.count("failed and ends the job") == 1
    if form == "another hook":
        assert done.err.count("HOOK ValueError('boom')") == 1
        assert "Traceback" not in done.err
    else:
        assert done.err.count("Traceback (most recent call last)") == 1
        what = "Mute: <exception str() failed>" if form == "no words" else "ValueError: boom"
        assert done.err.count(what) == 1
        assert ", in fail" in done.err or form == "no words"
    assert (", thread worker failed" in done.err) == (form == "a thread")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_fail_together_do_not_mix(tmp_path: Path, size: int) -> None:
    if not ALONE:
        return
    done = run_job(size, f"{START}last = True\nabort_on_exception()\nfail()", tmp_path)
    assert done.status != 0
    told = [rank for rank in range(size) if f"mpicoll: rank {rank} of" in done.err]
    blocks = done.err.split("mpicoll: rank ")[1 : 1 + len(told)]
    assert len(blocks) == len(told) > 0
    for block in blocks:
        assert block.count("Traceback (most recent call last)") == 1
        assert block.count("ValueError: boom") == 1
        assert block.index("Traceback") < block.index("ValueError: boom")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("SystemExit(3)", "ends the job with status 3"),
        ("SystemExit('no data')", "ends the job: no data"),
        ("KeyboardInterrupt", "was interrupted and ends the job"),
    ],
)
def test_ends_without_a_traceback(tmp_path: Path, error: str, words: str) -> None:
    if not ALONE:
        return
    body = f"with abort_on_exception():\n    if last: raise {error}\n    wait()"
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert done.err.count(words) == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize("code", ["0", "None", ""])
def test_a_good_end_ends_nothing(tmp_path: Path, code: str) -> None:
    if not ALONE:
        return
    body = f"with abort_on_exception():\n    comm.Barrier(); print('here'); sys.exit({code})"
    done = run_job(2, START + body, tmp_path)
    # A launcher may put what one rank writes between the pieces of another.
    assert (done.status, "".join(done.out.split()), done.err) == (0, "herehere", "")


def test_output_that_was_not_flushed_is_not_lost(tmp_path: Path) -> None:
    if not ALONE:
        return
    done = run_job(2, f"{START}abort_on_exception()\nif last: print('so far')\nfail()", tmp_path)
    assert "so far" in done.out


def test_an_abort_that_hangs_is_bounded(tmp_path: Path) -> None:
    if not ALONE:
        return
    # A call that keeps the GIL, as MPI_Abort does.
    body = """
import ctypes
from mpicoll.runtime import abort
class World:
    Get_rank, Get_size = staticmethod(lambda: 0), staticmethod(lambda: 2)
    Abort = staticmethod(lambda status: ctypes.PyDLL(None).sleep(10_000))
abort.BOUND = 2.0
abort._world = World
abort_on_exception()
fail()
"""
    done = run_job(2, START + body, tmp_path)
    assert done.status != 0
    assert done.err.count("ValueError: boom") == 1


def test_a_world_of_one_goes_the_usual_way(tmp_path: Path) -> None:
    if not ALONE:
        return
    done = run_job(1, f"{START}with abort_on_exception():\n    fail()", tmp_path)
    assert done.status != 0
    assert done.err.count("ValueError: boom") == 1
    assert "ends the job" not in done.err


# -- hooks ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Catch what would end the job."""
    found: list[BaseException] = []
    monkeypatch.setattr(abort, "_end", lambda error, *rest: found.append(error))
    return found


def _quiet(*args: Any) -> None:
    pass


def test_a_block_puts_the_hooks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", _quiet)
    monkeypatch.setattr(threading, "excepthook", _quiet)
    with abort_on_exception() as guard:
        assert isinstance(guard, Guard)
        assert sys.excepthook == guard._failed
        assert threading.excepthook == guard._thread_failed
    assert sys.excepthook is threading.excepthook is _quiet


def test_a_hook_over_ours_stays(
    monkeypatch: pytest.MonkeyPatch, ended: list[BaseException]
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    with abort_on_exception():
        under = sys.excepthook
        over = lambda *about: under(*about)  # noqa: E731
        monkeypatch.setattr(sys, "excepthook", over)
        error = ValueError()
        sys.excepthook(ValueError, error, None)
        assert (ended, seen) == ([error], [error])  # _end came back, as in a world of one
    assert sys.excepthook is over
    sys.excepthook(ValueError, error, None)
    assert (ended, seen) == ([error], [error, error])  # the block is over: only passed on


def test_an_exception_is_passed_on(ended: list[BaseException]) -> None:
    with pytest.raises(ValueError, match="boom"), abort_on_exception():
        raise ValueError("boom")
    assert [str(error) for error in ended] == ["boom"]


def test_a_thread_may_leave_by_system_exit(
    monkeypatch: pytest.MonkeyPatch, ended: list[BaseException]
) -> None:
    monkeypatch.setattr(threading, "excepthook", _quiet)  # pytest's warns

    def leave() -> None:
        raise SystemExit(1)

    with abort_on_exception():
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert ended == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError(), 1),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(False), 0),
        (SystemExit(3), 3),
        (SystemExit(True), 1),
        (SystemExit(256), 1),
        (SystemExit(-1), 1),
        (SystemExit("words"), 1),
        (KeyboardInterrupt(), 130),
        (GeneratorExit(), 0),
        (BaseException(), 1),
    ],
)
def test_status(error: BaseException, status: int) -> None:
    assert abort._status(error) == status
