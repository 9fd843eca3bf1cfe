"""`mpicoll bench --device cuda` on the deferred device, by CuPy's stand-in. No time is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin
from deferred import BACKEND, POLICIES, Policy, at
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.cli import bench_limit, cuda, launch, timing
from mpicoll.cli.bench_report import FORMS
from mpicoll.cli.cases import Case, even
from mpicoll.cli.main import run
from mpicoll.runtime import device, link
from mpicoll.schedule.contracts import COLLECTIVES

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
QUICK = ["--device", "cuda", "--repeats", "2", "--seconds", "0"]
DOUBLE = np.dtype(np.float64)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, deferred_device: None) -> None:
    """Put the stand-in in CuPy's place, on a machine with one device."""
    monkeypatch.setitem(sys.modules, "cupy", standin.module())
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # it would look for a real device
    monkeypatch.setitem(device._BACKENDS, standin.ndarray, BACKEND)
    monkeypatch.setattr(bench_limit, "SIZES", (64, 1024))
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)


@pytest.fixture
def json_file(tmp_path: Path) -> str:
    """Return the name of a file that all ranks agree on."""
    return WORLD.bcast(str(tmp_path / "out.json"), root=0)


def _results(file: str) -> dict[str, Any]:
    """Return what rank 0 wrote."""
    text = Path(file).read_text(encoding="utf-8") if RANK == 0 else ""
    data: dict[str, Any] = json.loads(WORLD.bcast(text, root=0))
    return data


def _memory(comm: Comm) -> cuda.Cuda:
    memory, fault = cuda.find(comm, DOUBLE)
    assert memory is not None, fault
    return memory


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(
    form: str, pointers: bool, json_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    BACKEND.use("by chance", pointers)
    arguments = ["bench", "all", "--form", form, "--sizes", "8,3K", *QUICK, "--json", json_file]
    assert run(arguments) == 0
    data = _results(json_file)
    assert {row["collective"] for row in data["results"]} == set(COLLECTIVES)
    assert {row["algorithm"].split(":")[0] for row in data["results"]} == {"auto"}  # no rival
    assert not any(row["fault"] for row in data["results"])
    assert data["policy"]["memory"] == "device"
    assert "by events" in data["policy"]["text"]
    assert all(set(row["against"]) == set() for row in data["results"])
    words = f"this MPI takes {'device' if pointers else 'no device'} pointers"
    assert words in data["environment"]["memory"]
    assert "Deferred device on rank 0" in data["environment"]["memory"]
    if launch.speaks():
        out = " ".join(capsys.readouterr().out.split())
        assert words in out
        assert ("Messages are of host memory" in out) == (not pointers)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_algorithms_are_right_whatever_the_device_does(policy: Policy, json_file: str) -> None:
    BACKEND.use(policy, True)
    names = ["allreduce", "alltoall", "bcast"]
    arguments = ["bench", *names, "-a", "all", "--sizes", "3K", *QUICK, "--json", json_file]
    assert run(arguments) == 0
    assert BACKEND.folds or SIZE == 1


def test_buffers_lie_on_the_device_and_the_hint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[type, str]] = set()
    right = Comm.Allgather

    def watched(self: Comm, send: Any, recv: Any, **keywords: Any) -> None:
        seen.add((type(send), self._link.settings.memory))
        right(self, send, recv, **keywords)

    monkeypatch.setattr(Comm, "Allgather", watched)
    assert run(["bench", "allgather", "--sizes", "64", *QUICK]) == 0
    assert seen == {(standin.ndarray, "device")}
    assert link.attach(WORLD).settings.memory == "host"  # the hint is on a duplicate


def test_wrong_data_are_found(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Comm.Allreduce

    def wrong(self: Comm, send: Any, recv: Any, *others: Any, **keywords: Any) -> None:
        right(self, send, recv, *others, **keywords)
        if RANK == SIZE - 1:
            at(recv.address, 8)[:] = 1

    monkeypatch.setattr(Comm, "Allreduce", wrong)
    arguments = ["bench", "allreduce", "-a", "ring", "--sizes", "64", *QUICK]
    assert run([*arguments, "--json", json_file]) == 1
    assert f"rank {SIZE - 1}: element 0 is" in _results(json_file)["results"][0]["fault"]


def test_native_takes_part_when_named(json_file: str) -> None:
    named = ["bench", "allgather", "--compare", "native", "--sizes", "64", *QUICK]
    for pointers in (True, False):
        BACKEND.use("late", pointers)
        assert run([*named, "--json", json_file]) == 0
        data = _results(json_file)
        names = [row["algorithm"].split(":")[0] for row in data["results"]]
        if pointers:
            assert names == ["native", "native again", "auto"]
            assert data["left_out"]["allgather"] == []
        else:
            assert names == ["auto"]
            assert data["left_out"]["allgather"] == ["this MPI takes no device pointers"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_dtypes(dtype: str, json_file: str) -> None:
    arguments = ["bench", "allreduce", "--dtype", dtype, "--sizes", "3K", *QUICK]
    assert run([*arguments, "--json", json_file]) == 0
    assert not any(row["fault"] for row in _results(json_file)["results"])


# -- without a device -----------------------------------------------------------------------


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what rank 0 says of a run that ends with status 2 on all ranks."""
    assert run(["bench", "allreduce", "--device", "cuda", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert bool(said.err) == launch.speaks()
    return WORLD.bcast(said.err, root=0)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "race", None)


@pytest.mark.usefixtures("_untimed")
def test_one_rank_without_a_device_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "cupy", standin.module(devices=0))
    said = _refused(capsys)
    assert "--device cuda: no device, so nothing was measured" in said
    assert said.count(f"rank {SIZE - 1}: bind_device: this rank sees no device") == 1


@pytest.mark.usefixtures("_untimed")
def test_without_cupy_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "install CuPy: pip install cupy-cuda12x" in _refused(capsys)


@pytest.mark.usefixtures("_untimed")
def test_a_type_that_cupy_has_not_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asarray(given: Any) -> Any:
        raise ValueError(f"Unsupported dtype {given.dtype}")

    monkeypatch.setattr(sys.modules["cupy"], "asarray", asarray)
    said = _refused(capsys, "--dtype", "bfloat16")
    assert "rank 0: no array of bfloat16 on the device: Unsupported dtype bfloat16" in said


# -- the memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_memory_returns_is_done(policy: Policy, world: Comm) -> None:
    """MPI itself looks at no stream: what it is handed has to be there."""
    BACKEND.use(policy, True)
    memory = _memory(world)
    held = memory.put(np.arange(5.0))
    assert at(held.address, 40).view(np.float64).tolist() == [0, 1, 2, 3, 4]
    memory.poison(held)
    assert set(at(held.address, 40)) == {0x5A}
    copied = memory.put(np.zeros(5))
    memory.copy(copied, held)
    assert set(memory.fetch(copied).view(np.uint8)) == {0x5A}
    memory.poison(memory.put(np.empty(0)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_time_is_that_of_the_work_not_of_the_call(policy: Policy, world: Comm) -> None:
    """It lies between the events whether it is done at once or left queued."""
    BACKEND.use(policy, True)
    memory = _memory(world)
    log: list[str] = []

    class Logged(standin.Event):
        """An event that notes when it is reached."""

        def _reach(self) -> None:
            log.append("event")
            super()._reach()

    memory._cupy.cuda.Event = Logged
    queue = memory._stream.queue

    def call() -> None:
        log.append("call")
        BACKEND._add(queue, lambda: log.append("work"))

    assert memory.timed(call) >= cuda.RESOLUTION
    assert log == ["event", "call", "work", "event"]


def test_plain_messages_are_of_the_device_where_the_mpi_takes_them(world: Comm) -> None:
    for pointers in (True, False):
        BACKEND.use("late", pointers)
        memory = _memory(world)
        assert memory.addressed == pointers
        for kind in bench_limit.KINDS if SIZE > 1 else ("memcpy",):
            before = len(BACKEND.alive)
            contender = bench_limit._contender(WORLD, kind, 64, memory)
            on_device = len(BACKEND.alive) > before
            assert on_device == (pointers or kind == "memcpy")
            contender.poison()
            receives = kind != "one_way" or RANK == SIZE - 1
            assert ("wrong data" in contender.wrong()) == receives
            memory.timed(contender.call)
            assert contender.wrong() == ""


def test_one_rank_whose_mpi_takes_no_pointers_decides_for_all(world: Comm) -> None:
    BACKEND.use("late", RANK > 0)
    assert not _memory(world).addressed


def test_a_case_is_poisoned_and_checked_on_the_device(world: Comm) -> None:
    case = Case(world, even("allreduce", SIZE, 800, DOUBLE), _memory(world))
    case.poison()
    assert "expected" in case.wrong()
    case.invoke(world)
    assert case.wrong() == ""
    assert BACKEND.copies + BACKEND.folds
