"""Every collective with every algorithm, datatype, operator, root and layout, held to the
native call on the same inputs.

By default the cases are a cover: any two levels of any two factors meet in one case at
least. ``--full`` takes the product of algorithm, datatype, operator, root and layout. A
test is one method with one algorithm; it runs all of its cases and then reports those
that failed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache

import pytest
from cases import algorithms, attempt, cover, product
from exchange import METHODS, Case
from harness import Ranks

from mpicoll import Comm

SHOWN = 12


@cache
def _cover(method: str, size: int, seed: int) -> list[Case]:
    return list(cover(method, size, seed))


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [(method, name) for method in METHODS for name in algorithms(method)],
)
def test_matrix(method: str, algorithm: str | None, world: Comm, ranks: Ranks, full: bool) -> None:
    every: Iterable[Case] = _cover(method, world.size, ranks.seed)
    if full:
        every = product(method, algorithm, world.size, ranks.seed)
    failures, tried, digest = [], 0, 0
    for case in every:
        if case.algorithm != algorithm:
            continue
        wrong, result = attempt(case, world, ranks.seed)
        tried += 1
        if result is not None:
            digest = zlib.crc32(result.tobytes(), digest)
        if wrong:
            failures.append(f"{case}: {wrong}")
    assert tried
    assert not failures, f"--seed={ranks.seed}: {len(failures)} of {tried} cases\n" + "\n".join(
        failures[:SHOWN]
    )
    if method == "Allreduce":
        assert len(set(ranks.comm.allgather(digest))) == 1, "the bits differ between ranks"
