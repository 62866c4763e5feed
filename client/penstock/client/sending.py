"""The way of a record from ``send`` to the accumulator, shared by both producers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.client import serializers
from penstock.client.cluster import now_ms, wall_ms
from penstock.client.config import ProducerConfig
from penstock.client.core.accumulator import Appended
from penstock.client.delivery import Promise
from penstock.client.model import Header
from penstock.client.producer_engine import ProducerEngine
from penstock.wire.errors import (
    InvalidPartitionsError,
    RecordTooLargeError,
    SerializationError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import HEADER_BYTES, RecordData, record_size_bound

_MAX_TIMESTAMP: Final = 2**63 - 1


class Prepared(NamedTuple):
    """A record as it enters a batch."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    data: RecordData
    size_bound: int


class SendPath:
    """Serialises, checks and places records. ``prepare`` is thread-safe; ``place`` and ``append``
    are called under the engine's guard.
    """

    def __init__(self, config: ProducerConfig, engine: ProducerEngine) -> None:
        self._engine = engine
        self._max_request_size = config.max_request_size
        self._key_serializer = serializers.serializer("key_serializer", config.key_serializer)
        self._value_serializer = serializers.serializer("value_serializer", config.value_serializer)

    def prepare(
        self,
        topic: str,
        *,
        value: Any,
        key: Any,
        headers: Sequence[Header] | Mapping[str, bytes | None],
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Prepared:
        """The record in bytes. Raises what ``Producer.send`` promises to raise at once."""
        key_bytes = serializers.serialize("key", topic, self._key_serializer, key)
        value_bytes = serializers.serialize("value", topic, self._value_serializer, value)
        checked = _check_headers(topic, headers) if headers else ()
        if timestamp_ms is None:
            timestamp_ms = wall_ms()
        elif not 0 <= timestamp_ms <= _MAX_TIMESTAMP:
            raise SerializationError(
                f"timestamp_ms={timestamp_ms} of a record for topic {topic!r} is out of range; "
                "milliseconds since 1970 are wanted"
            )
        size_bound = record_size_bound(key_bytes, value_bytes, checked)
        if size_bound + HEADER_BYTES > self._max_request_size:
            raise RecordTooLargeError(
                f"a record for topic {topic!r} takes {size_bound + HEADER_BYTES} bytes (key "
                f"{len(key_bytes or b'')}, value {len(value_bytes or b'')}), more than "
                f"max_request_size={self._max_request_size}; raise max_request_size (and the "
                "topic's max.message.bytes), or send less"
            )
        if partition is not None:
            count = self._engine.metadata.partition_count(topic)
            if not 0 <= partition < count:
                raise InvalidPartitionsError(
                    f"topic {topic!r} has no partition {partition}; it has 0 to {count - 1}"
                )
        data = RecordData(timestamp_ms, key_bytes, value_bytes, checked)
        return Prepared(topic, partition, key_bytes, value_bytes, data, size_bound)

    def place(self, record: Prepared) -> TopicPartition:
        """The record's partition. Ask once a record: to choose moves the partitioner on."""
        metadata = self._engine.metadata
        topic = record.topic
        partition = record.partition
        if partition is None:
            count = metadata.partition_count(topic)
            partition = self._engine.chooser.choose(
                topic,
                record.key,
                record.value,
                size_bytes=record.size_bound,
                partition_count=count,
                available=lambda: metadata.available(topic),
            )
            if not 0 <= partition < count:
                raise InvalidPartitionsError(
                    f"the partitioner chose partition {partition} of topic {topic!r}, which has "
                    f"0 to {count - 1}"
                )
        return TopicPartition(topic, partition)

    def append(self, record: Prepared, place: TopicPartition, promise: Promise) -> Appended | None:
        """Add the record to its partition's batch; None when memory is full."""
        return self._engine.accumulator.append(
            place, record.data, record.size_bound, promise, now_ms()
        )


def _check_headers(
    topic: str, headers: Sequence[Header] | Mapping[str, bytes | None]
) -> tuple[Header, ...]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked: list[Header] = []
    for pair in pairs:
        try:
            name, value = pair
        except (TypeError, ValueError):
            name, value = None, None
        if not isinstance(name, str) or not (value is None or isinstance(value, bytes)):
            raise SerializationError(
                f"header {pair!r} of a record for topic {topic!r} is not a pair of str and bytes "
                "(or None)"
            )
        checked.append((name, value))
    return tuple(checked)
