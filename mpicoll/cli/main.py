"""Where the command line starts: what is wrong is said once, by rank 0, at once."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence

from mpicoll.cli import launch
from mpicoll.errors import AlgorithmError, SettingError

#: Seconds that the others wait before they leave on misuse: some launchers end the job, and with
#: it rank 0 before it has spoken, when the first process fails.
FIRST_WORD = 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its status: 0, 1 (a check failed) or 2 (misuse)."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its status; only rank 0 prints."""
    with contextlib.ExitStack() as stack:
        if not launch.speaks():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import click

        from mpicoll.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("click", "rich"):
            raise
        _say(f"the command line needs {error.name}: pip install 'mpicoll[cli]'")
        return 2
    try:
        result = app.main(arguments, prog_name="mpicoll", standalone_mode=False)
    except click.ClickException as error:
        if launch.speaks():
            error.show()
        else:
            time.sleep(FIRST_WORD)
        return error.exit_code
    except click.Abort:
        _say("interrupted")
        return 130
    except (AlgorithmError, SettingError) as error:  # equal on all ranks
        _say(str(error))
        return 2
    except Exception:
        traceback.print_exc()
        _end_all_ranks()
        return 1
    return result if isinstance(result, int) else 0


def _say(message: str) -> None:
    if launch.speaks():
        print(f"mpicoll: {message}", file=sys.stderr)


def _end_all_ranks() -> None:
    """End the job: the other ranks may wait for this one for ever."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.size > 1:
        sys.stderr.flush()
        time.sleep(launch.LAST_WORD)
        loaded.COMM_WORLD.Abort(1)
