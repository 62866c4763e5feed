"""Who is told how long calls take, and which streams are open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SyncObserver = Callable[[float], None]
"""Told, in the thread that waited, the seconds that a write to the disk took until it was there."""


def nobody_observes(_seconds: float) -> None:
    """What is told where nobody looks."""


class Meter(Protocol):
    """Asked once for each method, named ``Service.Method``; what it gives is called for each call.

    That happens on the event loop, and is to cost a microsecond at most.
    """

    def unary(self, method: str) -> Callable[[float], None]:
        """To be told the seconds from a request to its answer."""
        ...

    def stream(self, method: str) -> Callable[[int], None]:
        """To be told 1 where a stream begins, and -1 where it ends."""
        ...


class Unmetered:
    """Counts nothing."""

    def unary(self, method: str) -> Callable[[float], None]:
        """Forget it."""
        return lambda _seconds: None

    def stream(self, method: str) -> Callable[[int], None]:
        """Forget it."""
        return lambda _step: None
