"""Checkpoints: one file, replaced as one act, and what must agree with a run that resumes.

The shuffle of an epoch follows from seed and epoch, so parameters, momentum and the step are all
the state there is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from training.data import read_npz

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Config: TypeAlias = "dict[str, Any]"

_SAME = ("strategy", "data", "layers", "dtype", "batch", "seed", "lr")
_NOTED = ("ranks", "algorithm")
#: They save the same arrays, which each of them loads.
_FAMILY = ("zero1", "zero2", "zero3")


def compare(path: Path, saved: Mapping[str, Any], config: Config) -> None:
    """Refuse the checkpoint of another run; say what else is different."""
    noted = list(_NOTED)
    for name in _SAME:
        before, now = saved.get(name), config[name]
        if name == "strategy" and before in _FAMILY and now in _FAMILY:
            noted.append(name)
        elif before != now:
            raise ValueError(
                f"the checkpoint {path} is of another run: {name} was {before}, is {now}; "
                "give another --checkpoint or remove it"
            )
    for name in noted:
        if saved.get(name) != config[name]:
            print(f"note: {name} was {saved.get(name)}, is {config[name]}: last bits may differ")


def read(path: Path, config: Config) -> tuple[int, dict[str, Array]]:
    """Return step and arrays of a checkpoint; step 0 if there is none yet."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} for the checkpoint")
    if not path.exists():
        return 0, {}
    arrays = read_npz(path, {"config", "step"})
    compare(path, json.loads(str(arrays.pop("config"))), config)
    return int(arrays.pop("step")), arrays


def write(path: Path, config: Config, step: int, arrays: Mapping[str, Array]) -> None:
    """Replace the checkpoint."""

    def fill(file: BinaryIO) -> None:
        everything: dict[str, Any] = {
            "config": np.array(json.dumps(config)),
            "step": np.array(step),
        }
        np.savez(file, **everything | dict(arrays))

    replace(path, fill)


def beside(path: Path) -> Path:
    """Return where the settings are of a checkpoint whose file mpicoll writes."""
    return path.with_name(f"{path.name}.json")


def read_beside(path: Path, config: Config) -> bool:
    """Return whether there is a checkpoint to load; write down the settings of this run."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} for the checkpoint")
    if path.exists():
        if not beside(path).exists():
            raise ValueError(
                f"{path} has no {beside(path).name} beside it, as checkpoints of "
                f"{config['strategy']} have; give another --checkpoint or remove it"
            )
        compare(path, json.loads(beside(path).read_text(encoding="utf-8")), config)
    replace(beside(path), lambda file: file.write(json.dumps(config).encode()))
    return path.exists()


def replace(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace a file as one act: a killed run leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name must outlive a crash too
    os.close(folder)
