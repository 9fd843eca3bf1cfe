"""`mpicoll tune --memory device` on the deferred device, and the crossover at run time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standin
from deferred import BACKEND, POLICIES, Policy, array, at, empty, host
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.cli import cuda, launch, timing, tune_crossover
from mpicoll.cli.main import run
from mpicoll.cli.tune_crossover import boundary
from mpicoll.runtime import device, device_run, link, staging
from mpicoll.runtime.link import attach
from mpicoll.runtime.place import library
from mpicoll.selection.settings import Settings
from mpicoll.selection.table import LARGEST, Crossover, Entry, Ranked, Table, dump, load

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
FAST = ["--memory", "device", "--seconds", "0", "--sizes", "8,3K", "-c", "allreduce,bcast"]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, deferred_device: None, folder: Path) -> None:
    """Put the stand-in in CuPy's place, on a machine with one device; few rounds."""
    monkeypatch.setitem(sys.modules, "cupy", standin.module())
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # it would look for a real device
    monkeypatch.setitem(device._BACKENDS, standin.ndarray, BACKEND)
    monkeypatch.setattr(tune_crossover, "SIZES", (512, 4096))
    monkeypatch.setattr(timing, "FEWEST", 2)
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.delenv("MPICOLL_TUNING", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that all ranks agree on."""
    return Path(WORLD.bcast(str(tmp_path), root=0))


def _read(file: Path) -> str:
    """Return what rank 0 wrote."""
    return WORLD.bcast(file.read_text(encoding="utf-8") if RANK == 0 else "", root=0)


def _write(file: Path, text: str) -> None:
    if RANK == 0:
        file.write_text(text, encoding="utf-8")
    WORLD.Barrier()


def _tune(folder: Path, *more: str) -> tuple[int, Table, dict[str, Any]]:
    """Run it; return its status, the table and the report."""
    out, report = folder / "t.json", folder / "r.json"
    status = run(["tune", *FAST, "--out", str(out), "--json", str(report), *more])
    return status, load(_read(out), str(out), library()), json.loads(_read(report))


# -- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_table_and_crossover_are_measured_on_the_device(
    policy: Policy, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BACKEND.use(policy, True)
    status, table, told = _tune(folder)
    assert status == 0
    assert {entry.key for entry in table.entries} == {
        (name, SIZE, "device") for name in ("allreduce", "bcast")
    }
    assert not any(row["faults"] for row in told["results"])
    assert BACKEND.copies
    assert (told["rates"][0]["measured"], told["rates"][0]["off_by"]) == (False, None)
    crossed = told["crossovers"][0]
    assert crossed["ranks"] == SIZE
    assert [row["bytes"] for row in crossed["results"]] == ([512, 4096] if SIZE > 1 else [])
    if SIZE > 1:
        assert crossed["bytes"] in (0, 512, 4096)
        assert table.crossovers == (Crossover(SIZE, crossed["bytes"]),)
    else:
        assert table.crossovers == ()
    assert not (folder / "cache").exists()  # the rates are those of host memory
    if launch.speaks():
        out = " ".join(capsys.readouterr().out.split())
        end = "longer ones by device pointers." if SIZE > 1 else "One rank sends nothing"
        assert end in out
        assert "for communicators with memory='device'" in out
        assert f"Rates on {SIZE} rank{'s' * (SIZE > 1)}: not measured" in out


def test_groups_have_crossovers_of_their_own(folder: Path) -> None:
    BACKEND.use("late", True)
    old = Table((), library(), "0", (Crossover(SIZE + 1, 77), Crossover(SIZE, 88)))
    _write(folder / "t.json", dump(old))
    groups = sorted({1, max(1, SIZE - 1), SIZE})
    status, table, told = _tune(folder, "--ranks", ",".join(map(str, groups)))
    assert status == 0
    assert [one["ranks"] for one in told["crossovers"]] == groups
    assert [one.ranks for one in table.crossovers] == [
        *(size for size in groups if size > 1 or SIZE == 1),
        SIZE + 1,
    ]
    assert table.crossover(SIZE + 1) == 77
    assert (table.crossover(SIZE) == 88) == (SIZE == 1)


def test_without_device_pointers_there_is_no_crossover_to_tune(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BACKEND.use("by chance", False)
    status, table, told = _tune(folder)
    assert status == 0
    assert told["crossovers"] == [{"ranks": SIZE, "bytes": None, "results": []}]
    assert table.crossovers == ()
    assert {entry.memory for entry in table.entries} == {"device"}
    if launch.speaks() and SIZE > 1:
        out = " ".join(capsys.readouterr().out.split())
        assert "This MPI takes no device pointers" in out
        assert "there is nothing to tune" in out


def test_wrong_data_leave_no_crossover(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BACKEND.use("late", True)
    right = Comm.Alltoall

    def wrong(self: Comm, send: Any, recv: Any, **keywords: Any) -> None:
        right(self, send, recv, **keywords)
        tuning = self._link.settings.tuning
        if tuning is not None and tuning.crossover(SIZE) == 0 and RANK == SIZE - 1:
            at(recv.address, 8)[:] = 1

    monkeypatch.setattr(Comm, "Alltoall", wrong)
    old = (Crossover(SIZE, 88), Crossover(SIZE + 1, 77))
    _write(folder / "t.json", dump(Table((), library(), "0", old)))
    status, table, told = _tune(folder)
    assert status == (SIZE > 1)  # one rank has no crossover
    assert table.crossovers == (old[1:] if SIZE > 1 else old)
    for row in told["crossovers"][0]["results"]:
        assert set(row["faults"]) == {"pointers, alltoall", "pointers again, alltoall"}
        assert row["staged_seconds"] > 0
        compared = ("pointers_seconds", "ratio", "interval", "verdict")
        assert {row[name] for name in compared} == {None}
    if launch.speaks() and SIZE > 1:
        out = capsys.readouterr().out
        assert "WRONG 512 B pointers, alltoall: rank" in " ".join(out.split())
        assert "Data were wrong: it stays at" in out
        assert f"the crossover of 88 B on {SIZE} ranks is dropped from" in " ".join(out.split())


def test_no_device_is_said_once_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "cupy", standin.module(devices=0))
    monkeypatch.setattr(timing, "race", None)
    assert run(["tune", *FAST, "--out", str(folder / "t.json")]) == 2
    said = capsys.readouterr()
    assert (said.out, bool(said.err)) == ("", launch.speaks())
    assert ("--memory device: no device" in said.err) == launch.speaks()
    assert not (folder / "t.json").exists()


# -- what is read from the times --------------------------------------------------------------


def _rows(verdicts: str) -> list[dict[str, Any]]:
    """Return rows of 1 KiB, 2 KiB, … in which the host is faster, slower or the same."""
    words = {"f": "faster", "s": "slower", "=": "same"}
    return [{"bytes": 1024 << at, "verdict": words[one]} for at, one in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ("ffffssss", 8 << 10),
        ("ssssssss", 0),
        ("ffffffff", 128 << 10),
        ("fsffssss", 8 << 10),  # one that was disturbed on either side moves nothing
        ("ffffssfs", 8 << 10),
        ("sfffssss", 8 << 10),
        ("ffffsssf", 8 << 10),
        ("ff====ss", 32 << 10),  # where times do not tell, nearest to what stands
        ("ff==ssss", 8 << 10),
        ("======ff", 128 << 10),
        ("ssssss==", 0),
        ("========", 32 << 10),
        ("=f=s====", 4 << 10),
        ("f", 1 << 10),
        ("s", 0),
    ],
)
def test_boundary(verdicts: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SMALL_BYTES", 32 << 10)
    assert boundary(_rows(verdicts)) == expected


def test_verdicts_come_from_the_times_of_all_probes(
    world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is made faster up to a size, and slower beyond it, by factors that differ."""

    def race(world: Any, contenders: Any, seconds: float, most: int, memory: Any) -> Any:
        found = []
        for number, one in enumerate(contenders):
            assert not one.name.startswith("native")
            factor = 1.0 + number / 10
            if one.name.startswith("staged"):
                factor *= 0.5 if nbytes[0] <= 1024 else 2.0
            wobble = 1 + np.arange(20) % 3 / 100
            found.append(timing.Measured(one.name, factor * wobble))
        return found

    nbytes = [0]
    shape = tune_crossover._shape

    def noted(name: str, size: int, wanted: int) -> Any:
        nbytes[0] = wanted
        return shape(name, size, wanted)

    BACKEND.use("late", True)
    memory, _ = cuda.find(world, tune_crossover.DOUBLE)
    assert memory is not None
    monkeypatch.setattr(timing, "race", race)
    monkeypatch.setattr(tune_crossover, "_shape", noted)
    monkeypatch.setattr(tune_crossover, "SIZES", tuple(256 << k for k in range(6)))
    rows = tune_crossover.measure(world, memory, 0.0)
    assert [row["verdict"] for row in rows] == ["faster"] * 3 + ["slower"] * 3
    assert boundary(rows) == 1024


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_probes_are_as_large_as_they_are_called(size: int) -> None:
    """Their buffers on a rank, both together, have at most the bytes of the row."""
    for nbytes in (16 * size, 4096, 1 << 20):
        for name in tune_crossover.PROBES:
            whole = tune_crossover._shape(name, size, nbytes).nbytes
            both = {"allgather": whole + whole // size, "bcast": whole}.get(name, 2 * whole)
            assert nbytes / 3 < both <= nbytes


# -- at run time ------------------------------------------------------------------------------


def _ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each run on device memory adds its way."""
    log: list[str] = []
    for one in (device_run.Direct, device_run.Staged):

        def made(*what: Any, _kind: Callable[..., Any] = one) -> Any:
            log.append(_kind.__name__)
            return _kind(*what)

        monkeypatch.setattr(link, one.__name__, made)
    return log


def _on(settings: Settings) -> Comm:
    """Return a duplicate of the world with these settings."""
    made = MPI.Intracomm(WORLD).Dup()
    attach(made, settings)
    return Comm(made)


def _crossed(nbytes: int, **more: Any) -> Settings:
    return Settings(tuning=Table((), crossovers=(Crossover(SIZE, nbytes),)), **more)


def _allreduce(comm: Comm, items: int) -> bool:
    """Return whether a sum on the device is right; its buffers have 16 bytes per item."""
    x, result = array(np.full(items, comm.rank + 1.0)), empty((items,), np.float64)
    comm.Allreduce(x, result)
    return bool((host(result) == comm.size * (comm.size + 1) / 2).all())


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize(
    ("tuned", "by_hand", "items", "hosted"),
    [
        (1600, 0, 100, True),
        (1600, 0, 101, False),
        (0, 1 << 20, 1, False),
        (1600, 1 << 20, 101, False),
        (LARGEST, 0, 5000, True),
    ],
)
def test_the_crossover_decides_where_pointers_are_taken(
    tuned: int,
    by_hand: int,
    items: int,
    hosted: bool,
    pointers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without pointers it was not measured for this, and what was set by hand stands."""
    BACKEND.use("late", pointers)
    monkeypatch.setattr(staging, "SMALL_BYTES", by_hand)
    log = _ways(monkeypatch)
    comm = _on(_crossed(tuned))
    try:
        assert _allreduce(comm, items)
    finally:
        comm.Free()
    if pointers:
        assert log == ([] if hosted else ["Direct"])
    else:
        assert log == ([] if 16 * items <= by_hand else ["Staged"])


@pytest.mark.parametrize("takes", [True, False])
def test_the_mpi_is_asked_only_where_it_matters(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out may take a trial of a minute."""
    asked: list[bool] = []
    backend: Any = SimpleNamespace(direct=lambda: asked.append(True) or takes)
    monkeypatch.setattr(staging, "SMALL_BYTES", 1000)
    for tuned, nbytes in ((5000, 1000), (5000, 5001), (500, 500), (500, 1001), (1000, 1001)):
        short = staging._short(nbytes, backend, _crossed(tuned), SIZE)
        assert short == (nbytes <= min(tuned, 1000))
    assert not staging._short(1001, backend, Settings(), SIZE)
    assert not staging._short(1001, backend, _crossed(5000), SIZE + 1)  # it is for another number
    assert not asked
    for given in (None, takes):  # it is not asked either where it was set
        assert staging._short(1001, backend, _crossed(5000, cuda_aware=given), SIZE) == takes
        assert staging._short(501, backend, _crossed(500, cuda_aware=given), SIZE) == (not takes)
    assert len(asked) == 2


def test_each_rank_may_have_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are the same by both ways, so ranks need not agree."""
    BACKEND.use("by chance", True)
    log = _ways(monkeypatch)
    comm = _on(_crossed(LARGEST if RANK % 2 else 0))
    try:
        for algorithm in ("ring", "recursive_doubling", "circulant"):
            x, result = array(np.full(700, RANK + 1.0)), empty((700,), np.float64)
            comm.Allreduce(x, result, algorithm=algorithm)
            assert (host(result) == SIZE * (SIZE + 1) / 2).all()
            data = array(np.full(700, RANK + 1.0))
            comm.Bcast(data, SIZE - 1)
            assert (host(data) == SIZE).all()
    finally:
        comm.Free()
    assert log == ([] if RANK % 2 else ["Direct"] * 6)


def test_the_table_of_the_environment_is_read_on_rank_0(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BACKEND.use("late", True)
    entry = Entry("allreduce", SIZE, "device", 0, 1 << 20, (Ranked("ring", 0, 1e-3),))
    file = folder / "t.json"
    _write(file, dump(Table((entry,), library(), "0", (Crossover(SIZE, 1600),))))
    monkeypatch.setenv("MPICOLL_TUNING", str(file) if RANK == 0 else "/no/such/file")
    log = _ways(monkeypatch)
    comm = Comm(MPI.Intracomm(WORLD).Dup(), memory="device")
    try:
        assert _allreduce(comm, 100)
        assert log == []
        assert _allreduce(comm, 101)
        assert log == ["Direct"]
        assert {name for _, name in comm.stats} == {"ring"}
        part = comm.Split(RANK)  # its size has no crossover, and what was set by hand is 0
        assert _allreduce(part, 100)
        assert log == (["Direct"] * 2 if SIZE > 1 else ["Direct"])
        part.Free()
    finally:
        comm.Free()


def test_with_crossover_makes_both_ways(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    BACKEND.use("late", False)  # what was found out before is not asked again
    log = _ways(monkeypatch)
    for nbytes, expected in ((LARGEST, []), (0, ["Direct"]), (None, ["Staged"])):
        log.clear()
        with ExitStack() as stack:
            comm = tune_crossover.with_crossover(world, nbytes, stack)
            assert comm._link.settings.memory == "device"
            assert _allreduce(comm, 3)
        assert log == expected
        assert world._link.settings.memory == "host"
