"""One case of the matrix: who passes what, one run of it, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import layouts
import numpy as np
from kinds import Bytes, Kind, Operator, Rng, kinds, noise, operands, operators
from layouts import Side
from mpi4py import MPI

from mpicoll.algorithms import find
from mpicoll.schedule.contracts import ROOTED

METHODS = {
    "Bcast": "bcast",
    "Gather": "gather",
    "Gatherv": "gather",
    "Scatter": "scatter",
    "Scatterv": "scatter",
    "Allgather": "allgather",
    "Allgatherv": "allgather",
    "Alltoall": "alltoall",
    "Alltoallv": "alltoall",
    "Alltoallw": "alltoall",
    "Reduce": "reduce",
    "Allreduce": "allreduce",
    "Reduce_scatter_block": "reduce_scatter",
    "Reduce_scatter": "reduce_scatter",
    "Scan": "scan",
    "Exscan": "exscan",
}


@dataclass(frozen=True)
class Case:
    """A combination of levels; ``number`` tells its random data from that of others."""

    method: str
    algorithm: str | None
    kind: str
    operator: str
    root: int
    send: str
    recv: str
    count: int
    segment: int | None
    order: str | None
    number: int
    form: str = "blocking"

    @property
    def collective(self) -> str:
        """The collective that the method is a form of."""
        return METHODS[self.method]

    @property
    def in_place(self) -> bool:
        """Whether one memory is both sides, where the method has that."""
        return bool({layouts.IN_PLACE, layouts.SAME} & {self.send, self.recv})

    @property
    def sequential(self) -> bool:
        """Whether the result is held to one fold from left to right.

        mpicoll's own choice is, for 16-bit types: it accumulates wider and rounds once.
        """
        return self.algorithm is None or (
            find(self.collective, self.algorithm).order == "sequential"
        )


class Exchange:
    """What all ranks pass in a case; every rank knows all of it."""

    def __init__(self, case: Case, rank: int, size: int, seed: int) -> None:
        """Draw counts and inputs, the same on all ranks."""
        self.case, self.rank, self.size = case, rank, size
        self.kind: Kind = kinds()[case.kind]
        self.operator: Operator | None = operators().get(case.operator)
        self.seed = [seed, case.number]
        rng = np.random.default_rng(self.seed)
        self.sends, self.recvs = _counts(case, size, rng)
        self.inputs = [self._input(sum(self.sends[peer]), peer, rng) for peer in range(size)]

    def _input(self, count: int, peer: int, rng: Rng) -> Bytes:
        if self.operator is None:
            return noise(self.kind, count, rng)
        return operands(self.kind, self.operator, count, peer, rng)

    # -- what comes out ---------------------------------------------------------------

    @property
    def receives(self) -> bool:
        """Whether this rank gets a result."""
        case = self.case
        if case.collective in ("gather", "reduce"):
            return self.rank == case.root
        if case.collective == "scatter" and case.in_place:
            return self.rank != case.root
        return case.collective != "exscan" or self.rank > 0

    def moved(self) -> Bytes:
        """Return what data movement has to leave in the receive buffer of this rank."""
        collective = self.case.collective
        if collective == "bcast":
            return self.inputs[self.case.root]
        if collective == "scatter":
            return self._block(self.case.root, self.rank)
        if collective == "alltoall":
            return np.concatenate([self._block(peer, self.rank) for peer in range(self.size)])
        return np.concatenate(self.inputs)

    def operands(self) -> list[Bytes]:
        """Return what is reduced to the result of this rank, in rank order."""
        collective = self.case.collective
        if collective == "reduce_scatter":
            low, high = self._own_part()
            return [one[low:high] for one in self.inputs]
        last = {"scan": self.rank + 1, "exscan": self.rank}.get(collective, self.size)
        return self.inputs[:last]

    def _block(self, peer: int, block: int) -> Bytes:
        low, high = _range(self.sends[peer], block, self.kind)
        return self.inputs[peer][low:high]

    def _own_part(self) -> tuple[int, int]:
        counts = [sum(counts) for counts in self.recvs]
        return _range(counts, self.rank, self.kind)

    # -- one run ----------------------------------------------------------------------

    def run(self, comm: MPI.Intracomm, **keywords: Any) -> Outcome:
        """Call the method; without keywords as a native method, else as ours."""
        case, rank = self.case, self.rank
        # The same layouts in every run, others on every rank.
        rng = np.random.default_rng([*self.seed, rank])
        send, recv = self._sides(rng)
        native = not keywords
        args: list[Any] = [
            self._send_spec(send, recv, native),
            self._recv_spec(send, recv, native),
        ]
        if case.collective == "bcast":
            args = [recv.spec if recv is not None else send.spec]  # type: ignore[union-attr]
        if case.method == "Reduce_scatter":
            counts = [sum(one) for one in self.recvs]
            unsaid = not native and case.number % 4 == 0 and not case.in_place
            args.append(None if unsaid else counts)
        if self.operator is not None:
            args.append(self.operator.op)
        if case.collective in ROOTED:
            args.append(case.root)
        before = None if send is None else send.memory.copy()
        self._call(comm, "blocking" if native else case.form, args, keywords)
        return Outcome(self, send, before, recv)

    def _call(
        self, comm: MPI.Intracomm, form: str, args: list[Any], keywords: dict[str, Any]
    ) -> None:
        """Call the method in one of its forms, and wait until it is complete."""
        method = self.case.method
        if form == "blocking":
            getattr(comm, method)(*args, **keywords)
            return
        if form == "non-blocking":
            request = getattr(comm, f"I{method.lower()}")(*args, **keywords)
            while self.case.number % 2 and not request.Test():
                pass
            request.Wait()
            return
        plan = getattr(comm, f"{method}_init")(*args, **keywords)
        for _ in range(1 if self.case.in_place else 2):
            plan.Start()
            plan.Wait()
        plan.Free()

    def _sides(self, rng: Rng) -> tuple[Side | None, Side | None]:
        """Make the sides that are not somebody else's memory, with the input in place."""
        case, rank = self.case, self.rank
        root, collective = rank == case.root, case.collective
        gathers, scatters = collective in ("gather", "reduce"), collective == "scatter"
        sends, receives = root or not scatters, root or not gathers or case.number % 2 == 1
        if collective == "bcast":
            sends, receives = root, not root
        shared = case.in_place and (root or not (gathers or scatters))
        send = recv = None
        if sends and (not shared or scatters):
            send = self._side(case.send, self.sends[rank], rng)
            send.put(self.inputs[rank])
        if receives and not (shared and scatters):
            whole = shared and collective == "reduce_scatter"
            recv = self._side(case.recv, (self.sends if whole else self.recvs)[rank], rng)
            if shared:
                recv.put(self.inputs[rank], self._own_place())
        return send, recv

    def _side(self, layout: str, counts: Sequence[int], rng: Rng) -> Side:
        if layout == "w":
            return layouts.side_w(self.kind, counts, rng)
        if layout in (layouts.IN_PLACE, layouts.SAME):  # of the root; this is another rank
            layout = "array" if self.kind.datatype is None else "typed"
        return layouts.side(layout, self.kind, counts, rng)

    def _own_place(self) -> int:
        """Return the byte of the receive data at which the input lies, when in place."""
        if self.case.collective in ("gather", "allgather"):
            return _range(self.recvs[self.rank], self.rank, self.kind)[0]
        return 0

    def _send_spec(self, send: Side | None, recv: Side | None, native: bool) -> Any:
        if send is not None:
            return send.spec
        if self.case.collective == "scatter":
            return None
        if self.case.send == layouts.IN_PLACE or native:
            return MPI.IN_PLACE
        assert recv is not None
        if self.case.collective in ("gather", "allgather"):
            return self._own_block(recv, self.recvs[self.rank])
        return recv.spec

    def _recv_spec(self, send: Side | None, recv: Side | None, native: bool) -> Any:
        if recv is not None:
            return recv.spec
        if self.case.collective != "scatter":
            return None
        if self.case.recv == layouts.IN_PLACE or native:
            return MPI.IN_PLACE
        assert send is not None
        return self._own_block(send, self.sends[self.rank])

    def _own_block(self, side: Side, counts: Sequence[int]) -> Any:
        """Return this rank's own block of a dense side as a buffer."""
        low, high = _range(counts, self.rank, self.kind)
        start = layouts.CANARY + low // self.kind.nbytes * self.kind.extent
        length = (high - low) // self.kind.nbytes * self.kind.extent
        memory = side.memory[start : start + length]
        if self.kind.datatype is None:
            return memory.view(self.kind.dtype)
        return [memory, self.kind.datatype]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    exchange: Exchange
    send: Side | None
    before: Bytes | None
    recv: Side | None

    def result(self) -> Bytes | None:
        """Return the dense result of this rank, if it gets one."""
        one = self.exchange
        if not one.receives:
            return None
        side = self.recv if self.recv is not None else self.send
        assert side is not None
        data = side.data()
        if one.case.collective == "reduce_scatter":
            low, high = one._own_part()
            return data[: high - low]
        return data

    def damage(self) -> str:
        """Return what was written that had to be left alone, or an empty string."""
        send, before = self.send, self.before
        if send is not None and before is not None and (send.memory != before).any():
            return "the send buffer has changed"
        if self.recv is not None:
            strayed = self.recv.strayed()
            if strayed:
                return f"{strayed} bytes beside the receive buffer have changed"
            one = self.exchange
            if not one.receives:
                # Where the first rank of an Exscan works in place, its input is to stay.
                shared = one.case.collective == "exscan" and one.case.in_place
                left = one.inputs[0] if shared else layouts.POISON
                if (self.recv.data() != left).any():
                    return "the receive buffer of a rank that gets no result has changed"
        return ""


def _range(counts: Sequence[int], block: int, kind: Kind) -> tuple[int, int]:
    ends = list(accumulate(counts, initial=0))
    return ends[block] * kind.nbytes, ends[block + 1] * kind.nbytes


def _counts(case: Case, size: int, rng: Rng) -> tuple[list[list[int]], list[list[int]]]:
    """Return the items per block that each rank sends and receives."""
    count = case.count
    uneven = [int(one) for one in rng.integers(0, 2 * count + 1, size)]
    matrix = rng.integers(0, 2 * count + 1, (size, size))
    if case.in_place:
        matrix = np.minimum(matrix, matrix.T)
    one, all_ = [[count]] * size, [[count] * size] * size
    some = [[own] for own in uneven]
    return {
        "Gather": (one, all_),
        "Gatherv": (some, [uneven] * size),
        "Scatter": (all_, one),
        "Scatterv": ([uneven] * size, some),
        "Allgather": (one, all_),
        "Allgatherv": (some, [uneven] * size),
        "Alltoall": (all_, all_),
        "Alltoallv": (matrix.tolist(), matrix.T.tolist()),
        "Alltoallw": (matrix.tolist(), matrix.T.tolist()),
        "Reduce_scatter_block": (all_, one),
        "Reduce_scatter": ([[sum(uneven)]] * size, some),
    }.get(case.method, (one, one))
