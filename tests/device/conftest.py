"""Tests of device buffers on several ranks: ``mpiexec -n P python -m pytest --with-mpi
tests/device``. Harness and fixtures are those of tests/mpi.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def _shared() -> Any:
    """Return the conftest of tests/mpi, loaded once more under a name of its own."""
    path = HERE.parent / "mpi" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_mpi", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_SHARED = _shared()
_NAMES = ("ranks", "full", "rng", "world", "clean")
globals().update(
    {
        name: value
        for name, value in vars(_SHARED).items()
        # Options may be added once; here MPICOLL_TEST_SEED does what --seed does there.
        if name in _NAMES or (name.startswith("pytest_") and name != "pytest_addoption")
    }
)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs CuPy and a device")
    _SHARED.pytest_configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(autouse=True)
def deferred_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let deferred arrays count as device arrays, and leave nothing queued."""
    import like_cupy
    from deferred import BACKEND, Array

    from mpicoll.runtime import device, staging

    for kind in (Array, like_cupy.ndarray):
        monkeypatch.setitem(device._BACKENDS, kind, BACKEND)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    yield
    BACKEND.use("late", True)
