"""Comm as a communicator: wrapping, derived ones, the duplicate behind it, the counters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from childjob import environment
from mpi4py import MPI

import mpicoll
from mpicoll.runtime import executor, plan
from mpicoll.runtime.plan import recipe
from mpicoll.runtime.tags import code_of


@pytest.fixture
def derived(world: mpicoll.Comm, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param(world)
    yield made
    if made != MPI.COMM_NULL:
        made.Free()


def works(comm: Any) -> None:
    """Run a collective of ours and hold it to the sum of ranks."""
    total = np.zeros(1, np.int64)
    comm.Allreduce(np.array([comm.rank]), total)
    assert total[0] == comm.size * (comm.size - 1) // 2
    assert comm.stats.total.calls > 0


@pytest.mark.parametrize(
    "derived",
    [
        lambda world: world.Dup(),
        lambda world: world.Clone(),
        lambda world: world.Dup_with_info(MPI.INFO_NULL),
        lambda world: world.Split(world.rank % 2, -world.rank),
        lambda world: world.Split_type(MPI.COMM_TYPE_SHARED),
        lambda world: world.Create(world.group),
        lambda world: world.Create_group(world.group),
    ],
    indirect=True,
    ids=["Dup", "Clone", "Dup_with_info", "Split", "Split_type", "Create", "Create_group"],
)
def test_derived_communicators_are_wrapped(derived: Any) -> None:
    assert type(derived) is mpicoll.Comm
    works(derived)


def test_topologies_keep_theirs(world: mpicoll.Comm) -> None:
    cart = world.Create_cart([world.size], periods=[True])
    assert isinstance(cart, mpicoll.Cartcomm)
    assert isinstance(cart, mpicoll.Comm)
    assert cart.Shift(0, 1) == ((cart.rank - 1) % cart.size, (cart.rank + 1) % cart.size)
    works(cart)
    row = cart.Sub([True])
    assert isinstance(row, mpicoll.Cartcomm)
    works(row)
    twin = cart.Dup()
    assert isinstance(twin, mpicoll.Cartcomm)
    plain = MPI.COMM_WORLD.Create_cart([world.size])
    wrapped = mpicoll.Comm(plain)
    assert isinstance(wrapped, mpicoll.Cartcomm)
    works(wrapped)
    edges = [(rank + 1) % world.size for rank in range(world.size)]
    graph = world.Create_graph(list(range(1, world.size + 1)), edges)
    assert isinstance(graph, mpicoll.Graphcomm)
    works(graph)
    for comm in (row, twin, cart, graph, wrapped):
        comm.Free()


def test_who_is_not_in_gets_the_null_communicator(world: mpicoll.Comm) -> None:
    first = world.Create(world.group.Incl([0]))
    if world.rank:
        assert first == MPI.COMM_NULL
    else:
        works(first)
        first.Free()
    none = world.Split(MPI.UNDEFINED)
    assert none == MPI.COMM_NULL


def test_wrapping_twice_is_one_link(world: mpicoll.Comm) -> None:
    again = mpicoll.Comm(MPI.COMM_WORLD)
    assert again._link is world._link
    assert again == MPI.COMM_WORLD
    twin = world.Dup()
    assert twin._link is not world._link
    assert twin._link.settings is world._link.settings
    twin.Free()


def test_duplicate_by_request_is_wrapped_at_first_use(world: mpicoll.Comm) -> None:
    twin, request = world.Idup()
    request.Wait()
    assert isinstance(twin, mpicoll.Comm)
    works(twin)
    twin.Free()


def test_only_intracommunicators(world: mpicoll.Comm) -> None:
    with pytest.raises(TypeError, match="wraps intracommunicators, got int"):
        mpicoll.Comm(3)  # type: ignore[arg-type]
    null = mpicoll.Comm(MPI.COMM_NULL)
    with pytest.raises(MPI.Exception, match="null communicator") as caught:
        null.Barrier()
    assert caught.value.Get_error_class() == MPI.ERR_COMM
    if world.size > 1:
        half = MPI.COMM_WORLD.Split(world.rank % 2)
        inter = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - world.rank % 2)
        with pytest.raises(TypeError, match="got Intercomm"):
            mpicoll.Comm(inter)
        inter.Free()
        half.Free()


def test_freed_communicator_refuses(world: mpicoll.Comm) -> None:
    twin = world.Dup()
    other = mpicoll.Comm(twin)
    hidden = twin._link.hidden
    twin.Free()
    assert hidden == MPI.COMM_NULL
    for comm in (twin, other):
        with pytest.raises(MPI.Exception):
            comm.Barrier()


def test_many_communicators(world: mpicoll.Comm) -> None:
    for _ in range(300):
        twin = world.Dup()
        twin.Barrier()
        twin.Free()
    works(world)


def test_user_traffic_is_not_disturbed(world: mpicoll.Comm) -> None:
    """A receive from anyone with any tag must not see a message of ours, nor we it."""
    inbox = np.full(1, -1)
    request = world.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    for _ in range(20):
        works(world)
    assert not request.Test()
    world.Barrier()
    world.Send(np.array([world.rank]), (world.rank + 1) % world.size, 77)
    request.Wait()
    assert inbox[0] == (world.rank - 1) % world.size


def test_tags_come_round(world: mpicoll.Comm) -> None:
    comm = world.Dup()
    comm._link.tags.divide(8)
    for _ in range(20):
        works(comm)
    comm.Free()


def test_long_messages_are_cut(world: mpicoll.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut that carries more than 2 GiB, at 1000 bytes."""

    def cut(schedule: Any, item_bytes: int) -> executor.Program:
        return executor.compiled(schedule, item_bytes, 1000)

    monkeypatch.setattr(plan, "compiled", cut)
    plan.recipe.cache_clear()
    before = world.stats["allgather", "ring"].messages_sent
    x = np.arange(1001) + world.rank
    result = np.empty((world.size, 1001), x.dtype)
    world.Allgather(x, result, algorithm="ring")
    plan.recipe.cache_clear()
    np.testing.assert_array_equal(result, np.arange(1001) + np.arange(world.size)[:, None])
    sent = world.stats["allgather", "ring"].messages_sent - before
    assert sent == 9 * (world.size - 1)  # 8008 bytes in nine pieces to one neighbour


def test_more_than_2_gib(world: mpicoll.Comm, full: bool) -> None:
    """A count above 2**31, which classic MPI calls can not say; on two ranks, with --full."""
    if not full or world.size != 2:
        return
    count = 2**31 + 5
    x = np.empty(count, np.uint8)
    if world.rank == 0:
        x[:] = 1
        x[-5:] = [1, 2, 3, 4, 5]
    world.Bcast(x)
    assert x[-5:].tolist() == [1, 2, 3, 4, 5]
    assert int(x.sum(dtype=np.int64)) == count - 5 + 15


def test_stats(world: mpicoll.Comm) -> None:
    comm = world.Dup()
    comm.Bcast(np.zeros(10), algorithm="binomial")
    comm.Bcast(np.zeros(10), algorithm="binomial")
    comm.allreduce(1)
    comm.Ibarrier().Wait()
    assert comm.stats["bcast", "binomial"].calls == 2
    assert comm.stats["allreduce", "native"].calls == 1
    assert comm.stats["barrier", "dissemination"].calls == 1
    assert comm.stats["bcast", "chain"].calls == 0
    sent = comm.allreduce(comm.stats["bcast", "binomial"].bytes_sent)
    received = comm.allreduce(comm.stats["bcast", "binomial"].bytes_received)
    assert sent == received == 2 * 80 * (comm.size - 1)
    assert "binomial" in repr(comm.stats)
    comm.stats.reset()
    assert len(comm.stats) == 0
    comm.Free()


def run_alone(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program on one rank, as if there were no mpiexec around."""
    prefixes = ("OMPI_", "PMI", "PMIX", "PRTE", "HYDRA", "HYDI", "MPI_LOCAL", "I_MPI_HYDRA")
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(prefixes), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


START = "from mpi4py import MPI; import mpicoll; comm = mpicoll.Comm(MPI.COMM_WORLD); "


@pytest.mark.parametrize(
    "end",
    ["", "MPI.Finalize()", "d = comm.Dup(); del comm; MPI.Finalize()", "comm.Dup().Free()"],
    ids=["at exit", "explicitly", "with another left", "after a free"],
)
def test_process_ends_cleanly(world: mpicoll.Comm, end: str) -> None:
    if world.rank == 0:
        done = run_alone(START + "comm.Barrier(); " + end)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MPICOLL_ALLREDUCE", "rings", "MPICOLL_ALLREDUCE=rings: allreduce has no algorithm"),
        ("MPICOLL_ALLREDUCER", "ring", "unknown variable MPICOLL_ALLREDUCER"),
    ],
)
def test_wrong_variable(world: mpicoll.Comm, variable: str, value: str, message: str) -> None:
    if world.rank == 0:
        done = run_alone(START, **{variable: value})
        assert done.returncode != 0
        assert message in done.stderr


def test_variable_chooses(world: mpicoll.Comm) -> None:
    if world.rank == 0:
        code = (
            f"{START}import numpy as np; comm.Allreduce(np.ones(1), np.ones(1)); print(comm.stats)"
        )
        assert "reduce_bcast" in run_alone(code, MPICOLL_ALLREDUCE="reduce_bcast").stdout


@pytest.mark.parametrize("method", ["Reduce_scatter_block", "Reduce_scatter"])
def test_reduce_scatter_into_the_head_of_its_input(world: mpicoll.Comm, method: str) -> None:
    """Both sides begin at one address, with different lengths: in place."""
    size, rank = world.size, world.rank
    x = np.arange(2.0 * size) + rank
    counts = [[2] * size] if method == "Reduce_scatter" else []
    getattr(world, method)(x, x[:2], *counts)
    total = size * np.arange(2.0 * rank, 2.0 * rank + 2) + size * (size - 1) / 2
    assert x[:2].tolist() == total.tolist()
    assert x[2:].tolist() == (np.arange(2.0, 2.0 * size) + rank).tolist()
    if size > 1:  # another overlap is refused
        with pytest.raises(MPI.Exception, match="overlap"):
            getattr(world, method)(x, x[1:3], *counts)
    world.Barrier()


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.int32])
def test_integers_of_any_type_say_the_same(kind: Any, world: mpicoll.Comm) -> None:
    """Ranks that pass equal roots and segments of different types mean the same call."""
    recipe.cache_clear()
    code_of.cache_clear()
    comm = mpicoll.Comm(world.Dup(), timeout=30)
    last = comm.size - 1
    root, segment = (kind(last), kind(64)) if comm.rank == last else (last, 64)
    data = np.full(50, 7.0 if comm.rank == last else 0.0)
    comm.Bcast(data, root, algorithm="chain", segment=segment)
    assert (data == 7).all()
    total = np.zeros(1)
    comm.Reduce(np.ones(1), total, root=root)
    assert total[0] == (comm.size if comm.rank == last else 0)
    blocks = np.zeros(comm.size)
    comm.Gather(np.ones(1), blocks, root=root)
    comm.Scatter(blocks, total, root=root)
    assert total[0] == 1
    comm.Free()
