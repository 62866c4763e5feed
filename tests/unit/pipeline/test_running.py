from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from penstock.pipeline import QueryFailedError, run_until_stopped, start_query
from penstock.pipeline.reasons import reason_of

IN_PYTHON = """\
[STREAM_FAILED] Query [id = 8] terminated with exception: [FOREACH_BATCH] Return Message: Traceback:
  File "x.py", line 31, in boom
pyspark.errors.exceptions.captured.AnalysisException: [PYTHON_DATA_SOURCE_ERROR] Failed: Traceback:
  File "columns.py", line 60, in check
    raise SchemaError("no: such")
penstock.pipeline.errors.SchemaError: the penstock sink: a record has no column 'offset'
 SQLSTATE: 38000
=== Streaming Query ===
other.OptionError: of the plan
"""


class Query:
    """A query that goes on until it is stopped, or fails when it is first waited for."""

    name = "shop"

    def __init__(self, failure: str = "", *, ends: bool = False, stops_badly: bool = False) -> None:
        self.failure, self.ends, self.stops_badly = failure, ends, stops_badly
        self.is_stopped = False
        self.waited = threading.Event()

    def awaitTermination(self, _seconds: float) -> bool:
        self.waited.set()
        if self.failure:
            raise RuntimeError(self.failure)
        return self.ends

    def stop(self) -> None:
        self.is_stopped = True
        if self.stops_badly:
            raise RuntimeError("Spark has gone")


def run(*queries: Query) -> None:
    some: Any = queries
    run_until_stopped(*some)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (IN_PYTHON, "SchemaError: the penstock sink: a record has no column 'offset'"),
        ("it broke\n\nJVM stacktrace:\norg.apache.X\n  at y", "it broke"),
        ("Job aborted: Lost task.\nof two\n\nDriver stacktrace:", "Job aborted: Lost task. of two"),
        ("", ""),
    ],
)
def test_a_reason_is_a_line(text: str, reason: str) -> None:
    assert reason_of(text) == reason


def test_it_returns_when_all_have_ended() -> None:
    queries = [Query(ends=True), Query(ends=True)]
    run(*queries)
    assert not any(query.is_stopped for query in queries)


def test_when_one_fails_the_others_are_stopped() -> None:
    well, badly = Query(), Query(IN_PYTHON)
    with pytest.raises(QueryFailedError, match=r"^query shop failed: SchemaError: .*'offset'$"):
        run(well, badly)
    assert well.is_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_of_them(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    queries = [Query(stops_badly=True), Query()]

    def tell() -> None:
        queries[1].waited.wait(60)
        os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    teller.start()
    run(*queries)
    teller.join()
    assert all(query.is_stopped for query in queries)
    assert signal.getsignal(number) is before


def test_who_fails_by_the_signal_has_not_failed() -> None:
    class Interrupted(Query):
        def awaitTermination(self, _seconds: float) -> bool:
            # Its tasks heard of Ctrl-C before this process did.
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
            raise RuntimeError("KeyboardInterrupt in a task")

    run(Interrupted())


def test_it_waits_in_other_threads_too() -> None:
    query = Query(ends=True)
    waiting = threading.Thread(target=run, args=[query])
    waiting.start()
    waiting.join(60)
    assert query.waited.is_set()


SLOW = "[STREAM_FAILED] SparkException: Python worker failed to connect back.\n at x"


class Start:
    """A query that was just started: it opens its sources, and goes on or fails."""

    id = "id-1"
    name = None

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        # One that failed says so for a while before it counts as ended.
        then = ["Getting offsets"] if failure is None else ["Terminated with exception: x"] * 3
        self.messages = ["Initializing StreamExecution", "Initializing sources", *then]

    @property
    def isActive(self) -> bool:
        return self.failure is None or len(self.messages) > 1

    @property
    def status(self) -> dict[str, Any]:
        return {"message": self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]}

    def exception(self) -> Exception | None:
        return None if self.failure is None else RuntimeError(self.failure)


class Writer:
    def __init__(self, *starts: Start) -> None:
        self.left = list(starts)

    def start(self) -> Start:
        return self.left.pop(0)


def begin(writer: Any, **more: Any) -> Any:
    return start_query(writer, **more)


def test_a_query_is_given_when_its_sources_are_open() -> None:
    query = Start()
    assert begin(Writer(query)) is query
    assert query.messages == ["Getting offsets"]


def test_a_query_whose_process_was_too_slow_is_started_again() -> None:
    last = Start()
    assert begin(Writer(Start(SLOW), Start(SLOW), last)) is last


def test_it_is_given_up_in_the_end() -> None:
    writer = Writer(*(Start(SLOW) for _ in range(4)))
    assert begin(writer, attempts=3).failure == SLOW
    assert len(writer.left) == 1


def test_a_query_that_failed_otherwise_is_not_started_again() -> None:
    writer = Writer(Start(IN_PYTHON), Start())
    assert begin(writer).failure == IN_PYTHON
    assert len(writer.left) == 1
