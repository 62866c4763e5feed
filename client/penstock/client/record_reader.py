"""From the log's records to the application's, through its deserialisers."""

from __future__ import annotations

from collections.abc import Callable

from penstock.client import serializers
from penstock.client.config import ConsumerConfig
from penstock.client.model import ConsumerRecord


def record_reader(config: ConsumerConfig) -> Callable[[ConsumerRecord], ConsumerRecord] | None:
    """What deserialises keys and values as the configuration says; None where they stay bytes.

    It raises SerializationError, which names the record.
    """
    use_key = serializers.deserializer("key_deserializer", config.key_deserializer)
    use_value = serializers.deserializer("value_deserializer", config.value_deserializer)
    if use_key is None and use_value is None:
        return None

    def read(record: ConsumerRecord) -> ConsumerRecord:
        key, value = record.key, record.value
        if use_key is not None:
            key = serializers.deserialize("key", record, use_key, key)
        if use_value is not None:
            value = serializers.deserialize("value", record, use_value, value)
        return record._replace(key=key, value=value)

    return read
