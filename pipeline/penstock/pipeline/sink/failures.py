"""Why what a task wrote cannot be committed, and what to do about it in Spark. Pure."""

from __future__ import annotations

from typing import Final

from penstock.client import (
    InvalidRecordError,
    PenstockError,
    RecordTooLargeError,
    TransactionAbortableError,
    UnknownTopicOrPartitionError,
)
from penstock.pipeline.errors import WriteFailedError
from penstock.pipeline.sink.identity import Place

_MEND: Final[dict[type[PenstockError], str]] = {
    RecordTooLargeError: "raise the topic's max.message.bytes (`penstock topics alter`), or write "
    "smaller records",
    InvalidRecordError: "mend these rows before the sink, or leave them out; a compacted topic "
    "takes none whose key is null",
    UnknownTopicOrPartitionError: "make the topic (`penstock topics create`)",
}
_WAIT: Final = "see to the brokers, if this goes on"
_ANY: Final = "mend what it says"
_AGAIN: Final = (
    "Spark attempts the task again by itself, and once it has given up, start the query again (it "
    "goes on with this batch), or write the frame again"
)


def write_failed(place: Place, error: TransactionAbortableError) -> WriteFailedError:
    """What to raise for a task; its cause is what the client has for the cause."""
    cause = _root(error)
    kind = next((kind for kind in _MEND if isinstance(cause, kind)), None)
    mend = _MEND[kind] if kind is not None else _WAIT if cause.retriable else _ANY
    failed = WriteFailedError(
        f"the penstock sink: what task {place.partition} of {place.epoch.name} has written cannot "
        f"be committed, and is aborted: {type(cause).__name__}: {cause.message}; next: {mend}. "
        f"{_AGAIN}"
    )
    failed.__cause__ = cause
    return failed


def _root(error: PenstockError) -> PenstockError:
    while isinstance(error, TransactionAbortableError) and isinstance(
        error.__cause__, PenstockError
    ):
        error = error.__cause__
    return error
