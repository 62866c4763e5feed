"""Requests that are larger than a broker takes: it reads nothing of them, and ends their stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.wire.errors import ErrorCode, InvalidRequestError, RecordTooLargeError
from penstock.wire.ids import TopicPartition

_HEAD_BYTES: Final = 1_024
"""What a produce request has beside its partitions, at most."""

_ENTRY_BYTES: Final = 512
"""What it has of each partition beside the records: most of all the topic's name."""

_SHRINK: Final = 3 / 4
"""A request of many partitions that was too large all the same makes the next ones so much less."""


class RequestTooLargeError(InvalidRequestError, code=ErrorCode.INVALID_REQUEST):
    """The broker takes no request of ``size_bytes``, but of ``limit_bytes``."""

    size_bytes: int = 0
    limit_bytes: int = 0


def not_read(
    sent: Mapping[int, tuple[int, int]], error: RequestTooLargeError
) -> tuple[list[int], set[int]]:
    """Of the requests of a stream those that are too large, and those that came behind them.

    None of these has the broker read. The requests are in the order in which they were sent; of
    each its bytes of records and its partitions are known, and of the one that was refused how
    large it was.
    """

    def most(key: int) -> int:
        records_bytes, partitions = sent[key]
        return records_bytes + partitions * _ENTRY_BYTES + _HEAD_BYTES

    surely = [key for key in sent if sent[key][0] > error.limit_bytes]
    found = [key for key in sent if key in surely or sent[key][0] <= error.size_bytes <= most(key)]
    too_large = found or sorted(sent, key=most)[-1:]
    last = [*surely[:1], *too_large[-1:]][:1]
    return too_large, {key for key in sent if last and key > last[0]} - set(too_large)


def next_size(records_bytes: int, limit_bytes: int) -> int:
    """How much the requests after one that was refused may carry."""
    return min(limit_bytes * 15 // 16, int(records_bytes * _SHRINK))


def refusal(
    partition: TopicPartition, records_bytes: int, error: RequestTooLargeError
) -> RecordTooLargeError:
    """What is said of a batch that fits into no request."""
    refused = RecordTooLargeError(
        f"a batch of {records_bytes} bytes for partition {partition} fits into no request: "
        f"{error.message}"
    )
    refused.__cause__ = error
    return refused
