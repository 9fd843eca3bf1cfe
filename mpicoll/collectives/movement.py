"""Collectives that move data: broadcast, gather, scatter, all-to-all, barrier.

Elements of their schedules are bytes of the type signature, which is what the standard
makes equal at both ends of a message; datatypes may differ.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms.alltoall import transit_from, transit_schedule
from mpicoll.collectives.base import Base, Options, Planning, forms, in_place
from mpicoll.runtime.buffers import Buffer, Chore, check_aliasing
from mpicoll.runtime.executor import Bytes, Execution
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import Opened, programmed
from mpicoll.runtime.plan import EMPTY, Plan
from mpicoll.runtime.specs import (
    parse_recv,
    parse_recv_v,
    parse_recv_w,
    parse_send,
    parse_send_v,
    parse_send_w,
)
from mpicoll.schedule.contracts import ROOTED
from mpicoll.schedule.ir import Call
from mpicoll.schedule.partition import offsets
from mpicoll.selection.choose import Choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ONE_BYTE = np.zeros(1, np.uint8)


class Movement(Base):
    """The collectives that move data; mixed into `mpicoll.Comm`."""

    def _bcast(
        self, opened: Opened, buf: Any, root: int = 0, **options: Unpack[Options]
    ) -> Planning:
        """Send the root's buffer to all ranks."""
        self._root(root)
        link = self._link
        load = finish = None
        if link.rank == root:
            buffer = parse_send(buf)
            opened.hold(buffer)
            data, load = buffer.source()
            if not data.flags.writeable:  # some algorithms write the root's own bytes to itself
                data, load = buffer.source(copied=True)
        else:
            buffer = parse_recv(buf)
            opened.hold(buffer)
            data, _, finish = buffer.target()
        choice = self._choose("bcast", options, nbytes=data.size)
        call = Call(link.rank, link.size, (data.size,), root, choice.segment_bytes)
        return self._moved(opened, choice, call, EMPTY, data, chores=(load, finish))

    Bcast, Ibcast, Bcast_init = forms(_bcast)

    def _gather(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        **options: Unpack[Options],
    ) -> Planning:
        """Collect one block of each rank on the root, in rank order."""
        self._root(root)
        recv = parse_recv(recvbuf, blocks=self._link.size) if self._link.rank == root else None
        source, target, chores, alias = self._gather_sides(opened, sendbuf, recv, root)
        size = self._link.size
        choice = self._choose("gather", options, nbytes=source.size * size)
        counts = (source.size,) * size
        if recv is not None:
            _own_fits(source.size, recv.block_bytes[root])
            counts = recv.block_bytes
        call = Call(self._link.rank, size, counts, root, choice.segment_bytes)
        return self._moved(opened, choice, call, source, target, chores, alias)

    Gather, Igather, Gather_init = forms(_gather)

    def _gatherv(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        **options: Unpack[Options],
    ) -> Planning:
        """Collect blocks of any length on the root."""
        self._root(root)
        recv = parse_recv_v(recvbuf, self._link.size) if self._link.rank == root else None
        source, target, chores, alias = self._gather_sides(opened, sendbuf, recv, root)
        choice = self._choose("gather", options)
        counts = yield from self._known_counts(opened, choice, source.size)
        expected = None
        if recv is not None:
            _own_fits(source.size, recv.block_bytes[root])
            counts = expected = recv.block_bytes
        call = Call(self._link.rank, self._link.size, counts, root, choice.segment_bytes)
        plan = self._moved(opened, choice, call, source, target, chores, alias)
        plan.counts = ()
        plan.pairs = self._pairs(source.size, root, expected)
        return plan

    Gatherv, Igatherv, Gatherv_init = forms(_gatherv)

    def _gather_sides(
        self, opened: Opened, sendbuf: Any, recv: Buffer | None, root: int
    ) -> tuple[Bytes, Bytes, tuple[Chore, ...], int | None]:
        """Return source, target, chores and alias of a gather; only the root has a ``recv``."""
        if recv is not None:
            return _block_sides(opened, sendbuf, recv, root)
        send = parse_send(sendbuf)
        opened.hold(send)
        source, load = send.source()
        return source, EMPTY, (load, None), None

    def _scatter(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        **options: Unpack[Options],
    ) -> Planning:
        """Hand each rank its block of the root's buffer."""
        self._root(root)
        send = parse_send(sendbuf, blocks=self._link.size) if self._link.rank == root else None
        source, target, chores, alias = self._scatter_sides(opened, send, recvbuf, root)
        size = self._link.size
        choice = self._choose("scatter", options, nbytes=target.size * size)
        counts = (target.size,) * size
        if send is not None:
            counts = send.block_bytes
            _own_fits(counts[root], target.size)
        call = Call(self._link.rank, size, counts, root, choice.segment_bytes)
        return self._moved(opened, choice, call, source, target, chores, alias)

    Scatter, Iscatter, Scatter_init = forms(_scatter)

    def _scatterv(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        **options: Unpack[Options],
    ) -> Planning:
        """Hand each rank its block, of any length."""
        self._root(root)
        send = parse_send_v(sendbuf, self._link.size) if self._link.rank == root else None
        source, target, chores, alias = self._scatter_sides(opened, send, recvbuf, root)
        choice = self._choose("scatter", options)
        counts = yield from self._known_counts(opened, choice, target.size)
        sent = None
        if send is not None:
            counts = sent = send.block_bytes
            _own_fits(counts[root], target.size)
        call = Call(self._link.rank, self._link.size, counts, root, choice.segment_bytes)
        plan = self._moved(opened, choice, call, source, target, chores, alias)
        plan.counts = ()
        pairs = self._pairs(target.size, root, sent)
        plan.pairs = pairs and pairs[::-1]
        return plan

    Scatterv, Iscatterv, Scatterv_init = forms(_scatterv)

    def _scatter_sides(
        self, opened: Opened, send: Buffer | None, recvbuf: Any, root: int
    ) -> tuple[Bytes, Bytes, tuple[Chore, ...], int | None]:
        """Return source, target, chores and alias of a scatter; only the root has a ``send``."""
        recv = None if send is not None and in_place(recvbuf) else parse_recv(recvbuf)
        source, load = EMPTY, None
        stays = send is not None and (recv is None or check_aliasing(recv, send, root))
        opened.hold(send, recv)
        if send is not None:
            source, load = send.source()
        if send is not None and stays:
            # The root's own block stays where it is; nothing is written to the target.
            low = offsets(send.block_bytes)[root]
            return source, source[low : low + send.block_bytes[root]], (load, None), -low
        assert recv is not None
        target, _, finish = recv.target()
        return source, target, (load, finish), None

    def _known_counts(
        self, opened: Opened, choice: Choice, own: int
    ) -> Generator[Execution, None, tuple[int, ...]]:
        """Return what a schedule of a rooted v-collective must know of the counts."""
        if choice.algorithm.knows == "counts":
            return (yield from self._agree(own, opened))
        link = self._link
        return tuple([own if peer == link.rank else 0 for peer in range(link.size)])

    def _pairs(
        self, own: int, root: int, of_root: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return what a rank sends to each other, and the root expects, in a checked gather."""
        link = self._link
        if not link.settings.check:
            return None
        sent = tuple([own if peer == root else 0 for peer in range(link.size)])
        return sent, of_root or (0,) * link.size

    def _allgather(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Collect one block of each rank on all ranks, in rank order."""
        recv = parse_recv(recvbuf, blocks=self._link.size)
        return self._gathered_by_all(opened, sendbuf, recv, options)

    Allgather, Iallgather, Allgather_init = forms(_allgather)

    def _allgatherv(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Collect blocks of any length on all ranks."""
        recv = parse_recv_v(recvbuf, self._link.size)
        return self._gathered_by_all(opened, sendbuf, recv, options)

    Allgatherv, Iallgatherv, Allgatherv_init = forms(_allgatherv)

    def _gathered_by_all(
        self, opened: Opened, sendbuf: Any, recv: Buffer, options: Options
    ) -> Plan:
        link = self._link
        source, target, chores, alias = _block_sides(opened, sendbuf, recv, link.rank)
        # All ranks pass equal receive counts, in both forms, by the standard.
        choice = self._choose("allgather", options, nbytes=target.size)
        _own_fits(source.size, recv.block_bytes[link.rank])
        call = Call(link.rank, link.size, recv.block_bytes, 0, choice.segment_bytes)
        return self._moved(opened, choice, call, source, target, chores, alias)

    def _alltoall(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Send block d of every rank to rank d, into the block of the sender."""
        recv = parse_recv(recvbuf, blocks=self._link.size)
        send = None if in_place(sendbuf) else parse_send(sendbuf, blocks=self._link.size)
        return self._exchanged(opened, send, recv, options, uniform=True)

    Alltoall, Ialltoall, Alltoall_init = forms(_alltoall)

    def _alltoallv(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Exchange blocks of any length."""
        recv = parse_recv_v(recvbuf, self._link.size)
        send = None if in_place(sendbuf) else parse_send_v(sendbuf, self._link.size)
        return self._exchanged(opened, send, recv, options, uniform=False)

    Alltoallv, Ialltoallv, Alltoallv_init = forms(_alltoallv)

    def _alltoallw(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Exchange blocks of any length and datatype."""
        recv = parse_recv_w(recvbuf, self._link.size)
        send = None if in_place(sendbuf) else parse_send_w(sendbuf, self._link.size)
        return self._exchanged(opened, send, recv, options, uniform=False)

    Alltoallw, Ialltoallw, Alltoallw_init = forms(_alltoallw)

    def _exchanged(
        self,
        opened: Opened,
        send: Buffer | None,
        recv: Buffer,
        options: Options,
        uniform: bool,
    ) -> Planning:
        link = self._link
        if send is not None and check_aliasing(send, recv):
            send = None
        opened.hold(send, recv)
        source, load = recv.source(copied=True) if send is None else send.source()
        sends = recv.block_bytes if send is None else send.block_bytes
        nbytes = source.size if uniform else None
        choice = self._choose("alltoall", options, nbytes, uniform)
        _own_fits(sends[link.rank], recv.block_bytes[link.rank])
        target, _, finish = recv.target()
        call = Call(link.rank, link.size, sends, 0, 0, recv.block_bytes, choice.radix)
        if choice.algorithm.knows == "transit":
            return self._exchanged_by_route(opened, choice, call, source, target, (load, finish))
        plan = self._moved(opened, choice, call, source, target, (load, finish))
        if not uniform:
            plan.counts, plan.pairs = (), (sends, recv.block_bytes)
        return plan

    def _exchanged_by_route(
        self,
        opened: Opened,
        choice: Choice,
        call: Call,
        source: Bytes,
        target: Bytes,
        chores: tuple[Chore, ...],
    ) -> Generator[Execution, None, Plan]:
        """Send the sizes of the blocks along the route that the blocks will take."""
        schedule = transit_schedule(call.rank, call.size)
        items = sum(recv.span.count for step in schedule.steps for recv in step.recvs)
        received = np.empty(items, np.int64)
        sizes = np.array(call.counts, np.int64)
        tag = opened.tag(opened.record.collective, "transit")
        yield from self._link.exchange(
            schedule,
            tag,
            sizes.view(np.uint8),
            received.view(np.uint8),
            opened.record,
            "two_phase_bruck",
        )
        transit = transit_from(call.size, received.tolist())
        full = Call(
            call.rank, call.size, call.counts, recv_counts=call.recv_counts, transit=transit
        )
        plan = self._moved(opened, choice, full, source, target, chores)
        assert call.recv_counts is not None
        plan.counts, plan.pairs = (), (call.counts, call.recv_counts)
        return plan

    def _barrier(self, opened: Opened, **options: Unpack[Options]) -> Planning:
        """Wait until all ranks have entered."""
        link = self._link
        choice = self._choose("barrier", options)
        return self._moved(opened, choice, Call(link.rank, link.size, (1,)), _ONE_BYTE)

    Barrier, Ibarrier, Barrier_init = forms(_barrier)

    def barrier(self) -> None:
        """Wait until all ranks have entered."""
        self.Barrier()

    def _moved(
        self,
        opened: Opened,
        choice: Choice,
        call: Call,
        source: Bytes,
        target: Bytes = EMPTY,
        chores: tuple[Chore, ...] = (None, None),
        alias: int | None = None,
    ) -> Plan:
        """Return the plan of a call whose elements are bytes."""
        algorithm = choice.algorithm
        return Plan(
            algorithm,
            programmed(algorithm, call, 1),
            opened.tag(algorithm.collective, algorithm.name, call.root, call.segment),
            source,
            target,
            alias=alias,
            loads=chores[:1],
            finishes=chores[1:],
            count=source.size or target.size,
            counts=call.counts,
            root=call.root if algorithm.collective in ROOTED else -1,
            segment_bytes=call.segment,
            lane=opened.lane,
        )


def _block_sides(
    opened: Opened, sendbuf: Any, recv: Buffer, block: int
) -> tuple[Bytes, Bytes, tuple[Chore, ...], int | None]:
    """Return source, target, chores and alias where the send side is one block.

    In place, or when the send buffer is that block of the receive buffer, the source is
    that block.
    """
    send = None if in_place(sendbuf) else parse_send(sendbuf)
    if send is not None and check_aliasing(send, recv, block):
        send = None
    opened.hold(send, recv)
    target, _, finish = recv.target()
    if send is not None:
        source, load = send.source()
        return source, target, (load, finish), None
    low = offsets(recv.block_bytes)[block]
    nbytes = recv.block_bytes[block]
    if finish is None:
        return target[low : low + nbytes], target, (None, None), low
    source, load = recv.source()
    return source[low : low + nbytes], target, (load, finish), None


def _own_fits(sent: int, received: int) -> None:
    """Refuse a block that a rank sends to itself and expects in another size."""
    if sent != received:
        raise CallError(
            MPI.ERR_TRUNCATE,
            f"this rank's own block has {sent} bytes on the send side and {received} on the "
            "receive side",
        )
