"""How soon clients go on: at once under load, and after seconds while it is quiet."""

from __future__ import annotations

from random import Random
from typing import Final

from penstock.chaos.simulator.scheduler import Scheduler

_REST_MS: Final = (500, 7000)
_REST_OF_TRANSACTIONS_MS: Final = (2000, 25_000)
_LONG_RESTS: Final = 0.03  # So many are long enough for others to forget who rests.
_LONG_REST_MS: Final = (10_000, 60_000)
_AGAIN_MS: Final = (300, 1500)


class Pace:
    """That of all clients of a run. In a quiet time there are few of them, and none is in a hurry.

    So the time that passes has few steps, and a minute of it costs what some seconds under load do.
    Where clients write ``transactions`` each piece of work has more steps, and comes more seldom.
    """

    def __init__(self, scheduler: Scheduler, *, transactions: bool = False) -> None:
        self._scheduler = scheduler
        self._rest_ms = _REST_OF_TRANSACTIONS_MS if transactions else _REST_MS
        self._until_ms = 0  # It is quiet before that.

    def be_quiet(self, for_ms: int) -> None:
        """From now on, for so long; whoever rests then has load again."""
        self._until_ms = self._scheduler.now_ms + for_ms

    def rest_ms(self, rng: Random, low_ms: int, high_ms: int) -> int:
        """How long somebody waits who has done what there was to do; under load as given."""
        left_ms = self._until_ms - self._scheduler.now_ms
        if left_ms <= 0:
            return rng.randint(low_ms, high_ms)
        rest_ms = rng.randint(*(_LONG_REST_MS if rng.random() < _LONG_RESTS else self._rest_ms))
        return rest_ms if rest_ms < left_ms else left_ms + rng.randint(low_ms, high_ms)

    def again_ms(self, rng: Random, low_ms: int, high_ms: int) -> int:
        """How long somebody waits whose attempt failed; under load as given."""
        is_quiet = self._scheduler.now_ms < self._until_ms
        return rng.randint(*_AGAIN_MS) if is_quiet else rng.randint(low_ms, high_ms)
