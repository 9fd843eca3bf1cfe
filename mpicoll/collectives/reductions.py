"""Collectives that reduce: reduce, allreduce, reduce-scatter, scan, exscan.

Elements of their schedules are items of the datatype, which all ranks must share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.collectives.base import Base, Options, OrderedOptions, Planning, forms, in_place
from mpicoll.runtime.buffers import Buffer, Chore, check_aliasing
from mpicoll.runtime.compress import compressed, expanded, wire_item
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import Opened, programmed
from mpicoll.runtime.operators import AverageOp, Reducer, reducer
from mpicoll.runtime.plan import EMPTY, Plan
from mpicoll.runtime.specs import parse_recv, parse_send
from mpicoll.schedule.contracts import ROOTED
from mpicoll.schedule.ir import Call
from mpicoll.selection.choose import Choice, Wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Reductions(Base):
    """The collectives that reduce; mixed into `mpicoll.Comm`."""

    def _reduce(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        root: int = 0,
        **options: Unpack[OrderedOptions],
    ) -> Planning:
        """Reduce the vectors of all ranks to the root."""
        self._root(root)
        send: Buffer | None
        recv: Buffer | None
        if self._link.rank == root:
            recv, send = _sides(sendbuf, recvbuf)
        else:
            recv, send = None, parse_send(sendbuf)
        return self._reduced(opened, "reduce", send, recv, op, root, options)

    Reduce, Ireduce, Reduce_init = forms(_reduce)

    def _allreduce(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        **options: Unpack[OrderedOptions],
    ) -> Planning:
        """Reduce the vectors of all ranks, and give the result to all; same bits on all."""
        recv, send = _sides(sendbuf, recvbuf)
        return self._reduced(opened, "allreduce", send, recv, op, 0, options)

    Allreduce, Iallreduce, Allreduce_init = forms(_allreduce)

    def _scan(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        **options: Unpack[Options],
    ) -> Planning:
        """Reduce the vectors of ranks 0 to r on each rank r."""
        recv, send = _sides(sendbuf, recvbuf)
        return self._reduced(opened, "scan", send, recv, _no_average(op), 0, options)

    Scan, Iscan, Scan_init = forms(_scan)

    def _exscan(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        **options: Unpack[Options],
    ) -> Planning:
        """Reduce the vectors of ranks 0 to r - 1 on each rank r; rank 0 keeps its buffer."""
        recv, send = _sides(sendbuf, recvbuf)
        return self._reduced(opened, "exscan", send, recv, _no_average(op), 0, options)

    Exscan, Iexscan, Exscan_init = forms(_exscan)

    def _reduced(
        self,
        opened: Opened,
        collective: str,
        send: Buffer | None,
        recv: Buffer | None,
        op: MPI.Op | AverageOp,
        root: int,
        options: OrderedOptions | Options,
    ) -> Plan:
        """Plan a reduction of whole vectors; ``send`` None means in place."""
        link = opened.link
        opened.hold(send, recv)
        given = recv if send is None else send
        assert given is not None
        item = wire_item(given.item, options.get("compress")) if options else given.item
        reduction = opened.folds(reducer(op, item, link.size), options.get("compress"))
        count = sum(given.counts)
        choice = self._choose_reduction(collective, reduction, count, options)
        source, load = given.source()
        target, finish = EMPTY, None
        if recv is not None:
            target, _, finish = recv.target()
        alias = 0 if send is None and finish is None else None
        narrow = widen = None
        if item is not given.item:
            alias = None
            source, narrow = compressed(source, item)
            target, widen = expanded(target, item)
        call = Call(link.rank, link.size, (count,), root, _items(choice, reduction.item_bytes))
        plan = self._folded(opened, choice, call, given, reduction, source, target)
        plan.alias = alias
        plan.loads = (load, narrow)
        if recv is not None and not (collective == "exscan" and link.rank == 0):
            plan.finishes = (_division(reduction, choice, target, link.size), widen, finish)
        return plan

    def _reduce_scatter_block(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        **options: Unpack[OrderedOptions],
    ) -> Planning:
        """Reduce the vectors of all ranks, and leave block r of the result on rank r."""
        size = self._link.size
        if in_place(sendbuf):
            recv = parse_recv(recvbuf, blocks=size)
            return self._scattered(opened, None, recv, recv.counts, op, options)
        recv = parse_recv(recvbuf)
        send = parse_send(sendbuf, blocks=size)
        _same_items(send, recv)
        if send.count != recv.count:
            raise ValueError(
                f"mismatch in send count {send.count} per block and receive count {recv.count}"
            )
        counts = send.counts
        if _in_place_by_address(send, recv):
            return self._scattered(
                opened, None, parse_recv(sendbuf, blocks=size), counts, op, options
            )
        return self._scattered(opened, send, recv, counts, op, options)

    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms(
        _reduce_scatter_block
    )

    def _reduce_scatter(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op | AverageOp = MPI.SUM,
        **options: Unpack[OrderedOptions],
    ) -> Planning:
        """Reduce the vectors of all ranks, and leave block r, of any length, on rank r.

        Without ``recvcounts`` the ranks agree on the counts of their receive buffers.
        """
        link = self._link
        recv = parse_recv(recvbuf)
        send = None if in_place(sendbuf) else parse_send(sendbuf)
        own = recv.count
        if send is not None:
            _same_items(send, recv)
            if _in_place_by_address(send, recv):
                send, recv = None, parse_recv(sendbuf)
        elif recvcounts is None:
            raise ValueError("recvcounts is needed when the reduction is in place")
        if recvcounts is None:
            counts = yield from self._agree(own, opened)
        else:
            counts = tuple([index(count) for count in recvcounts])
        if len(counts) != link.size:
            raise ValueError(f"{len(counts)} receive counts for {link.size} ranks")
        if min(counts) < 0:
            raise CallError(MPI.ERR_COUNT, f"receive count {min(counts)} is negative")
        if own not in (counts[link.rank], sum(counts) if send is None else -1):
            expected = sum(counts) if in_place(sendbuf) else counts[link.rank]
            raise ValueError(f"mismatch in receive count {own} and {expected} by counts")
        whole = recv if send is None else send
        if whole.count != sum(counts):
            raise ValueError(f"mismatch in send count {whole.count} and {sum(counts)} by counts")
        return self._scattered(opened, send, recv, counts, op, options)

    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(_reduce_scatter)

    def _scattered(
        self,
        opened: Opened,
        send: Buffer | None,
        recv: Buffer,
        counts: tuple[int, ...],
        op: MPI.Op | AverageOp,
        options: OrderedOptions,
    ) -> Plan:
        """Plan a reduce-scatter; ``send`` None means in place."""
        link = opened.link
        opened.hold(send, recv)
        item = wire_item(recv.item, options.get("compress")) if options else recv.item
        reduction = opened.folds(reducer(op, item, link.size), options.get("compress"))
        choice = self._choose_reduction("reduce_scatter", reduction, sum(counts), options)
        # In place the result lies over the head of the input, which is still to be read.
        source, load = recv.source(copied=True) if send is None else send.source()
        target, keep, finish = recv.target(keep=send is None)
        own = target[: counts[link.rank] * recv.item.nbytes]
        narrow = widen = None
        if item is not recv.item:
            source, narrow = compressed(source, item)
            own, widen = expanded(own, item)
        call = Call(link.rank, link.size, counts, 0, _items(choice, reduction.item_bytes))
        given = recv if send is None else send
        plan = self._folded(opened, choice, call, given, reduction, source, own)
        plan.loads = (load, narrow, keep)
        plan.finishes = (_division(reduction, choice, own, link.size), widen, finish)
        return plan

    def _choose_reduction(
        self,
        collective: str,
        reduction: Reducer,
        count: int,
        options: OrderedOptions | Options,
    ) -> Choice:
        nbytes = count * reduction.item_bytes
        size, commutative, wide = self._link.size, reduction.commutative, reduction.wide
        if not options:
            return self._link.choose(Wanted(collective, size, nbytes, commutative, wide))
        wide = wide and not _hop_by_hop(options.get("accumulate"))
        order: Any = options.get("order")
        wanted = Wanted(collective, size, nbytes, commutative, wide, order=order)
        return self._link.choose(wanted, options.get("algorithm"), options.get("segment"))

    def _folded(
        self,
        opened: Opened,
        choice: Choice,
        call: Call,
        given: Buffer,
        reduction: Reducer,
        source: Bytes,
        target: Bytes,
    ) -> Plan:
        """Return the plan of a call whose elements are items."""
        algorithm = choice.algorithm
        rooted = algorithm.collective in ROOTED
        return Plan(
            algorithm,
            programmed(algorithm, call, reduction.item_bytes),
            opened.tag(
                algorithm.collective, algorithm.name, call.root, call.segment, reduction.label
            ),
            source,
            target,
            reduction,
            operator=reduction.operator,
            dtype=given.item.name,
            count=sum(given.counts),
            counts=call.counts,
            root=call.root if rooted else -1,
            segment_bytes=choice.segment_bytes,
            lane=opened.lane,
        )


def _sides(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer | None]:
    """Return receive and send side; no send side when the reduction is in place."""
    recv = parse_recv(recvbuf)
    if in_place(sendbuf):
        return recv, None
    send = parse_send(sendbuf)
    _same_items(send, recv)
    if send.count != recv.count:
        raise ValueError(f"mismatch in send count {send.count} and receive count {recv.count}")
    return recv, None if check_aliasing(send, recv) else send


def _in_place_by_address(send: Buffer, recv: Buffer) -> bool:
    """Whether a reduce-scatter is in place because both sides begin at one address."""
    if send.nbytes and recv.nbytes and send.extents()[0] == recv.extents()[0]:
        return True
    check_aliasing(send, recv)
    return False


def _same_items(send: Buffer, recv: Buffer) -> None:
    if not send.item.same(recv.item):
        raise ValueError(
            f"mismatch in send and receive MPI datatypes: {send.item.name} and {recv.item.name}"
        )


def _division(reduction: Reducer, choice: Choice, result: Bytes, size: int) -> Chore:
    """Return the division of AVG, unless the fold that all operands meet in does it."""
    folded = size == reduction.mean_of and (size == 2 or choice.algorithm.order == "sequential")
    if reduction.finish is not None and (size == 1 or not folded):
        return partial(reduction.finish, result, size)
    return None


def _hop_by_hop(accumulate: object) -> bool:
    """Whether sums of 16-bit floats may be rounded at each hop."""
    if accumulate not in (None, "native"):
        raise ValueError(f"accumulate={accumulate!r}; known: None, 'native'")
    return accumulate == "native"


def _no_average(op: MPI.Op) -> MPI.Op:
    if isinstance(op, AverageOp):
        raise CallError(MPI.ERR_OP, "AVG has no meaning for a scan; scan with SUM and divide")
    return op


def _items(choice: Choice, item_bytes: int) -> int:
    """Return the segment in items; a segment below one item is one item."""
    return max(1, choice.segment_bytes // max(1, item_bytes)) if choice.segment_bytes else 0
