"""What goes wrong in the harness itself. Each message says what, where, and what to do next."""

from __future__ import annotations


class ChaosError(Exception):
    """Any of them."""


class HistoryError(ChaosError):
    """A history cannot be judged, since it is not one."""


class EvidenceError(ChaosError):
    """What was gathered beside a history cannot be read."""


class PlanError(ChaosError, ValueError):
    """A run cannot be as it was asked for: an unknown name, or a fault that the backend has not."""


class NotHereError(PlanError):
    """The nemesis is one, but not on this backend, or not under this workload."""


class FaultError(ChaosError):
    """A fault could not be injected or healed."""


class ClusterError(ChaosError):
    """The cluster could not be started, or did not recover after everything was healed."""


def reason_of(error: Exception) -> str:
    """What an exception says, for a person: never its repr, and never nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]} is missing"
    return str(error) or type(error).__name__
