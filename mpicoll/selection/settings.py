"""Settings from the environment, read on one rank and shared by all.

`gather` reads, `parse` judges. The runtime reads on rank 0, broadcasts what was read and
judges on every rank, so a wrong value raises the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpicoll.algorithms import parse_name
from mpicoll.errors import AlgorithmError, SettingError
from mpicoll.schedule.contracts import COLLECTIVES

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


@dataclass(frozen=True, slots=True)
class Settings:
    """What was set: (collective, algorithm name) pairs."""

    algorithms: tuple[tuple[str, str], ...] = ()

    def algorithm(self, collective: str) -> str | None:
        """Return the algorithm set for ``collective``, if any."""
        return dict(self.algorithms).get(collective)


def gather(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that concern mpicoll."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in SCRIPT_VARIABLES
    }


def parse(variables: Mapping[str, str]) -> Settings:
    """Return the settings that ``variables`` make.

    ``MPICOLL_<COLLECTIVE>=name`` chooses an algorithm; "auto" or nothing is the automatic
    choice. A variable that is not known or a
    value that means nothing raises SettingError: a misspelt one must not pass unseen.
    """
    algorithms = []
    for variable, value in sorted(variables.items()):
        if value in ("", "auto"):
            continue
        collective = variable.removeprefix(PREFIX).lower()
        if collective not in COLLECTIVES:
            known = ", ".join(PREFIX + name.upper() for name in COLLECTIVES)
            raise SettingError(f"unknown variable {variable}; known: {known}")
        try:
            parse_name(collective, value)
            algorithms.append((collective, value))
        except AlgorithmError as error:
            raise SettingError(f"{variable}={value}: {error}") from None
    return Settings(tuple(algorithms))
