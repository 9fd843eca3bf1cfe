"""The choice of an algorithm, from what is equal on all ranks and nothing else.

Law 1: what is looked at here is the collective, the group's size, the operator's
properties, the bytes of the type signature where the standard makes them equal on all
ranks (None where it does not), and settings that the ranks agreed on: names, the tuning
table, the rates of the machine, the memory hint.

A name decides, then the table, then the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Literal, NamedTuple, TypeAlias

from mpicoll.algorithms import Algorithm, find, names, parse_name
from mpicoll.errors import AlgorithmError
from mpicoll.selection import model
from mpicoll.selection.model import DEFAULT, Rates
from mpicoll.selection.settings import Settings
from mpicoll.selection.table import Table

#: None leaves the order to the algorithm; "rank" wants a left-to-right sum over ranks.
OrderWish: TypeAlias = Literal["rank"] | None


class Wanted(NamedTuple):
    """What a call asks for. ``nbytes`` are the bytes of the whole vector on one rank, or
    of all blocks together; None where ranks may differ.

    A tuple, since one is made and looked up at every call.
    """

    collective: str
    size: int
    nbytes: int | None = None
    commutative: bool = True
    wide: bool = False
    uniform: bool = True
    order: OrderWish = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, the most bytes of one segment (0 leaves blocks whole), Bruck's radix."""

    algorithm: Algorithm
    segment_bytes: int = 0
    radix: int = 2


def choose(
    wanted: Wanted,
    settings: Settings,
    algorithm: str | None = None,
    segment_bytes: int | None = None,
) -> Choice:
    """Return what runs: the named algorithm, else that of the settings, else `automatic`.

    Bruck's all-to-all takes a radix behind its name: "bruck:4". A named algorithm that
    cannot serve the call raises AlgorithmError. One that comes from the settings stands
    for the calls it can serve; others get the automatic choice.
    """
    if wanted.order not in (None, "rank"):
        raise AlgorithmError(f"order={wanted.order!r}; known: None, 'rank'")
    if segment_bytes is not None:
        segment_bytes = index(segment_bytes)  # NumPy's integers have other words, as in a tag
        if segment_bytes < 0:
            raise AlgorithmError(f"segment={segment_bytes}; expected 0 or more bytes")
    if algorithm is not None:
        chosen, radix = parse_name(wanted.collective, algorithm)
        objection = unfit(chosen, wanted)
        if objection:
            raise AlgorithmError(objection)
        choice = Choice(chosen, default_segment(chosen, wanted, settings.rates), radix)
    else:
        choice = _set(wanted, settings) or automatic(
            wanted, settings.tuning, settings.rates, settings.memory
        )
    if segment_bytes is None:
        return choice
    segmented = choice.algorithm.segmented
    return Choice(choice.algorithm, segment_bytes if segmented else 0, choice.radix)


def _set(wanted: Wanted, settings: Settings) -> Choice | None:
    """Return the algorithm of the settings, if one is set that can serve the call."""
    named = settings.algorithm(wanted.collective)
    if named is None:
        return None
    chosen, radix = parse_name(wanted.collective, named)
    if unfit(chosen, wanted):
        return None
    return Choice(chosen, default_segment(chosen, wanted, settings.rates), radix)


def unfit(algorithm: Algorithm, wanted: Wanted) -> str:
    """Return why ``algorithm`` cannot serve the call, or an empty string if it can."""
    name = f"{algorithm.collective} algorithm {algorithm.name!r}"
    if wanted.order == "rank" and algorithm.order != "sequential":
        fitting = _fitting(algorithm.collective, ("sequential",))
        return f"{name} does not sum from left to right over ranks; those that do: {fitting}"
    if not wanted.commutative and algorithm.order == "any":
        fitting = _fitting(algorithm.collective, ("rank", "sequential"))
        return f"{name} reorders operands and the operator does not commute; fit: {fitting}"
    if algorithm.uniform and not wanted.uniform:
        return f"{name} wants equal counts on all ranks"
    return ""


def _fitting(collective: str, orders: tuple[str, ...]) -> str:
    fit = [name for name in names(collective) if find(collective, name).order in orders]
    return ", ".join(fit) or "none"


def automatic(
    wanted: Wanted, table: Table | None = None, rates: Rates = DEFAULT, memory: str = "host"
) -> Choice:
    """Return the choice where no algorithm is named: by the table, else by the cost model.

    The table was measured on a sum of float64; a call that takes fewer algorithms, such as
    one with order="rank", gets the fastest of those.
    """
    if wanted.nbytes is None and wanted.collective in _UNKNOWN:
        return Choice(find(wanted.collective, _UNKNOWN[wanted.collective]))
    if table is not None:
        entry = table.find(wanted.collective, wanted.size, memory, wanted.nbytes or 0)
        for one in entry.ranked if entry is not None else ():
            chosen, radix = parse_name(wanted.collective, one.algorithm)
            if _serves(chosen, wanted):
                return Choice(chosen, one.segment if chosen.segmented else 0, radix)
    known = wanted._replace(nbytes=model.rounded(wanted.nbytes or 0))
    return _modelled(known, rates)


#: What runs where counts are not equal on all ranks, so that no size may decide: what needs
#: no others' counts. Of the barrier there is one.
_UNKNOWN = {"alltoall": "linear", "gather": "linear", "scatter": "linear"}


@lru_cache(maxsize=4096)
def _modelled(wanted: Wanted, rates: Rates) -> Choice:
    """Return the choice of the cost model."""
    candidates = [
        algorithm
        for algorithm in (find(wanted.collective, name) for name in _listed(wanted.collective))
        if served(algorithm, wanted)
    ]
    chosen, segment = model.best(candidates, wanted.size, wanted.nbytes or 0, rates)
    return Choice(chosen, segment)


def served(algorithm: Algorithm, wanted: Wanted) -> bool:
    """Whether the cost model looks at ``algorithm`` for a call.

    Not at those that want a round of counts before: that does not pay where counts are equal.
    """
    return _serves(algorithm, wanted) and algorithm.knows != "transit"


#: Preferred where the model finds no difference: no copies, few messages of one step.
_FIRST = (
    *("linear", "binomial", "recursive_doubling", "circulant", "bruck", "direct"),
    *("gather", "dissemination"),
)


def _listed(collective: str) -> list[str]:
    """Return the names of a collective, those first that win where times are equal."""
    known = names(collective)
    first = [name for name in _FIRST if name in known]
    if collective in ("scan", "exscan", "reduce"):  # pipelines and stars come after trees
        first.sort(key=lambda name: name == "linear")
    return first + [name for name in known if name not in first]


def _serves(algorithm: Algorithm, wanted: Wanted) -> bool:
    """Whether the automatic choice may take ``algorithm``: wide sums are rounded once."""
    if wanted.wide and algorithm.order != "sequential":
        return False
    return not unfit(algorithm, wanted)


def default(wanted: Wanted, rates: Rates = DEFAULT) -> str:
    """Return the name of the choice without a table."""
    return automatic(wanted, None, rates).algorithm.name


def default_segment(algorithm: Algorithm, wanted: Wanted, rates: Rates = DEFAULT) -> int:
    """Return the most bytes of a pipelined piece; 0 leaves blocks whole."""
    if wanted.nbytes is None:
        return SEGMENT if algorithm.segmented else 0
    nbytes = model.rounded(wanted.nbytes)
    return model.best_segment(algorithm, wanted.size, nbytes, rates)


SEGMENT = 256 * model.KIB  #: of a pipeline where the size is not known
