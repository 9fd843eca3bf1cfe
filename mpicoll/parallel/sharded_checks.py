"""What sharded optimizers refuse: texts of one rank's faults, raised on all by an agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree
from mpicoll.parallel.flat import DType, Group
from mpicoll.parallel.library import EXPECTED, is_array, place
from mpicoll.parallel.optimizers import FlatOptimizer

#: What a parameter without a gradient means to `step`.
Missing = Literal["error", "zero"]


def wire_dtype(wire: str | None) -> DType | None:
    return None if wire is None else np.dtype(np.float32)


def stage_fault(stage: object, bucket_bytes: object) -> str:
    if stage not in (1, 2):
        return f"stage={stage!r}, expected 1 or 2; stage 3 is ShardedParameters"
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        return f"bucket_bytes={bucket_bytes!r}, expected 1 byte or more"
    return ""


def layers_fault(layers: object) -> str:
    if not isinstance(layers, Mapping):
        return f"layers of type {type(layers).__name__}, expected mappings by name"
    names: set[str] = set()
    for layer, one in layers.items():
        if not isinstance(layer, str) or not layer:
            return f"layer name {layer!r}, expected a string of one character or more"
        if not isinstance(one, Mapping):
            return f"layer {layer!r} of type {type(one).__name__}, expected arrays by name"
        for name in one:
            full = f"{layer}.{name}"
            if full in names:
                return f"two parameters of one full name {full!r}"
            names.add(full)
    return ""


def options_fault(wire: object, order: object, root: object, size: int) -> str:
    if wire not in (None, "float32"):
        return f"wire={wire!r}, expected None or 'float32'"
    if order not in (None, "rank"):
        return f"order={order!r}, expected None or 'rank'"
    if root is not None and not (isinstance(root, int) and 0 <= root < size):
        return f"root={root!r}, expected a rank from 0 to {size - 1}"
    return ""


def agree_groups(
    comm: Comm,
    where: str,
    groups: list[Group],
    optimizer: FlatOptimizer,
    options: list[str],
    problem: str,
) -> None:
    """Raise on all ranks unless all cut the same groups.

    A rank may have on its device what another has on the host.
    """
    lines = [*options, *_places(groups)]
    if not problem:
        try:
            lines.append(f"optimizer {optimizer.settings()!r} of slots {optimizer.slots!r}")
            if {"value", "master"} & {*optimizer.slots}:
                problem = "an optimizer with a slot 'value' or 'master', names that are taken"
        except AttributeError:
            kind = type(optimizer).__name__
            problem = f"optimizer of type {kind}, expected SGD, Adam or a FlatOptimizer"
    for group in groups:
        state = "trained" if group.trainable else "frozen"
        lines += [
            f"parameter {one.name!r} of shape {one.shape} and dtype {group.dtype}, {state}"
            f" in group {group.label!r}, sent as {group.wire}"
            for one in group.entries
        ]
    agree(comm, where, lines, problem=problem or None)


def _places(groups: list[Group]) -> list[str]:
    """Say what decides the cut besides dtypes, in words that are alike where ranks cut alike."""
    places = sorted((entry.name, group.place) for group in groups for entry in group.entries)
    words = {True: "where the first one is", False: "not where the first one is"}
    return [f"parameter {name!r}, {words[there == places[0][1]]}" for name, there in places]


def step_settings(
    max_norm: float | None, scale: float, missing: str, faults: list[str]
) -> list[str]:
    """Return what all ranks must pass alike to a step, and note what is out of range."""

    def note(fits: Callable[[], bool], text: str) -> None:
        try:
            good = fits()
        except TypeError:
            good = False
        if not good:
            faults.append(text)

    note(
        lambda: max_norm is None or max_norm > 0,
        f"max_norm={max_norm!r}, expected a number above 0",
    )
    note(
        lambda: math.isfinite(scale) and scale > 0,
        f"loss_scale={scale!r}, expected a finite number above 0",
    )
    note(lambda: missing in ("error", "zero"), f"missing={missing!r}, expected 'error' or 'zero'")
    return [f"max_norm={max_norm!r}", f"loss_scale={scale!r}", f"missing={missing!r}"]


def gradient_fault(group: Group, name: str, gradient: object) -> str:
    """Return why an array cannot be the gradient of a parameter, or an empty string."""
    what = f"the gradient of {name!r}"
    if not group.trainable:
        return f"{what}, which is frozen"
    # NumPy's arithmetic on 0-d arrays gives scalars, so these are taken too.
    if isinstance(gradient, np.generic):
        gradient = np.asarray(gradient)
    if not is_array(gradient):
        return f"{what} as {type(gradient).__name__}, expected {EXPECTED}"
    if place(gradient) != group.place:
        return f"{what} on {place(gradient)}, expected {group.place}, as the parameter"
    shape = next(entry.shape for entry in group.entries if entry.name == name)
    if gradient.shape != shape:
        return f"{what} of shape {gradient.shape}, expected {shape}"
    wire = group.dtype if group.dtype.kind == "c" else group.wire
    kind = gradient.dtype.kind
    if (kind == "c") != (wire.kind == "c") or not np.can_cast(gradient.dtype, wire, "safe"):
        return f"{what} of dtype {gradient.dtype}, expected {wire} or what it holds exactly"
    return ""
