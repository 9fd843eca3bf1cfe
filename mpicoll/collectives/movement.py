"""Collectives that move data: broadcast, gather, scatter, all-to-all, barrier.

Elements of their schedules are bytes of the type signature, which is what the standard
makes equal at both ends of a message; datatypes may differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms.alltoall import transit_from, transit_schedule
from mpicoll.collectives.base import Base, end, in_place, placed
from mpicoll.runtime.buffers import (
    Buffer,
    Finish,
    check_aliasing,
    parse_recv,
    parse_recv_v,
    parse_recv_w,
    parse_send,
    parse_send_v,
    parse_send_w,
)
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import EMPTY
from mpicoll.schedule.ir import Call
from mpicoll.schedule.partition import offsets

_ONE_BYTE = np.zeros(1, np.uint8)


class Movement(Base):
    """The collectives that move data; mixed into `mpicoll.Comm`."""

    @placed
    def Bcast(
        self, buf: Any, root: int = 0, *, algorithm: str | None = None, segment: int | None = None
    ) -> None:
        """Send the root's buffer to all ranks."""
        tag = self._begin(root)
        link = self._link
        finish = None
        if link.rank == root:
            data = parse_send(buf).source()
            if not data.flags.writeable:
                data = data.copy()  # some algorithms write the root's own bytes to itself
        else:
            data, finish = parse_recv(buf).target()
        choice = self._choose("bcast", algorithm, segment, nbytes=data.size)
        call = Call(link.rank, link.size, (data.size,), root, choice.segment_bytes)
        link.run(choice, call, tag, target=data)
        end(finish)

    @placed
    def Gather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Collect one block of each rank on the root, in rank order."""
        tag = self._begin(root)
        recv = parse_recv(recvbuf, blocks=self._link.size) if self._link.rank == root else None
        self._gather(tag, sendbuf, recv, root, algorithm, segment, uniform=True)

    @placed
    def Gatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Collect blocks of any length on the root."""
        tag = self._begin(root)
        recv = parse_recv_v(recvbuf, self._link.size) if self._link.rank == root else None
        self._gather(tag, sendbuf, recv, root, algorithm, segment, uniform=False)

    def _gather(
        self,
        tag: int,
        sendbuf: Any,
        recv: Buffer | None,
        root: int,
        algorithm: str | None,
        segment: int | None,
        uniform: bool,
    ) -> None:
        link = self._link
        target, finish, alias = EMPTY, None, None
        if recv is None:
            source = parse_send(sendbuf).source()
        else:
            source, target, finish, alias = _block_sides(sendbuf, recv, root)
        choice = self._choose(
            "gather", algorithm, segment, nbytes=source.size * link.size if uniform else None
        )
        if uniform:
            counts = (source.size,) * link.size
        elif choice.algorithm.knows == "counts":
            counts = self._agree(source.size, tag)
        else:
            counts = tuple(source.size if peer == link.rank else 0 for peer in range(link.size))
        if recv is not None:
            _own_fits(source.size, recv.block_bytes[root])
            counts = recv.block_bytes
        link.run(
            choice,
            Call(link.rank, link.size, counts, root, choice.segment_bytes),
            tag,
            source=source,
            target=target,
            alias=alias,
        )
        end(finish)

    @placed
    def Scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Hand each rank its block of the root's buffer."""
        tag = self._begin(root)
        send = parse_send(sendbuf, blocks=self._link.size) if self._link.rank == root else None
        self._scatter(tag, send, recvbuf, root, algorithm, segment, uniform=True)

    @placed
    def Scatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Hand each rank its block, of any length."""
        tag = self._begin(root)
        send = parse_send_v(sendbuf, self._link.size) if self._link.rank == root else None
        self._scatter(tag, send, recvbuf, root, algorithm, segment, uniform=False)

    def _scatter(
        self,
        tag: int,
        send: Buffer | None,
        recvbuf: Any,
        root: int,
        algorithm: str | None,
        segment: int | None,
        uniform: bool,
    ) -> None:
        link = self._link
        source, finish, alias = EMPTY, None, None
        recv = None if send is not None and in_place(recvbuf) else parse_recv(recvbuf)
        if send is not None:
            source = send.source()
        if send is not None and (recv is None or check_aliasing(recv, send, root)):
            # The root's own block stays where it is; nothing is written to the target.
            low = offsets(send.block_bytes)[root]
            target, alias = source[low : low + send.block_bytes[root]], -low
        else:
            assert recv is not None
            target, finish = recv.target()
        choice = self._choose(
            "scatter", algorithm, segment, nbytes=target.size * link.size if uniform else None
        )
        if uniform:
            counts = (target.size,) * link.size
        elif choice.algorithm.knows == "counts":
            counts = self._agree(target.size, tag)
        else:
            counts = tuple(target.size if peer == link.rank else 0 for peer in range(link.size))
        if send is not None:
            counts = send.block_bytes
            _own_fits(counts[root], target.size)
        link.run(
            choice,
            Call(link.rank, link.size, counts, root, choice.segment_bytes),
            tag,
            source=source,
            target=target,
            alias=alias,
        )
        end(finish)

    @placed
    def Allgather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Collect one block of each rank on all ranks, in rank order."""
        tag = self._begin()
        self._allgather(
            tag, sendbuf, parse_recv(recvbuf, blocks=self._link.size), algorithm, segment
        )

    @placed
    def Allgatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Collect blocks of any length on all ranks."""
        tag = self._begin()
        self._allgather(tag, sendbuf, parse_recv_v(recvbuf, self._link.size), algorithm, segment)

    def _allgather(
        self,
        tag: int,
        sendbuf: Any,
        recv: Buffer,
        algorithm: str | None,
        segment: int | None,
    ) -> None:
        link = self._link
        source, target, finish, alias = _block_sides(sendbuf, recv, link.rank)
        # All ranks pass equal receive counts, in both forms, by the standard.
        choice = self._choose("allgather", algorithm, segment, nbytes=target.size)
        _own_fits(source.size, recv.block_bytes[link.rank])
        call = Call(link.rank, link.size, recv.block_bytes, 0, choice.segment_bytes)
        link.run(choice, call, tag, source=source, target=target, alias=alias)
        end(finish)

    @placed
    def Alltoall(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Send block d of every rank to rank d, into the block of the sender."""
        tag = self._begin()
        recv = parse_recv(recvbuf, blocks=self._link.size)
        send = None if in_place(sendbuf) else parse_send(sendbuf, blocks=self._link.size)
        self._alltoall(tag, send, recv, algorithm, segment, uniform=True)

    @placed
    def Alltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Exchange blocks of any length."""
        tag = self._begin()
        recv = parse_recv_v(recvbuf, self._link.size)
        send = None if in_place(sendbuf) else parse_send_v(sendbuf, self._link.size)
        self._alltoall(tag, send, recv, algorithm, segment, uniform=False)

    @placed
    def Alltoallw(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> None:
        """Exchange blocks of any length and datatype."""
        tag = self._begin()
        recv = parse_recv_w(recvbuf, self._link.size)
        send = None if in_place(sendbuf) else parse_send_w(sendbuf, self._link.size)
        self._alltoall(tag, send, recv, algorithm, segment, uniform=False)

    def _alltoall(
        self,
        tag: int,
        send: Buffer | None,
        recv: Buffer,
        algorithm: str | None,
        segment: int | None,
        uniform: bool,
    ) -> None:
        link = self._link
        if send is not None and check_aliasing(send, recv):
            send = None
        source = recv.source().copy() if send is None else send.source()
        sends = recv.block_bytes if send is None else send.block_bytes
        choice = self._choose(
            "alltoall",
            algorithm,
            segment,
            nbytes=source.size if uniform else None,
            uniform=uniform,
        )
        _own_fits(sends[link.rank], recv.block_bytes[link.rank])
        target, finish = recv.target()
        call = Call(link.rank, link.size, sends, 0, 0, recv.block_bytes, choice.radix)
        if choice.algorithm.knows == "transit":
            call = self._agree_transit(call, tag)
        link.run(choice, call, tag, source=source, target=target)
        end(finish)

    @placed
    def Barrier(self, *, algorithm: str | None = None) -> None:
        """Wait until all ranks have entered."""
        tag = self._begin()
        link = self._link
        choice = self._choose("barrier", algorithm, None)
        link.run(choice, Call(link.rank, link.size, (1,)), tag, source=_ONE_BYTE)

    def barrier(self) -> None:
        """Wait until all ranks have entered."""
        self.Barrier()

    def _agree_transit(self, call: Call, tag: int) -> Call:
        """Send the sizes of the blocks along the route that the blocks will take."""
        schedule = transit_schedule(call.rank, call.size)
        items = sum(recv.span.count for step in schedule.steps for recv in step.recvs)
        received = np.empty(items, np.int64)
        source = np.array(call.counts, np.int64)
        self._link.exchange(
            schedule, tag, source.view(np.uint8), received.view(np.uint8), "two_phase_bruck"
        )
        transit = transit_from(call.size, received.tolist())
        return Call(
            call.rank, call.size, call.counts, recv_counts=call.recv_counts, transit=transit
        )


def _block_sides(
    sendbuf: Any, recv: Buffer, block: int
) -> tuple[Bytes, Bytes, Finish, int | None]:
    """Return source, target, finish and alias where the send side is one block.

    In place, or when the send buffer is that block of the receive buffer, the source is
    that block.
    """
    target, finish = recv.target()
    if not in_place(sendbuf):
        send = parse_send(sendbuf)
        if not check_aliasing(send, recv, block):
            return send.source(), target, finish, None
    low = offsets(recv.block_bytes)[block]
    nbytes = recv.block_bytes[block]
    if finish is None:
        return target[low : low + nbytes], target, None, low
    return recv.source()[low : low + nbytes], target, finish, None


def _own_fits(sent: int, received: int) -> None:
    """Refuse a block that a rank sends to itself and expects in another size."""
    if sent != received:
        raise CallError(
            MPI.ERR_TRUNCATE,
            f"this rank's own block has {sent} bytes on the send side and {received} on the "
            "receive side",
        )
