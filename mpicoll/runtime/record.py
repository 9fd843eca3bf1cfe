"""One collective call of this rank, as the flight recorder and the trace keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class StageTime(NamedTuple):
    """When a step of a schedule ran; times are of `time.perf_counter`.

    ``posted`` is when its messages were posted, ``worked`` when the local work beside them was
    done, ``done`` when the last message was; ``sources`` and ``targets`` are the peers, one for
    each message, as ranks of the communicator.
    """

    step: int
    posted: float
    worked: float
    done: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    bytes_received: int
    bytes_sent: int


@dataclass(init=False)
class Record:
    """A call: what it is, how far it is, and when; times are of `time.perf_counter`.

    ``communicator`` is an identity that is equal on all of its ranks; ``sequence`` counts the
    calls on it from 1. ``form`` is "blocking", "non-blocking" or "persistent". ``count`` are
    items of this rank's own input (of its output where it has none), ``nbytes`` their bytes;
    ``root`` is -1 where there is none. ``step`` is the step it is in, from 1 to ``steps``, 0
    before the first; ``waits`` are the ranks whose messages the step still waits for. ``end``
    is 0.0 while it runs. ``stages`` is filled only while a trace is taken.
    """

    communicator: str
    sequence: int
    collective: str
    form: str = "blocking"
    algorithm: str = ""
    operator: str = ""
    dtype: str = ""
    count: int = 0
    nbytes: int = 0
    root: int = -1
    step: int = 0
    steps: int = 0
    waits: tuple[int, ...] = ()
    start: float = 0.0
    end: float = 0.0
    site: str = ""
    error: str = ""
    stages: Sequence[StageTime] = ()
    # Rounds in which the ranks have agreed on something before the call; in no dump.
    rounds = 0

    def __init__(
        self,
        communicator: str,
        sequence: int,
        collective: str,
        form: str = "blocking",
        **others: Any,
    ) -> None:
        """Set what is given; the rest is found in the class until a call sets it."""
        # One is made for each call, so it matters that only a few fields are set.
        self.communicator = communicator
        self.sequence = sequence
        self.collective = collective
        self.form = form
        if others:
            self.__dict__.update(others)
