"""Tests on several ranks: ``mpiexec -n P python -m pytest --with-mpi tests/mpi``.

All of them are marked mpi, so that without ``--with-mpi`` pytest-mpi skips them; with it
and without mpiexec they run on one rank. Rank 0 alone reports. Every test is bound to a
time, ``MPICOLL_TEST_TIMEOUT`` seconds (120, with ``--full`` a day); see harness.py.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from skips import with_mpi

if TYPE_CHECKING:
    from harness import Ranks

    from mpicoll import Comm

HERE = Path(__file__).parent
RANKS = pytest.StashKey["Ranks"]()
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpicoll")
    group.addoption("--full", action="store_true", help="the product of cases, not a cover")
    group.addoption("--seed", type=int, help="the seed of all random data (drawn)")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Join the ranks, and silence all but one."""
    if not with_mpi(config) or RANKS in config.stash:
        return
    from harness import TIMEOUT_VARIABLE, Ranks

    # Taken out of the environment, where mpicoll wants to know every MPICOLL_ variable.
    # Errors that tests provoke leave no dumps in the checkout.
    os.environ.setdefault("MPICOLL_FLIGHT", str(Path(gettempdir(), "mpicoll-test-flight")))
    # A test of the product may take hours.
    usual = "86400" if config.getoption("full", False) else "120"
    timeout = float(os.environ.pop(TIMEOUT_VARIABLE, usual))
    ranks = config.stash[RANKS] = Ranks(_seed(config), timeout)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if ranks.rank and reporter is not None:
        config.pluginmanager.unregister(reporter)


def _seed(config: pytest.Config) -> int | None:
    """Return the seed that was asked for: by option, else by MPICOLL_TEST_SEED, as CI does."""
    variable = os.environ.pop("MPICOLL_TEST_SEED", "")
    given = config.getoption("seed", None)
    return int(variable) if given is None and variable else given


def pytest_report_header(config: pytest.Config) -> str | None:
    ranks = config.stash.get(RANKS, None)
    if ranks is None:
        return None
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    what = "product" if config.getoption("full", False) else "cover"
    return (
        f"mpicoll: {ranks.size} rank(s), {vendor} {'.'.join(map(str, version))}, {what} of "
        f"cases, --seed={ranks.seed}, {ranks.timeout:g} s per test"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.mpi)


def pytest_collection_finish(session: pytest.Session) -> None:
    """End a run whose ranks collected different tests, before they wait for each other."""
    ranks = session.config.stash.get(RANKS, None)
    if ranks is None:
        return
    found = [item.nodeid for item in session.items], session.testsfailed
    if len({repr(one) for one in ranks.comm.allgather(found)}) > 1:
        pytest.exit("the ranks collected different tests", pytest.ExitCode.INTERNAL_ERROR)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _of_rank_0_only(report.longreprtext if report.failed else "")


def pytest_internalerror(excrepr: object) -> None:
    _of_rank_0_only(str(excrepr))


def _of_rank_0_only(text: str) -> None:
    """Show what pytest would show, on a rank whose reporter is gone."""
    from mpi4py import MPI

    if text and MPI.COMM_WORLD.rank:
        os.write(2, f"rank {MPI.COMM_WORLD.rank}: {text}\n".encode())


# -- one verdict, and the watchdog ------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    ranks = item.config.stash.get(RANKS, None)
    if ranks is None:
        return (yield)
    ranks.watch(item.nodeid)
    try:
        return (yield)
    finally:
        ranks.unwatch()


def _together(item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
    ranks = item.config.stash.get(RANKS, None)
    if ranks is None:
        return (yield)
    try:
        return (yield from ranks.together(item.nodeid, phase))
    except BaseException:
        item.stash[FAILED] = True
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _together(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _together(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _together(item, "teardown"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Watch the end of the process too, where communicators are freed."""
    ranks = session.config.stash.get(RANKS, None)
    if ranks is not None:
        ranks.watch("at the end of the run")


# -- fixtures ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Ranks:
    """The ranks of the run, with the seed that they share."""
    return pytestconfig.stash[RANKS]


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether the product of cases was asked for."""
    return bool(pytestconfig.getoption("full", False))


@pytest.fixture
def rng(request: pytest.FixtureRequest, ranks: Ranks) -> np.random.Generator:
    """Random numbers of a test, the same on all ranks."""
    return np.random.default_rng([ranks.seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session")
def world(ranks: Ranks) -> Comm:
    """All ranks, wrapped; COMM_SELF is wrapped too, since it is never freed either."""
    from mpi4py import MPI

    from mpicoll import Comm

    Comm(MPI.COMM_SELF)
    return Comm(MPI.COMM_WORLD)


@pytest.fixture(params=["self", "world", "dup of self", "dup of world"])
def comm(request: pytest.FixtureRequest, world: Comm) -> Iterator[Comm]:
    """The communicators of mpi4py's own tests."""
    from mpi4py import MPI

    from mpicoll import Comm

    base = Comm(MPI.COMM_SELF if "self" in request.param else MPI.COMM_WORLD)
    if "dup" not in request.param:
        yield base
        return
    dup = base.Dup()
    yield dup
    dup.Free()


@pytest.fixture
def sub(world: Comm) -> Iterator[Comm]:
    """Halves of the world: even and odd ranks, each in reversed order."""
    part = world.Split(world.rank % 2, -world.rank)
    yield part
    part.Free()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, ranks: Ranks, world: Comm) -> Iterator[None]:
    """Hold a test to leaving no message and no communicator behind."""
    from mpi4py import MPI

    from mpicoll.runtime import ending

    before = len(ending.LINKS)
    yield
    if request.node.stash.get(FAILED, False):
        return
    ranks.comm.Barrier()
    left = []
    for one in ending.LINKS:
        status = MPI.Status()
        if one.hidden.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            left.append(f"{status.count} bytes from {status.source}, tag {status.tag}")
    assert not left, f"unmatched messages: {left}"
    assert len(ending.LINKS) == before, "the test has to free the communicators that it makes"
