"""The trial of device pointers as it is made: two processes of their own, started by a rank.

In place of CuPy they load a module whose memory is the host's, which every MPI takes, or may
not be touched: there an MPI crashes as one does that knows no device memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import Ranks

from mpicoll.runtime import device_support

_CUPY = """
import ctypes
import os
from types import SimpleNamespace

import numpy as np
from numpy import uint8


class Array(np.ndarray):
    @property
    def data(self):
        if os.environ["TRIAL_MEMORY"] == "host":
            return SimpleNamespace(ptr=self.ctypes.data)
        mapped = ctypes.CDLL(None).mmap
        mapped.restype, mapped.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        private, nothing = 0x22, 0  # and of no file; may neither be read nor written
        return SimpleNamespace(ptr=mapped(None, self.nbytes, nothing, private, -1, 0))


def full(count, value, dtype):
    return np.full(count, value, dtype).view(Array)


def zeros(count, dtype):
    return full(count, 0, dtype)


def device(number):
    assert number in (0, 1)
    return SimpleNamespace(use=lambda: None, synchronize=lambda: None)


cuda = SimpleNamespace(Device=device, runtime=SimpleNamespace(getDeviceCount=lambda: 2))
"""


@pytest.mark.parametrize(("memory", "answer"), [("host", True), ("forbidden", False)])
def test_two_processes_try_and_a_crash_is_theirs(
    memory: str, answer: bool, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer
    if ranks.rank == 0:
        (tmp_path / "cupy.py").write_text(_CUPY, encoding="utf-8")
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv("TRIAL_MEMORY", memory)
        found = device_support.tried()
    assert ranks.comm.bcast(found) is answer
