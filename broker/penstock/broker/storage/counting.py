"""What is counted of a data directory's flushes."""

from __future__ import annotations

from typing import Protocol


class FlushCounts(Protocol):
    """Hears how long the disk takes."""

    def synced(self, seconds: float) -> None:
        """An fdatasync of batches took so long. Called in the thread that waited for it."""
        ...

    def flush_waited(self, seconds: float) -> None:
        """So long passed from the first request of a round of flushes to the round's end.

        Called on the event loop.
        """
        ...


class UncountedFlushes:
    """Counts nothing."""

    def synced(self, seconds: float) -> None:
        """Forget it."""

    def flush_waited(self, seconds: float) -> None:
        """Forget it."""
