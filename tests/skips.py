"""A pytest plugin: a skip that tests/allowed_skips.txt does not name fails the run.

A skipped test proves nothing, and looks like one that passed. So each skip is agreed on once, for
a number of ranks, an MPI and a thing that the machine lacks; elsewhere the same skip is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

LIST = Path(__file__).with_name("allowed_skips.txt")


class Allowed(NamedTuple):
    """One line of the list."""

    test: re.Pattern[str]
    ranks: str
    mpi: str
    missing: str


def has_module(name: str) -> bool:
    """Return whether a module is installed, without loading it."""
    return importlib.util.find_spec(name) is not None


def has_cuda() -> bool:
    """Return whether CuPy finds a device."""
    if not has_module("cupy"):
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def compiler() -> str:
    """Return the C compiler, "" where there is none."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "")


def has_memory() -> bool:
    """Return whether the machine has the memory that tests of huge messages need."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= 16 << 30


def has_realtime() -> bool:
    """Return whether this process may ask for a real-time policy."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, policy, param)
    return True


CAPABILITIES: dict[str, Callable[[pytest.Config], bool]] = {
    "-": lambda config: False,
    "mpi": lambda config: with_mpi(config),
    "cuda": lambda config: has_cuda(),
    "cupy": lambda config: has_module("cupy"),
    "torch": lambda config: has_module("torch"),
    "compiler": lambda config: bool(compiler()),
    "sklearn": lambda config: has_module("sklearn"),
    "simgrid": lambda config: has_module("simgrid"),
    "realtime": lambda config: has_realtime(),
    "memory": lambda config: has_memory(),
}


def with_mpi(config: pytest.Config) -> bool:
    """Return whether pytest was asked to run under MPI."""
    return bool(config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False))


def here(config: pytest.Config) -> tuple[str, str]:
    """Return the number of ranks and the name of the MPI, as the list spells them."""
    if not with_mpi(config):  # unit tests run where there is no MPI to load
        return "1", "none"
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    names = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi"}
    return str(MPI.COMM_WORLD.size), names.get(vendor, vendor)


def read_list(path: Path) -> list[Allowed]:
    """Read the list of allowed skips; a line that does not parse is an error."""
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(" | ")]
        if len(fields) != 5 or not all(fields):
            raise pytest.UsageError(f"{path.name}:{number}: 5 fields expected, parted by ' | '")
        test, ranks, mpi, missing, _ = fields
        if missing not in CAPABILITIES:
            known = " ".join(CAPABILITIES)
            raise pytest.UsageError(f"{path.name}:{number}: {missing!r} is none of: {known}")
        pattern = re.escape(test).replace(r"\*", ".*").replace(r"\?", ".")
        lines.append(Allowed(re.compile(pattern, re.DOTALL), ranks, mpi, missing))
    return lines


class SkipCheck:
    """Collects the skips of a run that are not allowed, and fails it for them."""

    def __init__(self, config: pytest.Config, allowed: list[Allowed]) -> None:
        self._ranks, self._mpi = here(config)
        absent = {name for name, has in CAPABILITIES.items() if not has(config)}
        self._allowed = [
            line
            for line in allowed
            if line.ranks in ("*", self._ranks)
            and line.mpi in ("*", self._mpi)
            and line.missing in absent
        ]
        self._unexpected: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if any(line.test.fullmatch(report.nodeid) for line in self._allowed):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        self._unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at a test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Look at a module, which may skip itself as a whole."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that has nothing else against it."""
        fine = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._unexpected and session.exitstatus in fine:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the skips that are not allowed."""
        if self._unexpected:
            count, where = len(self._unexpected), f"{self._ranks} rank(s), MPI: {self._mpi}"
            terminalreporter.section(f"{count} unexpected skip(s), {where}", red=True)
            for line in self._unexpected:
                terminalreporter.line(line)
            terminalreporter.line(f"Make them run, or add them to tests/{LIST.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Start the check."""
    config.pluginmanager.register(SkipCheck(config, read_list(LIST)), "mpicoll-skips")
