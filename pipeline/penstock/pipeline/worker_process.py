"""The Python processes that Spark starts, seen from inside."""

from __future__ import annotations

import gc
from typing import Final

_TIMES: Final = 2
"""At the first call in a process not everything is loaded; at the second one it is."""
_left = _TIMES


def settle_in() -> None:
    """Have the garbage collector pass over what this process has loaded.

    Spark has its Python processes collect garbage after everything that they do, and so look at all
    objects of all modules, which takes longer than a small task. What is there at the first two
    calls is not looked at any more. It is still freed when nothing refers to it, unless it is in a
    cycle of garbage by then. Only for what Spark calls in processes of its own.
    """
    global _left  # noqa: PLW0603 - of the process, as the collector is.
    if _left:
        _left -= 1
        gc.collect()
        gc.freeze()
