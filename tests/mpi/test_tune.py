"""`mpicoll tune` on all ranks, and what its table does at run time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.algorithms import every, find, names
from mpicoll.cli import app, calibrate, launch, timing, tune_measure
from mpicoll.cli.main import run
from mpicoll.errors import SettingError
from mpicoll.runtime.link import attach
from mpicoll.runtime.place import library, place
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.selection.calibration import FARTHEST, listed
from mpicoll.selection.choose import Wanted, choose, served
from mpicoll.selection.model import CROWDED, DEFAULT, Corrections, Rates, seconds
from mpicoll.selection.settings import Settings, parse, read
from mpicoll.selection.table import Entry, Ranked, Table, dump, load

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
RATES = ("step", "message", "byte", "local")
FAST = ["--seconds", "0", "--sizes", "8,32K"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Few rounds, no cache of the user's, and the command registered."""
    monkeypatch.setattr(app, "COMMANDS", tuple(dict.fromkeys((*app.COMMANDS, "tune"))))
    monkeypatch.setattr(timing, "FEWEST", 2)
    monkeypatch.setattr(calibrate, "EACH", 0.0)
    monkeypatch.setattr(calibrate, "SIZES", (8, 4096))
    monkeypatch.setattr("mpicoll.cli.main.FIRST_WORD", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.delenv("MPICOLL_TUNING", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that all ranks agree on."""
    return Path(WORLD.bcast(str(tmp_path), root=0))


def _json(file: Path) -> dict[str, Any]:
    """Return what rank 0 wrote."""
    text = file.read_text(encoding="utf-8") if WORLD.rank == 0 else ""
    data: dict[str, Any] = json.loads(WORLD.bcast(text, root=0))
    return data


def _table(file: Path) -> Table:
    text = file.read_text(encoding="utf-8") if WORLD.rank == 0 else ""
    return load(WORLD.bcast(text, root=0), str(file), library())


def _write(file: Path, text: str) -> None:
    if WORLD.rank == 0:
        file.write_text(text, encoding="utf-8")
    WORLD.Barrier()


def test_tune_writes_a_table_that_decides(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report = folder / "t.json", folder / "r.json"
    chosen = ["-c", "allreduce,alltoall,barrier", "--out", str(out), "--json", str(report)]
    assert run(["tune", *chosen, *FAST]) == 0
    assert bool(capsys.readouterr().out) == launch.speaks()
    table, told = _table(out), _json(report)
    assert table.mpi == library()
    assert {entry.key for entry in table.entries} == {
        (name, SIZE, "host") for name in ("allreduce", "alltoall", "barrier")
    }
    for entry in table.entries:
        assert len(entry.ranked) >= len(names(entry.collective))  # all of them were measured
    assert [row["collective"] for row in told["results"]] == [
        *("allreduce", "allreduce", "alltoall", "alltoall", "barrier")
    ]
    assert not any(row["faults"] for row in told["results"])
    assert all(row["gain"] >= 1 for row in told["results"])
    assert told["rates"][0]["measured"] == (SIZE > 1)
    assert (told["rates"][0]["off_by"] is None) == (SIZE == 1)
    rates = told["rates"][0]["seconds"]
    assert all(0 < value < 1 for value in rates.values())
    cache = folder / "cache" / "mpicoll" / "rates.json"
    assert WORLD.bcast(cache.exists(), root=0) == (SIZE > 1)

    monkeypatch.setenv("MPICOLL_TUNING", str(out))
    settings = _settings()
    assert settings.tuning == table
    first = table.find("allreduce", SIZE, "host", 8)
    assert first is not None
    assert choose(Wanted("allreduce", SIZE, 8), settings).algorithm.name == (
        first.ranked[0].algorithm
    )


def _settings() -> Settings:
    """Return the settings as a link agrees on them: read on rank 0, judged on all."""
    where = place(WORLD)
    found = (
        read({"MPICOLL_TUNING": os.environ["MPICOLL_TUNING"]}, where) if WORLD.rank == 0 else None
    )
    return parse(*WORLD.bcast(found, root=0))


def test_groups_and_entries_of_an_earlier_run(folder: Path) -> None:
    out = folder / "t.json"
    old = Entry("scan", SIZE + 1, "host", 0, 10, (Ranked("linear", 0, 1e-3),))
    gone = Entry("bcast", 1, "host", 0, 10, (Ranked("chain", 7, 1e-3),))
    _write(out, dump(Table((old, gone), library(), "0")))
    groups = ",".join(map(str, sorted({1, SIZE})))
    arguments = ["tune", "-c", "bcast", "--out", str(out), "--ranks", groups, *FAST]
    assert run(arguments) == 0
    table = _table(out)
    assert old in table.entries
    assert gone not in table.entries
    assert {entry.ranks for entry in table.entries if entry.collective == "bcast"} == {1, SIZE}


def test_quick_measures_rates_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = folder / "r.json"
    out = folder / "t.json"
    assert run(["tune", "--quick", "--out", str(out), "--json", str(report)]) == 0
    assert not out.exists()
    told = _json(report)
    assert (told["out"], told["results"]) == (None, [])
    where = place(WORLD)
    if SIZE > 1 and WORLD.rank == 0:
        rates = read({}, where)[1].rates
        assert rates.step == told["rates"][0]["seconds"]["step"]
        assert listed(rates.corrections) == told["rates"][0]["corrections"] != []
        assert "Rates on" in capsys.readouterr().out


def test_wrong_data_are_named_and_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Comm.Allreduce

    def wrong(self: Comm, send: Any, recv: Any, *others: Any, **keywords: Any) -> None:
        right(self, send, recv, *others, **keywords)
        if keywords["algorithm"] == "ring" and self.rank == self.size - 1:
            recv[-1] += 1

    monkeypatch.setattr(Comm, "Allreduce", wrong)
    monkeypatch.setattr(calibrate, "PROBES", calibrate.PROBES[:3])
    out, report = folder / "t.json", folder / "r.json"
    arguments = ["tune", "-c", "allreduce", "--out", str(out), "--json", str(report), *FAST]
    assert run(arguments) == 1
    faulty = {name.split()[0] for row in _json(report)["results"] for name in row["faults"]}
    assert faulty == {"ring"}
    named = {one.algorithm for entry in _table(out).entries for one in entry.ranked}
    assert named == set(names("allreduce")) - {"ring"}
    if WORLD.rank == 0:
        assert f"rank {SIZE - 1}: element" in capsys.readouterr().out


def _always_wrong(self: Comm, send: Any, recv: Any, *others: Any, **keywords: Any) -> None:
    """Stand for an Allreduce by whatever algorithm."""
    MPI.Intracomm.Allreduce(self, send, recv, *others)
    recv[-1] += 1


@pytest.mark.parametrize("before", [True, False], ids=["a table", "no table"])
def test_where_all_data_are_wrong_nothing_stands(
    before: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No algorithm is named as measured, and what the table had does not stay as if it were."""
    monkeypatch.setattr(Comm, "Allreduce", _always_wrong)
    monkeypatch.setattr(calibrate, "PROBES", calibrate.PROBES[:3])
    monkeypatch.setattr(calibrate, "correct", lambda *_: Corrections({}, SIZE))
    out, report = folder / "t.json", folder / "r.json"
    gone = Entry("allreduce", SIZE, "host", 0, 10, (Ranked("ring", 0, 1e-3),))
    others = (
        Entry("allreduce", SIZE + 1, "host", 0, 10, (Ranked("ring", 0, 1e-3),)),
        Entry("allreduce", SIZE, "device", 0, 10, (Ranked("ring", 0, 1e-3),)),
    )
    if before:
        _write(out, dump(Table((gone, *others), library(), "0")))
    arguments = ["tune", "-c", "allreduce", "--out", str(out), "--json", str(report), *FAST]
    assert run(arguments) == 1
    told = _json(report)
    assert told["out"] == (str(out) if before else None)
    for row in told["results"]:
        found = {name: row[name] for name in ("best", "best_seconds", "fastest_seconds")}
        assert set(found.values()) == {None}
        assert (row["default_seconds"], row["gain"], row["interval"]) == (None, None, None)
        assert row["ranked"] == []
    said = " ".join(capsys.readouterr().out.split())
    if before:
        assert set(_table(out).entries) == set(others)
        wanted = "Data were wrong: what it had for allreduce on"
    else:
        assert not WORLD.bcast(out.exists(), root=0)
        wanted = "All data were wrong"
    assert (wanted in said) == launch.speaks()
    assert ("none is right" in said) == launch.speaks()


def test_a_wrong_default_is_compared_with_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Comm.Allreduce

    def wrong(self: Comm, send: Any, recv: Any, *others: Any, **keywords: Any) -> None:
        right(self, send, recv, *others, **keywords)
        if keywords["algorithm"] == "ring":
            recv[-1] += 1

    def automatic(wanted: Wanted, *given: Any) -> Any:
        return choose(wanted, Settings(algorithms=(("allreduce", "ring"),)))

    monkeypatch.setattr(Comm, "Allreduce", wrong)
    monkeypatch.setattr(tune_measure, "automatic", automatic)
    monkeypatch.setattr(calibrate, "PROBES", calibrate.PROBES[:3])
    monkeypatch.setattr(calibrate, "correct", lambda *_: Corrections({}, SIZE))
    out, report = folder / "t.json", folder / "r.json"
    arguments = ["tune", "-c", "allreduce", "--out", str(out), "--json", str(report), *FAST]
    assert run(arguments) == 1
    for row in _json(report)["results"]:
        assert row["default"].split()[0] == "ring"
        assert (row["default_seconds"], row["gain"], row["interval"]) == (None, None, None)
        assert row["best"].split()[0] != "ring"
        assert row["best_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "allredcue"], "--collectives: there is no 'allredcue'; known: allgather"),
        (["-c", ","], "--collectives: no name is given"),
        (["--ranks", "2,x"], "--ranks 2,x: expected numbers such as 2,4,8"),
        (["--ranks", "0"], "--ranks 0: expected numbers from 1 to"),
        (["--ranks", "100000"], "expected numbers from 1 to"),
        (["--memory", "device", "--quick"], "--quick measures the rates of the cost model"),
        (["--sizes", "8:x"], "'x' is no size"),
        (["--out", "/no/such/folder/t.json"], "there is no folder /no/such/folder"),
        (["--json", "/no/such/folder/t.json"], "there is no folder /no/such/folder"),
    ],
)
def test_misuse_is_said_once(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", *arguments]) == 2
    assert (words if launch.speaks() else "") in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"kind": "mine"}'])
def test_a_file_that_is_no_table_is_not_overwritten(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "mine.json"
    _write(out, text)
    assert run(["tune", "-c", "barrier", "--out", str(out), *FAST]) == 2
    assert ("It is left as it is" if launch.speaks() else "") in capsys.readouterr().err
    assert WORLD.bcast(WORLD.rank or out.read_text(encoding="utf-8"), root=0) == text


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    if launch.speaks():
        assert "MPICOLL_TUNING=tuning.json mpiexec -n 8" in out
        assert "mpicoll tune --quick" in out


# -- at run time -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"kind": "mine"}', "not a tuning table"),
        (dump(Table((), "Nobody's MPI 1.0", "0")), "measured with Nobody's MPI 1.0, this is"),
    ],
)
def test_a_broken_or_foreign_table_is_refused_on_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    file = folder / "t.json"
    _write(file, text)
    monkeypatch.setenv("MPICOLL_TUNING", str(file))
    with pytest.raises(SettingError, match=words) as caught:
        _settings()
    assert len(set(WORLD.allgather(str(caught.value)))) == 1


def test_only_rank_0_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("bcast", SIZE, "host", 0, 100, (Ranked("chain", 0, 1e-3),))
    file = folder / "t.json"
    _write(file, dump(Table((entry,), library(), "0")))
    monkeypatch.setenv("MPICOLL_TUNING", str(file) if WORLD.rank == 0 else "/no/such/file")
    settings = _settings()
    assert len(set(WORLD.allgather(hash(settings.tuning is None)))) == 1
    assert choose(Wanted("bcast", SIZE, 64), settings).algorithm.name == "chain"
    assert choose(Wanted("bcast", SIZE, 101), settings) == choose(
        Wanted("bcast", SIZE, 101), Settings(rates=settings.rates)
    )


@pytest.mark.parametrize("name", names("allreduce"))
def test_what_the_table_names_runs(name: str) -> None:
    """A communicator with the table's settings calls the algorithm, with the right result."""
    entry = Entry("allreduce", SIZE, "host", 0, 1 << 20, (Ranked(name, 0, 1e-3),))
    world = MPI.Intracomm(WORLD).Dup()
    attach(world, Settings(tuning=Table((entry,))))
    comm = Comm(world)
    try:
        result = np.empty(100)
        comm.Allreduce(np.full(100, comm.rank + 1.0), result)
        assert (result == SIZE * (SIZE + 1) / 2).all()
        assert ("allreduce", name) in comm.stats
    finally:
        comm.Free()


def test_place() -> None:
    where = WORLD.bcast(place(WORLD), root=0)
    assert where.ranks == SIZE
    assert where.load >= 1
    assert where.mpi == library()
    assert len(set(WORLD.allgather(where.mpi))) == 1


def test_every_algorithm_is_corrected_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SIZES", (8, 1 << 12, 1 << 18))
    monkeypatch.setattr(calibrate, "CUTS", (1 << 12,))
    seen: list[str] = []
    samples = calibrate.time_all(Comm(WORLD), seen.append)
    assert not any(one.fault for one in samples)
    corrections = calibrate.correct(samples, SIZE, DEFAULT)
    curves = {
        (*key, cut): curve
        for key, cuts in corrections.curves.items()
        for cut, curve in cuts.items()
    }
    assert WORLD.allgather(curves) == [curves] * SIZE
    assert seen == list(COLLECTIVES)
    expected = {
        (one.collective, one.name)
        for one in every()
        if served(one, Wanted(one.collective, SIZE)) and len(_rivals(one.collective)) > 1
    }
    assert {key[:2] for key in curves} == expected
    for (collective, name, cut), curve in curves.items():
        assert find(collective, name).segmented or not cut
        assert len(curve) == 1 if cut else len(curve) == 3
        assert curve[-1][0] > (1 << 18) - 8 * SIZE  # blocks of equal length
    assert ("bcast", "chain", 1 << 12) in curves


def _rivals(collective: str) -> list[str]:
    known = [find(collective, name) for name in names(collective)]
    return [one.name for one in known if served(one, Wanted(collective, SIZE))]


def test_a_time_twice_as_long_is_a_factor_below_two() -> None:
    """What is measured is believed for the most part."""
    samples = [one._replace(seconds=2 * one.seconds) for one in _samples(DEFAULT, 8) if one.nbytes]
    corrections = calibrate.correct(samples, 8, DEFAULT)
    curves = [curve for cuts in corrections.curves.values() for curve in cuts.values()]
    factors = [factor for curve in curves for _, factor in curve]
    assert factors == pytest.approx([2**calibrate.BELIEF] * len(samples))


def test_wrong_data_are_in_no_rates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Comm.Allreduce

    def wrong(self: Comm, send: Any, recv: Any, *others: Any, **keywords: Any) -> None:
        right(self, send, recv, *others, **keywords)
        if keywords["algorithm"] in ("ring", "circulant") and self.rank == self.size - 1:
            recv[-1] += 1

    monkeypatch.setattr(Comm, "Allreduce", wrong)
    report = folder / "r.json"
    assert run(["tune", "--quick", "--json", str(report)]) == (SIZE > 1)
    (told,) = _json(report)["rates"]
    if SIZE == 1:  # nothing was measured
        assert told["faults"] == {}
        return
    assert set(told["faults"]) == {"allreduce ring", "allreduce circulant"}
    assert told["measured"]
    for one in told["corrections"]:  # they are taken for the slowest there can be
        bad = (one["collective"], one["algorithm"]) in (
            ("allreduce", "ring"),
            ("allreduce", "circulant"),
        )
        assert all((factor == FARTHEST) == bad for _, factor in one["at"]), one
    if WORLD.rank == 0:
        assert "WRONG allreduce ring" in capsys.readouterr().out


def _samples(true: Rates, size: int) -> list[calibrate.Sample]:
    """Return times that follow the model to the letter."""
    return [
        calibrate.Sample(
            collective, name, nbytes, seconds(find(collective, name), size, nbytes, 0, true)
        )
        for collective, name, nbytes in calibrate.PROBES
    ]


@pytest.mark.parametrize("factor", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("load", [1.0, 4.0])
def test_fit_finds_the_rates_that_the_times_are_made_of(factor: float, load: float) -> None:
    start = CROWDED if load > 1 else DEFAULT
    true = Rates(**{name: factor * getattr(start, name) for name in RATES}, load=load)
    rates, off = calibrate.fit(_samples(true, 8), 8, load)
    for name in RATES:
        assert getattr(rates, name) == pytest.approx(getattr(true, name), rel=1e-3)
    assert off == pytest.approx(1, abs=1e-3)


def test_fit_where_ratios_are_unusual_and_a_sample_was_disturbed() -> None:
    """The ratios are drawn to the usual ones, from which they are off by 3, and no further;
    one bad sample of all does no more."""
    true = Rates(3 * DEFAULT.step, DEFAULT.message, DEFAULT.byte, 3 * DEFAULT.local)
    samples = _samples(true, 8)
    for number, sample in enumerate(samples):
        worse = [*samples]
        worse[number] = sample._replace(seconds=50 * sample.seconds)
        for given in (samples, worse):
            rates = calibrate.fit(given, 8, 1.0)[0]
            for name in RATES:
                assert 1 / 3 < getattr(rates, name) / getattr(true, name) < 3, (number, name)
