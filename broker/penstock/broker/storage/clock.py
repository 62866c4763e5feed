"""The clock by which producers age."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock_ms(
    wall_ns: Callable[[], int] = time.time_ns,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
) -> Callable[[], int]:
    """A clock in milliseconds that shows the wall clock's time now, and from then on never jumps.

    What it shows can be kept on disk and compared after a restart, roughly: the next process
    begins with the wall clock anew, as that is then.
    """
    offset_ns = wall_ns() - monotonic_ns()
    return lambda: (offset_ns + monotonic_ns()) // 1_000_000
