"""Jobs that a test starts, for what would end or hang the job that runs the tests."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from mpi4py import MPI

# A launcher's, which a child job gets anew: with it, a second mpiexec thinks it is a rank; and
# where these tests keep dumps, for a child job its own folder.
_PREFIXES = (
    *("OMPI_COMM_", "PMI", "PRTE", "HYDRA", "HYDI", "MPI_LOCAL", "I_MPI_HYDRA", "MPIR_"),
    "MPICOLL_FLIGHT",
)
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1", "I_MPI_THREAD_YIELD": "3"}
LIMIT = 100  #: seconds, after which a job has hung


class Ended(NamedTuple):
    """How a job ended."""

    status: int
    out: str
    err: str


def environment(without: tuple[str, ...] = _PREFIXES) -> dict[str, str]:
    """Return the variables of a child job but those that begin with one of ``without``.

    pytest sets and removes one of its own for every phase of a test, perhaps while a thread
    asks here: none is read that is not wanted, and one that is gone is passed over.
    """
    names = [name for name in list(os.environ) if not name.startswith((*without, "PYTEST_"))]
    found = {name: os.environ.get(name) for name in names}
    kept = {name: value for name, value in found.items() if value is not None}
    return {**_YIELD, **kept, **_ROOT}


def mpiexec(size: int) -> list[str]:
    """Return the start of a command line: that of the MPI which these tests run on."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None, "no mpiexec beside Python or in PATH"
    open_mpi = MPI.get_vendor()[0] == "Open MPI"
    return [
        found,
        *(["--oversubscribe", "--bind-to", "none"] if open_mpi else []),
        "-n",
        str(size),
    ]


def run_job(size: int, script: str, folder: Path, *arguments: str, **variables: str) -> Ended:
    """Run ``script`` on ``size`` ranks in ``folder``; a failure if it hangs."""
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    return run_command(size, [sys.executable, str(file), *arguments], folder, **variables)


def run_command(size: int, command: list[str], folder: Path, **variables: str) -> Ended:
    """Run ``command`` on ``size`` ranks, 0 for without mpiexec; a failure if it hangs."""
    # A session of its own, so that all of it can be ended: mpiexec alone may leave its ranks.
    with subprocess.Popen(
        [*(mpiexec(size) if size else []), *command],
        env={**environment(), "TERM": "dumb", "OPENBLAS_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    ) as job:
        try:
            out, err = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            os.killpg(job.pid, signal.SIGKILL)
            # In bytes, and not asked for again: a rank that is left may keep the pipe open.
            said = b"".join(filter(None, (error.output, error.stderr))).decode(errors="replace")
            pytest.fail(
                f"{shlex.join(command)}\non {size} rank(s) was not over after {LIMIT} s:\n"
                f"{said[-3000:]}"
            )
    return Ended(job.returncode, out, err)
