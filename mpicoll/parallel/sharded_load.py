"""Loading of sharded state at any number of ranks.

What is wrong on one rank is raised on all, with its reason, before anything is replaced.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.comm import Comm
from mpicoll.parallel.flat import DType, Group, bits
from mpicoll.parallel.library import Array, beside, on_host
from mpicoll.parallel.sharded_files import (
    MANIFEST,
    DamagedError,
    Manifest,
    check_file,
    feed,
    foreign,
    from_json,
    open_archive,
    restored,
)
from mpicoll.parallel.sharded_state import Part, named, reason, verdict


def load_state(
    comm: Comm, path: str, parts: Sequence[Part], kind: str, fault: str
) -> tuple[int, list[Part]]:
    """Return the step and new arrays for ``parts``, where those lie; collective."""
    what = f"load from {path!r}"
    verdict(comm, what, fault)
    text, folder, fault = comm.bcast(_read_manifest(path) if comm.rank == 0 else None, root=0)
    manifest = None
    if not fault:
        try:
            manifest = from_json(text)
            fault = foreign(manifest, [(part.group, part.arrays) for part in parts], kind)
            if not fault and len(manifest.digests) != (manifest.size if folder else 1):
                fault = f"its manifest has {len(manifest.digests)} digests"
        except Exception as error:
            fault = reason(error)
    verdict(comm, what, fault)
    assert manifest is not None

    new = [
        Part(part.group, part.low, {k: np.zeros(a.shape, a.dtype) for k, a in part.arrays.items()})
        for part in parts
    ]
    if folder:
        try:
            _load_shards(comm, path, manifest, new)
        except Exception as error:
            fault = reason(error)
    else:
        if comm.rank == 0:
            try:
                _check_whole(path, manifest)
            except Exception as error:
                fault = reason(error)
        verdict(comm, what, fault)
        fault = _load_whole(comm, path, new)
    try:
        for part, made in zip(parts, new, strict=True):
            made.arrays = {k: _there(a, part.arrays[k]) for k, a in made.arrays.items()}
    except Exception as error:  # the device's memory is full
        fault = fault or reason(error)
    verdict(comm, what, fault)
    return manifest.step, new


def _there(array: Array, like: Array) -> Array:
    """Return a loaded array in the place of the one that it replaces."""
    return array if on_host(like) else beside(bits(array), like).view(array.dtype)


def _read_manifest(path: str) -> tuple[str, bool, str]:
    """Return the manifest's text, whether it is of a folder, and what was wrong."""
    folder = os.path.isdir(path)
    try:
        if folder:
            with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
                return file.read(), folder, ""
        with open_archive(path) as archive:
            return archive["manifest"].tobytes().decode(), folder, ""
    except FileNotFoundError as error:
        missing = f"incomplete: there is no {MANIFEST}" if folder else "there is no such file"
        return "", folder, missing if error.filename else reason(error)
    except Exception as error:
        return "", folder, f"foreign or damaged: {reason(error)}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a saved shard's array, and where they go."""

    key: str
    dtype: DType
    low: int
    high: int
    target: Array


def _load_shards(comm: Comm, folder: str, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Read what this rank needs from the files that have it, each checked first."""
    wanted = _pieces(manifest, parts)
    # Together the ranks check every file, also one that holds nothing but padding.
    for rank in sorted({*wanted, *range(comm.rank, manifest.size, comm.size)}):
        path = os.path.join(folder, manifest.shard_name(rank))
        check_file(path, manifest.digests[rank])
        with open_archive(path) as archive:
            for key, pieces in _by_key(wanted.get(rank, ())).items():
                stored = archive[key]
                for piece in pieces:
                    whole = restored(stored, piece.dtype, key)
                    piece.target[...] = whole[piece.low : piece.high]


def _by_key(pieces: Sequence[_Piece]) -> dict[str, list[_Piece]]:
    found: dict[str, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.key].append(piece)
    return found


def _pieces(manifest: Manifest, parts: Sequence[Part]) -> dict[int, list[_Piece]]:
    """Return what this rank needs, by the rank that saved it."""
    found: dict[int, list[_Piece]] = defaultdict(list)
    places = {
        entry.name: (number, saved, entry)
        for number, saved in enumerate(manifest.saved)
        for entry in saved.group.entries
    }
    for part in parts:
        length = next(iter(part.arrays.values())).size
        for entry in part.group.entries:
            first, last = max(part.low, entry.start), min(part.low + length, entry.stop)
            number, saved, there = places[entry.name]
            share = saved.group.share(manifest.size)
            shift = there.start - entry.start
            at = first
            while at < last:
                rank, offset = divmod(at + shift, share)
                count = min(last - at, share - offset)
                for kind, array in part.arrays.items():
                    target = array[at - part.low : at - part.low + count]
                    key = f"{number}.{kind}"
                    piece = _Piece(key, saved.kinds[kind], offset, offset + count, target)
                    found[rank].append(piece)
                at += count
    return found


def _check_whole(path: str, manifest: Manifest) -> None:
    """Read one file from end to end, and compare its digest."""
    digest = hashlib.sha256()
    with open_archive(path) as archive:
        for saved in manifest.saved:
            for kind in saved.kinds:
                for entry in saved.group.entries:
                    key = f"{kind}:{entry.name}"
                    if key not in archive:
                        raise DamagedError(f"incomplete: array {key!r} is missing")
                    feed(digest, key, archive[key])
    if digest.hexdigest() != manifest.digests[0]:
        raise DamagedError("it is damaged: the digest of its arrays does not fit")


def _load_whole(comm: Comm, path: str, parts: Sequence[Part]) -> str:
    """Send each rank its elements; return what went wrong on rank 0."""
    fault = ""
    for part in parts:
        for kind, array in part.arrays.items():
            full = None
            if comm.rank == 0:
                full = np.zeros(array.size * comm.size, array.dtype)
                try:
                    with open_archive(path) as archive:
                        _assemble(archive, kind, part.group, full)
                except Exception as error:
                    fault = reason(error)
            comm.Scatter(None if full is None else bits(full), bits(array), 0)
    return fault


def _assemble(archive: Any, kind: str, group: Group, full: Array) -> None:
    for key, view in named(kind, group, full):
        view[...] = restored(archive[key], view.dtype, key)
