"""CuPy, and whatever else shows device memory."""
from __future__ import annotations
import sys
from typing import Any

from mpicoll.runtime.staging import DeviceMemory


def recognised(data: Any) -> DeviceMemory | None:
    return None
