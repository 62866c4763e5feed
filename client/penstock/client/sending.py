"""The way of a record from ``send`` to the accumulator, shared by both producers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from penstock.client import arguments, serializers
from penstock.client.cluster import now_ms, wall_ms
from penstock.client.config import ProducerConfig
from penstock.client.core.accumulator import Appended
from penstock.client.delivery import Receipt
from penstock.client.model import Header
from penstock.client.producer_engine import ProducerEngine
from penstock.wire.codec import Places, Strings, first_odd
from penstock.wire.errors import (
    InvalidPartitionsError,
    InvalidRequestError,
    RecordTooLargeError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import HEADER_BYTES, RecordData, record_size_bound
from penstock.wire.reference import RECORD_BOUND_BYTES


class Prepared(NamedTuple):
    """A record as it enters a batch."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    data: RecordData
    size_bound: int


class Plain(NamedTuple):
    """Many records in bytes: as many of everything as values, or None."""

    values: list[bytes | None] | Strings
    keys: list[bytes | None] | Strings | None
    times: int | memoryview
    """In milliseconds; each in a view of int64 where they are not the same."""
    headers: Sequence[tuple[Header, ...]] | None = None
    joined_headers: Strings | None = None
    """The same as they stand in a batch; None where one of them cannot."""
    partitions: memoryview | None = None
    """Int32; -1 where none is said."""
    distinct_partitions: frozenset[int] = frozenset()
    """Those of ``partitions``, without -1."""
    least_time_ms: int = 0


class Place(NamedTuple):
    """The partition chosen for a record, among so many."""

    partition: TopicPartition
    partition_count: int


@contextmanager
def counting(places: Places[Receipt], count: int) -> Iterator[None]:
    """Have whatever is raised say how many of so many records were queued before."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the first {len(places)} of {count} records were queued")
        raise


class SendPath:
    """Serialises, checks and places records. ``prepare`` is thread-safe; ``offer`` is called under
    the engine's guard.
    """

    def __init__(self, config: ProducerConfig, engine: ProducerEngine) -> None:
        self._engine = engine
        self._max_request_size = config.max_request_size
        self._asks = callable(config.partitioner)
        # Bytes as they are may go past everything that is about other keys and values.
        self.takes_bytes = config.key_serializer == config.value_serializer == "bytes"
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
        timestamp_ms = _timestamp(topic, timestamp_ms)
        size_bound = record_size_bound(key_bytes, value_bytes, checked)
        self._check_size(topic, key_bytes, value_bytes, size_bound)
        if partition is not None and type(partition) is not int:
            partition = arguments.whole_number("partition", partition)
        data = RecordData(timestamp_ms, key_bytes, value_bytes, checked)
        return Prepared(topic, partition, key_bytes, value_bytes, data, size_bound)

    def prepare_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None,
        timestamp_ms: int | None,
    ) -> Plain:
        """The records in bytes. Raises what ``Producer.send_many`` promises to raise at once."""
        value_list = arguments.listed("values", values)
        key_list = None if keys is None else arguments.listed("keys", keys)
        if key_list is not None and len(key_list) != len(value_list):
            raise InvalidRequestError(
                f"keys are {len(key_list)} and values {len(value_list)}: as many keys as values "
                "are wanted, or None for no keys"
            )
        plain = Plain(
            self._serialize_all("value", topic, self._value_serializer, value_list),
            None
            if key_list is None
            else self._serialize_all("key", topic, self._key_serializer, key_list),
            _timestamp(topic, timestamp_ms),
        )
        self.check_all(topic, plain)
        return plain

    def _serialize_all(
        self,
        what: Literal["key", "value"],
        topic: str,
        use: serializers.Serializer,
        data: list[Any],
    ) -> list[bytes | None]:
        if self.takes_bytes and first_odd(data, arguments.MAX_INT32) == len(data):
            return data
        return [serializers.serialize(what, topic, use, one) for one in data]

    def take_many(
        self, topic: str, plain: Plain, partition: int | None, before: int, places: Places[Receipt]
    ) -> int:
        """How many are queued by now; those that the intake takes are added to ``places``."""
        if plain.headers is not None and plain.joined_headers is None:
            return len(places) - before
        return self._engine.intake.take_many(
            topic,
            *plain[:3],
            partition=partition,
            before=before,
            places=places,
            partitions=plain.partitions,
            headers=plain.joined_headers,
        )

    def nth(self, topic: str, plain: Plain, number: int, partition: int | None) -> Prepared:
        """One of many. Raises RecordTooLargeError, SerializationError."""
        value = plain.values[number]
        key = None if plain.keys is None else plain.keys[number]
        headers = _check_headers(topic, plain.headers[number]) if plain.headers else ()
        size_bound = record_size_bound(key, value, headers)
        self._check_size(topic, key, value, size_bound)
        time_ms = plain.times if isinstance(plain.times, int) else plain.times[number]
        data = RecordData(_timestamp(topic, time_ms), key, value, headers)
        if partition is None and plain.partitions is not None and plain.partitions[number] >= 0:
            partition = plain.partitions[number]
        return Prepared(topic, partition, key, value, data, size_bound)

    def check_all(self, topic: str, plain: Plain) -> None:
        """Raise what one of them would raise: RecordTooLargeError, SerializationError,
        InvalidPartitionsError.
        """
        count = self._engine.metadata.partition_count(topic)
        for partition in plain.distinct_partitions:
            _check_partition(topic, partition, count)
        # A third of what a record may have: all are looked at one after the other.
        small_bytes = (self._max_request_size - HEADER_BYTES - RECORD_BOUND_BYTES) // 3
        parts: tuple[list[Any] | Strings, ...] = (
            plain.values,
            plain.keys or [],
            plain.joined_headers or [],
        )
        odd = any(_has_odd(part, small_bytes) for part in parts)
        has_odd_headers = plain.headers is not None and plain.joined_headers is None
        if odd or plain.least_time_ms < 0 or has_odd_headers:
            for number in range(len(plain.values)):
                self.nth(topic, plain, number, None)

    def _check_size(
        self, topic: str, key: bytes | None, value: bytes | None, size_bound: int
    ) -> None:
        if size_bound + HEADER_BYTES > self._max_request_size:
            raise RecordTooLargeError(
                f"a record for topic {topic!r} takes {size_bound + HEADER_BYTES} bytes (key "
                f"{len(key or b'')}, value {len(value or b'')}), more than "
                f"max_request_size={self._max_request_size}; raise max_request_size (and the "
                "topic's max.message.bytes), or send less"
            )

    def ask(self, record: Prepared, earlier: Place | None = None) -> Place | None:
        """The place that the application's own partitioner chooses, ``earlier`` while that holds;
        None where the record, or another partitioner, says so. To be offered next.

        Not called under the guard: whoever is asked may wait for the client, and that for the
        guard. Raises InvalidPartitionsError, and whatever the partitioner does.
        """
        count = self._engine.metadata.partition_count(record.topic)
        if not self._asks or record.partition is not None or not count:
            return earlier
        if earlier is not None and earlier.partition_count == count:
            return earlier
        return Place(TopicPartition(record.topic, self._choose(record, count)), count)

    def offer(
        self, record: Prepared, earlier: Place | None = None
    ) -> Appended[Receipt] | Place | None:
        """Add the record to its partition's batch; its place when memory is full, and None where
        the application's partitioner is to be asked (again) first.

        With the place that an ``earlier`` offer came to no partition is chosen again, which would
        move the partitioner on, unless the topic has another number of partitions by now: what
        waits for room may outlast the topic, and its transaction. Raises
        UnknownTopicOrPartitionError, InvalidPartitionsError, and why nothing can be sent now.
        """
        self._engine.check_sending()
        count = self._engine.metadata.partition_count(record.topic)
        if not count:  # The loop's thread may have heard so since it was last looked up.
            raise UnknownTopicOrPartitionError(
                f"topic {record.topic!r} was deleted just now; nothing was sent"
            )
        if earlier is not None and earlier.partition_count == count:
            place = earlier.partition
        elif self._asks and record.partition is None:
            return None
        else:
            place = TopicPartition(record.topic, self._choose(record, count))
        engine = self._engine
        taken = engine.accumulator.append(place, count, record.data, record.size_bound, now_ms())
        if taken is None:
            return Place(place, count)
        stuck = engine.chooser.stuck.get(record.topic)
        if stuck is not None:
            engine.intake.stick(record.topic, stuck)
        return taken

    def _choose(self, record: Prepared, count: int) -> int:
        topic, partition = record.topic, record.partition
        if partition is not None:
            _check_partition(topic, partition, count)
            return partition
        metadata = self._engine.metadata
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
        return partition


def _has_odd(data: list[bytes | None] | Strings, max_bytes: int) -> bool:
    """Whether one of them is longer, or is no bytes."""
    if isinstance(data, list):
        return first_odd(data, max_bytes) < len(data)
    return data.longest > max_bytes


def _timestamp(topic: str, timestamp_ms: object) -> int:
    """Now where none is given. Raises InvalidRequestError, SerializationError."""
    if timestamp_ms is None:
        return wall_ms()
    found = arguments.whole_number("timestamp_ms", timestamp_ms, unit=" of milliseconds since 1970")
    if found < 0:
        raise SerializationError(
            f"timestamp_ms={found} of a record for topic {topic!r} is out of range; "
            "milliseconds since 1970 are wanted"
        )
    return found


def _check_partition(topic: str, partition: int, count: int) -> None:
    if not 0 <= partition < count:
        raise InvalidPartitionsError(
            f"topic {topic!r} has no partition {partition}; it has 0 to {count - 1}"
        )


def _check_headers(
    topic: str, headers: Sequence[Header] | Mapping[str, bytes | None]
) -> tuple[Header, ...]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, Iterable):
        raise SerializationError(
            f"headers={headers!r} of a record for topic {topic!r} are neither pairs of str and "
            "bytes nor a mapping"
        )
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
        if not arguments.is_encodable(name):
            raise SerializationError(
                f"header {pair!r} of a record for topic {topic!r} has a key that UTF-8 cannot "
                "encode"
            )
        checked.append((name, value))
    return tuple(checked)
