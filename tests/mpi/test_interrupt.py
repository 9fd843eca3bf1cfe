"""A call that is interrupted anywhere once it has its plan, or is out of memory.

Nobody waits for ever, and the next call on the communicator is right on every rank. Every
place of the runtime where CPython looks for signals is tried in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest
from breaking import FORMS
from interrupting import PLANNING, Interrupted, Interrupts
from mpi4py import MPI

import mpicoll
from mpicoll import Comm, MismatchError, PeerError
from mpicoll.algorithms import find
from mpicoll.runtime import link as links
from mpicoll.runtime import scratch
from mpicoll.runtime.plan import Plan
from mpicoll.runtime.record import Record
from mpicoll.schedule.ir import Call

if TYPE_CHECKING:
    from harness import Ranks

NOWHERE = 1 << 30
FILES = {
    *("executor.py", "link.py", "persistent.py", "plan.py", "progress.py", "requests.py"),
    "scratch.py",
}
#: Where a call is made into a plan; of base.py what is called there.
PLANNERS = {
    *("buffers.py", "datatypes.py", "opened.py", "operators.py", "plan.py", "products.py"),
    *(f"../collectives/{name}.py" for name in ("base", "movement", "reductions", "sides")),
    *("../selection/choose.py", "../selection/model.py"),
}
CASES = ("doubling", "ring", "mean", "packed", "alltoall", "uneven")


class Collective(NamedTuple):
    """A call, the output that it has before, and the right one after it."""

    name: str
    arguments: list[Any]
    options: dict[str, Any]
    out: npt.NDArray[np.float64]
    before: npt.NDArray[np.float64]
    after: npt.NDArray[np.float64]

    def clear(self) -> None:
        self.out[:] = self.before

    def is_right(self) -> bool:
        return bool((self.out == self.after).all())

    def once_more(self) -> Collective:
        """Return a call with the same output and, where that is not the input, other input."""
        if self.name == "Bcast":
            return self
        arguments = [2.0 * self.arguments[0], *self.arguments[1:]]
        return self._replace(arguments=arguments, after=2.0 * self.after)

    def prepare(self, comm: Comm) -> Any:
        """Return a persistent request."""
        return getattr(comm, f"{self.name}_init")(*self.arguments, **self.options)

    def run(self, comm: Comm, form: str, persistent: Any, requests: list[Any]) -> None:
        """Run to the end; note the request that is waited for, and that it was started."""
        if form == "blocking":
            getattr(comm, self.name)(*self.arguments, **self.options)
            return
        if form == "persistent":
            requests.append(persistent)
            persistent.Start()
            requests.append("started")
        else:
            method = getattr(comm, f"I{self.name.lower()}")
            requests.append(method(*self.arguments, **self.options))
        requests[0].Wait()


def collective(case: str, comm: Comm) -> Collective:
    rank, size = comm.rank, comm.size
    if case == "packed":  # into every other item
        kind = MPI.DOUBLE.Create_vector(size, 1, 2).Commit()
        after = np.tile([5.0, -7.0], size)
        before = np.full(2 * size, -7.0) if rank else after
        out = before.copy()
        return Collective("Bcast", [[out, 1, kind], 0], {}, out, before, after)
    if case == "alltoall":
        out = np.empty(size)
        inputs, after = np.full(size, rank + 1.0), np.arange(size) + 1.0
        return Collective("Alltoall", [inputs, out], {}, out, np.full(size, -7.0), after)
    if case == "uneven":  # the ranks agree on the counts first
        counts = np.arange(size) + 1
        after = np.repeat(counts * 1.0, counts) if rank == 0 else np.empty(0)
        out = np.empty_like(after)
        arguments = [np.full(rank + 1, rank + 1.0), [out, counts.tolist()] if rank == 0 else None]
        return Collective("Gatherv", arguments, {}, out, np.full_like(after, -7.0), after)
    n = 2 * size + 1
    out, after = np.empty(n), size * np.arange(n) + size * (size + 1) / 2
    options: dict[str, Any] = {"algorithm": "ring"} if case == "ring" else {}
    if case == "doubling":
        options["algorithm"] = "recursive_doubling"
    if case == "mean":
        options["op"], after = mpicoll.AVG, after / size
    inputs = np.arange(n) + rank + 1.0
    return Collective("Allreduce", [inputs, out], options, out, np.full(n, -7.0), after)


@pytest.fixture(params=[None, 60.0], ids=["plain", "limit"])
def comm(request: pytest.FixtureRequest, world: Comm) -> Iterator[Comm]:
    """A communicator on which a call waits inside MPI, and one on which it is driven."""
    made = Comm(MPI.Intracomm(world).Dup(), timeout=request.param)
    yield made
    made.Free()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_an_interrupt_at_every_place(
    form: str, case: str, comm: Comm, ranks: Ranks, full: bool
) -> None:
    """It is raised; the others get a right result or PeerError, and so does the next call.

    On more than two ranks, where each takes longer, some of the places unless ``--full``.
    """
    step = 1 if full or ranks.size <= 2 else 3 * ranks.size
    if form == "blocking":
        begin = {"run"} if comm._link.plain else {"wait"}
    else:
        begin = {"Start", "launch", "wait"}
    found = collective(case, comm)
    for victim in sorted({0, ranks.size - 1}):
        persistent = found.prepare(comm) if form == "persistent" else None
        place = ranks.seed % step
        while _interrupted(place, found, form, persistent, begin, comm, ranks, victim):
            place += step
        assert place > 3
        if persistent is not None:
            persistent.Free()


def _interrupted(
    place: int,
    found: Collective,
    form: str,
    persistent: Any,
    begin: set[str],
    comm: Comm,
    ranks: Ranks,
    victim: int,
    files: set[str] = FILES,
    planning: set[str] = PLANNING,
) -> bool:
    """Interrupt a call at a place, and run another; return whether the place was reached."""
    mine = ranks.rank == victim
    requests: list[Any] = []
    error: Exception | None = None
    found.clear()
    with Interrupts(place if mine else NOWHERE, files, begin, planning) as interrupts:
        try:
            found.run(comm, form, persistent, requests)
        except (Interrupted, PeerError, MismatchError) as caught:
            error = caught
    whole = error is None
    if requests == [persistent] and persistent._operation is None:
        persistent.Start()  # nothing was begun
    if isinstance(error, Interrupted) and requests and requests[0]._operation is not None:
        requests[0].Wait()  # it goes on
        whole = True
    right = found.is_right()
    # One that was left has its buffers until the next call, which has the same output here.
    other = found.once_more()
    other.run(comm, "blocking", None, [])
    assert other.is_right(), interrupts.where
    assert right or not whole, (place, interrupts.where)
    if mine:
        assert isinstance(error, Interrupted) == interrupts.hit, (interrupts.where, error)
    else:
        assert not isinstance(error, Interrupted)
    hits: list[bool] = ranks.comm.allgather(interrupts.hit)
    ranks.comm.Barrier()
    return hits[victim]


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["blocking", "non-blocking"])
def test_an_interrupt_of_the_planner(
    form: str, case: str, check: bool, comm: Comm, ranks: Ranks, full: bool
) -> None:
    """A call that has no plan yet keeps nobody waiting either."""
    step = 3 * ranks.size if ranks.size > 2 and not full else 1
    used = Comm(MPI.Intracomm(comm).Dup(), timeout=60, check=True) if check else comm
    found = collective(case, used)
    victim = ranks.size - 1
    place = ranks.seed % step
    between = {"_agree", "tag"}  # the rounds of an agreement
    arguments = (found, form, None, {"plan"}, used, ranks, victim, PLANNERS, between)
    while _interrupted(place, *arguments):  # type: ignore[arg-type]
        place += step
    assert place > 3
    if check:
        used.Free()


@pytest.mark.parametrize("case", ["ring", "uneven"])
def test_an_interrupt_of_a_plan_that_is_made(case: str, comm: Comm, ranks: Ranks) -> None:
    """The plans that are made after it have the same tags on all ranks."""
    found = collective(case, comm)
    files = {"flight.py", "link.py", "opened.py", "plan.py", "progress.py", "record.py", "tags.py"}
    between = {"_agree", "exchange", "_bound", "tag"}  # the rounds of an agreement
    place, hit = 0, True
    step = 3 * ranks.size if ranks.size > 2 else 1
    while hit:
        plan, error = None, None
        begin = {"next_sequence"} if comm.rank == comm.size - 1 else set()
        with Interrupts(place, files, begin, between) as interrupts:
            try:
                plan = found.prepare(comm)
            except Interrupted as caught:
                error = caught
        assert (error is not None) == interrupts.hit, interrupts.where
        twice = [found.prepare(comm) for _ in range(2)]
        found.clear()
        for one in reversed(twice):
            one.Start()
        for one in twice:
            one.Wait()
            one.Free()
        assert found.is_right(), interrupts.where
        if plan is not None:
            plan.Free()
        hit = any(ranks.comm.allgather(interrupts.hit))
        place += step
    assert place > 2


@pytest.mark.parametrize("frees", [False, True], ids=["goes on", "frees"])
@pytest.mark.parametrize(("slots", "first", "at"), [(4, 0, 5), (4, 1, 5), (8, 1, 9), (8, 1, 10)])
def test_an_interrupt_between_two_calls(
    slots: int, first: int, at: int, frees: bool, world: Comm, ranks: Ranks, full: bool
) -> None:
    """A rank that is kept from a call still does its part in the turns of the tags.

    What was sent to it is thrown away before its tag comes round. A turn is at the beginning of
    a quarter of the slots, so of any call here or of every second one.
    """
    victim = ranks.size - 1
    step = 3 * ranks.size if ranks.size > 2 and not full else 1
    place, hit = ranks.seed % step, True
    files = {"link.py", "progress.py", "tags.py"}
    while hit:
        comm = Comm(MPI.Intracomm(world).Dup(), timeout=60)
        comm._link.tags.divide(slots)
        out = np.empty(comm.size)
        for _ in range(first):
            comm.Barrier()
        for number in range(3 * slots):
            turn = number == at
            data = np.full(3, float(number))
            error: BaseException | None = None
            begin = {"next_sequence"} if turn and comm.rank == victim else set()
            with Interrupts(place, files, begin) as interrupts:
                try:
                    comm.Bcast(data, algorithm="binomial")  # whose last rank sends nothing
                except Interrupted as caught:
                    error = caught
            assert (error is not None) == interrupts.hit
            assert comm.rank or (data == number).all()
            if turn:
                hit = any(ranks.comm.allgather(interrupts.hit))
                if frees:
                    break
            comm.Allgather(np.array([float(number + comm.rank)]), out)
            assert (out == np.arange(comm.size) + number).all()
        assert frees or not comm._link.hidden.Iprobe()
        comm.Free()
        place += step
    assert place > 2


# -- out of memory ---------------------------------------------------------------------------


class NoMemory:
    """NumPy for a module whose allocations fail."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, size: int, *args: Any) -> Any:
        if size:
            raise MemoryError("no memory for scratch")
        return np.empty(size, *args)


@pytest.mark.parametrize("n", [1, 1 << 17])
@pytest.mark.parametrize("algorithm", ["recursive_doubling", "ring", "reduce_bcast"])
@pytest.mark.parametrize("form", FORMS)
def test_no_memory_for_scratch(
    form: str, algorithm: str, n: int, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank raises MemoryError, those that depend on it PeerError, and all go on."""
    inputs, out = np.full(n, comm.rank + 1.0), np.full(n, -7.0)
    total = comm.size * (comm.size + 1) / 2
    found = Collective("Allreduce", [inputs, out], {"algorithm": algorithm}, out, out, out)
    build = find("allreduce", algorithm).build
    needs = [build(Call(rank, comm.size, (n,))).work > 0 for rank in range(comm.size)]
    victim = needs.index(True) if True in needs else 0
    with monkeypatch.context() as patched:
        if comm.rank == victim:
            patched.setattr(scratch, "np", NoMemory())
            patched.setattr(links, "np", NoMemory())
        persistent = found.prepare(comm) if form == "persistent" else None
        # A persistent plan is set up once, and each of its runs fails alike.
        for _ in range(2):
            out[:] = -7.0
            error = _raised(found, comm, form, persistent)
            assert type(error) in (type(None), MemoryError, PeerError)
            assert error is not None or (out == total).all()
            names = MPI.Intracomm(comm).allgather(type(error).__name__)
            if n > 1 and comm.size > 1:
                assert names.count("PeerError") == comm.size - 1
                assert names[victim] == "MemoryError"
    if persistent is not None:
        persistent.Free()
    comm.Allreduce(inputs, out, algorithm=algorithm)
    assert (out == total).all()


def _raised(found: Collective, comm: Comm, form: str, persistent: Any) -> Exception | None:
    try:
        found.run(comm, form, persistent, [])
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("form", FORMS)
def test_a_result_that_can_not_be_unpacked(
    form: str, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank raises what there was, the others have their result."""
    last = comm.size - 1

    def finish(self: Plan) -> None:
        raise MemoryError("no memory to unpack")

    found = collective("packed", comm)
    persistent = found.prepare(comm) if form == "persistent" else None
    found.clear()
    with monkeypatch.context() as patched:
        if comm.rank == last:
            patched.setattr(Plan, "finish", finish)
        error = _raised(found, comm, form, persistent)
    if comm.rank == last:
        assert isinstance(error, MemoryError), repr(error)
    else:
        assert error is None
        assert found.is_right()
    found.clear()
    found.run(comm, form, persistent, [])
    assert found.is_right()
    if persistent is not None:
        persistent.Free()


def test_no_memory_for_an_agreement(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checked call asks first fails alike."""
    checked = Comm(MPI.Intracomm(comm).Dup(), check=True)
    found = collective("ring", comm)
    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(scratch, "np", NoMemory())
        error = _raised(found, checked, "blocking", None)
    if comm.size > 1:
        assert isinstance(error, PeerError if comm.rank else MemoryError), repr(error)
    found.run(checked, "blocking", None, [])
    assert found.is_right()
    checked.Free()


# -- what is kept of a call ------------------------------------------------------------------


class Events:
    """A tracer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Record] = []

    def add(self, record: Record) -> None:
        self.calls.append(record)

    def waited(self, record: Record, start: float, end: float) -> None:
        assert start <= end


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupted_call_is_one_event(form: str, comm: Comm, ranks: Ranks, full: bool) -> None:
    """It is traced and counted once, with each of its steps."""
    step = 1 if full or ranks.size <= 2 else 3 * ranks.size
    events = Events()
    comm._link.tracer = cast(Any, events)
    found = collective("doubling", comm)
    persistent = found.prepare(comm) if form == "persistent" else None
    begin = {"launch", "run", "wait"}
    files = FILES - {"link.py"}  # where the event itself is made
    place = ranks.seed % step
    while True:
        comm.stats.reset()
        events.calls.clear()
        if not _interrupted(place, found, form, persistent, begin, comm, ranks, 0, files):
            break
        place += step
        if form == "blocking":
            comm.Barrier()
        first = events.calls[0]
        assert comm.stats["allreduce", "recursive_doubling"].calls <= 2
        assert len({id(one) for one in events.calls}) == len(events.calls)
        if form == "blocking":
            assert [one.collective for one in events.calls] == [
                "allreduce",
                "allreduce",
                "barrier",
            ]
        for one in events.calls:
            assert one.end >= one.start
            assert [stage.step for stage in one.stages] == list(range(1, one.step + 1)), first
    if persistent is not None:
        persistent.Free()


def test_a_trace_of_checked_calls(comm: Comm) -> None:
    """The steps of what the ranks agree on first are in the event, before those of the call."""
    checked = Comm(MPI.Intracomm(comm).Dup(), check=True)
    events = Events()
    checked._link.tracer = cast(Any, events)
    found = collective("ring", comm)
    found.run(checked, "blocking", None, [])
    assert found.is_right()
    (event,) = events.calls
    assert len(event.stages) > event.step or comm.size == 1
    checked.Free()
