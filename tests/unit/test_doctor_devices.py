"""What `mpicoll doctor` says of devices, for ranks that are made up, without a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cupy import MemoryAsyncPool, bus, fake_cupy, malloc_async

from mpicoll.cli import device_words as words
from mpicoll.cli import devices
from mpicoll.cli.devices import Device, Place, Seen, as_json, nodes_of, pointers

support = pytest.importorskip("mpicoll.runtime.device_support")
GPUS = [Device("Fake GPU", bus(number), f"GPU-{number}", 80 << 30) for number in range(8)]


def place(
    rank: int, *shown: int, node: str = "n0", local: int | None = None, **changes: Any
) -> Place:
    """Return a rank that sees devices of its node by number, and takes one by the rule."""
    local = rank if local is None else local
    seen = Seen(tuple([GPUS[number] for number in shown]), 0 if shown else None, why="none here")
    made = Place(
        rank=rank,
        node=node,
        local=local,
        told=True,
        seen=seen,
        number=support.device_for(local, len(shown)),
        variables={},
        obstacles=(),
        signs=(),
        kept=None,
    )
    return made._replace(**changes)


def bound(rank: int, value: str, *shown: int, **changes: Any) -> Place:
    """Return a rank whose launcher binds it by CUDA_VISIBLE_DEVICES."""
    variables = {"CUDA_VISIBLE_DEVICES": value}
    obstacles = tuple(support.obstacles(variables, ranks=2))
    return place(rank, *shown, variables=variables, obstacles=obstacles, **changes)


# -- one rank -----------------------------------------------------------------------------


def test_devices_as_cupy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(3, 1, current=1))
    seen = devices.look()
    assert [device.bus for device in seen.devices] == [bus(3), bus(1)]
    assert seen.devices[0].uuid == "GPU-a3a3a3a3-a3a3-a3a3-a3a3-a3a3a3a3a3a3"
    assert {(device.name, device.memory) for device in seen.devices} == {("Fake GPU", 80 << 30)}
    assert (seen.current, seen.why, seen.pooled) == (1, "", False)


@pytest.mark.parametrize("allocator", [malloc_async, MemoryAsyncPool().malloc])
def test_an_asynchronous_pool_is_seen(monkeypatch: pytest.MonkeyPatch, allocator: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(0, allocator=allocator))
    assert devices.look().pooled


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert devices.look() == Seen(why="CuPy is not installed")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(error=text))
    assert devices.look() == Seen(why=text)


def test_a_driver_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    assert devices.look() == Seen(why="the driver shows none")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "try:\n    raise OSError('libx.so: not found')\nexcept OSError as cause:\n"
            "    raise ImportError('\\n====\\nFailed to import CuPy.\\n====') from cause",
            "OSError: libx.so: not found",
        ),
        ("raise ImportError('\\n====\\nFailed.\\n====')", "ImportError: Failed."),
        ("import numpy; numpy.no_such_thing", "AttributeError: module 'numpy' has no attribute"),
        ("raise AssertionError", "AssertionError: "),
        ("raise RuntimeError('cudaErrorX: y')", "cudaErrorX: y"),
        ("", "AttributeError: module 'cupy' has no attribute 'cuda'"),
    ],
)
def test_a_broken_cupy_does_not_end_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, why: str
) -> None:
    (tmp_path / "cupy.py").write_text(program, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = devices.look()
    sys.modules.pop("cupy", None)
    assert not seen.devices
    assert seen.why.removeprefix("CuPy can not be loaded: ").startswith(why)
    assert seen.why.startswith("CuPy can not be loaded: ") == bool(program)


# -- the map ------------------------------------------------------------------------------


def test_no_device_is_one_line() -> None:
    seen = Seen(why="CuPy is not installed")
    nodes = nodes_of([place(rank, node=f"n{rank // 2}", seen=seen) for rank in range(4)])
    assert words.lines(nodes) == ["none seen (CuPy is not installed)"]
    reasons = nodes_of([place(0, seen=seen), place(1), place(2)])
    (line,) = words.lines(reasons)
    assert line == "none seen (CuPy is not installed (local rank 0), none here (local ranks 1, 2))"


def test_who_uses_what() -> None:
    assert words.lines(nodes_of([place(rank, 0, 1, 2) for rank in range(5)])) == [
        "n0: 3 devices, seen alike by all ranks",
        "  0: Fake GPU, 0000:00:00.0, 80 GiB: for local ranks 0, 3",
        "  1: Fake GPU, 0000:01:00.0, 80 GiB: for local ranks 1, 4",
        "  2: Fake GPU, 0000:02:00.0, 80 GiB: for local rank 2",
        "  current before mpicoll.bind_device(): device 0",
        "mpicoll.bind_device(): local rank r takes device r modulo the devices that it sees",
    ]


def test_ranks_that_see_different_devices() -> None:
    nodes = nodes_of([bound(0, "0", 0), bound(1, "1,2", 1, 2), place(2)])
    assert words.lines(nodes)[:-1] == [
        "n0: 3 devices, ranks see different ones",
        "  Fake GPU, 0000:00:00.0, 80 GiB: for local rank 0; seen by local rank 0",
        "  Fake GPU, 0000:01:00.0, 80 GiB: idle; seen by local rank 1",
        "  Fake GPU, 0000:02:00.0, 80 GiB: for local rank 1; seen by local rank 1",
        "  local rank 2: none seen (none here)",
        "  current before mpicoll.bind_device(): device 0",
        "  CUDA_VISIBLE_DEVICES: 0 (local rank 0), 1,2 (local rank 1), not set (local rank 2)",
    ]


def test_a_variable_that_hides_all_devices_is_shown() -> None:
    nodes = nodes_of([bound(0, ""), bound(1, "")])
    assert words.lines(nodes) == ["none seen (none here)", "  CUDA_VISIBLE_DEVICES="]


def test_nodes_of_a_kind_are_shown_once() -> None:
    places = [place(rank, 0, node=f"n{rank}", local=0) for rank in range(3)]
    places.append(place(3, 0, 1, node="n3", local=0))
    found = words.lines(nodes_of(places))
    assert found[0] == "n0 and 2 more like it: 1 device"
    assert [line for line in found if "n3" in line] == ["n3: 2 devices"]


def test_kinds_of_nodes_beyond_the_first_are_counted() -> None:
    places = [
        place(rank, 0, node=f"n{rank}", variables={"CUDA_VISIBLE_DEVICES": str(rank)})
        for rank in range(words.NODES + 2)
    ]
    assert "and 2 more nodes" in words.lines(nodes_of(places))


def test_many_values_are_cut_short() -> None:
    found = words.lines(nodes_of([bound(rank, str(rank), rank % 8) for rank in range(12)]))
    (line,) = [line for line in found if "CUDA_VISIBLE_DEVICES" in line]
    assert line.endswith("7 (local rank 7), and 4 more")
    strided = words.lines(nodes_of([place(rank, 0, 1) for rank in range(40)]))
    assert strided[1].endswith("for local ranks 0, 2, 4, 6, 8, 10, 12, 14, … (20 of them)")


def test_map_as_json() -> None:
    (node,) = as_json(nodes_of([bound(0, "0", 0), bound(1, "1", 1), place(2)]))
    assert [device["bus"] for device in node["devices"]] == [bus(0), bus(1)]
    ranks = node["ranks"]
    assert [one["uses"] for one in ranks] == [0, 1, None]
    assert [one["sees"] for one in ranks] == [[0], [1], []]
    assert [one["current"] for one in ranks] == [0, 1, None]
    assert [one["variables"].get("CUDA_VISIBLE_DEVICES") for one in ranks] == ["0", "1", None]
    assert ranks[2]["why_none"] == "none here"


# -- device pointers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "signs", "kept", "line"),
    [
        ("1", (), False, "yes: set by MPICOLL_CUDA_AWARE=1"),
        ("0", ("x",), True, "no: set by MPICOLL_CUDA_AWARE=0; what speaks for it: x"),
        ("", (), True, "no: nothing says that this MPI takes device pointers"),
        ("auto", (), None, "no: nothing says that this MPI takes device pointers"),
        ("", ("x",), True, "yes: a trial on this host has passed; what speaks for it: x"),
        ("", ("x",), False, "no: a trial on this host has failed; what speaks for it: x"),
        ("", ("x", "y"), None, "not tried yet: the first device call tries; "),
    ],
)
def test_pointers(setting: str, signs: tuple[str, ...], kept: bool | None, line: str) -> None:
    places = [place(rank, signs=signs, kept=kept) for rank in range(2)]
    (found,) = pointers(setting, places)
    assert found.ranks == (0, 1)
    (text,) = words.pointer_lines([found])
    assert text.startswith(line)


def test_hosts_of_which_different_things_are_known() -> None:
    kept = {"n0": True, "n1": None}
    places = [place(r, node=f"n{r // 2}", signs=("x",), kept=kept[f"n{r // 2}"]) for r in range(4)]
    found = words.pointer_lines(pointers("", places))
    assert [line.split(":")[:2] for line in found] == [
        ["ranks 0, 1", " yes"],
        ["ranks 2, 3", " not tried yet"],
    ]


# -- what is wrong ------------------------------------------------------------------------


def test_nothing_is_wrong_where_all_see_all() -> None:
    nodes = nodes_of([place(rank, 0, 1, 2, 3) for rank in range(4)])
    assert words.warnings(nodes) == words.notes(nodes) == []


def test_more_ranks_than_devices_or_fewer_is_no_fault() -> None:
    for ranks in (1, 2, 8):
        assert words.warnings(nodes_of([place(rank, 0, 1, 2, 3) for rank in range(ranks)])) == []


def test_a_variable_per_rank_is_told_once_with_all_ranks() -> None:
    nodes = nodes_of([bound(rank, str(rank), rank) for rank in range(4)])
    (text,) = words.warnings(nodes)
    assert text.startswith(
        "CUDA_VISIBLE_DEVICES=0 (rank 0), 1 (rank 1), 2 (rank 2), 3 (rank 3) shows one"
    )
    assert "can not map each other's memory" in text


def test_a_binding_that_hides_nothing_is_no_fault() -> None:
    assert words.warnings(nodes_of([bound(rank, "0", 0) for rank in range(2)])) == []


def test_a_binding_is_told_where_no_device_is_seen() -> None:
    (text,) = words.warnings(nodes_of([bound(rank, "0") for rank in range(2)]))
    assert text.startswith("CUDA_VISIBLE_DEVICES=0 (ranks 0, 1) shows one device only")


def test_pools_are_told_wherever_devices_are() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = tuple(support.obstacles(variables))
    nodes = nodes_of([place(0, 0, 1), place(1, 0, 1, obstacles=found)])
    (text,) = words.warnings(nodes)
    assert text.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (rank 1) makes pools")


def test_binding_without_a_variable() -> None:
    (text,) = words.warnings(nodes_of([place(0, 0), place(1, 1)]))
    assert "ranks of one node see different devices (on n0)" in text
    # On different nodes they may.
    assert words.warnings(nodes_of([place(0, 0), place(1, 1, node="n1", local=0)])) == []


def test_ranks_with_one_local_rank_share_a_device() -> None:
    nodes = nodes_of([place(rank, 0, 1, local=0) for rank in range(3)])
    (text,) = words.warnings(nodes)
    assert text.startswith("ranks 0-2 share device 0000:00:00.0 of n0, where 1 device is idle: ")
    assert "mpicoll.bind_device(comm)" in text


def test_ranks_that_see_few_share_a_device() -> None:
    shared, uneven = words.warnings(nodes_of([place(0, 0, 1), place(1, 0)]))
    assert shared.endswith("1 device is idle: show all devices to all ranks")
    assert uneven.startswith("ranks see different numbers of devices: 1 (rank 1), 2 (rank 0)")


def test_crowded_devices_of_many_nodes_are_one_line() -> None:
    nodes = nodes_of([place(r, 0, 1, node=f"n{r // 2}", local=0) for r in range(8)])
    (text,) = words.warnings(nodes)
    assert "(and so on, 4 devices)" in text


def test_nodes_with_different_numbers_of_devices() -> None:
    (text,) = words.warnings(nodes_of([place(0, 0, 1), place(1, 0, node="n1", local=0)]))
    assert text.startswith("ranks see different numbers of devices: 1 (rank 1), 2 (rank 0)")


def test_a_pool_of_cupy_is_told() -> None:
    pooled = Seen((GPUS[0],), 0, pooled=True)
    (text,) = words.warnings(nodes_of([place(0, 0), place(1, seen=pooled, number=0)]))
    assert text.startswith("CuPy of rank 1 takes memory from an asynchronous pool")


def test_a_setting_that_a_trial_refutes() -> None:
    nodes = nodes_of([place(0, 0, kept=False, signs=("x",))])
    (text,) = words.warnings(nodes, "1")
    assert text.startswith("MPICOLL_CUDA_AWARE=1, but a trial on the host of rank 0 has failed")
    assert words.warnings(nodes, "0") == words.warnings(nodes) == []
    assert words.warnings(nodes_of([place(0, 0, kept=None, signs=("x",))]), "1") == []


def test_a_setting_that_nothing_confirms() -> None:
    nodes = nodes_of([place(0, 0)])
    (text,) = words.notes(nodes, "1")
    assert text.startswith("MPICOLL_CUDA_AWARE=1, and nothing else says so on rank 0")
    assert words.notes(nodes_of([place(0, 0, signs=("x",))]), "1") == []
    assert words.notes(nodes_of([place(0)]), "1") == []


def test_no_launcher_tells_the_local_rank() -> None:
    (text,) = words.notes(nodes_of([place(0, 0, told=False), place(1, 0)]))
    assert "local rank of rank 0" in text
    assert "mpicoll.bind_device(comm)" in text
    assert words.notes(nodes_of([place(0, told=False)])) == []


def test_lists_that_are_turned_and_a_rule_that_turns_them_again() -> None:
    (node,) = nodes_of([place(0, 0, 1), place(1, 1, 0)])
    assert (node.alike, node.shared) == (False, True)
    (text,) = words.warnings([node])
    assert "ranks 0, 1 share device 0000:00:00.0" in text
    assert "they see the devices in different orders" in text
