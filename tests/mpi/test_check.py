"""Checked calls: what ranks pass differently is said on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from breaking import METHODS, calls
from mpi4py import MPI
from wrong_calls import POISON

import mpicoll
from mpicoll import Comm, MismatchError, SettingError
from mpicoll.runtime import agreement, progress


@pytest.fixture
def checked(world: Comm) -> Iterator[Any]:
    made = Comm(MPI.Intracomm(world).Dup(), check=True)
    assert made._link.settings.check
    yield made
    made.Free()


class OneForm:
    """A communicator whose ``Allreduce`` and the like are one of their three forms."""

    def __init__(self, comm: Any, form: str) -> None:
        self._comm, self._form = comm, form

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper() or self._form == "blocking":
            return getattr(self._comm, name)
        if self._form == "persistent":
            return getattr(self._comm, f"{name}_init")
        return lambda *args, **keywords: getattr(self._comm, f"I{name.lower()}")(
            *args, **keywords
        ).Wait()


def raised(call: Callable[[], Any]) -> Exception | None:
    """Return what a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def works(comm: Any) -> None:
    """Use a communicator on all ranks, with a message between any two."""
    received = np.full(comm.size, -1)
    comm.Alltoall(100 * comm.rank + np.arange(comm.size), received)
    assert received.tolist() == [100 * peer + comm.rank for peer in range(comm.size)]


def ranks_but(size: int, odd: int) -> str:
    """Return how a message names all ranks but one."""
    others = [rank for rank in range(size) if rank != odd]
    return f"rank{'s' * (len(others) != 1)} {', '.join(map(str, others))}"


def d(n: int) -> np.ndarray[Any, Any]:
    return np.ones(n)


class Odd(NamedTuple):
    """A call, the one that one rank makes in its place, and what is said of both."""

    call: Callable[[Any], Any]
    other: Callable[[Any], Any]
    name: str
    value: str
    odd: str


#: Mismatches, of one rank against the rest; ``{n}`` stands for the number of ranks.
ODD = {
    "call": Odd(
        lambda c: c.Allreduce(d(3), d(3)),
        lambda c: c.Scan(d(3), d(3)),
        "call",
        "Allreduce",
        "Scan",
    ),
    "call without arguments": Odd(
        lambda c: c.Bcast(d(3)), lambda c: c.Barrier(), "call", "Bcast", "Barrier"
    ),
    "v-form": Odd(
        lambda c: c.Allgather(d(1), d(c.size)),
        lambda c: c.Allgatherv(d(1), d(c.size)),
        "call",
        "Allgather",
        "Allgatherv",
    ),
    "root of a broadcast": Odd(
        lambda c: c.Bcast(d(3)), lambda c: c.Bcast(d(3), c.size - 1), "root", "0", "{last}"
    ),
    "root of a reduction": Odd(
        lambda c: c.Reduce(d(3), d(3), root=0),
        lambda c: c.Reduce(d(3), d(3), root=c.size - 1),
        "root",
        "0",
        "{last}",
    ),
    "operator": Odd(
        lambda c: c.Allreduce(d(3), d(3), MPI.MAX),
        lambda c: c.Allreduce(d(3), d(3), MPI.MIN),
        "op",
        "MAX",
        "MIN",
    ),
    "average": Odd(
        lambda c: c.Allreduce(d(3), d(3), op=MPI.PROD),
        lambda c: c.Allreduce(d(3), d(3), op=mpicoll.AVG),
        "op",
        "PROD",
        "AVG",
    ),
    "count of a broadcast": Odd(
        lambda c: c.Bcast(d(3)), lambda c: c.Bcast(d(4)), "bytes", "24", "32"
    ),
    "count of a reduction": Odd(
        lambda c: c.Allreduce(d(3), d(3)), lambda c: c.Allreduce(d(5), d(5)), "count", "3", "5"
    ),
    "no items": Odd(
        lambda c: c.Allreduce(d(3), d(3)), lambda c: c.Allreduce(d(0), d(0)), "count", "3", "0"
    ),
    "count of a gather": Odd(
        lambda c: c.Allgather(d(1), d(c.size)),
        lambda c: c.Allgather(d(2), d(2 * c.size)),
        "bytes",
        "8",
        "16",
    ),
    "count of an exchange": Odd(
        lambda c: c.Alltoall(d(c.size), d(c.size)),
        lambda c: c.Alltoall(d(2 * c.size), d(2 * c.size)),
        "bytes",
        "8",
        "16",
    ),
    "count of a scan": Odd(
        lambda c: c.Exscan(d(3), d(3)), lambda c: c.Exscan(d(2), d(2)), "count", "3", "2"
    ),
    "counts of a reduce-scatter": Odd(
        lambda c: c.Reduce_scatter_block(d(c.size), d(1)),
        lambda c: c.Reduce_scatter_block(d(2 * c.size), d(2)),
        "count",
        "1",
        "2",
    ),
    "dtype": Odd(
        lambda c: c.Allreduce(d(3), d(3)),
        lambda c: c.Allreduce(np.ones(3, np.int64), np.ones(3, np.int64)),
        "dtype",
        "MPI_DOUBLE",
        "MPI_",
    ),
    "width of a dtype": Odd(
        lambda c: c.Scan(d(3), d(3)),
        lambda c: c.Scan(np.ones(3, np.float32), np.ones(3, np.float32)),
        "dtype",
        "MPI_DOUBLE",
        "MPI_FLOAT",
    ),
    "algorithm": Odd(
        lambda c: c.Allreduce(d(3), d(3), algorithm="ring"),
        lambda c: c.Allreduce(d(3), d(3), algorithm="recursive_doubling"),
        "algorithm",
        "ring",
        "recursive_doubling",
    ),
    "segment": Odd(
        lambda c: c.Bcast(d(300), algorithm="chain", segment=800),
        lambda c: c.Bcast(d(300), algorithm="chain", segment=1600),
        "segment",
        "800",
        "1600",
    ),
    "order": Odd(
        lambda c: c.Allreduce(d(3), d(3)),
        lambda c: c.Allreduce(d(3), d(3), order="rank"),
        "order",
        "none",
        "rank",
    ),
    "time limit": Odd(
        lambda c: c.Allreduce(d(3), d(3)),
        lambda c: c.Allreduce(d(3), d(3), timeout=60),
        "time limit",
        "none",
        "given",
    ),
}
#: What only moves data: a call of arrays by a function that makes one, of the same bytes in all.
MOVING: dict[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "Bcast": lambda c, a: c.Bcast(a(1)),
    "Gather": lambda c, a: c.Gather(a(1), a(c.size) if c.rank == 0 else None),
    "Gather in place": lambda c, a: c.Gather(
        *((a(1), None) if c.rank else (MPI.IN_PLACE, a(c.size)))
    ),
    "Gatherv": lambda c, a: c.Gatherv(a(1), a(c.size) if c.rank == 0 else None),
    "Scatter": lambda c, a: c.Scatter(a(c.size) if c.rank == 0 else None, a(1)),
    "Scatterv": lambda c, a: c.Scatterv(
        *((a(c.size), MPI.IN_PLACE) if c.rank == 0 else (None, a(1)))
    ),
    "Allgather": lambda c, a: c.Allgather(a(1), a(c.size)),
    "Allgather in place": lambda c, a: c.Allgather(MPI.IN_PLACE, a(c.size)),
    "Allgatherv": lambda c, a: c.Allgatherv(a(1), a(c.size)),
    "Alltoall": lambda c, a: c.Alltoall(a(c.size), a(c.size)),
}
for _name, _call in MOVING.items():
    ODD[f"datatype of a {_name}"] = Odd(
        lambda c, call=_call: call(c, lambda n: np.ones(n)),
        lambda c, call=_call: call(c, lambda n: np.ones(2 * n, np.float32)),
        "datatype",
        "float64",
        "float32",
    )


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_one_rank_passes_something_else(odd: Odd, form: str, checked: Any) -> None:
    size = checked.size
    for number, one in enumerate({0, size - 1}):
        call = odd.other if checked.rank == one else odd.call
        error = raised(lambda call=call: call(OneForm(checked, form)))  # type: ignore[misc]
        if size == 1:
            assert error is None
            return
        assert isinstance(error, MismatchError), repr(error)
        text = str(error)
        assert f"on rank {checked.rank}: the ranks disagree on call #{2 * number + 1} of" in text
        assert "nothing was sent" in text
        same, other = (value.format(last=size - 1) for value in (odd.value, odd.odd))
        if odd.name == "call" and form == "persistent":
            same, other = f"{same}_init", f"{other}_init"
        assert f"  {odd.name} = {same}: {ranks_but(size, one)}" in text
        assert f"  {odd.name} = {other}" in text
        assert text.count(f": rank {one}") >= 1
        # The same on all ranks, but for who says it.
        assert len(set(MPI.Intracomm(checked).allgather(text.partition(": ")[2]))) == 1
        works(checked)
    assert not progress.active()


def test_nothing_is_sent_or_written(checked: Any) -> None:
    if checked.size == 1:
        return
    out = np.full(3, POISON)
    before = checked.stats["allreduce", "ring"].bytes_sent
    op = MPI.SUM if checked.rank else MPI.MAX
    with pytest.raises(MismatchError):
        checked.Allreduce(d(3), out, op, algorithm="ring")
    assert (out == POISON).all()
    assert checked.stats["allreduce", "ring"].bytes_sent == before


def test_forms_may_meet(checked: Any) -> None:
    """A blocking call on one rank and a non-blocking one on another belong together."""
    out = np.empty(3)
    if checked.rank % 2:
        checked.Allreduce(d(3), out)
    else:
        checked.Iallreduce(d(3), out).Wait()
    assert out.tolist() == [checked.size] * 3


@pytest.mark.parametrize("times", [1, 3])
def test_a_plan_on_some_ranks_only(times: int, checked: Any) -> None:
    """It is refused on all ranks, and the plans that follow work."""
    last = checked.rank == checked.size - 1
    for number in range(times if checked.size > 1 else 0):
        call = checked.Allreduce_init if last == (number < 2) else checked.Allreduce
        with pytest.raises(MismatchError, match="call = Allreduce_init: rank"):
            call(d(3), d(3))
    plans, outs = [], []
    for _ in range(3):
        outs.append(np.full(3, POISON))
        plans.append(checked.Allreduce_init(d(3), outs[-1]))
    assert len(set(MPI.Intracomm(checked).allgather(tuple(checked._link.tags._live)))) == 1
    for _ in range(2):
        mpicoll.Prequest.Startall(plans)
        mpicoll.Prequest.Waitall(plans)
        assert [out.tolist() for out in outs] == [[checked.size] * 3] * 3
    for plan in plans:
        plan.Free()
    assert not checked._link.tags._live
    works(checked)


#: What some ranks say and others leave out, or say by another type: the same call.
ALIKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "root": (lambda c: c.Bcast(d(3)), lambda c: c.Bcast(d(3), 0)),
    "type of a root": (
        lambda c: c.Reduce(d(3), d(3), root=np.int64(c.size > 1)),
        lambda c: c.Reduce(d(3), d(3), MPI.SUM, c.size > 1),
    ),
    "op": (lambda c: c.Allreduce(d(3), d(3)), lambda c: c.Allreduce(d(3), d(3), MPI.SUM)),
    "keywords": (
        lambda c: c.Scan(d(3), d(3)),
        lambda c: c.Scan(d(3), d(3), MPI.SUM, algorithm=None, segment=None, timeout=0),
    ),
    "bytes": (lambda c: c.Bcast(d(3)), lambda c: c.Bcast(bytearray(24))),
    "derived datatypes": (
        lambda c: c.Allgather(d(2), d(2 * c.size)),
        lambda c: c.Allgather([d(2), 1, TWO], [d(2 * c.size), 1, TWO]),
    ),
    "names of a datatype": (
        lambda c: c.Bcast([np.ones(3, np.int64), MPI.INT64_T]),
        lambda c: c.Bcast([np.ones(3, np.int64), MPI.LONG]),
    ),
    "a side that does not count": (
        lambda c: c.Scatter(d(c.size), d(1)),
        lambda c: c.Scatter(d(c.size) if c.rank == 0 else np.ones(9, np.float32), d(1)),
    ),
}
#: A rank that has no items may say any type.
NOTHING = np.array([])


def _one_has_nothing(name: str) -> Callable[[Any], Any]:
    def call(c: Any) -> Any:
        counts = [int(rank > 0) for rank in range(c.size)]
        own = np.ones(1, np.int64) if c.rank else NOTHING
        whole = [np.ones(c.size, np.int64), counts, MPI.INT64_T]
        here = whole if c.rank == 0 or name == "Allgatherv" else None
        sides = (here, own) if name == "Scatterv" else (own, here)
        return getattr(c, name)(*sides)

    return call


def _types_of_pairs(c: Any) -> Any:
    """Exchange float64 to the next rank and float32 to the one before."""
    counts = [int(peer != c.rank and c.size == 2) for peer in range(c.size)]
    send, recv = (np.float64, np.float32) if c.rank == 0 else (np.float32, np.float64)
    return c.Alltoallv([np.ones(2, send), counts], [np.ones(2, recv), counts])


for _name in ("Gatherv", "Scatterv", "Allgatherv"):
    _call = _one_has_nothing(_name)
    ALIKE[f"no items of a {_name}"] = _call, _call
ALIKE["types of pairs"] = _types_of_pairs, _types_of_pairs
ALIKE["no items of a Bcast"] = (
    lambda c: c.Bcast([np.ones(1), 0, MPI.DOUBLE]),
    lambda c: c.Bcast(np.ones(0, np.int8)),
)
TWO = MPI.DOUBLE.Create_contiguous(2).Commit()


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE.keys())
def test_ranks_may_say_the_same_in_other_words(alike: Any, form: str, checked: Any) -> None:
    one, other = alike
    result = (other if checked.rank % 2 else one)(OneForm(checked, form))
    if form == "persistent":
        result.Free()
    works(checked)


def test_long_arguments_are_compared_to_their_end(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cut in what is sent and said."""
    monkeypatch.setattr(agreement, "VALUE", 12)
    size, rank = checked.size, checked.rank
    counts = [10_000 + peer for peer in range(size)]
    counts[-1] += rank == 0
    error = raised(lambda: checked.Allgatherv(d(counts[rank]), [d(sum(counts)), counts]))
    if size == 1:
        assert error is None
        return
    assert isinstance(error, MismatchError)
    assert str(error).count("  bytes = ... ") == 2


def test_a_mismatch_names_the_lines(checked: Any) -> None:
    if checked.size == 1:
        return
    calls: list[Callable[[], Any]] = [
        lambda: checked.Allreduce(d(2), d(2)),
        lambda: checked.Allreduce(d(3), d(3)),
    ]
    with pytest.raises(MismatchError) as error:
        calls[checked.rank > 0]()
    lines = [line for line in str(error.value).splitlines() if line.startswith("  site = ")]
    assert len(lines) == 2
    assert all("test_check.py:" in line for line in lines)


def test_calls_in_another_order(checked: Any) -> None:
    """Two calls in flight, in different order: both are refused, on all ranks."""
    size = checked.size
    one, two = (d(2), d(2)), (d(size), d(size))
    if checked.rank == size - 1:
        requests = [checked.Ialltoall(*two), checked.Iscan(*one)]
    else:
        requests = [checked.Iscan(*one), checked.Ialltoall(*two)]
    errors = [raised(request.Wait) for request in requests]
    if size > 1:
        assert all(isinstance(error, MismatchError) for error in errors), errors
        assert "call = Ialltoall" not in str(errors[0])
        assert f"call = Alltoall: rank {size - 1}" in str(errors[0])
    else:
        assert errors == [None, None]
    works(checked)


# -- both ends of a pair ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
def test_uneven_exchange(form: str, checked: Any) -> None:
    """Rank a sends b + 1 items to rank b; the last rank expects one more from rank 0."""
    size, rank = checked.size, checked.rank
    sends, receives = list(range(1, size + 1)), [rank + 1] * size
    comm = OneForm(checked, form)

    def call() -> None:
        source, target = d(sum(sends)), np.full(sum(receives), POISON)
        comm.Alltoallv([source, sends, MPI.DOUBLE], [target, receives, MPI.DOUBLE])

    call()
    if size == 1:
        return
    if rank == size - 1:
        receives[0] += 1
    with pytest.raises(MismatchError) as error:
        call()
    expected = 8 * size
    assert (
        f"rank 0 sends {expected} bytes to rank {size - 1}, which expects {expected + 8}"
        in str(error.value)
    )
    works(checked)


def test_uneven_exchange_of_types(checked: Any) -> None:
    size, rank = checked.size, checked.rank
    counts, at = [1] * size, (8 * np.arange(size)).tolist()
    types = [MPI.DOUBLE] * size

    def call() -> None:
        checked.Alltoallw([d(size), counts, at, [MPI.DOUBLE] * size], [d(size), counts, at, types])

    call()
    if size == 1:
        return
    if rank == 0:
        types[size - 1] = MPI.FLOAT
    with pytest.raises(MismatchError, match=f"rank {size - 1} sends 8 bytes to rank 0, which ex"):
        call()
    works(checked)


@pytest.mark.parametrize("algorithm", ["linear", "binomial"])
@pytest.mark.parametrize("name", ["Gatherv", "Scatterv"])
def test_both_ends_of_a_rooted_call(name: str, algorithm: str, checked: Any) -> None:
    size, rank = checked.size, checked.rank
    root = size - 1
    counts = [peer + 1 for peer in range(size)]

    def call() -> None:
        own = d(rank + 1)
        whole = [d(sum(counts)), list(counts), MPI.DOUBLE] if rank == root else None
        sides = (own, whole) if name == "Gatherv" else (whole, own)
        getattr(checked, name)(*sides, root=root, algorithm=algorithm)

    call()
    if size == 1:
        return
    counts[0] += 2  # on the root alone it matters
    with pytest.raises(MismatchError) as error:
        call()
    if name == "Gatherv":
        assert f"rank 0 sends 8 bytes to rank {root}, which expects 24" in str(error.value)
    else:
        assert f"rank {root} sends 24 bytes to rank 0, which expects 8" in str(error.value)
    works(checked)


@pytest.mark.parametrize("name", ["Gather", "Scatter"])
def test_the_root_counts_otherwise(name: str, checked: Any) -> None:
    if checked.size == 1:
        return
    n = 2 if checked.rank == 0 else 3
    own, whole = d(n), d(n * checked.size)
    with pytest.raises(MismatchError, match=r"bytes = 16: rank 0\n  bytes = 24: rank"):
        getattr(checked, name)(*((own, whole) if name == "Gather" else (whole, own)))
    works(checked)


def test_counts_that_were_not_said(checked: Any) -> None:
    """Reduce_scatter without counts agrees on them; a rank whose sum is another one is told."""
    n = 2 if checked.rank else 1
    sides = d(2 * checked.size), d(n)
    error = raised(lambda: checked.Reduce_scatter(*sides))
    assert isinstance(error, ValueError), repr(error)
    assert "mismatch in send count" in str(error)
    works(checked)


# -- one rank's own error ---------------------------------------------------------------

#: Arguments that are refused on the rank that passes them.
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "root": (lambda c: c.Bcast(d(3), 77), MPI.Exception, "root 77"),
    "buffers": (lambda c: c.Bcast(object()), TypeError, "buffer"),
    "too short": (lambda c: c.Allreduce(d(3), d(2)), ValueError, "mismatch in send count"),
    "keyword": (lambda c: c.Bcast(d(3), alg="x"), TypeError, "unexpected keyword argument alg"),
    "number of arguments": (lambda c: c.Bcast(), TypeError, ""),
    "algorithm": (lambda c: c.Bcast(d(3), algorithm="x"), mpicoll.AlgorithmError, "'x'"),
    "limit": (lambda c: c.Bcast(d(3), timeout=-1), ValueError, "a time limit is a number"),
    "agreed on first": (
        lambda c: c.Reduce_scatter(d(2), np.empty(1, np.float32)),
        ValueError,
        "mismatch in send and receive MPI datatypes",
    ),
}


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_one_rank_is_refused(
    refused: tuple[Callable[[Any], Any], type[Exception], str], form: str, checked: Any
) -> None:
    call, kind, words = refused
    comm = OneForm(checked, form)
    if checked.rank == checked.size - 1:
        with pytest.raises(kind) as own:
            call(comm)
        assert words in str(own.value)
        assert f"on rank {checked.rank}" in str(own.value)
    else:
        with pytest.raises(MismatchError) as other:
            comm.Bcast(d(3))
        assert f"refused elsewhere: rank {checked.size - 1}: {kind.__name__}" in str(
            other.value
        ) or issubclass(kind, MPI.Exception)
        assert words[:20] in str(other.value)
    works(checked)


def test_all_ranks_are_refused(checked: Any) -> None:
    """Everybody gets an error of its own."""
    with pytest.raises(ValueError, match=f"Allreduce on rank {checked.rank}: mismatch in send"):
        checked.Allreduce(d(3), d(2))
    works(checked)


def test_an_error_after_an_agreement(checked: Any) -> None:
    """One rank's arguments do not fit the counts that all agreed on."""
    size = checked.size
    sides = d(2 * size + (checked.rank == 0)), d(2)
    error = raised(lambda: checked.Reduce_scatter(*sides))
    if checked.rank == 0:
        assert isinstance(error, ValueError), repr(error)
        assert "mismatch in send count" in str(error)
    else:
        assert isinstance(error, MismatchError), repr(error)
        assert "refused elsewhere: rank 0: ValueError: " in str(error)
    works(checked)


# -- nothing else changes ---------------------------------------------------------------


def arrays(arguments: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays among arguments."""
    if isinstance(arguments, np.ndarray):
        return [arguments]
    if isinstance(arguments, (list, tuple)):
        return [array for one in arguments for array in arrays(one)]
    return []


@pytest.mark.parametrize("name", METHODS)
def test_results_are_those_without(name: str, world: Comm, checked: Any) -> None:
    for n in (0, 1, 5, 3000):
        arguments = calls(world, n)[name]
        results = []
        for comm, form in (
            (world, "blocking"),
            (checked, "blocking"),
            (checked, "non-blocking"),
            (checked, "persistent"),
        ):
            for number, array in enumerate(arrays(arguments)):
                array[:] = np.sin(np.arange(array.size) + 10 * world.rank + number)
            request = getattr(OneForm(comm, form), name)(*arguments)
            if form == "persistent":
                request.Start()
                request.Wait()
                request.Free()
            results.append([array.tobytes() for array in arrays(arguments)])
        assert all(one == results[0] for one in results[1:]), n


@pytest.mark.parametrize(
    "algorithm", ["linear", "pairwise", "bruck", "two_phase_bruck"], ids=lambda one: one
)
def test_every_way_of_an_exchange(algorithm: str, checked: Any) -> None:
    size, rank = checked.size, checked.rank
    sends = [(rank + peer) % 3 for peer in range(size)]
    source, target = np.full(sum(sends), rank), np.full(sum(sends), -1)
    name = "Alltoall" if algorithm == "bruck" else "Alltoallv"
    if name == "Alltoall":
        got = np.full(size, -1)
        checked.Alltoall(100 * rank + np.arange(size), got, algorithm=algorithm)
        assert got.tolist() == [100 * peer + rank for peer in range(size)]
        return
    checked.Alltoallv([source, sends], [target, sends], algorithm=algorithm)
    assert target.tolist() == [peer for peer in range(size) for _ in range(sends[peer])]


def test_in_place_meets_not_in_place(checked: Any) -> None:
    """At a root the send buffer may be in place: that is no disagreement."""
    size, rank = checked.size, checked.rank
    whole = np.arange(size, dtype=np.int64)
    if rank == 0:
        checked.Gather(MPI.IN_PLACE, whole)
        assert whole.tolist() == [0, *range(1, size)]
    else:
        checked.Gather(np.array([rank]), None)
    out = np.array([rank + 1.0])
    checked.Allreduce(MPI.IN_PLACE if rank % 2 else np.array([rank + 1.0]), out)
    assert out[0] == size * (size + 1) / 2


def test_datatypes_of_one_signature_agree(checked: Any) -> None:
    """Bytes on one rank and doubles on the others move the same."""
    data = np.full(3, POISON) if checked.rank else d(3)
    checked.Bcast([data.view(np.uint8), MPI.BYTE] if checked.rank % 2 else data)
    assert data.tolist() == [1.0] * 3


def test_derived_communicators_check_too(checked: Any) -> None:
    half = checked.Split(checked.rank % 2, -checked.rank)
    assert half._link.settings.check
    if half.size > 1:
        with pytest.raises(MismatchError, match="root = "):
            half.Bcast(d(1), root=half.rank % 2)
    works(half)
    half.Free()
    unchecked = Comm(MPI.Intracomm(checked).Dup(), check=False)
    assert not unchecked._link.settings.check
    works(unchecked)
    unchecked.Free()


def test_the_environment(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's MPICOLL_CHECK counts, for all."""
    monkeypatch.setenv("MPICOLL_CHECK", "1" if world.rank == 0 else "nonsense")
    plain = MPI.COMM_WORLD.Dup()
    comm = Comm(plain)
    assert comm._link.settings.check
    if world.size > 1:
        with pytest.raises(MismatchError, match="op = MAX"):
            comm.Allreduce(d(1), d(1), op=MPI.MIN if world.rank else MPI.MAX)
    works(comm)
    plain.Free()
    monkeypatch.setenv("MPICOLL_CHECK", "yes")
    plain = MPI.COMM_WORLD.Dup()
    with pytest.raises(SettingError, match="MPICOLL_CHECK=yes: expected 0 or 1"):
        Comm(plain)
    plain.Free()


def test_many_ranks_and_long_values_fit(checked: Any) -> None:
    """A claim is cut to its room on the wire, whatever was passed."""
    name = "x" * 5000 + str(checked.rank)
    error = raised(lambda: checked.Allreduce(d(1), d(1), algorithm=name))
    assert isinstance(error, mpicoll.AlgorithmError), repr(error)
    counts = [123456789 % (peer + 1000) for peer in range(checked.size)]
    target = np.empty(sum(counts))
    checked.Allgatherv(d(counts[checked.rank]), [target, counts])
    assert (target == 1).all()
    works(checked)


@pytest.mark.parametrize("text", ["é", "\N{SNOWMAN}\n", "\x00", "\N{MUSICAL SYMBOL G CLEF}"])
def test_words_of_any_kind_fit(text: str, checked: Any) -> None:
    last = checked.size - 1
    words = dict.fromkeys(("algorithm", "order", "segment"), 300 * text)
    words = words if checked.rank == last else {}
    error = raised(lambda: checked.Allreduce(d(1), d(1), **words))  # type: ignore[arg-type]
    if checked.rank == last:
        assert isinstance(error, (mpicoll.AlgorithmError, TypeError)), repr(error)
    else:
        assert isinstance(error, MismatchError), repr(error)
    works(checked)
