"""The trace: one file of JSON lines per rank, written while the program runs.

``MPICOLL_TRACE=dir`` makes every rank write ``dir/rank-00003.jsonl`` (its rank in
MPI.COMM_WORLD); ``python -m mpicoll trace dir`` reads them. The first line is an object that says
whose file it is; the others are lists that begin with their kind:

    ["clock", reference, run, at, offset, error]     this clock - the clock of ``reference``
    ["comm", identity, name, rank, ranks]            a communicator; ``ranks`` are world ranks
    ["call", *CALL, stages]                          a collective call that is over
    ["wait", identity, sequence, start, end]         blocked in Wait for a non-blocking call
    ["region", name, start, end]                     a phase of the user's own
    ["end", calls, seconds]                          the last line: calls, cost of the trace

Times are whole nanoseconds of the rank's own ``time.perf_counter``. They stay as they were
read; the reader removes offset and drift. Lines go out in chunks, so memory is bounded and a
run that is killed leaves all but the last moments.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, time
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

from mpicoll._version import __version__
from mpicoll.errors import SettingError
from mpicoll.runtime.record import Record

if TYPE_CHECKING:  # so that reading a trace starts no MPI
    from mpi4py import MPI

    from mpicoll.runtime.clocks import Sample

FORM = 1  #: of the files; raised when a line changes its meaning
#: Fields of `Record` in a line of a call, in this order.
CALL = (
    *("communicator", "sequence", "collective", "form", "algorithm", "operator", "dtype"),
    *("count", "nbytes", "root", "start", "end", "site", "error"),
)
CHUNK_BYTES = 1 << 16  #: that are kept back at most
CHUNK_SECONDS = 0.25  #: after which the next line takes the ones before along


def file_name(rank: int) -> str:
    """Return the name of the file of a world rank."""
    return f"rank-{rank:05d}.jsonl"


def _plain(value: object) -> object:
    """Return a NumPy integer as an int, anything else as text."""
    return int(value) if hasattr(value, "__index__") else str(value)


_encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Tracer:
    """Writes the trace of this process.

    Calls may come from several threads. A file that can not be written any more (disk full)
    ends the trace with a warning, not the program.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        size: int,
        *,
        clock: Callable[[], float] = perf_counter,
        token: str | None = None,
    ) -> None:
        """Begin the file of world rank ``rank`` of ``size``; raise OSError if that fails.

        ``clock`` is what all times are read from. Processes with the same ``token`` read the
        same one; without it the node is asked.
        """
        self.rank = rank
        self.path = Path(folder).absolute() / file_name(rank)
        self.run = uuid4().hex
        self.clock = clock
        self.token = _clock_of_node() if token is None else token
        self._settled = ""
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._kept = 0
        self._calls = 0
        self._cost = 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: of processes that all take themselves for rank 0, as with
        # the wrong launcher, one is left, and none writes into the file of another. Without
        # a buffer of Python's own, which a forked child would write once more.
        fresh = self.path.with_suffix(f".{self.run}")
        self._file = open(fresh, "xb", buffering=0)  # noqa: SIM115
        os.replace(fresh, self.path)
        self._written = clock()
        head = {
            "mpicoll_trace": FORM,
            "version": __version__,
            "rank": rank,
            "size": size,
            "run": self.run,
            "host": platform.node(),
            "process": os.getpid(),
            "date": time(),
        }
        self._put(_encode(head))
        self._flush()

    @property
    def closed(self) -> bool:
        """Whether nothing is written any more."""
        return self._file.closed

    # -- what is written ----------------------------------------------------------------

    def add(self, record: Record) -> None:
        """Write a call that is over, with its steps."""
        began = self.clock()
        # Text put together by hand: four times as fast as json for what most lines consist of.
        stages = ",".join(
            [
                f"[{step},{int(posted * 1e9)},{int(worked * 1e9)},{int(done * 1e9)},"
                f"{[*sources]},{[*targets]},{received},{sent}]"
                for step, posted, worked, done, sources, targets, received, sent in record.stages
            ]
        )
        values = [getattr(record, name) for name in CALL]
        values[10:12] = int(record.start * 1e9), int(record.end * 1e9)
        self._put(f"{_encode(['call', *values])[:-1]},[{stages}]]")
        with self._lock:
            self._calls += 1
            self._cost += self.clock() - began

    def join(self, identity: str, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Write that a communicator was wrapped: own rank in it, and the world ranks of all."""
        self._put(_encode(["comm", identity, name, rank, list(ranks)]))

    def waited(self, record: Record, start: float, end: float) -> None:
        """Write that the user was blocked in Wait for a non-blocking or persistent call."""
        self._put(_encode(["wait", record.communicator, record.sequence, _ns(start), _ns(end)]))

    def interval(self, name: str, start: float, end: float) -> None:
        """Write a phase of the user's own."""
        self._put(_encode(["region", name, _ns(start), _ns(end)]))

    def sample(self, found: Sample) -> None:
        """Write a comparison of clocks."""
        at, offset, error = _ns(found.at), _ns(found.offset), _ns(found.error)
        self._put(_encode(["clock", found.reference, found.run, at, offset, error]))

    # -- what ranks do together ---------------------------------------------------------

    def meet(self, comm: MPI.Intracomm) -> None:
        """Compare the clocks of ``comm`` unless that was done; collective.

        The first rank of each clock (of each node) exchanges a few dozen messages of 8 bytes
        with rank 0 of ``comm``, one after the other; besides, an allgather and a broadcast.
        """
        self._compare(comm, self.run)

    def settle(self, comm: MPI.Intracomm) -> None:
        """Compare the clocks once more, at the end, so that drift shows; collective."""
        self._settled = self._compare(comm, self._settled)

    def _compare(self, comm: MPI.Intracomm, known: str) -> str:
        """Compare clocks if the ranks do not all have the same ``known`` run; return theirs."""
        from mpicoll.runtime import clocks

        if comm.Get_size() == 1 or (len(set(runs := comm.allgather(known))) == 1 and runs[0]):
            return known
        found = clocks.compare(comm, self.rank, self.run, self.token, self.clock)
        self.run = found.run
        self.sample(found)
        return found.run

    def close(self, comm: MPI.Intracomm | None = None) -> None:
        """Write what is left and the last line; harmless the second time.

        With ``comm`` collective: the clocks are compared once more. Without, after an error,
        it sends nothing.
        """
        global _tracer
        if comm is not None:
            self.settle(comm)
        self._put(_encode(["end", self._calls, round(self._cost, 6)]))
        with self._lock:
            self._flush()
            self._file.close()
        if _tracer is self:
            _tracer = None

    # -- the file -----------------------------------------------------------------------

    def _put(self, line: str) -> None:
        data = f"{line}\n".encode("ascii")
        with self._lock:
            if self._file.closed:
                return
            self._lines.append(data)
            self._kept += len(data)
            if self._kept >= CHUNK_BYTES or self.clock() - self._written >= CHUNK_SECONDS:
                self._flush()

    def _flush(self) -> None:
        if self._file.closed:
            return
        data = memoryview(b"".join(self._lines))
        self._lines, self._kept = [], 0
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            print(
                f"mpicoll: warning: rank {self.rank}: the trace ends here, {self.path} can not "
                f"be written: {error.strerror}",
                file=sys.stderr,
            )
        self._written = self.clock()


def _clock_of_node() -> str:
    """Return a text that is equal in processes whose perf_counter is the same clock.

    On Linux that is the monotonic clock of the kernel, one per boot and time namespace;
    elsewhere each process is taken to have a clock of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/time")
    except OSError:
        return uuid4().hex
    return f"{platform.node()} {boot} {space}"


# -- one per process --------------------------------------------------------------------

_tracer: Tracer | None = None


def _forget() -> None:
    """Leave the file to the parent, in a child that was forked."""
    global _tracer
    _tracer = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def open_trace(comm: MPI.Intracomm, folder: str) -> Tracer:
    """Return the tracer of this process, made now if it has none; collective over ``comm``.

    To be called on every communicator that is wrapped while a trace is taken, and on one that
    no user's message travels on: some of its ranks may have a tracer from an earlier one and
    some not, so only a call by all of them lets all decide alike. A second call for the same
    ranks costs an allgather. The folder of the first call of a process counts.

    Raises SettingError, on all ranks alike, if one of them can not write.
    """
    from mpi4py import MPI

    global _tracer
    made, fault = _tracer, ""
    world = MPI.COMM_WORLD
    if made is None:
        try:
            made = Tracer(folder, world.Get_rank(), world.Get_size())
        except OSError as error:
            fault = f"rank {world.Get_rank()}: {error}"
    faults = [text for text in comm.allgather(fault) if text]
    if faults:
        if made is not None and made is not _tracer:
            made.close()
            made.path.unlink(missing_ok=True)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SettingError(
            f"MPICOLL_TRACE={folder}: no trace can be written there: {faults[0]}{more}; name a "
            "folder that every rank can write"
        )
    assert made is not None
    _tracer = made
    made.meet(comm)
    return made


class trace_region:
    """Mark a phase in the trace: ``with mpicoll.trace_region("forward"): ...``.

    Meant for phases that compute: they show in the timeline, and what a non-blocking
    collective does meanwhile counts as hidden by them. Without a trace it costs two readings
    of the clock.
    """

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        """Name the phase; phases of one name are one row of the report."""
        self._name = name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if _tracer is not None:
            _tracer.interval(self._name, self._start, perf_counter())
