"""One file per collective, one builder per algorithm, and the registry of them all."""

from importlib import import_module

from mpicoll.algorithms.registry import Algorithm, every, find, names, parse_name
from mpicoll.schedule.contracts import COLLECTIVES

for _collective in COLLECTIVES:
    import_module(f"{__name__}.{_collective}")

__all__ = ["Algorithm", "every", "find", "names", "parse_name"]
