"""The algorithms by collective and name, and how builders enter them."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from mpicoll.errors import AlgorithmError
from mpicoll.schedule.check import Order
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.schedule.ir import Call, Schedule

Build: TypeAlias = Callable[[Call], Schedule]


@dataclass(frozen=True, eq=False)  # there is one of each, and it is hashed in every call
class Algorithm:
    """A named way to run a collective.

    ``order`` is the strongest promise it keeps about the order of operands; ``knows``
    says what its builder must know of other ranks' counts: "" nothing beyond the
    arguments of the collective, "counts" all counts on every rank (for rooted
    v-collectives), "transit" the counts that pass through this rank (two-phase Bruck).
    ``segmented`` algorithms heed ``Call.segment``, those with ``uniform`` set want equal
    counts.
    """

    collective: str
    name: str
    build: Build
    order: Order = "any"
    segmented: bool = False
    knows: str = ""
    uniform: bool = False

    @cached_property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def formula(self, label: str) -> str:
        """Return the formula behind ``label`` ("Steps" or "Sent") in the docstring."""
        found = re.search(rf"^{label}: ([^;\n]+)", inspect.getdoc(self.build) or "", re.MULTILINE)
        if found is None:
            raise AlgorithmError(
                f"{self.collective} {self.name}: its docstring has no line '{label}: …'"
            )
        return found[1].strip()

    def evaluate(self, label: str, **values: float) -> float:
        """Return the value of a docstring formula.

        Names: P ranks, N bytes of the vector or of all blocks together, S segments,
        R radix, ``lg`` = ceil(log2 P), ``fl`` = floor(log2 P), ``odd``
        = 1 unless P is a power of two.
        """
        size = int(values["P"])
        names: dict[str, object] = {
            "ceil": math.ceil,
            "floor": math.floor,
            "log": math.log,
            "max": max,
            "min": min,
            "range": range,
            "sum": sum,
            "lg": (size - 1).bit_length(),
            "fl": size.bit_length() - 1,
            "odd": int(size & (size - 1) != 0),
            "S": 1,
            "R": 2,
            **values,
        }
        tree = ast.parse(self.formula(label), mode="eval")
        return float(eval(compile(tree, self.name, "eval"), {"__builtins__": {}, **names}))


_ALGORITHMS: dict[str, dict[str, Algorithm]] = {name: {} for name in COLLECTIVES}


def algorithm(
    collective: str,
    name: str,
    *,
    order: Order = "any",
    segmented: bool = False,
    knows: str = "",
    uniform: bool = False,
) -> Callable[[Build], Build]:
    """Enter a builder under ``collective`` and ``name``."""

    def enter(build: Build) -> Build:
        if name in _ALGORITHMS[collective]:
            raise AlgorithmError(f"{collective} has two algorithms named {name!r}")
        _ALGORITHMS[collective][name] = Algorithm(
            collective, name, build, order, segmented, knows, uniform
        )
        return build

    return enter


def names(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms of a collective, sorted."""
    return tuple(sorted(_ALGORITHMS[collective]))


def find(collective: str, name: str) -> Algorithm:
    """Return an algorithm; an unknown name raises AlgorithmError with the known ones."""
    if collective not in _ALGORITHMS:
        raise AlgorithmError(f"no collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    try:
        return _ALGORITHMS[collective][name]
    except KeyError:
        raise AlgorithmError(
            f"{collective} has no algorithm {name!r}; known: {', '.join(names(collective))}"
        ) from None


def parse_name(collective: str, text: str) -> tuple[Algorithm, int]:
    """Return the algorithm of a name, and the radix behind it (2 where there is none)."""
    name, colon, radix = text.partition(":")
    algorithm = find(collective, name)
    if not colon:
        return algorithm, 2
    if name != "bruck" or collective != "alltoall":
        raise AlgorithmError(f"{collective} algorithm {name!r} takes no radix")
    if not radix.isdecimal() or int(radix) < 2:
        raise AlgorithmError(f"radix {radix!r} in {text!r}; expected a whole number from 2 on")
    return algorithm, int(radix)


def every() -> tuple[Algorithm, ...]:
    """Return all algorithms, by collective, then by name."""
    return tuple(
        find(collective, name) for collective in COLLECTIVES for name in names(collective)
    )
