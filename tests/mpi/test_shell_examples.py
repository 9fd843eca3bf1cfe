"""The commands of README and docs run: those of a page one after the other, in a folder.

They run on fewer ranks, and what measures or replays is told to be short. Commands that are not
ours to run, such as Slurm's, are listed; one that is neither run nor listed fails.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from childjob import run_command
from mpi4py import MPI
from skips import has_cuda
from test_examples import EXAMPLES, PAGES, ROOT

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
NETWORK = re.compile(r"^```json\n(.*?)^```", re.M | re.S)

#: What a line begins with that is not run here, and why.
ELSEWHERE = {
    "bash jobs/": "CI runs them, the training for fewer steps",
    "git clone": "a copy is tested",
    "python3 -m venv": "would change what is tested",
    "pip install": "would change what is tested",
    "sbatch": "no Slurm",
    "srun": "no Slurm",
    "scancel": "no Slurm",
    "#": "a script's head",
    ". ~/mpicoll/jobs/setup.sh": "CI runs it by way of the jobs",
    "mpicoll_setup": "CI runs it by way of the jobs",
    "mpi_run": "CI runs it by way of the jobs",
    "kill -USR1": "tests/mpi/test_flight.py",
    "mpiexec -n 8 mpicoll bench allreduce --compare native,gloo": "no torch in CI; test_bench.py",
    "OMP_NUM_THREADS=1 mpiexec -n 4 python jobs/bench_ddp.py": "no torch in CI",
    "mpicoll explain --which  ": "asks, and there is nobody to answer",
    "mpicoll simulate allreduce -n 32 -a ring,circulant --engine simgrid": "no SimGrid in CI",
}
#: Options behind those of the docs; of an option that is given twice the last one holds.
SHORT = {
    "bench": ["--sizes", "8,4K", "--seconds", "0"],
    "tune": ["--sizes", "8,4K", "--seconds", "0", "--ranks", "2"],
    "simulate": ["-n", "64"],  # which docs have at 131072
    "jobs/train.py": ["--steps", "20"],
}
RANKS = 2  #: at most
JOBS = 2  #: pages under way at a time
#: Exit statuses other than 0: a hang is found; there is no device.
STATUS = {"doctor --flight": 1}
if not has_cuda():
    STATUS |= {"--device cuda": 2, "--memory device": 2}

TRAIN = """
import time
import numpy as np
import mpicoll
from mpi4py import MPI

comm = mpicoll.Comm(MPI.COMM_WORLD)
gradient = np.ones(1000)
for _ in range(10):
    comm.Allreduce(MPI.IN_PLACE, gradient, op=mpicoll.AVG)
    time.sleep(0.03)
"""
HANGS = """
import sys
import mpicoll
from mpi4py import MPI

comm = mpicoll.Comm(MPI.COMM_WORLD, timeout=1)
try:
    if comm.rank:
        comm.Barrier()
except mpicoll.CollectiveTimeout:
    sys.exit(3)
"""


class Command(NamedTuple):
    """A line of a page, and how to run it: on how many ranks (0: alone), with which variables."""

    line: str
    ranks: int
    words: list[str]
    variables: dict[str, str]


class Failed(NamedTuple):
    """A command that did not end well."""

    line: str
    status: int
    text: str


def lines_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [line for block in BLOCK.findall(text) for line in block.splitlines() if line.strip()]


def commands_of(page: Path) -> list[Command]:
    """Return what is to be run; ValueError for a line that is neither ours nor listed."""
    found = []
    for line in lines_of(page):
        if line.startswith(tuple(ELSEWHERE)):
            continue
        words = shlex.split(line, comments=True)
        variables, ranks = {}, 0
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, variables[name] = words.pop(0).split("=", 1)
        if words[:2] == ["mpiexec", "-n"]:
            ranks, words = min(int(words[2]), RANKS), words[3:]
        if words[0] == "mpicoll":
            words[:1] = [sys.executable, "-m", "mpicoll"]
            words += SHORT.get(words[3], []) if "--study" not in words else ["--seconds", "0"]
        elif words[0] == "python":
            script = words[1]
            words[:2] = [sys.executable, str(ROOT / script) if "/" in script else script]
            words += SHORT.get(script, [])
        else:
            raise ValueError(f"{page.name}: neither run nor listed: {line}")
        found.append(Command(line, ranks, words, variables))
    return found


def outcome(page: Path, folder: Path) -> list[Failed]:
    """Run the commands of a page; return those that failed."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "hello.py").write_text(EXAMPLES.get(f"docs/tutorial/{page.name}", [""])[0])
    for network in NETWORK.findall(page.read_text(encoding="utf-8")):
        (folder / "cluster.json").write_text(network, encoding="utf-8")
    commands = commands_of(page)
    text = " ".join(one.line for one in commands)
    if "--flight" in text:
        (folder / "hangs.py").write_text(HANGS, encoding="utf-8")
        run_command(2, [sys.executable, "hangs.py"], folder, MPICOLL_FLIGHT="mpicoll-flight")
    if "trace DIR" in text:
        run_command(2, [sys.executable, "train.py"], folder, MPICOLL_TRACE="DIR")
    failed = []
    for command in commands:
        variables = {"XDG_CACHE_HOME": str(folder / "cache"), **command.variables}
        ended = run_command(command.ranks, command.words, folder, **variables)
        wanted = next((STATUS[one] for one in STATUS if one in command.line), 0)
        if ended.status != wanted:
            text = ended.out[-1000:] + ended.err[-3000:]
            failed.append(Failed(command.line, ended.status, text))
    return failed


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[list[Failed]]]]:
    """What came of the pages, all under way; on one rank, since they start ranks themselves."""
    if MPI.COMM_WORLD.size > 1:
        yield {}
        return
    folder = tmp_path_factory.mktemp("pages")
    with ThreadPoolExecutor(JOBS) as pool:
        yield {
            name_of(page): pool.submit(outcome, page, folder / page.stem)
            for page in PAGES
            if any(True for _ in lines_of(page))
        }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_run(page: Path, outcomes: dict[str, Future[list[Failed]]]) -> None:
    commands_of(page)  # each line is run or listed
    if name_of(page) in outcomes:
        for failed in outcomes[name_of(page)].result():
            pytest.fail(
                f"{failed.line}\nended with {failed.status}:\n{failed.text}", pytrace=False
            )


def test_what_is_listed_is_there() -> None:
    lines = [line for page in PAGES for line in lines_of(page)]
    for start in ELSEWHERE:
        assert any(line.startswith(start) for line in lines), f"no page has {start!r} any more"
