"""Wrong calls: mpi4py's class of exception, a message that helps, and no harm done."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kinds import PREDEFINED, kinds
from mpi4py import MPI
from wrong_calls import POISON, WRONG, Wrong, frozen, ones

import mpicoll
from mpicoll import AlgorithmError, Comm, SettingError
from mpicoll.algorithms import every, names
from mpicoll.schedule.contracts import COLLECTIVES, REDUCTIONS


def caught(call: Callable[..., Any], *args: Any, **keywords: Any) -> Exception | None:
    """Return what a call raises."""
    try:
        call(*args, **keywords)
    except Exception as error:
        return error
    return None


def works(comm: Any) -> None:
    """Use a communicator on all ranks, with a message between any two."""
    received = np.full(comm.size, -1)
    comm.Alltoall(100 * comm.rank + np.arange(comm.size), received, algorithm="pairwise")
    assert received.tolist() == [100 * peer + comm.rank for peer in range(comm.size)]


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_call(wrong: Wrong, world: Comm) -> None:
    target = np.full(64, POISON)
    before = world.stats.total.bytes_sent
    error = caught(wrong.call, world, target)
    assert isinstance(error, wrong.error), repr(error)
    assert re.search(wrong.words, str(error)), repr(error)
    assert f"on rank {world.rank}" in str(error)
    if wrong.code:
        assert isinstance(error, MPI.Exception)
        assert error.Get_error_class() == wrong.code
    assert (target == POISON).all()
    assert world.stats.total.bytes_sent == before
    works(world)
    if wrong.native:
        native = caught(wrong.call, MPI.Intracomm(world), target)
        assert native is not None, "mpi4py takes it"
        assert isinstance(error, type(native)), f"mpi4py raises {native!r}"
        if isinstance(native, MPI.Exception):
            assert isinstance(error, MPI.Exception)
            assert error.Get_error_class() == native.Get_error_class()


def test_operators_are_allowed_as_the_mpi_does(world: Comm) -> None:
    """An operator that a type does not allow is the same error as natively, for all pairs."""
    differ = []
    for kind in kinds().values():
        if kind.datatype is None:
            continue
        for name in PREDEFINED:
            classes = []
            for comm in (world, MPI.Intracomm(world)):
                one, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
                sides = [one, 1, kind.datatype], [other, 1, kind.datatype]
                error = caught(comm.Allreduce, *sides, getattr(MPI, name))
                assert error is None or isinstance(error, MPI.Exception), repr(error)
                classes.append(0 if error is None else error.Get_error_class())
            if len(set(classes)) > 1:
                differ.append((kind.name, name, classes))
    assert not differ


@pytest.mark.parametrize("collective", sorted(REDUCTIONS))
def test_algorithms_that_reorder_refuse(collective: str, world: Comm) -> None:
    def keep(one: Any, other: Any, datatype: MPI.Datatype) -> None:
        other[:] = one

    first = MPI.Op.Create(keep, commute=False)
    method = getattr(world, collective.capitalize())
    many = world.size if collective == "reduce_scatter" else 1
    for algorithm in every():
        if algorithm.collective != collective:
            continue
        result = np.full(1, POISON)
        sides: list[Any] = [ones(many), result]
        if collective == "reduce_scatter":
            sides.append([1] * world.size)
        error = caught(method, *sides, op=first, algorithm=algorithm.name)
        if algorithm.order == "any":
            assert isinstance(error, AlgorithmError)
            assert "does not commute; fit:" in str(error)
        else:
            assert error is None, repr(error)
        if collective in ("scan", "exscan"):
            continue
        error = caught(method, *sides, algorithm=algorithm.name, order="rank")
        if algorithm.order != "sequential":
            assert isinstance(error, AlgorithmError)
            assert "does not sum from left to right over ranks; those that do:" in str(error)
        else:
            assert error is None, repr(error)
    first.Free()
    works(world)


def test_algorithm_for_equal_counts_refuses_others(world: Comm) -> None:
    counts = [1] * world.size
    sides = [[ones(world.size), counts, MPI.DOUBLE] for _ in range(2)]
    error = caught(world.Alltoallv, *sides, algorithm="bruck")
    assert isinstance(error, AlgorithmError)
    assert "wants equal counts" in str(error)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unknown_algorithm_lists_the_known(collective: str, world: Comm) -> None:
    method = {"reduce_scatter": "Reduce_scatter_block"}.get(collective, collective.capitalize())
    many = world.size
    sides: dict[str, tuple[int, ...]] = {
        "bcast": (1,),
        "barrier": (),
        "gather": (1, many),
        "allgather": (1, many),
        "scatter": (many, 1),
        "reduce_scatter": (many, 1),
        "alltoall": (many, many),
    }
    buffers = [ones(count) for count in sides.get(collective, (1, 1))]
    error = caught(getattr(world, method), *buffers, algorithm="nothing")
    assert isinstance(error, AlgorithmError)
    for name in names(collective):
        assert name in str(error)
    works(world)


# -- one rank alone is wrong ------------------------------------------------------------


@pytest.fixture
def twin(world: Comm) -> Iterator[Comm]:
    """A communicator in which messages may be left behind."""
    comm = world.Dup()
    yield comm
    link = comm._link
    MPI.Intracomm(world).Barrier()
    while link.hidden.Iprobe():
        status = MPI.Status()
        link.hidden.Probe(status=status)
        link.hidden.Recv([bytearray(status.count), MPI.BYTE], status.source, status.tag)
    comm.Free()


@pytest.mark.parametrize("collective", ["Bcast", "Scatter"])
def test_error_on_one_rank_does_not_mispair_the_next_call(twin: Comm, collective: str) -> None:
    """The last rank refuses its buffer; the root has sent to it. The next call gets its own."""
    last = twin.size - 1
    for value in (1.0, 2.0, 3.0):
        refuses = value == 1.0 and twin.rank == last and last > 0
        target = frozen(4) if refuses else np.full(4, POISON)
        source = np.full(4 * twin.size, value)
        if collective == "Bcast":
            if twin.rank == 0:
                target[:] = value
            error = caught(twin.Bcast, target, algorithm="binomial")
        else:
            error = caught(twin.Scatter, source, target, algorithm="linear")
        assert isinstance(error, BufferError) if refuses else error is None, repr(error)
        assert refuses or (target == value).all()
    works(twin)


def test_root_that_refuses_does_not_mispair_the_next_call(twin: Comm) -> None:
    """The others have sent to the root, which has not received."""
    if twin.rank == 0:
        error = caught(twin.Gather, ones(1), frozen(twin.size))
        assert isinstance(error, BufferError)
    else:
        twin.Gather(ones(1), None, algorithm="linear")
    works(twin)
    # What is left is thrown away before its tag comes round.
    twin._link.tags.divide(8)
    twin._link.tags._unfinished.add(1)
    for _ in range(8):
        works(twin)
    assert not twin._link.hidden.Iprobe()


@pytest.mark.parametrize("expected", [5, 3], ids=["shorter", "longer"])
def test_message_of_another_length_is_an_error(twin: Comm, expected: int) -> None:
    """The last rank expects another count than the root sends."""
    alone = twin.rank == twin.size - 1 > 0
    target = np.full(expected if alone else 4, POISON)
    source = np.ones(4 * twin.size)
    error = caught(twin.Scatter, source, target, algorithm="linear")
    if not alone:
        assert error is None, repr(error)
    elif expected == 5:
        assert isinstance(error, mpicoll.ShortMessageError)
        assert "32 bytes from rank 0, expected 40" in str(error)
        assert "MPICOLL_CHECK=1 shows who passed what" in str(error)
        assert f"Scatter on rank {twin.rank}" in str(error)
    else:
        assert isinstance(error, MPI.Exception), repr(error)
        assert error.Get_error_class() == MPI.ERR_TRUNCATE
    works(twin)


# -- settings and handles ---------------------------------------------------------------


def test_environment_of_rank_0_counts(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose environments differ choose alike; what others have is not even read."""
    value = "reduce_bcast" if world.rank == 0 else "nonsense"
    monkeypatch.setenv("MPICOLL_ALLREDUCE", value)
    plain = MPI.COMM_WORLD.Dup()
    comm = Comm(plain)
    comm.Allreduce(ones(3), np.empty(3))
    assert comm.stats["allreduce", "reduce_bcast"].calls == 1
    # One that can not serve a call leaves it to the automatic choice.
    monkeypatch.delenv("MPICOLL_ALLREDUCE")
    comm.Allreduce(ones(3), np.empty(3), order="rank")
    assert comm.stats["allreduce", "reduce_bcast"].calls == 1
    part = comm.Split(0)
    part.Allreduce(ones(3), np.empty(3))
    assert part.stats["allreduce", "reduce_bcast"].calls == 1
    part.Free()
    plain.Free()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MPICOLL_ALLREDUCE", "rings", "MPICOLL_ALLREDUCE=rings: .*known: circulant"),
        ("MPICOLL_ALLREDUCER", "ring", "unknown variable MPICOLL_ALLREDUCER; known: MPICOLL_"),
    ],
)
def test_wrong_environment_of_rank_0(
    world: Comm, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    if world.rank == 0:
        monkeypatch.setenv(name, value)
    plain = MPI.COMM_WORLD.Dup()
    with pytest.raises(SettingError, match=words):
        Comm(plain)
    plain.Free()
    if world.rank == 0:
        assert os.environ[name] == value
    works(world)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.Barrier(),
        lambda c: c.Bcast(ones(1)),
        lambda c: c.Allreduce(ones(1), ones(1)),
        lambda c: c.Gather(ones(1), ones(1)),
    ],
    ids=["Barrier", "Bcast", "Allreduce", "Gather"],
)
@pytest.mark.parametrize("kind", ["freed", "null"])
def test_communicator_that_is_none(world: Comm, kind: str, call: Callable[[Any], Any]) -> None:
    comm, native = Comm(MPI.COMM_NULL), MPI.Intracomm(MPI.COMM_NULL)
    if kind == "freed":
        comm, native = world.Dup(), MPI.Intracomm(world).Dup()
        comm.Free()
        native.Free()
    errors = [caught(call, one) for one in (comm, native)]
    for error in errors:
        assert isinstance(error, MPI.Exception), repr(error)
        assert error.Get_error_class() == MPI.ERR_COMM
