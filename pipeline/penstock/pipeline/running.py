"""Programs that start queries, and run them until they are told to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final

from penstock.pipeline.errors import QueryFailedError
from penstock.pipeline.reasons import reason_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_LOG: Final = logging.getLogger("penstock.pipeline")

_POLL_S: Final = 0.25
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_START_POLL_S: Final = 0.05
_UNDECIDED: Final = ("Initializing", "Terminated")
"""What Spark says of a query that is not open yet, or has failed and counts as active still."""
_TOO_SLOW: Final = "Python worker failed to connect back"
"""What Spark says where the process that plans a query was not up within ten seconds."""


def start_query(writer: DataStreamWriter, *, attempts: int = 5) -> StreamingQuery:
    """Start a query as ``writer.start()`` does, and return when its sources are open.

    Spark gives the Python process that plans a query ten seconds to start, and does not try again.
    A machine that has other things to do takes longer, as one does on which several queries start
    at the same time. So start one after the other by this: a query whose process was too slow is
    started again, up to so many ``attempts`` in all, from the same checkpoint. The last one is what
    is given, also where it has failed, by this or by anything else: whoever waits for it hears why.

    Raises what ``writer.start()`` does.
    """
    left = max(1, attempts)
    while True:
        query = writer.start()
        while query.isActive and str(query.status["message"]).startswith(_UNDECIDED):
            time.sleep(_START_POLL_S)
        left -= 1
        failure = None if query.isActive else query.exception()
        if left < 1 or _TOO_SLOW not in str(failure):
            return query
        _LOG.info(
            "query %s is started again: the process that plans it was not up within the ten "
            "seconds that Spark gives it",
            query.name or query.id,
        )


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
