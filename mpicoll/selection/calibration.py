"""The rates of a machine, measured once by ``mpicoll tune`` and kept in a small cache file.

The file is a cache: one that can not be read counts as absent, and the defaults stand. It
is read on rank 0 only.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpicoll.algorithms import find
from mpicoll.errors import AlgorithmError
from mpicoll.selection.model import CROWDED, DEFAULT, Corrections, Curve, Rates, kind

KIND = "mpicoll rates"
FORM = 2  #: of the file; raised when a field changes its meaning
FARTHEST = 100.0  #: a factor of a correction is at most, and one over that at least
_FIELDS = ("step", "message", "byte", "local")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a communicator is: kind of host, MPI and its version, ranks, and their load.

    ``load`` is the ranks of a node over the cores that they may use, at least 1.
    """

    host: str
    mpi: str
    ranks: int
    nodes: bool
    load: float

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """What rates are kept under, but for the number of ranks."""
        return self.host, self.mpi, "nodes" if self.nodes else "node", self.load > 1

    @property
    def kind(self) -> int:
        """The number of ranks, up to the next power of two."""
        return kind(self.ranks)


def cache_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where rates are kept: ``mpicoll/rates.json`` in the user's cache folder."""
    folder = environment.get("XDG_CACHE_HOME", "")
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "mpicoll" / "rates.json"


def lookup(place: Place, file: Path | None = None) -> Rates:
    """Return the rates measured at ``place``, or on the nearest number of ranks there.

    Without any, the defaults for ranks that have a core each or share it.
    """
    found = [row for row in _rows(file) if tuple(row["key"]) == place.key]
    if not found:
        return replace(CROWDED if place.load > 1 else DEFAULT, load=place.load)
    nearest = min(found, key=lambda row: abs(row["kind"].bit_length() - place.kind.bit_length()))
    rates = {name: nearest["rates"][name] for name in _FIELDS}
    curves: dict[tuple[str, str], dict[int, Curve]] = {}
    for one in nearest["corrections"]:
        if _known(one):
            cuts = curves.setdefault((one["collective"], one["algorithm"]), {})
            cuts[one["segment"]] = tuple(map(tuple, one["at"]))
    corrections = Corrections(curves, nearest["kind"]) if curves else None
    return Rates(**rates, load=place.load, corrections=corrections)


def store(place: Place, rates: Rates, file: Path | None = None) -> Path:
    """Keep ``rates`` for ``place`` and return the file. Raise OSError if it can't be written.

    The file is replaced in one go, so that a reader never sees half of it.
    """
    path = file or cache_file()
    new = {
        "key": list(place.key),
        "kind": place.kind,
        "rates": {name: getattr(rates, name) for name in _FIELDS},
        "corrections": listed(rates.corrections),
    }
    kept = [
        row for row in _rows(path) if (tuple(row["key"]), row["kind"]) != (place.key, place.kind)
    ]
    text = json.dumps({"kind": KIND, "form": FORM, "rates": [*kept, new]}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def listed(corrections: Corrections | None) -> list[dict[str, Any]]:
    """Return corrections as JSON has them."""
    curves = {} if corrections is None else corrections.curves
    return [
        {"collective": collective, "algorithm": name, "segment": cut, "at": [*map(list, curve)]}
        for (collective, name), cuts in curves.items()
        for cut, curve in cuts.items()
    ]


def _rows(file: Path | None) -> list[dict[str, Any]]:
    """Return what is kept that has the right form."""
    try:
        data = json.loads((file or cache_file()).read_text(encoding="utf-8"))
        if (data["kind"], data["form"]) != (KIND, FORM):
            return []
        return [row for row in data["rates"] if _whole(row)]
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _whole(row: Any) -> bool:
    """Whether a row has the fields that it needs, with values that make sense."""
    try:
        numbers = [row["rates"][name] for name in _FIELDS]
        return (
            [type(part) for part in row["key"]] == [str, str, str, bool]
            and type(row["kind"]) is int
            and row["kind"] > 0
            and all(type(one) is float and 0 < one < 1 for one in numbers)
            and all(_sound(one) for one in row["corrections"])
        )
    except (TypeError, KeyError, ValueError):
        return False


def _known(correction: Any) -> bool:
    """Whether there is such an algorithm; another version may have had others."""
    try:
        find(correction["collective"], correction["algorithm"])
    except AlgorithmError:
        return False
    return True


def _sound(correction: Any) -> bool:
    """Whether a correction has factors by growing sizes."""
    sizes, factors = zip(*correction["at"], strict=True)
    return (
        type(correction["collective"]) is str
        and type(correction["algorithm"]) is str
        and type(correction["segment"]) is int
        and correction["segment"] >= 0
        and all(type(size) is int and size >= 0 for size in sizes)
        and list(sizes) == sorted(set(sizes))
        and all(type(one) is float and 1 / FARTHEST <= one <= FARTHEST for one in factors)
    )
