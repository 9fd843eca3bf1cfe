"""Saved shards of arrays of the device: the files of the host, loaded on either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharding_cases as cases
from deferred import BACKEND
from mpi4py import MPI
from sharded_there import (
    COMM,
    EVERY,
    PLACES,
    RANK,
    SIZE,
    Arrays,
    Names,
    Training,
    by_protocol,
    by_stage,
    grads,
    in_places,
    on_host,
)

from mpicoll.parallel import SavedStateError, sharded_load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of rank 0, which all ranks use."""
    return COMM.bcast(tmp_path, root=0)


def stored(path: Path) -> dict[str, Any]:
    """Return all that is in the files of a state, but what is drawn anew for each."""
    archives = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    found: dict[str, Any] = {}
    for number, archive in enumerate(archives):
        with np.load(archive, allow_pickle=False) as arrays:
            for key in arrays.files:
                if key != "manifest":
                    found[f"{number}/{key}"] = on_host({key: arrays[key]})
                    continue
                found[key] = json.loads(arrays[key].tobytes())
    if path.is_dir():
        body = json.loads((path / "manifest.json").read_text())
        found["manifest"] = {k: v for k, v in body.items() if "digest" not in k and k != "token"}
    return found


by_form = pytest.mark.parametrize("whole", [False, True], ids=["shards", "file"])


@by_protocol
@by_form
@in_places
@by_stage
def test_files_are_those_of_the_host(
    folder: Path, stage: int, where: str, whole: bool, pointers: bool
) -> None:
    """Saved here, loaded there, at all ranks and at one: the same bits, also a step later."""
    BACKEND.use("late", pointers)
    ways: list[tuple[Names, Path]] = [(PLACES[where], folder / "there.npz")]
    ways.append(((), folder / "here.npz"))
    if not whole:
        ways = [(names, path.with_suffix("")) for names, path in ways]
    ends = []
    for names, path in ways:
        one = Training(stage, names)
        with one.sharded as sharded:
            for step in range(2):
                one.hand_over(alike(step))
                sharded.step()
            sharded.save(path, whole=whole)
            one.hand_over(alike(2))
            sharded.step()
            ends.append(one.values())
    assert ends[0] == ends[1]
    if where != "some":  # which is cut into other groups
        assert stored(ways[0][1]) == stored(ways[1][1])
    COMM.Barrier()
    for names, path in ((ways[0][0], ways[1][1]), (ways[1][0], ways[0][1])):
        for comm in (COMM, MPI.COMM_SELF):
            one = Training(stage, names, comm, seed=2)
            with one.sharded as sharded:
                sharded.load(path)
                assert sharded.steps == 2
                one.hand_over(alike(2))
                sharded.step()
                assert one.values() == ends[0]


def alike(step: int) -> Arrays:
    """Return gradients that all ranks have, with sums that are exact at any number of them."""
    return cases.gradients(cases.flat(cases.layers()), 0, step, whole=True)


def test_a_device_that_is_full_leaves_all_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, when what was loaded is brought to it; all ranks hear of it."""
    BACKEND.use("late", True)
    one = Training(2, EVERY)
    with one.sharded as sharded:
        sharded.save(folder / "state")
        one.hand_over(grads(0))
        sharded.step()
        before = one.values()

        def full(*_: Any) -> None:
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            if RANK == SIZE - 1:
                patch.setattr(sharded_load, "beside", full)
            with pytest.raises(SavedStateError, match=f"rank {SIZE - 1}: MemoryError: out of mem"):
                sharded.load(folder / "state")
        assert (one.values(), sharded.steps) == (before, 1)
