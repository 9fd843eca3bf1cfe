"""The choice of an algorithm: named, set, or automatic; what it may look at."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from pathlib import Path

import pytest

from mpicoll.algorithms import find, names
from mpicoll.errors import AlgorithmError, SettingError
from mpicoll.schedule.contracts import COLLECTIVES, REDUCTIONS
from mpicoll.selection.choose import OrderWish, Wanted, choose, default, default_segment, unfit
from mpicoll.selection.model import CROWDED, SEGMENTS, Rates
from mpicoll.selection.settings import Found, Settings, gather, parse, read
from mpicoll.selection.table import Entry, Ranked, Table, dump

SIZES = (1, 2, 3, 5, 8, 33, 128, 1000)
BYTES = (0, 1, 100, 10_000, 1_000_000, 1 << 32)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_default_exists_and_fits(collective: str) -> None:
    kinds = [Wanted(collective, size, nbytes) for size in SIZES for nbytes in (*BYTES, None)]
    if collective in REDUCTIONS:
        orders: tuple[OrderWish, ...] = (None,) if "scan" in collective else (None, "rank")
        kinds = [
            Wanted(collective, size, nbytes, commutative, wide, True, order)
            for size in SIZES
            for nbytes in BYTES
            for commutative in (True, False)
            for wide in (True, False)
            for order in orders
        ]
    if collective == "alltoall":
        kinds += [Wanted(collective, size, None, uniform=False) for size in SIZES]
    for wanted in kinds:
        algorithm = find(collective, default(wanted))
        assert unfit(algorithm, wanted) == "", wanted
        assert choose(wanted, Settings()).algorithm is algorithm


def test_wide_sums_round_once() -> None:
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        for nbytes in BYTES:
            wanted = Wanted(collective, 8, nbytes, wide=True)
            assert find(collective, default(wanted)).order == "sequential"


def test_choice_looks_at_nothing_that_ranks_may_differ_in() -> None:
    """Law 1: whoever adds a field here must say why all ranks have the same value."""
    assert Wanted._fields == (
        *("collective", "size", "nbytes", "commutative", "wide", "uniform", "order"),
    )


def test_named_algorithm_wins_over_settings_and_default() -> None:
    settings = Settings((("bcast", "chain"),))
    assert choose(Wanted("bcast", 8, 10), settings).algorithm.name == "chain"
    assert choose(Wanted("bcast", 8, 10), settings, "binomial").algorithm.name == "binomial"
    other = Wanted("reduce", 8, 10)
    assert choose(other, settings).algorithm.name == default(other)


def test_setting_that_can_not_serve_the_call_gives_the_default() -> None:
    settings = Settings((("allreduce", "ring"),))
    wanted = Wanted("allreduce", 8, 10, commutative=False)
    assert choose(wanted, settings).algorithm.name == default(wanted)


@pytest.mark.parametrize(
    ("wanted", "algorithm", "message"),
    [
        (Wanted("bcast", 4), "rings", "bcast has no algorithm 'rings'; known: binomial"),
        (Wanted("allreduce", 4, 8, commutative=False), "ring", "does not commute; fit: "),
        (Wanted("allreduce", 4, 8, order="rank"), "ring", "left to right .* direct, gather"),
        (Wanted("alltoall", 4, uniform=False), "bruck", "wants equal counts"),
    ],
)
def test_named_algorithm_that_does_not_fit(wanted: Wanted, algorithm: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        choose(wanted, Settings(), algorithm)


def test_radix() -> None:
    wanted = Wanted("alltoall", 8, 64)
    assert choose(wanted, Settings(), "bruck:4").radix == 4
    assert choose(wanted, Settings((("alltoall", "bruck:3"),))).radix == 3
    assert choose(wanted, Settings(), "bruck").radix == 2
    for name, message in (
        ("bruck:1", "radix '1'"),
        ("bruck:x", "radix 'x'"),
        ("linear:4", "no radix"),
    ):
        with pytest.raises(AlgorithmError, match=message):
            choose(wanted, Settings(), name)


def test_order_that_no_default_keeps() -> None:
    with pytest.raises(AlgorithmError, match="order='left'"):
        choose(Wanted("allreduce", 4, 8, order="left"), Settings())  # type: ignore[arg-type]


def test_segment_is_heeded_by_segmented_algorithms_only() -> None:
    assert choose(Wanted("bcast", 4, 8), Settings(), "chain", 100).segment_bytes == 100
    assert choose(Wanted("bcast", 4, 8), Settings(), "binomial", 100).segment_bytes == 0
    with pytest.raises(AlgorithmError, match="segment=-1"):
        choose(Wanted("bcast", 4, 8), Settings(), "chain", -1)


def test_settings() -> None:
    environment = {"MPICOLL_ALLREDUCE": "ring", "HOME": "x", "MPICOLL_VENV": "y"}
    assert gather(environment) == {"MPICOLL_ALLREDUCE": "ring"}
    assert parse(gather(environment)).algorithm("allreduce") == "ring"
    assert parse({}).algorithm("allreduce") is None
    assert parse({"MPICOLL_ALLREDUCE": "auto", "MPICOLL_BCAST": ""}) == Settings()


def test_variables_of_others_are_not_read() -> None:
    class Changing(UserDict[str, str]):
        """As `os.environ` while another thread sets and removes PYTEST_CURRENT_TEST."""

        def __getitem__(self, name: str) -> str:
            if name == "PYTEST_CURRENT_TEST":
                raise KeyError(name)
            return super().__getitem__(name)

    environment = Changing({"PYTEST_CURRENT_TEST": "", "MPICOLL_ALLREDUCE": "ring"})
    with pytest.raises(KeyError):
        dict(environment.items())
    assert gather(environment) == {"MPICOLL_ALLREDUCE": "ring"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MPICOLL_ALLREDUCE": "rings"}, "MPICOLL_ALLREDUCE=rings: .* known: circulant"),
        ({"MPICOLL_ALREDUCE": "ring"}, "unknown variable MPICOLL_ALREDUCE; known: "),
    ],
)
def test_wrong_settings(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse(variables)


# -- the table and the model -------------------------------------------------------------

RANKED = (
    Ranked("ring", 65536, 1e-3),
    Ranked("recursive_doubling", 0, 2e-3),
    Ranked("direct", 0, 3e-3),
)
TABLE = Table(
    (
        Entry("allreduce", 8, "host", 0, 99, RANKED[1:]),
        Entry("allreduce", 8, "host", 100, 1 << 20, RANKED),
        Entry("alltoall", 8, "host", 0, 1000, (Ranked("bruck:4", 0, 1e-3),)),
        Entry("alltoall", 8, "device", 0, 1000, (Ranked("pairwise", 0, 1e-3),)),
    )
)
TUNED = Settings(tuning=TABLE)


def test_table_decides_where_it_has_an_entry() -> None:
    choice = choose(Wanted("allreduce", 8, 5000), TUNED)
    assert (choice.algorithm.name, choice.segment_bytes) == ("ring", 65536)
    for nbytes, name in ((0, "recursive_doubling"), (99, "recursive_doubling"), (100, "ring")):
        assert choose(Wanted("allreduce", 8, nbytes), TUNED).algorithm.name == name
    assert choose(Wanted("alltoall", 8, 64), TUNED).radix == 4


def test_table_is_for_the_memory_hint() -> None:
    device = replace(TUNED, memory="device")
    assert choose(Wanted("alltoall", 8, 64), device).algorithm.name == "pairwise"
    wanted = Wanted("allreduce", 8, 5000)
    assert choose(wanted, device).algorithm.name == default(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("allreduce", 7, 5000),  # another number of ranks
        Wanted("allreduce", 8, (1 << 20) + 1),  # a larger size
        Wanted("bcast", 8, 64),  # another collective
    ],
)
def test_model_fills_the_gaps_of_the_table(wanted: Wanted) -> None:
    assert choose(wanted, TUNED) == choose(wanted, Settings())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"commutative": False}, "recursive_doubling"),
        ({"wide": True}, "direct"),
        ({"order": "rank"}, "direct"),
    ],
)
def test_table_gives_a_restricted_call_the_first_that_can_serve_it(
    change: dict[str, object], name: str
) -> None:
    wanted = Wanted("allreduce", 8, 5000)._replace(**change)  # type: ignore[arg-type]
    assert choose(wanted, TUNED).algorithm.name == name


def test_table_without_one_that_can_serve_the_call_leaves_it_to_the_model() -> None:
    table = Table((Entry("allreduce", 8, "host", 0, 10**6, RANKED[:1]),))
    wanted = Wanted("allreduce", 8, 5000, order="rank")
    assert choose(wanted, Settings(tuning=table)) == choose(wanted, Settings())


@pytest.mark.parametrize("collective", ["alltoall", "gather", "scatter"])
def test_sizes_that_ranks_may_differ_in_never_decide(collective: str) -> None:
    """Law 1: with counts of its own on each rank the choice looks at neither table nor size."""
    name = "pairwise" if collective == "alltoall" else "binomial"
    table = Table((Entry(collective, 8, "host", 0, 1 << 40, (Ranked(name, 0, 1e-9),)),))
    wanted = Wanted(collective, 8, None)
    assert choose(wanted, Settings(tuning=table)).algorithm.name == "linear"
    assert choose(wanted._replace(nbytes=8), Settings(tuning=table)).algorithm.name == name


def test_names_come_before_the_table() -> None:
    named = replace(TUNED, algorithms=(("allreduce", "circulant"),))
    assert choose(Wanted("allreduce", 8, 5000), named).algorithm.name == "circulant"
    assert choose(Wanted("allreduce", 8, 5000), TUNED, "gather").algorithm.name == "gather"
    assert choose(Wanted("allreduce", 8, 5000), TUNED, segment_bytes=7).segment_bytes == 7


def test_rates_decide() -> None:
    latency = Rates(step=1, message=1e-9, byte=1e-15, local=1e-15)
    bandwidth = Rates(step=1e-12, message=1e-12, byte=1, local=1e-9)
    wanted = Wanted("bcast", 16, 1 << 20)
    assert default(wanted, latency) in ("binomial", "circulant")
    assert default(wanted, bandwidth) in ("chain", "circulant", "scatter_allgather")
    assert choose(wanted, Settings(rates=latency)).algorithm.name == default(wanted, latency)
    chain = find("bcast", "chain")
    assert default_segment(chain, wanted, bandwidth) in SEGMENTS


@pytest.mark.parametrize("rates", [Rates(), CROWDED])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_two_phase_bruck_is_never_automatic_where_counts_are_equal(
    collective: str, rates: Rates
) -> None:
    for size in SIZES:
        for nbytes in BYTES:
            assert find(collective, default(Wanted(collective, size, nbytes), rates)).knows != (
                "transit"
            )


def test_choosing_again_does_not_walk_over_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are hashed at every call, so the hash of a table is kept."""
    settings = Settings(tuning=TABLE)
    walked: list[Entry] = []
    monkeypatch.setattr(Entry, "__hash__", walked.append)
    assert hash(settings) == hash(replace(TUNED))
    assert not walked


def test_read_and_parse_a_table(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(dump(Table(TABLE.entries, "MPICH 4.2", "0.1")), encoding="utf-8")
    variables, found = read({"MPICOLL_TUNING": str(file), "HOME": "x"})
    assert variables == {"MPICOLL_TUNING": str(file)}
    file.unlink()  # only who reads needs the file
    tuning = parse(variables, found).tuning
    assert tuning is not None
    assert tuning.entries == TABLE.entries
    assert parse({"MPICOLL_TUNING": "", "MPICOLL_BCAST": "auto"}) == Settings()


def test_rates_go_into_the_settings() -> None:
    rates = Rates(step=1.0)
    assert parse({}, Found(rates=rates)).rates == rates
    assert hash(parse({}, Found(rates=rates))) == hash(Settings(rates=rates))


def test_a_table_that_can_not_be_read(tmp_path: Path) -> None:
    variables, found = read({"MPICOLL_TUNING": str(tmp_path / "none.json")})
    with pytest.raises(SettingError, match=r"MPICOLL_TUNING=.*none\.json: .*No such file"):
        parse(variables, found)
    (tmp_path / "latin").write_bytes(b'{"kind": "\xff"}')
    with pytest.raises(SettingError, match=r"can not be read: .*utf-8"):
        parse({"MPICOLL_TUNING": str(tmp_path / "latin")})
    with pytest.raises(SettingError, match=r"MPICOLL_TUNING=.*: can not be read: Is a directory"):
        parse({"MPICOLL_TUNING": str(tmp_path)})


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm(collective: str) -> None:
    assert names(collective)
