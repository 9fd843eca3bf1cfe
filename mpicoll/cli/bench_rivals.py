"""Who is compared in a benchmark, and the three forms of a call. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mpicoll.cli.cases import Case
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender
from mpicoll.cli.world import native
from mpicoll.comm import Comm
from mpicoll.schedule.contracts import REDUCTIONS

#: What mpi4py and MPI raise, before anything is sent, for what they do not have.
_REFUSALS = (BufferError, KeyError, NotImplementedError, TypeError, ValueError, MPI.Exception)

_HIGHEST = 6  #: of an element of a case: i % 5 + r % 3


#: Faults of an MPI itself that end the job, seen with its native calls alone.
_BROKEN = {
    ("Intel MPI", "persistent", "scatter"): "its second Start fails on the root, the others wait",
}


class Rival(Protocol):
    """What ours is compared with."""

    name: str

    def refusal(self, case: Case, form: str) -> str:
        """Return why it takes no part, equal on all ranks, or an empty string. Collective."""

    def contender(self, case: Case, form: str, stack: ExitStack) -> Contender:
        """Return its call; what has to be freed after goes on the stack. Collective."""


def afterwards(stack: ExitStack, action: Callable[[], object]) -> None:
    """Run ``action`` when the stack ends, but not while an error unwinds it.

    Many of them wait for the other ranks, and a rank that has failed has to end the job first.
    """

    def at_the_end(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            action()

    stack.push(at_the_end)


def started(
    comm: MPI.Intracomm, case: Case, form: str, stack: ExitStack, **keywords: Any
) -> Callable[[], object]:
    """Return one call of the collective in its blocking, non-blocking or persistent form."""
    collective, arguments = case.shape.collective, _as_bytes_where_unknown(comm, case)
    if form == "blocking":
        return partial(getattr(comm, collective.capitalize()), *arguments, **keywords)
    if form == "nonblocking":
        start = getattr(comm, f"I{collective}")
        return lambda: start(*arguments, **keywords).Wait()
    plan = getattr(comm, f"{collective.capitalize()}_init")(*arguments, **keywords)
    afterwards(stack, plan.Free)

    def run() -> None:
        plan.Start()
        plan.Wait()

    return run


def _as_bytes_where_unknown(comm: MPI.Intracomm, case: Case) -> list[Any]:
    """Return the arguments; where mpi4py knows no type for them and nothing is computed, bytes."""
    arguments = case.arguments
    if isinstance(comm, Comm) or case.shape.collective in REDUCTIONS:
        return arguments
    if case.shape.dtype != np.dtype(ml_dtypes.bfloat16):
        return arguments
    return [one.view(np.uint8) if hasattr(one, "dtype") else one for one in arguments]


def ours(comm: Comm, case: Case, name: str, form: str, stack: ExitStack) -> Contender:
    """Return one of our algorithms, or the automatic choice."""
    keywords = {} if name == "auto" else {"algorithm": name}
    call = started(comm, case, form, stack, **keywords)
    return Contender(name, call, case.poison, case.wrong)


class Native:
    """The collectives of the MPI itself."""

    name = "native"

    def __init__(self, comm: Comm) -> None:
        self._comm = native(comm)

    def refusal(self, case: Case, form: str) -> str:
        """Return why it takes no part: no such type, no such form."""
        if not case.memory.addressed:
            return "this MPI takes no device pointers"
        vendor, what = MPI.get_vendor()[0], f"{form} {case.shape.collective}"
        broken = _BROKEN.get((vendor, form, case.shape.collective), "")
        if broken:
            return f"{vendor}'s own {what} is broken ({broken})"
        if overflows(case, self._comm.size):
            return f"sums of {case.shape.dtype} over {self._comm.size} ranks overflow"
        fault = ""
        with ExitStack() as stack:
            try:
                started(self._comm, case, form, stack)()
            except _REFUSALS as error:
                # A BufferError is of a protocol that nobody who reads this has asked for.
                words = "" if isinstance(error, BufferError) else f" ({str(error).rstrip('.')})"
                fault = f"this MPI's own {what} does not take {case.shape.dtype}{words}"
        found: list[str] = self._comm.allgather(fault)
        return next(filter(None, found), "")

    def contender(self, case: Case, form: str, stack: ExitStack) -> Contender:
        """Return its call."""
        call = started(self._comm, case, form, stack)
        return Contender(self.name, call, case.poison, partial(near, case, self._comm.size))


def overflows(case: Case, size: int) -> bool:
    """Whether a sum leaves the range of its integers, which an MPI may do as it likes."""
    dtype = case.shape.dtype
    if case.shape.collective not in REDUCTIONS or dtype.kind not in "iu":
        return False
    return _HIGHEST * size > np.iinfo(dtype).max


def near(case: Case, size: int) -> str:
    """Return what is wrong with a rival's result, or an empty string.

    A rival may round a sum of few bits at every hop. All addends are positive, so whatever
    the order, the error of ``size - 1`` sums is at most ``(1 + u)^(size - 1) - 1`` of the
    total, and that of the rounded total that it is compared with is u: Higham, Accuracy and
    Stability of Numerical Algorithms (2002), 4.2. Where every partial sum is exact,
    all bits count.
    """
    dtype, expected = case.shape.dtype, case.expected
    reduced = case.shape.collective in REDUCTIONS and dtype.kind not in "iu"
    if expected is None or not reduced or np.dtype(dtype).kind == "c":
        return case.wrong()
    unit = 2.0**-8 if dtype == ml_dtypes.bfloat16 else float(np.finfo(dtype).eps) / 2
    if _HIGHEST * size <= 1 / unit:
        return case.wrong()
    share = (1 + unit) ** size - 1
    wanted, found = expected.astype(np.float64), case.result.astype(np.float64)
    within = np.abs(found - wanted) <= (share + unit) * np.abs(wanted)
    return "" if within.all() else case.wrong()


def open_rivals(comm: Comm, names: tuple[str, ...], stack: ExitStack) -> list[Rival]:
    """Return the rivals by their names; one that is missing is a usage error on all ranks."""
    rivals: list[Rival] = []
    for name in names:
        if name == "native":
            rivals.append(Native(comm))
        else:
            from mpicoll.cli.bench_gloo import Gloo

            rivals.append(Gloo(comm, stack))
    return rivals
