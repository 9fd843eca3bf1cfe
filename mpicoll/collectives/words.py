"""What the methods of collectives are made of beside their planners: keywords and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypedDict

from mpicoll.selection.choose import OrderWish


class Options(TypedDict, total=False):
    """The keywords that mpicoll adds to a collective.

    ``algorithm`` names one; ``segment`` is the most bytes of a pipelined piece, 0 for no
    cutting; ``timeout`` is the time limit in seconds, 0 for none, in place of the
    communicator's.
    """

    algorithm: str | None
    segment: int | None
    timeout: float | None


class OrderedOptions(Options, total=False):
    """Those of a reduction.

    ``order`` "rank" gives the bits of a sum from rank 0 to the last. ``accumulate``
    "native" lets sums of 16-bit floats be rounded at each hop, for speed; else they are
    accumulated in float32. ``compress`` "bf16" or "fp16" lets float32 travel as 16-bit
    floats, accumulated in float32: half the bytes, and rounded twice (see
    docs/explanation/half-precision.md for the bound).
    """

    order: OrderWish
    accumulate: str | None
    compress: str | None


def documentation(text: str, known: tuple[str, ...]) -> str:
    """Return a docstring with what the keywords mean."""
    lines = [f"- ``{name}``: {_MEANINGS[name]}" for name in known]
    return "\n".join(
        [
            inspect.cleandoc(text),
            "",
            "Arguments are mpi4py's. The keywords must be the same on all ranks:",
            "",
            *lines,
            "",
            _ERRORS,
        ]
    )


HELD = (
    "All ranks start the calls on a communicator in the same order. The buffers belong to the\n"
    "call until it is complete.",
    "All ranks prepare calls in the same order, and may start them in any. The buffers belong to\n"
    "the request until its `Free`, which gives back what it holds.",
)
ORDER = (
    "Operands of an operator that does not commute are taken in rank order, those of another one\n"
    "in an order that the algorithm, the counts and the number of ranks decide: the same at each\n"
    "call (docs/explanation/order.md)."
)
_ERRORS = (
    "Arguments that do not fit raise what mpi4py raises, before anything is sent. PeerError is\n"
    "raised where another rank has given the call up, ShortMessageError where ranks that\n"
    "disagree on counts have met, MismatchError where they disagree and calls are checked,\n"
    "CollectiveTimeout when a time limit is over, and then PoisonedError by every call on the\n"
    "communicator."
)


_MEANINGS = {
    "algorithm": "one of those in docs/reference/algorithms.md, with their steps, bytes and "
    "sources; AlgorithmError if there is none of that name or it does not fit the call",
    "segment": "the most bytes of a pipelined piece, 0 for no cutting",
    "timeout": "seconds after which CollectiveTimeout is raised, 0 for none",
    "order": '"rank" gives the bits of a reduction from rank 0 to the last',
    "accumulate": '"native" rounds sums of 16-bit floats at each hop, for speed',
    "compress": '"bf16" or "fp16" lets float32 travel at half its size; the error is about 2 u of '
    "the sum of magnitudes, u = 2**-8 or 2**-11 (docs/explanation/half-precision.md)",
}


@cache
def keywords(planner: Callable[..., Any]) -> tuple[str, ...]:
    """Return the keywords that a planner takes behind its arguments."""
    annotation = planner.__annotations__.get("options", "")
    kind = OrderedOptions if "Ordered" in str(annotation) else Options
    return tuple(kind.__annotations__)


def signature_of(planner: Callable[..., Any], known: tuple[str, ...]) -> inspect.Signature:
    """Return what `help` shows: mpi4py's arguments, then the keywords."""
    arguments = [
        one
        for one in inspect.signature(planner).parameters.values()
        if one.name not in ("opened", "options")
    ]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in known
    ]
    return inspect.Signature([*arguments, *keywords])
