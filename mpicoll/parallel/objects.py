"""Configuration and seeds: the same on all ranks, and random numbers that are each rank's own."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.parallel.agreement import wrapped

_T = TypeVar("_T")

#: As many bits as NumPy draws itself for a SeedSequence.
_SEED_BITS = 128


def broadcast_object(value: _T, comm: MPI.Intracomm | None = None, root: int = 0) -> _T:
    """Return the root's object on all ranks: configuration, a vocabulary, what can be pickled.

    What other ranks pass is ignored; on the root the object itself comes back, elsewhere a
    copy. Arrays in it are pickled as their library does it: CuPy's by way of the host, to the
    current device of each rank. Collective: a broadcast of 8 bytes, then one of the pickle, of
    any length. Raises ValueError on every rank if the root's object can not be pickled.
    """
    given = wrapped(comm)
    data, failure = b"", ""
    if given.rank == root:
        try:
            data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever the object's own code raises
            failure = f"{type(value).__name__} can not be pickled: {error}"
            data = failure.encode(errors="replace")
    # Below zero: what follows are words on why it can not be done.
    length = np.array([-len(data) if failure else len(data)], np.int64)
    given.Bcast(length, root)
    buffer = np.frombuffer(bytearray(data), np.uint8) if data else np.empty(0, np.uint8)
    if given.rank != root:
        buffer = np.empty(abs(int(length[0])), np.uint8)
    given.Bcast(buffer, root)
    if length[0] < 0:
        raise ValueError(
            f"broadcast_object on rank {given.rank}: on rank {root}, "
            f"{buffer.tobytes().decode()}; pass what pickle takes"
        )
    if given.rank == root:
        return value
    result: _T = pickle.loads(buffer.tobytes())
    return result


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seed that all ranks share, and random streams that follow from it.

    Two calls with the same ``stream`` give generators that begin alike; streams of different
    numbers are independent. The stream of a rank does not depend on how many ranks there are.
    """

    seed: int
    rank: int

    def shared(self, stream: int = 0) -> np.random.Generator:
        """Return a generator that gives the same numbers on all ranks: shuffles, first weights."""
        return self._generator(0, stream, 0)

    def own(self, stream: int = 0) -> np.random.Generator:
        """Return a generator whose numbers are this rank's alone: dropout, augmentation."""
        return self._generator(1, stream, self.rank)

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))


def share_seed(seed: int | None = None, comm: MPI.Intracomm | None = None, root: int = 0) -> Seeds:
    """Return the root's seed on all ranks; None there draws one from the machine's entropy.

    What other ranks pass is ignored. Collective, as `broadcast_object`. Raises ValueError on
    every rank if the root's seed is not an integer of at least 0. Streams are NumPy's, which may
    change them between its versions.
    """
    given = wrapped(comm)
    if given.rank == root and seed is None:
        drawn = np.random.SeedSequence().generate_state(_SEED_BITS // 32)
        seed = int.from_bytes(drawn.astype("<u4").tobytes(), "little")
    agreed: object = broadcast_object(seed, given, root)
    if not isinstance(agreed, int | np.integer) or agreed < 0:
        raise ValueError(
            f"share_seed on rank {given.rank}: rank {root} has seed {agreed!r}; expected an "
            "integer, 0 or more, or None"
        )
    return Seeds(int(agreed), given.rank)
