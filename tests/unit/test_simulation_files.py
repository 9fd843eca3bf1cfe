"""Networks of files, SimGrid, and the sub-command simulate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicoll.algorithms import find, names
from mpicoll.cli import app, launch, plans
from mpicoll.cli.common import sizes
from mpicoll.cli.main import run
from mpicoll.cli.networks import near_cube
from mpicoll.errors import SettingError
from mpicoll.simulation import netfile, simgrid
from mpicoll.simulation.fabric import Fabric, Local
from mpicoll.simulation.machine import Machine
from mpicoll.simulation.network import FatTree
from mpicoll.simulation.predict import predict

SIMGRID = pytest.mark.skipif(bool(simgrid.fault(2)), reason="SimGrid is not installed")
TWO = {"nodes": ["a", "b"], "links": [{"between": ["a", "s"]}, {"between": ["s", "b"]}]}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    if "simulate" not in app.COMMANDS:
        monkeypatch.setattr(app, "COMMANDS", (*app.COMMANDS, "simulate"))


def written(path: Path, data: Any) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return str(path)


# -- networks of files --------------------------------------------------------------------


def test_a_file_has_ways_rates_and_latencies(tmp_path: Path) -> None:
    links = [
        {"between": ["a", "s"], "bandwidth": 2, "latency": 3},
        {"between": ["t", "s"], "latency": 0},
        {"between": ["b", "t"]},
        {"between": ["c", "s"]},
    ]
    file = written(tmp_path / "net.json", {"nodes": ["a", "b", "c"], "links": links})
    graph = netfile.read(file, 5e9, 1e-6)
    found, late = graph.routes(np.array([0, 1, 2]), np.array([1, 0, 2]))
    assert found.tolist() == [[0, 5, 6], [2, 1, 4], [-1, -1, -1]]
    assert late == pytest.approx([4e-6, 4e-6, 0.0])
    assert graph.rates == pytest.approx([2e9, 5e9, 5e9, 5e9] * 2)
    assert str(graph) == "graph of 3 nodes, 2 switches and 4 links"


def test_a_star_in_a_file_is_a_switch(tmp_path: Path) -> None:
    names_ = [f"n{number}" for number in range(6)]
    star = {
        "nodes": names_,
        "links": [{"between": [name, "s"], "latency": 0.5} for name in names_],
    }
    graph = netfile.read(written(tmp_path / "star.json", star), 4e9, 1e-6)
    machine, local = Machine(), Local()
    one = Fabric(12, 2, graph, float("inf"), local)
    other = Fabric(12, 2, FatTree(6, 6, 4e9, 1e-6, 0.0), 4e9, local)
    for name in names("allreduce"):
        times = [
            predict(find("allreduce", name), [8, 100_000], 0, fabric, machine).seconds
            for fabric in (one, other)
        ]
        assert times[0] == times[1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "line 1: no JSON"),
        ([], 'expected {"nodes"'),
        ({"nodes": ["a"], "links": [], "more": 1}, 'expected {"nodes"'),
        ({"nodes": [], "links": []}, '"nodes" is not a list of names'),
        ({"nodes": [1], "links": []}, '"nodes" is not a list of names'),
        ({"nodes": ["a", "a"], "links": []}, "\"nodes\" has 'a' twice"),
        ({"nodes": ["a"], "links": {}}, '"links" is not a list'),
        ({"nodes": ["a"], "links": [3]}, r"links\[0\]: expected"),
        ({"nodes": ["a"], "links": [{"between": ["a", "b"], "x": 1}]}, r"links\[0\]: expected"),
        ({"nodes": ["a"], "links": [{"between": ["a"]}]}, '"between" is not two names'),
        ({"nodes": ["a"], "links": [{"between": ["a", "a"]}]}, "from 'a' to itself"),
        (
            {"nodes": ["a"], "links": [{"between": ["a", "b"]}, {"between": ["b", "a"]}]},
            r"links\[1\]: these two have a link already",
        ),
        (
            {"nodes": ["a"], "links": [{"between": ["a", "b"], "bandwidth": "x"}]},
            "bandwidth 'x' is no number",
        ),
        (
            {"nodes": ["a"], "links": [{"between": ["a", "b"], "bandwidth": 0}]},
            "bandwidth 0, expected more than 0",
        ),
        (
            {"nodes": ["a"], "links": [{"between": ["a", "b"], "latency": -1}]},
            "latency -1, expected 0 or more",
        ),
        ({"nodes": ["a", "b"], "links": []}, "no way from 'a' to 'b'"),
    ],
)
def test_what_is_wrong_with_a_file(data: Any, words: str, tmp_path: Path) -> None:
    file = written(tmp_path / "net.json", data)
    with pytest.raises(SettingError, match=words) as caught:
        netfile.read(file, 1e9, 0.0)
    assert str(caught.value).startswith(file)


def test_a_file_may_be_missing_or_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="can not be read"):
        netfile.read(str(tmp_path / "none.json"), 1e9, 0.0)
    monkeypatch.setattr(netfile, "MOST", 2)
    with pytest.raises(SettingError, match="3 nodes and switches; at most 2 are taken"):
        netfile.read(written(tmp_path / "net.json", TWO), 1e9, 0.0)


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [(1, (1, 1, 1)), (7, (7, 1, 1)), (8, (2, 2, 2)), (16384, (32, 32, 16)), (100, (5, 5, 4))],
)
def test_near_cube(nodes: int, shape: tuple[int, int, int]) -> None:
    assert near_cube(nodes) == shape


# -- the sub-command ----------------------------------------------------------------------


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--help"]) == 0
    assert "mpicoll simulate allreduce -n 131072" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument"),
        (["allredcue"], "there is no 'allredcue'"),
        (["allreduce", "-a", "rings"], "no algorithm 'rings'; known: circulant"),
        (["allreduce", "--network", "star"], "expected fat-tree, torus, dragonfly, or the name"),
        (["allreduce", "--network", "no.json"], "no.json can not be read"),
        (["allreduce", "--latency", "-1"], "--latency -1, expected 0 or more"),
        (["allreduce", "--bandwidth", "0"], "--bandwidth 0, expected more than 0"),
        (["allreduce", "--bandwidth", "nan"], "--bandwidth nan, expected more than 0"),
        (["allreduce", "--oversubscription", "0"], "--oversubscription 0, expected"),
        (["allreduce", "--overhead", "-1"], "--overhead -1, expected 0 or more"),
        (["allreduce", "--ranks-per-node", "0"], "0 is not in the range"),
        (["allreduce", "--network", "torus", "--torus", "4x4"], "expected XxYxZ"),
        (["allreduce", "--network", "torus", "--torus", "2x2x2"], "has 8 places for 1024 nodes"),
        (["allreduce", "--network", "dragonfly", "--dragonfly", "1,2"], "expected P,A,H"),
        (
            ["allreduce", "--network", "dragonfly", "--dragonfly", "2,2,1"],
            "1024 nodes need 256 groups, and a group's 2 global links join 3 at most",
        ),
        (["allreduce", "--json", "/no/such/x"], "there is no folder /no/such"),
    ],
)
def test_misuse(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said


def test_a_file_of_too_few_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "net.json", TWO)
    assert run(["simulate", "allreduce", "-n", "3", "--network", file]) == 2
    assert "has 2 nodes, and the ranks need 3" in capsys.readouterr().err


@pytest.mark.parametrize("network", ["fat-tree", "torus", "dragonfly", "FILE"])
def test_all_algorithms_and_the_winner(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [f"n{number}" for number in range(12)]
    links = [{"between": [one, "s"]} for one in nodes]
    if network == "FILE":
        network = written(tmp_path / "net.json", {"nodes": nodes, "links": links})
    file = tmp_path / "out.json"
    arguments = ["simulate", "allreduce", "-n", "24", "--ranks-per-node", "2"]
    arguments += ["--network", network, "--sizes", "8,1M"]
    assert run([*arguments, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [row["algorithm"] for row in data["results"]] == list(names("allreduce"))
    for size in ("8", "1048576"):
        times = {row["algorithm"]: row["seconds"][size] for row in data["results"]}
        assert data["winners"][size] == min(times, key=lambda name: times[name])
    assert data["winners"]["8"] == "recursive_doubling" or network != "fat-tree"
    small, large = data["winners"].values()
    one = f"8 B to 1 MiB: {small}" if small == large else f"8 B: {small}; 1 MiB: {large}"
    assert f"winner  {one}\n" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("collective", ["barrier", "alltoall", "exscan", "scatter"])
def test_other_collectives(collective: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", collective, "-n", "5", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert all(row["seconds"] for row in data["results"])


def test_one_rank_and_the_automatic_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "allreduce", "-n", "1", "-a", "auto"]) == 0
    assert run(["simulate", "allreduce", "-n", "1024", "-a", "auto", "--json", "-"]) == 0
    out = capsys.readouterr().out
    data = json.loads(out[out.index("{") :])
    wanted = [plans.automatic("allreduce", 1024, size) for size in sizes("8:128M:64")]
    assert [row["algorithm"] for row in data["results"]] == list(dict.fromkeys(wanted))


def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "bcast", "-n", "1500", "-a", "circulant", "--patience", "0"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "—" in out
    assert "circulant left out: no symmetry found" in out


def test_more_ranks_per_node_than_cores_are_slower(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "barrier", "-n", "8", "--ranks-per-node", "8", "--json", "-"]
    times = []
    for cores in ("0", "8", "2"):
        assert run([*arguments, "--cores", cores]) == 0
        times.append(json.loads(capsys.readouterr().out)["results"][0]["seconds"]["0"])
    assert times[0] == times[1]
    # Three rounds of two overheads of 0.5 µs, which four ranks a core stretch fourfold.
    assert times[2] - times[1] == pytest.approx(3 * 2 * 3 * 0.5e-6, rel=1e-6)


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    file = tmp_path / "out.json"
    assert run(["simulate", "allreduce", "--json", str(file)]) == 0
    assert run(["simulate", "allreduce", "--latency", "-1"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not file.exists()


def test_simulating_loads_no_mpi() -> None:
    code = (
        "import sys; from mpicoll.cli import app; "
        "app.COMMANDS = tuple(dict.fromkeys((*app.COMMANDS, 'simulate'))); "
        "from mpicoll.cli.main import run; run(['simulate', 'bcast', '-n', '3']); "
        "sys.exit('mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- SimGrid ------------------------------------------------------------------------------


def test_without_simgrid_its_absence_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "simgrid", None)
    monkeypatch.setattr(simgrid.importlib.util, "find_spec", lambda name: None)
    assert run(["simulate", "allreduce", "-n", "4", "--engine", "simgrid"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no module simgrid for this Python" in said
    assert "python3-simgrid" in said


def test_simgrid_takes_few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simgrid.importlib.util, "find_spec", lambda name: object())
    assert simgrid.fault(128) == ""
    assert simgrid.fault(129) == "--engine simgrid: 129 ranks, at most 128 are taken"


@SIMGRID
@pytest.mark.parametrize("name", ["recursive_doubling", "ring", "rabenseifner", "reduce_bcast"])
def test_simgrid_has_the_same_opinion(name: str) -> None:
    """Where what shares a link is alike and all start when both ends are there, both agree."""
    fabric = Fabric(8, 2, FatTree(4, 4, 1e9, 1e-6, 0.0), 1e9, Local(0.3e-6, 4e9))
    machine = Machine(eager=0)
    algorithm = find("allreduce", name)
    ours = predict(algorithm, [1 << 20], 0, fabric, machine).seconds[0]
    theirs = simgrid.seconds(algorithm, [1 << 20], 0, fabric, machine)[0]
    # In SimGrid a sender too waits for the latency: a step is longer by that at most.
    steps = 2 * 8
    assert ours <= theirs * (1 + 1e-6)
    assert theirs <= ours + steps * 1e-6
