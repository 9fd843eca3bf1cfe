"""jobs/train.py as a job: accuracy, the same run after a kill, --verify, and what it refuses.

The jobs are started where the tests run on one rank, on numbers of ranks of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from childjob import Ended, run_job
from jobs_path import JOBS
from mpi4py import MPI

ALONE = MPI.COMM_WORLD.size == 1

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "moe", "contrastive"]
#: As --help states them.
ACCURACY = dict.fromkeys(STRATEGIES, 0.96) | {"moe": 0.95, "contrastive": 0.94}

RUN = f"""
import runpy
runpy.run_path({str(JOBS / "train.py")!r}, run_name="__main__")
"""
# One rank is killed in step 18, whatever it is at.
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(JOBS)!r})
from mpi4py import MPI
from training.clock import Clock
step, taken = Clock.step, 0
def deadly(clock):
    global taken
    taken += 1
    if taken == 18 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(clock)
Clock.step = deadly
"""
# Rank 0 is killed when the second checkpoint is written in half.
HALF = f"""
import os, signal, sys
sys.path.insert(0, {str(JOBS)!r})
import numpy as np
savez, saved = np.savez, 0
def deadly(file, **arrays):
    global saved
    saved += 1
    savez(file, **arrays)
    if saved == 2:
        file.truncate(file.tell() // 2)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
np.savez = deadly
"""


@pytest.fixture
def samples(tmp_path: Path) -> str:
    """Return a file of clouds around five centres; the last batch of 40 has 8 samples."""
    rng = np.random.default_rng(2)
    y = np.arange(260) % 5
    x = rng.normal(0, 1, (5, 12))[y] + rng.normal(0, 0.3, (260, 12))
    np.savez(tmp_path / "clouds.npz", x=x, y=y)
    return "clouds.npz"


def row(ended: Ended, name: str) -> str:
    """Return what the final table says."""
    assert ended.status == 0, ended
    found = re.search(rf"^ *{name}: +(.*)$", ended.out, re.MULTILINE)
    assert found, (name, ended)
    return found[1]


def losses(ended: Ended) -> dict[str, str]:
    """Return the losses that were shown, by step."""
    return dict(re.findall(r"^step (\d+)/.*?loss ([^,]*),", ended.out, re.MULTILINE))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accuracy(strategy: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    pytest.importorskip("sklearn")
    ended = run_job(2, RUN, tmp_path, "--strategy", strategy)
    assert float(row(ended, "test accuracy")) >= ACCURACY[strategy]
    assert row(ended, "parameters identical on all ranks") == "yes"
    parts = {name: float(row(ended, name).split()[0]) for name in ("compute", "communication")}
    whole = float(row(ended, "time per step").split()[0])
    assert whole == pytest.approx(sum(parts.values()), abs=0.02)  # each is shown to 0.01 ms
    assert 0 <= float(row(ended, "overlap").split()[0]) <= parts["compute"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumes_after_a_kill(strategy: str, samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    options = ["--strategy", strategy, "--data", samples, "--batch", "40", "--steps", "30"]
    options += ["--checkpoint-every", "5", "--checkpoint"]
    whole = run_job(3, RUN, tmp_path, *options, "whole")
    killed = run_job(3, KILLED + RUN, tmp_path, *options, "killed")
    assert killed.status != 0
    resumed = run_job(3, RUN, tmp_path, *options, "killed")
    assert "from step 15" in resumed.out
    for name in ("test accuracy", "sha256 of the parameters"):
        assert row(resumed, name) == row(whole, name)
    assert losses(resumed)["30"] == losses(whole)["30"]


@pytest.mark.parametrize("strategy", ["ddp", "moe"])
def test_a_kill_leaves_the_older_checkpoint(strategy: str, samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    options = ["--strategy", strategy, "--data", samples, "--batch", "40", "--steps", "12"]
    options += ["--checkpoint-every", "5", "--checkpoint"]
    killed = run_job(2, HALF + RUN, tmp_path, *options, "killed")
    assert killed.status != 0
    whole = run_job(2, RUN, tmp_path, *options, "whole")
    resumed = run_job(2, RUN, tmp_path, *options, "killed")
    assert "from step 5" in resumed.out
    assert row(resumed, "sha256 of the parameters") == row(whole, "sha256 of the parameters")


@pytest.mark.parametrize(("first", "then"), [("moe", "moe"), ("zero1", "zero3"), ("ddp", "ddp")])
def test_resumes_on_other_ranks(first: str, then: str, samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    options = ["--data", samples, "--batch", "40", "--checkpoint", "state", "--strategy"]
    run_job(2, RUN, tmp_path, *options, first, "--steps", "60")
    ended = run_job(3, RUN, tmp_path, *options, then, "--steps", "61")
    assert "from step 60" in ended.out
    assert "note: ranks was 2, is 3" in ended.out
    assert float(row(ended, "test accuracy")) > 0.9  # clouds that are learnt in sixty steps


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_verify(strategy: str, samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    options = ["--data", samples, "--batch", "40", "--steps", "15", "--verify"]
    ended = run_job(3, RUN, tmp_path, *options, "--strategy", strategy)
    assert row(ended, "one process, steps compared") == "15"
    assert "of the bound at most" in row(ended, "one process, parameters")
    assert ("one process, gradients" in ended.out) == (strategy == "ddp")


def test_verify_ends_a_run_that_is_wrong(samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    wrong = f"""
import sys
sys.path.insert(0, {str(JOBS)!r})
import training.tasks as tasks
right, calls = tasks.classify, 0
def wrong(net, store, x, y, scale):
    global calls
    calls += 1
    return right(net, store, x, y, scale * (1.001 if calls == 4 else 1))
tasks.classify = wrong
"""
    options = ["--data", samples, "--batch", "40", "--steps", "15", "--verify"]
    for strategy, what in (("ddp", "gradient"), ("zero2", "parameter")):
        ended = run_job(2, wrong + RUN, tmp_path, *options, "--strategy", strategy)
        assert ended.status != 0
        assert f"--verify: step 4: the {what} 'layer" in ended.err


#: Options, and what is said about them, once.
REFUSED: list[tuple[list[str], str]] = [
    (["--strategy", "moe", "--verify"], "--verify is for ddp, zero1, zero2, zero3, not moe"),
    (["--strategy", "zero4"], "invalid choice"),
    (["--lr", "-1"], "argument --lr"),
    (["--seed", "-1"], "argument --seed"),
    (["--algorithm", "rnig"], "rnig"),
    (["--data", "nowhere.npz"], "nowhere.npz"),
    (["--data", "other.npz"], "5 samples or more"),
    (["--lr", "1e20"], "the loss is not finite any more"),
    (["--checkpoint", "nowhere/ddp"], "no folder nowhere"),
    (["--checkpoint", "ddp", "--lr", "0.1"], "of another run: lr was 0.05, is 0.1"),
    (["--checkpoint", "ddp", "--strategy", "moe"], "of another run: strategy was ddp"),
    (["--checkpoint", "ddp", "--strategy", "zero1"], "no ddp.json beside it"),
    (["--checkpoint", "clouds.npz"], "must hold ['config', 'step']"),
    (["--checkpoint", "ddp", "--steps", "9", "--verify"], "--verify begins at step 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_it_refuses(options: list[str], message: str, samples: str, tmp_path: Path) -> None:
    if not ALONE:
        return
    np.savez(tmp_path / "other.npz", x=np.ones((3, 2)), y=np.zeros(3, int))
    if "ddp" in options:
        made = run_job(1, RUN, tmp_path, "--data", samples, "--steps", "2", "--checkpoint", "ddp")
        assert made.status == 0
    given = options if "--data" in options else ["--data", samples, *options]
    ended = run_job(2, RUN, tmp_path, *given)
    assert ended.status != 0
    assert message in ended.err, ended
    assert ended.err.count("train.py: error:") == 1, ended.err
