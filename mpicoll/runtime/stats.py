"""Counters of one communicator: what this rank called, sent and received."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.runtime.plan import Recipe


@dataclass(slots=True)
class Counts:
    """Totals over the calls of one collective by one algorithm, on this rank."""

    calls: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        self.calls += other.calls
        self.messages_sent += other.messages_sent
        self.messages_received += other.messages_received
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        return self


class Stats:
    """Counts by (collective, algorithm).

    ``stats["allreduce", "ring"].bytes_sent`` is what this rank sent in ring allreduces;
    a pair that never ran counts zero. Calls that went to the MPI's own method are under
    the algorithm "native"; of those the bytes are not known.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counts] = {}

    def __getitem__(self, key: tuple[str, str]) -> Counts:
        return self._counts.get(key) or Counts()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, recipe: Recipe) -> None:
        """Count a call, and the traffic of its schedule."""
        key = recipe.algorithm.collective, recipe.algorithm.name
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = Counts()
        program = recipe.program
        counts.calls += 1
        counts.messages_sent += program.messages_sent
        counts.messages_received += program.messages_received
        counts.bytes_sent += program.bytes_sent
        counts.bytes_received += program.bytes_received

    def add_native(self, method: str) -> None:
        """Count a call that went to the MPI's own method."""
        self._counts.setdefault((method, "native"), Counts()).calls += 1

    @property
    def total(self) -> Counts:
        """The sum over everything."""
        total = Counts()
        for counts in self._counts.values():
            total += counts
        return total

    def reset(self) -> None:
        """Set every counter to zero."""
        self._counts.clear()

    def __repr__(self) -> str:
        heads = f"{'messages':>10}{'sent B':>14}{'received B':>14}"
        rows = [f"{'collective':<26}{'algorithm':<20}{'calls':>8}{heads}"]
        for (collective, algorithm), counts in sorted(self._counts.items()):
            rows.append(
                f"{collective:<26}{algorithm:<20}{counts.calls:>8}{counts.messages_sent:>10}"
                f"{counts.bytes_sent:>14}{counts.bytes_received:>14}"
            )
        return "\n".join(rows)
