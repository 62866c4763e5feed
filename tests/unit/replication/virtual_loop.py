"""An asyncio loop without sockets or threads, whose time passes only while all of it waits.

With a seed it does what is ready at the same time in an order by chance, in which another system
might have let it become ready: what relies on one order by accident shows.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Coroutine
from functools import partial
from random import Random
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: what it was to wait is told to the loop."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen any more"
        self.waited_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock shows what was waited for."""

    def __init__(self, seed: int | None = None) -> None:
        self._waits = _Selector()
        self._chance = None if seed is None else Random(seed)
        super().__init__(self._waits)

    def _run_once(self) -> None:
        if self._chance is not None:
            ready: deque[Any] = self._ready  # type: ignore[attr-defined]
            shuffled = self._chance.sample(ready, len(ready))
            ready.clear()
            ready.extend(shuffled)
        super()._run_once()  # type: ignore[misc]

    def time(self) -> float:
        return self._waits.waited_s

    def clock_ms(self) -> int:
        return round(self.time() * 1000)


def run_virtually(main: Coroutine[Any, Any, None], seed: int | None = None) -> None:
    """Run to the end; however long that takes in virtual time, it takes no other."""
    with asyncio.Runner(loop_factory=partial(VirtualLoop, seed)) as runner:
        runner.run(main)


def clock_ms() -> int:
    """The time of the running virtual loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock_ms()
