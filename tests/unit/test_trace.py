"""The trace on synthetic timelines whose answers are known: clocks, waits, files, reports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from synthetic import NS, Recorder, Skew, close, recorders, simulate

from mpicoll.algorithms import every
from mpicoll.cli import launch
from mpicoll.cli.intervals import common, lanes, length, union
from mpicoll.cli.main import run
from mpicoll.cli.timeline import Timeline, TraceError, read, spans
from mpicoll.cli.timeline_events import events
from mpicoll.cli.timeline_facts import analyse
from mpicoll.cli.timeline_waits import Wait, blame, messages, waiting
from mpicoll.cli.trace_report import show
from mpicoll.runtime import trace
from mpicoll.runtime.clocks import best
from mpicoll.runtime.record import Record
from mpicoll.runtime.trace import CHUNK_BYTES, Tracer, file_name, trace_region

ALGORITHMS = [pytest.param(one, id=f"{one.collective}-{one.name}") for one in every()]
#: Of a time in the merged trace: it, and the zero it is counted from, were cut to whole
#: nanoseconds, and so were time and offset of the comparisons on either side of each.
CUT = 6 * NS


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


# -- clocks -----------------------------------------------------------------------------


def test_best_of_the_rounds_is_the_shortest() -> None:
    # The clock is 100 ahead; ways of 1 there and 3 back, 2 and 2.5, 5 and 1.
    rounds = [(0.0, 101.0, 4.0), (10.0, 112.0, 14.5), (20.0, 125.0, 26.0)]
    assert best(rounds) == (101.0, 99.0, 2.0)


def test_error_bounds_the_offset() -> None:
    random = Random(1)
    for _ in range(100):
        ways = [(random.expovariate(1), random.expovariate(1)) for _ in range(5)]
        rounds = [(t, t + there + 7.0, t + there + back) for t, (there, back) in enumerate(ways)]
        _, offset, error = best(rounds)
        assert abs(offset - 7.0) <= error + 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_offsets_and_drift_are_removed(size: int, tmp_path: Path) -> None:
    random = Random(size)
    skews = [Skew(1000.0)] + [
        Skew(random.uniform(100, 1e5), 1 + random.uniform(-1, 1) * 1e-4) for _ in range(size - 1)
    ]
    truth = [[random.uniform(0, 100) for _ in range(5)] for _ in skews]
    ranks = recorders(tmp_path, skews)
    for one, times in zip(ranks, truth, strict=True):
        for t in sorted(times):
            one.called(t, t + 0.001)
    close(ranks)
    timeline = read(tmp_path)
    zero = min(map(min, truth))
    for rank, times in enumerate(truth):
        starts = [call.start + zero for call in timeline.ranks[rank].calls]
        assert starts == pytest.approx(sorted(times), rel=0, abs=CUT)
    assert timeline.offset == pytest.approx(
        max(max(abs(skew(t) - skews[0](t)) for t in (0.0, 100.0)) for skew in skews),
        abs=CUT,
    )
    assert timeline.drift == pytest.approx(
        max(abs(skew.rate - 1) / skew.rate for skew in skews), rel=1e-6
    )
    assert timeline.faults == timeline.notes == ()


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        # Communicators in any order of ranks: with 3; and over 0 with 3.
        ([(0, 3), (1, 0), (2, 3), (4, 3)], 5 + (1 + 2)),
        # 0 counts, and was compared with 1 only as the one that was asked.
        ([(0, 1), (2, 0), (3, 0), (4, 1)], (1 + 5) + 4),
    ],
)
def test_chains_of_comparisons(pairs: list[tuple[int, int]], error: int, tmp_path: Path) -> None:
    skews = [Skew(100.0 * n + 7, 1 + n * 1e-5) for n in range(5)]
    ranks = [Recorder(tmp_path, n, 5, skew) for n, skew in enumerate(skews)]
    for rank, reference in pairs:
        for t in (0.0, 50.0):
            ranks[rank].compared(t, reference, skews[reference], error=1e-6 * (rank + 1))
    for one in ranks:
        one.called(20.0, 21.0)
    close(ranks)
    timeline = read(tmp_path)
    # The clock that all are taken to is not the true one, but the same instant is so on all.
    assert [rank.calls[0].start for rank in timeline.ranks.values()] == pytest.approx(
        [0.0] * 5, abs=2 * CUT
    )
    assert timeline.error == pytest.approx(error * 1e-6)


def test_a_killed_run_has_offsets_but_no_drift(tmp_path: Path) -> None:
    skews = [Skew(), Skew(5000.0)]
    ranks = [Recorder(tmp_path, n, 2, skew) for n, skew in enumerate(skews)]
    ranks[1].compared(0.0, 0, skews[0], error=1e-6)
    for one in ranks:
        one.called(2.0, 3.0)
        one.tracer._flush()
    timeline = read(tmp_path)
    assert timeline.ranks[1].calls[0].start == pytest.approx(
        timeline.ranks[0].calls[0].start, abs=CUT
    )
    notes = " ".join(timeline.notes)
    assert "the trace of ranks 0-1 has no end" in notes
    assert "the clock of rank 1 was compared only once" in notes
    close(ranks)


# -- who waits for whom -----------------------------------------------------------------


def _waits(timeline: Timeline) -> dict[tuple[int, int, str], float]:
    found: dict[tuple[int, int, str], float] = defaultdict(float)
    for calls in timeline.matched():
        for wait in blame(calls):
            found[wait.rank, wait.cause, wait.kind] += wait.seconds
    return dict(found)


def test_late_busy_and_moving(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew(), Skew(7e4)])
    ranks[0].called(1.0, 4.6, (1.0, 1.1, 4.5, [1], [1]))
    ranks[1].called(4.0, 4.7, (4.2, 4.3, 4.4, [0], [0]))
    close(ranks)
    assert _waits(read(tmp_path)) == pytest.approx(
        {
            (0, 1, "late"): 2.9,  # 1.1 to 4.0
            (0, 1, "busy"): 0.2,  # until it posted
            (0, 1, "moving"): 0.3,
            (1, 0, "moving"): 0.1,
        },
        abs=CUT,
    )


def test_the_first_cause_is_found_through_a_chain(tmp_path: Path) -> None:
    # 2 sends to 1, 1 sends on to 0; 2 comes 5 s late, 1 works half a second between.
    ranks = recorders(tmp_path, [Skew()] * 3)
    ranks[0].called(1.0, 7.0, (1.0, 1.0, 6.6, [1], []))
    ranks[1].called(1.0, 7.0, (1.0, 1.0, 6.0, [2], []), (6.5, 6.5, 6.5, [], [0]))
    ranks[2].called(5.9, 7.0, (5.9, 5.9, 5.9, [], [1]))
    close(ranks)
    assert _waits(read(tmp_path)) == pytest.approx(
        {
            (0, 2, "late"): 4.9,
            (0, 2, "moving"): 0.1,
            (0, 1, "busy"): 0.5,
            (0, 1, "moving"): 0.1,
            (1, 2, "late"): 4.9,
            (1, 2, "moving"): 0.1,
        },
        abs=CUT,
    )


def test_a_receiver_holds_up_only_a_send_that_waits_for_it(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()] * 3)
    ranks[0].called(1.0, 1.5, (1.0, 1.0, 1.5, [], [1]))  # taken by the MPI
    ranks[0].called(2.0, 4.0, (2.0, 2.0, 4.0, [], [2]))  # waits for its receiver
    ranks[1].called(3.0, 3.1, (3.0, 3.0, 3.1, [0], []))
    ranks[2].called(0.5, 0.5)
    ranks[2].called(3.5, 4.0, (3.5, 3.5, 3.9, [0], []))
    close(ranks)
    found = _waits(read(tmp_path))
    assert found.pop((1, 0, "moving")) == pytest.approx(0.1, abs=CUT)
    assert found.pop((2, 0, "moving")) == pytest.approx(0.4, abs=CUT)
    assert found == pytest.approx(
        {(0, 0, "moving"): 0.5, (0, 2, "late"): 1.5, (0, 2, "moving"): 0.5}, abs=CUT
    )


def test_an_exchange_is_not_blamed_on_the_peers_next_step(tmp_path: Path) -> None:
    # 0 has 1's message at 2, sends to 1 eagerly; 1 posts the receive for it much later.
    ranks = recorders(tmp_path, [Skew()] * 2)
    ranks[0].called(1.0, 2.0, (1.0, 1.0, 2.0, [1], [1]))
    ranks[1].called(1.5, 9.0, (1.5, 1.5, 1.5, [], [0]), (8.0, 8.0, 8.0, [0], []))
    close(ranks)
    assert _waits(read(tmp_path)) == pytest.approx(
        {(0, 1, "late"): 0.5, (0, 1, "moving"): 0.5}, abs=CUT
    )


def _simulated(folder: Path, algorithm: Any, starts: list[float], seed: int | None) -> Timeline:
    random = Random(seed)

    def delay() -> float:
        return 0.0 if seed is None else random.expovariate(10.0)

    ranks = recorders(folder, [Skew(1000.0 + n) for n in range(len(starts))])
    fields = {"collective": algorithm.collective, "algorithm": algorithm.name}
    for one, times in zip(ranks, simulate(algorithm, starts, delay, delay), strict=True):
        one.called(times.start, times.end, *times.stages, **fields)
    close(ranks)
    return read(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_late_rank_causes_all_waiting(algorithm: Any, size: int, tmp_path: Path) -> None:
    late = size // 2
    timeline = _simulated(
        tmp_path, algorithm, [9.0 if n == late else 1.0 for n in range(size)], None
    )
    (calls,) = timeline.matched()
    found = blame(calls)
    assert {wait.cause for wait in found if wait.seconds > CUT} <= {late}
    assert {wait.kind for wait in found if wait.seconds > CUT} <= {"late"}
    held = [rank for rank, call in calls.items() if rank != late and call.end > call.start + 1]
    assert sum(wait.seconds for wait in found) == pytest.approx(
        8.0 * len(held), abs=len(found) * CUT + CUT
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_moment_of_waiting_has_one_cause(algorithm: Any, tmp_path: Path) -> None:
    random = Random(5)
    for size in (2, 3, 5, 8):
        folder = tmp_path / str(size)
        timeline = _simulated(folder, algorithm, [random.uniform(1, 3) for _ in range(size)], size)
        (calls,) = timeline.matched()
        found = blame(calls)
        for rank, call in calls.items():
            parts = sorted((wait.start, wait.end) for wait in found if wait.rank == rank)
            assert all(a[1] <= b[0] for a, b in pairwise(parts))
            whole = length(union(span for _, span in waiting(call)))
            assert length(parts) == pytest.approx(whole, abs=1e-9)
        for wait in found:
            _is_so(wait, calls)


def _is_so(wait: Wait, calls: Any) -> None:
    """Hold a cause against what that rank did at the time."""
    cause = calls[wait.cause]
    if wait.kind == "late":
        assert wait.end <= cause.start + 1e-9
    elif wait.kind == "busy":
        assert wait.start >= cause.start - 1e-9
        idle = common([(wait.start, wait.end)], union(span for _, span in waiting(cause)))
        assert length(idle) < 1e-9
    if wait.kind != "moving":
        assert wait.rank != wait.cause


def test_messages_find_their_other_end(tmp_path: Path) -> None:
    for algorithm in every():
        timeline = _simulated(
            tmp_path / algorithm.collective / algorithm.name, algorithm, [1.0] * 5, 3
        )
        (calls,) = timeline.matched()
        found = list(messages(calls))
        sent = sum(len(stage.targets) for call in calls.values() for stage in call.stages)
        assert len(found) == sent
        assert all(a.posted <= b.done + CUT for _, a, _, b in found)


def test_the_rest_is_blamed_where_a_rank_is_missing(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()] * 2)
    ranks[0].called(1.0, 4.6, (1.0, 1.1, 4.5, [1], [1]))
    close(ranks)
    (tmp_path / file_name(1)).unlink()
    timeline = read(tmp_path)
    assert "no file of rank 1" in timeline.faults[0]
    assert _waits(timeline) == pytest.approx({(0, 0, "moving"): 3.4}, abs=CUT)


# -- the report -------------------------------------------------------------------------


def _two_ranks(folder: Path) -> list[Recorder]:
    """Rank 1 is 3 s late in an allreduce; then an iallreduce of 10 s under a region of 5."""
    ranks = recorders(folder, [Skew(), Skew(9.0)])
    for one, late in zip(ranks, (0.0, 3.0), strict=True):
        peer = [1 - one.tracer.rank]
        one.called(1.0 + late, 5.0, (1.0 + late, 1.0 + late, 5.0, peer, peer), nbytes=8000)
        record = one.called(
            10.0, 20.0, (10.0, 10.0, 20.0, peer, peer), form="non-blocking", site="train.py:3"
        )
        one.waited(record, 18.0, 20.0)
        one.waited(record, 17.0, 18.5)
        one.region("forward", 9.0, 14.0)
        one.region("backward", 13.0, 15.0)
    return ranks


def test_report(tmp_path: Path) -> None:
    close(_two_ranks(tmp_path))
    report = analyse(read(tmp_path))
    assert report["seconds"] == pytest.approx(19.0)
    blocking, other = sorted(report["collectives"], key=lambda row: row["form"])
    assert (blocking["calls"], blocking["bytes"]) == (1, 8000)
    assert blocking["median"] == blocking["seconds"] == pytest.approx((4.0 + 1.0) / 2)
    assert blocking["share"] == pytest.approx(2.5 / 19)
    assert blocking["late"] == pytest.approx(1.5)
    assert blocking["moving"] == pytest.approx(1.0)
    assert other["seconds"] == pytest.approx(10.0)
    assert other["exposed"] == other["moving"] == pytest.approx(3.0)
    (pair,) = [row for row in report["pairs"] if row["late"] > CUT]
    assert (pair["rank"], pair["waits_for"], pair["calls"]) == (0, 1, 1)
    assert pair["late"] == pytest.approx(3.0)
    assert report["slowest"]["rank"] == 1
    assert report["slowest"]["seconds"] == pytest.approx(3.0)
    assert report["slowest"]["calls"] == 2
    (hidden,) = report["hidden"]
    assert hidden["calls"] == 1
    assert hidden["hidden"] == pytest.approx(0.7)
    assert hidden["in_regions"] == pytest.approx(0.5)
    assert [(row["name"], row["count"]) for row in report["regions"]] == [
        ("forward", 2),
        ("backward", 2),
    ]


def test_hidden_is_not_claimed_without_waits(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()])
    ranks[0].called(1.0, 3.0, form="persistent")
    close(ranks)
    (hidden,) = analyse(read(tmp_path))["hidden"]
    assert hidden["hidden"] is hidden["waited"] is None
    assert hidden["in_regions"] == 0
    show(Console(file=(out := io.StringIO()), width=100), analyse(read(tmp_path)), 8)
    assert "no Wait is in this trace" in out.getvalue()
    assert out.getvalue().count("—") == 6


def test_last_counts_only_what_the_clocks_can_tell(tmp_path: Path) -> None:
    skews = [Skew(), Skew()]
    ranks = [Recorder(tmp_path, n, 2) for n in range(2)]
    for t in (0.0, 50.0):
        ranks[1].compared(t, 0, skews[0], error=0.01)
    for number, lead in enumerate((0.005, 0.02), start=1):
        ranks[0].called(number, number + 0.5)
        ranks[1].called(number + lead, number + 0.5)
    close(ranks)
    by_rank = analyse(read(tmp_path))["by_rank"]
    assert [row["last"] for row in by_rank] == [0, 1]


def test_window_keeps_whole_collectives(tmp_path: Path) -> None:
    close(_two_ranks(tmp_path))
    timeline = read(tmp_path).window(3.9, 8.5)  # true time 4.9 to 9.5
    assert [len(rank.calls) for rank in timeline.ranks.values()] == [1, 1]
    assert [one.name for one in timeline.ranks[0].regions] == ["forward"]
    assert timeline.seconds == pytest.approx(4.6)
    assert _waits(timeline)[0, 1, "late"] == pytest.approx(3.0, abs=CUT)


def test_a_communicator_of_the_same_name_made_again_is_another(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew(), Skew()])
    for t in (1.0, 11.0):
        for one in ranks:
            one.joined("half", [1, 0], 1 - one.tracer.rank)
            one.called(t, t + 1, (t, t, t + 1, [0], [0]), communicator="half", sequence=1)
    close(ranks)
    timeline = read(tmp_path)
    assert [len(calls) for calls in timeline.matched()] == [2, 2]
    assert timeline.ranks[0].calls[0].stages[0].sources == (1,)  # rank 0 of half is world rank 1


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (3.5, 3.7)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert common([], [(0, 1)]) == []
    assert lanes([(0, 5), (1, 2), (2, 3), (5, 6), (5.5, 7)]) == [0, 1, 1, 0, 1]
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# -- files ------------------------------------------------------------------------------


def _edit(path: Path, number: int, text: str | None) -> None:
    """Replace a line, counted from 1; with None cut the file within it."""
    lines = path.read_text().splitlines(keepends=True)
    if text is None:
        path.write_text("".join(lines[: number - 1]) + lines[number - 1][:-5])
    else:
        lines[number - 1] = text + "\n"
        path.write_text("".join(lines))


def _call(**changes: Any) -> str:
    """Return the line of a call of one step; values replaced by name."""
    values = {"communicator": "world", "sequence": 9, "collective": "bcast", "form": "blocking"}
    values |= {"algorithm": "chain", "operator": "", "dtype": "", "count": 1, "nbytes": 1}
    values |= {"root": 0, "start": 10**12, "end": 10**12 + 9, "site": "", "error": ""}
    stages = changes.pop("stages", [[1, 10**12, 10**12, 10**12, [], [], 0, 0]])
    return json.dumps(["call", *(values | changes).values(), stages])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2", r"line 4: .*delimiter"),
        ("{}", "line 4: no line of a trace"),
        ('["clap", 1]', "line 4: no line of a trace"),
        ('["region", "x", 1]', "line 4: no 'region' of a trace"),
        ('["clock", 0, "r", 1, "x", 2]', "line 4: no 'clock' of a trace"),
        ('["call", 1, 2]', "line 4: no 'call' of a trace .2 values, expected 15"),
        (_call(end=5), "from 1000000000000 to 5"),
        (_call(count="x"), "'x' is no whole number"),
        (_call(stages=[[1, 3, 2, 1, [], [], 0, 0]]), "posted, worked, done are not in this order"),
        (_call(stages=[[1, 1, 2, 3, [7], [], 0, 0]]), "peer 7, but communicator 'world' has 2"),
        (_call(communicator="x"), "communicator 'x', which was not joined before"),
        ('["end", 17, 0.5]', "has 3 calls, but 17 were written"),
    ],
)
def test_broken_lines_are_named_and_the_rest_is_read(
    line: str, words: str, tmp_path: Path
) -> None:
    ranks = recorders(tmp_path, [Skew(), Skew()])
    for one in ranks:
        for t in (1.0, 2.0, 3.0):
            one.called(t, t + 0.5)
        one.tracer._flush()
    file = tmp_path / file_name(1)
    _edit(file, 4, line)  # in place of a comparison of clocks
    timeline = read(tmp_path)
    assert len(timeline.faults) == 1, timeline.faults
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(timeline.faults[0])
    assert timeline.faults[0].startswith(file.name)
    assert [len(rank.calls) for rank in timeline.ranks.values()] == [3, 3]
    close(ranks)


def test_many_broken_lines_are_counted(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()])
    close(ranks)
    with open(tmp_path / file_name(0), "a") as file:
        file.write("x\n" * 9)
    faults = read(tmp_path).faults
    assert len(faults) == 6
    assert faults[-1].endswith("4 more lines that are broken")


def test_a_last_line_that_is_cut_off_is_no_fault(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()])
    for t in (1.0, 2.0):
        ranks[0].called(t, t + 0.5)
    ranks[0].tracer._flush()
    file = tmp_path / file_name(0)
    _edit(file, len(file.read_text().splitlines()), None)
    timeline = read(tmp_path)
    assert timeline.faults == ()
    assert len(timeline.ranks[0].calls) == 1
    close(ranks)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "does not begin as a trace does"),
        ("[]", "does not begin as a trace does"),
        ('{"mpicoll_trace": 99}', "has form 99, this mpicoll reads form 1"),
        (
            '{"mpicoll_trace": 1, "rank": 0, "size": 2, "run": "r", "host": "h", "date": 1}',
            "says that it is the file of rank 0",
        ),
        (
            '{"mpicoll_trace": 1, "rank": 1, "size": 1, "run": "r", "host": "h", "date": 1}',
            "says that it is of rank 1 of 1",
        ),
    ],
)
def test_a_file_without_a_head_is_left_out(line: str, words: str, tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew(), Skew()])
    close(ranks)
    _edit(tmp_path / file_name(1), 1, line)
    timeline = read(tmp_path)
    assert words in timeline.faults[0]
    assert "no file of rank 1" in timeline.faults[1]
    assert set(timeline.ranks) == {0}


def test_files_of_another_run_are_named(tmp_path: Path) -> None:
    close([Recorder(tmp_path, n, 4, run="before") for n in range(4)])
    new = recorders(tmp_path, [Skew(), Skew()])
    for one in new:
        one.called(1.0, 2.0)
    close(new)
    for one in new:  # a clock of the wall that is no finer than the test is fast
        path = one.tracer.path
        head = json.loads(path.read_text().splitlines()[0])
        _edit(path, 1, json.dumps(head | {"date": head["date"] + 60}))
    timeline = read(tmp_path)
    assert set(timeline.ranks) == {0, 1}
    assert len(timeline.faults) == 2
    assert "rank-00002.jsonl is of another run (4 ranks) and left out" in timeline.faults[0]


def test_a_call_that_never_ended_is_noted(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, [Skew()])
    ranks[0].called(1.0, 2.0)
    record = Record("world", 2, "bcast", start=1001.5, end=0.0)
    ranks[0].tracer.add(record)
    close(ranks)
    timeline = read(tmp_path)
    assert timeline.notes == ("rank 0 was still in bcast 2 of world when its trace ended",)
    assert timeline.ranks[0].calls[1].end == pytest.approx(1.0)


def test_a_clock_that_was_never_compared_is_named(tmp_path: Path) -> None:
    close([Recorder(tmp_path, n, 2) for n in range(2)])
    assert "the clock of rank 1 was never compared" in read(tmp_path).faults[0]


def test_a_folder_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no rank-\*.jsonl; take a trace with MPICOLL_TRACE"):
        read(tmp_path)
    (tmp_path / file_name(0)).write_text("no\n")
    with pytest.raises(TraceError, match="does not begin as a trace does"):
        read(tmp_path)


# -- the writer -------------------------------------------------------------------------


def test_memory_is_bounded_and_lines_come_out_in_chunks(tmp_path: Path) -> None:
    one = Recorder(tmp_path, 0, 1)
    most = 0
    while one.tracer.path.stat().st_size < 3 * CHUNK_BYTES:
        one.called(1.0, 2.0, *[(1.0, 1.5, 2.0, [], [])] * 20)
        most = max(most, one.tracer._kept)
    assert most < CHUNK_BYTES
    whole = one.tracer.path.read_text().splitlines()[1:]
    assert all(isinstance(json.loads(line), list) for line in whole)
    one.tracer.close()


def test_a_line_after_a_pause_takes_the_others_along(tmp_path: Path) -> None:
    now = [0.0]
    tracer = Tracer(str(tmp_path), 0, 1, clock=lambda: now[0], token="")
    tracer.interval("a", 1, 2)
    assert "region" not in tracer.path.read_text()
    now[0] = 1.0
    tracer.interval("b", 1, 2)
    assert tracer.path.read_text().count("region") == 2
    tracer.close()
    tracer.close()
    tracer.interval("c", 1, 2)
    lines = tracer.path.read_text().splitlines()
    assert json.loads(lines[-1]) == ["end", 0, 0.0]


def test_numbers_of_numpy_and_odd_texts_are_written(tmp_path: Path) -> None:
    one = Recorder(tmp_path, 0, 1)
    one.called(1, 2, count=np.int64(3), root=np.int32(0), site="d\ud800\n.py:1", error='"é"')
    one.tracer.close()
    (call,) = read(tmp_path).ranks[0].calls
    assert (call.count, call.root, call.error) == (3, 0, '"é"')


def test_a_full_disk_ends_the_trace_and_not_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = Tracer(str(tmp_path), 0, 1, clock=lambda: 0.0, token="")
    tracer._file.close()
    tracer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    tracer.interval("x", 1, 2)
    tracer._flush()
    tracer.interval("x", 1, 2)
    tracer.close()
    err = capsys.readouterr().err
    assert err.count("the trace ends here") == 1
    assert "No space left on device" in err
    assert tracer.closed


def test_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trace_region("none"):
        pass
    tracer = Tracer(str(tmp_path), 0, 1)
    monkeypatch.setattr(trace, "_tracer", tracer)
    with pytest.raises(ZeroDivisionError), trace_region("forward"):
        _ = 1 / 0
    tracer.close()
    assert trace._tracer is None
    (region,) = read(tmp_path).ranks[0].regions
    assert region.name == "forward"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = f"""
import os
from mpicoll.cli.trace_report import show
from mpicoll.runtime import trace
trace._tracer = tracer = trace.Tracer({str(tmp_path)!r}, 0, 1)
with trace.trace_region("parent"): pass
child = os.fork()
with trace.trace_region("child" if child == 0 else "parent"): pass
if child:
    os.waitpid(child, 0)
    tracer.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    timeline = read(tmp_path)
    assert [one.name for one in timeline.ranks[0].regions] == ["parent", "parent"]
    assert timeline.faults == ()


# -- pictures and the command -----------------------------------------------------------


def test_events_nest_and_messages_go_forward(tmp_path: Path) -> None:
    close(_two_ranks(tmp_path))
    found = list(events(read(tmp_path)))
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert {tid for _, tid in threads} == {0, 100, 200, 201}
    for spans_ in threads.values():
        open_: list[float] = []
        for event in sorted(spans_, key=lambda one: (one["ts"], -one["dur"])):
            while open_ and open_[-1] <= event["ts"]:
                open_.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert not open_ or end <= open_[-1]
            open_.append(end)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert len(starts) == len(ends) == 4
    assert starts.keys() == ends.keys()
    assert all(one["ts"] <= ends[number]["ts"] for number, one in starts.items())
    names = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names == {"blocking", "non-blocking", "regions"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    close(_two_ranks(folder))
    png, out = tmp_path / "t.png", tmp_path / "t.json"
    assert run(["trace", str(folder), "--png", str(png), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Rank 1 is waited for most: 3.00 s, 100.0 %" in text
    assert "Who waits for whom" in text
    assert "iallreduce" in text
    assert "70.0 %" in text
    assert max(map(len, text.splitlines())) <= 100
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["slowest"]["rank"] == 1
    merged = json.loads((folder / "trace.json").read_text())
    assert len(merged["traceEvents"]) > 10
    assert run(["trace", str(folder), "--window", "0:5", "--out", str(tmp_path / "m.json")]) == 0
    text = capsys.readouterr().out
    assert "iallreduce" not in text
    assert (tmp_path / "m.json").exists()


def test_command_with_json_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    close(recorders(tmp_path, [Skew()]))
    assert run(["trace", str(tmp_path), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["collectives"], report["slowest"]) == ([], None)


def test_command_shows_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    close(_two_ranks(tmp_path))
    (tmp_path / file_name(1)).unlink()
    assert run(["trace", str(tmp_path)]) == 0
    assert "warning: no file of rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace"], "Missing argument 'DIR'"),
        (["trace", "/no/such"], "/no/such does not exist; take a trace with MPICOLL_TRACE=/no"),
        (["trace", __file__], "is a file, expected the folder of a trace"),
        (["trace", "EMPTY"], "has no rank-*.jsonl"),
        (["trace", "TRACE", "--window", "2:1"], "expected FROM:TO in seconds"),
        (["trace", "TRACE", "--window", "x:1"], "expected FROM:TO in seconds"),
        (["trace", "TRACE", "--window", "3"], "expected FROM:TO in seconds"),
        (["trace", "TRACE", "--window", "50:"], "--window begins at 50 s, the trace has 19 s"),
        (["trace", "TRACE", "--png", "/no/such/x.png"], "there is no folder /no/such"),
        (["trace", "TRACE", "--out", "/no/such/x"], "name another with --out FILE"),
        (["trace", "TRACE", "--json", "/no/such/x"], "there is no folder /no/such"),
        (["trace", "TRACE", "--top", "0"], "0 is not in the range"),
    ],
)
def test_misuse(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, empty = tmp_path / "t", tmp_path / "e"
    empty.mkdir()
    close(_two_ranks(folder))
    named = {"TRACE": str(folder), "EMPTY": str(empty)}
    assert run([named.get(word, word) for word in arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (folder / "trace.json").exists()


def test_other_ranks_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    close(_two_ranks(tmp_path))
    assert run(["trace", str(tmp_path)]) == 0
    assert run(["trace", "/no/such"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not (tmp_path / "trace.json").exists()


def test_reading_a_trace_starts_no_mpi(tmp_path: Path) -> None:
    close(_two_ranks(tmp_path))
    code = (
        "import sys; "
        f"from mpicoll.cli.main import run; run(['trace', {str(tmp_path)!r}]); "
        "sys.exit('mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--help"]) == 0
    out = capsys.readouterr().out
    assert "MPICOLL_TRACE=t mpiexec -n 8 python train.py" in out
    assert "late" in out
