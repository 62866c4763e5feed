"""What became of the lines that `penstock produce` read, and how it is told."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final

from penstock.cli.errors import explain, report
from penstock.cli.output import format_bytes, format_count
from penstock.wire.errors import ClientClosedError, DeliveryFailedError, PenstockError

_RECORD_BYTES: Final = 100
"""More than a record needs beside its key and its value."""
_LOOK_UP_SECONDS: Final = 0.1


@dataclass(slots=True)
class Tally:
    """What became of the lines. ``settle`` may be called by the client's thread."""

    acknowledging: bool = True
    """False where nobody is asked: what is counted as acknowledged was only sent."""
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    acknowledged_bytes: int = 0
    first_error: PenstockError | None = None
    first_failure: str = ""
    _settled: int = 0
    _failed_after_send: int = 0
    _sent_bytes: int = 0
    _settled_bytes: int = 0
    _waits: bool = False
    # Not a Condition, nor what stands on one: a KeyboardInterrupt may break those in the middle.
    _news: SimpleQueue[None] = field(default_factory=SimpleQueue)

    def send(self, size: int) -> None:
        """Count one record on its way."""
        self.sent += 1
        self._sent_bytes += size + _RECORD_BYTES

    def settle(self, line_number: int, size: int, value_bytes: int, future: Future[Any]) -> None:
        """Count one record that was acknowledged, failed, or was given up."""
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, ClientClosedError):
            pass  # We gave it up: what became of it is not known.
        elif error is None:
            self.acknowledged += 1
            self.acknowledged_bytes += value_bytes
        else:
            self._failed_after_send += 1
            self.refuse(line_number, error)
        self._settled += 1
        self._settled_bytes += size + _RECORD_BYTES
        if self._waits:
            self._news.put(None)

    def refuse(self, line_number: int, error: BaseException) -> None:
        """Count one line that could not become an acknowledged record."""
        self.failed += 1
        if not self.first_failure:
            self.first_failure = f"line {line_number}"
            self.first_error = _typed(error)

    def abort(self, error: PenstockError) -> None:
        """Remember what ended the run before its last line."""
        if self.first_error is None:
            self.first_error = error

    def wait_below(self, size: int) -> None:
        """Return once the records on their way take less than ``size`` bytes of memory."""
        self._waits = True  # First: whoever settles from here on says so.
        while self._sent_bytes - self._settled_bytes >= size:
            # Not for ever: a signal just before the wait would not be seen before its end.
            with contextlib.suppress(Empty):
                self._news.get(timeout=_LOOK_UP_SECONDS)
        self._waits = False

    @property
    def on_their_way(self) -> int:
        """The records without a verdict."""
        return self.sent - self._settled

    @property
    def unacknowledged(self) -> int:
        """The records that were sent, and neither acknowledged nor failed."""
        return self.sent - self.acknowledged - self._failed_after_send

    @property
    def seconds(self) -> float:
        """From the first line to the last acknowledgement."""
        return max((self.ended or time.monotonic()) - self.started, 1e-6)


def _typed(error: BaseException) -> PenstockError:
    return error if isinstance(error, PenstockError) else DeliveryFailedError(str(error))


def report_tally(tally: Tally, *, as_json: bool, stopped: bool) -> None:
    """Write the summary to standard error, and the first error with what to do about it."""
    if tally.first_error is not None and not tally.sent and not tally.failed and not stopped:
        # It never began: the error says all there is.
        report(explain(tally.first_error))
        return
    if as_json:
        import json  # noqa: PLC0415 - only here.

        report(json.dumps(_summary(tally)))
    else:
        report(_sentence(tally))
    if tally.first_error is not None:
        where = f" (first at {tally.first_failure})" if tally.first_failure else ""
        report(explain(tally.first_error).replace("error: ", f"error{where}: ", 1))


def _sentence(tally: Tally) -> str:
    rate = tally.acknowledged / tally.seconds
    written = (
        f"{format_records(tally.acknowledged)}, "
        f"{format_bytes(tally.acknowledged_bytes)} in {tally.seconds:.2f} s "
        f"({rate:,.0f} records/s, {format_bytes(tally.acknowledged_bytes / tally.seconds)}/s)"
    )
    parts = [written]
    if not tally.acknowledging:
        parts.append("sent, and nobody was asked to acknowledge it")
    if tally.failed:
        parts.append(f"{format_count(tally.failed)} failed")
    if unknown := tally.unacknowledged:
        parts.append(f"{format_count(unknown)} not acknowledged, which may be there or not")
    return "; ".join(parts)


def format_records(count: int) -> str:
    """``1 record``, ``2,000 records``."""
    return f"{format_count(count)} {'record' if count == 1 else 'records'}"


def _summary(tally: Tally) -> dict[str, Any]:
    return {
        "records": tally.acknowledged,
        "bytes": tally.acknowledged_bytes,
        "failed": tally.failed,
        "unacknowledged": tally.unacknowledged,
        "seconds": round(tally.seconds, 6),
        "records_per_second": round(tally.acknowledged / tally.seconds, 1),
        "bytes_per_second": round(tally.acknowledged_bytes / tally.seconds, 1),
    }
