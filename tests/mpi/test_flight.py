"""The flight recorder on ranks: what calls leave behind, and who is found in a job that hangs.

The jobs are started where the tests run on one rank.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from childjob import Ended, run_job
from mpi4py import MPI

import mpicoll
from mpicoll import Comm, PeerError
from mpicoll.cli.flight_dumps import parse
from mpicoll.cli.main import run
from mpicoll.runtime import watchdog
from mpicoll.runtime.flight import FINALIZE, RECORDER
from mpicoll.runtime.record import Record

ALONE = MPI.COMM_WORLD.size == 1


def test_a_call_is_recorded(world: Comm, tmp_path: Path) -> None:
    world.Allreduce(np.ones(5, np.float32), np.empty(5, np.float32), algorithm="ring")
    path = RECORDER.dump(str(tmp_path), "a test")
    assert path is not None
    assert path.name == f"rank-{world.rank:05d}.json"
    dump = parse(path.name, path.read_text())
    assert (dump.rank, dump.world, dump.reason) == (world.rank, world.size, "a test")
    assert dump.mpi.startswith(MPI.get_vendor()[0])
    call = next(one for one in reversed(dump.calls) if one.collective == "allreduce")
    assert (call.algorithm, call.count, call.nbytes, call.root) == ("ring", 5, 20, -1)
    assert (call.step, call.error) == (call.steps, "")
    assert 0 < call.start <= call.end <= dump.counter
    assert call.site.startswith(f"{__file__}:")
    group = dump.groups[call.communicator]
    assert group.ranks == tuple(range(world.size))
    assert len(set(world.allgather((call.communicator, call.sequence)))) == 1


def test_a_derived_communicator_has_its_world_ranks(sub: Comm, tmp_path: Path) -> None:
    sub.Barrier()
    path = RECORDER.dump(str(tmp_path), "a test")
    assert path is not None
    dump = parse(path.name, path.read_text())
    call = max(dump.calls, key=lambda one: one.start)
    assert call.collective == "barrier"
    expected = sub.allgather(MPI.COMM_WORLD.rank)
    assert list(dump.groups[call.communicator].ranks) == expected


def test_a_rank_that_fails_leaves_a_dump(world: Comm, tmp_path: Path) -> None:
    """That of the fault itself, and those of the ranks which hear of it."""
    comm = world.Dup()
    comm._link.apply(replace(comm._link.settings, flight=str(tmp_path)))

    def fail(left: Any, inout: Any, datatype: MPI.Datatype) -> None:
        raise ZeroDivisionError("no")

    op = mpicoll.create_op(fail, commute=True)
    error = None
    try:
        comm.Allreduce(np.ones(3), np.empty(3), op, algorithm="recursive_doubling")
    except (ZeroDivisionError, PeerError) as caught:
        error = caught
    assert (error is None) == (comm.size == 1)
    if error is not None:
        path = tmp_path / f"rank-{world.rank:05d}.json"
        assert type(error).__name__ in parse(path.name, path.read_text()).reason
    op.Free()
    comm.Free()


def test_a_name_that_is_given_late(world: Comm, tmp_path: Path) -> None:
    for name in ("grads", "activations"):
        comm = world.Dup()
        identity = comm._link.identity
        assert RECORDER.name(identity) == identity
        if name == "grads":
            comm.Set_name(name)
        else:
            comm.name = name
        assert comm.Get_name() == name
        comm.Barrier()
        path = RECORDER.dump(str(tmp_path), "a test")
        assert path is not None
        assert parse(path.name, path.read_text()).groups[identity].name == name
        comm.Free()
        path = RECORDER.dump(str(tmp_path), "a test")
        assert path is not None
        assert parse(path.name, path.read_text()).groups[identity].name == name


def test_a_freed_communicator_is_forgotten(world: Comm) -> None:
    before = len(RECORDER._members)
    for _ in range(40):
        world.Dup().Free()
    assert len(RECORDER._members) == before
    assert len(RECORDER._last) <= before


@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        ({"algorithm": "ring", "step": 2, "steps": 4}, False, ": step 2 of 4"),
        ({"algorithm": "native"}, False, ""),
        ({}, True, ""),  # it waits for the calls before it
        ({"step": 1, "steps": 2}, True, ", while the ranks compare their calls"),
        ({"step": 1, "steps": 2}, False, ", while the ranks agree on their counts"),
    ],
)
def test_how_far_a_call_is(fields: dict[str, Any], check: bool, words: str) -> None:
    link: Any = SimpleNamespace(settings=SimpleNamespace(check=check))
    assert watchdog._stage(link, Record("c", 1, "gatherv", **fields)) == words


def test_a_rank_whose_limit_is_over_says_so_once() -> None:
    """Later it is in its own code, which is not what others want to know."""
    sent: list[int] = []
    hidden = SimpleNamespace(Isend=lambda data, rank, tag: sent.append(rank))
    link: Any = SimpleNamespace(
        asked=False, hidden=hidden, tags=SimpleNamespace(sequence=1, control=1)
    )
    watchdog._tell(link, "answer", None, [1])
    link.asked = True
    watchdog._tell(link, "answer", None, [2])
    watchdog._tell(link, "leaving", None, [3])
    assert sent == [1, 3]


@pytest.mark.parametrize(
    ("state", "mine", "words"),
    [
        ({"sequence": 0}, "scan", "in its own code before its first call"),
        ({"sequence": 3}, "scan", "in its own code after call #3"),
        ({"sequence": 0, "ended": True, "at": ""}, "scan", "has ended its program before its"),
        ({"sequence": 3, "ended": True, "at": "a.py:1"}, "scan", "after call #3 (a.py:1)"),
        ({"sequence": 3, "kind": "failed"}, "scan", "has ended by an exception"),
        ({"sequence": 4, "collective": "scan"}, "scan", "in it too, step 1 of 2, waits for rank"),
        ({"sequence": 4, "collective": "scan", "steps": 0}, "scan", "in it too, waits for rank"),
        ({"sequence": 4, "collective": "bcast"}, "scan", "in bcast #4 instead, step 1 of 2"),
        ({"sequence": 4, "collective": "bcast"}, FINALIZE, "in bcast #4, step 1 of 2"),
    ],
)
def test_what_another_rank_was_doing(state: dict[str, Any], mine: str, words: str) -> None:
    usual = {"kind": "answer", "step": 1, "steps": 2, "waits": [1], "elsewhere": False}
    assert words in watchdog._doing({**usual, **state}, Record("c", 4, mine))


# -- jobs that hang ---------------------------------------------------------------------------

#: Ranks hang as ``hang`` says; once they do, one of them signals all, and ends the job when all
#: have written their dumps. A rank in ``silent`` gets no signal.
START = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicoll
world = mpicoll.Comm(MPI.COMM_WORLD)
rank, size = world.rank, world.size
pids = MPI.COMM_WORLD.allgather(os.getpid())
x, y = np.ones(8), np.empty(8)
def watch(silent):
    end = time.monotonic() + 90
    while len(list(Path().glob("begun-*"))) < size and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(2)
    asked = [one for one in range(size) if one not in silent]
    for one in asked:
        os.kill(pids[one], signal.SIGUSR1)
    files = [Path("mpicoll-flight", f"rank-{one:05d}.json") for one in asked]
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
def hang(body, silent=()):
    world.Barrier()
    if rank == 0:
        threading.Thread(target=watch, args=[silent], daemon=True).start()
    Path(f"begun-{rank}").touch()
    body()
"""

BEHIND = """
def load():
    time.sleep(1000)
def body():
    if rank == 1:
        load()
    world.Allreduce(x, y, algorithm="ring")
hang(body)
"""
MISSING = """
def body():
    if rank == 1:
        time.sleep(1000)
    world.Allreduce(x, y, algorithm="ring")
hang(body, silent=[1])
"""
ORDER = """
rows, columns = world.Dup(), world.Dup()
rows.Set_name("rows"); columns.Set_name("columns")
def body():
    first, second = (rows, columns) if rank else (columns, rows)
    first.Barrier(); second.Barrier()
hang(body)
"""
MISMATCH = """
def body():
    if rank == 1:
        world.Bcast(x, root=1, algorithm="binomial")
        world.Barrier()
    world.Allreduce(x, y, algorithm="ring")
    world.Barrier()
hang(body)
"""


def dumps_of(size: int, body: str, folder: Path) -> Ended:
    done = run_job(size, START + body, folder)
    assert done.status != 0  # it was ended while it hung
    return done


def read(folder: Path) -> dict[str, Any]:
    file = folder / "out.txt"
    assert run(["doctor", "--flight", str(folder / "mpicoll-flight"), "--json", str(file)]) == 1
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_in_its_own_code(tmp_path: Path, size: int) -> None:
    if not ALONE:
        return
    dumps_of(size, BEHIND, tmp_path)
    found = read(tmp_path)
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"]) == ("behind", [1])
    assert finding["waiting"] == [rank for rank in range(size) if rank != 1]
    assert "It completed barrier" in finding["text"]
    assert " in load." in finding["text"]
    assert len(found["dumps"]) == size


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    if not ALONE:
        return
    dumps_of(3, MISSING, tmp_path)
    (finding,) = read(tmp_path)["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("missing", [1], [0, 2])


def test_communicators_in_different_order(tmp_path: Path) -> None:
    if not ALONE:
        return
    dumps_of(2, ORDER, tmp_path)
    (finding,) = read(tmp_path)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("deadlock", [0, 1])


def test_different_calls(tmp_path: Path) -> None:
    if not ALONE:
        return
    dumps_of(3, MISMATCH, tmp_path)
    finding = read(tmp_path)["findings"][0]
    assert (finding["kind"], finding["sequence"]) == ("mismatch", 2)
    rows = {row["ranks"]: row["collective"] for row in finding["rows"]}
    assert rows == {"0, 2": "allreduce", "1": "bcast"}


# -- jobs that run into a limit -----------------------------------------------------------------

LIMIT = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpicoll
kind = sys.argv[1]
comm = mpicoll.Comm(MPI.COMM_WORLD.Dup(), timeout=1, check=kind == "checked")
comm.Set_name("grads")
x, y = np.ones(8), np.empty(8)
def load():
    if kind == "exit":
        sys.exit(0)
    end = time.monotonic() + 1000
    while time.monotonic() < end:
        pass
for step in range(3):
    if step == 2 and comm.rank == 1:
        load()
    comm.Allreduce(x, y, algorithm="ring")
"""


def limited(kind: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what rank 0 raises, and what the doctor says."""
    (folder / "cwd").mkdir()
    done = run_job(3, LIMIT, folder / "cwd", kind)
    assert done.status != 0
    parts = done.err.split("mpicoll.errors.CollectiveTimeout: ")
    (said,) = [part for part in parts if part.partition("\n")[0].count(" on rank 0 of 3 ")]
    return said, read(folder / "cwd")


def test_a_rank_that_is_busy_is_asked(tmp_path: Path) -> None:
    """It is in its own code, and yet leaves a dump when the limit of the others is over."""
    if not ALONE:
        return
    said, found = limited("busy", tmp_path)
    lines = said.splitlines()
    assert lines[0].startswith(
        "allreduce #3 by ring on rank 0 of 3 (communicator grads) is not complete after 1"
    )
    assert ": step " in lines[0]
    assert "  not heard from: rank 1" in lines
    assert any(line.startswith("  rank 2: in it too, step ") for line in lines)
    folder = tmp_path / "cwd" / "mpicoll-flight"
    assert f"  the flight recorders: python -m mpicoll doctor --flight {folder}" in lines
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("behind", [1], [0, 2])
    assert " in load." in finding["text"]
    assert "on grads" in finding["text"]
    reason = found["dumps"][1]["reason"]
    assert reason in [f"asked by rank {rank}, whose time limit is over" for rank in (0, 2)]


def test_a_rank_that_has_ended_its_program(tmp_path: Path) -> None:
    if not ALONE:
        return
    said, found = limited("exit", tmp_path)
    lines = said.splitlines()
    line = LIMIT.splitlines().index('    comm.Allreduce(x, y, algorithm="ring")') + 1
    assert f"  rank 1: has ended its program after call #2 (script.py:{line})" in lines
    assert "  all ranks answered" in lines
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("ended", [1], [0, 2])


def test_a_limit_that_is_over_while_calls_are_compared(tmp_path: Path) -> None:
    if not ALONE:
        return
    said, _ = limited("checked", tmp_path)
    head = said.splitlines()[0]
    assert head.startswith("allreduce #3 on rank 0 of 3 (communicator grads) is not complete")
    assert head.endswith(" s, while the ranks compare their calls")
