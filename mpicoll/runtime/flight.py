"""The flight recorder: the last calls of this process in memory, and their dump as JSON.

`RECORDER.keep` is called once per collective and costs some hundred nanoseconds. A dump is
written when something is wrong: at a time-out, at an error, at SIGUSR1, or when a rank of this
host whose time limit is over asks for it. `python -m mpicoll doctor --flight DIR` reads the
dumps of all ranks.

Times in a dump are of `time.perf_counter`; its ``clock`` is a pair (counter, wall clock)
taken together, by which a reader converts them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from mpicoll._version import __version__
from mpicoll.runtime import flight_ask
from mpicoll.runtime.flight_ask import Question
from mpicoll.runtime.handlers import is_free
from mpicoll.runtime.record import Record

FORM = 1  #: of a dump; raised when a field changes its meaning
KEPT = 256  #: calls that are kept
FRAMES = 32  #: of the innermost ones of a stack that a dump shows
FILE = "rank-{:05d}.json"
SIGNALLED = "SIGUSR1"  #: the reason of a dump at the signal
ASKED = "asked by rank"  #: how that of a dump begins for which another rank has asked
#: What a rank is in that has ended its program, until the others have; under a time limit.
FINALIZE = "finalize"

_SITES = 1024  # call sites whose text is kept
_FREED = 16  # communicators that are remembered after they were freed
# As code objects spell it, so that frames can be compared with it.
_FILE = sys._getframe().f_code.co_filename
_PACKAGE = str(Path(_FILE).parent.parent) + os.sep
try:
    _START = os.getcwd()
except FileNotFoundError:  # removed under the program
    _START = ""
_FIELDS = tuple(field.name for field in fields(Record) if field.name != "stages")
# Variables of launchers that are equal on all ranks of one job, and differ between jobs.
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Member(NamedTuple):
    """A communicator of this process: its name, the rank here, its ranks as world ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]


class Recorder:
    """The last calls of this process and its communicators."""

    def __init__(self, kept: int = KEPT) -> None:
        self._recent: deque[Record] = deque(maxlen=kept)
        # A call that runs is kept while others pass it, and so is the last of a communicator.
        self._running: deque[Record] = deque(maxlen=kept)
        self._last: dict[str, Record] = {}
        self._members: dict[str, Member] = {}
        self._freed: deque[tuple[str, Member, Record | None]] = deque(maxlen=_FREED)
        self._kept = kept
        self._sites: dict[tuple[int, int], tuple[CodeType, str]] = {}
        self._world: dict[str, Any] = {}
        self._told = False

    # -- what the link calls ----------------------------------------------------------

    def keep(self, record: Record) -> None:
        """Keep a call; it may be filled and changed in place afterwards."""
        recent = self._recent
        if len(recent) == self._kept and not recent[0].end:
            self._rescue(recent[0])
        recent.append(record)
        self._last[record.communicator] = record

    def _rescue(self, record: Record) -> None:
        running = [one for one in self._running if not one.end]
        self._running = deque([*running, record], maxlen=self._kept)

    def join(self, identity: str, name: str, rank: int, ranks: tuple[int, ...]) -> None:
        """Note a communicator that was wrapped: this rank in it, and the world rank of each."""
        if not self._world:
            self._world = {"rank": ranks[rank], "joined": time.time(), **_world()}
        self._members[identity] = Member(name, rank, ranks)

    def rename(self, identity: str, name: str) -> None:
        """Note the name that a communicator was given after it was wrapped."""
        member = self._members.get(identity)
        if member is not None:
            self._members[identity] = member._replace(name=name)

    def name(self, identity: str) -> str:
        """Return the name of a communicator, its identity where it has none."""
        member = self._members.get(identity)
        return member.name if member is not None else identity

    def last(self, identity: str) -> Record | None:
        """Return the last call on a communicator that is kept, the end of the program aside."""
        calls = (one for one in reversed(self._recent.copy()) if one.communicator == identity)
        return next((one for one in calls if one.collective != FINALIZE), None)

    def leave(self, identity: str) -> None:
        """Note that a communicator was freed; harmless for one that is not known."""
        member, last = self._members.pop(identity, None), self._last.pop(identity, None)
        if member is not None:
            self._freed.append((identity, member, last))

    def site(self) -> str:
        """Return file and line of the first caller outside this package."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_PACKAGE):
                known = self._sites.get((id(code), frame.f_lasti))
                return known[1] if known else self._note_site(frame)
            frame = frame.f_back
        return ""

    def _note_site(self, frame: FrameType) -> str:
        # The line number is kept, since finding it takes 10 microseconds in a long function.
        # The code object is kept with it, so that its id is not given to another one.
        if len(self._sites) >= _SITES:
            self._sites = {}
        code = frame.f_code
        text = f"{code.co_filename}:{frame.f_lineno}"
        self._sites[id(code), frame.f_lasti] = code, text
        return text

    # -- other ranks --------------------------------------------------------------------

    def ask(self, identity: str, pids: Mapping[int, int]) -> None:
        """Ask ranks of a communicator, given with their process ids, for their dumps.

        It reaches those of this host that listen, whatever they do. Nobody waits for them.
        """
        member = self._members.get(identity)
        if member is None or not pids:
            return
        job = self._world["job"]
        flight_ask.ask(
            (pid, Question(job, identity, rank, member.rank)) for rank, pid in pids.items()
        )

    def answer(self, question: Question) -> str:
        """Return the reason of the dump for a question; "" if it is for another process."""
        member = self._members.get(question.communicator)
        if (
            member is None
            or (question.job, question.rank) != (self._world["job"], member.rank)
            or type(question.by) is not int
            or question.by not in range(len(member.ranks))
        ):
            return ""
        return f"{ASKED} {member.ranks[question.by]}, whose time limit is over"

    # -- the dump ---------------------------------------------------------------------

    def dump(self, folder: str, reason: str) -> Path | None:
        """Write what is kept to ``rank-NNNNN.json`` in ``folder``, replacing an earlier dump.

        A relative ``folder`` is one below that in which the program began. Local: nothing is
        sent. A dump that fails is told on stderr, once, and is None; it must not hide the error
        for which it was made.
        """
        temporary: Path | None = None
        try:
            data = self.snapshot(reason)
            path = absolute(folder) / FILE.format(data["rank"])
            path.parent.mkdir(parents=True, exist_ok=True)
            # Threads may dump at once: each has a file of its own until it is whole.
            unique = f"{os.getpid()}-{threading.get_ident()}"
            temporary = path.with_name(f".{path.name}.{unique}.tmp")
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)
        except Exception as error:
            self._tell(f"no dump of the flight recorder in {folder}: {error}")
            if temporary is not None:
                _remove(temporary)
            return None
        return path

    def snapshot(self, reason: str) -> dict[str, Any]:
        """Return the data of a dump."""
        world = self._world or {"rank": 0, "joined": 0.0, **_world()}
        members = list(self._members.items())
        freed = list(self._freed)
        last = [*self._last.values(), *(record for _, _, record in freed if record)]
        communicators = [
            {**_described(identity, member), "freed": is_freed}
            for is_freed, known in (
                (True, [(identity, member) for identity, member, _ in freed]),
                (False, members),
            )
            for identity, member in known
        ]
        return {
            "kind": "mpicoll flight",
            "form": FORM,
            "mpicoll": __version__,
            **world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "clock": {"counter": time.perf_counter(), "wall": time.time()},
            "stack": _stack(),
            "communicators": communicators,
            "calls": _calls(self._recent.copy(), self._running.copy(), last),
        }

    def _tell(self, text: str) -> None:
        if self._told:
            return
        self._told = True
        rank = self._world.get("rank", "?")
        try:
            print(f"mpicoll: rank {rank}: {text}", file=sys.stderr, flush=True)
        except Exception:
            return  # nobody is left to be told


def _calls(*groups: Iterable[Record]) -> list[dict[str, Any]]:
    """Return each call once, in the order in which they began."""
    found = {id(record): record for group in groups for record in group}
    ordered = sorted(found.values(), key=lambda record: record.start)
    return [{name: getattr(record, name) for name in _FIELDS} for record in ordered]


def _described(identity: str, member: Member) -> dict[str, Any]:
    return {
        "identity": identity,
        "name": member.name,
        "rank": member.rank,
        "ranks": runs(member.ranks),
    }


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs (first, count, stride); a world of 10^5 ranks is one of them."""
    found: list[list[int]] = []
    for rank in ranks:
        if found:
            first, count, stride = found[-1]
            if count == 1 or rank == first + count * stride:
                found[-1] = [first, count + 1, rank - first if count == 1 else stride]
                continue
        found.append([rank, 1, 1])
    return found


def _stack() -> list[dict[str, Any]]:
    """Return where the main thread is, the innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < FRAMES:
        code = frame.f_code
        if code.co_filename != _FILE:
            ours = code.co_filename.startswith(_PACKAGE)
            place = {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name}
            found.append({**place, "ours": ours})
        frame = frame.f_back
    return found


def _world() -> dict[str, Any]:
    """Return what a dump says of the job; asked once, since MPI may be busy at a dump."""
    job = next((os.environ[name] for name in _JOB if name in os.environ), "")
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return {"world": 1, "job": job, "mpi": ""}
    vendor, version = module.get_vendor()
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    return {"world": module.COMM_WORLD.Get_size(), "job": job, "mpi": mpi}


def absolute(folder: str) -> Path:
    """Return a folder as it was meant when the program began, which may have changed its own."""
    return Path(_START, folder)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the folder can't be written, which has been told


RECORDER = Recorder()  #: of this process


# -- SIGUSR1, and other ranks -------------------------------------------------------------


class _Listener:
    """A thread that dumps when SIGUSR1 or another rank asks, while the main thread goes on.

    Python runs a handler in the main thread between two byte codes, so not before a call of
    MPI returns. The byte that the interpreter writes to the wake-up descriptor is written by
    the signal itself, and mpi4py lets other threads run while it waits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self._read, self.descriptor = os.pipe()
        os.set_blocking(self.descriptor, False)  # a full pipe has dumps enough to come
        self.ear: socket.socket | None = None

    def start(self) -> None:
        """Take the signal; main thread only."""
        self._take_descriptor()
        signal.signal(signal.SIGUSR1, self.handle)
        # Calls of the operating system inside MPI go on as if nothing had happened.
        signal.siginterrupt(signal.SIGUSR1, False)
        self.ear = flight_ask.listening()
        threading.Thread(target=self._wait, name="mpicoll-flight", daemon=True).start()

    def _take_descriptor(self) -> bool:
        """Ask for the bytes, unless another has them (asyncio does); return whether we do."""
        other = signal.set_wakeup_fd(self.descriptor, warn_on_full_buffer=False)
        if other in (-1, self.descriptor):
            return other == self.descriptor
        signal.set_wakeup_fd(other)
        return False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Do the second best, where the descriptor is another's: dump when Python runs."""
        if os.getpid() == self.pid and not self._take_descriptor():
            os.write(self.descriptor, bytes([number]))

    def _wait(self) -> None:
        events = select.poll()
        events.register(self._read, select.POLLIN)
        if self.ear is not None:
            events.register(self.ear, select.POLLIN)
        while True:
            for descriptor, _ in events.poll():
                if descriptor != self._read:
                    reason = self._asked()
                elif signal.SIGUSR1 in os.read(self._read, 4096):
                    reason = SIGNALLED
                else:
                    continue
                if reason is None:
                    events.unregister(descriptor)
                elif reason:
                    RECORDER.dump(str(self.folder), reason)

    def _asked(self) -> str | None:
        """Return why others want a dump; "" if it was not of this process, None if none can ask.

        Many may ask at once, and get one.
        """
        try:
            questions = flight_ask.heard(self.ear) if self.ear is not None else []
        except OSError:
            return None
        return next(filter(None, map(RECORDER.answer, questions)), "")


_listener: _Listener | None = None


def listen(folder: str) -> bool:
    """Dump into ``folder`` at SIGUSR1 from now on; return whether that is so.

    It is not where the signal has a handler already or is ignored: that is the user's choice
    (batch systems announce the end of a job by it). A handler that is installed later takes
    our place. Called outside the main thread, it changes the folder at most.
    """
    global _listener
    where = absolute(folder)
    if _listener is not None and _listener.pid == os.getpid():
        _listener.folder = where
        return signal.getsignal(signal.SIGUSR1) == _listener.handle
    if threading.current_thread() is not threading.main_thread() or not is_free(signal.SIGUSR1):
        return False
    listener = _Listener(where)
    try:
        listener.start()
    except (OSError, RuntimeError, ValueError):  # no threads, or not the main interpreter
        return False
    _listener = listener
    return True


def deafen() -> None:
    """Let SIGUSR1 do nothing from now on, where it was ours; for the end of the process.

    Python takes its handlers away before MPI ends, and waits for other ranks there: the signal
    to the job would end it.
    """
    ours = _listener is not None and signal.getsignal(signal.SIGUSR1) == _listener.handle
    if ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _after_fork() -> None:
    # The child shares the pipe, and a signal to it must not make its parent dump. The name of
    # the socket is its parent's.
    if _listener is None:
        return
    if _listener.ear is not None:
        _listener.ear.close()
    try:
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor not in (-1, _listener.descriptor):
            signal.set_wakeup_fd(descriptor)
    except ValueError:
        return  # not the thread that signals are for


os.register_at_fork(after_in_child=_after_fork)
