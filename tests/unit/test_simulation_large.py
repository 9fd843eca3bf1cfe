"""What makes a replay of very many ranks short: laps, samples, and limits of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicoll.algorithms import find
from mpicoll.cli import launch
from mpicoll.cli.main import run
from mpicoll.cli.networks import LONGEST, _ways, near_cube, roomy
from mpicoll.simulation import fabric as fabric_module
from mpicoll.simulation import lockstep, netfile
from mpicoll.simulation import sample as sample_module
from mpicoll.simulation.fabric import Fabric, Local, Network
from mpicoll.simulation.machine import MOST, TICK, Machine, TooLongError, ticks
from mpicoll.simulation.network import Dragonfly, Dragons, FatTree, Torus
from mpicoll.simulation.predict import predict

LOCAL = Local(0.3e-6, 7e9)
ODD = Machine(overhead=0.7e-6, step=0.3e-6, gamma=0.3e-9, copy=0.1e-9, eager=1000)
SIZES = (8, 65536, 1 << 24)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


def made(kind: str, nodes: int) -> Network:
    if kind == "fat-tree":
        return FatTree(nodes, 8, 3e9, 1e-6, 1e-7, 2.0)
    if kind == "torus":
        return Torus(nodes, (8, 4, -(-nodes // 32)), 3e9, 1e-6, 1e-7)
    return Dragonfly(nodes, Dragons(2, 4, 6), 3e9, 1e-6, 1e-7)


# -- laps ---------------------------------------------------------------------------------


def test_how_often_steps_come_again() -> None:
    doing = np.array([5, 5, 5, 1, 2, 1, 2, 1, 3])
    assert lockstep._repeated(doing, 1).tolist() == [3, 2, 1, 1, 1, 1, 1, 1, 1]
    assert lockstep._repeated(doing, 2).tolist() == [1, 1, 1, 2, 2, 1, 1, 1, 1]
    assert lockstep._repeated(doing[:1], 1).tolist() == [1]


def test_a_lap_of_steps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances of one period of the network after the other are alike."""
    steps: list[int] = []
    step = lockstep._Replay._step
    monkeypatch.setattr(lockstep._Replay, "_step", lambda *given: steps.append(1) or step(*given))
    fabric = Fabric(512, 1, made("fat-tree", 512), 5e9, LOCAL)
    algorithm = find("alltoall", "pairwise")
    found = predict(algorithm, SIZES, 0, fabric, ODD)
    assert found.how == ("lockstep",) * len(SIZES)
    assert 0 < len(steps) < 200 < 511
    assert found.seconds == predict(algorithm, SIZES, 0, fabric, ODD, how="all").seconds


@pytest.mark.parametrize("kind", ["fat-tree", "torus", "dragonfly"])
def test_links_are_looked_at_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loads are those of all messages, whatever fits into one block, and is kept."""
    fabric = Fabric(128, 2, made(kind, 64), 5e9, LOCAL)
    random = np.random.default_rng(1)
    source, target = random.integers(0, 128, (2, 500))
    target[target == source] += 1
    target %= 128
    level = random.integers(0, 3, 500)
    for units in (np.full(500, 7), random.integers(1, 9, 500)):
        whole = fabric.transfer(source, target, units, level)
        with monkeypatch.context() as patch:
            patch.setattr(fabric_module, "BLOCK", 64)
            patch.setattr(fabric_module, "KEPT", 1)
            parts = fabric.transfer(source, target, units, level)
        assert (whole[0] == parts[0]).all()
        assert (whole[1] == parts[1]).all()


# -- samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [512, 500])
@pytest.mark.parametrize("kind", ["torus", "dragonfly"])
@pytest.mark.parametrize(
    ("collective", "name"), [("alltoall", "pairwise"), ("reduce_scatter", "direct")]
)
def test_a_sample_is_near(
    collective: str, name: str, kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the steps tell the time of all within a fifth, also where ranks are added."""
    fabric = Fabric(nodes, 1, made(kind, nodes), 5e9, LOCAL)
    algorithm = find(collective, name)
    exact = predict(algorithm, SIZES, 0, fabric, ODD)
    assert "sampled" not in exact.how
    monkeypatch.setattr(sample_module, "LINKS", 0)
    monkeypatch.setattr(sample_module, "LONG", 8)
    monkeypatch.setattr(sample_module, "MOST", 256)
    found = predict(algorithm, SIZES, 0, fabric, ODD)
    assert found.how == ("sampled",) * len(SIZES)
    for sampled, full in zip(found.seconds, exact.seconds, strict=True):
        assert sampled == pytest.approx(full, rel=0.2)


def test_a_sample_counts_every_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "LINKS", 0)
    monkeypatch.setattr(sample_module, "SAMPLED", 1)
    fabric = Fabric(512, 1, made("torus", 512), 5e9, LOCAL)
    seen: list[Any] = []
    replay = lockstep.replay

    def noted(march: lockstep.March, *given: Any) -> Any:
        seen.append((march, given[-1]))
        return replay(march, *given)

    monkeypatch.setattr(lockstep, "replay", noted)
    predict(find("alltoall", "pairwise"), SIZES, 0, fabric, ODD)
    march, counts = seen[0]
    # The first step has a copy too, and stands for itself.
    assert march.steps.size == counts.size == 1 + sample_module.FEWEST
    assert counts.sum() == 511
    assert len(set(march.steps.tolist())) == counts.size


def test_what_insists_on_a_way_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "LINKS", 0)
    fabric = Fabric(128, 1, made("torus", 128), 5e9, LOCAL)
    found = predict(find("alltoall", "pairwise"), SIZES, 0, fabric, ODD, how="lockstep")
    assert found.how == ("lockstep",) * len(SIZES)
    few = predict(find("allreduce", "rabenseifner"), SIZES, 0, fabric, ODD)
    assert few.how == ("lockstep",) * len(SIZES)  # it has few steps


# -- limits -------------------------------------------------------------------------------


def test_times_beyond_the_clocks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ticks(MOST * TICK / 2) > 0
    with pytest.raises(TooLongError, match="more than five days"):
        ticks(2 * MOST * TICK)
    arguments = ["simulate", "bcast", "-n", "4", "-a", "binomial,chain", "--sizes", "16G"]
    assert run([*arguments, "--bandwidth", "1e-6", "--local-bandwidth", "1e-6"]) == 0
    out = capsys.readouterr().out
    assert "binomial left out: it takes more than five days" in out


@pytest.mark.parametrize("nodes", [8, 131071, 1 << 20])
def test_a_torus_of_ill_numbers_has_room(nodes: int) -> None:
    shape = roomy(nodes)
    assert shape[0] * shape[1] * shape[2] >= nodes
    assert max(shape) ** 3 < 2 * (nodes + 12 * nodes ** (2 / 3) + 48)
    assert _ways(shape) <= LONGEST
    assert _ways(near_cube(131071)) > LONGEST


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "0 is not in the range"),
        (["-n", "10000000"], "10000000 is not in the range"),
        (["--eager", "-5"], "-5 is not in the range"),
        (["--patience", "-1"], "--patience -1, expected 0 or more"),
        (["--patience", "nan"], "--patience nan, expected 0 or more"),
        (["--network", "torus", "--torus", "999999x999999x9"], "places, at most"),
        (["--network", "torus", "--torus", "99999x1x1"], "messages pass up to 49999 links"),
        (["--network", "dragonfly", "--dragonfly", "9,99999,9"], "links, at most"),
    ],
)
def test_misuse(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "allreduce", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_file_nested_without_end(tmp_path: Path) -> None:
    file = tmp_path / "net.json"
    file.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(netfile.SettingError, match="nested too deeply"):
        netfile.read(str(file), 1e9, 0.0)


def test_a_prime_number_of_ranks_on_every_network(capsys: pytest.CaptureFixture[str]) -> None:
    """Every algorithm that has no other limit has a time."""
    for network in ("fat-tree", "torus", "dragonfly"):
        arguments = ["simulate", "alltoall", "-n", "131", "--sizes", "8,1M", "--json", "-"]
        assert run([*arguments, "--network", network]) == 0
        data = json.loads(capsys.readouterr().out)
        assert all(row["seconds"] for row in data["results"])
