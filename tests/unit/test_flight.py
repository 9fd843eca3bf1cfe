"""The flight recorder without MPI: what is kept, what a dump holds, what SIGUSR1 does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpicoll.cli.flight_dumps import parse
from mpicoll.runtime import flight, flight_ask
from mpicoll.runtime.flight import Recorder, runs
from mpicoll.runtime.record import Record


def record(sequence: int, communicator: str = "w", *, end: float = 1.0) -> Record:
    return Record(communicator, sequence, "allreduce", start=float(sequence), end=end)


def kept(recorder: Recorder) -> list[tuple[str, int]]:
    """Return communicator and sequence number of the calls that a dump would show."""
    calls = recorder.snapshot("")["calls"]
    return [(call["communicator"], call["sequence"]) for call in calls]


def test_the_last_calls_are_kept() -> None:
    recorder = Recorder(kept=3)
    for sequence in range(1, 6):
        recorder.keep(record(sequence))
    assert kept(recorder) == [("w", 3), ("w", 4), ("w", 5)]


def test_a_call_that_runs_is_kept_while_others_pass_it() -> None:
    recorder = Recorder(kept=3)
    pending = record(1, end=0.0)
    recorder.keep(pending)
    for sequence in range(2, 8):
        recorder.keep(record(sequence))
    assert kept(recorder) == [("w", 1), ("w", 5), ("w", 6), ("w", 7)]
    pending.end = 9.0
    other = record(8, end=0.0)
    recorder.keep(other)
    for sequence in range(9, 12):
        recorder.keep(record(sequence))
    assert kept(recorder) == [("w", 8), ("w", 9), ("w", 10), ("w", 11)]


def test_the_last_call_of_a_communicator_is_kept_until_it_is_forgotten() -> None:
    recorder = Recorder(kept=2)
    for number in range(40):
        recorder.join(f"c{number}", "some", 0, (0,))
        recorder.keep(record(1, f"c{number}"))
        if number:
            recorder.leave(f"c{number}")
    recorder.leave("never joined")
    groups = recorder.snapshot("")["communicators"]
    assert ("c0", 1) in kept(recorder)
    assert [group["identity"] for group in groups if not group["freed"]] == ["c0"]
    assert len(groups) == 1 + flight._FREED
    assert len(kept(recorder)) == 1 + flight._FREED


def test_a_communicator_is_renamed() -> None:
    recorder = Recorder()
    recorder.join("w", "w", 0, (0,))
    recorder.rename("w", "grads")
    recorder.rename("freed", "x")
    assert (recorder.name("w"), recorder.name("freed")) == ("grads", "freed")
    assert recorder.snapshot("")["communicators"][0]["name"] == "grads"


def test_the_last_call_is_not_the_end_of_the_program() -> None:
    recorder = Recorder()
    recorder.keep(record(1))
    recorder.keep(record(1, "other"))
    recorder.keep(Record("w", 1, flight.FINALIZE))
    assert recorder.last("w") == record(1)
    assert recorder.last("unknown") is None


def test_a_record_is_dumped_as_it_is_then() -> None:
    recorder = Recorder()
    one = record(1, end=0.0)
    recorder.keep(one)
    one.step, one.steps, one.waits, one.algorithm = 2, 6, (1, 3), "ring"
    (call,) = recorder.snapshot("")["calls"]
    assert (call["step"], call["steps"], call["waits"], call["algorithm"]) == (
        2,
        6,
        (1, 3),
        "ring",
    )
    assert "stages" not in call


def test_site_is_the_first_line_outside_the_package() -> None:
    recorder = Recorder()
    here = sys._getframe().f_lineno
    first, second = recorder.site(), recorder.site()
    assert first == second == f"{__file__}:{here + 1}"
    package = str(Path(flight.__file__).parent / "made_up.py")
    names: dict[str, object] = {"recorder": recorder}
    exec(compile("def ours():\n    return recorder.site()\n", package, "exec"), names)
    outside = names["ours"]
    assert callable(outside)
    line = sys._getframe().f_lineno + 1
    assert outside() == f"{__file__}:{line}"


def test_sites_do_not_pile_up_and_code_objects_are_not_mixed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "_SITES", 4)
    recorder = Recorder()
    for number in range(20):
        code = compile(f"\nsite = recorder.site()  # {number}", f"/x/{number}.py", "exec")
        names = {"recorder": recorder}
        exec(code, names)
        assert names["site"] == f"/x/{number}.py:2"
        del code
    assert len(recorder._sites) <= 4


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), []),
        ((5,), [[5, 1, 1]]),
        (range(100_000), [[0, 100_000, 1]]),
        ((0, 2, 4, 6), [[0, 4, 2]]),
        ((7, 6, 5), [[7, 3, -1]]),
        ((0, 1, 2, 9, 5), [[0, 3, 1], [9, 2, -4]]),
    ],
)
def test_runs(ranks: tuple[int, ...], expected: list[list[int]]) -> None:
    assert runs(ranks) == expected
    back = [first + i * stride for first, count, stride in expected for i in range(count)]
    assert back == list(ranks)


def test_dump_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.join("w", "MPI_COMM_WORLD", 0, (0,))
    recorder.keep(record(1))
    before = time.time()
    path = recorder.dump(str(tmp_path / "new" / "folder"), "a reason")
    assert path == tmp_path / "new" / "folder" / "rank-00000.json"
    dump = parse(path.name, path.read_text())
    assert (dump.rank, dump.world, dump.reason, dump.pid) == (0, 1, "a reason", os.getpid())
    assert dump.calls == (record(1),)
    assert dump.groups["w"] == ("MPI_COMM_WORLD", (0,))
    assert before <= dump.wall <= time.time()
    assert dump.wall_of(dump.counter - 10) == pytest.approx(dump.wall - 10, abs=1e-3)
    own = next(frame for frame in dump.stack if not frame.ours)
    assert (own.file, own.function) == (__file__, "test_dump_is_read_back")
    assert not dump.inside
    recorder.keep(record(2))
    assert recorder.dump(str(path.parent), "again") == path
    assert len(parse(path.name, path.read_text()).calls) == 2
    assert list(path.parent.iterdir()) == [path]  # nothing half written is left


def test_a_program_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_START", str(tmp_path / "start"))
    monkeypatch.chdir(tmp_path)
    assert Recorder().dump("dumps", "x") == tmp_path / "start" / "dumps" / "rank-00000.json"


def test_a_dump_that_fails_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert recorder.dump(str(tmp_path / "file" / "sub"), "x") is None
    text = capsys.readouterr().err
    assert text.count("no dump of the flight recorder in") == 1
    recorder = Recorder()
    recorder.keep(Record("w", 1, "bcast", dtype=b"no text"))  # type: ignore[arg-type]
    assert recorder.dump(str(tmp_path), "x") is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_closed_stderr_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "stderr", None)
    assert Recorder().dump(str(tmp_path / "file"), "x") is None


# -- SIGUSR1, in processes of their own -----------------------------------------------------

START = """
import os, signal, sys, threading, time
from pathlib import Path
from mpicoll.runtime import flight
folder = sys.argv[1]
file = Path(folder, "rank-00000.json")
flight.RECORDER.join("w", "world", 0, (0,))
def kill():
    os.kill(os.getpid(), signal.SIGUSR1)
def dumped(seconds=30.0):
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    found = file.exists()
    file.unlink(missing_ok=True)
    return found
"""


def run_program(folder: Path, program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", START + program, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize(
    ("program", "output"),
    [
        # The main thread sits in C and runs no handler: a select with a mask of nothing.
        (
            """
print(flight.listen(folder))
found = []
def other():
    time.sleep(0.2)
    kill()
    found.append(dumped())
    os.write(hold[1], b"x")
hold = os.pipe()
threading.Thread(target=other).start()
import ctypes
ctypes.CDLL(None).read(hold[0], ctypes.create_string_buffer(1), 1)
print(found)
""",
            "True\n[True]",
        ),
        (
            "print(flight.listen('elsewhere'), flight.listen(folder)); kill(); print(dumped())",
            "True True\nTrue",
        ),
        # The user's own handler stays, and one that comes later takes over.
        (
            "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
            "print(flight.listen(folder)); kill(); print(dumped(0.5))",
            "False\nmine\nFalse",
        ),
        (
            "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
            "print(flight.listen(folder)); kill(); print(dumped(0.5))",
            "False\nFalse",
        ),
        (
            "print(flight.listen(folder))\n"
            "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
            "kill(); print(flight.listen(folder))",
            "True\nmine\nFalse",
        ),
        (
            "thread = threading.Thread(target=lambda: print(flight.listen(folder)))\n"
            "thread.start(); thread.join(); print(signal.getsignal(signal.SIGUSR1) == 0)",
            "False\nTrue",
        ),
        # Another owner of the wake-up descriptor keeps it.
        (
            "import asyncio\n"
            "async def main():\n"
            "    heard = asyncio.Event()\n"
            "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.set)\n"
            "    print(flight.listen(folder)); kill(); print(dumped())\n"
            "    os.kill(os.getpid(), signal.SIGUSR2)\n"
            "    await asyncio.wait_for(heard.wait(), 30)\n"
            "asyncio.run(main())\n"
            "kill(); print(dumped()); kill(); print(dumped())",
            "True\nTrue\nTrue\nTrue",
        ),
        # A handler of a C library, which Python does not know of, stays.
        (
            "import ctypes\n"
            "libc = ctypes.CDLL(None)\n"
            "libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]\n"
            "libc.signal(signal.SIGUSR1, ctypes.cast(libc.abs, ctypes.c_void_p))\n"
            "print(flight.listen(folder))",
            "False",
        ),
        # A child that was forked survives the signal, and does not make its parent dump.
        (
            """
import warnings
print(flight.listen(folder))
with warnings.catch_warnings():  # Python 3.12 and later: of the listener, a second thread
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
if child == 0:
    kill()
    time.sleep(0.2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), dumped(0.5))
kill()
print(dumped())
""",
            "True\n7 False\nTrue",
        ),
    ],
    ids=[
        "in C",
        "new folder",
        "own handler",
        "ignored",
        "later",
        "thread",
        "asyncio",
        "C",
        "fork",
    ],
)
def test_sigusr1(tmp_path: Path, program: str, output: str) -> None:
    assert run_program(tmp_path, program) == (0, output, "")


# -- another rank that asks, in processes of their own ---------------------------------------

ASK = """
import json
from mpicoll.runtime import flight_ask
me = os.getpid()
flight.RECORDER.join("c", "columns", 1, (2, 0))
def reason(seconds=30.0):
    end = time.monotonic() + seconds
    file = Path(folder, "rank-00000.json")
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    found = json.loads(file.read_text())["reason"] if file.exists() else ""
    file.unlink(missing_ok=True)
    return found
def ask(communicator="c", rank=1, by=0, pid=me, job=flight.RECORDER.snapshot("")["job"]):
    flight_ask.ask([(pid, flight_ask.Question(job, communicator, rank, by))])
    return reason(0.3)
asked = "asked by rank 2, whose time limit is over"
"""


@pytest.mark.parametrize(
    "program",
    [
        # Its Python runs on, and it is asked by its own recorder as by that of another one.
        """
flight.listen(folder)
flight.RECORDER.ask("w", {0: me})
while not (found := reason(0.01)):
    pass
assert found == "asked by rank 0, whose time limit is over", found
""",
        # It dumps only if it is the rank that is meant.
        """
flight.listen(folder)
assert ask() == asked
assert not ask("unknown")
assert not ask(rank=0)
assert not ask(by=2)
assert not ask(job="another")
assert ask() == asked
""",
        # What is no question is passed over.
        """
import socket
flight.listen(folder)
other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for data in (b"", b"x" * 5000, b"[" * 1000, b"[1, 2, 3]", b"[[], {}, [], []]"):
    other.sendto(data, flight_ask._name(me))
assert ask() == asked
""",
        # Many who ask at once get one dump, and whoever finds no room does not wait.
        """
made = []
flight.RECORDER.dump = lambda *_: (made.append(1), time.sleep(0.5))
flight.RECORDER.answer = lambda question: "yes"
flight.listen(folder)
flight_ask.ask((me, flight_ask.Question("", "c", 1, 0)) for _ in range(5000))
time.sleep(1.5)
assert 1 <= len(made) <= 2, made
""",
        # A process that does not listen, or is not there, hears nothing and nobody learns of it.
        """
signal.signal(signal.SIGUSR1, lambda *_: None)
assert not flight.listen(folder)
assert not ask()
assert not ask(pid=1 << 30)
flight.RECORDER.ask("w", {})
flight.RECORDER.ask("unknown", {0: me})
""",
        # A program that closes what it does not know is asked no more, and signalled as ever.
        """
flight.listen(folder)
os.close(flight._listener.ear.fileno())
flight_ask.ask([(me, flight_ask.Question("", "c", 1, 0))])
kill()
assert reason() == "SIGUSR1"
flight._listener.ear.detach()
""",
        # A child that was forked does not answer, nor does it keep its parent from that.
        """
import warnings
flight.listen(folder)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
if child == 0:
    time.sleep(1000 if flight._listener.ear.fileno() == -1 else 0)
    os._exit(1)
assert not ask(pid=child)
assert ask() == asked
os.kill(child, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
""",
    ],
    ids=["busy", "meant", "junk", "many", "deaf", "closed", "fork"],
)
def test_another_rank_asks(tmp_path: Path, program: str) -> None:
    assert run_program(tmp_path, ASK + program) == (0, "", "")


def test_only_the_same_user_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = flight_ask.listening()
    assert ear is not None
    question = flight_ask.Question("", "w", 0, 1)
    flight_ask.ask([(os.getpid(), question)])
    assert flight_ask.heard(ear) == [question]
    assert flight_ask.listening() is None  # the name is taken
    flight_ask.ask([(os.getpid(), question)])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert flight_ask.heard(ear) == []
    ear.close()
