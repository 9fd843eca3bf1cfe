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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.runtime import buffers, link, watchdog
from mpicoll.runtime.executor import Execution

#: Seconds of the time limit, and for which a rank asks the others. Live ranks answer within
#: milliseconds where they have a core; the rest is for machines where they have none.
LIMIT = 1.0
ASK = 2.0
#: Items per rank: of a message that is sent at once, and of one that waits for its receiver.
SMALL, LARGE = 3, 60_000
FORMS = ("blocking", "non-blocking", "persistent")

Call = Callable[[], Any]


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

    def keep_errors(self) -> None:
        """Write what goes to stderr to a file: a launcher may lose it when a rank aborts."""
        file = self._file.with_name(f"err-{self.rank}").open("w", encoding="utf-8")
        os.dup2(file.fileno(), 2)

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

    def steps(self) -> dict[tuple[str, int], list[int]]:
        """Return the steps of each method on each rank, for few items and many.

        The two may have different algorithms.
        """
        found = {}
        comm = mpicoll.Comm(self.plain.Dup(), timeout=60)
        for name in METHODS:
            for n in (SMALL, LARGE):
                self.trap.arm(comm)
                call(comm, name, "blocking", n)
                found[name, n] = self.plain.allgather(self.trap.steps)
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
            self.trap.fatal = -1
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
            for turn, n in enumerate((SMALL, LARGE)):
                # Every second of the one, and of the other.
                first = (number + victim + turn) % 2
                for step in range(first, steps[name, n][victim] + 1, 2):
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
    """Stop or kill a rank for good; the others end by themselves. No step, no signal."""
    group = Group(seen, trap := Trap(), MPI.COMM_WORLD.size)
    if kill:
        trap.signal = signal.SIGKILL
    group.stop(name, form, n, victim, step, wake=False)
    seen.say(end=True)


# -- ranks that disagree, or are elsewhere ----------------------------------------------


def d(n: int) -> Any:
    """Return some numbers."""
    return np.ones(n)


#: What ranks do, of which the last one does another thing, where nothing checks that.
DISAGREE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "counts": (
        lambda c: c.Allreduce(d(3), d(3), algorithm="ring"),
        lambda c: c.Allreduce(d(4), d(4), algorithm="ring"),
    ),
    "counts of a broadcast": (lambda c: c.Bcast(d(3)), lambda c: c.Bcast(d(5))),
    "counts of an exchange": (
        lambda c: c.Alltoall(d(c.size), d(c.size)),
        lambda c: c.Alltoall(d(2 * c.size), d(2 * c.size)),
    ),
    "dtypes": (
        lambda c: c.Allreduce(d(3), d(3)),
        lambda c: c.Allreduce(np.ones(3, np.int64), np.ones(3, np.int64)),
    ),
    "operators": (
        lambda c: c.Allreduce(d(3), d(3), MPI.MAX),
        lambda c: c.Allreduce(d(3), d(3), MPI.MIN),
    ),
    "roots": (lambda c: c.Bcast(d(3), 0), lambda c: c.Bcast(d(3), c.size - 1)),
    "algorithms": (
        lambda c: c.Allreduce(d(3), d(3), algorithm="ring"),
        lambda c: c.Allreduce(d(3), d(3), algorithm="recursive_doubling"),
    ),
    "calls": (lambda c: c.Allreduce(d(3), d(3)), lambda c: c.Allgather(d(3), d(3 * c.size))),
    "order of calls": (
        lambda c: (c.Scan(d(3), d(3)), c.Alltoall(d(c.size), d(c.size))),
        lambda c: (c.Alltoall(d(c.size), d(c.size)), c.Scan(d(3), d(3))),
    ),
    "requests": (
        lambda c: mpicoll.Request.Waitall([c.Ibarrier(), c.Iallreduce(d(3), d(3))]),
        lambda c: mpicoll.Request.Waitall([c.Iallreduce(d(3), d(3)), c.Ibarrier()]),
    ),
}


def disagree(seen: Seen) -> None:
    """Let the last rank do something else; all get out of it, and can use others."""
    world = MPI.COMM_WORLD
    last = world.rank == world.size - 1
    for name, (call_, other) in DISAGREE.items():
        comm = mpicoll.Comm(world.Dup(), timeout=LIMIT)
        meet(world)

        def both(comm: Any = comm, made: Callable[[Any], Any] = other if last else call_) -> None:
            made(comm)
            comm.Barrier()

        seen.trial(both, case=name, last=last)
        meet(world)
        works(mpicoll.Comm(world))
    seen.say(end=True)


def many(comm: Any) -> None:
    """Wait for more requests than there is time for one after the other."""
    mpicoll.Request.Waitall([comm.Iallreduce(d(3), d(3)) for _ in range(8)])


def behind(comm: Any) -> None:
    """Wait for a request without a limit, behind one whose limit is over."""
    limited, other = (
        comm.Iallreduce(d(3), d(3), timeout=LIMIT),
        comm.Iallreduce(d(3), d(3), timeout=0),
    )
    try:
        limited.Wait()
    except mpicoll.CollectiveTimeout:
        other.Wait()


def ask(comm: Any) -> None:
    """Ask for the status of a request until it is complete."""
    request = comm.Iallreduce(d(3), d(3))
    while not request.Get_status():
        time.sleep(0.005)


def elsewhere(seen: Seen) -> None:
    """Look for what is said of a rank that is in its own code, or in another call."""
    world = MPI.COMM_WORLD
    last = world.rank == world.size - 1
    halves = world.Split(last or world.rank == 0)  # the last rank and rank 0, and the others
    rest = world.Split(last)

    def trial(case: str, comm: Any, made: Call) -> None:
        meet(world)
        seen.trial(made, case=case, last=last)
        meet(world)
        # The first one may still complete where no limit was in force before.
        seen.trial(lambda: [comm.Barrier(timeout=LIMIT) for _ in range(2)], case=case, after=True)

    comm = mpicoll.Comm(world.Dup(), timeout=LIMIT)
    trial("own code", comm, (lambda: time.sleep(LIMIT + ASK + 1)) if last else comm.Barrier)

    first, second = (mpicoll.Comm(world.Dup(), timeout=LIMIT) for _ in range(2))
    trial("two at once", first, (second if last else first).Barrier)

    for case, made in (("many requests", many), ("asked for status", ask), ("no limit", behind)):
        comm = mpicoll.Comm(world.Dup(), timeout=LIMIT)
        trial(case, comm, (lambda: time.sleep(LIMIT + ASK + 1)) if last else partial(made, comm))

    comm = mpicoll.Comm(world.Dup(), timeout=LIMIT)
    other = mpicoll.Comm(halves.Dup(), timeout=60)
    requests: list[Any] = []

    def in_another() -> None:
        if last:  # waits for rank 0, which enters it when its own call has timed out
            other.Barrier()
            return
        try:
            comm.Barrier()
        finally:
            meet(rest)  # while the last rank still has to answer
            requests.append(other.Ibarrier())

    trial("another communicator", comm, in_another)
    mpicoll.Request.Waitall(requests)

    comm = mpicoll.Comm(world.Dup())  # no limit but that of one call
    trial(
        "one call",
        comm,
        (lambda: time.sleep(LIMIT + 1)) if last else lambda: comm.Barrier(timeout=LIMIT),
    )

    comm = mpicoll.Comm(world.Dup(), timeout=LIMIT)
    part = mpicoll.Comm(halves.Dup(), timeout=LIMIT)

    def in_part() -> None:
        if part.rank == 0 and part.size > 1:
            time.sleep(LIMIT + ASK + 1)
        else:
            part.Barrier()

    meet(world)
    seen.trial(in_part, case="part", of=part.rank, size=part.size)
    meet(world)
    seen.trial(lambda: comm.Barrier(timeout=60), case="whole", after=True)
    seen.say(end=True)


def raises(seen: Seen) -> None:
    """Raise in an operator that mpi4py made: its own abort ends the job."""

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    comm = mpicoll.Comm(MPI.COMM_WORLD)
    seen.say(begun=True)
    seen.keep_errors()
    comm.Allreduce(d(3), d(3), op=MPI.Op.Create(fail, commute=True))
    seen.say(end=True)


def finalizes(seen: Seen, thread: bool) -> None:
    """Use everything, leave much of it as it is, finalise, and count what is left."""
    requests: list[Any] = []
    comms: list[MPI.Comm] = []
    types: list[MPI.Datatype] = []
    post, init, own = Execution._post, link.Link.__init__, buffers.Buffer.own_datatypes

    def posted(execution: Execution) -> None:
        post(execution)
        requests.extend(execution._requests or [])

    def made(new: link.Link, *args: Any) -> None:
        init(new, *args)
        comms.append(new.hidden)

    def owned(buffer: buffers.Buffer) -> list[MPI.Datatype]:
        found = own(buffer)
        types.extend(found)
        return found

    Execution._post = posted  # type: ignore[method-assign]
    link.Link.__init__ = made  # type: ignore[method-assign]
    buffers.Buffer.own_datatypes = owned  # type: ignore[method-assign]
    world = mpicoll.Comm(MPI.COMM_WORLD, progress="thread" if thread else None)
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for comm in (
        world,
        world.Dup(),
        world.Split(world.rank % 2),
        mpicoll.Comm(world.Dup(), check=True),
    ):
        for name in METHODS:
            for form in FORMS:
                call(comm, name, form, SMALL)
        comm.Ibcast([d(4), 1, vector]).Wait()
    freed = world.Dup()
    dropped = freed.Iallgather([d(4), 1, vector], d(2 * world.size))
    freed.Free()
    del dropped
    kept = [world.Ibcast([d(4), 1, vector]) for _ in range(5)]
    plan = world.Allreduce_init(d(3), d(3))
    plan.Start()
    world.Iallreduce(d(3), d(3))  # dropped
    vector.Free()
    MPI.Finalize()
    seen.say(
        end=True,
        seen=[len(requests), len(comms), len(types)],
        comms=sum(comm != MPI.COMM_NULL for comm in comms),
        types=sum(one != MPI.DATATYPE_NULL for one in types),
        requests=sum(
            one != MPI.REQUEST_NULL for one in requests if not isinstance(one, MPI.Prequest)
        ),
        done=all(one._operation.done for one in [*kept, plan]),
    )


SCENES: dict[str, Callable[..., None]] = {
    "stops": stops,
    "ends": ends,
    "disagree": disagree,
    "elsewhere": elsewhere,
    "raises": raises,
    "finalizes": finalizes,
}


def main(folder: str, scene: str, arguments: str = "{}") -> None:
    """Run a scene."""
    watchdog.ASK_SECONDS = ASK
    SCENES[scene](Seen(Path(folder)), **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
