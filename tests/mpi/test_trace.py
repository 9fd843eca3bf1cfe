"""The trace on several ranks: one clock, causality, who opens and closes, and the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from mpi4py import MPI

from mpicoll.cli import launch
from mpicoll.cli.main import run
from mpicoll.cli.timeline import Timeline, read
from mpicoll.cli.timeline_waits import messages
from mpicoll.errors import SettingError
from mpicoll.runtime import trace
from mpicoll.runtime.record import Record, StageTime
from mpicoll.runtime.trace import Tracer, file_name, open_trace, trace_region

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALLS = 5
#: Of a time in the merged trace: it, the zero, and both comparisons were cut to nanoseconds.
CUT = 6e-9


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """Return a communicator for the trace; none is open before."""
    monkeypatch.setattr(trace, "_tracer", None)
    comm = WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return the name of a folder that all ranks agree on."""
    return WORLD.bcast(str(tmp_path / "trace"), root=0)


def _ring(
    comm: MPI.Intracomm, tracer: Tracer, sequence: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Send once round a ring, write it as a call, and return true times around its start."""
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    record = Record("world", sequence, "allgather", algorithm="ring")
    before = perf_counter()
    record.start = clock()
    after = perf_counter()
    record.stages = stages = []
    for step in range(1, SIZE):
        inbox = bytearray(8)
        posted = clock()
        requests = [comm.Irecv(inbox, left, 3), comm.Isend(bytes(8), right, 3)]
        worked = clock()
        MPI.Request.Waitall(requests)
        stages.append(StageTime(step, posted, worked, clock(), (left,), (right,), 8, 8))
    record.end = clock()
    tracer.add(record)
    return before, after


def _read(folder: str) -> Timeline:
    """Return the trace when all ranks have written theirs."""
    WORLD.Barrier()
    timeline = read(Path(folder))
    WORLD.Barrier()
    assert timeline.faults == timeline.notes == ()
    assert set(timeline.ranks) == set(range(SIZE))
    return timeline


def _hold_to_causality(timeline: Timeline) -> None:
    """Hold every message to being posted before it was there, as far as clocks can tell."""
    count = 0
    for calls in timeline.matched():
        assert len(calls) == SIZE
        for _, sent, _, received in messages(calls):
            assert received.done >= sent.posted - timeline.error - CUT
            count += 1
    assert count == CALLS * SIZE * (SIZE - 1)


def test_a_trace_of_one_clock(private: MPI.Intracomm, folder: str) -> None:
    tracer = open_trace(private, folder)
    tracer.join("world", "MPI_COMM_WORLD", RANK, range(SIZE))
    assert open_trace(private, "another") is tracer
    with trace_region("forward"):
        pass
    for sequence in range(1, CALLS + 1):
        _ring(private, tracer, sequence, perf_counter)
    tracer.close(private)
    timeline = _read(folder)
    _hold_to_causality(timeline)
    assert [len(rank.regions) for rank in timeline.ranks.values()] == [1] * SIZE
    hosts = {rank.host for rank in timeline.ranks.values()}
    if len(hosts) == 1 and tracer.token == WORLD.bcast(tracer.token, root=0):
        assert timeline.error == timeline.offset == 0
    assert trace._tracer is None


def test_clocks_that_are_apart_and_drift(private: MPI.Intracomm, folder: str) -> None:
    offset, rate = 1000.0 * RANK, 1 + 1e-3 * RANK

    def clock() -> float:
        return offset + rate * perf_counter()

    tracer = Tracer(folder, RANK, SIZE, clock=clock, token=f"clock {RANK}")
    tracer.join("world", "", RANK, range(SIZE))
    tracer.meet(private)
    true = [_ring(private, tracer, number, clock) for number in range(1, CALLS + 1)]
    tracer.close(private)
    timeline = _read(folder)
    _hold_to_causality(timeline)
    assert (timeline.error > 0) == (SIZE > 1)
    if SIZE > 1:
        assert timeline.offset == pytest.approx(1000.0 * (SIZE - 1), rel=0.5)
    nodes = WORLD.allgather(trace._clock_of_node())
    if len(set(nodes)) == 1:  # all read the same perf_counter, which is the truth
        _hold_to_truth(timeline, WORLD.allgather(true))


def _hold_to_truth(timeline: Timeline, true: list[list[tuple[float, float]]]) -> None:
    """Compare the starts of all pairs of calls with the readings of one clock around them."""
    starts = [
        (call.start, *around)
        for rank, times in enumerate(true)
        for call, around in zip(timeline.ranks[rank].calls, times, strict=True)
    ]
    for mine, before, after in starts:
        for theirs, sooner, later in starts:
            assert mine - theirs >= before - later - timeline.error - CUT
            assert mine - theirs <= after - sooner + timeline.error + CUT


def test_ranks_that_open_in_different_order_are_one_run(
    private: MPI.Intracomm, folder: str
) -> None:
    half = private.Split(RANK % 2, -RANK)
    if RANK == 0:
        open_trace(MPI.COMM_SELF, folder)
    tracer = open_trace(half, folder)
    open_trace(private, folder)
    tracer.join("world", "", RANK, range(SIZE))
    for sequence in range(1, CALLS + 1):
        _ring(private, tracer, sequence, perf_counter)
    tracer.settle(half)
    tracer.close(private)
    half.Free()
    _hold_to_causality(_read(folder))


def test_a_rank_that_can_not_write_is_an_error_on_all(
    private: MPI.Intracomm, folder: str, tmp_path: Path
) -> None:
    last = SIZE - 1
    mine = "/dev/null/trace" if last == RANK else folder
    with pytest.raises(SettingError, match=rf"can be written there: rank {last}: .*/dev/null"):
        open_trace(private, mine)
    assert trace._tracer is None
    assert not (Path(folder) / file_name(RANK)).exists()


def test_an_end_without_the_others(private: MPI.Intracomm, folder: str) -> None:
    tracer = open_trace(private, folder)
    tracer.join("world", "", RANK, range(SIZE))
    _ring(private, tracer, 1, perf_counter)
    tracer.close()
    tracer.close()
    assert [len(rank.calls) for rank in _read(folder).ranks.values()] == [1] * SIZE


def test_command_speaks_on_rank_0(
    private: MPI.Intracomm,
    folder: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracer = open_trace(private, folder)
    tracer.join("world", "", RANK, range(SIZE))
    for sequence in range(1, CALLS + 1):
        _ring(private, tracer, sequence, perf_counter)
    tracer.close(private)
    WORLD.Barrier()
    assert run(["trace", folder]) == 0
    assert ("allgather" in capsys.readouterr().out) == launch.speaks()
    WORLD.Barrier()
    assert (Path(folder) / "trace.json").exists()


def test_comm_is_traced(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from mpicoll import Comm

    monkeypatch.setattr(trace, "_tracer", None)
    monkeypatch.setenv("MPICOLL_TRACE", folder)
    base = WORLD.Dup()
    comm: Any = Comm(base)
    for _ in range(CALLS):
        comm.Allreduce(MPI.IN_PLACE, np.ones(3), algorithm="ring")
    assert trace._tracer is not None
    tracer = trace._tracer
    private = WORLD.Dup()
    tracer.close(private)
    private.Free()
    comm.Free()
    timeline = _read(folder)
    for calls in timeline.matched():
        assert len(calls) == SIZE
        for _, sent, _, received in messages(calls):
            assert received.done >= sent.posted - timeline.error - CUT
    named = [c for c in timeline.matched() if next(iter(c.values())).collective == "allreduce"]
    assert len(named) == CALLS
