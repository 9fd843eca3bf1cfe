"""Samples, configuration and seeds: each sample once, the same everywhere, own streams."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.parallel import EpochSampler, broadcast_object, scatter_dataset, share_seed

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1


def all_ranks(value: Any) -> list[Any]:
    return MPI.COMM_WORLD.allgather(value)


def joined(shares: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(shares))


# -- EpochSampler -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE, SIZE + 1, 101])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_per_epoch(count: int, shuffle: bool, world: Comm) -> None:
    sampler = EpochSampler(count, world, seed=3, shuffle=shuffle)
    orders = []
    for epoch in range(3):
        shares = all_ranks(sampler.indices(epoch).tolist())
        assert sorted(joined(shares)) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert sampler.indices(epoch).tolist() == shares[RANK]
        orders.append(tuple(joined(shares)))
    if count == 101:
        assert len(set(orders)) == (3 if shuffle else 1)
        other = EpochSampler(count, world, seed=4, shuffle=shuffle)
        same = all_ranks(other.indices(0).tolist()) == all_ranks(sampler.indices(0).tolist())
        assert same != shuffle


@pytest.mark.parametrize("batch", [1, SIZE, 7, 50])
def test_batches(batch: int, world: Comm) -> None:
    """As many on all ranks, and the same samples in each as on one rank."""
    sampler = EpochSampler(23, world, seed=1)
    alone = EpochSampler(23, MPI.COMM_SELF, seed=1)
    batches = all_ranks([rows.tolist() for rows in sampler.batches(2, batch)])
    whole = [rows.tolist() for rows in alone.batches(2, batch)]
    assert {len(one) for one in batches} == {len(whole)} == {-(-23 // batch)}
    assert [joined(shares) for shares in zip(*batches, strict=True)] == whole
    assert sorted(joined(whole)) == list(range(23))


def test_wrong_samplers(world: Comm) -> None:
    for arguments, words in [
        ({"count": -1}, "count=-1; expected an integer, 0 or more"),
        ({"count": 1.5}, "count=1.5; expected an integer"),
        ({"count": 1, "seed": -2}, "seed=-2; expected an integer"),
    ]:
        with pytest.raises(ValueError, match=f"on rank {RANK}: rank {LAST} passed {words}"):
            EpochSampler(comm=world, **(arguments if RANK == LAST else {"count": 1}))
    with pytest.raises(ValueError, match=f"batches on rank {RANK}: batch 0; expected 1 or more"):
        list(EpochSampler(1, world).batches(0, 0))
    usual = {"count": 5, "seed": 1, "shuffle": True}
    for name, other in (("count", 6), ("seed", 2), ("shuffle", False)) if SIZE > 1 else ():
        arguments = usual | {name: other} if RANK == LAST else usual
        words = f"rank {LAST} has {name}={other} where rank 0 has {name}={usual[name]}"
        with pytest.raises(ValueError, match=words):
            EpochSampler(comm=world, **arguments)


# -- scatter_dataset --------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE + 1, 29])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("root", [0, LAST])
def test_scatter_dataset(count: int, seed: int | None, root: int, world: Comm) -> None:
    x = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    kinds = np.zeros(count, [("number", "i4"), ("word", "U3")])
    kinds["number"] = np.arange(count)
    half = np.arange(count).astype(ml_dtypes.bfloat16)
    dataset = [np.asfortranarray(x), np.arange(count), kinds, half, x[:, :, :0], x[:, 0] > 5]
    parts = scatter_dataset(dataset if root == RANK else None, world, root=root, seed=seed)
    assert len(parts) == len(dataset)
    labels = parts[1]
    shares = all_ranks(labels.tolist())
    assert sorted(joined(shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if seed is None:
        assert joined(shares) == list(range(count))
    elif count == 29:
        assert joined(shares) != list(range(count))
    for part, whole in zip(parts, dataset, strict=True):
        assert part.dtype == whole.dtype
        np.testing.assert_array_equal(part, whole[labels])


@pytest.mark.parametrize(
    ("arrays", "seed", "words"),
    [
        (None, None, "arrays of type NoneType; expected a list of one array or more"),
        (np.ones(3), None, "arrays of type ndarray; expected a list"),
        ([], None, "arrays of type list; expected a list of one array or more"),
        ([np.array(1)], None, "an array of type ndarray without rows"),
        ([[1, 2]], None, "an array of type list without rows"),
        ([np.ones(3), np.ones(4)], None, "3 rows in one array and 4 in another"),
        ([np.array([None])], None, "an array of dtype object; objects are not scattered"),
        ([np.ones(3)], -1, "seed=-1; expected an integer, 0 or more"),
    ],
)
def test_wrong_dataset(arrays: Any, seed: Any, words: str, world: Comm) -> None:
    with pytest.raises(ValueError, match=f"on rank {RANK}: rank {LAST} passed {words}"):
        scatter_dataset(arrays if RANK == LAST else None, world, root=LAST, seed=seed)


# -- objects and seeds ------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, LAST])
@pytest.mark.parametrize(
    "value",
    [None, {"rate": 0.5, "layers": [3, 4]}, "x" * 100_000, b""],
    ids=lambda v: type(v).__name__,
)
def test_broadcast_object(value: Any, root: int, world: Comm) -> None:
    result = broadcast_object(value if root == RANK else "ignored", world, root)
    assert result == value
    if root == RANK:
        assert result is value


def test_broadcast_object_that_can_not_be_pickled(world: Comm) -> None:
    words = f"on rank {RANK}: on rank {LAST}, function can not be pickled: .*; pass what pickle"
    with pytest.raises(ValueError, match=words):
        broadcast_object((lambda: 0) if RANK == LAST else None, world, LAST)
    assert broadcast_object(RANK, world, LAST) == LAST


def test_seeds(world: Comm) -> None:
    seeds = share_seed(7 if RANK == LAST else None, world, LAST)
    assert (seeds.seed, seeds.rank) == (7, RANK)
    draws = [
        tuple(generator.integers(1 << 62, size=4))
        for stream in (0, 1)
        for generator in (seeds.shared(stream), seeds.own(stream))
    ]
    shared, own, shared_1, own_1 = zip(*all_ranks(draws), strict=True)
    assert len({*shared}) == len({*shared_1}) == 1
    assert len({*own, *own_1, *shared, *shared_1}) == 2 * SIZE + 2
    assert tuple(seeds.own().integers(1 << 62, size=4)) == draws[1]
    # A rank's stream is its own on any number of ranks.
    alone = share_seed(7, MPI.COMM_SELF)
    assert tuple(alone.own().integers(1 << 62, size=4)) == own[0]


def test_drawn_seed(world: Comm) -> None:
    drawn = [share_seed(comm=world).seed for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert len({*map(tuple, all_ranks(drawn))}) == 1
    assert 0 <= drawn[0] < 1 << 128


@pytest.mark.parametrize("seed", [-1, 1.5, "one"])
def test_wrong_seed(seed: Any, world: Comm) -> None:
    words = f"share_seed on rank {RANK}: rank 0 has seed {seed!r}; expected an integer"
    with pytest.raises(ValueError, match=words):
        share_seed(seed if RANK == 0 else 3, world)
