from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.connectors.messaging.amqp import SCHEMA as AMQP
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource, AmqpLink, AmqpOptions
from penstock.pipeline.connectors.messaging.inbox import Inbox
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


class Channel:
    """Acknowledges as RabbitMQ does, which closes the channel for a tag that it does not hold."""

    def __init__(self, held: int) -> None:
        self.held = set(range(1, held + 1))

    def basic_ack(self, tag: int, multiple: bool = False) -> None:
        assert tag in self.held, "unknown delivery tag"
        self.held -= {held for held in self.held if held == tag or (multiple and held < tag)}


@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 4), min_size=8, max_size=8))
def test_of_queues_exactly_what_is_done_is_acknowledged(order: list[int], sizes: list[int]) -> None:
    # After a connection was lost, what was planned comes in between what was not.
    options = AmqpOptions.load({"url": "amqp://none.invalid", "queue": "q"})
    link = AmqpLink(options, Inbox("a test", 0))
    link._turn, link._channel = 2, Channel(8)
    link._outstanding.extend(range(1, 9))
    left = set(order)
    for size in sizes:
        part, order = order[:size], order[size:]
        link._acknowledge([(2, tag) for tag in part] + [(1, 8)])
        left -= set(part)
        assert link._channel.held == left
