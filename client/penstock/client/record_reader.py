"""From the log's records to the application's, through its deserialisers."""

from __future__ import annotations

from penstock.client import serializers
from penstock.client.config import ConsumerConfig
from penstock.client.model import ConsumerRecord
from penstock.wire.ids import TopicPartition
from penstock.wire.records import Record


class RecordReader:
    """Deserialises keys and values as the consumer's configuration says."""

    def __init__(self, config: ConsumerConfig) -> None:
        self._key = serializers.deserializer("key_deserializer", config.key_deserializer)
        self._value = serializers.deserializer("value_deserializer", config.value_deserializer)

    def convert(
        self, partition: TopicPartition, record: Record, epoch: int, topic_id: bytes
    ) -> ConsumerRecord:
        """The application's record. Raises SerializationError, which names the record."""
        key, value = record.key, record.value
        if self._key is not None:
            key = serializers.deserialize("key", f"{partition}@{record.offset}", self._key, key)
        if self._value is not None:
            where = f"{partition}@{record.offset}"
            value = serializers.deserialize("value", where, self._value, value)
        return ConsumerRecord(
            partition.topic,
            partition.partition,
            record.offset,
            record.timestamp_ms,
            key,
            value,
            record.headers,
            epoch,
            topic_id,
        )
