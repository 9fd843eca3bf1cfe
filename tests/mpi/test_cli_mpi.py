"""The command line on all ranks: demo, bench, validate, doctor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpicoll.algorithms import every
from mpicoll.cli import launch
from mpicoll.cli.main import run

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size


@pytest.fixture
def json_file(tmp_path: Path) -> str:
    """Return the name of a file that all ranks agree on."""
    return WORLD.bcast(str(tmp_path / "out.json"), root=0)


def _results(file: str) -> dict[str, Any]:
    """Return what rank 0 wrote."""
    text = Path(file).read_text(encoding="utf-8") if WORLD.rank == 0 else ""
    data: dict[str, Any] = json.loads(WORLD.bcast(text, root=0))
    return data


def test_demo(json_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--json", json_file]) == 0
    assert bool(capsys.readouterr().out) == launch.speaks()
    demos = {demo["collective"]: demo for demo in _results(json_file)["demos"]}
    ranks, nothing = range(SIZE), [None] * (SIZE - 1)
    total = SIZE * (SIZE + 1) // 2
    tens = [10 * rank for rank in ranks]
    assert demos["broadcast"]["after"] == [[10, 20, 30]] * SIZE
    assert demos["reduce"]["after"] == [[total], *nothing]
    assert demos["allreduce"]["after"] == [[total, 10 * total]] * SIZE
    assert demos["gather"]["after"] == [tens, *nothing]
    assert demos["allgather"]["after"] == [tens] * SIZE
    assert demos["scatter"]["after"] == [[ten] for ten in tens]
    assert demos["reduce_scatter"]["after"] == [[sum(tens) + SIZE * rank] for rank in ranks]
    assert demos["alltoall"]["after"] == [[ten + rank for ten in tens] for rank in ranks]
    assert demos["alltoall_uneven"]["after"] == [
        [[10 * peer + rank] * ((peer + rank) % 3) for peer in ranks] for rank in ranks
    ]
    if SIZE == 4:
        assert demos["reduce_scatter"]["after"] == [[60], [64], [68], [72]]
        assert demos["alltoall"]["after"][2] == [2, 12, 22, 32]


def test_bench(json_file: str) -> None:
    arguments = ["bench", "allreduce", "gather", "barrier", "-a", "auto,ring", "--sizes", "8,1K"]
    assert run([*arguments, "--repeats", "2", "--seconds", "0", "--json", json_file]) == 0
    data = _results(json_file)
    assert data["environment"]["ranks"] == SIZE
    names = {(row["collective"], row["algorithm"].split(":")[0]) for row in data["results"]}
    assert names == {
        ("allreduce", "native"),
        ("allreduce", "native again"),
        ("allreduce", "auto"),
        ("allreduce", "ring"),
        ("gather", "native"),
        ("gather", "native again"),
        ("gather", "auto"),
        ("barrier", "native"),
        ("barrier", "native again"),
        ("barrier", "auto"),
    }
    assert not any(row["fault"] for row in data["results"])
    assert all(row["rounds"] == 2 for row in data["results"])


def test_bench_finds_wrong_data(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll import Comm

    def lazy(self: Comm, *arguments: object, **keywords: object) -> None:
        self.Barrier()

    monkeypatch.setattr(Comm, "Allreduce", lazy)
    arguments = ["bench", "allreduce", "-a", "ring", "--sizes", "64", "--repeats", "2"]
    assert run([*arguments, "--seconds", "0", "--json", json_file]) == 1
    faults = {row["algorithm"]: row["fault"] for row in _results(json_file)["results"]}
    assert "expected" in faults["ring"]
    assert not faults["native"]


def test_validate(json_file: str) -> None:
    assert run(["validate", "scan", "alltoall", "--json", json_file]) == 0
    data = _results(json_file)
    assert data["passed"]
    assert [(row["collective"], row["algorithm"]) for row in data["results"]] == [
        (one.collective, one.name) for one in every() if one.collective in ("scan", "alltoall")
    ]
    assert all(row["cases"] and not row["faults"] for row in data["results"])


def test_validate_names_what_fails(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll import Comm

    right = Comm.Bcast

    def wrong(self: Comm, buf: Any, root: int = 0, **keywords: Any) -> None:
        right(self, buf, root, **keywords)
        if buf.size and keywords["algorithm"] == "chain" and self.rank == self.size - 1:
            buf[-1] += 1

    monkeypatch.setattr(Comm, "Bcast", wrong)
    assert run(["validate", "bcast", "--json", json_file]) == 1
    faults = {row["algorithm"]: row["faults"] for row in _results(json_file)["results"]}
    assert faults["chain"]
    assert f"rank {SIZE - 1}: element" in faults["chain"][0]
    assert not faults["binomial"]


def test_doctor(json_file: str) -> None:
    assert run(["doctor", "--json", json_file]) == 0
    data = _results(json_file)
    assert data["ranks"] == sum(node["ranks"] for node in data["nodes"]) == SIZE
    assert {"mpicoll", "mpi4py", "numpy", "python"} <= set(data["versions"])


def test_doctor_shows_a_wrong_variable(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_ALLREDUCE", "rings")
    assert run(["doctor", "--json", json_file]) == 1
    data = _results(json_file)
    assert data["variables"]["MPICOLL_ALLREDUCE"] == "rings"
    assert "no algorithm 'rings'" in data["advice"][0]["text"]
    assert os.environ["MPICOLL_ALLREDUCE"] == "rings"


def test_a_file_that_can_not_be_written_ends_all_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    assert run(["demo", "--json", "/no/such/folder/x.json"]) == 2
    words = "there is no folder" if launch.speaks() else ""
    assert words in capsys.readouterr().err
