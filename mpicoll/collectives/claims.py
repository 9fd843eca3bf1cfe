"""What the ranks compare of a checked call before it is planned."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

from mpi4py import MPI

from mpicoll.collectives.words import keywords
from mpicoll.runtime.agreement import DATATYPE
from mpicoll.runtime.datatypes import element_name
from mpicoll.runtime.operators import operator_name


def in_place(buffer: object) -> bool:
    """Whether a buffer argument says in place; mpi4py takes None for that, too."""
    return buffer is None or buffer is MPI.IN_PLACE


def claims(
    called: str,
    planner: Callable[..., Any],
    args: Any,
    options: dict[str, Any],
    time_limit: float | None,
) -> dict[str, str]:
    """Return the arguments that all ranks must pass alike, in words."""
    given = {"call": called, "time limit": "none" if time_limit is None else "given"}
    try:
        bound = _signature(planner).bind(None, None, *args, **options)
    except TypeError:
        return given  # the planner raises it again, where it is handled
    bound.apply_defaults()  # whoever leaves an argument out passes it
    for name in ("root", "op", *keywords(planner)):
        value = bound.arguments.get(name, options.get(name))
        if value is not None and name != "timeout":
            given[name] = operator_name(value) if name == "op" else _word(value)
    # Those of a reduction are compared in the plan; each pair of ranks may have a type of its own.
    if "op" not in given and not called.startswith(("Alltoallv", "Alltoallw")):
        # The first one counts on all ranks.
        scatters = "scatter" in called.lower()
        names = ("recvbuf", "sendbuf") if scatters else ("buf", "sendbuf", "recvbuf")
        buffers = [bound.arguments.get(name) for name in names]
        given[DATATYPE] = next((element_name(one) for one in buffers if not in_place(one)), "")
    return given


_signature = cache(inspect.signature)  # which takes microseconds


def _word(value: object) -> str:
    """Return what an argument means, in the same word for integers of any type."""
    with contextlib.suppress(Exception):
        return str(index(value))  # type: ignore[arg-type]
    with contextlib.suppress(Exception):
        return str(value)
    return type(value).__name__
