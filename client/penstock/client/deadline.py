"""Points in time that calls wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from penstock.client.cluster import now_ms


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, or never."""

    at_ms: float

    @classmethod
    def after_ms(cls, timeout_ms: float | None) -> Self:
        """So long from now; None means never."""
        return cls(float("inf") if timeout_ms is None else now_ms() + timeout_ms)

    @classmethod
    def never(cls) -> Self:
        """No deadline."""
        return cls(float("inf"))

    @property
    def remaining_ms(self) -> float:
        """How long until then, at least 0."""
        return max(0.0, self.at_ms - now_ms())
