"""Exception types: what a user can mend, and what is a fault of a schedule."""

from __future__ import annotations


class MpicollError(Exception):
    """Base of every error that mpicoll raises and mpi4py has no class for."""


class AlgorithmError(MpicollError, ValueError):
    """An algorithm was asked for that does not exist or does not fit the call."""


class SettingError(MpicollError, ValueError):
    """An environment variable or a setting has a value that means nothing."""


class ScheduleError(MpicollError):
    """A schedule breaks a rule of its form or the contract of its collective."""


class ShortMessageError(MpicollError):
    """A message arrived with fewer bytes than the schedule says it has."""


class PeerError(MpicollError):
    """Another rank gave up a collective after an error of its own; its data did not come."""


class MismatchError(MpicollError):
    """The ranks passed arguments to a collective that do not fit together (checked mode)."""


class CollectiveTimeout(MpicollError, TimeoutError):
    """A collective did not complete within its time limit.

    ``collective``, ``sequence``, ``algorithm``, ``step`` and ``steps`` say where this rank
    was, ``waits`` the ranks whose messages it waited for, ``silent`` the ranks that did not
    answer when they were asked.
    """

    collective: str = ""
    sequence: int = 0
    algorithm: str = ""
    step: int = 0
    steps: int = 0
    waits: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()


class PoisonedError(CollectiveTimeout):
    """A communicator is used after a collective on it has timed out, here or on another rank."""
