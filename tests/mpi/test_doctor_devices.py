"""What `mpicoll doctor` finds of devices on all ranks, with a CuPy that is made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from childjob import run_job
from fake_cupy import bus, fake_cupy, malloc_async
from mpi4py import MPI

from mpicoll.cli import devices, launch
from mpicoll.cli.main import run
from mpicoll.runtime import device_support

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ALONE = SIZE == 1


class Page:
    """What rank 0 printed and wrote, on every rank."""

    def __init__(self, text: str, facts: dict[str, Any]) -> None:
        """Keep both."""
        self.text, self.facts = text, facts

    @property
    def places(self) -> list[dict[str, Any]]:
        """The ranks, in order."""
        found = [place for node in self.facts["devices"] for place in node["ranks"]]
        return sorted(found, key=lambda place: int(place["rank"]))

    def used(self) -> list[str]:
        """Return where the device is that each rank uses, in the order of ranks."""
        found = {}
        for node in self.facts["devices"]:
            for place in node["ranks"]:
                found[place["rank"]] = node["devices"][place["uses"]]["bus"]
        return [found[rank] for rank in range(SIZE)]

    def advice(self, words: str, kind: str = "warning") -> list[str]:
        """Return what is said with these words."""
        found = self.facts["advice"]
        return [one["text"] for one in found if one["kind"] == kind and words in one["text"]]


class Doctor:
    """Runs the command on all ranks."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Let all ranks agree on a file."""
        self.file = WORLD.bcast(str(folder / "doctor.json"), root=0)
        self.capsys = capsys

    def __call__(self) -> Page:
        """Return the page, which has to be free of errors."""
        assert run(["doctor", "--json", self.file]) == 0
        captured = self.capsys.readouterr()
        assert bool(captured.out) == launch.speaks()
        assert captured.err == ""
        text = Path(self.file).read_text(encoding="utf-8") if RANK == 0 else ""
        words, text = WORLD.bcast((captured.out, text), root=0)
        return Page(" ".join(words.split()), json.loads(text))


@pytest.fixture
def doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """The command where nothing is known yet, with the local ranks of a launcher."""
    for name in (*device_support.LOCAL_RANKS, *device_support.VISIBLE, "MPICOLL_CUDA_AWARE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPI_LOCALRANKID", str(RANK))
    monkeypatch.setenv("XDG_CACHE_HOME", WORLD.bcast(str(tmp_path), root=0))
    monkeypatch.setattr(device_support, "signs", list)
    monkeypatch.setattr(device_support, "tried", lambda: pytest.fail("doctor made the trial"))
    return Doctor(tmp_path, capsys)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a CuPy that sees some devices in place of whatever there is."""

    def put(*shown: int, **what: Any) -> None:
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(*shown, **what))

    return put


def test_all_ranks_see_all_devices(doctor: Doctor, cupy: Any) -> None:
    cupy(0, 1)
    page = doctor()
    assert page.used() == [bus(rank % 2) for rank in range(SIZE)]
    assert [place["sees"] for place in page.places] == [[0, 1]] * SIZE
    assert "0: Fake GPU, 0000:00:00.0, 80 GiB: for local rank" in page.text
    assert ("1: Fake GPU, 0000:01:00.0, 80 GiB: idle" in page.text) == ALONE
    assert not page.advice("device")


def test_a_device_per_rank_is_told_once(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(RANK))
    cupy(RANK)
    page = doctor()
    assert page.used() == [bus(rank) for rank in range(SIZE)]
    shown = [place["variables"] for place in page.places]
    assert shown == [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(SIZE)]
    found = page.advice("can not map each other's memory")
    assert len(found) == (not ALONE)
    for rank in range(SIZE):
        assert all(f"{rank} (rank {rank})" in text for text in found)
    assert ("CUDA_VISIBLE_DEVICES=0" if ALONE else "0 (local rank 0)") in page.text


def test_a_singleton_of_many_is_warned_too(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks do not see each other, the launcher still says how many there are."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cupy()
    (text,) = doctor().advice("shows one device only")
    assert f"CUDA_VISIBLE_DEVICES=0 ({'rank 0' if ALONE else 'ranks 0'}" in text


def test_ranks_with_one_local_rank(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    cupy(0, 1)
    page = doctor()
    assert page.used() == [bus(0)] * SIZE
    assert len(page.advice("the launcher gives them the same local rank")) == (not ALONE)


def test_no_local_rank_of_a_launcher(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPI_LOCALRANKID")
    cupy(0, 1)
    page = doctor()
    assert page.used() == [bus(rank % 2) for rank in range(SIZE)]
    assert [place["local_rank"] for place in page.places] == list(range(SIZE))
    assert len(page.advice("mpicoll.bind_device(comm)", "note")) == 1


def test_different_numbers_of_devices(doctor: Doctor, cupy: Any) -> None:
    cupy(*([0, 1] if RANK == 0 else [0]))
    page = doctor()
    assert len(page.advice("ranks see different numbers of devices")) == (not ALONE)
    assert len(page.advice("share device 0000:00:00.0")) == (not ALONE)


def test_pools_of_torch_and_of_cupy(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, mine = SIZE - 1, RANK == SIZE - 1
    if mine:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    cupy(0, allocator=malloc_async if mine else None)
    page = doctor()
    (text,) = page.advice("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync")
    assert f"(rank {last})" in text
    (text,) = page.advice("asynchronous pool")
    assert text.startswith(f"CuPy of rank {last} ")
    kinds = [one["kind"] for one in page.facts["advice"]]
    assert kinds == sorted(kinds, key=["error", "warning", "note"].index)


def test_one_rank_can_not_load_cupy(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told, and the others do not wait for that rank."""
    if RANK == SIZE - 1:
        (tmp_path / "cupy.py").write_text("raise OSError('libcuda: cannot open')\n")
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        cupy(0)
    page = doctor()
    assert page.places[-1]["why_none"] == "CuPy can not be loaded: OSError: libcuda: cannot open"
    assert page.places[-1]["uses"] is None
    assert "none seen (CuPy can not be loaded: OSError: libcuda: cannot open)" in page.text


def test_no_cupy(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    page = doctor()
    assert "devices none seen (CuPy is not installed)" in page.text
    assert "CUDA-aware no: nothing says that this MPI takes device pointers" in page.text
    assert "cupy" not in sys.modules


def test_no_driver(doctor: Doctor, cupy: Any) -> None:
    cupy(error="cudaErrorNoDevice: no CUDA-capable device is detected")
    page = doctor()
    assert "none seen (cudaErrorNoDevice: no CUDA-capable device is detected)" in page.text


def test_the_trial_is_not_made_but_its_answer_read(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_support, "signs", lambda: ["MPIX_Query_cuda_support"])
    cupy(0)
    page = doctor()
    assert "CUDA-aware not tried yet: the first device call tries" in page.text
    assert "MPIX_Query_cuda_support" in page.text
    (found,) = page.facts["cuda_aware"]
    assert (found["answer"], found["ranks"]) == ("not tried", list(range(SIZE)))
    for answer, word in ((True, "yes"), (False, "no")):
        WORLD.Barrier()
        file = device_support._answer_file(None)
        if RANK == 0:
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(answer), encoding="utf-8")
        WORLD.Barrier()
        (found,) = doctor().facts["cuda_aware"]
        assert found["answer"] == word


def test_the_setting_of_rank_0_counts(
    doctor: Doctor, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1" if RANK == 0 else "0")
    cupy(0)
    page = doctor()
    assert "CUDA-aware yes: set by MPICOLL_CUDA_AWARE=1" in page.text
    assert len(page.advice("nothing else says so", "note")) == 1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "raise RuntimeError('broken')",
            "none seen (CuPy can not be loaded: RuntimeError: broken",
        ),
        (
            "import sys; sys.path.insert(0, {tests!r})\n"
            "import fake_cupy; cuda = fake_cupy.fake_cupy(0, 1).cuda",
            "2 devices",
        ),
    ],
)
def test_an_installed_cupy_is_loaded(tmp_path: Path, size: int, program: str, words: str) -> None:
    if not ALONE:
        return
    tests = str(Path(__file__).parents[1])
    (tmp_path / "cupy").mkdir()
    file = tmp_path / "cupy" / "__init__.py"
    file.write_text(program.format(tests=tests), encoding="utf-8")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from mpicoll.cli.main import main
main(["doctor"])
"""
    done = run_job(size, script, tmp_path)
    assert done.status == 0, done.err
    page = " ".join(done.out.split())
    assert words in page
    assert f"{size} ranks see each other" in page or size == 1
