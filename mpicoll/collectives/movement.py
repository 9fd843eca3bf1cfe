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
from mpicoll.collectives.base import Base, Planning, check_root, forms
from mpicoll.collectives.claims import in_place
from mpicoll.collectives.sides import Sides, plain, plain_pair
from mpicoll.collectives.words import Options
from mpicoll.runtime.buffers import Buffer, check_aliasing
from mpicoll.runtime.executor import Execution
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import Link
from mpicoll.runtime.opened import Opened
from mpicoll.runtime.plan import EMPTY, Plan, recipe
from mpicoll.runtime.specs import (
    parse_recv,
    parse_recv_v,
    parse_recv_w,
    parse_send,
    parse_send_v,
    parse_send_w,
)
from mpicoll.runtime.tags import code_of
from mpicoll.schedule.partition import offsets
from mpicoll.selection.choose import Choice, Wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ONE_BYTE = Sides(np.zeros(1, np.uint8), EMPTY)


class Movement(Base):
    """The collectives that move data; mixed into `mpicoll.Comm`."""

    def _bcast(
        self, opened: Opened, buf: Any, root: int = 0, **options: Unpack[Options]
    ) -> Planning:
        """Send the root's buffer to all ranks."""
        root = check_root(opened.link, root)
        load = finish = None
        found = plain(buf, written=True)
        if found is not None:
            data = found[1]
        elif opened.link.rank == root:
            buffer = parse_send(buf)
            opened.hold(buffer)
            data, load = buffer.source()
            if not data.flags.writeable:  # some algorithms write the root's own bytes to itself
                data, load = buffer.source(copied=True)
        else:
            buffer = parse_recv(buf)
            opened.hold(buffer)
            data, _, finish = buffer.target()
        choice = _choose(opened.link, "bcast", options, data.size)
        sides = Sides(EMPTY, data, load, finish)
        return _moved(opened, choice, (data.size,), root, sides)

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
        root = check_root(opened.link, root)
        recv = parse_recv(recvbuf, blocks=opened.link.size) if opened.link.rank == root else None
        sides = self._gather_sides(opened, sendbuf, recv, root)
        size = opened.link.size
        choice = _choose(opened.link, "gather", options, nbytes=sides.source.size * size)
        counts = (sides.source.size,) * size
        if recv is not None:
            _own_fits(sides.source.size, recv.block_bytes[root])
            counts = recv.block_bytes
        return _moved(opened, choice, counts, root, sides)

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
        root = check_root(opened.link, root)
        recv = parse_recv_v(recvbuf, opened.link.size) if opened.link.rank == root else None
        sides = self._gather_sides(opened, sendbuf, recv, root)
        choice = _choose(opened.link, "gather", options)
        counts = yield from self._known_counts(opened, choice, sides.source.size)
        expected = None
        if recv is not None:
            _own_fits(sides.source.size, recv.block_bytes[root])
            counts = expected = recv.block_bytes
        plan = _moved(opened, choice, counts, root, sides)
        plan.pairs = self._pairs(sides.source.size, root, expected)
        return plan

    Gatherv, Igatherv, Gatherv_init = forms(_gatherv)

    def _gather_sides(self, opened: Opened, sendbuf: Any, recv: Buffer | None, root: int) -> Sides:
        """Return the sides of a gather; only the root has a ``recv``."""
        if recv is not None:
            return _block_sides(opened, sendbuf, recv, root)
        send = parse_send(sendbuf)
        opened.hold(send)
        source, load = send.source()
        return Sides(source, EMPTY, load)

    def _scatter(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        **options: Unpack[Options],
    ) -> Planning:
        """Hand each rank its block of the root's buffer."""
        root = check_root(opened.link, root)
        send = parse_send(sendbuf, blocks=opened.link.size) if opened.link.rank == root else None
        sides = self._scatter_sides(opened, send, recvbuf, root)
        size = opened.link.size
        choice = _choose(opened.link, "scatter", options, nbytes=sides.target.size * size)
        counts = (sides.target.size,) * size
        if send is not None:
            counts = send.block_bytes
            _own_fits(counts[root], sides.target.size)
        return _moved(opened, choice, counts, root, sides)

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
        root = check_root(opened.link, root)
        send = parse_send_v(sendbuf, opened.link.size) if opened.link.rank == root else None
        sides = self._scatter_sides(opened, send, recvbuf, root)
        choice = _choose(opened.link, "scatter", options)
        counts = yield from self._known_counts(opened, choice, sides.target.size)
        sent = None
        if send is not None:
            counts = sent = send.block_bytes
            _own_fits(counts[root], sides.target.size)
        plan = _moved(opened, choice, counts, root, sides)
        pairs = self._pairs(sides.target.size, root, sent)
        plan.pairs = pairs and pairs[::-1]
        return plan

    Scatterv, Iscatterv, Scatterv_init = forms(_scatterv)

    def _scatter_sides(
        self, opened: Opened, send: Buffer | None, recvbuf: Any, root: int
    ) -> Sides:
        """Return the sides of a scatter; only the root has a ``send``."""
        recv = None if send is not None and in_place(recvbuf) else parse_recv(recvbuf)
        source, load = EMPTY, None
        stays = send is not None and (recv is None or check_aliasing(recv, send, root))
        opened.hold(send, recv)
        if send is not None:
            source, load = send.source()
        if send is not None and stays:
            # The root's own block stays where it is; nothing is written to the target.
            low = offsets(send.block_bytes)[root]
            return Sides(source, source[low : low + send.block_bytes[root]], load, alias=-low)
        assert recv is not None
        target, _, finish = recv.target()
        return Sides(source, target, load, finish)

    def _known_counts(
        self, opened: Opened, choice: Choice, own: int
    ) -> Generator[Execution, None, tuple[int, ...]]:
        """Return what a schedule of a rooted v-collective must know of the counts."""
        if choice.algorithm.knows == "counts":
            return (yield from self._agree(own, opened))
        link = opened.link
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
        size, pair = opened.link.size, plain_pair(sendbuf, recvbuf)
        if pair is not None:
            _, source, target, same = pair
            if not same and source.size * size == target.size:
                choice = _choose(opened.link, "allgather", options, target.size)
                return _moved(opened, choice, (source.size,) * size, 0, Sides(source, target))
        recv = parse_recv(recvbuf, blocks=size)
        return self._gathered_by_all(opened, sendbuf, recv, options)

    Allgather, Iallgather, Allgather_init = forms(_allgather)

    def _allgatherv(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Collect blocks of any length on all ranks."""
        recv = parse_recv_v(recvbuf, opened.link.size)
        return self._gathered_by_all(opened, sendbuf, recv, options)

    Allgatherv, Iallgatherv, Allgatherv_init = forms(_allgatherv)

    def _gathered_by_all(
        self, opened: Opened, sendbuf: Any, recv: Buffer, options: Options
    ) -> Plan:
        link = opened.link
        sides = _block_sides(opened, sendbuf, recv, link.rank)
        # All ranks pass equal receive counts, in both forms, by the standard.
        choice = _choose(link, "allgather", options, nbytes=sides.target.size)
        _own_fits(sides.source.size, recv.block_bytes[link.rank])
        return _moved(opened, choice, recv.block_bytes, 0, sides)

    def _alltoall(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Send block d of every rank to rank d, into the block of the sender."""
        recv = parse_recv(recvbuf, blocks=opened.link.size)
        send = None if in_place(sendbuf) else parse_send(sendbuf, blocks=opened.link.size)
        return self._exchanged(opened, send, recv, options, uniform=True)

    Alltoall, Ialltoall, Alltoall_init = forms(_alltoall)

    def _alltoallv(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Exchange blocks of any length."""
        recv = parse_recv_v(recvbuf, opened.link.size)
        send = None if in_place(sendbuf) else parse_send_v(sendbuf, opened.link.size)
        return self._exchanged(opened, send, recv, options, uniform=False)

    Alltoallv, Ialltoallv, Alltoallv_init = forms(_alltoallv)

    def _alltoallw(
        self, opened: Opened, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]
    ) -> Planning:
        """Exchange blocks of any length and datatype."""
        recv = parse_recv_w(recvbuf, opened.link.size)
        send = None if in_place(sendbuf) else parse_send_w(sendbuf, opened.link.size)
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
        link = opened.link
        if send is not None and check_aliasing(send, recv):
            send = None
        opened.hold(send, recv)
        source, load = recv.source(copied=True) if send is None else send.source()
        sends = recv.block_bytes if send is None else send.block_bytes
        nbytes = source.size if uniform else None
        choice = _choose(link, "alltoall", options, nbytes, uniform)
        _own_fits(sends[link.rank], recv.block_bytes[link.rank])
        target, _, finish = recv.target()
        sides = Sides(source, target, load, finish)
        if choice.algorithm.knows == "transit":
            return self._exchanged_by_route(opened, choice, sends, sides, recv.block_bytes)
        plan = _moved(opened, choice, sends, 0, sides, recv.block_bytes)
        if not uniform:
            plan.pairs = sends, recv.block_bytes
        return plan

    def _exchanged_by_route(
        self,
        opened: Opened,
        choice: Choice,
        sends: tuple[int, ...],
        sides: Sides,
        receives: tuple[int, ...],
    ) -> Generator[Execution, None, Plan]:
        """Send the sizes of the blocks along the route that the blocks will take."""
        link = opened.link
        schedule = transit_schedule(link.rank, link.size)
        items = sum(recv.span.count for step in schedule.steps for recv in step.recvs)
        received = np.empty(items, np.int64)
        sizes = np.array(sends, np.int64)
        yield from link.exchange(
            schedule,
            opened.tag(code_of(opened.record.collective, "transit")),
            sizes.view(np.uint8),
            received.view(np.uint8),
            opened.record,
            "two_phase_bruck",
        )
        transit = transit_from(link.size, received.tolist())
        plan = _moved(opened, choice, sends, 0, sides, receives, transit)
        plan.pairs = sends, receives
        return plan

    def _barrier(self, opened: Opened, **options: Unpack[Options]) -> Planning:
        """Wait until all ranks have entered."""
        return _moved(opened, _choose(opened.link, "barrier", options), (1,), 0, _ONE_BYTE)

    Barrier, Ibarrier, Barrier_init = forms(_barrier)

    def barrier(self) -> None:
        """Wait until all ranks have entered."""
        self.Barrier()


def _choose(
    link: Link,
    collective: str,
    options: Options,
    nbytes: int | None = None,
    uniform: bool = True,
) -> Choice:
    wanted = Wanted(collective, link.size, nbytes, True, False, uniform)
    if not options:
        return link.choose(wanted)
    return link.choose(wanted, options.get("algorithm"), options.get("segment"))


def _moved(
    opened: Opened,
    choice: Choice,
    counts: tuple[int, ...],
    root: int,
    sides: Sides,
    recv_counts: tuple[int, ...] = (),
    transit: tuple[tuple[int, ...], ...] = (),
) -> Plan:
    """Return the plan of a call whose elements are bytes."""
    link = opened.link
    found = recipe(
        choice.algorithm,
        choice.segment_bytes,
        link.rank,
        link.size,
        counts,
        root,
        1,
        "",
        recv_counts,
        choice.radix,
        transit,
    )
    source, target, load, finish, alias = sides
    return Plan(
        found,
        opened.tag(found.code),
        source,
        target,
        None,
        alias,
        (load,),
        (finish,),
        count=source.size or target.size,
        lane=opened.lane,
    )


def _block_sides(opened: Opened, sendbuf: Any, recv: Buffer, block: int) -> Sides:
    """Return the sides where the send side is one block.

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
        return Sides(source, target, load, finish)
    low = offsets(recv.block_bytes)[block]
    nbytes = recv.block_bytes[block]
    if finish is None:
        return Sides(target[low : low + nbytes], target, alias=low)
    source, load = recv.source()
    return Sides(source[low : low + nbytes], target, load, finish)


def _own_fits(sent: int, received: int) -> None:
    """Refuse a block that a rank sends to itself and expects in another size."""
    if sent != received:
        raise CallError(
            MPI.ERR_TRUNCATE,
            f"this rank's own block has {sent} bytes on the send side and {received} on the "
            "receive side",
        )
