"""Which trace of a client's this node works for just now (W3C Trace Context).

A client that traces sends ``traceparent`` in a call's metadata. It stands on the log lines that the
call causes, and goes on with the calls that the node makes for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


class _Work:
    """One call that is traced. Tasks that the call began, and that outlive it, find it ended."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent


_work: ContextVar[_Work | None] = ContextVar("penstock_trace", default=None)


def carried(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The traceparent of a call's metadata; empty where there is none, or none that is valid."""
    for key, value in metadata or ():
        if key == TRACEPARENT:
            text = value if isinstance(value, str) else ""
            return text if _parsed(text) is not None else ""
    return ""


@contextmanager
def working_for(traceparent: str) -> Iterator[None]:
    """All that happens in this block, and in tasks that it begins while it lasts, is of a trace."""
    work = _Work(traceparent)
    _work.set(work)
    try:
        yield
    finally:
        work.traceparent = ""


def current() -> str:
    """The traceparent of what this task works for; empty for none."""
    work = _work.get()
    return "" if work is None else work.traceparent


def log_fields() -> dict[str, str]:
    """What stands on a log line: the trace, and the caller's span in it; nothing for none."""
    traceparent = current()
    found = _parsed(traceparent) if traceparent else None
    return {} if found is None else {"trace_id": found[0], "span_id": found[1]}


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """The metadata of a call that is made for what this task works for; None for none."""
    traceparent = current()
    return ((TRACEPARENT, traceparent),) if traceparent else None


def _parsed(traceparent: str) -> tuple[str, str] | None:
    found = _FORM.fullmatch(traceparent)
    if found is None or found[1] == "ff" or found[2] == _NO_TRACE or found[3] == _NO_SPAN:
        return None
    # The first version has no more than these four parts.
    return None if found[1] == "00" and found[4] else (found[2], found[3])
