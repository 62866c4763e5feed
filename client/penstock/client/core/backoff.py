"""How long to wait before trying again: exponential, with jitter, and chance injected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class Backoff:
    """``first_ms``, doubling each time up to ``most_ms``, each +-20 % at random (as KIP-580).

    ``chance`` gives numbers in [0, 1). Pure but for it.
    """

    first_ms: float
    most_ms: float
    chance: Callable[[], float]

    def delay_ms(self, attempt: int) -> float:
        """The pause before repetition ``attempt`` (0 is the first)."""
        plain = min(self.first_ms * 2.0 ** min(attempt, 40), self.most_ms)
        return plain * (1 + _JITTER * (2 * self.chance() - 1))


class Pacer:
    """Spaces repeated questions: the first at once, more of them at a growing distance.

    Quick at first, because a new leader is elected in tens of milliseconds; after
    ``patience`` questions slow, because a long outage must not become a storm of questions.
    Forgets after ``quiet_ms`` without one.
    """

    def __init__(
        self, quick: Backoff, slow: Backoff, *, patience: int = 25, quiet_ms: float = 2_000
    ) -> None:
        self._quick = quick
        self._slow = slow
        self._patience = patience
        self._quiet_ms = quiet_ms
        self._asked = 0
        self._last_ms = float("-inf")

    def next_ms(self, now_ms: float) -> float:
        """When the next question may be asked, as ``now_ms`` or later."""
        if now_ms - self._last_ms > self._quiet_ms:
            self._asked = 0
        if self._asked == 0:
            return now_ms
        attempt = self._asked - 1
        if attempt < self._patience:
            delay = self._quick.delay_ms(attempt)
        else:
            delay = self._slow.delay_ms(attempt - self._patience)
        return max(now_ms, self._last_ms + delay)

    def asked(self, now_ms: float) -> None:
        """Note that a question was asked."""
        if now_ms - self._last_ms > self._quiet_ms:
            self._asked = 0
        self._asked += 1
        self._last_ms = now_ms
