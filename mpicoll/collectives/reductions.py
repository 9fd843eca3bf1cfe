"""Collectives that reduce: reduce, allreduce, reduce-scatter, scan, exscan.

Elements of their schedules are items of the datatype, which all ranks must share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.collectives.base import Base, Planning, check_root, forms
from mpicoll.collectives.claims import in_place
from mpicoll.collectives.sides import plain, plain_pair
from mpicoll.collectives.words import Options, OrderedOptions
from mpicoll.runtime.buffers import Buffer, Chore, check_aliasing
from mpicoll.runtime.compress import compressed, expanded, wire_item
from mpicoll.runtime.datatypes import Item
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import Link
from mpicoll.runtime.opened import Opened
from mpicoll.runtime.operators import AverageOp, Reducer, reducer
from mpicoll.runtime.plan import EMPTY, Plan, recipe
from mpicoll.runtime.specs import parse_recv, parse_send
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
        root = check_root(opened.link, root)
        if opened.link.rank == root:
            return _whole(opened, "reduce", sendbuf, recvbuf, op, root, options)
        send = plain(sendbuf, written=False)
        if send is not None and options.get("compress") is None:
            return _plainly_reduced(opened, "reduce", *send, EMPTY, op, root, options)
        return _reduced(opened, "reduce", parse_send(sendbuf), None, op, root, options)

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
        return _whole(opened, "allreduce", sendbuf, recvbuf, op, 0, options)

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
        return _whole(opened, "scan", sendbuf, recvbuf, _no_average(op), 0, options)

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
        return _whole(opened, "exscan", sendbuf, recvbuf, _no_average(op), 0, options)

    Exscan, Iexscan, Exscan_init = forms(_exscan)

    def _reduce_scatter_block(
        self,
        opened: Opened,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | AverageOp = MPI.SUM,
        **options: Unpack[OrderedOptions],
    ) -> Planning:
        """Reduce the vectors of all ranks, and leave block r of the result on rank r."""
        size = opened.link.size
        if in_place(sendbuf):
            recv = parse_recv(recvbuf, blocks=size)
            return _scattered(opened, None, recv, recv.counts, op, options)
        recv = parse_recv(recvbuf)
        send = parse_send(sendbuf, blocks=size)
        _same_items(send, recv)
        if send.count != recv.count:
            raise ValueError(
                f"mismatch in send count {send.count} per block and receive count {recv.count}"
            )
        counts = send.counts
        if _in_place_by_address(send, recv):
            return _scattered(opened, None, parse_recv(sendbuf, blocks=size), counts, op, options)
        return _scattered(opened, send, recv, counts, op, options)

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
        link = opened.link
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
        return _scattered(opened, send, recv, counts, op, options)

    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(_reduce_scatter)


def _whole(
    opened: Opened,
    collective: str,
    sendbuf: Any,
    recvbuf: Any,
    op: MPI.Op | AverageOp,
    root: int,
    options: OrderedOptions | Options,
) -> Plan:
    """Plan a reduction of whole vectors on a rank that gets a result."""
    pair = plain_pair(sendbuf, recvbuf) if options.get("compress") is None else None
    if pair is not None and pair[1].size == pair[2].size:
        item, source, target, same = pair
        plan = _plainly_reduced(opened, collective, item, source, target, op, root, options)
        plan.alias = 0 if same else None
        return plan
    recv, send = _sides(sendbuf, recvbuf)
    return _reduced(opened, collective, send, recv, op, root, options)


def _plainly_reduced(
    opened: Opened,
    collective: str,
    item: Item,
    source: Bytes,
    target: Bytes,
    op: MPI.Op | AverageOp,
    root: int,
    options: OrderedOptions | Options,
) -> Plan:
    """Plan a reduction as `_reduced` does, of memory that is to be used as it is."""
    link = opened.link
    reduction = reducer(op, item, link.size)
    count = source.size // item.nbytes
    choice = _choose_reduction(link, collective, reduction, count, options)
    plan = _folded(opened, choice, (count,), root, reduction, source, target)
    plan.dtype, plan.count = item.name, count
    if reduction.finish is not None and target.size:
        plan.finishes = (_division(reduction, choice, target, link.size),)
    return plan


def _reduced(
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
    choice = _choose_reduction(link, collective, reduction, count, options)
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
    plan = _folded(opened, choice, (count,), root, reduction, source, target)
    plan.dtype, plan.count = given.item.name, count
    plan.alias = alias
    plan.loads = (load, narrow)
    if recv is not None and not (collective == "exscan" and link.rank == 0):
        plan.finishes = (_division(reduction, choice, target, link.size), widen, finish)
    return plan


def _scattered(
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
    choice = _choose_reduction(link, "reduce_scatter", reduction, sum(counts), options)
    # In place the result lies over the head of the input, which is still to be read.
    source, load = recv.source(copied=True) if send is None else send.source()
    target, keep, finish = recv.target(keep=send is None)
    own = target[: counts[link.rank] * recv.item.nbytes]
    narrow = widen = None
    if item is not recv.item:
        source, narrow = compressed(source, item)
        own, widen = expanded(own, item)
    plan = _folded(opened, choice, counts, 0, reduction, source, own)
    given = recv if send is None else send
    plan.dtype, plan.count = given.item.name, sum(given.counts)
    plan.loads = (load, narrow, keep)
    plan.finishes = (_division(reduction, choice, own, link.size), widen, finish)
    return plan


def _choose_reduction(
    link: Link,
    collective: str,
    reduction: Reducer,
    count: int,
    options: OrderedOptions | Options,
) -> Choice:
    nbytes = count * reduction.item_bytes
    size, commutative, wide = link.size, reduction.commutative, reduction.wide
    if not options:
        return link.choose(Wanted(collective, size, nbytes, commutative, wide))
    wide = wide and not _hop_by_hop(options.get("accumulate"))
    order: Any = options.get("order")
    wanted = Wanted(collective, size, nbytes, commutative, wide, order=order)
    return link.choose(wanted, options.get("algorithm"), options.get("segment"))


def _folded(
    opened: Opened,
    choice: Choice,
    counts: tuple[int, ...],
    root: int,
    reduction: Reducer,
    source: Bytes,
    target: Bytes,
) -> Plan:
    """Return the plan of a call whose elements are items."""
    link = opened.link
    found = recipe(
        choice.algorithm,
        choice.segment_bytes,
        link.rank,
        link.size,
        counts,
        root,
        reduction.item_bytes,
        reduction.label,
    )
    return Plan(found, opened.tag(found.code), source, target, reduction, lane=opened.lane)


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
