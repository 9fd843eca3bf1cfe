"""Memory that only DLPack shows, such as torch's: every collective takes it in every form, in
float16, bfloat16 and float32, and gives it back once.

torch itself is too large for these tests; `Lender` speaks its protocol.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import pytest
from cases import attempt, levels, meets
from cover import Cover
from exchange import METHODS, Case, Exchange
from fake_torch import Tensor
from harness import Ranks
from lender import BFLOAT16, Array, Lender
from mpi4py import MPI

from mpicoll import Comm

SHOWN = 12
KINDS = ("bfloat16", "FLOAT16_T", "FLOAT")
WORDS = {"version": (1, 0)}, {"version": None}

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


class LentExchange(Exchange):
    """An exchange whose arrays mpicoll has to borrow; to the MPI's own calls as before."""

    lenders: list[Lender]

    def _call(
        self, comm: MPI.Intracomm, form: str, args: list[Any], keywords: dict[str, Any]
    ) -> None:
        if keywords:
            args = [self._lent(one) for one in args]
        super()._call(comm, form, args, keywords)

    def _lent(self, spec: Any) -> Any:
        if isinstance(spec, (list, tuple)):
            return type(spec)([self._lent(one) for one in spec])
        if not isinstance(spec, np.ndarray):
            return spec
        # Old and new lenders meet in one call, and on one rank.
        word = WORDS[(self.case.number + self.rank + len(self.lenders)) % 2]
        self.lenders.append(Lender(spec, **word))
        return self.lenders[-1]


def cover(method: str, size: int, seed: int) -> Iterator[Case]:
    """Yield cases in which any two levels of any two factors meet.

    Algorithms see no more of a buffer than its bytes; test_matrix.py has them all.
    """
    factors = levels(method, size)
    factors.update(algorithm=[None], segment=[None], order=[None])
    factors["kind"] = [kind for kind in KINDS if kind in factors["kind"]]
    salt = zlib.crc32(f"{method} lent".encode())
    for number, chosen in enumerate(Cover(factors, meets(method), seed ^ salt).pairs()):
        yield Case(method=method, number=salt + number, **chosen)


@pytest.mark.parametrize("method", METHODS)
def test_matrix(method: str, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    lenders: list[Lender] = []
    monkeypatch.setattr(LentExchange, "lenders", lenders, raising=False)
    monkeypatch.setattr(cases, "Exchange", LentExchange)
    failures = []
    for case in cover(method, world.size, ranks.seed):
        wrong, _ = attempt(case, world, ranks.seed)
        if wrong:
            failures.append(f"{case}: {wrong}")
    assert not failures, f"--seed={ranks.seed}: {len(failures)}\n" + "\n".join(failures[:SHOWN])
    gc.collect()
    kept = [lender for lender in lenders if lender.returned != lender.lent]
    assert not kept, f"{len(kept)} of {len(lenders)}: {[vars(one) for one in kept[:SHOWN]]}"
    # Every rank borrows in some of the cases; in a w-form all memory is bytes.
    codes = {lender.type[0] for lender in lenders if lender.lent}
    assert codes >= ({1} if method == "Alltoallw" else {2, 4})


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("f2"), np.dtype("f4")], ids=str)
def test_a_request_keeps_what_it_borrowed(dtype: np.dtype[Any], world: Comm) -> None:
    """Given back while a message is under way, it would be lost to the next owner."""
    count = 50_000
    send = Lender(np.full(count, RANK + 1, dtype), spoils=True)
    result = np.zeros(count, dtype)
    recv = Lender(result)
    if RANK == 0:  # until it enters, nobody's call can end
        COMM.Barrier()
    request = world.Iallreduce(send, recv)
    if RANK != 0:
        gc.collect()
        assert [send.returned, recv.returned] == [0, 0]
        COMM.Barrier()
    request.Wait()
    del request
    gc.collect()
    assert [send.lent, send.returned, recv.lent, recv.returned] == [1, 1, 1, 1]
    assert (result.astype(float) == SIZE * (SIZE + 1) / 2).all()


def test_a_plan_keeps_what_it_borrowed(world: Comm) -> None:
    data: Array = np.zeros(100, BFLOAT16)
    result: Array = np.zeros(100, BFLOAT16)
    send, recv = Lender(data, spoils=True), Lender(result)
    plan = world.Allreduce_init(send, recv)
    for step in range(3):
        data[:] = RANK + step
        plan.Start()
        plan.Wait()
        assert (result.astype(float) == SIZE * (SIZE - 1) / 2 + SIZE * step).all()
    assert [send.returned, recv.returned] == [0, 0]
    plan.Free()
    del plan
    gc.collect()
    assert [send.lent, send.returned, recv.lent, recv.returned] == [1, 1, 1, 1]


def test_counts_are_of_items(world: Comm) -> None:
    """mpi4py counts the bytes of what it has no datatype for; an item is one here, as it is of
    a NumPy array."""
    sends = [(RANK + 2 * peer) % 3 for peer in range(SIZE)]
    receives = [(peer + 2 * RANK) % 3 for peer in range(SIZE)]
    data = np.repeat(np.arange(SIZE), sends).astype(BFLOAT16) + BFLOAT16.type(10 * RANK)
    result = np.zeros(sum(receives), BFLOAT16)
    world.Alltoallv([Lender(data), sends], [Lender(result), receives])
    expected = [10 * peer + RANK for peer, count in enumerate(receives) for _ in range(count)]
    assert result.astype(int).tolist() == expected


REFUSED = {
    "requires grad": (
        lambda: Lender(np.ones(4), refusal=BufferError("use tensor.detach()")),
        r"Allreduce on rank \d: message: Lender does not lend its memory: use tensor\.detach\(\)",
    ),
    "float4": (
        lambda: Lender(np.ones(4, np.uint8), type=(17, 4, 2)),
        r"Allreduce on rank \d: message: no MPI datatype for items of DLPack type 17",
    ),
    "strided": (
        lambda: Lender(np.ones(8, BFLOAT16)[::2]),
        r"not contiguous; np\.ascontiguousarray\(x\) makes it so",
    ),
    "strided, of torch": (
        lambda: Tensor(np.ones(8, BFLOAT16)[::2]),
        r"not contiguous; x\.contiguous\(\) makes it so",
    ),
    "on a device that nobody knows": (lambda: Lender(np.ones(4), kind=8), "DLPack's kind 8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, world: Comm) -> None:
    """All ranks refuse, nothing is sent, nothing kept, and the next call works."""
    make, says = REFUSED[what]
    lender = make()
    with pytest.raises(BufferError, match=says):
        world.Allreduce(lender, np.zeros(4))
    gc.collect()
    assert lender.returned == lender.lent
    result = np.zeros(1)
    world.Allreduce(np.ones(1), result)
    assert result[0] == SIZE


def test_read_only_memory_is_sent_and_not_received_into(world: Comm) -> None:
    data = np.ones(4, BFLOAT16)
    data.flags.writeable = False
    result = np.zeros(4, BFLOAT16)
    world.Allreduce(Lender(data), Lender(result))
    assert (result == SIZE).all()
    with pytest.raises(BufferError, match="not writable"):
        world.Allreduce(Lender(result), Lender(data))


def test_what_has_no_type_moves_by_the_datatype_that_is_named(world: Comm) -> None:
    data = np.arange(4, dtype=np.uint8) if RANK == 0 else np.zeros(4, np.uint8)
    world.Bcast([Lender(data, type=(17, 4, 2)), MPI.BYTE])
    assert data.tolist() == [0, 1, 2, 3]


def test_the_mpis_own_methods_see_what_was_passed(world: Comm) -> None:
    """Pickled methods and those of a topology get the objects, not what was borrowed."""
    lender = Only(np.ones(2))
    assert world.allreduce(RANK) == SIZE * (SIZE - 1) // 2
    assert [one.data.tolist() for one in world.allgather(lender)] == [[1, 1]] * SIZE
    assert lender.asked == 0
    ring = world.Create_cart([SIZE], periods=[True])
    result = np.zeros((2, 2))
    ring.Neighbor_allgather(lender, result)
    assert lender.asked > 0
    assert result.tolist() == [[1, 1], [1, 1]]
    assert ring.stats["Neighbor_allgather", "native"].calls == 1
    ring.Free()


class Only:
    """A NumPy array that only DLPack shows, and that can be pickled."""

    def __init__(self, data: Array) -> None:
        self.data, self.asked = data, 0

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked += 1
        return self.data.__dlpack__(**keywords)
