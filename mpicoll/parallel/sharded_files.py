"""Files of a saved state: written whole or not at all, read back only if nothing is amiss.

A manifest says what is saved: the groups with their parameters, the step, and digests; not
where they lay. Local work only: nothing here communicates, and arrays are of the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401  (lets NumPy know the names of its dtypes)
import numpy as np

from mpicoll.parallel.flat import DType, Entry, Group, bits, real
from mpicoll.parallel.library import Array

FORMAT = "mpicoll sharded state 1"
MANIFEST = "manifest.json"
_NAME = re.compile(r"shard-([0-9a-f]{16})-[0-9]{5,}-of-[0-9]{5,}\.npz(\.part)?")


class DamagedError(Exception):
    """A file is not what it has to be; caught before it leaves the package."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A group in a saved state, and the dtype of each kind of array."""

    group: Group
    kinds: Mapping[str, DType]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a saved state says of itself; ``digests`` are of shard files, or of one whole."""

    step: int
    size: int
    token: str
    optimizer: Mapping[str, Any]
    saved: tuple[Saved, ...]
    digests: tuple[str, ...]

    def shard_name(self, rank: int) -> str:
        return shard_name(self.token, rank, self.size)


def shard_name(token: str, rank: int, size: int) -> str:
    """Return the name of a rank's file; the token is new with each save."""
    return f"shard-{token}-{rank:05d}-of-{size:05d}.npz"


# -- the manifest -----------------------------------------------------------------------


def to_json(manifest: Manifest) -> str:
    """Return a manifest as text, with a digest of itself."""
    groups = [
        {
            "label": one.group.label,
            "dtype": one.group.dtype.name,
            "trainable": one.group.trainable,
            "kinds": {kind: dtype.name for kind, dtype in one.kinds.items()},
            "entries": [
                [entry.name, list(entry.shape), entry.start, entry.stop]
                for entry in one.group.entries
            ],
        }
        for one in manifest.saved
    ]
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "world_size": manifest.size,
        "token": manifest.token,
        "optimizer": dict(manifest.optimizer),
        "groups": groups,
        "digests": list(manifest.digests),
    }
    return json.dumps({**body, "digest": _digest_of(body)}, indent=1, default=repr)


def from_json(text: str) -> Manifest:
    """Return the manifest of a text; raise DamagedError for what is none of ours."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise DamagedError(f"its manifest is not of the form {FORMAT!r}")
        if body.pop("digest", None) != _digest_of(body):
            raise DamagedError("its manifest is damaged: the digest of its text does not fit")
        token, digests = body["token"], tuple(body["digests"])
        if not re.fullmatch("[0-9a-f]{16}", token):
            raise DamagedError(f"its manifest names the token {token!r}")
        return Manifest(
            int(body["step"]),
            int(body["world_size"]),
            token,
            body["optimizer"],
            tuple(map(_saved, body["groups"])),
            digests,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"its manifest cannot be read: {error!r}") from None


def _saved(record: Mapping[str, Any]) -> Saved:
    dtype = np.dtype(record["dtype"])
    entries = tuple(
        Entry(name, tuple(shape), start, stop) for name, shape, start, stop in record["entries"]
    )
    group = Group(record["label"], dtype, real(dtype), record["trainable"], entries)
    return Saved(group, {kind: np.dtype(name) for kind, name in record["kinds"].items()})


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=repr).encode()).hexdigest()


# -- writing ----------------------------------------------------------------------------


def write(path: str, fill: Callable[[BinaryIO], None]) -> None:
    """Write a file next to its place, bring it to disk, and put it there in one go."""
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        remove(part)
        raise
    sync_folder_of(path)


def sync_folder_of(path: str) -> None:
    """Bring the name of a file or folder to disk."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_current(folder: str, token: str) -> bool:
    """Whether the manifest that is there is that of a token."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            return token in file.read()
    except OSError:
        return False


def remove(path: str) -> None:
    """Remove a file if it is there and can be."""
    try:
        os.remove(path)
    except OSError:
        return


def remove_others(folder: str, token: str) -> None:
    """Remove the shard files of older saves, and of those that did not come to an end."""
    for name in os.listdir(folder):
        found = _NAME.fullmatch(name)
        if found and found[1] != token:
            remove(os.path.join(folder, name))


class Archive:
    """An ``.npz`` that is written array by array, with a digest of all."""

    def __init__(self, file: BinaryIO) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._digest = hashlib.sha256()

    def add(self, key: str, array: Array) -> None:
        """Append an array."""
        stored = storable(array)
        with self._zip.open(f"{key}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, stored, allow_pickle=False)
        feed(self._digest, key, stored)

    def hexdigest(self) -> str:
        """Return the digest of what was added so far."""
        return self._digest.hexdigest()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write the table of contents; after an error the file is of no use anyway."""
        with suppress(*(() if error is None else (OSError, ValueError))):
            self._zip.close()


def storable(array: Array) -> Array:
    """Return an array of a dtype that ``.npy`` knows; bfloat16 and the like as integers."""
    return bits(array) if array.dtype.isbuiltin == 2 else array


def feed(digest: Any, key: str, stored: Array) -> None:
    """Take an array into a digest, by name, dtype, shape and bytes."""
    digest.update(f"{key} {stored.dtype.str} {stored.shape} ".encode())
    digest.update(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)


# -- reading ----------------------------------------------------------------------------


def open_archive(path: str) -> np.lib.npyio.NpzFile:
    """Open an ``.npz``, and nothing else that NumPy reads; the caller closes it."""
    opened = np.load(path, allow_pickle=False)
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise DamagedError("it is a single array, expected an .npz of several")
    return opened


def file_digest(path: str) -> str:
    """Return the digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def check_file(path: str, expected: str) -> None:
    """Raise DamagedError unless a file is there and has the digest."""
    name = os.path.basename(path)
    try:
        actual = file_digest(path)
    except FileNotFoundError:
        raise DamagedError(f"incomplete: {name} is missing") from None
    if actual != expected:
        raise DamagedError(f"{name} is damaged: digest {actual[:12]}, expected {expected[:12]}")


def restored(stored: Array, dtype: DType, key: str) -> Array:
    """Return an array as it was before `storable`."""
    expected = storable(np.empty(0, dtype)).dtype
    if stored.dtype != expected:
        raise DamagedError(f"array {key!r} has dtype {stored.dtype}, expected {expected}")
    return stored.view(dtype)


def foreign(manifest: Manifest, groups: Sequence[tuple[Group, Iterable[str]]], kind: str) -> str:
    """Return why a state cannot be that of ``groups``, whose arrays are of these kinds."""
    theirs = {
        entry.name: (entry.shape, one.group.dtype, one.kinds)
        for one in manifest.saved
        for entry in one.group.entries
    }
    ours = {entry.name for group, _ in groups for entry in group.entries}
    for what, names in (("lacks", ours - theirs.keys()), ("has also", theirs.keys() - ours)):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:3])) + (" …" if len(names) > 3 else "")
            return f"it is of another model: it {what} {shown}"
    trained = any(group.trainable for group, _ in groups)
    if trained and manifest.optimizer.get("kind") != kind:
        return f"its optimizer is {manifest.optimizer.get('kind')}, expected {kind}"
    for group, kinds in groups:
        for entry in group.entries:
            shape, dtype, held = theirs[entry.name]
            if (shape, dtype) != (entry.shape, group.dtype):
                return (
                    f"{entry.name!r} has shape {shape} and dtype {dtype}, expected "
                    f"{entry.shape} and {group.dtype}"
                )
            lost = sorted(set(kinds) - set(held))
            if lost:
                return f"{entry.name!r} has no {lost[0]!r}; it was frozen or trained otherwise"
    return ""
