"""What the job says, and how all ranks end together when something is wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import mpicoll
from mpicoll.parallel import broadcast_object


def say(comm: mpicoll.Comm, text: str) -> None:
    """Print on rank 0."""
    if comm.rank == 0:
        print(text, flush=True)


def leave(comm: mpicoll.Comm, error: str) -> None:
    """End the run on every rank with status 1; called by all of them, heard from rank 0."""
    if comm.rank == 0:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    comm.Barrier()  # mpiexec ends the others when one rank fails: not before rank 0 has spoken
    raise SystemExit(1)


def on_root(comm: mpicoll.Comm, work: Callable[[], Any]) -> Any:
    """Do something that can fail on rank 0 alone and return its result there, None elsewhere.

    If it fails, rank 0 says why, and every rank leaves: none waits for one that has gone.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work()
        except (OSError, ValueError, ImportError) as caught:
            error = str(caught)
    error = broadcast_object(error, comm)
    if error is not None:
        leave(comm, error)
    return result


class Progress:
    """Shows how far training is: a bar on a terminal, else a line every two seconds."""

    def __init__(self, shown: bool, step: int, total: int) -> None:
        self._shown, self._total, self._next = shown, total, 0.0
        self._bar: Any = None
        # Open MPI gives a rank a terminal even where mpiexec has none: TERM=dumb says so.
        terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if shown and terminal and importlib.util.find_spec("rich"):
            from rich import progress

            columns = ("{task.description}", progress.BarColumn(), "{task.completed}/{task.total}")
            self._bar = progress.Progress(*columns, refresh_per_second=4)
            self._task = self._bar.add_task("training", total=total, completed=step)
            self._bar.start()

    def due(self, step: int) -> bool:
        """Return whether it is time to say something about a step, as about the last."""
        return self._shown and (step == self._total or time.perf_counter() >= self._next)

    def show(self, step: int, text: str) -> None:
        """Say something about a step."""
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        else:
            print(f"step {step}/{self._total}, {text}", flush=True)
        self._next = time.perf_counter() + (0.2 if self._bar else 2)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()
