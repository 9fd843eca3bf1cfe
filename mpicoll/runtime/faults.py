"""MPI errors that say what was wrong, not only their class."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from mpicoll.errors import MpicollError

#: Ranks that messages name one by one.
SHOWN = 16


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN])
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


def words(error: BaseException) -> str:
    """Return class and words of an error, whatever those of a user's own do."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class CallError(MPI.Exception):
    """An `MPI.Exception` with a sentence: caught as mpi4py's own, read as a help.

    Every check that mpi4py answers with an `MPI.Exception` raises this one, with the
    same error class, before anything is sent.
    """

    def __new__(cls, error_class: int, message: str) -> CallError:
        """Make the exception as mpi4py would, from the error class alone."""
        return super().__new__(cls, error_class)

    def __init__(self, error_class: int, message: str) -> None:
        super().__init__(error_class)
        self.message = message

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.message}"

    def __reduce__(self) -> tuple[type[CallError], tuple[int, str]]:
        return type(self), (self.Get_error_class(), self.message)


def located(error: BaseException, name: str, rank: str) -> BaseException:
    """Return an error with the method and the rank in what it says; keep the class."""
    where = f"{name} on rank {rank}"
    if isinstance(error, CallError):
        return CallError(error.Get_error_class(), f"{where}: {error.message}")
    if isinstance(error, (BufferError, KeyError, MpicollError, TypeError, ValueError)):
        what = str(error.args[0] if error.args else error)
        if not what.startswith(where):  # an operator may raise the same one again
            error.args = (f"{where}: {what}",)
    return error
