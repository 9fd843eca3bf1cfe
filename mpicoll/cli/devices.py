"""The devices of every rank as `mpicoll doctor` finds them: who sees and who uses which.

CuPy is loaded where it is installed, and MPI is not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.cli import launch

if TYPE_CHECKING:
    from mpicoll.runtime.device_support import Obstacle

RULE = "local rank r takes device r modulo the devices that it sees"


class Device(NamedTuple):
    """A device by what is equal on all ranks that see it; its number may differ.

    ``memory`` is all that it has, in bytes.
    """

    name: str
    bus: str
    uuid: str
    memory: int


class Seen(NamedTuple):
    """What one process sees, by CuPy.

    ``devices`` are in the order of their numbers, ``current`` is the number of the one in
    use now. ``why`` says why there is none. ``pooled`` says that CuPy's memory is of an
    asynchronous pool.
    """

    devices: tuple[Device, ...] = ()
    current: int | None = None
    why: str = ""
    pooled: bool = False


class Place(NamedTuple):
    """One rank, what it sees, and what it would do with it.

    ``local`` is its rank on the node, ``told`` whether the launcher says so; ``number`` is
    the device that bind_device takes; ``variables`` are those that show devices, as this
    rank has them; ``signs`` and ``kept`` are what is known about device pointers.
    """

    rank: int
    node: str
    local: int
    told: bool
    seen: Seen
    number: int | None
    variables: Mapping[str, str]
    obstacles: tuple[Obstacle, ...]
    signs: tuple[str, ...]
    kept: bool | None

    @property
    def device(self) -> Device | None:
        """The device that bind_device takes."""
        return None if self.number is None else self.seen.devices[self.number]

    @property
    def current(self) -> Device | None:
        """The device that is in use without bind_device."""
        return None if self.seen.current is None else self.seen.devices[self.seen.current]


class Node(NamedTuple):
    """A node: its ranks, and the devices that at least one of them sees."""

    name: str
    devices: tuple[Device, ...]
    places: tuple[Place, ...]

    @property
    def alike(self) -> bool:
        """Whether all ranks see the same devices under the same numbers."""
        return len({place.seen.devices for place in self.places}) == 1

    @property
    def shared(self) -> bool:
        """Whether all ranks see all devices, under whatever numbers."""
        return len({frozenset(place.seen.devices) for place in self.places}) == 1

    def users(self, device: Device) -> list[Place]:
        """Return the ranks that bind_device gives the device."""
        return [place for place in self.places if place.device == device]

    def seers(self, device: Device) -> list[Place]:
        """Return the ranks that see the device."""
        return [place for place in self.places if device in place.seen.devices]


class Pointers(NamedTuple):
    """Whether device pointers go to the MPI: "yes", "no" or "not tried", and by what."""

    answer: str
    why: str
    signs: tuple[str, ...]
    ranks: tuple[int, ...]


# -- one rank -----------------------------------------------------------------------------


def look() -> Seen:
    """Return what this process sees.

    Nothing is raised: a page about faults must not end by one, nor leave other ranks waiting.
    """
    try:
        if "cupy" not in sys.modules and find_spec("cupy") is None:
            return Seen(why="CuPy is not installed")
        with warnings.catch_warnings():
            if not launch.speaks():  # once is enough
                warnings.simplefilter("ignore")
            import cupy
    except Exception as error:
        return Seen(why=f"CuPy can not be loaded: {_said(error.__cause__ or error)}")
    try:
        runtime = cupy.cuda.runtime
        count = int(runtime.getDeviceCount())
        devices = tuple([_device(runtime, number) for number in range(count)])
        current = int(runtime.getDevice()) if count else None
        why = "" if count else "the driver shows none"
        return Seen(devices, current, why, _pooled(cupy.cuda))
    except Exception as error:
        return Seen(why=_said(error))


def _said(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if any(map(str.isalnum, line))), "")
    # Errors of the runtime begin with a name of their own.
    return first if first.startswith(("cuda", "hip")) else f"{type(error).__name__}: {first}"


def _device(runtime: Any, number: int) -> Device:
    """Return a device; no context is made, which would take memory on it."""
    found = runtime.getDeviceProperties(number)
    name = found["name"]
    uuid = bytes(found.get("uuid", b"")).hex()
    return Device(
        name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        str(runtime.deviceGetPCIBusId(number)).lower(),
        _dashed(uuid) if len(uuid) == 32 else uuid,  # it may be cut at its first zero
        int(found["totalGlobalMem"]),
    )


def _dashed(uuid: str) -> str:
    """Return a UUID as the tools of the driver write it."""
    return "GPU-" + "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))


def _pooled(cuda: Any) -> bool:
    """Whether new arrays of this process are of an asynchronous pool."""
    allocator = cuda.get_allocator()
    owner = type(getattr(allocator, "__self__", None)).__name__
    return allocator is cuda.malloc_async or owner == "MemoryAsyncPool"


# -- all ranks ----------------------------------------------------------------------------


def nodes_of(places: Iterable[Place]) -> list[Node]:
    """Return the nodes of all ranks."""
    members: dict[str, list[Place]] = {}
    for place in places:
        members.setdefault(place.node, []).append(place)
    return [
        Node(
            name,
            tuple(dict.fromkeys(device for place in found for device in place.seen.devices)),
            tuple(found),
        )
        for name, found in members.items()
    ]


def pointers(setting: str, places: Iterable[Place]) -> list[Pointers]:
    """Return whether device pointers go to the MPI; ``setting`` is MPICOLL_CUDA_AWARE.

    Ranks of which the same is known are put together. Nothing is tried here: a trial starts
    processes, and takes up to a minute.
    """
    found: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for place in places:
        found.setdefault((*_answer(setting, place), place.signs), []).append(place.rank)
    return [Pointers(*key, tuple(ranks)) for key, ranks in found.items()]


def _answer(setting: str, place: Place) -> tuple[str, str]:
    if setting in ("0", "1"):
        return ("no", "yes")[int(setting)], f"set by MPICOLL_CUDA_AWARE={setting}"
    if not place.signs:
        return "no", "nothing says that this MPI takes device pointers"
    if place.kept is None:
        return "not tried", "the first device call tries"
    return (
        ("yes", "a trial on this host has passed")
        if place.kept
        else ("no", "a trial on this host has failed")
    )


def as_json(nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """Return the map for --json; devices of ranks are places in the list of their node."""
    return [
        {
            "name": node.name,
            "devices": [device._asdict() for device in node.devices],
            "ranks": [
                {
                    "rank": place.rank,
                    "local_rank": place.local,
                    "local_rank_told": place.told,
                    "sees": [_index(node, device) for device in place.seen.devices],
                    "uses": _index(node, place.device),
                    "current": _index(node, place.current),
                    "why_none": place.seen.why,
                    "variables": dict(place.variables),
                }
                for place in node.places
            ],
        }
        for node in nodes
    ]


def _index(node: Node, device: Device | None) -> int | None:
    return None if device is None else node.devices.index(device)
