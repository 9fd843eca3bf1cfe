"""Where the time of a step goes: computing, communicating, and computing while messages travel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Split:
    """Seconds. ``compute`` and ``communication`` add up to the time of the steps.

    ``communication`` is spent in calls that communicate, waiting included. ``overlap`` is the
    part of ``compute`` during which messages were under way: something had been handed over,
    and the call that waits for it had not returned.
    """

    compute: float = 0.0
    communication: float = 0.0
    overlap: float = 0.0

    @property
    def whole(self) -> float:
        """The time of the steps."""
        return self.compute + self.communication

    def since(self, before: Split) -> Split:
        """Return what was added after ``before``."""
        return Split(
            self.compute - before.compute,
            self.communication - before.communication,
            self.overlap - before.overlap,
        )

    def per_step(self, steps: int) -> str:
        """Say it in milliseconds."""
        each = 1e3 / max(1, steps)
        return (
            f"{self.whole * each:.2f} ms = {self.compute * each:.2f} compute + "
            f"{self.communication * each:.2f} communication, {self.overlap * each:.2f} overlap"
        )


class Clock:
    """Adds up the time between its calls, for what the rank was doing."""

    def __init__(self) -> None:
        self.split = Split()
        self._since = 0.0
        self._talking = self._travelling = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step; what happens between steps is not counted."""
        self._since = time.perf_counter()
        self._talking = self._travelling = False
        yield
        self._turn(False, False)

    @contextmanager
    def communication(self, under_way: bool) -> Iterator[None]:
        """Time a call that communicates; say whether messages are under way when it returns."""
        self._turn(True, self._travelling)
        yield
        self._turn(False, under_way)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time what computes within a call that communicates."""
        talking = self._talking
        self._turn(False, self._travelling)
        yield
        self._turn(talking, self._travelling)

    def _turn(self, talking: bool, travelling: bool) -> None:
        now = time.perf_counter()
        spent = now - self._since
        if self._talking:
            self.split.communication += spent
        else:
            self.split.compute += spent
            self.split.overlap += spent if self._travelling else 0.0
        self._since, self._talking, self._travelling = now, talking, travelling
