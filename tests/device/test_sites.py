"""Every synchronisation site is needed: without it a result goes wrong.

A site is a method of the runtime marked with `synchronises`. Nothing else may record, wait
for or ask an event, so that no site escapes the list.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deferred import BACKEND, POLICIES, array, empty, host
from harness import Ranks
from mpi4py import MPI

import mpicoll
from mpicoll import Comm
from mpicoll.algorithms import Algorithm
from mpicoll.runtime import device_run, staging
from mpicoll.runtime.executor import Message, Program, Range, Stage, Work
from mpicoll.runtime.plan import Plan, Recipe
from mpicoll.runtime.record import Record
from mpicoll.schedule.ir import Schedule

ITEMS = 700


def wrong_results(comm: Comm) -> int:
    """Return how many collectives of a few go wrong on this rank."""
    wrong = 0
    x = np.arange(ITEMS, dtype=np.float64) + comm.rank
    total = comm.size * np.arange(ITEMS) + comm.size * (comm.size - 1) / 2
    for algorithm in ("ring", "recursive_doubling"):
        BACKEND.new_stream()
        result = empty((ITEMS,), np.float64)
        comm.Allreduce(array(x), result, algorithm=algorithm)
        BACKEND.new_stream()
        wrong += not np.array_equal(host(result), total)
    data = array(np.full(ITEMS, 7.0) if comm.rank == 0 else np.zeros(ITEMS))
    comm.Ibcast(data, algorithm="chain", segment=512).Wait()
    BACKEND.new_stream()
    wrong += not (host(data) == 7.0).all()
    return wrong


def hosted(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many collectives through the host go wrong on this rank."""
    monkeypatch.setattr(staging, "SMALL_BYTES", 1 << 20)
    return wrong_results(comm)


def _reductions(comm: Comm) -> Any:
    from mpicoll.runtime.datatypes import describe
    from mpicoll.runtime.operators import reducer

    return reducer(MPI.SUM, describe(MPI.DOUBLE))


def overwritten(comm: Comm) -> int:
    """Run a schedule that receives into what the step before has folded.

    Each rank sends x, then 2x into the same place; what the other one folds in between is
    the first of them.
    """
    if comm.size == 1:
        return 0
    pair, peer = comm.rank ^ 1, comm.rank ^ 1
    if pair >= comm.size:
        return 0
    nbytes = 8 * ITEMS

    def message(buffer: int, start: int = 0) -> Message:
        return Message(peer, buffer, start, start + nbytes)

    sends, receives = comm.rank % 2 == 0, comm.rank % 2 == 1
    fold = Work(Range(1, 0, nbytes), (Range(1, 0, nbytes), Range(2, 0, nbytes)))
    first = Stage((message(2),) if receives else (), (message(0),) if sends else (), (), (peer,))
    second = Stage((), (), (fold,), ())
    third = Stage(
        (message(2),) if receives else (), (message(0, nbytes),) if sends else (), (), (peer,)
    )
    stages = (first, second, third) if receives else (first, third)
    program = Program(stages, nbytes, 0, 0, 0, 0)
    x = np.concatenate([np.arange(ITEMS) + 1.0, np.full(ITEMS, 2.0)])
    source, target = array(x), array(np.zeros(ITEMS))
    BACKEND.over(BACKEND.record(BACKEND.stream), True)  # nothing holds the copies up back
    lane = staging.Lane(BACKEND, 0, source)
    kernel = BACKEND.kernel(_reductions(comm))
    assert kernel is not None
    memory: Any = (
        lane.region(source.address, source.nbytes, source),
        lane.region(target.address, target.nbytes, target),
        lane.scratch(nbytes),
    )
    recipe = Recipe(Algorithm("test", "test", lambda _: Schedule()), program)
    reduction = device_run.DeviceReduction(lane, kernel)
    plan = Plan(recipe, 5, *memory[:2], reduction, lane=lane)
    execution = device_run.Staged(
        plan, comm._link.hidden, memory[2], Record("", 0, "test", "blocking")
    )
    for part in device_run.rounds(lane, execution, (), lambda: None):
        part.run()
    lane.close()
    return int(receives and not np.array_equal(host(target), np.arange(ITEMS) + 1.0))


#: By site: the protocol by pointers or not, and what goes wrong without it.
NEEDED: dict[str, tuple[bool, str]] = {
    "Lane.again": (True, "collectives"),
    "Lane.enter": (True, "collectives"),
    "Lane.ready": (True, "collectives"),
    "Lane.left": (False, "collectives"),
    "Lane.loaded": (True, "hosted"),
    "Lane.is_down": (False, "collectives"),
    "Lane.after_arrivals": (False, "collectives"),
    "Lane.step": (False, "overwritten"),
    "Lane.up_after_main": (False, "overwritten"),
    "Pool.reusable": (False, "collectives"),
}


def nothing(*_: Any, **__: Any) -> bool:
    """Stand for a site that is not there."""
    return True


def tried(comm: Comm, pointers: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many results are wrong on any rank, whatever the device does when."""
    wrong = 0
    for policy in POLICIES:
        BACKEND.use(policy, pointers)
        staging._POOLS.clear()
        staging._STREAMS.clear()
        with monkeypatch.context() as patch:
            if how == "hosted":
                wrong += hosted(comm, patch)
            else:
                wrong += overwritten(comm) if how == "overwritten" else wrong_results(comm)
    return wrong


def test_all_sites_are_listed() -> None:
    assert set(NEEDED) == set(staging.SITES)


@pytest.mark.parametrize("how", ["collectives", "hosted", "overwritten"])
@pytest.mark.parametrize("pointers", [True, False])
def test_with_all_sites_results_are_right(
    how: str, pointers: bool, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(world, pointers, how, monkeypatch) == 0


@pytest.mark.parametrize("site", NEEDED)
def test_without_a_site_a_result_is_wrong(
    site: str, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers, how = NEEDED[site]
    owner, name = site.split(".")
    monkeypatch.setattr(getattr(staging, owner), name, nothing)
    wrong = sum(ranks.comm.allgather(tried(world, pointers, how, monkeypatch)))
    monkeypatch.undo()
    if world.size > 1 or site in ("Lane.again", "Lane.enter", "Lane.loaded", "Lane.left"):
        assert wrong


#: What orders a device, as the backend has it.
_PRIMITIVES = ("record", "wait", "over")

#: Methods that serve sites, or take an event for one to wait for.
_HELPERS = {"Lane._settled", "Lane.down", "Lane.up"}


def askers(source: str) -> set[str]:
    """Return the functions that name a primitive of the backend, with their classes."""
    found = set()

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = f"{name}.{node.name}".removeprefix(".")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _PRIMITIVES
            and "backend" in ast.unparse(node.value)
        ):
            found.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(source), "")
    return found


def test_no_site_escapes_the_list() -> None:
    package, found = Path(mpicoll.__file__).parent, set()
    for path in sorted(package.rglob("*.py")):
        if path != package / "runtime" / "device.py":  # where the backend itself is
            found |= askers(path.read_text(encoding="utf-8"))
    assert found <= set(staging.SITES) | _HELPERS
    assert {"Lane.again", "Lane.enter", "Lane.up_after_main", "Pool.reusable"} <= found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("class Lane:\n def new(self):\n  self.backend.wait(self.main, event)", "Lane.new"),
        ("def rounds(lane):\n lane.backend.over(event, True)", "rounds"),
        ("class Lane:\n def new(self):\n  def f():\n   g(self.backend.record)", "Lane.new.f"),
        ("backend.wait(stream, event)", ""),
    ],
)
def test_a_new_site_is_found(source: str, name: str) -> None:
    assert askers(source) == {name}
    assert not {name} <= set(staging.SITES) | _HELPERS


@pytest.mark.parametrize("how", ["collectives", "hosted", "overwritten"])
def test_only_sites_order_the_device(
    how: str, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever name they have the backend."""
    allowed = {method.__code__ for method in staging.SITES.values()}
    for name in _HELPERS:
        owner, method = name.split(".")
        allowed.add(getattr(getattr(staging, owner), method).__code__)
    package, others = str(Path(mpicoll.__file__).parent), set()

    def watched(primitive: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(package) and code not in allowed:
                others.add(f"{code.co_filename}: {code.co_name}")
            return primitive(*args)

        return asked

    for name in _PRIMITIVES:
        monkeypatch.setattr(BACKEND, name, watched(getattr(BACKEND, name)))
    for pointers in (True, False):
        tried(world, pointers, how, monkeypatch)
    assert not others
