"""The parameters of one node, from measured times of collectives on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.errors import SettingError
from mpicoll.simulation.fabric import Fabric, Local
from mpicoll.simulation.machine import Machine, Reals
from mpicoll.simulation.network import FatTree
from mpicoll.simulation.predict import Prepared

ROUNDS = 8
PARAMETERS = ("call", "step", "overhead", "operation", "gamma", "copy", "latency", "byte")
#: Where the search starts, and the least of what it finds, as a fraction of that.
START = np.array([10e-6, 5e-6, 5e-6, 5e-6, 0.3e-9, 0.1e-9, 2e-6, 0.3e-9])
LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of a collective of ``nbytes`` by an algorithm, with the ``segment`` it had."""

    algorithm: Algorithm
    nbytes: int
    segment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Node:
    """A node with its processor's and its memory's parameters."""

    machine: Machine
    local: Local

    def fabric(self, size: int) -> Fabric:
        """Return ``size`` ranks on this node."""
        return Fabric(size, size, FatTree(1, 1, 1.0, 0.0, 0.0), 1.0, self.local)


def calibrated(samples: Sequence[Measured], size: int, cores: int) -> Node:
    """Return the node of ``size`` ranks on ``cores`` cores whose times are nearest to ``samples``.

    The logarithms of the ratios are made small, large ones counting less than their squares, by
    Gauss and Newton's method from fixed values on. Two sizes of several algorithms are needed.
    """
    if len({sample.nbytes for sample in samples}) < 2:
        raise SettingError("a calibration needs measured times of two sizes at least")
    times = Times(samples, size)
    wanted = np.log([sample.seconds for sample in samples])

    def residual(logarithms: Reals) -> Reals:
        found: Reals = np.log(times(node(np.exp(logarithms), cores))) - wanted
        return found

    return node(np.exp(_fit(residual, np.log(START))), cores)


def node(values: Reals, cores: int) -> Node:
    """Return the node that has ``values`` for the ``PARAMETERS``."""
    named = dict(zip(PARAMETERS, values.tolist(), strict=True))
    local = Local(named.pop("latency"), 1 / named.pop("byte"))
    return Node(replace(Machine(cores=cores), **named), local)


class Times:
    """Predicted times of several cases on one node, whose schedules are built once.

    What was measured of them is not looked at.
    """

    def __init__(self, cases: Sequence[Measured], size: int) -> None:
        self._size = size
        self._places: list[tuple[Prepared, list[int]]] = []
        for kind in dict.fromkeys((case.algorithm, case.segment) for case in cases):
            places = [
                at for at, case in enumerate(cases) if (case.algorithm, case.segment) == kind
            ]
            sizes = [cases[at].nbytes for at in places]
            self._places.append((Prepared(kind[0], sizes, kind[1], size), places))
        self._count = len(cases)

    def __call__(self, node: Node) -> Reals:
        """Return the seconds of every case."""
        found = np.empty(self._count)
        fabric = node.fabric(self._size)
        for prepared, places in self._places:
            found[places] = prepared.run(fabric, node.machine).seconds
        return found


def _fit(residual: Callable[[Reals], Reals], start: Reals) -> Reals:
    """Return where the residuals are small; logarithms do not move by more than 1 at a time."""
    here, best = start, residual(start)
    damping = 1e-2
    for _ in range(ROUNDS):
        slopes = np.stack(
            [(residual(here + 0.05 * one) - best) / 0.05 for one in np.eye(here.size)]
        )
        weights = 1 / np.sqrt(np.maximum(np.abs(best), 0.1))
        a = (slopes * weights).T
        left = a.T @ a + damping * np.eye(here.size)
        step = np.clip(np.linalg.solve(left, -a.T @ (weights * best)), -1, 1)
        there = np.maximum(here + step, start + np.log(LEAST))
        new = residual(there)
        if np.abs(new).sum() < np.abs(best).sum():
            here, best, damping = there, new, damping / 3
        else:
            damping *= 10
    return here
