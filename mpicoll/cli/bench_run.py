"""One size of a benchmark: all contenders by turns, and what is read from their times.

Loads mpi4py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from mpicoll.algorithms import find
from mpicoll.cli import timing
from mpicoll.cli.bench_limit import share
from mpicoll.cli.bench_report import again
from mpicoll.cli.bench_rivals import Rival, ours
from mpicoll.cli.cases import Case, Shape, bus_factor, even
from mpicoll.cli.memory import HOST, Memory
from mpicoll.cli.timing import Contender, Measured
from mpicoll.cli.world import native
from mpicoll.comm import Comm
from mpicoll.selection.choose import Wanted, unfit


@dataclass(frozen=True, slots=True)
class Race:
    """What all sizes share."""

    form: str
    dtype: str
    seconds: float
    repeats: int
    memory: Memory = HOST


def item_of(dtype: str) -> np.dtype[Any]:
    """Return the dtype of a name; NumPy itself has no bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def shapes(collective: str, size: int, sizes: Sequence[int], dtype: str) -> list[Shape]:
    """Return what is timed; sizes that blocks of equal length make the same are one."""
    wanted = (0,) if collective == "barrier" else sizes
    item = item_of(dtype)
    return list(dict.fromkeys(even(collective, size, nbytes, item) for nbytes in wanted))


def taking_part(
    comm: Comm, shape: Shape, rivals: Sequence[Rival], race: Race
) -> tuple[list[Rival], list[str]]:
    """Return the rivals that have this collective, and why the others do not."""
    case = Case(comm, shape, race.memory)
    refusals = [rival.refusal(case, race.form) for rival in rivals]
    kept = [rival for rival, words in zip(rivals, refusals, strict=True) if not words]
    return kept, [words for words in refusals if words]


def measure(
    comm: Comm,
    shape: Shape,
    algorithms: Sequence[str],
    rivals: Sequence[Rival],
    race: Race,
    limit: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Time everything for one size; return a row per contender, alike on all ranks."""
    case = Case(comm, shape, race.memory)
    labels = {}
    with ExitStack() as stack:
        contenders = [one for rival in rivals for one in _twice(rival, case, race.form, stack)]
        for name in algorithms:
            if name != "auto" and unfit(
                find(shape.collective, name), Wanted(shape.collective, comm.size)
            ):
                continue
            contenders.append(ours(comm, case, name, race.form, stack))
            labels[name] = name if name != "auto" else f"auto: {_automatic(comm, case)}"
        measured = timing.race(native(comm), contenders, race.seconds, race.repeats, race.memory)
    return [
        _row(shape, comm.size, item, labels.get(item.name, item.name), limit)
        | {"against": _against(item, measured, [rival.name for rival in rivals])}
        for item in measured
    ]


def _twice(rival: Rival, case: Case, form: str, stack: ExitStack) -> list[Contender]:
    """Return a rival and the same once more: their ratio is the noise."""
    first, second = (rival.contender(case, form, stack) for _ in range(2))
    return [first, replace(second, name=again(rival.name))]


def _row(
    shape: Shape, size: int, item: Measured, label: str, limit: Mapping[str, Any]
) -> dict[str, Any]:
    times = item.summary()
    algbw = shape.nbytes / times["median"]
    busbw = algbw * bus_factor(shape.collective, size)
    kind, part = share(shape.collective, busbw, limit)
    return {
        "collective": shape.collective,
        "bytes": shape.nbytes,
        "algorithm": label,
        "rounds": int(item.seconds.size),
        "seconds": times,
        "algbw": algbw,
        "busbw": busbw,
        "limit": kind,
        "share": part,
        "fault": item.fault,
    }


def _against(
    item: Measured, measured: Sequence[Measured], rivals: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the ratio to each other rival, with its interval and what is to be said of it."""
    times = {one.name: one.seconds for one in measured}
    found = {}
    for name in rivals:
        if item.name == name:
            continue
        interval = timing.spread_of_median(item.seconds, times[name])
        noise = timing.spread_of_median(times[again(name)], times[name])
        found[name] = {
            "ratio": timing.ratio(item.seconds, times[name]),
            "interval": interval,
            "verdict": timing.verdict(interval, noise),
        }
    return found


def _automatic(comm: Comm, case: Case) -> str:
    """Run one call without a name and see in the counters which algorithm ran."""
    comm.stats.reset()
    case.invoke(comm)
    return next(
        (name for collective, name in comm.stats if collective == case.shape.collective), "?"
    )
