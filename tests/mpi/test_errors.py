"""Wrong calls: mpi4py's class of exception, a message that helps, and no harm done."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from kinds import PREDEFINED, kinds
from mpi4py import MPI

import mpicoll
from mpicoll import AlgorithmError, Comm, SettingError
from mpicoll.algorithms import every, names
from mpicoll.schedule.contracts import COLLECTIVES, REDUCTIONS

POISON = -7.0
Target = Any


class Wrong(NamedTuple):
    """A wrong call, which all ranks make; ``words`` are a pattern of the message.

    ``native`` says that mpi4py may make it too: it refuses it before anything is sent.
    """

    call: Callable[[Any, Target], Any]
    error: type[Exception]
    words: str
    code: int = 0
    native: bool = True


def _ones(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count)


def _frozen(count: int) -> np.ndarray[Any, Any]:
    array = np.ones(count)
    array.flags.writeable = False
    return array


def _many(c: Any, value: int = 1) -> list[int]:
    return [value] * c.size


D = MPI.DOUBLE
WRONG = {
    # The root
    "root too high": Wrong(
        lambda c, t: c.Bcast(t, c.size), MPI.Exception, r"root \d+, expected.* 0 to", MPI.ERR_ROOT
    ),
    "root far too high": Wrong(
        lambda c, t: c.Reduce(_ones(3), t[:3], root=10**6),
        MPI.Exception,
        "root 1000000",
        MPI.ERR_ROOT,
    ),
    "root negative": Wrong(
        lambda c, t: c.Scatter(_ones(c.size), t[:1], root=-77),
        MPI.Exception,
        "root -77",
        MPI.ERR_ROOT,
    ),
    # Counts
    "negative count": Wrong(
        lambda c, t: c.Allreduce([_ones(3), -1, D], [t, -1, D]), ValueError, "negative count -1"
    ),
    "negative counts": Wrong(
        lambda c, t: c.Allgatherv(_ones(1), [t, _many(c, -1), D]),
        MPI.Exception,
        "negative count -1",
        MPI.ERR_COUNT,
        native=False,  # Open MPI looks at the own count alone
    ),
    "negative receive counts": Wrong(
        lambda c, t: c.Reduce_scatter(_ones(c.size), t[:1], _many(c, -1)),
        (MPI.Exception, ValueError),  # type: ignore[arg-type]
        "-",
        native=False,
    ),
    "too few counts": Wrong(
        lambda c, t: c.Allgatherv(_ones(1), [t, [1] * (c.size + 1), D]),
        ValueError,
        r"expecting \d+ .*counts, got \d+",
    ),
    "too few displacements": Wrong(
        lambda c, t: c.Alltoallv(
            [_ones(c.size), _many(c), D], [t, (_many(c), [0] * (c.size + 1)), D]
        ),
        ValueError,
        "displ",
    ),
    "count beyond the memory": Wrong(
        lambda c, t: c.Bcast([t, 1000, D]),
        ValueError,
        "too small.* 512 bytes",
        native=False,  # mpi4py does not see it, and MPI writes beyond the memory
    ),
    "counts beyond the memory": Wrong(
        lambda c, t: c.Allgatherv(_ones(100), [t, _many(c, 100), D]),
        ValueError,
        "too small.* 512 bytes",
        native=False,
    ),
    "displacements beyond the memory": Wrong(
        lambda c, t: c.Allgatherv(_ones(1), [t, (_many(c), _many(c, 64)), D]),
        ValueError,
        "too small",
        native=False,
    ),
    "displacements before the memory": Wrong(
        lambda c, t: c.Allgatherv(_ones(1), [t, (_many(c), _many(c, -1)), D]),
        ValueError,
        "too small",
        native=False,
    ),
    "no whole number of items": Wrong(
        lambda c, t: c.Bcast([bytearray(13), D]), ValueError, "13 is not a multiple"
    ),
    # The other side
    "receives less than it reduces": Wrong(
        lambda c, t: c.Allreduce(_ones(5), t[:4]), ValueError, "mismatch.* 5 .* 4"
    ),
    "scans into less": Wrong(
        lambda c, t: c.Scan(_ones(5), t[:4]), ValueError, "mismatch.* 5 .* 4"
    ),
    "receives other items": Wrong(
        lambda c, t: c.Allreduce(_ones(3), t.view(np.int64)[:3]),
        ValueError,
        "mismatch in send and receive MPI datatypes",
    ),
    "gathers into too little": Wrong(
        lambda c, t: c.Allgather(_ones(2), t[: c.size]),
        MPI.Exception,
        "16 bytes on the send side and 8 on the receive side",
        MPI.ERR_TRUNCATE,
        native=False,  # MPIs overwrite, hang or truncate
    ),
    "reduces to blocks of another sum": Wrong(
        lambda c, t: c.Reduce_scatter(_ones(c.size + 3), t[:1], _many(c)),
        ValueError,
        "mismatch in send count",
    ),
    "reduces to a block of another length": Wrong(
        lambda c, t: c.Reduce_scatter(_ones(c.size), t[:2], _many(c)),
        ValueError,
        "mismatch in receive count",
    ),
    # Memory
    "read-only receive buffer": Wrong(
        lambda c, t: c.Allreduce(_ones(3), _frozen(3)), BufferError, "(writable|read-only)"
    ),
    "read-only place": Wrong(
        lambda c, t: c.Allreduce(MPI.IN_PLACE, _frozen(3)), BufferError, "(writable|read-only)"
    ),
    "bytes to receive into": Wrong(
        lambda c, t: c.Allgather(np.uint8(1), bytes(c.size)), BufferError, "(writable|read-only)"
    ),
    "strided send buffer": Wrong(
        lambda c, t: c.Allreduce(_ones(6)[::2], t[:3]), BufferError, "contiguous"
    ),
    "strided receive buffer": Wrong(
        lambda c, t: c.Allreduce(_ones(3), t[:6:2]), BufferError, "contiguous"
    ),
    "partial overlap": Wrong(
        lambda c, t: c.Allreduce(t[:4], t[2:6]),
        MPI.Exception,
        "overlap; use MPI.IN_PLACE",
        MPI.ERR_BUFFER,
        native=False,
    ),
    "overlap of blocks": Wrong(
        lambda c, t: c.Alltoall(t[: 2 * c.size], t[1 : 2 * c.size + 1]),
        MPI.Exception,
        "overlap",
        MPI.ERR_BUFFER,
        native=False,
    ),
    # Types
    "no buffer": Wrong(lambda c, t: c.Allreduce(object(), t), TypeError, "expecting buffer"),
    "None to receive into": Wrong(
        lambda c, t: c.Allreduce(_ones(1), None), TypeError, "expecting buffer"
    ),
    "array of objects": Wrong(
        lambda c, t: c.Bcast(np.array([1, "a"], object)), KeyError, "cannot map"
    ),
    "array of text": Wrong(lambda c, t: c.Bcast(np.array(["ab"])), KeyError, "cannot map"),
    "other byte order": Wrong(lambda c, t: c.Bcast(np.ones(2, ">f8")), BufferError, "byte order"),
    "unknown typecode": Wrong(lambda c, t: c.Bcast([t, "nothing"]), KeyError, "nothing"),
    "no datatype": Wrong(
        lambda c, t: c.Bcast([t, 1, MPI.DATATYPE_NULL]),
        MPI.Exception,
        "",
        MPI.ERR_TYPE,
    ),
    "too many parts": Wrong(lambda c, t: c.Bcast([t, 1, 2, 3, 4]), ValueError, "2 to 4 items"),
    "operator of no kind": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], "sum"), TypeError, "str"
    ),
    "no operator": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], MPI.OP_NULL), MPI.Exception, "", MPI.ERR_OP
    ),
    "operator that the type does not allow": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], MPI.BAND),
        MPI.Exception,
        "BAND is not defined for MPI_DOUBLE",
        MPI.ERR_OP,
    ),
    "average of truth": Wrong(
        lambda c, t: c.Allreduce(np.array([True]), np.array([True]), mpicoll.AVG),
        MPI.Exception,
        "AVG has no meaning",
        MPI.ERR_OP,
        native=False,
    ),
    "average of a scan": Wrong(
        lambda c, t: c.Scan(_ones(1), t[:1], mpicoll.AVG),
        MPI.Exception,
        "AVG has no meaning",
        MPI.ERR_OP,
        native=False,
    ),
    # The words that only mpicoll has
    "unknown algorithm": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], algorithm="rings"),
        AlgorithmError,
        "allreduce has no algorithm 'rings'; known: circulant, direct",
        native=False,
    ),
    "radix of an algorithm without": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], algorithm="ring:4"),
        AlgorithmError,
        "takes no radix",
        native=False,
    ),
    "radix of nothing": Wrong(
        lambda c, t: c.Alltoall(_ones(c.size), t[: c.size], algorithm="bruck:1"),
        AlgorithmError,
        "radix '1'",
        native=False,
    ),
    "unknown order": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], order="left"),
        AlgorithmError,
        "order='left'; known: None, 'rank'",
        native=False,
    ),
    "negative segment": Wrong(
        lambda c, t: c.Allreduce(_ones(1), t[:1], segment=-1),
        AlgorithmError,
        "segment=-1; expected 0 or more",
        native=False,
    ),
}


def caught(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
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
    error = caught(lambda: wrong.call(world, target))
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
        native = caught(lambda: wrong.call(MPI.Intracomm(world), target))
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
                error = caught(
                    lambda comm=comm, one=one, other=other, name=name, kind=kind: comm.Allreduce(
                        [one, 1, kind.datatype], [other, 1, kind.datatype], getattr(MPI, name)
                    )
                )
                assert error is None or isinstance(error, MPI.Exception), repr(error)
                classes.append(0 if error is None else error.Get_error_class())
            if len(set(classes)) > 1:
                differ.append((kind.name, name, classes))
    assert not differ


@pytest.mark.parametrize("collective", sorted(REDUCTIONS))
def test_algorithms_that_reorder_refuse(collective: str, world: Comm) -> None:
    first = MPI.Op.Create(lambda one, other, datatype: other.__setitem__(slice(None), one), False)
    method = getattr(world, collective.capitalize())
    many = world.size if collective == "reduce_scatter" else 1
    for algorithm in every():
        if algorithm.collective != collective:
            continue
        result = np.full(1, POISON)
        arguments = [_ones(many), result]
        if collective == "reduce_scatter":
            arguments.append([1] * world.size)  # type: ignore[arg-type]
        error = caught(partial(method, *arguments, op=first, algorithm=algorithm.name))
        if algorithm.order == "any":
            assert isinstance(error, AlgorithmError)
            assert "does not commute; fit:" in str(error)
        else:
            assert error is None, repr(error)
        if collective in ("scan", "exscan"):
            continue
        error = caught(
            lambda name=algorithm.name, a=arguments: method(*a, algorithm=name, order="rank")
        )
        if algorithm.order != "sequential":
            assert isinstance(error, AlgorithmError)
            assert "does not sum from left to right over ranks; those that do:" in str(error)
        else:
            assert error is None, repr(error)
    first.Free()
    works(world)


def test_algorithm_for_equal_counts_refuses_others(world: Comm) -> None:
    counts = [1] * world.size
    error = caught(
        lambda: world.Alltoallv(
            [_ones(world.size), counts, D], [_ones(world.size), counts, D], algorithm="bruck"
        )
    )
    assert isinstance(error, AlgorithmError)
    assert "wants equal counts" in str(error)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unknown_algorithm_lists_the_known(collective: str, world: Comm) -> None:
    method = {"reduce_scatter": "Reduce_scatter_block"}.get(collective, collective.capitalize())
    many = world.size * np.ones(1, int)[0]
    sides: dict[str, tuple[int, ...]] = {
        "bcast": (1,),
        "barrier": (),
        "gather": (1, many),
        "allgather": (1, many),
        "scatter": (many, 1),
        "reduce_scatter": (many, 1),
        "alltoall": (many, many),
    }
    buffers = [_ones(count) for count in sides.get(collective, (1, 1))]
    error = caught(lambda: getattr(world, method)(*buffers, algorithm="nothing"))
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
        frozen = value == 1.0 and twin.rank == last and last > 0
        target = _frozen(4) if frozen else np.full(4, POISON)
        source = np.full(4 * twin.size, value)
        if collective == "Bcast":
            if twin.rank == 0:
                target[:] = value
            error = caught(lambda target=target: twin.Bcast(target, algorithm="binomial"))
        else:
            error = caught(partial(twin.Scatter, source, target, algorithm="linear"))
        assert isinstance(error, BufferError) if frozen else error is None, repr(error)
        assert frozen or (target == value).all()
    works(twin)


@pytest.mark.parametrize("expected", [5, 3], ids=["shorter", "longer"])
def test_message_of_another_length_is_an_error(twin: Comm, expected: int) -> None:
    """The last rank expects another count than the root sends."""
    alone = twin.rank == twin.size - 1 > 0
    target = np.full(expected if alone else 4, POISON)
    source = np.ones(4 * twin.size)
    error = caught(lambda: twin.Scatter(source, target, algorithm="linear"))
    if not alone:
        assert error is None, repr(error)
    elif expected == 5:
        assert isinstance(error, mpicoll.ShortMessageError)
        assert "32 bytes from rank 0, expected 40" in str(error)
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
    comm.Allreduce(_ones(3), np.empty(3))
    assert comm.stats["allreduce", "reduce_bcast"].calls == 1
    # One that can not serve a call leaves it to the automatic choice.
    monkeypatch.delenv("MPICOLL_ALLREDUCE")
    comm.Allreduce(_ones(3), np.empty(3), order="rank")
    assert comm.stats["allreduce", "reduce_bcast"].calls == 1
    part = comm.Split(0)
    part.Allreduce(_ones(3), np.empty(3))
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
        lambda c: c.Bcast(_ones(1)),
        lambda c: c.Allreduce(_ones(1), _ones(1)),
        lambda c: c.Gather(_ones(1), _ones(1)),
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
    errors = [caught(lambda one=one: call(one)) for one in (comm, native)]
    for error in errors:
        assert isinstance(error, MPI.Exception), repr(error)
        assert error.Get_error_class() == MPI.ERR_COMM
