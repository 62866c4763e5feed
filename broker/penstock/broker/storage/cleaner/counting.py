"""What is counted of the cleaner's work."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    """Hears what the cleaner does. ``read`` and ``written`` are called in the cleaner's threads."""

    def read(self, size_bytes: int) -> None:
        """So many bytes of segments were read; a clean reads what is dirty twice."""
        ...

    def written(self, size_bytes: int) -> None:
        """So many bytes of segments were written."""
        ...

    def cleaned(self, now_ms: int) -> None:
        """A log was cleaned, by the wall clock at ``now_ms``."""
        ...

    def failed(self) -> None:
        """A log could not be cleaned. One that others changed meanwhile is cleaned anew instead."""
        ...


class Uncounted:
    """Counts nothing."""

    def read(self, size_bytes: int) -> None:
        """Forget it."""

    def written(self, size_bytes: int) -> None:
        """Forget it."""

    def cleaned(self, now_ms: int) -> None:
        """Forget it."""

    def failed(self) -> None:
        """Forget it."""
