"""Whether the MPI takes device pointers, and which device a rank uses."""

from __future__ import annotations


def takes_device_pointers() -> bool:
    """Return False."""
    return False
