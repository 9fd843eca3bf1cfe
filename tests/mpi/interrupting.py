"""An interrupt at a chosen instruction, as a handler of signals that raises makes one.

CPython looks for signals behind a call, at the start of a function and when a loop goes
back, and nowhere else. Such places of the runtime are counted while a call runs, and at one
of them an exception is raised; so each can be tried in turn, and none depends on a clock.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import mpicoll

RUNTIME = Path(mpicoll.__file__).parent / "runtime"
#: What runs before a call has its plan, or while the ranks agree on what it needs; left out
#: where the rest is tried.
PLANNING = {"choose", "open", "reopen", "exchange", "__init__", "__del__"}
#: Functions with which that part ends: at the start of these their callers are to blame.
STARTS = {"run", "_course", "course", "launch", "next_sequence", "wait", "rounds"}
#: Instructions behind which CPython looks for signals, in all of its versions.
LOOKS = ("CALL", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "RESUME")
#: Before these instructions CPython 3.10 looks for no signal.
UNLOOKED = {"SETUP_FINALLY", "SETUP_WITH", "BEFORE_ASYNC_WITH", "YIELD_FROM"}


class Interrupted(Exception):
    """What the handler raises."""


class Interrupts:
    """Raises `Interrupted` at the place of number ``at``; ``seen`` are the places passed."""

    def __init__(
        self, at: int, files: set[str], begin: set[str], planning: set[str] = PLANNING
    ) -> None:
        """Count in files of the runtime, from the first call of a function in ``begin`` on.

        Those of ``planning`` are left out.
        """
        self.at = at
        self.seen = 0
        self.where = ""
        self._files = {str((RUNTIME / file).resolve()) for file in files}
        self._begin = begin
        self._planning = planning
        self._begun = False
        self._last: dict[FrameType, int] = {}
        self._before: Any = None
        self._collects = True

    def __enter__(self) -> Interrupts:
        self._before = sys.gettrace()
        # Where the collector closes a generator that has not begun, a trace is told of a call.
        # CPython looks for no signal there, and drops what is raised.
        self._collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    @property
    def hit(self) -> bool:
        """Whether the place was reached."""
        return self.seen > self.at

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name in self._planning:
            return None
        self._begun = self._begun or code.co_name in self._begin
        if self._begun:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            if frame not in self._last and code.co_name not in STARTS and _enters(frame):
                self._pass(frame)
            return self._instruction
        return None

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "opcode":
            code = frame.f_code
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and _looks(code, last):
                self._pass(frame)
        return self._instruction

    def _pass(self, frame: FrameType) -> None:
        number = self.seen
        self.seen += 1
        if number == self.at:
            self.where = f"{frame.f_code.co_qualname if sys.version_info >= (3, 11) else ''} "
            self.where += f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise Interrupted


def _enters(frame: FrameType) -> bool:
    """Whether CPython looks for signals where a frame begins or goes on; behind yield from not."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if sys.version_info < (3, 11):
        return dis.opname[code[at + 2 if at >= 0 else 0]] not in UNLOOKED
    return at < 0 or not (dis.opname[code[at]] == "RESUME" and code[at + 1] & 3 > 1)


def _looks(code: CodeType, at: int) -> bool:
    """Whether CPython looks for signals behind an instruction."""
    name, argument = dis.opname[code.co_code[at]], code.co_code[at + 1]
    if name == "RESUME":  # at the start of a function, or where it goes on behind yield: see above
        return argument & 3 == 1
    return name.startswith(LOOKS) and not name.endswith("NO_INTERRUPT")
