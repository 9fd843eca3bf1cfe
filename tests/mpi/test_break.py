"""Ranks that stop, are killed, or disagree: each ends as documented, inside a stated time.

The jobs are started where the tests run on one rank, some at a time, since they mostly wait;
breaking.py says what runs in them. A job that does not end within `BOUND` is ended, and fails
its test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from breaking import ASK, DISAGREE, FORMS, LARGE, LIMIT, METHODS, SMALL
from childjob import environment, mpiexec
from mpi4py import MPI

import mpicoll
from mpicoll import Comm, PeerError
from mpicoll.algorithms import Algorithm, every
from mpicoll.runtime import watchdog
from mpicoll.runtime.executor import Execution
from mpicoll.runtime.plan import Plan
from mpicoll.schedule.contracts import REDUCTIONS

if TYPE_CHECKING:
    from harness import Ranks

ALONE = MPI.COMM_WORLD.size == 1
HERE = Path(__file__).parent
#: Seconds in which a job of one case has to end: what the ranks may take from the start of
#: their time limit to the end of the process, and as much again for a machine that is busy.
BOUND = 2 * (LIMIT + ASK + watchdog.GIVE_UP_SECONDS + watchdog.LEAVE_SECONDS + 15)
#: Seconds of one case among many.
CASE = LIMIT + ASK + 10
JOBS = 3  #: that run at a time

Line = dict[str, Any]


class Ended(NamedTuple):
    """How a job ended: its status, what its ranks saw, and what it wrote."""

    status: int
    lines: list[Line]
    err: str

    def of(self, **about: Any) -> list[Line]:
        """Return the lines that have these values."""
        return [
            one
            for one in self.lines
            if all(key in one and one[key] == value for key, value in about.items())
        ]


def job(
    folder: Path,
    size: int,
    scene: str,
    arguments: dict[str, Any] | None = None,
    limit: float = BOUND,
    options: tuple[str, ...] = (),
    **variables: str,
) -> Ended:
    """Run a scene of breaking.py on ``size`` ranks; TimeoutExpired if it does not end."""
    folder.mkdir()
    program, *rest = mpiexec(size)
    script = [sys.executable, str(HERE / "breaking.py"), str(folder), scene]
    process = subprocess.Popen(
        [program, *options, *rest, *script, json.dumps(arguments or {})],
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        _, err = process.communicate(timeout=limit)
    finally:
        _end(process, folder)
    lines = [
        json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open("rb")
    ]
    kept = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("err-*")))
    return Ended(process.returncode, lines, err + kept)


def _end(process: subprocess.Popen[str], folder: Path) -> None:
    """End what is left of a job: launcher and ranks, stopped ones too."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for file in folder.glob("pid-*"):
        pid = int(file.read_text())
        with contextlib.suppress(OSError):  # a number may belong to somebody else by now
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks
) -> Iterator[dict[str, Future[Any]]]:
    """The jobs of the tests that were chosen, all under way."""
    if not ALONE:
        yield {}
        return
    folder = tmp_path_factory.mktemp("break")
    full = bool(request.config.getoption("full", False))
    wanted = {
        item.callspec.params.get("name") if hasattr(item, "callspec") else "raises"
        for item in request.session.items
        if item.path == Path(__file__)
    }
    # With all cases the many ranks of one job leave no core to another.
    with ThreadPoolExecutor(1 if full else JOBS) as pool:
        yield {
            name: pool.submit(run, folder / name.replace(" ", "-"), **options)
            for name, (run, options) in _wanted(full, ranks.seed).items()
            if any(f"{name} ".startswith(f"{one} ") for one in wanted)
        }


def killed(folder: Path, size: int, steps: list[int], case: dict[str, Any]) -> list[Ended]:
    """Kill a rank before one step, in a job for each of the ``steps`` that the call has."""
    folder.mkdir()
    # The launcher of MPICH lets the others live, if it is asked to.
    options = ("-disable-auto-cleanup",) if HYDRA else ()
    found: list[Ended] = []
    for step in steps:
        arguments = {**case, "step": step, "kill": True}
        found.append(job(folder / str(step), size, "ends", arguments, options=options))
        if len(found[-1].of(end=True)) == size:  # nobody was killed, since there is no such step
            break
    return found


def _wanted(full: bool, seed: int) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return what runs each of the jobs, and with what, in the order of the tests."""
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}

    def add(name: str, size: int, arguments: Any = None, **more: Any) -> None:
        scene = name.split()[0]
        found[name] = job, {"size": size, "scene": scene, "arguments": arguments, **more}

    for size, most in STOPS:
        world = _ranks(size, full)
        limit = 86400.0 if full else 60 + CASE * most * size / world
        cases = {"size": size, "seed": seed, "most": 0 if full else most}
        add(f"stops {size}", world, cases, limit=limit)
    for size in SIZES:
        for number, name in enumerate(METHODS):
            case = {
                "name": name,
                "form": FORMS[(number + size // 2) % len(FORMS)],
                "n": (SMALL, LARGE)[(number + size // 4) % 2],
                "victim": (number + seed) % size,
            }
            if full or number == (seed + size) % len(METHODS):
                steps = [*range(1000)] if full else [seed // size % 2]
                arguments = {"size": size, "steps": steps, "case": case}
                found[f"kills {size} {name}"] = killed, arguments
    for size, kill, alone in ENDS:
        # Rank 1 is in the middle of a call that all depend on.
        case = {"name": "Allreduce", "form": "blocking", "n": 3, "victim": 1, "step": 1}
        options = ("-disable-auto-cleanup",) if alone and HYDRA else ()
        add(f"ends {size} {kill} {alone}", size, {**case, "kill": kill}, options=options)
    for scene in ("disagree", "elsewhere"):
        for size in SIZES:
            add(f"{scene} {size}", size, limit=BOUND + 20 * CASE)
    add("raises", 3)
    for thread in (False, True):
        add(f"finalizes {thread}", 3, {"thread": thread})
    return found


SIZES = (2, 4, 8)
#: Ranks of a group, and how many of the cases are tried, unless all are.
STOPS = ((2, 28), (4, 16), (8, 8))
#: Number of ranks, whether one is killed or stopped, and whether the launcher is asked to let
#: it pass, which that of MPICH does at times.
ENDS = [(2, False, False), (8, False, False), (2, True, False), (4, True, True)]
HYDRA = MPI.get_vendor()[0] in ("MPICH", "Intel MPI")


def _ranks(size: int, full: bool) -> int:
    """Return how many ranks go through cases in groups of ``size``; they mostly wait."""
    return 4 * size if full else 8


@pytest.mark.parametrize("name", [f"stops {size}" for size, _ in STOPS])
def test_a_rank_that_stops(jobs: dict[str, Future[Ended]], name: str, full: bool) -> None:
    """Every other rank gets CollectiveTimeout that names it, and other communicators work."""
    if not ALONE:
        return
    done = jobs[name].result()
    assert len(done.of(end=True)) == _ranks(int(name.split()[1]), full), done.err
    assert done.status != 0  # a communicator was poisoned, so the job ends by Abort
    cases = done.of(after=True)
    assert len(cases) >= int(name.split()[1])
    for line in cases:
        assert line["error"] == "PoisonedError", line
        assert "this communicator can not be used any more" in line["text"], line
    for line in done.of(stops=False):
        assert line["timeout"], line
        assert line["error"] == "PoisonedError" or line["silent"] == [line["victim"]], line
        assert line["seconds"] < CASE, line
    for case in {line["case"] for line in cases}:
        assert done.of(case=case, error="CollectiveTimeout", stops=False), case


@pytest.mark.parametrize("name", [" ".join(map(str, ("ends", *one))) for one in ENDS])
def test_a_rank_that_does_not_come_back(jobs: dict[str, Future[Ended]], name: str) -> None:
    """The job ends, though one rank stays stopped; a launcher may end it before we do."""
    if not ALONE:
        return
    size, kill, _ = name.split()[1:]
    done = jobs[name].result()
    assert done.status != 0
    live = done.of(stops=False)
    # A launcher may kill the others of one that was killed, some of them sooner than others.
    assert kill == "True" or len(live) == int(size) - 1, done
    assert any(line["error"] == "CollectiveTimeout" for line in live) or not live, done
    for line in live:
        if line["error"] == "PoisonedError":
            continue  # it was late, and heard of the others' time-out
        assert line["error"] == "CollectiveTimeout", line
        assert line["silent"] == [1] or (kill == "True" and 1 in line["silent"]), line
        assert "not heard from: rank" in line["text"]
        assert "it waits for rank" in line["text"]


@pytest.mark.parametrize("name", [f"kills {size}" for size in SIZES])
def test_a_rank_that_is_killed(
    jobs: dict[str, Future[list[Ended]]], name: str, full: bool
) -> None:
    """Before any step of any method the job ends; who lives long enough is told who is missing."""
    if not ALONE:
        return
    of_methods = {key: one.result() for key, one in jobs.items() if key.startswith(f"{name} ")}
    assert len(of_methods) == (len(METHODS) if full else 1)
    for key, done in of_methods.items():
        if full:
            *done, whole = done
            assert {line["error"] for line in whole.of(stops=False)} == {""}
        assert done, key
        for one in done:
            assert one.status != 0, (key, one)
            for line in one.of(stops=False):
                assert line["timeout"], (key, line)
                # One that was late hears of the others' time-out.
                told = line["victim"] in line["silent"] or line["error"] == "PoisonedError"
                assert told, (key, line)
                assert line["seconds"] < CASE, line


@pytest.mark.parametrize("name", [f"disagree {size}" for size in SIZES])
def test_ranks_that_disagree(jobs: dict[str, Future[Ended]], name: str) -> None:
    """Unchecked, the one or the other raises or runs into its limit; nobody waits for ever."""
    if not ALONE:
        return
    done = jobs[name].result()
    size = int(name.split()[1])
    assert len(done.of(end=True)) == size, done.err
    for case in DISAGREE:
        lines = done.of(case=case)
        assert len(lines) == size
        for line in lines:
            known = line["timeout"] or line["error"] in KNOWN
            assert known or line["error"] == "", line
            assert line["seconds"] < CASE, line
        if case != "roots":  # a root may be done before anybody has received anything
            assert any(line["error"] for line in lines), case
        for line in lines:
            if line["error"] in ("ShortMessageError", "CallError"):
                assert "the ranks disagree on count or datatype" in line["text"], line
    said = " ".join(line["text"] for line in done.of(case="order of calls"))
    assert "in alltoall #1 instead" in said


#: What a rank may raise where its messages do not fit.
KNOWN = ("ShortMessageError", "PeerError", "CallError", "Exception")


@pytest.mark.parametrize("name", [f"elsewhere {size}" for size in SIZES])
def test_what_is_said_of_the_others(jobs: dict[str, Future[Ended]], name: str) -> None:
    if not ALONE:
        return
    done = jobs[name].result()
    size = int(name.split()[1])
    last = size - 1
    assert len(done.of(end=True)) == size, done.err
    for case in ("own code", "one call", "many requests", "asked for status"):
        for line in done.of(case=case, last=False):
            assert (line["error"], line["silent"]) == ("CollectiveTimeout", [last]), line
            assert f"\n  not heard from: rank {last}\n" in line["text"]
            assert line["seconds"] < CASE, line
        assert done.of(case=case, last=True)[0]["error"] == ""
    for line in done.of(case="no limit", last=False):
        assert line["error"] == "PoisonedError", line
    together = [line for line in done.of(case="two at once") if "after" not in line]
    assert {line["error"] for line in together} == {"CollectiveTimeout"}
    # Whoever asks first is answered, and may have left before it is asked itself.
    assert any(line["silent"] == [] for line in together), together
    for line in done.of(case="another communicator", last=False):
        assert (line["error"], line["silent"]) == ("CollectiveTimeout", []), line
        assert f"all ranks answered\n  rank {last}: in barrier on another communicator" in (
            line["text"] if size == 2 else line["text"].replace(_others(line["text"], last), "")
        )
    for line in done.of(after=True):
        if line["case"] != "whole":
            assert line["error"] == "PoisonedError", line
            assert "can not be used any more" in line["text"], line
    (part,) = [line for line in done.of(case="part", size=2) if line["of"] == 1][:1]
    assert part["error"] == "CollectiveTimeout", part
    assert all(line["error"] == "" for line in done.of(case="whole"))


def _others(text: str, last: int) -> str:
    """Return what is said of the ranks before the last, after "all ranks answered"."""
    _, _, rest = text.partition("all ranks answered\n  ")
    return rest.partition(f"rank {last}: ")[0]


def test_an_operator_of_mpi4py_that_raises(jobs: dict[str, Future[Ended]]) -> None:
    """It ends the job, as it does in a collective of the MPI's own; see mpicoll.create_op."""
    if not ALONE:
        return
    done = jobs["raises"].result()
    assert done.status != 0
    assert len(done.of(begun=True)) == 3
    assert "ValueError: boom" in done.err


@pytest.mark.parametrize("name", ["finalizes False", "finalizes True"])
def test_nothing_is_left_at_finalize(jobs: dict[str, Future[Ended]], name: str) -> None:
    """All requests, datatypes and communicators are given back, also of dropped requests."""
    if not ALONE:
        return
    done = jobs[name].result()
    assert done.status == 0, done.err
    lines = done.of(end=True)
    assert len(lines) == 3
    for line in lines:
        assert (line["comms"], line["types"], line["requests"]) == (0, 0, 0), line
        assert line["done"]
        assert min(line["seen"]) > 0


# -- errors and interrupts in the job itself -------------------------------------------------


class Boom(Exception):
    """What an operator raises."""


ALGORITHMS = [one for one in every() if one.collective in REDUCTIONS]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: f"{one.collective}-{one.name}")
def test_an_operator_that_raises(algorithm: Algorithm, form: str, world: Comm) -> None:
    """It raises on one rank; those whose results depend on that get PeerError, no wrong result."""
    name = algorithm.collective.capitalize()
    victim = world.size // 2
    fails = [0]

    def add(left: Any, inout: Any, datatype: MPI.Datatype) -> None:
        if fails and world.rank == victim:
            fails[0] += 1
            raise Boom("no")
        np.frombuffer(inout)[:] += np.frombuffer(left)

    op = mpicoll.create_op(add, commute=True)
    n = 4 * world.size
    for broken in (True, False):
        if not broken:
            fails.clear()
        inputs, out = np.full(n, world.rank + 1.0), np.full(n, -7.0)
        result = out[:4] if name == "Reduce_scatter" else out
        sides: list[Any] = [inputs, result]
        if name == "Reduce_scatter":
            sides.append([4] * world.size)
        error = None
        try:
            _in_form(world, name, form, sides, op=op, algorithm=algorithm.name)
        except Exception as caught:
            error = caught
        if broken and world.rank == victim and fails[0]:
            assert isinstance(error, Boom), repr(error)
            assert fails == [1]
        elif error is not None:
            assert broken
            assert isinstance(error, PeerError), repr(error)
            assert f"{name if form == 'blocking' else ''}" in str(error)
        else:
            assert (result == _expected(name, world)).all()
        assert MPI.Intracomm(world).allreduce(error is not None, MPI.LOR) == (
            broken and MPI.Intracomm(world).allreduce(bool(fails and fails[0]), MPI.LOR)
        )
    op.Free()


def _in_form(comm: Any, name: str, form: str, sides: list[Any], **options: Any) -> None:
    if form == "blocking":
        getattr(comm, name)(*sides, **options)
        return
    if form == "non-blocking":
        getattr(comm, f"I{name.lower()}")(*sides, **options).Wait()
        return
    plan = getattr(comm, f"{name}_init")(*sides, **options)
    plan.Start()
    try:
        plan.Wait()
    finally:
        plan.Free()


def _expected(name: str, comm: Any) -> float:
    """Return the sum that a rank gets; -7 where its buffer is not written."""
    rank, size = comm.rank, comm.size
    if name == "Scan":
        return (rank + 1) * (rank + 2) / 2
    if name == "Exscan":
        return rank * (rank + 1) / 2 if rank else -7
    return size * (size + 1) / 2 if name != "Reduce" or rank == 0 else -7


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_an_input_that_can_not_be_packed(
    kind: type[BaseException], form: str, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank raises what there was, the others get PeerError, and all go on."""

    def load(self: Plan) -> None:
        raise kind("no")

    data, out = np.ones(world.size), np.full(world.size, -7.0)
    with monkeypatch.context() as patched:
        if world.rank == world.size - 1:
            patched.setattr(Plan, "load", load)
        with pytest.raises(kind if world.rank == world.size - 1 else PeerError):
            _in_form(world, "Alltoall", form, [data, out])
    _in_form(world, "Alltoall", form, [data, out])
    assert (out == 1).all()


class Alarm(Exception):
    """What a handler of signals raises, such as that of a test runner's time limit."""


class Interrupt(NamedTuple):
    """How this process is interrupted soon, or soon after it begins a step; what is raised."""

    begin: Callable[[], None]
    in_step: Callable[[], None]
    kind: type[BaseException]


@pytest.fixture(params=["SIGINT", "SIGALRM"])
def interrupt(request: pytest.FixtureRequest) -> Iterator[Interrupt]:
    """Whatever the parent of this process made of the signal."""

    def alarm(number: int, frame: object) -> None:
        raise Alarm

    number = signal.Signals[request.param]
    found = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: Alarm}[number]
    before = signal.signal(
        number, signal.default_int_handler if number == signal.SIGINT else alarm
    )
    post = Execution._post

    def begin() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()

    def in_step() -> None:
        Execution._post = posted  # type: ignore[method-assign]

    def posted(execution: Execution) -> None:
        # From here on it waits for the others, however busy the machine is.
        post(execution)
        Execution._post = post  # type: ignore[method-assign]
        begin()

    yield Interrupt(begin, in_step, found)
    Execution._post = post  # type: ignore[method-assign]
    signal.signal(number, before)


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupt_of_a_wait_that_is_driven(
    form: str, world: Comm, ranks: Ranks, interrupt: Interrupt
) -> None:
    """The collective goes on, and any later call completes it."""
    comm = Comm(MPI.Intracomm(world).Dup(), timeout=60)
    out = np.full(3, -7.0)
    plan = comm.Allreduce_init(np.ones(3), out) if form == "persistent" else None
    request: Any = None
    if ranks.rank == 0 and ranks.size > 1:
        if form == "non-blocking":
            request = comm.Iallreduce(np.ones(3), out)
        elif plan is not None:
            plan.Start()
            request = plan
        if request is None:
            interrupt.in_step()
            with pytest.raises(interrupt.kind):
                comm.Allreduce(np.ones(3), out)
        else:
            interrupt.begin()
            with pytest.raises(interrupt.kind):
                request.Wait()
        ranks.comm.Barrier()
        if request is not None:
            request.Wait()
    else:
        ranks.comm.Barrier()
        if plan is not None:
            plan.Start()
            plan.Wait()
        else:
            comm.Allreduce(np.ones(3), out)
    comm.Barrier()
    assert out.tolist() == [comm.size] * 3
    if plan is not None:
        plan.Free()
    comm.Free()


@pytest.mark.parametrize("form", ["blocking", "non-blocking"])
def test_an_interrupt_of_a_wait_inside_the_mpi(
    form: str, world: Comm, ranks: Ranks, interrupt: Interrupt
) -> None:
    """It comes when the others have come; they get PeerError or a right result."""
    if ranks.size == 1:
        return
    out = np.full(3, -7.0)
    error: BaseException | None = None
    if ranks.rank == 0:
        interrupt.in_step()
    else:
        time.sleep(1)
    try:
        _in_form(world, "Allreduce", form, [np.ones(3), out])
    except BaseException as caught:
        error = caught
    if ranks.rank == 0:
        assert isinstance(error, interrupt.kind), repr(error)
    elif error is None:
        assert out.tolist() == [world.size] * 3
    else:
        assert isinstance(error, PeerError), repr(error)
    # A request that was not waited for to its end still owns its buffer; a call has ended.
    again = out if form == "blocking" else np.full(3, -7.0)
    world.Allreduce(np.ones(3), again)
    assert again.tolist() == [world.size] * 3
