from __future__ import annotations

import pickle

import pytest

from penstock.pipeline.connectors.messaging.amqp import SCHEMA as AMQP
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource
from penstock.pipeline.connectors.messaging.mqtt import SCHEMA as MQTT
from penstock.pipeline.connectors.messaging.mqtt import MqttDataSource
from penstock.pipeline.connectors.messaging.reader import MessageReader

READERS = {
    "amqp": lambda: AmqpDataSource({"url": "amqp://none.invalid", "queue": "q"}).streamReader(AMQP),
    "mqtt": lambda: MqttDataSource(
        {"url": "mqtt://none.invalid", "topics": "t", "clientId": "c"}
    ).streamReader(MQTT),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_reader_goes_to_tasks_as_it_is_made(kind: str) -> None:
    # Spark makes one more reader, asks it for nothing, and sends it to the tasks.
    again = pickle.loads(pickle.dumps(READERS[kind]()))
    assert isinstance(again, MessageReader)
    again.stop()


@pytest.mark.parametrize("kind", READERS)
def test_a_batch_of_an_earlier_run_is_empty_and_needs_no_broker(kind: str) -> None:
    earlier = {"reader": "earlier", "number": 0}
    assert READERS[kind]().partitions(earlier, {**earlier, "number": 5}) == []
