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
