"""`abort_on_exception`: a rank that fails ends the job, where the others would wait for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

#: Seconds between the traceback and the end: launchers drop what is still under way.
LAST_WORD = 0.5
#: Seconds after which a process that MPI does not end ends itself.
BOUND = 10.0
#: Seconds that rank 1 waits before it speaks; rank 3 waits twice, rank 7 three times as long.
#: Ranks that fail together so do not speak at once, and the first ends the job, mostly before
#: a thousand others have said the same.
STAGGER = 0.25
INTERRUPTED = 130  #: the exit status after KeyboardInterrupt, as shells have it

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_ThreadHook = Callable[[Any], Any]

_ending = threading.Lock()  # taken by the thread that ends the process, and never given back


def abort_on_exception() -> Guard:
    """End the whole job when this rank fails, with its traceback shown once on stderr.

    Called at the top of a script, it holds for the rest of it: for exceptions that nothing
    catches, in the main thread and in others. As a context manager it holds for the block::

        with mpicoll.abort_on_exception():
            main()

    The traceback is shown by the `sys.excepthook` there was, with the rank above it; then
    `MPI_Abort` ends all ranks with status 1, in about a second. A process that it does not
    end leaves by itself after 10 seconds. Nothing is sent, and no rank needs to call this
    because others do. Ranks that fail together speak one after the other, the lowest first;
    a few have spoken when the job ends.

    ``SystemExit`` with status 0 ends nothing; with another status it ends the job with that
    status, without a traceback, in a block only: Python calls no hook for it, and without a
    block the other ranks wait. So a program that calls `sys.exit` needs the block.
    ``KeyboardInterrupt`` ends the job with status 130 and one line. In a world of one rank,
    and where MPI is not running, nobody waits, and Python goes its usual way.
    """
    return Guard()


class Guard:
    """Hooks that are in place from when this is made until the end of its block, if any."""

    def __init__(self) -> None:
        self._hook: _Hook = sys.excepthook
        self._thread_hook: _ThreadHook = threading.excepthook
        self._active = True
        sys.excepthook = self._failed
        threading.excepthook = self._thread_failed

    def __enter__(self) -> Guard:
        """Return the guard."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the job if the block failed; else put the earlier hooks back."""
        if error is not None:
            _end(error, self._hook)
        self._active = False
        # A hook that was put over ours stays, and finds the earlier one through us.
        if sys.excepthook == self._failed:
            sys.excepthook = self._hook
        if threading.excepthook == self._thread_failed:
            threading.excepthook = self._thread_hook

    def _failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._active:
            _end(error, self._hook)
        self._hook(kind, error, trace)

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        # A thread may leave by SystemExit, whatever its status: Python takes no notice of it.
        if self._active and args.exc_value and not issubclass(args.exc_type, SystemExit):
            _end(args.exc_value, self._hook, f", thread {args.thread.name}" if args.thread else "")
        self._thread_hook(args)


def _end(error: BaseException, hook: _Hook, thread: str = "") -> None:
    """Say what happened and end the job; return only where nothing is to be ended."""
    status = _status(error)
    world = _world()
    if not status or world is None:
        return
    rank, size = world.Get_rank(), world.Get_size()
    if not _ending.acquire(blocking=False):
        time.sleep(2 * BOUND)  # another thread ends the process
    try:
        end_in(BOUND)
        time.sleep(min(STAGGER * math.log2(1 + rank), BOUND / 2))
        flush(sys.stdout)
        _show(error, hook, f"rank {rank} of {size} on {socket.gethostname()}{thread}")
        time.sleep(LAST_WORD)
        world.Abort(status)
    finally:
        os._exit(status)


def _status(error: BaseException) -> int:
    """Return the exit status that an exception means; 0 for none that ends the job."""
    if isinstance(error, GeneratorExit):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or code == 0:
            return 0
        return code if isinstance(code, int) and 0 < code < 256 else 1
    return 1


def _world() -> Any:
    """Return the world if somebody else is in it and MPI is running, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module.COMM_WORLD if module.COMM_WORLD.Get_size() > 1 else None


def _show(error: BaseException, hook: _Hook, where: str) -> None:
    """Write what happened, in one piece where that is ours to decide."""
    if isinstance(error, SystemExit):
        what = f" with status {error.code}" if isinstance(error.code, int) else f": {error.code}"
        return say(f"mpicoll: {where} ends the job{what}\n")
    if isinstance(error, KeyboardInterrupt):
        return say(f"mpicoll: {where} was interrupted and ends the job\n")
    head = f"mpicoll: {where} failed and ends the job\n"
    while isinstance(guard := getattr(hook, "__self__", None), Guard):
        hook = guard._hook  # of a block around ours
    kind, trace = type(error), error.__traceback__
    if hook is not sys.__excepthook__:
        say(head)
        try:
            hook(kind, error, trace)
            return flush(sys.stderr)
        except Exception:
            head = ""  # shown already
    try:
        text = "".join(traceback.format_exception(kind, error, trace))
    except Exception:
        text = f"{kind.__name__}, whose traceback can't be formatted\n"
    say(head + text)


def end_in(seconds: float) -> None:
    """End this process in that many seconds, whatever it does then."""
    try:
        where = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # too many open files: the stacks that it writes then are read by somebody
        where = 2
    # A thread of C: MPI_Abort keeps the GIL, so no Python runs beside it.
    faulthandler.dump_traceback_later(seconds, exit=True, file=where)


def say(text: str) -> None:
    """Write on stderr, wherever that is by now."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # closed, or None
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


def flush(stream: Any) -> None:
    """Flush a stream that may be closed, None, or anything that a user has put there."""
    try:
        stream.flush()
    except Exception:
        return  # closed, or None: there is nothing to lose
