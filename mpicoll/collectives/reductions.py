"""Collectives that reduce: reduce, allreduce, reduce-scatter, scan, exscan.

Elements of their schedules are items of the datatype, which all ranks must share.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from mpi4py import MPI

from mpicoll.collectives.base import Base, end, in_place, placed
from mpicoll.runtime.buffers import Buffer, check_aliasing, parse_recv, parse_send
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import EMPTY
from mpicoll.runtime.operators import AverageOp, Reducer, reducer
from mpicoll.schedule.ir import Call
from mpicoll.selection.choose import Choice, OrderWish, Wanted


class Reductions(Base):
    """The collectives that reduce; mixed into `mpicoll.Comm`."""

    @placed
    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        root: int = 0,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
        order: OrderWish = None,
    ) -> None:
        """Reduce the vectors of all ranks to the root."""
        tag = self._begin(root)
        send: Buffer | None
        recv: Buffer | None
        if self._link.rank == root:
            recv, send = _reduction_sides(sendbuf, recvbuf)
        else:
            recv, send = None, parse_send(sendbuf)
        self._reduce(tag, "reduce", send, recv, op, root, algorithm, segment, order)

    @placed
    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
        order: OrderWish = None,
    ) -> None:
        """Reduce the vectors of all ranks, and give the result to all; same bits on all."""
        tag = self._begin()
        recv, send = _reduction_sides(sendbuf, recvbuf)
        self._reduce(tag, "allreduce", send, recv, op, 0, algorithm, segment, order)

    @placed
    def Scan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Reduce the vectors of ranks 0 to r on each rank r."""
        tag = self._begin()
        recv, send = _reduction_sides(sendbuf, recvbuf)
        self._reduce(tag, "scan", send, recv, _no_average(op), 0, algorithm, segment, None)

    @placed
    def Exscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Reduce the vectors of ranks 0 to r - 1 on each rank r; rank 0 keeps its buffer."""
        tag = self._begin()
        recv, send = _reduction_sides(sendbuf, recvbuf)
        self._reduce(tag, "exscan", send, recv, _no_average(op), 0, algorithm, segment, None)

    def _reduce(
        self,
        tag: int,
        collective: str,
        send: Buffer | None,
        recv: Buffer | None,
        op: MPI.Op | AverageOp,
        root: int,
        algorithm: str | None,
        segment: int | None,
        order: OrderWish,
    ) -> None:
        """Run a reduction of whole vectors; ``send`` None means in place."""
        link = self._link
        given = recv if send is None else send
        assert given is not None
        reduction = reducer(op, given.item, link.size)
        choice = self._choose_reduction(
            collective, reduction, sum(given.counts), algorithm, segment, order
        )
        source = given.source()
        target, finish = (EMPTY, None) if recv is None else recv.target()
        alias = 0 if send is None and finish is None else None
        call = Call(
            link.rank, link.size, (sum(given.counts),), root, _items(choice, reduction.item_bytes)
        )
        link.run(
            choice,
            call,
            tag,
            item_bytes=reduction.item_bytes,
            source=source,
            target=target,
            reduction=reduction,
            alias=alias,
        )
        if recv is None or (collective == "exscan" and link.rank == 0):
            return
        _divide(reduction, choice, target, link.size)
        end(finish)

    @placed
    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
        order: OrderWish = None,
    ) -> None:
        """Reduce the vectors of all ranks, and leave block r of the result on rank r."""
        tag = self._begin()
        if in_place(sendbuf):
            send, recv = None, parse_recv(recvbuf, blocks=self._link.size)
            counts = recv.counts
        else:
            recv = parse_recv(recvbuf)
            send = parse_send(sendbuf, blocks=self._link.size)
            _same_items(send, recv)
            if send.count != recv.count:
                raise ValueError(
                    f"mismatch in send count {send.count} per block and receive count {recv.count}"
                )
            counts = send.counts
            if check_aliasing(send, recv):
                recv = parse_recv(sendbuf, blocks=self._link.size)
                send = None
        self._reduce_scatter(tag, send, recv, counts, op, algorithm, segment, order)

    @placed
    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op | AverageOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
        order: OrderWish = None,
    ) -> None:
        """Reduce the vectors of all ranks, and leave block r, of any length, on rank r.

        Without ``recvcounts`` the ranks agree on the counts of their receive buffers.
        """
        tag = self._begin()
        link = self._link
        recv = parse_recv(recvbuf)
        send = None if in_place(sendbuf) else parse_send(sendbuf)
        if send is not None and check_aliasing(send, recv):
            send = None
        if recvcounts is None:
            if send is None:
                raise ValueError("recvcounts is needed when the reduction is in place")
            counts = self._agree(recv.count, tag)
        else:
            counts = tuple(index(count) for count in recvcounts)
        if len(counts) != link.size:
            raise ValueError(f"{len(counts)} receive counts for {link.size} ranks")
        if min(counts) < 0:
            raise CallError(MPI.ERR_COUNT, f"receive count {min(counts)} is negative")
        expected = sum(counts) if send is None else counts[link.rank]
        if recv.count != expected:
            raise ValueError(f"mismatch in receive count {recv.count} and {expected} by counts")
        if send is not None:
            _same_items(send, recv)
            if send.count != sum(counts):
                raise ValueError(
                    f"mismatch in send count {send.count} and {sum(counts)} by counts"
                )
        self._reduce_scatter(tag, send, recv, counts, op, algorithm, segment, order)

    def _reduce_scatter(
        self,
        tag: int,
        send: Buffer | None,
        recv: Buffer,
        counts: tuple[int, ...],
        op: MPI.Op | AverageOp,
        algorithm: str | None,
        segment: int | None,
        order: OrderWish,
    ) -> None:
        link = self._link
        reduction = reducer(op, recv.item, link.size)
        choice = self._choose_reduction(
            "reduce_scatter", reduction, sum(counts), algorithm, segment, order
        )
        own = counts[link.rank] * reduction.item_bytes
        # In place the result lies over the head of the input, which is still to be read.
        source = recv.source().copy() if send is None else send.source()
        target, finish = recv.target(keep=send is None)
        call = Call(link.rank, link.size, counts, 0, _items(choice, reduction.item_bytes))
        link.run(
            choice,
            call,
            tag,
            item_bytes=reduction.item_bytes,
            source=source,
            target=target[:own],
            reduction=reduction,
        )
        _divide(reduction, choice, target[:own], link.size)
        end(finish)

    def _choose_reduction(
        self,
        collective: str,
        reduction: Reducer,
        count: int,
        algorithm: str | None,
        segment: int | None,
        order: OrderWish,
    ) -> Choice:
        wanted = Wanted(
            collective,
            self._link.size,
            count * reduction.item_bytes,
            commutative=reduction.commutative,
            wide=reduction.wide,
            order=order,
        )
        return self._link.choose(wanted, algorithm, segment)


def _reduction_sides(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer | None]:
    """Return receive and send side; no send side when the reduction is in place."""
    recv = parse_recv(recvbuf)
    if in_place(sendbuf):
        return recv, None
    send = parse_send(sendbuf)
    _same_items(send, recv)
    if send.count != recv.count:
        raise ValueError(f"mismatch in send count {send.count} and receive count {recv.count}")
    return recv, None if check_aliasing(send, recv) else send


def _same_items(send: Buffer, recv: Buffer) -> None:
    if not send.item.same(recv.item):
        raise ValueError(
            f"mismatch in send and receive MPI datatypes: {send.item.name} and {recv.item.name}"
        )


def _divide(reduction: Reducer, choice: Choice, result: Bytes, size: int) -> None:
    """Do the division of AVG, unless the fold that all operands meet in has done it."""
    folded = size == reduction.mean_of and (size == 2 or choice.algorithm.order == "sequential")
    if reduction.finish is not None and (size == 1 or not folded):
        reduction.finish(result, size)


def _no_average(op: MPI.Op) -> MPI.Op:
    if isinstance(op, AverageOp):
        raise CallError(MPI.ERR_OP, "AVG has no meaning for a scan; scan with SUM and divide")
    return op


def _items(choice: Choice, item_bytes: int) -> int:
    """Return the segment in items; a segment below one item is one item."""
    return max(1, choice.segment_bytes // max(1, item_bytes)) if choice.segment_bytes else 0
