"""Saving of sharded state, per shard or as one file.

What is wrong on one rank is raised on all, with its reason; what was saved before stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from mpicoll.comm import Comm
from mpicoll.parallel.flat import Group, bits
from mpicoll.parallel.library import Array, to_host
from mpicoll.parallel.sharded_files import (
    MANIFEST,
    Archive,
    Manifest,
    Saved,
    file_digest,
    is_current,
    remove,
    remove_others,
    shard_name,
    sync_folder_of,
    to_json,
    write,
)
from mpicoll.parallel.sharded_state import Part, SavedStateError, named, reason, verdict


def _manifest(
    parts: Sequence[Part],
    comm: Comm,
    token: str,
    step: int,
    optimizer: Mapping[str, Any],
    digests: Sequence[str],
) -> Manifest:
    saved = tuple(
        Saved(part.group, {kind: array.dtype for kind, array in part.arrays.items()})
        for part in parts
    )
    return Manifest(step, comm.size, token, optimizer, saved, tuple(digests))


def save_shards(
    comm: Comm,
    folder: str,
    parts: Sequence[Part],
    step: int,
    optimizer: Mapping[str, Any],
    fault: str,
) -> None:
    """Write one file per rank, then the manifest that makes them valid; collective."""
    what = f"save to {folder!r}"
    token: str = comm.bcast(os.urandom(8).hex(), root=0)
    if not fault and comm.rank == 0:
        try:
            os.makedirs(folder, exist_ok=True)
            sync_folder_of(folder)
        except OSError as error:
            fault = reason(error)
    verdict(comm, what, fault)

    path = os.path.join(folder, shard_name(token, comm.rank, comm.size))
    digest = ""
    try:
        write(path, lambda file: _fill_shard(file, parts))
        digest = file_digest(path)
    except Exception as error:  # whatever it is, the others have to hear of it
        fault = reason(error)
    digests = comm.allgather(digest)
    try:
        verdict(comm, what, fault)
        if comm.rank == 0:
            try:
                text = to_json(_manifest(parts, comm, token, step, optimizer, digests))
                write(os.path.join(folder, MANIFEST), lambda file: _fill_text(file, text))
            except Exception as error:
                fault = reason(error)
        verdict(comm, what, fault)
    except SavedStateError:
        # The manifest may be there, though its name could not be brought to disk.
        if not comm.bcast(is_current(folder, token) if comm.rank == 0 else None, root=0):
            remove(path)
        raise
    if comm.rank == 0:
        remove_others(folder, token)


def _fill_shard(file: BinaryIO, parts: Sequence[Part]) -> None:
    with Archive(file) as archive:
        for number, part in enumerate(parts):
            for kind, array in part.arrays.items():
                archive.add(f"{number}.{kind}", to_host(array))


def _fill_text(file: BinaryIO, text: str) -> None:
    file.write(text.encode())


def save_file(
    comm: Comm,
    path: str,
    parts: Sequence[Part],
    step: int,
    optimizer: Mapping[str, Any],
    fault: str,
) -> None:
    """Write one file on rank 0, whose memory holds one group's array at a time; collective."""
    what = f"save to {path!r}"
    verdict(comm, what, fault)
    arrived = _gathered(comm, parts)

    def fill(file: BinaryIO) -> None:
        with Archive(file) as archive:
            for kind, group, full in arrived:
                for key, array in named(kind, group, full):
                    archive.add(key, array)
            digests = [archive.hexdigest()]
            text = to_json(_manifest(parts, comm, "0" * 16, step, optimizer, digests))
            archive.add("manifest", np.frombuffer(text.encode(), np.uint8))

    if comm.rank == 0:
        try:
            write(path, fill)
        except Exception as error:
            fault = reason(error)
    for _ in arrived:
        pass  # the other ranks send, or rank 0 could not write and takes in the rest
    verdict(comm, what, fault)


def _gathered(comm: Comm, parts: Sequence[Part]) -> Iterator[tuple[str, Group, Array]]:
    """Bring the arrays to rank 0's host, one at a time; the others get empty ones."""
    for part in parts:
        for kind, array in part.arrays.items():
            full = np.empty(array.size * comm.size if comm.rank == 0 else 0, array.dtype)
            comm.Gather(bits(to_host(array)), bits(full) if comm.rank == 0 else None, 0)
            yield kind, part.group, full
