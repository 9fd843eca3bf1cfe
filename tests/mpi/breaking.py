"""What the jobs of test_break.py run: ``python breaking.py FOLDER SCENE [JSON]``.

A scene breaks something on one rank, or lets the ranks disagree. What each rank saw goes
to FOLDER/rank-N.jsonl, a line each, since the output of a job that is ended may be lost.
Needs no other file of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.runtime import watchdog
from mpicoll.runtime.executor import Execution

#: Seconds of the time limit, and for which a rank asks the others. Live ranks answer within
#: milliseconds where they have a core; the rest is for machines where they have none.
LIMIT = 1.0
ASK = 2.0
#: Items per rank: of a message that is sent at once, and of one that waits for its receiver.
SMALL, LARGE = 3, 60_000
FORMS = ("blocking", "non-blocking", "persistent")

Call = Callable[[], None]


def calls(comm: Any, n: int) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of a call of each method, ``n`` items a rank, or some more."""
    size, rank = comm.size, comm.rank
    counts = [n + peer for peer in range(size)]
    one, whole = np.ones(n), np.ones(n * size)
    out, wide = np.empty(n), np.empty(n * size)
    own, every, got = np.ones(n + rank), np.ones(sum(counts)), np.empty(n + rank)
    spread = [np.ones((n + rank) * size), [n + rank] * size]
    gathered = [np.empty(sum(counts)), counts]
    double = [MPI.DOUBLE] * size
    at = (np.arange(size) * n * 8).tolist()
    return {
        "Barrier": (),
        "Bcast": (one,),
        "Reduce": (one, out),
        "Allreduce": (one, out),
        "Scan": (one, out),
        "Exscan": (one, out),
        "Reduce_scatter": (every, got, counts),
        "Reduce_scatter_block": (whole, out),
        "Gather": (one, wide),
        "Gatherv": (own, gathered),
        "Scatter": (whole, out),
        "Scatterv": ([every, counts], got),
        "Allgather": (one, wide),
        "Allgatherv": (own, gathered),
        "Alltoall": (whole, wide),
        "Alltoallv": (spread, gathered),
        "Alltoallw": (([whole, [n] * size, at, double]), [wide, [n] * size, at, double]),
    }


METHODS = tuple(calls(MPI.COMM_SELF, 1))


def call(comm: Any, name: str, form: str, n: int) -> None:
    """Make one call in one of the three forms."""
    arguments = calls(comm, n)[name]
    if form == "blocking":
        getattr(comm, name)(*arguments)
    elif form == "non-blocking":
        getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    else:
        request = getattr(comm, f"{name}_init")(*arguments)
        request.Start()
        request.Wait()
        request.Free()


# -- what is seen -----------------------------------------------------------------------


class Seen:
    """The lines of this rank."""

    def __init__(self, folder: Path) -> None:
        self.rank = MPI.COMM_WORLD.rank
        self._file = folder / f"rank-{self.rank}.jsonl"
        (folder / f"pid-{self.rank}").write_text(str(os.getpid()))

    def say(self, **what: Any) -> None:
        """Write a line."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"rank": self.rank, "at": time.time(), **what}) + "\n")

    def trial(self, what: Call, **about: Any) -> BaseException | None:
        """Do something, and write what came of it; "" is no error."""
        begun = time.perf_counter()
        error: BaseException | None = None
        try:
            what()
        except Exception as caught:
            error = caught
        self.say(
            error="" if error is None else type(error).__name__,
            text=str(error),
            silent=list(getattr(error, "silent", ())),
            waits=list(getattr(error, "waits", ())),
            collective=getattr(error, "collective", ""),
            timeout=isinstance(error, mpicoll.CollectiveTimeout),
            seconds=time.perf_counter() - begun,
            **about,
        )
        return error


def works(comm: Any) -> None:
    """Use a communicator."""
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size


def meet(comm: MPI.Intracomm) -> None:
    """Wait for the others, and leave them the cores."""
    request = MPI.Intracomm(comm).Ibarrier()
    while not request.Test():
        time.sleep(0.005)


class Trap:
    """Stops this process, or ends it, before the step of a call that was chosen."""

    def __init__(self) -> None:
        self.comm: MPI.Intracomm | None = None
        self.signal = signal.SIGSTOP
        self.steps = 0  #: seen on ``comm``
        self.fatal = -1  #: the step before which the signal comes
        post = Execution._post

        def watched(execution: Execution) -> None:
            if execution._comm is self.comm:
                self.spring()
                self.steps += 1
            post(execution)

        Execution._post = watched  # type: ignore[method-assign]

    def spring(self) -> None:
        """Send the signal, if it is time."""
        if self.steps == self.fatal:
            self.fatal = -1
            os.kill(os.getpid(), self.signal)

    def arm(self, comm: Any, fatal: int = -1) -> None:
        """Count the steps on ``comm`` from 0."""
        self.comm, self.steps, self.fatal = comm._link.hidden, 0, fatal


# -- one rank stops ---------------------------------------------------------------------


class Group:
    """Ranks that go through cases with each other, each on a communicator of its own.

    One rank stops itself; the others find that out, and wake it again.
    """

    def __init__(self, seen: Seen, trap: Trap, size: int) -> None:
        color = MPI.COMM_WORLD.rank // size
        self.plain = MPI.COMM_WORLD.Split(color, MPI.COMM_WORLD.rank)
        self.number = color
        self.seen, self.trap = seen, trap
        self.pids: list[int] = self.plain.allgather(os.getpid())

    def steps(self) -> dict[str, list[int]]:
        """Return the steps of each method on each rank."""
        found = {}
        comm = mpicoll.Comm(self.plain.Dup(), timeout=60)
        for name in METHODS:
            self.trap.arm(comm)
            call(comm, name, "blocking", SMALL)
            found[name] = self.plain.allgather(self.trap.steps)
        comm.Free()
        return found

    def stop(self, name: str, form: str, n: int, victim: int, step: int, wake: bool) -> None:
        """Stop ``victim`` before a step of a call; one past the last is after the call."""
        comm = mpicoll.Comm(self.plain.Dup(), timeout=LIMIT)
        stops = self.plain.rank == victim
        self.trap.arm(comm, step if stops else -1)
        about = {"case": f"{name}, {form}, {n} items, rank {victim} before step {step}"}

        def both() -> None:
            call(comm, name, form, n)
            self.trap.spring()
            comm.Barrier()  # nobody leaves it before all are in it

        meet(self.plain)
        self.seen.trial(both, victim=victim, of=self.plain.rank, stops=stops, **about)
        if wake:
            self._wake(victim)
            # Whoever had completed its calls learns of it now, and other communicators work.
            self.seen.trial(comm.Barrier, after=True, of=self.plain.rank, **about)
            works(mpicoll.Comm(self.plain))

    def _wake(self, victim: int) -> None:
        others = [rank for rank in range(self.plain.size) if rank != victim]
        if self.plain.rank == others[0]:
            for rank in others[1:]:
                while not self.plain.Iprobe(rank, 1):
                    time.sleep(0.005)
                self.plain.recv(source=rank, tag=1)
            os.kill(self.pids[victim], signal.SIGCONT)
        elif self.plain.rank != victim:
            self.plain.send(None, others[0], tag=1)
        meet(self.plain)


def stops(seen: Seen, size: int, seed: int, most: int) -> None:
    """Stop a rank before every step of every method; ``most`` cases, 0 for all there are."""
    group = Group(seen, Trap(), size)
    steps = group.steps()
    cases = []
    for number, (name, form) in enumerate((name, form) for name in METHODS for form in FORMS):
        for victim in range(size):
            for step in range(steps[name][victim] + 1):
                n = (SMALL, LARGE)[(number + victim + step) % 2]
                cases.append((name, form, n, victim, step))
    if most:
        # Steps of one method lie side by side, so a stride meets all methods alike.
        cases = [
            cases[(seed + number * len(cases) // most) % len(cases)] for number in range(most)
        ]
    groups = MPI.COMM_WORLD.size // size
    for name, form, n, victim, step in cases[group.number :: groups]:
        group.stop(name, form, n, victim, step, wake=True)
    meet(MPI.COMM_WORLD)
    seen.say(end=True, cases=len(cases))


def ends(seen: Seen, name: str, form: str, n: int, victim: int, step: int, kill: bool) -> None:
    """Stop or kill a rank for good; the others end by themselves."""
    group = Group(seen, trap := Trap(), MPI.COMM_WORLD.size)
    if kill:
        trap.signal = signal.SIGKILL
    group.stop(name, form, n, victim, step, wake=False)
    seen.say(end=True)


SCENES: dict[str, Callable[..., None]] = {"stops": stops, "ends": ends}


def main(folder: str, scene: str, arguments: str = "{}") -> None:
    """Run a scene."""
    watchdog.ASK_SECONDS = ASK
    SCENES[scene](Seen(Path(folder)), **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
