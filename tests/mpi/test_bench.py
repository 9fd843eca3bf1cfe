"""`mpicoll bench` on all ranks: forms, types, rivals, the limit, the study. No time is judged."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.cli import (
    bench_comparisons,
    bench_gloo,
    bench_limit,
    bench_ranks,
    bench_rivals,
    launch,
    timing,
)
from mpicoll.cli.bench import DTYPES
from mpicoll.cli.bench_report import FORMS
from mpicoll.cli.cases import Case, even
from mpicoll.cli.main import run
from mpicoll.schedule.contracts import COLLECTIVES

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
QUICK = ["--repeats", "2", "--seconds", "0"]
DOUBLE = np.dtype(np.float64)

#: Intel MPI's own persistent gather leaves out the block of the root; bench says WRONG.
WRONG_NATIVE = {
    ("Intel MPI", "persistent", "gather"),
    ("Intel MPI", "persistent", "allgather"),  # on eight ranks
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep messages short and nobody waiting; what is tested does not depend on it."""
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    monkeypatch.setattr(bench_limit, "SIZES", (64, 1024))
    monkeypatch.setattr(bench_comparisons, "MANY", 3)
    monkeypatch.setattr(bench_comparisons, "COLUMN", 100)
    monkeypatch.setattr(bench_ranks, "MAPPED", 4096)
    monkeypatch.setattr(bench_ranks, "LATE", (1e-3, 2e-3))


@pytest.fixture
def json_file(tmp_path: Path) -> str:
    """Return the name of a file that all ranks agree on."""
    return WORLD.bcast(str(tmp_path / "out.json"), root=0)


def _results(file: str) -> dict[str, Any]:
    """Return what rank 0 wrote."""
    text = Path(file).read_text(encoding="utf-8") if RANK == 0 else ""
    data: dict[str, Any] = json.loads(WORLD.bcast(text, root=0))
    return data


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, json_file: str) -> None:
    arguments = ["bench", "all", "--form", form, "--sizes", "8,1K", *QUICK, "--json", json_file]
    status = run(arguments)
    data = _results(json_file)
    assert data["policy"]["form"] == form
    vendor = MPI.get_vendor()[0]
    wrong = {(row["collective"], row["algorithm"]) for row in data["results"] if row["fault"]}
    excused = {
        (name, who)
        for one, other, name in WRONG_NATIVE
        for who in ("native", "native again")
        if (one, other) == (vendor, form)
    }
    assert wrong <= excused
    assert status == bool(wrong)
    for name in COLLECTIVES:
        found = {
            row["algorithm"].split(":")[0] for row in data["results"] if row["collective"] == name
        }
        native = set() if data["left_out"][name] else {"native", "native again"}
        assert found == {"auto"} | native
    for row in data["results"]:
        assert set(row["against"]) == (
            set()
            if row["algorithm"] == "native" or data["left_out"][row["collective"]]
            else {"native"}
        )


def test_nonblocking_and_persistent_calls_are_those(world: Comm) -> None:
    case = Case(world, even("allreduce", SIZE, 64, DOUBLE))
    for form, expected in (("blocking", 1), ("nonblocking", 1), ("persistent", 2)):
        with ExitStack() as stack:
            call = bench_rivals.started(world, case, form, stack, algorithm="ring")
            world.stats.reset()
            case.poison()
            for _ in range(expected):
                call()
            assert not case.wrong()
            assert {name for _, name in world.stats} == {"ring"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, json_file: str) -> None:
    arguments = ["bench", "allreduce", "allgather", "--dtype", dtype, "--sizes", "1K"]
    assert run([*arguments, "--repeats", "1", "--seconds", "0", "--json", json_file]) == 0
    data = _results(json_file)
    assert data["policy"]["dtype"] == dtype
    names = {name: [] for name in ("allreduce", "allgather")}
    for row in data["results"]:
        names[row["collective"]].append(row["algorithm"].split(":")[0])
    assert names["allgather"] == ["native", "native again", "auto"]
    if dtype == "bfloat16":
        assert "own blocking allreduce does not take bfloat16" in data["left_out"]["allreduce"][0]
        assert names["allreduce"] == ["auto"]
    else:
        assert names["allreduce"] == ["native", "native again", "auto"]


def test_wrong_data_of_a_persistent_call_are_found(
    json_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(Start=lambda: None, Wait=lambda: None, Free=lambda: None)
    monkeypatch.setattr(Comm, "Allreduce_init", lambda *_, **__: nothing)
    arguments = ["bench", "allreduce", "-a", "ring", "--form", "persistent", "--sizes", "64"]
    assert run([*arguments, *QUICK, "--json", json_file]) == 1
    faults = {row["algorithm"]: row["fault"] for row in _results(json_file)["results"]}
    assert "expected" in faults["ring"]
    assert not faults["native"]


def test_without_rivals(json_file: str) -> None:
    arguments = ["bench", "bcast", "--compare", "none", "--sizes", "8", *QUICK]
    assert run([*arguments, "--plot", "-", "--json", json_file]) == 0
    rows = _results(json_file)["results"]
    assert [row["algorithm"].split(":")[0] for row in rows] == ["auto"]
    assert rows[0]["against"] == {}


# -- what a rival's data are held to -------------------------------------------------------


@pytest.mark.parametrize(("dtype", "unit"), [(ml_dtypes.bfloat16, 2.0**-8), ("f2", 2.0**-11)])
def test_rounding_of_a_rival_is_bounded(
    dtype: Any, unit: float, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(world, even("allreduce", SIZE, 64, np.dtype(dtype)))
    total = np.full(case.result.size, 1024.0)
    case.expected = total.astype(dtype)
    many = int(1.5 / unit)  # ranks: more than every partial sum is exact for
    share = (1 + unit) ** many - 1
    case.result[...] = (total * (1 + 0.9 * share)).astype(dtype)
    assert bench_rivals.near(case, many) == ""
    # With few ranks every bit counts.
    assert "differ" in bench_rivals.near(case, 2)
    case.result[...] = (total * (1 + 1.2 * (share + unit))).astype(dtype)
    assert "differ" in bench_rivals.near(case, many)
    # What is only moved is never rounded.
    moved = Case(world, even("bcast", SIZE, 64, np.dtype(dtype)))
    moved.result[...] = moved.result * np.asarray(1 + 4 * unit, dtype)
    assert "differ" in bench_rivals.near(moved, many)


def test_sums_that_overflow_are_not_compared(world: Comm) -> None:
    case = Case(world, even("allreduce", SIZE, 64, np.dtype(np.int8)))
    # 6 is the highest addend, 127 the highest int8.
    assert [bench_rivals.overflows(case, size) for size in (21, 22)] == [False, True]
    moved = Case(world, even("bcast", SIZE, 64, np.dtype(np.int8)))
    assert not bench_rivals.overflows(moved, 1000)
    rival = bench_rivals.Native(world)
    rival._comm = SimpleNamespace(size=22)  # type: ignore[assignment]
    assert rival.refusal(case, "blocking") == "sums of int8 over 22 ranks overflow"


def test_a_broken_native_is_left_out(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = (MPI.get_vendor()[0], "blocking", "bcast")
    monkeypatch.setitem(bench_rivals._BROKEN, key, "it does not return")
    assert run(["bench", "bcast", "--sizes", "8", *QUICK, "--json", json_file]) == 0
    data = _results(json_file)
    assert data["left_out"]["bcast"] == [
        f"{key[0]}'s own blocking bcast is broken (it does not return)"
    ]
    assert len(data["results"]) == 1


# -- timing --------------------------------------------------------------------------------


def test_what_works_in_place_is_prepared_before_each_call() -> None:
    log: list[str] = []
    contender = timing.Contender(
        "one",
        lambda: log.append("call"),
        lambda: log.append("poison"),
        lambda: "",
        lambda: log.append("prepare"),
    )
    timing.race(WORLD, [contender], 0.0, 3)
    usual = ["prepare", "call"]
    checked = ["poison", *usual]
    assert log == [*usual * timing.WARM_UP, *checked, *usual, *checked]


@pytest.mark.parametrize(
    ("interval", "noise", "expected"),
    [
        ((0.5, 0.8), (0.9, 1.1), "faster"),
        ((0.5, 0.95), (0.9, 1.1), "same"),
        ((0.5, 0.95), (1.1, 1.2), "faster"),
        ((1.05, 1.5), (0.9, 1.1), "same"),
        ((1.2, 1.5), (0.9, 1.1), "slower"),
        ((1.02, 1.5), (0.8, 0.9), "slower"),
    ],
)
def test_verdict(interval: tuple[float, float], noise: tuple[float, float], expected: str) -> None:
    assert timing.verdict(interval, noise) == expected


# -- the limit -----------------------------------------------------------------------------


def test_limit(json_file: str) -> None:
    arguments = ["bench", "bcast", "allreduce", "barrier", "--sizes", "1K", *QUICK]
    assert run([*arguments, "--json", json_file]) == 0
    data = _results(json_file)
    limit = data["limit"]
    assert set(limit) == (set(bench_limit.KINDS) if SIZE > 1 else {"memcpy"})
    assert all(one["rate"] > 0 and one["bytes"] in (64, 1024) for one in limit.values())
    kinds = {"bcast": "one_way", "allreduce": "both_ways", "barrier": None}
    for row in data["results"]:
        kind = kinds[row["collective"]] if SIZE > 1 else None
        assert row["limit"] == kind
        if kind is not None:
            assert row["share"] == pytest.approx(row["busbw"] / limit[kind]["rate"])
        else:
            assert row["share"] is None


def test_plain_messages_are_checked() -> None:
    for kind in bench_limit.KINDS if SIZE > 1 else ("memcpy",):
        contender = bench_limit._contender(WORLD, kind, 64)
        contender.poison()
        words = contender.wrong()
        assert ("wrong data" in words) == (kind != "one_way" or RANK == SIZE - 1)
        contender.call()
        assert contender.wrong() == ""


def test_wrong_messages_are_a_fault(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_limit, "_wrong", lambda rank, *_: "broken" * (rank == SIZE - 1))
    assert run(["bench", "bcast", "--sizes", "8", *QUICK, "--json", json_file]) == 1
    assert {one["fault"] for one in _results(json_file)["limit"].values()} == {"broken"}


# -- Gloo ----------------------------------------------------------------------------------


class Handle:
    """What a non-blocking call of the stand-in returns."""

    def wait(self) -> None:
        """Nothing: the call is over."""


def _stand_in(monkeypatch: pytest.MonkeyPatch, begin: Any = None) -> list[str]:
    """Put a torch in place whose tensors are arrays and whose collectives are MPI's own."""
    log: list[str] = []

    def known(name: str, run: Any) -> Any:
        def call(*arguments: Any, async_op: bool = False, **keywords: Any) -> Any:
            log.append(name + " async" * async_op)
            run(*arguments, **keywords)
            return Handle() if async_op else None

        return call

    def gather(tensor: Any, blocks: Any, dst: int) -> None:
        parts = WORLD.gather(tensor, root=dst)
        for block, part in zip(blocks or (), parts or (), strict=True):
            block[...] = part

    def scatter(tensor: Any, blocks: Any, src: int) -> None:
        tensor[...] = WORLD.scatter(blocks, root=src)

    def reduce(tensor: Any, dst: int) -> None:
        root = dst == RANK
        WORLD.Reduce(MPI.IN_PLACE if root else tensor, tensor if root else None, MPI.SUM, dst)

    torch, distributed = ModuleType("torch"), ModuleType("torch.distributed")
    torch.from_numpy = lambda array: array
    torch.set_num_threads = lambda number: None
    distributed.FileStore = lambda name, size: log.append("file") or name
    distributed.init_process_group = begin or (lambda *_, **__: log.append("begin"))
    distributed.destroy_process_group = lambda: log.append("end")
    distributed.barrier = known("barrier", WORLD.Barrier)
    distributed.broadcast = known("broadcast", lambda tensor, src: WORLD.Bcast(tensor, src))
    distributed.all_reduce = known(
        "all_reduce", lambda tensor: WORLD.Allreduce(MPI.IN_PLACE, tensor)
    )
    distributed.reduce = known("reduce", reduce)
    distributed.gather = known("gather", gather)
    distributed.scatter = known("scatter", scatter)
    distributed.all_gather_into_tensor = known(
        "all_gather", lambda result, tensor: WORLD.Allgather(tensor, result)
    )
    distributed.reduce_scatter_tensor = known(
        "reduce_scatter", lambda result, tensor: WORLD.Reduce_scatter_block(tensor, result)
    )
    distributed.all_to_all_single = known(
        "all_to_all", lambda result, tensor: WORLD.Alltoall(tensor, result)
    )
    torch.distributed = distributed
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(bench_gloo, "_one_node", lambda world: True)
    return log


@pytest.mark.parametrize("form", ["blocking", "nonblocking"])
def test_gloo_by_a_stand_in(form: str, json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _stand_in(monkeypatch)
    arguments = ["bench", "all", "--compare", "gloo", "--form", form, "--sizes", "1K"]
    assert run([*arguments, *QUICK, "--json", json_file]) == 0
    assert log[:3] == ["file", "begin", "barrier"]
    assert log[-1] == "end"
    calls = {"all_reduce", "reduce", "gather", "scatter", "all_gather", "reduce_scatter"}
    calls |= {"all_to_all", "barrier", "broadcast"}
    assert {name + " async" * (form == "nonblocking") for name in calls} <= set(log)
    data = _results(json_file)
    for name in COLLECTIVES:
        found = [r["algorithm"].split(":")[0] for r in data["results"] if r["collective"] == name]
        if name in ("scan", "exscan"):
            assert data["left_out"][name] == [f"Gloo has no {name}"]
            assert found == ["auto"]
        else:
            assert data["left_out"][name] == []
            assert found == ["gloo", "gloo again", "auto"]


def test_wrong_data_of_gloo_are_found(json_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    sys.modules["torch.distributed"].all_to_all_single = lambda result, tensor: None
    arguments = ["bench", "alltoall", "--compare", "gloo", "--sizes", "64", *QUICK]
    assert run([*arguments, "--json", json_file]) == 1
    faults = {row["algorithm"]: row["fault"] for row in _results(json_file)["results"]}
    assert "expected" in faults["gloo"]


def test_gloo_says_what_it_does_not_take(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    with ExitStack() as stack:
        rival = bench_gloo.Gloo(world, stack)
        short = Case(world, even("bcast", SIZE, 64, np.dtype(np.int16)))
        assert rival.refusal(short, "blocking") == "Gloo does not take int16"
        double = Case(world, even("bcast", SIZE, 64, DOUBLE))
        assert rival.refusal(double, "persistent") == "Gloo has no persistent form"
        assert rival.refusal(double, "nonblocking") == ""


def test_torch_that_one_rank_lacks_is_said_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _stand_in(monkeypatch)
    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "torch", None)
    assert run(["bench", "allreduce", "--compare", "native,gloo"]) == 2
    assert log == []
    captured = capsys.readouterr()
    assert captured.out == ""  # nothing was timed
    if launch.speaks():
        assert f"--compare gloo needs PyTorch (rank {SIZE - 1}:" in captured.err
        assert "pip install torch, or leave gloo out of --compare" in captured.err


def test_gloo_that_does_not_start_is_said_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: Any, **__: Any) -> None:
        if RANK == 0:
            raise RuntimeError("no such network")

    _stand_in(monkeypatch, begin)
    # The others are in their first call meanwhile; the real one ends by its time limit.
    sys.modules["torch.distributed"].barrier = lambda: None
    assert run(["bench", "allreduce", "--compare", "gloo"]) == 2
    if launch.speaks():
        words = "--compare gloo did not start (rank 0: no such network); set GLOO_SOCKET_IFNAME"
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_port_of_rank_0_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def store(
        host: str, port: int, world_size: int, wait_for_workers: bool, is_master: bool
    ) -> Any:
        made.append((port, world_size, is_master))
        return SimpleNamespace(port=1234)

    assert bench_gloo._port(SimpleNamespace(TCPStore=store), WORLD).port == 1234
    assert made == [(0, SIZE, True) if RANK == 0 else (1234, SIZE, False)]

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no port is free")

    with pytest.raises((OSError, RuntimeError), match="no port is free"):
        bench_gloo._port(SimpleNamespace(TCPStore=fails), WORLD)


def test_gloo_itself(json_file: str) -> None:
    """With torch: every collective and type is right; without: it is said."""
    arguments = ["bench", "all", "--compare", "native,gloo", "--sizes", "8,1K", *QUICK]
    if find_spec("torch") is None:
        assert run(arguments) == 2
        return
    for dtype in ("float64", "bfloat16", "int32"):
        assert run([*arguments, "--dtype", dtype, "--json", json_file]) == 0
        data = _results(json_file)
        compared = {row["collective"] for row in data["results"] if row["algorithm"] == "gloo"}
        assert compared == set(COLLECTIVES) - {"scan", "exscan"}
        assert not any(row["fault"] for row in data["results"])


# -- the study -----------------------------------------------------------------------------


def test_study(json_file: str) -> None:
    assert run(["bench", "--study", *QUICK, "--json", json_file]) == 0
    studies = {study["study"]: study for study in _results(json_file)["studies"]}
    assert list(studies) == ["small", "strided", "mapping", "slow", "skewed"]
    least = {"small": 1, "strided": 1, "mapping": 3, "slow": 2, "skewed": 3}
    for key, study in studies.items():
        assert bool(study["lines"]) == (least[key] <= SIZE)
        assert study["conclusion"].endswith(".")
        labels = [line["label"] for line in study["lines"]]
        assert all(line["base"] in labels for line in study["lines"])
        assert not any(line["fault"] for line in study["lines"])
        assert labels[1:2] == ["again"] * bool(labels)


def test_study_without_the_native(json_file: str) -> None:
    assert run(["bench", "--study", "--compare", "none", *QUICK, "--json", json_file]) == 0
    for study in _results(json_file)["studies"]:
        assert not any("native" in line["label"] for line in study["lines"])
        assert "native" not in study["conclusion"]


@pytest.mark.parametrize(
    ("method", "study"), [("Allreduce", "small"), ("Bcast", "strided"), ("Alltoallv", "skewed")]
)
def test_study_finds_wrong_data(
    method: str, study: str, json_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comm, method, lambda *_, **__: None)
    # A bcast on one rank has nothing to do, and small groups are not skewed.
    seen = {"small": 1, "strided": 2, "skewed": 3}[study] <= SIZE
    status = run(["bench", "--study", *QUICK, "--json", json_file])
    found = {one["study"]: one["lines"] for one in _results(json_file)["studies"]}[study]
    ours = [line["fault"] for line in found if not line["label"].startswith("native")]
    assert all("expected" in fault for fault in ours) if seen else not any(ours)
    if seen:
        assert status == 1


def _line(ratio: float, verdict: str, figure: float = 0.0) -> dict[str, Any]:
    interval = (0.9 * ratio, 1.1 * ratio)
    return {"ratio": ratio, "interval": interval, "verdict": verdict, "figure": figure}


def test_sentences_are_made_of_the_figures(world: Comm) -> None:
    with ExitStack() as stack:
        small = bench_comparisons.many_small(world, ("mpicoll", "native"), stack)
        strided = bench_comparisons.strided(world, ("mpicoll",), stack)
        slow = bench_ranks.slow_rank(world, ("mpicoll",), stack)
    lines = {
        "mpicoll, many small": _line(7.0, "slower"),
        "native, many small": _line(1.0, "same"),
    }
    words = small.conclude(lines)
    assert "with mpicoll 7.00 times as long (6.30–7.70)" in words
    assert "with native as long within the noise (0.90–1.10 times)" in words
    assert words.endswith("put small arrays into one.")
    lines["mpicoll, many small"] = _line(1.0, "same")
    assert small.conclude(lines).endswith("no cost of many calls can be seen.")
    assert "keep dense" in strided.conclude({"mpicoll, strided": _line(2.0, "slower")})
    assert "no cost" in strided.conclude({"mpicoll, strided": _line(0.5, "faster")})
    late = next((float(word) for word in _delays(slow.what)), 0.0)
    lines = {}
    for name, wait in (("allreduce", 0.9), ("reduce", 0.2), ("bcast", 0.0)):
        lines[f"mpicoll {name}"] = _line(1.0, "same", 1.0)
        lines[f"mpicoll {name}, one late"] = _line(3.0, "slower", 1.0 + wait * late)
    words = slow.conclude(lines)
    assert "90% in mpicoll allreduce, 20% in mpicoll reduce, 0% in mpicoll bcast" in words
    assert words.endswith("most of the delay is passed on by mpicoll allreduce.")
    for name in ("allreduce", "reduce", "bcast"):
        lines[f"mpicoll {name}, one late"] = _line(1.0, "same", 1.0)
    assert slow.conclude(lines).endswith("less than half of the delay is passed on.")


def _delays(what: str) -> list[float]:
    """Return the milliseconds in a description, in seconds."""
    words = what.split()
    return [float(number) / 1e3 for number, unit in pairwise(words) if unit == "ms"]


def test_orders_of_ranks() -> None:
    assert bench_ranks.orders(["a"] * 4) == {
        "as started": [0, 1, 2, 3],
        "halves interleaved": [0, 2, 1, 3],
    }
    assert bench_ranks.orders(["a", "a", "b", "b"]) == {
        "as started": [0, 1, 2, 3],
        "spread": [0, 2, 1, 3],
    }
    cyclic = bench_ranks.orders(["a", "b", "a", "b", "a"])
    assert cyclic["packed"] == [0, 2, 4, 1, 3]
    assert "spread" not in cyclic
    for size in (1, 2, 3, 5, 8):
        for order in bench_ranks.orders(["a"] * size).values():
            assert sorted(order) == list(range(size))


def test_half_of_skewed_data_is_for_rank_0() -> None:
    for size in (1, 2, 3, 5, 8):
        for total in (0, 1, 7, 64):
            flat = bench_comparisons.counts_of(size, total, False)
            hot = bench_comparisons.counts_of(size, total, True)
            assert sum(flat) == sum(hot) == total
            assert len(flat) == len(hot) == size
            assert max(flat) - min(flat) <= 1
            if size > 1:
                assert hot[0] == total // 2


def test_the_slow_rank_is_late(world: Comm) -> None:
    log: list[str] = []
    late = bench_ranks.Watched(lambda: log.append("call"), 2e-3)
    start = MPI.Wtime()
    late()
    assert MPI.Wtime() - start >= 2e-3  # busy, so never less
    assert len(late.inside) == len(log) == 1
