from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import OptionError
from penstock.pipeline.connectors.messaging.amqp import SCHEMA as AMQP
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource, AmqpLink, AmqpOptions
from penstock.pipeline.connectors.messaging.inbox import Inbox
from penstock.pipeline.connectors.messaging.mqtt import SCHEMA as MQTT
from penstock.pipeline.connectors.messaging.mqtt import MqttDataSource, MqttLink, MqttOptions
from penstock.pipeline.connectors.messaging.reader import MessageReader

READERS = {
    "amqp": lambda: AmqpDataSource({"url": "amqp://none.invalid", "queue": "q"}).streamReader(AMQP),
    "mqtt": lambda: MqttDataSource(
        {"url": "mqtt://none.invalid", "topics": "t", "clientId": "c"}
    ).streamReader(MQTT),
}


@pytest.mark.parametrize(
    ("load", "given"),
    [
        (AmqpOptions.load, {"url": "amqp://a", "queue": "q"}),
        (MqttOptions.load, {"url": "mqtt://a", "topics": "t", "clientId": "c"}),
    ],
)
def test_a_connection_gets_some_time(
    load: Callable[[Mapping[str, str]], object], given: dict[str, str]
) -> None:
    load({**given, "connectTimeout": "1ms", "reconnectTimeout": "0"})
    with pytest.raises(OptionError, match="connectTimeout='0s': at least 1ms is wanted"):
        load({**given, "connectTimeout": "0s"})


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


@pytest.mark.parametrize(("server", "session_present"), [("b", True), ("a", False)])
def test_numbers_of_one_server_are_not_acknowledged_to_another(
    server: str, session_present: bool
) -> None:
    options = MqttOptions.load({"url": "mqtt://a,mqtt://b", "topics": "t", "clientId": "c"})
    inbox: Inbox[tuple[int, int]] = Inbox("a test", 0)
    link, acknowledged = MqttLink(options, inbox), []
    servers = {each.host: each for each in options.common.servers}
    client = SimpleNamespace(
        ack=lambda number, qos: acknowledged.append(number), subscribe=lambda topics: None
    )
    link._connection = SimpleNamespace(server=servers["a"], client=client)
    link._session_at = servers["a"]
    good = SimpleNamespace(is_failure=False)
    message = SimpleNamespace(topic="t", payload=b"x", qos=1, retain=False, dup=False, mid=7)
    link._receive(client, None, message)
    inbox.plan(0, None, 0)
    held = inbox.done(1)
    assert held == [(1, 7)]
    # Between what Spark says and what is sent the connection is another one.
    link._connection.server = servers[server]
    link._connected(client, None, SimpleNamespace(session_present=session_present), good, None)
    link.acknowledge(held)
    assert acknowledged == []
    # What the other has under that number is another message, however much they look the same.
    message.dup = True
    link._receive(client, None, message)
    assert inbox.plan(1, None, 0) == 2
    link.acknowledge(inbox.done(2))
    assert acknowledged == [7]


def test_the_same_session_goes_on_at_the_same_server() -> None:
    options = MqttOptions.load({"url": "mqtt://a,mqtt://b", "topics": "t", "clientId": "c"})
    link, acknowledged = MqttLink(options, Inbox("a test", 0)), []
    client = SimpleNamespace(
        ack=lambda number, qos: acknowledged.append(number), subscribe=lambda topics: None
    )
    link._connection = SimpleNamespace(server=options.common.servers[0], client=client)
    link._session_at = options.common.servers[0]
    good = SimpleNamespace(is_failure=False)
    link._connected(client, None, SimpleNamespace(session_present=True), good, None)
    link.acknowledge([(1, 7)])
    assert acknowledged == [7]


def test_amqp_refuses_servers_of_which_some_are_not_encrypted_too() -> None:
    with pytest.raises(OptionError, match="amqp:// and amqps://, so that password and messages"):
        AmqpOptions.load({"url": "amqps://a,amqp://b", "queue": "q"})


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
