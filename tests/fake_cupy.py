"""A module that looks like CuPy to `mpicoll doctor`: devices by name and place, no driver."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of the runtime."""


class MemoryAsyncPool:
    """CuPy's class of that name, whose method is set as allocator."""

    def malloc(self, nbytes: int) -> None:
        """Allocate."""


class MemoryPool(MemoryAsyncPool):
    """The pool that CuPy begins with."""


def malloc_async(nbytes: int) -> None:
    """Allocate from the device's asynchronous pool."""


def bus(number: int) -> str:
    """Return where a device is."""
    return f"0000:{number:02x}:00.0"


def properties(number: int) -> dict[str, Any]:
    """Return what the runtime says of a device."""
    uuid = bytes([0xA0 + number]) * 16
    return {"name": b"Fake GPU", "uuid": uuid, "totalGlobalMem": 80 << 30}


def fake_cupy(*shown: int, current: int = 0, error: str = "", allocator: Any = None) -> ModuleType:
    """Return a CuPy that sees the devices of a node that ``shown`` has the numbers of."""

    def count() -> int:
        if error:
            raise CUDARuntimeError(error)
        return len(shown)

    module = ModuleType("cupy")
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        getDevice=lambda: current,
        getDeviceProperties=lambda number: properties(shown[number]),
        deviceGetPCIBusId=lambda number: bus(shown[number]).upper(),
    )
    pool = MemoryPool()
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        malloc_async=malloc_async,
        get_allocator=lambda: allocator or pool.malloc,
    )
    return module
