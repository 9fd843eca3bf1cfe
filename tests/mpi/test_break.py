"""Ranks that stop, are killed, or disagree: each ends as documented, inside a stated time.

The jobs are started where the tests run on one rank, some at a time, since they mostly wait;
breaking.py says what runs in them. A job that does not end within `BOUND` is ended, and fails
its test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from breaking import ASK, LIMIT
from childjob import _PREFIXES, _ROOT, _YIELD, mpiexec
from mpi4py import MPI

from mpicoll.runtime import watchdog

if TYPE_CHECKING:
    from harness import Ranks

ALONE = MPI.COMM_WORLD.size == 1
HERE = Path(__file__).parent
#: Seconds in which a job of one case has to end: what the ranks may take from the start of
#: their time limit to the end of the process, and as much again for a machine that is busy.
BOUND = 2 * (LIMIT + ASK + watchdog.GIVE_UP_SECONDS + watchdog.LEAVE_SECONDS + 15)
#: Seconds of one case among many.
CASE = LIMIT + ASK + 10
JOBS = 3  #: that run at a time

Line = dict[str, Any]


class Ended(NamedTuple):
    """How a job ended: its status, what its ranks saw, and what it wrote."""

    status: int
    lines: list[Line]
    err: str

    def of(self, **about: Any) -> list[Line]:
        """Return the lines that have these values."""
        return [
            one
            for one in self.lines
            if all(key in one and one[key] == value for key, value in about.items())
        ]


def job(
    folder: Path,
    size: int,
    scene: str,
    arguments: dict[str, Any] | None = None,
    limit: float = BOUND,
    options: tuple[str, ...] = (),
    **variables: str,
) -> Ended:
    """Run a scene of breaking.py on ``size`` ranks; TimeoutExpired if it does not end."""
    folder.mkdir()
    program, *rest = mpiexec(size)
    script = [sys.executable, str(HERE / "breaking.py"), str(folder), scene]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
    process = subprocess.Popen(
        [program, *options, *rest, *script, json.dumps(arguments or {})],
        env={**_YIELD, **environment, **_ROOT, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        _, err = process.communicate(timeout=limit)
    finally:
        _end(process, folder)
    lines = [
        json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open("rb")
    ]
    return Ended(process.returncode, lines, err)


def _end(process: subprocess.Popen[str], folder: Path) -> None:
    """End what is left of a job: launcher and ranks, stopped ones too."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for file in folder.glob("pid-*"):
        pid = int(file.read_text())
        with contextlib.suppress(OSError):  # a number may belong to somebody else by now
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks
) -> Iterator[dict[str, Future[Ended]]]:
    """The jobs of the tests that were chosen, all under way."""
    if not ALONE:
        yield {}
        return
    folder = tmp_path_factory.mktemp("break")
    full = bool(request.config.getoption("full", False))
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and "name" in getattr(item, "callspec", item).params
    }
    with ThreadPoolExecutor(JOBS) as pool:
        yield {
            name: pool.submit(job, folder / name.replace(" ", "-"), **options)
            for name, options in _wanted(full, ranks.seed).items()
            if name in wanted
        }


def _wanted(full: bool, seed: int) -> dict[str, dict[str, Any]]:
    """Return the jobs by name."""
    found: dict[str, dict[str, Any]] = {}
    for size, world, most in STOPS:
        cases = {"size": size, "seed": seed, "most": 0 if full else most}
        limit = 86400.0 if full else 60 + CASE * most * size / world
        found[f"stops {size}"] = {
            "size": world, "scene": "stops", "arguments": cases, "limit": limit
        }  # fmt: skip
    return found


#: Ranks of a group, ranks of the job, and how many of the cases are tried.
STOPS = ((2, 8, 32), (4, 8, 18), (8, 8, 9))


@pytest.mark.parametrize("name", [f"stops {size}" for size, _, _ in STOPS])
def test_a_rank_that_stops(jobs: dict[str, Future[Ended]], name: str) -> None:
    """Every other rank gets CollectiveTimeout that names it, and other communicators work."""
    if not ALONE:
        return
    done = jobs[name].result()
    assert len(done.of(end=True)) == 8, done.err
    assert done.status != 0  # a communicator was poisoned, so the job ends by Abort
    cases = done.of(after=True)
    assert len(cases) >= int(name.split()[1])
    for line in cases:
        assert line["error"] == "PoisonedError", line
        assert "this communicator can not be used any more" in line["text"], line
    for line in done.of(stops=False):
        assert line["timeout"], line
        assert line["error"] == "PoisonedError" or line["silent"] == [line["victim"]], line
        assert line["seconds"] < CASE, line
    for case in {line["case"] for line in cases}:
        assert done.of(case=case, error="CollectiveTimeout", stops=False), case
