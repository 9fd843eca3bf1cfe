"""What the end of a run says about time, and whether all ranks hold the same bits."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import mpicoll
from mpicoll.parallel import average_metrics
from training.clock import Split


def speed(comm: mpicoll.Comm, split: Split, samples: int, steps: int) -> dict[str, str]:
    """Return the rows about time, means over ranks, on rank 0."""
    each = 1e3 / max(1, steps)
    whole = max(split.whole, 1e-9)
    means = average_metrics(
        {
            "rate": samples / whole,
            "part": split.communication / whole,
            "whole": split.whole * each,
            "compute": split.compute * each,
            "communication": split.communication * each,
            "overlap": split.overlap * each,
        },
        comm=comm,
    )
    if means is None:
        return {}
    return {
        "samples per second": f"{means['rate']:.0f}",
        "time in communication": f"{means['part']:.0%}",
        "time per step": f"{means['whole']:.2f} ms",
        "  compute": f"{means['compute']:.2f} ms",
        "  communication": f"{means['communication']:.2f} ms",
        "  overlap": f"{means['overlap']:.2f} ms of compute with messages under way",
    }


def digest(params: dict[str, Any]) -> bytes:
    """Return a hash of every bit of the parameters."""
    return hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).digest()


def identical(comm: mpicoll.Comm, own: bytes) -> bool:
    """Return whether the digests of all ranks are the same, the same answer on each."""
    digests = np.empty((comm.size, len(own)), np.uint8)
    comm.Allgather(np.frombuffer(own, np.uint8), digests)
    return bool((digests == digests[0]).all())
