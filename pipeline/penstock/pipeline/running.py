"""Programs that run queries until they are told to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final

from penstock.pipeline.errors import QueryFailedError
from penstock.pipeline.reasons import reason_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_LOG: Final = logging.getLogger("penstock.pipeline")

_POLL_S: Final = 0.25
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run_until_stopped(*queries: StreamingQuery) -> None:
    """Return when all of these queries have ended, or Ctrl-C or SIGTERM came, by which they end.

    What a query was writing when it was stopped is written by its next run. When one fails the
    others are stopped, and QueryFailedError says which one, and why. Signals are heard where this
    is called in the main thread; the second one has the effect that it had before.
    """
    told = threading.Event()
    left = list(queries)
    with _hearing(told):
        try:
            while left and not told.is_set():
                left = [query for query in left if not _has_ended(query, told)]
        finally:
            for query in left:
                _stop(query)


def _has_ended(query: StreamingQuery, told: threading.Event) -> bool:
    """Whether it has, within a moment. Raises QueryFailedError."""
    try:
        return bool(query.awaitTermination(_POLL_S))  # type: ignore[arg-type]  # It takes fractions.
    except Exception as error:
        # Ctrl-C goes to all processes of a terminal: a query may fail by what its tasks heard.
        if told.wait(_POLL_S):
            return True
        name = query.name or query.id
        reason = reason_of(str(error)) or type(error).__name__
        raise QueryFailedError(f"query {name} failed: {reason}") from error


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception as error:
        # A signal to all processes of a group has ended Spark's as well, and its queries with it.
        _LOG.warning("a query could not be stopped: %s", reason_of(str(error)))


@contextlib.contextmanager
def _hearing(told: threading.Event) -> Iterator[None]:
    """Have the first signal inside the block set ``told``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hear(_number: int, _frame: FrameType | None) -> None:
        restore()
        told.set()

    for number in _SIGNALS:
        signal.signal(number, hear)
    try:
        yield
    finally:
        restore()
