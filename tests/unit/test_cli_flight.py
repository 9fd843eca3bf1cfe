"""What `mpicoll doctor --flight` says of dumps that are made up: who is behind, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpicoll.cli import launch
from mpicoll.cli.flight_dumps import read
from mpicoll.cli.flight_findings import Finding, conclude, moments
from mpicoll.cli.flight_graph import Scene
from mpicoll.cli.flight_words import clock, spans
from mpicoll.cli.main import run
from mpicoll.runtime.flight import ASKED, FINALIZE, SIGNALLED, Recorder
from mpicoll.runtime.record import Record

COUNTER, WALL = 1000.0, 1.7e9  #: of every dump: 1000 s after the counters began
SITE = "/home/ada/train.py:88"
OWN = [{"file": "/home/ada/data.py", "line": 12, "function": "load", "ours": False}]
WORLD = "w.1"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


def call(sequence: int, collective: str = "allreduce", **fields: Any) -> Record:
    """Return a completed call; with ``waits``, one that runs."""
    usual = {
        "communicator": WORLD,
        "algorithm": "ring",
        "operator": "sum",
        "dtype": "float32",
        "count": 10,
        "nbytes": 40,
        "start": 900.0 + sequence,
        "end": 0.0 if "waits" in fields else 900.5 + sequence,
        "step": 1,
        "steps": 6,
        "site": SITE,
    }
    return Record(sequence=sequence, collective=collective, **{**usual, **fields})


def end(sequence: int, **fields: Any) -> Record:
    """Return what a rank is in that has ended its program after a call."""
    return Record(WORLD, sequence, FINALIZE, **{"start": 960.0, **fields})


#: What a call that timed out says, as the runtime writes it.
TIMEOUT = (
    "CollectiveTimeout: allreduce #2 by ring on rank {} of 4 is not complete after 5 s\n"
    "  not heard from: rank 2\n  the flight recorders: python -m mpicoll doctor --flight /x"
)


class Job:
    """The dumps of a run of ``size`` ranks, in a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {
            WORLD: ("MPI_COMM_WORLD", tuple(range(size)))
        }

    def dump(self, rank: int, /, *calls: Record, **fields: Any) -> Path:
        """Write the dump of a rank that made ``calls``."""
        recorder = Recorder()
        for identity, (name, ranks) in self.groups.items():
            if rank in ranks:
                recorder.join(identity, name, ranks.index(rank), ranks)
        for one in calls:
            recorder.keep(one)
        data = recorder.snapshot(SIGNALLED)
        usual = {
            "rank": rank,
            "world": self.size,
            "job": "",
            "joined": WALL - 900,
            "clock": {"counter": COUNTER, "wall": WALL},
            "stack": OWN,
        }
        path = self.folder / f"rank-{rank:05d}.json"
        path.write_text(json.dumps({**data, **usual, **fields}), encoding="utf-8")
        return path

    def findings(self) -> list[Finding]:
        """Return the conclusions."""
        return conclude(Scene(read(self.folder).dumps))

    def finding(self) -> Finding:
        """Return the only conclusion."""
        (found,) = self.findings()
        return found


# -- the cases --------------------------------------------------------------------------


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 3)
    for rank in range(3):
        job.dump(rank, call(1), call(2))
    assert job.findings() == []
    assert run(["doctor", "--flight", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Nobody waits" in text
    assert "3 of 3 rank(s) dumped" in text


def test_a_rank_in_its_own_code_is_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.dump(0, call(1), call(2, waits=(1,), start=950.0))
    job.dump(1, call(1, end=940.0))
    job.dump(2, call(1), call(2, waits=(1,), start=951.0))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0, 2))
    assert (found.communicator, found.sequence) == (WORLD, 2)
    assert found.since == WALL - 60
    assert found.text == (
        "Rank 1 is behind. Ranks 0, 2 wait in allreduce by ring (call #2 on MPI_COMM_WORLD, "
        f"train.py:88) since {clock(WALL - 50)} (50.0 s). It completed allreduce by ring (call #1 "
        f"on MPI_COMM_WORLD, train.py:88) at {clock(WALL - 60)}, 60.0 s before the dump, and has "
        "been in its own code since; now at data.py:12 in load."
    )


def test_a_rank_that_has_called_nothing_is_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.dump(0, call(1, waits=(1,)))
    job.dump(1)
    found = job.finding()
    assert (found.kind, found.ranks) == ("behind", (1,))
    assert "has completed no call yet" in found.text
    assert found.since == WALL - 900


def test_ranks_that_are_behind_alike_are_named_together(tmp_path: Path) -> None:
    job = Job(tmp_path, 4)
    job.dump(0, call(1), call(2, waits=(1, 2, 3)))
    for rank in (1, 2, 3):
        job.dump(rank, call(1))
    found = job.finding()
    assert found.ranks == (1, 2, 3)
    assert found.text.startswith("Ranks 1-3 are behind. Rank 0 waits in")
    assert "They completed" in found.text
    assert "have been in their own code" in found.text


def test_a_missing_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 4)
    for rank in (0, 1, 3):
        job.dump(rank, call(1), call(2, waits=((rank - 1) % 4,)))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("missing", (2,), (0, 1, 3))
    assert "Rank 2 of 4 left no dump: it is dead, stopped" in found.text
    assert "Who waits for whom: 1 → 0 → 3 → 2." in found.text


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            TIMEOUT,
            "Rank 2 of 4 left no dump: it is dead, stopped, in C code that lets no Python run, on "
            "a host that writes elsewhere, or in its own code where a limit does not ask: on "
            "another host, or where SIGUSR1 has another handler. Send SIGUSR1 while the job hangs",
        ),
        ("ValueError: x", "left no dump: it is dead, or met no error, and nobody has asked. Send"),
    ],
)
def test_a_rank_that_nobody_has_asked(tmp_path: Path, reason: str, words: str) -> None:
    job = Job(tmp_path, 4)
    for rank in (0, 1, 3):
        job.dump(rank, call(1), call(2, waits=(2,)), reason=reason)
    assert words in job.finding().text


def test_a_rank_that_has_ended_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, 3)
    ours = [{"file": "/x/progress.py", "line": 1, "function": "wait", "ours": True}]
    job.dump(0, call(1), call(2, waits=(2,)))
    job.dump(1, call(1, end=940.0), end(1), stack=ours)
    job.dump(2, call(1), call(2, waits=(1,)))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("ended", (1,), (0, 2))
    assert found.text == (
        "Rank 1 has ended its program. Ranks 0, 2 wait in allreduce by ring (call #2 on "
        f"MPI_COMM_WORLD, train.py:88) since {clock(WALL - 98)} (98.0 s). Who waits for whom: "
        "0 → 2 → 1. It completed allreduce by ring (call #1 on MPI_COMM_WORLD, train.py:88) at "
        f"{clock(WALL - 60)}, and made no call after that."
    )
    assert run(["doctor", "--flight", str(tmp_path)]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "│ ended " in line]
    assert "#1 allreduce" in row
    assert "train.py:88" in row


def test_ranks_that_end_without_a_call(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.groups["a.1"] = ("rows", (0, 1, 2))
    job.dump(0, call(1, waits=(1, 2), communicator="a.1"))
    job.dump(1, end(0))
    job.dump(2, end(0, end=961.0))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("ended", (1, 2), (0,))
    assert found.text.startswith("Ranks 1, 2 have ended their program. Rank 0 waits in")
    assert found.text.endswith("They have completed no call.")


def test_ranks_that_wait_for_the_end_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, 3)
    for rank in (0, 2):
        job.dump(rank, call(1), end(1))
    job.dump(1, call(1))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0, 2))
    assert "wait in finalize (the end of the program, on MPI_COMM_WORLD) since" in found.text
    assert run(["doctor", "--flight", str(tmp_path), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["sequence"] == 0


def test_all_have_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.dump(rank, call(1), end(1))
    found = job.finding()
    assert (found.kind, found.ranks) == ("together", (0, 1))
    assert "at step" not in found.text


def test_a_call_of_the_mpi_that_all_are_in(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.dump(rank, call(1), call(2, algorithm="native", waits=(), step=0, steps=0))
    assert job.finding().kind == "together"


def test_a_missing_rank_that_nobody_waits_for(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.dump(0, call(1))
    assert "No other rank waits for it." in job.finding().text


def test_a_chain_of_waits_leads_to_its_root(tmp_path: Path) -> None:
    job = Job(tmp_path, 5)
    job.dump(1, call(1))
    for rank in (0, 2, 3, 4):
        job.dump(rank, call(1), call(2, waits=((rank - 1) % 5,)))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0, 2, 3, 4))
    assert "Who waits for whom: 0 → 4 → 3 → 2 → 1." in found.text


def test_a_long_chain_is_cut_in_the_middle(tmp_path: Path) -> None:
    job = Job(tmp_path, 40)
    job.dump(0, call(1))
    for rank in range(1, 40):
        job.dump(rank, call(1), call(2, waits=(rank - 1,)))
    assert "39 → 38 → 37 → 36 → 35 → 34 → … → 5 → 4 → 3 → 2 → 1 → 0." in job.finding().text


def test_a_wait_leads_through_another_communicator(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.groups["p.1"] = ("pair", (2, 1))
    job.dump(0, call(1), call(2, waits=(1,)))
    job.dump(1, call(1), call(1, "barrier", communicator="p.1", start=930.0, waits=(0,)))
    job.dump(2, call(1))
    found = job.findings()
    assert [(one.kind, one.ranks, one.waiting) for one in found] == [("behind", (2,), (0, 1))]
    assert "Who waits for whom: 0 → 1 → 2." in found[0].text
    assert "Rank 1 waits in barrier by ring (call #1 on pair, train.py:88), and so rank 0 in " in (
        found[0].text
    )


def test_different_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 3)
    job.dump(0, call(1), call(2, waits=(1,)))
    job.dump(1, call(1), call(2, "bcast", root=0, waits=(0,), site="/home/ada/eval.py:7"))
    job.dump(2, call(1), call(2, waits=(1,)))
    found = job.finding()
    assert (found.kind, found.sequence, found.ranks) == ("mismatch", 2, (0, 1, 2))
    assert "at call #2 on MPI_COMM_WORLD they pass different collectives" in found.text
    assert [(row.ranks, row.collective) for row in found.rows] == [
        ("0, 2", "allreduce"),
        ("1", "bcast"),
    ]
    assert run(["doctor", "--flight", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "eval.py:7" in text
    assert text.index("different collectives") < text.index("completed")


@pytest.mark.parametrize(
    ("collective", "fields", "words"),
    [
        ("bcast", {"root": 1}, "different roots"),
        ("bcast", {"nbytes": 80, "count": 20}, "different counts"),
        ("reduce", {"dtype": "int32"}, "different datatypes"),
        ("allreduce", {"operator": "max"}, "different operators"),
        ("alltoall", {"algorithm": "bruck"}, "different algorithms"),
        ("allreduce", {"nbytes": 80, "operator": "max"}, "different operators and counts"),
    ],
)
def test_different_arguments(
    tmp_path: Path, collective: str, fields: dict[str, Any], words: str
) -> None:
    job = Job(tmp_path, 2)
    root = {"root": 0} if collective in ("bcast", "reduce") else {}
    job.dump(0, call(1, collective, **root), call(2))
    job.dump(1, call(1, collective, **{**root, **fields}), call(2))
    assert f"at call #1 on MPI_COMM_WORLD they pass {words}. " in job.finding().text


def test_a_call_without_a_datatype_counts_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        nbytes = 8000 - 8 * rank
        bare = {"operator": "", "dtype": "", "count": nbytes, "nbytes": nbytes, "root": 0}
        job.dump(rank, call(1, "bcast", **bare))
    assert "Rank 0: bcast by ring, 8000 bytes, root 0 at train.py:88;" in job.finding().text
    assert run(["doctor", "--flight", str(tmp_path)]) == 1
    assert any("│ 7992  │ bytes │" in line for line in capsys.readouterr().out.splitlines())


def test_counts_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    refused = call(
        2, algorithm="", operator="", dtype="", count=0, nbytes=0, error="ValueError: x"
    )
    job.dump(0, call(1, "alltoall"), refused, call(3))
    job.dump(1, call(1, "alltoall", nbytes=80, count=20), call(2), call(3))
    assert job.findings() == []


def test_deadlock_of_two_communicators(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.groups |= {"a.1": ("rows", (0, 1)), "b.1": ("columns", (0, 1))}
    site = "/home/ada/"
    job.dump(
        0, call(1), call(5, communicator="a.1", start=950.0, waits=(1,), site=f"{site}x.py:1")
    )
    job.dump(
        1,
        call(1),
        call(7, "bcast", communicator="b.1", start=940.0, waits=(0,), site=f"{site}y.py:2"),
    )
    job.dump(2, call(1), call(2, waits=(0,)))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("deadlock", (0, 1), (2,))
    assert found.since == WALL - 50
    assert found.text == (
        f"Deadlock since {clock(WALL - 50)}: rank 0 is in allreduce by ring (call #5 on rows, "
        "x.py:1) and waits for 1; rank 1 is in bcast by ring (call #7 on columns, y.py:2) and "
        "waits for 0. They take rows and columns in different order; let all take the same."
    )


def test_deadlock_beside_a_slow_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.groups |= {"a.1": ("rows", (0, 1, 2)), "b.1": ("columns", (0, 1))}
    job.dump(0, call(1), call(1, communicator="a.1", waits=(1, 2)))
    job.dump(1, call(1), call(1, communicator="b.1", waits=(0,)))
    job.dump(2, call(1))
    assert [(one.kind, one.ranks) for one in job.findings()] == [
        ("deadlock", (0, 1)),
        ("behind", (2,)),
    ]


def test_all_in_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 3)
    for rank in range(3):
        job.dump(rank, call(1), call(2, waits=((rank - 1) % 3,), step=1 + rank))
    found = job.finding()
    assert (found.kind, found.ranks) == ("together", (0, 1, 2))
    assert "at step 1-3 of 6, and nobody is behind" in found.text
    assert run(["doctor", "--flight", str(tmp_path)]) == 0
    assert "Dump again" in capsys.readouterr().out


def test_those_it_waits_for_have_left(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.dump(0, call(1))
    job.dump(1, call(1, waits=(0,), end=0.0))
    found = job.finding()
    assert (found.kind, found.ranks) == ("stalled", (1,))


def test_an_error_is_a_cause(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.dump(0, call(1), call(2, error="ShortMessageError: 8 bytes from rank 1, expected 16"))
    job.dump(1, call(1), call(2, error="PeerError: rank 0 gave up"))
    job.dump(2, call(1), call(2, waits=(0,)))
    found = job.findings()
    assert [(one.kind, one.ranks) for one in found] == [("failed", (0,)), ("behind", (0,))]
    assert "Rank 0 left allreduce by ring" in found[0].text
    assert "8 bytes from rank 1, expected 16" in found[0].text
    assert found[1].waiting == (2,)


def test_a_call_that_timed_out_is_one_that_waits(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    error = "CollectiveTimeout: no end after 5 s"
    job.dump(0, call(1), call(2, waits=(2,), end=990.0, error=error))
    job.dump(1, call(1), call(2, waits=(0,), end=990.0, error=error))
    job.dump(2, call(1))
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("behind", (2,), (0, 1))


def test_requests_in_flight_are_waited_for_only_inside_the_package(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    pending = call(2, form="non-blocking", waits=(1,))
    job.dump(0, call(1), pending)
    job.dump(1, call(1))
    assert job.findings() == []
    ours = [{"file": "/x/progress.py", "line": 1, "function": "wait", "ours": True}]
    job.dump(0, call(1), pending, stack=ours + OWN)
    found = job.finding()
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0,))
    assert "non-blocking allreduce" in found.text


def test_a_freed_communicator(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.join(WORLD, "MPI_COMM_WORLD", 0, (0, 1))
    recorder.keep(call(1))
    recorder.leave(WORLD)
    data = recorder.snapshot("SIGUSR1") | {"world": 2, "joined": WALL}
    data["clock"] = {"counter": COUNTER, "wall": WALL}
    (tmp_path / "a.json").write_text(json.dumps(data))
    Job(tmp_path, 2).dump(1, call(1, waits=(0,), end=0.0))
    assert Job(tmp_path, 2).finding().kind == "stalled"


# -- dumps of different runs, broken ones, foreign ones ----------------------------------


def test_dumps_of_different_moments(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.dump(0, call(1))
    job.dump(1, call(1), clock={"counter": COUNTER, "wall": WALL - 60})
    text = moments(Scene(read(tmp_path).dumps))
    assert "rank 1 was dumped at" in text
    job.dump(1, call(1))
    assert moments(Scene(read(tmp_path).dumps)) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "else"}, "not a dump of the flight recorder"),
        ({"form": 99}, "of form 99, written by mpicoll"),
        ({"rank": 7}, "broken: rank 7 of 2"),
        ({"clock": {"counter": float("nan"), "wall": 2}}, "NaN is no finite number"),
        ({"clock": {"counter": float("inf"), "wall": 2}}, "Infinity is no finite number"),
        ({"clock": {"counter": 10**30, "wall": 2}}, "is too large a number"),
        ({"rank": True}, "broken: rank is bool, expected int"),
        ({"clock": {}}, "broken: no 'counter'"),
        ({"clock": {"counter": "1", "wall": 2}}, "broken: counter is str, expected a number"),
        ({"calls": [1]}, "broken: "),
        ({"calls": None}, "broken: calls is NoneType, expected list"),
        ({"stack": [{}]}, "broken: no 'file'"),
        (
            {"communicators": [{"identity": "a", "name": "b", "ranks": [[0, 1 << 40, 1]]}]},
            "broken: a run of 1099511627776 ranks",
        ),
        ({"world": 3}, "of another run, with 3 rank(s)"),
        ({"job": "12"}, "of another run, with 2 rank(s) (job 12)"),
        ({"clock": {"counter": 1, "wall": WALL - 1000}}, "of an earlier run"),
    ],
)
def test_what_does_not_belong_is_named_and_left_out(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    job = Job(tmp_path, 2)
    job.dump(0, call(1))
    older = {"clock": {"counter": 1.0, "wall": WALL - 1}}
    job.dump(1, call(1), **{**older, **fields})
    found = read(tmp_path)
    assert list(found.dumps) == [0]
    (fault,) = found.faults
    assert fault.startswith("rank-00001.json: ")
    assert words in fault


def test_a_wait_for_a_rank_that_is_not_there_is_broken(tmp_path: Path) -> None:
    Job(tmp_path, 2).dump(1, call(1, waits=(2,)))
    assert "a call waits for ranks (2,) of 2" in read(tmp_path).faults[0]


def test_files_that_are_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(tmp_path, 1).dump(0, call(1))
    (tmp_path / "half.json").write_text('{"kind": "mpicoll fl')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert run(["doctor", "--flight", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "left out: half.json: broken: no JSON" in text
    assert "left out: list.json: not a dump" in text
    assert "left out: bytes.json: " in text


def test_the_newer_of_two_dumps_of_a_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.dump(0, call(1), clock={"counter": 1.0, "wall": WALL - 1}).rename(tmp_path / "old.json")
    job.dump(0, call(2))
    found = read(tmp_path)
    assert found.dumps[0].file == "rank-00000.json"
    assert found.faults == ("old.json: older than rank-00000.json, of the same rank",)


@pytest.mark.parametrize("folder", ["none", "empty"])
def test_a_folder_without_dumps(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["doctor", "--flight", str(tmp_path / folder)]) == 2
    assert "there is no " in capsys.readouterr().err


# -- what is printed and written ---------------------------------------------------------


def test_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 3)
    job.dump(0, call(1), call(2, waits=(2,)))
    job.dump(1, call(1), call(2, waits=(0,)))
    file = tmp_path / "out.txt"
    assert run(["doctor", "--flight", str(tmp_path), "--json", str(file)]) == 1
    data = json.loads(file.read_text())
    assert (data["command"], data["world"], data["missing"]) == ("flight", 3, [2])
    assert data["findings"][0]["kind"] == "missing"
    assert data["findings"][0]["waiting"] == [0, 1]
    assert data["communicators"][0]["places"][1]["running"][0]["waits"] == [0]
    text = capsys.readouterr().out
    assert text.startswith("Rank 2 of 3 left no dump")
    for words in ("#1 allreduce", "#2 allreduce", "1 of 6", "no dump", "train.py:88"):
        assert words in text


def test_one_error_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 4)
    job.dump(0, call(1), reason=f"{ASKED} 1, whose time limit is over")
    for rank in (1, 2, 3):
        timed = call(2, waits=(0,), error=TIMEOUT.format(rank))
        job.dump(rank, call(1), timed, reason=timed.error)
    run(["doctor", "--flight", str(tmp_path)])
    last = capsys.readouterr().out.partition("4 of 4 rank(s) dumped")[2]
    assert " ".join(last.split()).endswith(
        "CollectiveTimeout: allreduce #2 by ring on rank 1 of 4 is not complete after 5 s "
        "not heard from: rank 2 and 3 more rank(s)"
    )


def test_no_rank_seems_to_wait_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, 4)
    for rank in range(3):
        job.dump(rank, call(1), call(2, waits=(3,) if rank < 2 else (1, 3)))
    job.dump(3, call(1))
    assert run(["doctor", "--flight", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [(row[0], row[4], row[6]) for row in rows if row[0]] == [
        ("3", "", "data.py:12 in"),  # the rest is in the next line
        ("0, 1", "3", "train.py:88"),
        ("2", "1, 3", "train.py:88"),
    ]


def test_many_ranks_take_few_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 64)
    for rank in range(63):
        job.dump(rank, call(1), call(2, waits=(63,)))
    job.dump(63, call(1))
    assert run(["doctor", "--flight", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("allreduce" in line and "│" in line for line in lines) == 2
    assert any("0-62" in line for line in lines)


def test_a_large_circle_is_found_without_recursion(tmp_path: Path) -> None:
    size = 1500
    job = Job(tmp_path, size)
    for rank in range(size):
        job.dump(rank, call(2 + (rank == 0), waits=((rank + 1) % size,), algorithm="ring"))
    scene = Scene(read(tmp_path).dumps)
    assert conclude(scene)


def test_it_loads_no_mpi(tmp_path: Path) -> None:
    Job(tmp_path, 1).dump(0, call(1))
    code = (
        "import sys; from mpicoll.cli.main import run; "
        f"run(['doctor', '--flight', {str(tmp_path)!r}]); sys.exit('mpi4py' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7, 8"
    assert spans([]) == ""


@pytest.mark.parametrize("name", ["dp[/tp]", "[bold]", "a[b", "\\[x]"])
def test_names_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """They are no markup, in the sentences and in the tables."""
    job = Job(tmp_path, 2)
    job.groups[WORLD] = (name, (0, 1))
    job.dump(0, call(1), call(2, waits=(1,), site=f"/x/{name}.py:1", algorithm=name))
    job.dump(1, call(1), call(2, count=7, waits=(0,), algorithm=name))
    run(["doctor", "--flight", str(tmp_path)])
    text = capsys.readouterr().out
    assert f"{name}, 2 rank(s)" in text
    assert text.count(name) >= 3


def test_a_clock_that_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.dump(rank, call(1), clock={"counter": COUNTER, "wall": 1e200})
    assert run(["doctor", "--flight", str(tmp_path)]) == 0
    assert "the last at an unknown time" in capsys.readouterr().out
