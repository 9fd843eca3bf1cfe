"""jobs/train.sbatch knows the options of jobs/train.py, and refuses others before its set-up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "jobs"


def train(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(JOBS / "train.sbatch"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


def test_all_options_are_in_the_help() -> None:
    options = re.findall(r'add\("(--[a-z-]+)"', (JOBS / "train.py").read_text(encoding="utf-8"))
    assert "--checkpoint-every" in options
    done = train("--help")
    assert done.returncode == 0
    for option in options:
        assert re.search(rf"[\s\[]{option}\b", done.stdout), option


@pytest.mark.parametrize("option", ["--nonsense", "--nonsense=3", "--x*", "-x"])
def test_others_are_refused_before_the_set_up(option: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = train("--epochs", "1", option, MPICOLL_VENV=str(venv))
    assert done.returncode == 2
    assert done.stderr.startswith(f"train.sbatch: there is no option {option.split('=')[0]};")
    assert not venv.exists()


@pytest.mark.parametrize(
    "options", [("--epo", "3"), ("--batch=3",), ("--lr", "-0.1"), ("--verify",), ("--", "x")]
)
def test_what_is_left_to_the_job(options: tuple[str, ...], tmp_path: Path) -> None:
    """The set-up is reached: it refuses a name of an MPI, and does nothing."""
    done = train(*options, MPICOLL_MPI="none", MPICOLL_VENV=str(tmp_path / "venv"))
    assert "MPICOLL_MPI is 'none'" in done.stderr
    assert list(tmp_path.iterdir()) == []
