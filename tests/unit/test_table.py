"""The tuning table's file: what is written is read, everything else is refused with a reason."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpicoll.errors import SettingError
from mpicoll.selection.calibration import Place, cache_file, lookup, store
from mpicoll.selection.model import CROWDED, DEFAULT, Corrections, Rates
from mpicoll.selection.table import LARGEST, Crossover, Entry, Ranked, Table, dump, load, merged

TABLE = Table(
    (
        Entry("allreduce", 8, "host", 0, 64, (Ranked("recursive_doubling", 0, 1e-5),)),
        Entry(
            "allreduce",
            8,
            "host",
            65,
            LARGEST,
            (Ranked("ring", 65536, 2.5e-4), Ranked("ring", 0, 3e-4), Ranked("direct", 0, 1e-4)),
        ),
        Entry("alltoall", 4, "device", 10, 20, (Ranked("bruck:4", 0, 1e-5),)),
    ),
    "MPICH 4.2.3",
    "0.1.0",
)

CROSSED = replace(TABLE, crossovers=(Crossover(2, 0), Crossover(8, 65536)))

Change = Callable[[dict[str, Any]], object]


def _text(change: Change, table: Table = TABLE) -> str:
    """Return the file of a table with something changed."""
    data = json.loads(dump(table))
    change(data)
    return json.dumps(data)


def _entry(**fields: object) -> Change:
    return lambda data: data["entries"][1].update(fields)


def _ranked(**fields: object) -> Change:
    return lambda data: data["entries"][1]["ranked"][2].update(fields)


def test_what_is_written_is_read() -> None:
    assert load(dump(TABLE), "t.json") == TABLE
    assert load(dump(CROSSED), "t.json") == CROSSED != TABLE
    assert load(dump(Table(())), "t.json") == Table(())
    assert json.loads(dump(TABLE))["entries"][1]["to"] is None


def test_order_is_kept() -> None:
    """The first is preferred, though another was measured to be faster in the noise."""
    assert load(dump(TABLE), "t.json").entries[1].ranked[0].algorithm == "ring"


def test_a_table_of_another_version_of_the_same_mpi_is_taken() -> None:
    for mpi in ("MPICH 4.2.3", "MPICH 5.0.0", "mpich 3.4"):
        assert load(dump(TABLE), "t.json", mpi) == TABLE
    intel = replace(TABLE, mpi="Intel MPI Library 2021.14 for Linux* OS")
    assert load(dump(intel), "t.json", "Intel MPI Library 2021.17 for Linux* OS") == intel


@pytest.mark.parametrize("mpi", ["Open MPI v5.0.8", "Intel MPI Library 2021.14"])
def test_a_table_of_another_mpi_is_refused(mpi: str) -> None:
    with pytest.raises(
        SettingError, match=rf"t\.json: measured with MPICH 4\.2\.3, this is {mpi}"
    ):
        load(dump(TABLE), "t.json", mpi)


WRONG: list[tuple[Change, str]] = [
    (lambda data: data.update(kind="other"), 'not a tuning table: the field "kind"'),
    (lambda data: data.pop("kind"), 'not a tuning table: the field "kind"'),
    (lambda data: data.update(form=3), "form 3, this mpicoll reads forms 1 and 2"),
    (lambda data: data.update(form=2), 'the table has no field "crossovers"'),
    (lambda data: data.update(crossovers=[]), 'the table has an unknown field "crossovers"'),
    (lambda data: data.update(form="1"), "form '1', this mpicoll reads"),
    (lambda data: data.update(form=True), "form True, this mpicoll reads"),
    (lambda data: data.pop("form"), "form None, this mpicoll reads"),
    (lambda data: data.pop("mpi"), 'the table has no field "mpi"'),
    (lambda data: data.update(extra=1), 'the table has an unknown field "extra"; known: kind'),
    (lambda data: data.update(mpicoll=1), '"mpicoll" is a number, expected a string'),
    (lambda data: data.update(entries={}), '"entries" is an object, expected a list'),
    (lambda data: data["entries"].append(None), "entry 3: it is null, expected an object"),
    (_entry(collective="allredcue"), "entry 1: \"collective\" is 'allredcue'; known: allgather"),
    (_entry(collective=["bcast"]), 'entry 1: "collective" is a list, expected a string'),
    (_entry(ranks=0), 'entry 1: "ranks" is 0, expected a whole number from 1 on'),
    (_entry(ranks=8.0), 'entry 1: "ranks" is 8.0, expected a whole number'),
    (_entry(ranks=True), 'entry 1: "ranks" is True, expected a whole number'),
    (_entry(memory="gpu"), "entry 1: \"memory\" is 'gpu'; known: host, device"),
    (_entry(to=64), 'entry 1: "to" is 64, expected a whole number from 65 on'),
    (_entry(to=1 << 63), 'entry 1: "to" is 9223372036854775808'),
    (_entry(**{"from": -1}), 'entry 1: "from" is -1'),
    (_entry(**{"from": 64}), "entries 0 and 1 overlap: allreduce on 8 ranks, host memory, 64 byt"),
    (_entry(note=""), 'entry 1: it has an unknown field "note"'),
    (_entry(ranked=[]), 'entry 1: "ranked" is not a list of at least one'),
    (_entry(ranked="ring"), 'entry 1: "ranked" is not a list'),
    (_entry(ranked=[3]), "entry 1: an item of ranked is a number, expected an object"),
    (_ranked(algorithm="rings"), "entry 1: allreduce has no algorithm 'rings'; known: circulant"),
    (_ranked(algorithm="ring:4"), "entry 1: allreduce algorithm 'ring' takes no radix"),
    (_ranked(algorithm=None), 'entry 1: "algorithm" is null, expected a string'),
    (_ranked(segment=-1), 'entry 1: "segment" is -1'),
    (_ranked(segment="64K"), "entry 1: \"segment\" is '64K', expected a whole number"),
    (_ranked(seconds=-1.0), 'entry 1: "seconds" is -1.0, expected a number from 0 on'),
    (_ranked(seconds="fast"), "entry 1: \"seconds\" is 'fast', expected a number"),
    (_ranked(seconds=True), 'entry 1: "seconds" is True, expected a number'),
    (
        lambda data: data["entries"][0]["ranked"][0].pop("seconds"),
        'entry 0: an item of ranked has no field "seconds"',
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(_text(change), "t.json")
    assert str(caught.value).startswith("t.json: ")
    assert message in str(caught.value)


# -- crossovers -----------------------------------------------------------------------------


def _crossover(**fields: object) -> Change:
    return lambda data: data["crossovers"][1].update(fields)


def test_crossovers_raise_the_form_and_older_forms_are_read() -> None:
    with_them, without = json.loads(dump(CROSSED)), json.loads(dump(TABLE))
    assert with_them["form"] == 2
    assert with_them["crossovers"] == [
        {"ranks": 2, "memory": "device", "bytes": 0},
        {"ranks": 8, "memory": "device", "bytes": 65536},
    ]
    assert without["form"] == 1  # what has no crossover can be read by whoever read it before
    assert "crossovers" not in without
    assert load(dump(TABLE), "t.json").crossovers == ()
    assert load(_text(lambda data: data.update(crossovers=[]), CROSSED), "t.json") == TABLE


def test_a_crossover_is_for_its_number_of_ranks() -> None:
    assert [CROSSED.crossover(ranks) for ranks in (1, 2, 7, 8)] == [None, 0, None, 65536]
    assert TABLE.crossover(8) is None


def test_merged_keeps_crossovers_of_other_ranks() -> None:
    new = Table((), "MPICH 5", "0.2", (Crossover(4, 10), Crossover(8, 20)))
    both = (Crossover(2, 0), Crossover(4, 10), Crossover(8, 20))
    assert merged(CROSSED, new).crossovers == both
    assert merged(CROSSED, Table(())).crossovers == CROSSED.crossovers
    assert merged(TABLE, new).crossovers == new.crossovers


WRONG_CROSSOVERS: list[tuple[Change, str]] = [
    (lambda data: data.update(crossovers={}), '"crossovers" is an object, expected a list'),
    (lambda data: data["crossovers"].append(3), "crossover 2: it is a number, expected an object"),
    (_crossover(ranks=0), 'crossover 1: "ranks" is 0, expected a whole number from 1 on'),
    (_crossover(ranks=True), 'crossover 1: "ranks" is True, expected a whole number'),
    (_crossover(ranks=2), "crossover 1: there is another one for 2 ranks"),
    (_crossover(memory="host"), "crossover 1: \"memory\" is 'host'; known: device"),
    (_crossover(bytes=-1), 'crossover 1: "bytes" is -1, expected a whole number from 0 on'),
    (_crossover(bytes=1e3), 'crossover 1: "bytes" is 1000.0, expected a whole number'),
    (_crossover(bytes=None), 'crossover 1: "bytes" is None, expected a whole number'),
    (_crossover(way="staged"), 'crossover 1: it has an unknown field "way"; known: ranks, memory'),
    (
        lambda data: data["crossovers"][0].pop("memory"),
        'crossover 0: it has no field "memory"',
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG_CROSSOVERS, ids=[message for _, message in WRONG_CROSSOVERS]
)
def test_what_is_wrong_with_a_crossover_is_named(change: Change, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(_text(change, CROSSED), "t.json")
    assert str(caught.value).startswith("t.json: ")
    assert message in str(caught.value)


def test_crossovers_of_another_mpi_are_refused() -> None:
    with pytest.raises(SettingError, match=r"measured with MPICH 4\.2\.3, this is Open MPI"):
        load(dump(CROSSED), "t.json", "Open MPI v5.0.8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON: "),
        ("[]", "not a tuning table"),
        ("3", "not a tuning table"),
        ("null", "not a tuning table"),
        ("import os", "not JSON"),
        ('{"kind": NaN}', "NaN is no number of JSON"),
        ('{"kind": "a", "kind": "b"}', "the field 'kind' is there twice"),
        ("[" * 100_000, "not a table: nested too deeply"),
        (
            dump(TABLE).replace("0.0001}", "1e999}"),
            'entry 1: "seconds" is inf, expected a number',
        ),
    ],
)
def test_broken_files(text: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(text, "t.json")
    assert str(caught.value).startswith("t.json: ")
    assert message in str(caught.value)


def test_every_truncation_is_refused() -> None:
    text = dump(CROSSED)
    for stop in range(len(text.rstrip())):
        with pytest.raises(SettingError, match=r"^t\.json: "):
            load(text[:stop], "t.json")


def test_find() -> None:
    def found(nbytes: int, ranks: int = 8, memory: str = "host") -> Entry | None:
        return TABLE.find("allreduce", ranks, memory, nbytes)

    assert [found(n) for n in (0, 64)] == [TABLE.entries[0]] * 2
    assert [found(n) for n in (65, 1 << 50)] == [TABLE.entries[1]] * 2
    assert found(5, ranks=7) is found(5, memory="device") is None
    assert TABLE.find("alltoall", 4, "device", 9) is None
    assert TABLE.find("alltoall", 4, "device", 10) == TABLE.entries[2]
    assert TABLE.find("alltoall", 4, "device", 21) is None


def test_merged_keeps_entries_for_other_calls() -> None:
    entry = Entry("allreduce", 8, "host", 0, 10, (Ranked("gather", 0, 1e-5),))
    new = Table((entry,), "MPICH 5", "0.2")
    both = merged(TABLE, new)
    assert both == Table((entry, TABLE.entries[2]), "MPICH 5", "0.2")
    assert merged(None, new) is new
    assert load(dump(both), "t.json") == both


def test_equal_tables_are_equal_settings_also_in_another_process() -> None:
    """The hash of a string differs between processes, so it may not be carried along."""
    other = copy.deepcopy(TABLE)
    assert (other, hash(other)) == (TABLE, hash(TABLE))
    assert hash(CROSSED) != hash(TABLE)
    assert Table(TABLE.entries[:2], TABLE.mpi, TABLE.mpicoll) != TABLE
    program = f"""
import pickle
from mpicoll.selection.table import load
carried = pickle.loads({pickle.dumps(CROSSED)!r})
made = load({dump(CROSSED)!r}, "t.json")
print(carried == made, hash(carried) == hash(made))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "True"]


# -- the cache of measured rates -----------------------------------------------------------

PLACE = Place("x86_64 CPU", "MPICH 4.2.3", 8, False, 1.0)
RATES = Rates(1e-5, 2e-6, 3e-10, 4e-10)


def test_rates_are_kept_by_host_mpi_and_ranks(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rates.json"
    assert lookup(PLACE, file) == DEFAULT
    assert store(PLACE, RATES, file) == file
    assert lookup(PLACE, file) == RATES
    assert lookup(replace(PLACE, ranks=5), file) == RATES  # up to the next power of two
    assert lookup(replace(PLACE, mpi="MPICH 5"), file) == DEFAULT
    assert lookup(replace(PLACE, host="arm64"), file) == DEFAULT
    assert lookup(replace(PLACE, nodes=True), file) == DEFAULT
    assert lookup(replace(PLACE, load=4.0), file) == replace(CROWDED, load=4.0)
    other = replace(RATES, step=5e-5)
    store(replace(PLACE, ranks=64), other, file)
    assert lookup(PLACE, file) == RATES
    assert lookup(replace(PLACE, ranks=33), file) == other
    assert lookup(replace(PLACE, ranks=200), file) == other  # the nearest that there is
    store(PLACE, other, file)
    assert lookup(PLACE, file) == other
    assert list(file.parent.iterdir()) == [file]  # nothing half written is left


CURVES = {
    ("bcast", "chain"): {0: ((8, 1.25), (4096, 0.5)), 4096: ((4096, 0.75),)},
    ("alltoall", "linear"): {0: ((0, 1.0),)},
}


def test_corrections_are_kept_with_the_rates(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    store(PLACE, replace(RATES, corrections=Corrections(CURVES, PLACE.kind)), file)
    found = lookup(PLACE, file)
    assert found.corrections is not None
    assert found.corrections.curves == CURVES
    assert replace(found, corrections=None) == RATES
    carried = pickle.loads(pickle.dumps(found))  # rank 0 reads, and sends what it found
    assert carried.corrections.curves == CURVES
    data = json.loads(file.read_text(encoding="utf-8"))
    data["rates"][0]["corrections"][0]["algorithm"] = "of another version"
    file.write_text(json.dumps(data), encoding="utf-8")
    left = lookup(PLACE, file)
    assert left.step == RATES.step
    assert left.corrections is not None
    assert set(left.corrections.curves) == set(CURVES)
    assert 0 not in left.corrections.curves["bcast", "chain"]
    store(PLACE, RATES, file)
    assert lookup(PLACE, file) == RATES


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": 1},
        {"collective": None},
        {"segment": True},
        {"segment": -1},
        {"segment": 1.0},
        {"at": []},
        {"at": [[8, 1.0], [8, 2.0]]},
        {"at": [[-1, 1.0]]},
        {"at": [[8.0, 1.0]]},
        {"at": [[8, 0.0]]},
        {"at": [[8, 1e9]]},
        {"at": [[8, float("nan")]]},
        {"at": [[8, 1]]},
        {"at": [[8]]},
        {"at": 8},
    ],
)
def test_corrections_that_mean_nothing_count_as_absent(
    change: dict[str, object], tmp_path: Path
) -> None:
    file = store(
        PLACE, replace(RATES, corrections=Corrections(CURVES, PLACE.kind)), tmp_path / "rates.json"
    )
    data = json.loads(file.read_text(encoding="utf-8"))
    data["rates"][0]["corrections"][0].update(change)
    file.write_text(json.dumps(data), encoding="utf-8")
    assert lookup(PLACE, file) == DEFAULT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"kind": "mpicoll rates", "form": 99, "rates": []}',
        '{"kind": "mpicoll rates", "form": 2, "rates": [null, 3, {"key": []}]}',
        '{"kind": "mpicoll rates", "form": 2, "rates": null}',
    ],
)
def test_a_broken_cache_counts_as_absent(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text, encoding="utf-8")
    assert lookup(PLACE, file) == DEFAULT
    store(PLACE, RATES, file)
    assert lookup(PLACE, file) == RATES


@pytest.mark.parametrize("value", [None, "1", 0.0, -1.0, 2.0, True, float("inf")])
def test_rates_that_mean_nothing_count_as_absent(value: object, tmp_path: Path) -> None:
    file = store(PLACE, RATES, tmp_path / "rates.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    data["rates"][0]["rates"]["byte"] = value
    file.write_text(json.dumps(data), encoding="utf-8")
    assert lookup(PLACE, file) == DEFAULT


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_file({"XDG_CACHE_HOME": "/x"}) == Path("/x/mpicoll/rates.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    for environment in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_file(environment) == tmp_path / ".cache/mpicoll/rates.json"
