"""What makes one test of many ranks: one verdict for all, and an end to what hangs."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from mpi4py import MPI

HERE = Path(__file__).parent
TIMEOUT_VARIABLE = "MPICOLL_TEST_TIMEOUT"
#: Seconds in which all ranks show their stacks before one of them ends the job.
GRACE = 3.0


class Ranks:
    """The ranks of a run: their private communicator, and the stderr that pytest hides."""

    def __init__(self, seed: int | None, timeout: float) -> None:
        """Agree on the seed; collective."""
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank
        self.size = self.comm.size
        own = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.seed: int = self.comm.bcast(own, root=0)
        self.timeout = timeout
        self._stderr = os.fdopen(os.dup(2), "w", buffering=1)
        self._timer: threading.Timer | None = None

    def say(self, text: str) -> None:
        """Write to the real stderr in one go, so that ranks do not mix within a text."""
        os.write(self._stderr.fileno(), f"{text.rstrip()}\n".encode())

    # -- one verdict ------------------------------------------------------------------

    def together(self, nodeid: str, phase: str) -> Generator[None, Any, Any]:
        """Run a phase of a test, then fail it on all ranks if it failed on one.

        A rank that fails says so at once: the others may be waiting for it in a
        collective, and then nothing but the watchdog ends the run.
        """
        outcome, result = "passed", None
        error: BaseException | None = None
        try:
            result = yield
        except pytest.skip.Exception as caught:
            outcome, error = f"skipped: {caught}", caught
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as caught:
            outcome, error = "".join(traceback.format_exception_only(caught)).strip(), caught
            self.say(f"rank {self.rank}, {nodeid}, {phase}: failed\n{_shown(caught)}")
        outcomes = self.comm.allgather(outcome)
        if error is not None and not (
            isinstance(error, pytest.skip.Exception) and len(set(outcomes)) > 1
        ):
            raise error
        others = [rank for rank, text in enumerate(outcomes) if text != "passed"]
        if others:
            failures = "\n".join(f"rank {rank}: {outcomes[rank]}" for rank in others)
            pytest.fail(f"failed on ranks {others}\n{failures}", pytrace=False)
        return result

    # -- the watchdog -----------------------------------------------------------------

    def watch(self, what: str) -> None:
        """Give all ranks the time-out for what they do now."""
        self.unwatch()
        self._timer = threading.Timer(self.timeout, self._expire, [what])
        self._timer.daemon = True
        self._timer.start()
        # The second line, where a thread keeps the GIL: it needs no Python to run.
        self._exit_in(self.timeout + GRACE / 2)

    def unwatch(self) -> None:
        """Call off the watchdog."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        faulthandler.cancel_dump_traceback_later()

    def _exit_in(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr.fileno())

    def _expire(self, what: str) -> None:
        # All ranks began together, so all come here at about the same time.
        self._exit_in(3 * GRACE)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"rank {self.rank}, {what}: no end after {self.timeout:g} s\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"rank {self.rank}, thread {names.get(ident, ident)}:\n")
                stack = traceback.extract_stack(frame)
                lines += traceback.format_list([at for at in stack if not _of_pytest(at)])
        self.say("".join(lines))
        time.sleep(GRACE)
        MPI.COMM_WORLD.Abort(1)


def _of_pytest(frame: traceback.FrameSummary) -> bool:
    return not {"_pytest", "pytest", "pluggy"}.isdisjoint(Path(frame.filename).parts)


def _shown(error: BaseException) -> str:
    """Return the traceback from the first frame of a test on."""
    start: TracebackType | None = error.__traceback__
    while start is not None:
        path = Path(start.tb_frame.f_code.co_filename)
        if path.is_relative_to(HERE) and path.name not in ("harness.py", "conftest.py"):
            break
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))
