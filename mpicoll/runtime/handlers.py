"""Who handles a signal already: Python code, a C library, or nobody."""

from __future__ import annotations

import signal
from pathlib import Path


def is_free(number: int) -> bool:
    """Whether a signal has no handler but perhaps one of the MPI.

    MPICH takes SIGUSR1 to learn of dead processes; its launcher sends it only with
    ``-disable-auto-cleanup``.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    handler = _c_handler(number)
    return handler is None or Path(_library(handler)).name.startswith(("libmpi", "libpmpi"))


def _c_handler(number: int) -> int | None:
    """Return the address of the handler that a C library has installed, if any.

    Python knows only those that were there when it started and those of its own.
    """
    import ctypes

    # struct sigaction begins with the handler on Linux; the rest has less than 512 bytes.
    action = (ctypes.c_void_p * 64)()
    try:
        failed = ctypes.CDLL(None).sigaction(int(number), None, action)
    except (AttributeError, OSError):
        return None
    return None if failed else action[0]


def _library(address: int) -> str:
    """Return the file whose code is at ``address``, an empty string if that is not known."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        place, *_, file = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= address < last:
            return file
    return ""
