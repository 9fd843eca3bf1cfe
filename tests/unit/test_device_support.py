"""Which MPI takes device pointers, and which device is a rank's, without MPI or a device."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from pathlib import Path

import pytest

support = pytest.importorskip("mpicoll.runtime.device_support")


@pytest.mark.parametrize("variable", support.LOCAL_RANKS)
def test_local_rank_by_each_launcher(variable: str) -> None:
    assert support.local_rank({variable: "3"}) == 3


def test_no_launcher_says_nothing() -> None:
    assert support.local_rank({"SLURM_LOCALID": ""}) is None


def test_ranks_share_devices_in_turn() -> None:
    assert [support._chosen(local, 2) for local in range(5)] == [0, 1, 0, 1, 0]


def test_no_device_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="sees no device"):
        support._chosen(0, 0)


def test_no_local_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in support.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="pass a communicator"):
        support.bind_device()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1", "MPI_LOCALNRANKS": "4"}, "DEVICES=1 shows one device only"),
        ({"ROCR_VISIBLE_DEVICES": "1", "SLURM_NTASKS_PER_NODE": "2"}, "shows one device only"),
        ({"SLURM_GPUS_PER_TASK": "1"}, "gpu-bind=none"),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, "gpu-bind=none"),
        ({"SLURM_GPU_BIND": "closest"}, "SLURM_GPU_BIND=closest makes Slurm bind"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "shared by IPC"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "shared by IPC"),
    ],
)
def test_warnings(environment: dict[str, str], words: str) -> None:
    (warning,) = support.binding_warnings(environment)
    assert words in warning


def test_nothing_to_warn_of() -> None:
    for environment in (
        {"CUDA_VISIBLE_DEVICES": "0,1", "MPI_LOCALNRANKS": "2"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "", "MPI_LOCALNRANKS": "2"},
        {"CUDA_VISIBLE_DEVICES": "-1", "MPI_LOCALNRANKS": "2"},
        {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "verbose,none"},
        {"SLURM_GPUS_PER_TASK": "1", "MPI_LOCALNRANKS": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=4"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
    ):
        assert support.binding_warnings(environment) == []


def test_who_counts_the_ranks_of_a_node_needs_no_launcher() -> None:
    assert support.obstacles({"CUDA_VISIBLE_DEVICES": "0"}, ranks=2)
    assert not support.obstacles({"CUDA_VISIBLE_DEVICES": "0", "MPI_LOCALNRANKS": "2"}, ranks=1)


def test_children_are_launched_anew() -> None:
    given = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_orte_x": "1",
        "PMIX_RANK": "1",
        "SLURM_NTASKS": "8",
        "UCX_TLS": "all",
        "PATH": "/bin",
    }
    assert support._clean(given) == {"OMPI_MCA_pml": "ucx", "UCX_TLS": "all", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo takes device pointers; echo takes device pointers", True),
        ("echo takes device pointers", False),
        ("echo takes device pointers; echo takes device pointers; exit 139", False),
        ("kill -SEGV $$", False),
        ("sleep 30", False),
    ],
)
def test_trial_believes_two_ranks_that_lived(tmp_path: Path, script: str, answer: bool) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    assert support.tried(str(launcher), seconds=2.0) is answer


def test_a_trial_that_hangs_leaves_no_process(tmp_path: Path) -> None:
    launcher, rank = tmp_path / "mpiexec", tmp_path / "rank"
    launcher.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 60 &\necho $! >{rank}\nwait\nwait\n")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "ENDING_SECONDS", 0.2)
        assert not support.tried(str(launcher), seconds=1.0)
    state = Path("/proc") / rank.read_text().strip() / "stat"

    def lives() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return state.read_text().split()[2] != "Z"
        return False

    # A signal is sent in no time, but a process dies when it has its turn of the processor.
    give_up = time.monotonic() + 20
    while lives() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not lives()


def test_one_process_of_a_host_tries_for_all(tmp_path: Path) -> None:
    trials, answers = [], []
    begun, end = threading.Event(), threading.Event()

    def trial() -> bool:
        trials.append(1)
        begun.set()
        end.wait(10)
        return True

    threads = [
        threading.Thread(target=lambda: answers.append(support._answer(trial, tmp_path)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    begun.wait(10)
    end.set()
    for thread in threads:
        thread.join(20)
    assert answers == [True] * 3
    assert len(trials) == 1
    assert not list(tmp_path.glob("*.lock"))


def test_an_answer_that_came_just_before_the_lock_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One process looks, another answers and unlocks, and only then the first one locks."""
    answers = iter([None, True])
    monkeypatch.setattr(support, "_kept", lambda file: next(answers))
    assert support._answer(lambda: pytest.fail("it was tried again"), tmp_path)
    assert not list(tmp_path.glob("*.lock"))


def test_a_kept_answer_is_read_and_nothing_is_tried(tmp_path: Path) -> None:
    assert support.kept_answer(tmp_path) is None
    assert support._answer(lambda: True, tmp_path) is True
    assert support.kept_answer(tmp_path) is True


def test_without_a_home_no_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(support, "cache_file", nowhere)
    assert support.kept_answer() is None
    assert support._answer(lambda: True) is True


def test_no_sign_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "signs", list)
    monkeypatch.setattr(support, "_answer", lambda trial: pytest.fail("it was tried"))
    assert support.takes_device_pointers.__wrapped__() is False


def test_switches_are_signs() -> None:
    assert "I_MPI_OFFLOAD" in support.signs({**os.environ, "I_MPI_OFFLOAD": "1"})


def test_words_of_cuda_are_in_the_device_files_only() -> None:
    """A ROCm build of CuPy has the same interface; other words would tie us to one vendor."""
    runtime = Path(support.__file__).parent
    setting = re.compile(r"cuda_aware|CUDA_AWARE")
    for path in sorted(runtime.parent.rglob("*.py")):
        if path.parent == runtime and path.stem.startswith("device"):
            continue
        if path.name == "arrays.py" or "torch" in path.parts or "cli" in path.parts:
            continue  # CuPy and torch as array libraries; words for people
        text = setting.sub("", path.read_text(encoding="utf-8"))
        found = set(re.findall(r"\w*cuda\w*|\w*cupy\w*|nvidia", text.lower()))
        if "parallel" in path.parts:  # works with arrays of CuPy, which has them on ROCm too
            assert found <= {"cupy", "__cuda_array_interface__"}, path
        elif found:
            assert (found, path.name) == ({"cupy"}, "staging.py")  # says where the words are
