"""Times the loops on 16-bit floats against NumPy's and ml_dtypes' own, without MPI.

    python jobs/bench_kernels.py [--elements 65536] [--rounds 200]

Prints G elements/s. The two are timed in turn, so that both see the same machine, and the
ratio is the median of the rounds' ratios. A fold counts all its operands.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpicoll import kernels

FOLDED = 8


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the time of one of ``repeats`` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def pairs(
    dtype: np.dtype[Any], count: int
) -> dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]]:
    """Return by name: elements read per operand, the library's call and ours."""
    half = kernels.half(dtype)
    assert half is not None
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(count).astype(dtype) for _ in range(FOLDED)]
    spans = [array.view(np.uint8) for array in arrays]
    out, total = np.empty(count, dtype), np.zeros(count, np.float32)
    target = out.view(np.uint8)

    def fold() -> None:
        wide = arrays[0].astype(np.float32)
        for array in arrays[1:]:
            np.add(wide, array.astype(np.float32), out=wide)
        out[:] = wide.astype(dtype)

    def mean() -> None:
        out[:] = (arrays[0].astype(np.float32) / np.float32(3)).astype(dtype)

    ufuncs = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
    found: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {}
    for op, ufunc in ufuncs.items():
        theirs = partial(ufunc, arrays[0], arrays[1], out=out)
        found[op] = (count, theirs, partial(half.reduce, op, target, spans[:2]))
    found[f"SUM of {FOLDED}, wide"] = (
        count * FOLDED,
        fold,
        lambda: half.reduce("SUM", target, spans),
    )
    found["accumulate"] = (
        count,
        lambda: np.add(total, arrays[0].astype(np.float32), out=total),
        lambda: half.accumulate(total, spans[0]),
    )
    found["divide"] = (count, mean, lambda: half.scale(target, spans[0], 3, divide=True))
    return found


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Print one line per type and operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 16)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"{processor()}; NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
    print(f"kernels: {kernels.describe()}; {options.elements} elements, G elements/s")
    print(f"{'type':9} {'operation':16} {'library':>8} {'mpicoll':>8} {'ratio':>7}")
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        for name, (count, theirs, ours) in pairs(dtype, options.elements).items():
            repeats = [max(1, int(2e-4 / seconds(call, 3))) for call in (theirs, ours)]
            times = [
                (seconds(theirs, repeats[0]), seconds(ours, repeats[1]))
                for _ in range(options.rounds)
            ]
            library, mine = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(one / other for one, other in times)
            print(
                f"{dtype.name:9} {name:16} {count / library / 1e9:8.2f} "
                f"{count / mine / 1e9:8.2f} {ratio:6.1f}×",
                flush=True,
            )


if __name__ == "__main__":
    main()
