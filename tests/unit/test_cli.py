"""The command line without MPI: explain, which, arguments, and what launchers say."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mpicoll.algorithms import every
from mpicoll.cli import launch, plans, spacetime, textpicture
from mpicoll.cli.app import COMMANDS
from mpicoll.cli.common import Name, human_bytes, human_rate, human_seconds, sizes
from mpicoll.cli.main import run
from mpicoll.cli.picture import svg
from mpicoll.cli.which import collective
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.schedule.draw import from_json

ALGORITHMS = [pytest.param(one, id=f"{one.collective}-{one.name}") for one in every()]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "command",
    [(), ("demo",), ("explain",), ("bench",), ("tune",), ("simulate",), ("validate",), ("trace",)],
)
def test_help_has_examples(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert f"mpicoll {' '.join(command)}".strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exlain"], "there is no command 'exlain'; known: demo, explain"),
        (["explain"], "which COLLECTIVE?"),
        (["explain", "allredcue"], "there is no 'allredcue'; known: allgather"),
        (["explain", "allreduce", "-a", "rings"], "no algorithm 'rings'; known: circulant"),
        (["explain", "reduce", "-n", "4", "--root", "4"], "expected a rank from 0 to 3"),
        (["explain", "allreduce", "--root", "1"], "allreduce has no root"),
        (["explain", "allreduce", "--json", "/no/such/x"], "there is no folder /no/such"),
        (["explain", "allreduce", "--format", "png"], "a PNG needs a file"),
        (["explain", "--which"], "no terminal to ask on; answer with --flow"),
        (["bench"], "Missing argument"),
        (["bench", "allreduce", "--sizes", "8:x"], "'x' is no size"),
        (["bench", "allreduce", "-a", "rings"], "no algorithm 'rings'"),
        (["bench", "allreduce", "--compare", "glow"], "expected some of native, gloo"),
        (["bench", "allreduce", "--compare", "none,gloo"], "expected some of native, gloo"),
        (
            ["bench", "allreduce", "--device", "cuda", "--compare", "gloo"],
            "Gloo takes host memory only; leave it out with --device cuda",
        ),
        (["bench", "--study", "--device", "cuda"], "leave out --device"),
        (["bench", "allreduce", "--study"], "leave out COLLECTIVE"),
        (["bench", "--study", "--sizes", "8", "--plot", "-"], "leave out --sizes, --plot"),
        (["bench", "--study", "--compare", "gloo"], "with native or none, not with gloo"),
    ],
)
def test_misuse_is_said_and_has_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def test_list_of_commands_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:\n")[1]
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)  # a line each
    assert "..." not in listed


def test_misuse_is_silent_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    assert run(["explain"]) == 2
    assert run(["explain", "allreduce"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_schedule_has_a_picture(algorithm: plans.Algorithm, size: int) -> None:
    schedules = plans.build(algorithm, size, 3 * size)
    plan = spacetime.diagram(schedules)
    assert len(plan.arrows) == sum(
        len(step.sends) for schedule in schedules for step in schedule.steps
    )
    assert all(0 <= arrow.sent < arrow.arrived <= plan.time for arrow in plan.arrows)
    for part in textpicture.pictures(schedules, 100):
        assert max(map(len, part.plain.splitlines())) <= 100
    drawing = svg(algorithm.name, schedules)
    lines = ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}line")
    assert sum("marker-end" in line.attrib for line in lines) == len(plan.arrows)


def test_time_of_a_ring_is_its_number_of_steps() -> None:
    plan = spacetime.diagram(plans.build(plans.find("allreduce", "ring"), 8, 16))
    assert plan.time == 14
    assert plan.phases == ("reduce-scatter", "allgather")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_explain(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", name, "-n", "4"]) == 0
    assert run(["explain", name, "-n", "4", "-a", "all"]) == 0
    out = capsys.readouterr().out
    assert "every send has its receive, nothing deadlocks" in out
    assert "FAILED" not in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("form", ["svg", "png", "json", "spans"])
def test_explain_writes_a_picture(form: str, tmp_path: Path) -> None:
    file = tmp_path / "ring.out"
    assert run(["explain", "allreduce", "-a", "ring", "--format", form, "--out", str(file)]) == 0
    head = {"svg": b"<svg", "png": b"\x89PNG", "json": b"{", "spans": b"allreduce ring"}[form]
    assert file.read_bytes().startswith(head)


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "allreduce", "-a", "ring", "-n", "4", "-c", "8", "--json", "-"]
    assert run(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cost"]["steps"] == 6
    assert data["cost"]["bytes_sent"] == 12 * 8
    assert len(from_json(data)) == 4


@pytest.mark.parametrize(
    ("flow", "reduced", "same", "expected"),
    [
        ("one-to-all", False, True, "bcast"),
        ("one-to-all", False, False, "scatter"),
        ("all-to-one", True, False, "reduce"),
        ("all-to-one", False, False, "gather"),
        ("all-to-all", True, True, "allreduce"),
        ("all-to-all", True, False, "reduce_scatter"),
        ("all-to-all", False, True, "allgather"),
        ("all-to-all", False, False, "alltoall"),
    ],
)
def test_which(flow: str, reduced: bool, same: bool, expected: str) -> None:
    assert collective(flow, reduced, same) == expected
    answers = ["--reduced" if reduced else "--kept", "--same" if same else "--different"]
    assert run(["explain", "--which", "--flow", flow, *answers]) == 0


def test_which_warns_of_a_cheaper_one() -> None:
    found = {instead: need for instead, _, need in plans.cheaper("allgather", 8, 1 << 20)}
    assert "gather" in found
    assert found["gather"] < plans.sent_by_all("allgather", 8, 1 << 20)


@pytest.mark.parametrize("here", sorted({here for here, _, _ in plans.CHEAPER}))
def test_cheaper_ones_send_less(here: str) -> None:
    own = plans.sent_by_all(here, 16, 1 << 20)
    assert all(need < own for _, _, need in plans.cheaper(here, 16, 1 << 20))


def test_sizes() -> None:
    assert sizes("8:128") == (8, 32, 128)
    assert sizes("1K:8K:2") == (1024, 2048, 4096, 8192)
    assert sizes("64K,8,1M") == (8, 65536, 1 << 20)
    for wrong in ("8:4", "8:x", "x", "1:2:1", "1:2:3:4", "0:8"):
        with pytest.raises(ValueError, match=r"size|expected"):
            sizes(wrong)


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (8, 1536, 16 << 20)] == ["8 B", "1.5 KiB", "16 MiB"]
    assert [human_seconds(t) for t in (2e-7, 1.234e-3, 2.5)] == ["0.20 µs", "1.23 ms", "2.50 s"]
    assert human_rate(12_345_678) == "12.3 MB"


def test_names_have_aliases() -> None:
    name = Name()
    assert name.convert("Broadcast", None, None) == "bcast"
    assert name.convert("reduce-scatter", None, None) == "reduce_scatter"
    assert name.convert("all_to_all", None, None) == "alltoall"


def test_launchers() -> None:
    assert launch.found({}) is None
    assert launch.found({"PMI_RANK": "2", "PMI_SIZE": "4"})[1:] == (2, 4)
    assert launch.found({"SLURM_PROCID": "0"}) is None  # a batch script, not a step
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    assert launch.found(slurm) == ("srun", 3, 8)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert launch.found({**slurm, **mpi})[1:] == (1, 2)


def test_launcher_and_mpi_disagree() -> None:
    environment = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}
    assert launch.disagreement(8, environment) == ""
    assert launch.disagreement(1, {}) == ""
    words = launch.disagreement(1, environment)
    assert "your launcher and your mpi4py disagree: 8 singletons were started" in words
    assert launch.mismatch("MPICH", {"OMPI_COMM_WORLD_SIZE": "4"})
    assert launch.mismatch("Open MPI", {"OMPI_COMM_WORLD_SIZE": "4"}) == ""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_explain_loads_no_mpi() -> None:
    code = (
        "import sys; from mpicoll.cli.main import run; run(['explain', 'bcast', '-n', '3']); "
        "sys.exit('mpi4py' in sys.modules)"
    )
    assert _python(code).returncode == 0


def test_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['click'] = None; from mpicoll.cli.main import main; main([])"
    done = _python(code)
    assert done.returncode == 2
    assert "pip install 'mpicoll[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
