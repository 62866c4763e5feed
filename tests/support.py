"""Waiting for conditions: the only place in the tests that lets time pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


async def eventually(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Return as soon as ``condition`` holds; fail when it does not within the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition did not hold within {timeout_s} s")
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """The same for tests without an event loop; ``what`` is said on failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not after {timeout_s} s: {what}")
        time.sleep(0.02)
