"""Settings from the environment, read on one rank and shared by all.

`read` reads, `parse` judges. The runtime reads on rank 0, broadcasts what was read and
judges on every rank, so a wrong value raises the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicoll.algorithms import parse_name
from mpicoll.errors import AlgorithmError, SettingError
from mpicoll.schedule.contracts import COLLECTIVES
from mpicoll.selection.calibration import Place, lookup
from mpicoll.selection.model import DEFAULT, Rates
from mpicoll.selection.table import Table, load

PREFIX = "MPICOLL_"
#: Variables of the set-up scripts and the tests, which are not settings of a communicator.
SCRIPT_VARIABLES = frozenset(
    {
        "MPICOLL_EXTRAS",
        "MPICOLL_MPI",
        "MPICOLL_MPIEXEC",
        "MPICOLL_PYTHON",
        "MPICOLL_TEST_SEED",
        "MPICOLL_TEST_TIMEOUT",
        "MPICOLL_VENV",
    }
)


#: Where dumps of the flight recorder go unless MPICOLL_FLIGHT names another folder.
FLIGHT = "mpicoll-flight"


@dataclass(frozen=True, slots=True)
class Settings:
    """What was set.

    ``algorithms`` are (collective, algorithm name) pairs; ``timeout`` is the limit of a
    call in seconds, None for none; ``check`` says whether the ranks compare their calls;
    ``cuda_aware`` says whether the MPI takes device pointers, None: to be found out;
    ``flight`` and ``trace`` are folders, "" for no trace; ``progress`` is "thread" or "".
    ``tuning`` is the tuning table, ``rates`` what the machine takes, ``memory`` the
    communicator's hint, "host" or "device".
    """

    algorithms: tuple[tuple[str, str], ...] = ()
    timeout: float | None = None
    check: bool = False
    flight: str = FLIGHT
    trace: str = ""
    progress: str = ""
    tuning: Table | None = None
    rates: Rates = DEFAULT
    memory: str = "host"
    cuda_aware: bool | None = None

    def algorithm(self, collective: str) -> str | None:
        """Return the algorithm set for ``collective``, if any."""
        return dict(self.algorithms).get(collective)


def gather(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that concern mpicoll.

    No others are read: another thread may be removing them from ``os.environ``.
    """
    ours = (name for name in list(environment) if name.startswith(PREFIX))
    return {name: environment[name] for name in ours if name not in SCRIPT_VARIABLES}


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank found for all: the text of the tuning table, or why there is none.

    ``mpi`` is name and version of the MPI, "" where any table is right.
    """

    tuning: str = ""
    fault: str = ""
    mpi: str = ""
    rates: Rates = DEFAULT


def read(
    environment: Mapping[str, str], place: Place | None = None
) -> tuple[dict[str, str], Found]:
    """Return the variables, and what they and the cache of measured rates lead to.

    Reads files, so one rank does it, and hands the arguments of `parse` to the others.
    """
    variables = gather(environment)
    file = variables.get(PREFIX + "TUNING", "")
    text = fault = ""
    if file not in ("", "auto"):
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            fault = f"can not be read: {getattr(error, 'strerror', None) or error}"
    rates = DEFAULT if place is None else lookup(place)
    return variables, Found(text, fault, "" if place is None else place.mpi, rates)


def parse(variables: Mapping[str, str], found: Found | None = None) -> Settings:
    """Return the settings that ``variables`` make.

    ``MPICOLL_<COLLECTIVE>=name`` chooses an algorithm; "auto" or nothing is the automatic
    choice. ``found`` is what `read` found with them; without it files are read here. A
    variable that is not known or a value that means nothing raises SettingError: a misspelt
    one must not pass unseen.
    """
    if found is None:
        found = read(variables)[1]
    algorithms: list[tuple[str, str]] = []
    others: dict[str, Any] = {}
    for variable, value in sorted(variables.items()):
        if value in ("", "auto"):
            continue
        name = variable.removeprefix(PREFIX).lower()
        try:
            if name in COLLECTIVES:
                parse_name(name, value)
                algorithms.append((name, value))
            elif name in _READERS:
                others[name] = _READERS[name](value)
            elif name == "tuning":
                others[name] = _table(found, f"{variable}={value}")
            else:
                words = (*COLLECTIVES, *_READERS, "tuning")
                known = ", ".join(PREFIX + known.upper() for known in words)
                raise SettingError(f"unknown variable {variable}; known: {known}")
        except (AlgorithmError, ValueError) as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(f"{variable}={value}: {error}") from None
    return Settings(tuple(algorithms), rates=found.rates, **others)


def _table(found: Found, where: str) -> Table:
    if found.fault:
        raise SettingError(f"{where}: {found.fault}")
    return load(found.tuning, where, found.mpi)


def limit(value: float | str) -> float | None:
    """Return a time limit in seconds; 0 is none. Raise ValueError if it means nothing."""
    try:
        seconds = float(value)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"a time limit is a number of seconds, got {value!r}") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"a time limit is a number of seconds, 0 for none, got {value!r}")
    return seconds or None


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return value == "1"


_READERS: dict[str, Callable[[str], Any]] = {
    "timeout": limit,
    "check": _flag,
    "cuda_aware": _flag,
    "flight": str,
    "trace": str,
}
