"""Saved shards: the same bits at any number of ranks; what is damaged is refused on all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharding_cases as cases
from mpi4py import MPI
from sharding_cases import Arrays

from mpicoll.parallel import sharded_files, sharded_save
from mpicoll.parallel.optimizers import SGD, Adam
from mpicoll.parallel.sharding import SavedStateError, ShardedOptimizer, ShardedParameters

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
Sharded = Any


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of rank 0, which all ranks use."""
    return COMM.bcast(tmp_path, root=0)


def sizes() -> list[int]:
    """Numbers of ranks to be tried, all that this run has."""
    return sorted({1, 2, 3, 5, SIZE} & set(range(1, SIZE + 1)))


@contextmanager
def first(count: int) -> Iterator[MPI.Intracomm | None]:
    """Give the first ranks a communicator of their own, None to the others."""
    comm = COMM.Split(0 if count > RANK else MPI.UNDEFINED, RANK)
    yield None if comm == MPI.COMM_NULL else comm
    COMM.Barrier()
    if comm != MPI.COMM_NULL:
        comm.Free()


def make(stage: int, comm: MPI.Intracomm, seed: int = 1, **options: Any) -> Sharded:
    """Return the model of the cases, to be trained by Adam."""
    model = cases.layers(seed)
    optimizer = options.pop("optimizer", None) or Adam(0.01)
    options.setdefault("frozen", cases.FROZEN)
    if stage == 3:
        return ShardedParameters(model, optimizer, comm, order="rank", **options)
    return ShardedOptimizer(
        cases.flat(model), optimizer, comm, stage=stage, order="rank", **options
    )


def train(one: Sharded, steps: int) -> None:
    """Take steps with gradients that are alike on all ranks, so at all numbers of ranks."""
    params = cases.flat(cases.layers())
    for _ in range(steps):
        # Sums of whole numbers, divided by their count: exact at any number of ranks.
        given = cases.gradients(params, 0, one.steps, whole=True)
        if isinstance(one, ShardedOptimizer):
            one.step(given)
            continue
        for layer in one.layers:
            cut = len(layer) + 1
            own = {k[cut:]: g for k, g in given.items() if k.startswith(f"{layer}.")}
            one.ready(layer, own)
        one.step()


def state(one: Sharded) -> dict[str, bytes]:
    """Return the whole state, by kind and name; collective."""
    found = {}
    for kind, group, full in sharded_save._gathered(one.comm, one._parts()):
        if one.comm.rank == 0:
            for entry in group.entries:
                found[f"{kind}:{entry.name}"] = full[entry.start : entry.stop].tobytes()
    return one.comm.bcast(found, root=0)


def expected_state(steps: int) -> dict[str, bytes]:
    """Return the state of one process."""
    alone = cases.Alone(cases.flat(cases.layers()), Adam(0.01))
    for step in range(steps):
        given = cases.gradients(alone.params, 0, step, whole=True)
        alone.step({name: cases.mean([one]) for name, one in given.items()})
    found = {f"value:{name}": value.tobytes() for name, value in alone.params.items()}
    for name, work in alone.work.items():
        if alone.params[name].dtype in cases.HALVES:
            found[f"master:{name}"] = work.tobytes()
        found |= {f"{slot}:{name}": a.tobytes() for slot, a in alone.state[name].items()}
    return found


def place(folder: Path, whole: bool) -> Path:
    return folder / ("state.npz" if whole else "state")


by_form = pytest.mark.parametrize("whole", [False, True], ids=["shards", "file"])


@by_form
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_number_of_ranks_to_any_other(folder: Path, whole: bool, stage: int) -> None:
    """Saved at one size, loaded at every other: the state of one process, bit by bit."""
    expected = expected_state(3)
    after = expected_state(5)
    for saved in sizes():
        path = folder / f"{saved}{'.npz' if whole else ''}"
        with first(saved) as comm:
            if comm is not None:
                with make(stage, comm) as one:
                    train(one, 3)
                    assert state(one) == expected
                    one.save(path, whole=whole)
                    train(one, 2)
                    assert state(one) == after
        for loaded in sizes():
            with first(loaded) as comm:
                if comm is not None:
                    with make(stage, comm, seed=2) as one:
                        one.load(path)
                        assert one.steps == 3
                        assert state(one) == expected
                        train(one, 2)
                        assert state(one) == after


@by_form
def test_any_stage_and_bucket_size_to_any_other(folder: Path, whole: bool) -> None:
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"bucket_bytes": 40}), (3, {})]
    expected = expected_state(2)
    for number, (stage, options) in enumerate(ways):
        path = folder / f"{number}{'.npz' if whole else ''}"
        with make(stage, COMM, **options) as one:
            train(one, 2)
            one.save(path, whole=whole)
        for other, options in ways:
            with make(other, COMM, seed=2, **options) as one:
                one.load(path)
                assert state(one) == expected


@by_form
def test_loaded_values_are_seen(folder: Path, whole: bool) -> None:
    """In the caller's arrays on all ranks; and in a gather, whatever was prefetched."""
    expected = cases.Alone(cases.flat(cases.layers()), Adam(0.01)).params
    with make(1, COMM) as one:
        one.save(place(folder, whole), whole=whole)
    with make(1, COMM, seed=2) as one:
        one.load(place(folder, whole))
        cases.same(one.params, expected)
    with make(3, COMM, seed=2) as params:
        with params.gather("rows", prefetch="out"):
            pass
        params.load(place(folder, whole))
        for layer in params.layers:
            with params.gather(layer) as arrays:
                for name, value in arrays.items():
                    assert value.tobytes() == expected[f"{layer}.{name}"].tobytes()


def test_one_file_is_read_without_mpicoll(folder: Path) -> None:
    path = folder / "state.npz"
    expected = cases.Alone(cases.flat(cases.layers()), Adam(0.01)).params
    with make(3, COMM) as one:
        one.save(path, whole=True)
    if RANK == 0:
        with np.load(path, allow_pickle=False) as archive:
            for name, value in expected.items():
                stored = archive[f"value:{name}"]
                stored = stored.view(cases.BF16) if value.dtype == cases.BF16 else stored
                assert (stored.dtype, stored.shape) == (value.dtype, value.shape)
                assert stored.tobytes() == value.tobytes()
            assert archive["mean:out.phase"].shape == (2, 3, 2)


def test_frozen_now_what_was_trained(folder: Path) -> None:
    """Values are all that is needed; the other way round the slots are missing."""
    names = tuple(cases.flat(cases.layers()))
    with make(3, COMM) as one:
        train(one, 1)
        one.save(folder / "trained")
        expected = {k: v for k, v in state(one).items() if k.startswith("value:")}
    with make(3, COMM, seed=2, frozen=names) as one:
        one.load(folder / "trained")
        assert state(one) == expected
        one.save(folder / "frozen")
    with make(3, COMM) as one:
        refused(one, folder / "frozen", r"'rows\..*' has no 'mean'; it was frozen")


# -- saving that fails ------------------------------------------------------------------


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_the_newer_replaces_the_older(folder: Path) -> None:
    path = folder / "state"
    with make(2, COMM) as one:
        one.save(path)
        before = files(path)
        COMM.Barrier()
        if RANK == 0:  # what a save that was killed leaves
            (path / f"shard-{'0' * 16}-00000-of-00001.npz.part").write_bytes(b"")
        COMM.Barrier()
        train(one, 1)
        one.save(path)
        COMM.Barrier()
        after = files(path)
        assert len(before) == len(after) == SIZE + 1
        assert set(before) & set(after) == {"manifest.json"}
        one.load(path)
        assert one.steps == 1


@by_form
@pytest.mark.parametrize("where", ["fsync", "manifest"])
def test_a_failed_save_leaves_the_older(
    folder: Path, whole: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full on one rank, or when the manifest is written: all ranks hear of it."""
    path = place(folder, whole)
    failing = 0 if whole or where == "manifest" else SIZE - 1
    with make(2, COMM) as one:
        train(one, 1)
        one.save(path, whole=whole)
        expected = state(one)
        train(one, 1)
        COMM.Barrier()
        before = files(folder if whole else path)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        if failing == RANK and where == "fsync":
            monkeypatch.setattr(sharded_files.os, "fsync", full)
        elif failing == RANK and where == "manifest":
            monkeypatch.setattr(sharded_save, "to_json", full)
        with pytest.raises(SavedStateError, match=rf"save to .*rank {failing}: OSError.*No space"):
            one.save(path, whole=whole)
        monkeypatch.undo()
        COMM.Barrier()
        assert files(folder if whole else path) == before
        one.load(path)
        assert one.steps == 1
        assert state(one) == expected


def test_a_manifest_that_is_there_keeps_its_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name could not be brought to disk: an error, but then the newer state is there."""
    path = folder / "state"
    with make(2, COMM) as one:
        one.save(path)
        train(one, 1)

        def sync(place: str) -> None:
            if place.endswith("manifest.json"):
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(sharded_files, "sync_folder_of", sync)
        with pytest.raises(SavedStateError, match=r"rank 0: OSError.*Input/output"):
            one.save(path)
        monkeypatch.undo()
        COMM.Barrier()
        train(one, 1)
        one.load(path)
        assert one.steps == 1


@by_form
def test_places_that_cannot_be_written(folder: Path, whole: bool) -> None:
    if RANK == 0:
        (folder / "file").write_bytes(b"")
    COMM.Barrier()
    with make(2, COMM) as one:
        train(one, 1)
        with pytest.raises(SavedStateError, match=r"rank 0.*: NotADirectoryError"):
            one.save(folder / "file" / "below", whole=whole)


@by_form
@pytest.mark.parametrize("what", ["save", "load"])
def test_between_steps_only(folder: Path, whole: bool, what: str) -> None:
    path = place(folder, whole)
    options = {"whole": whole} if what == "save" else {}
    with make(2, COMM) as one:
        one.save(path, whole=whole)
        given = cases.gradients(one.params, RANK, 0)
        one.ready("half.scale", given.pop("half.scale"))
        with pytest.raises(RuntimeError, match=rf"{what} on rank {RANK}: within a step"):
            getattr(one, what)(path, **options)
        for name, gradient in given.items():
            one.ready(name, gradient)
        one.accumulate()
        with pytest.raises(SavedStateError, match=rf"it holds gradients; {what} between steps"):
            getattr(one, what)(path, **options)
        one.step(cases.gradients(one.params, RANK, 1))
        getattr(one, what)(path, **options)
    text = rf"{what}\(\) while layer 'half' is in use"
    with (
        make(3, COMM) as params,
        params.gather("half"),
        pytest.raises(SavedStateError, match=text),
    ):
        getattr(params, what)(path, **options)


# -- loading that is refused ------------------------------------------------------------


def shard(path: Path, rank: int) -> Path:
    return next(path.glob(f"shard-*-{rank:05d}-of-*.npz"))


def flip(path: Path, at: float) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], Any], sign: bool = True) -> None:
    """Change a manifest, and give it the digest that fits."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("digest")
    old = sharded_files._digest_of(body)
    change(body)
    digest = sharded_files._digest_of(body) if sign else old
    (path / "manifest.json").write_text(json.dumps({**body, "digest": digest}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "rank 0.*: there is no such file"),
    "no manifest": (lambda at: (at / "manifest.json").unlink(), "incomplete: there is no manif"),
    "manifest of others": (
        lambda at: (at / "manifest.json").write_text("[1]"),
        "its manifest is not of the form",
    ),
    "manifest of none": (
        lambda at: (at / "manifest.json").write_text("{"),
        "its manifest cannot be read",
    ),
    "manifest in part": (
        lambda at: edit(at, lambda body: body.pop("groups")),
        "its manifest cannot be read: KeyError",
    ),
    "manifest edited": (
        lambda at: edit(at, lambda body: body.update(step=7), sign=False),
        "its manifest is damaged",
    ),
    "token": (
        lambda at: edit(at, lambda body: body.update(token="../../../etc")),
        "names the token",
    ),
    "digests": (
        lambda at: edit(at, lambda body: body["digests"].append("0")),
        rf"its manifest has {SIZE + 1} digests",
    ),
    "no shard": (lambda at: shard(at, SIZE - 1).unlink(), "incomplete: shard-.* is missing"),
    "short shard": (
        lambda at: shard(at, 0).write_bytes(shard(at, 0).read_bytes()[:-1]),
        "shard-.*-00000-of-.* is damaged: digest",
    ),
    "flipped bit": (lambda at: flip(shard(at, SIZE - 1), 0.5), "is damaged: digest"),
}


def refused(one: Sharded, path: Path, text: str) -> None:
    """Show that a load raises on all ranks and changes nothing."""
    before, steps = state(one), one.steps
    with pytest.raises(SavedStateError, match=f"(?s)load from .*{text}"):
        one.load(path)
    assert (state(one), one.steps) == (before, steps)


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_shards(folder: Path, what: str, stage: int) -> None:
    path = folder / "state"
    damage, text = DAMAGE[what]
    with make(stage, COMM) as one:
        one.save(path)
        train(one, 1)
        COMM.Barrier()
        if RANK == 0:
            damage(path)
        COMM.Barrier()
        refused(one, path, text)


DAMAGED_FILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (Path.unlink, "there is no such file"),
    "text": (lambda at: at.write_text("hello"), "foreign or damaged"),
    "empty": (lambda at: at.write_bytes(b""), "foreign or damaged"),
    "array": (lambda at: np.save(at.open("wb"), np.ones(3)), "it is a single array"),
    "other archive": (lambda at: np.savez(at, x=np.ones(3)), "foreign or damaged: KeyError"),
    "short": (lambda at: at.write_bytes(at.read_bytes()[:-100]), "foreign or damaged"),
    "flipped bit": (lambda at: flip(at, 0.3), "rank 0"),
    "another array": (lambda at: replace(at, "value:rows.bias"), "the digest of its arrays"),
    "no array": (lambda at: replace(at, "mean:rows.bias", drop=True), "incomplete: array 'mean:r"),
}


def replace(path: Path, key: str, drop: bool = False) -> None:
    """Write an archive again, with one array changed or left out."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if drop:
        del arrays[key]
    else:
        arrays[key] = arrays[key] + 1
    np.savez(path, **arrays)


@pytest.mark.parametrize("what", DAMAGED_FILE)
def test_damaged_file(folder: Path, what: str) -> None:
    path = folder / "state.npz"
    damage, text = DAMAGED_FILE[what]
    with make(2, COMM) as one:
        one.save(path, whole=True)
        train(one, 1)
        COMM.Barrier()
        if RANK == 0:
            damage(path)
        COMM.Barrier()
        refused(one, path, text)


def model_with(**changes: Any) -> Arrays:
    return {"x": np.zeros(5, np.float32), "y": np.zeros((2, 2)), **changes}


FOREIGN: dict[str, tuple[Arrays, Any, str]] = {
    "more": (model_with(z=np.zeros(2)), Adam(), "it is of another model: it lacks 'z'"),
    "fewer": ({"x": np.zeros(5, np.float32)}, Adam(), "another model: it has also 'y'"),
    "shape": (
        model_with(x=np.zeros((5, 1), np.float32)),
        Adam(),
        r"'x' has shape \(5,\) and dtype float32, expected \(5, 1\) and float32",
    ),
    "dtype": (model_with(x=np.zeros(5)), Adam(), "and dtype float32, expected .* and float64"),
    "optimizer": (model_with(), SGD(1.0), "its optimizer is Adam, expected SGD"),
}


@by_form
@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_states(folder: Path, whole: bool, what: str) -> None:
    params, optimizer, text = FOREIGN[what]
    with ShardedOptimizer(model_with(), Adam(), COMM) as one:
        one.save(place(folder, whole), whole=whole)
    with ShardedOptimizer(params, optimizer, COMM) as one:
        refused(one, place(folder, whole), f"rank 0.*{text}")


@by_form
def test_slots_that_another_setting_has(folder: Path, whole: bool) -> None:
    with ShardedOptimizer(model_with(), SGD(1.0), COMM) as one:
        one.save(place(folder, whole), whole=whole)
    with ShardedOptimizer(model_with(), SGD(1.0, momentum=0.5), COMM) as one:
        refused(one, place(folder, whole), "has no 'velocity'")


def test_damage_in_a_shard_of_padding(folder: Path) -> None:
    """No rank needs what is in it, and still it is checked."""
    with ShardedOptimizer({"x": np.ones(1, np.float32)}, Adam(), COMM) as one:
        one.save(folder / "state")
        if RANK == 0:
            flip(shard(folder / "state", SIZE - 1), 0.5)
        COMM.Barrier()
        refused(one, folder / "state", "is damaged: digest")
