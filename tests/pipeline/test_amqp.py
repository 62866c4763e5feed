from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pika
import pytest

from penstock.pipeline import ConnectorError, OptionError
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource, AmqpOptions, AmqpReader
from tests.pipeline.brokers import Cable
from tests.pipeline.reading import Driver, Rows, read
from tests.support import wait_until


class Queue:
    """A durable queue, and what a publisher does with it."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self.connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.queue_declare(name, durable=True)

    def publish(self, *bodies: str, identified: bool = False, **properties: Any) -> None:
        for body in bodies:
            named = {"message_id": f"id-{body}"} if identified else {}
            about = pika.BasicProperties(delivery_mode=2, **named, **properties)
            self.channel.basic_publish("", self.name, body.encode(), about)

    def ready(self) -> int:
        found = self.channel.queue_declare(self.name, passive=True)
        return int(found.method.message_count)

    def options(self, port: int | None = None, **more: str) -> dict[str, str]:
        url = f"amqp://127.0.0.1:{port or self.port}"
        return {"url": url, "queue": self.name, "reconnectTimeout": "60s", **more}

    def reader(self, port: int | None = None, **more: str) -> AmqpReader:
        return AmqpReader(AmqpOptions.load(self.options(port, **more)))


@pytest.fixture
def queue(rabbitmq_port: int, request: pytest.FixtureRequest) -> Iterator[Queue]:
    made = Queue(rabbitmq_port, request.node.name)
    with closing(made.connection):
        yield made


def bodies(rows: Rows) -> list[str]:
    return [row["body"].decode() for row in rows]


def stopped(reader: AmqpReader) -> Any:
    return closing(type("Stop", (), {"close": reader.stop}))


def test_all_columns(queue: Queue) -> None:
    at = 1_767_323_045
    headers = {"text": "ä", "number": 7, "nested": {"a": [1]}, "nothing": None}
    queue.publish(
        "hello", headers=headers, timestamp=at, content_type="text/plain", priority=3,
        correlation_id="c", message_id="m", app_id="app",
    )  # fmt: skip
    reader = queue.reader()
    with stopped(reader):
        (row,) = Driver(reader).until(1)
    received = row.pop("received")
    assert abs(datetime.datetime.now(datetime.UTC) - received) < datetime.timedelta(hours=1)
    properties = {key: value for key, value in row.pop("properties").items() if value is not None}
    assert properties == {
        "contentType": "text/plain", "priority": 3, "correlationId": "c", "messageId": "m",
        "appId": "app", "deliveryMode": 2,
    }  # fmt: skip
    assert dict(row.pop("headers")) == {
        "text": "ä", "number": "7", "nested": '{"a": [1]}', "nothing": None,
    }  # fmt: skip
    assert row == {
        "body": b"hello", "routingKey": queue.name, "exchange": "", "redelivered": False,
        "timestamp": datetime.datetime.fromtimestamp(at, datetime.UTC),
    }  # fmt: skip


def test_what_spark_has_not_noted_stays_with_the_broker(queue: Queue) -> None:
    queue.publish("a", "b", "c")
    reader = queue.reader()
    with stopped(reader):
        driver = Driver(reader)
        driver.plan_of(3)  # In one batch: to plan another would mean that this one is done.
        assert bodies(driver.rows()) == bodies(driver.rows()) == ["a", "b", "c"]
    wait_until(lambda: queue.ready() == 3, "the queue has them again")

    # The next run is asked for the same batch, which it does not have: it is empty, and its
    # messages come in the batch after it.
    again = queue.reader()
    with stopped(again):
        assert read(again, driver.start, driver.end) == []
        following = Driver(again, driver.end)
        rows = following.until(3)
        assert bodies(rows) == ["a", "b", "c"]
        assert all(row["redelivered"] for row in rows)
        # To be asked for what follows them means that they are done.
        assert not following.plan()
    assert queue.ready() == 0


def test_a_commit_acknowledges(queue: Queue) -> None:
    queue.publish("a", "b")
    reader = queue.reader()
    with stopped(reader):
        driver = Driver(reader)
        driver.until(2)
        reader.commit(driver.end)
        reader.commit(driver.end)
    assert queue.ready() == 0


def test_the_prefetch_bounds_what_is_held(queue: Queue) -> None:
    queue.publish(*(str(number) for number in range(25)))
    reader = queue.reader(prefetch="10")
    with stopped(reader):
        driver = Driver(reader)
        wait_until(lambda: queue.ready() == 15, "ten are delivered")
        wait_until(driver.plan, "what is delivered has arrived")
        assert len(driver.rows()) <= 10
        wait_until(lambda: queue.ready() == 15, "no more are delivered")
        rows = driver.rows() + driver.until(25 - len(driver.rows()))
    assert bodies(rows) == [str(number) for number in range(25)]


def test_a_limit_bounds_batches_and_partitions_share_them(queue: Queue) -> None:
    queue.publish(*"abcdefg")
    reader = queue.reader(maxRowsPerTrigger="4", minPartitions="2")
    with stopped(reader):
        driver = Driver(reader)
        wait_until(lambda: queue.ready() == 0, "all are delivered")
        driver.plan_of(4)
        assert len(reader.partitions(driver.start, driver.end)) == 2
        assert bodies(driver.rows()) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("identified", [True, False])
def test_a_connection_that_breaks_loses_nothing(queue: Queue, identified: bool) -> None:
    cable = Cable(queue.port)
    reader = queue.reader(cable.port)
    with closing(cable), stopped(reader):
        driver = Driver(reader)
        queue.publish("a", "b", identified=identified)
        driver.plan_of(2)
        rows = driver.rows()
        cable.cut()
        # It has noticed: what is done with before that comes again, its acknowledgement being lost.
        wait_until(lambda: cable.refused, "the reader tries to connect anew")
        assert driver.rows() == rows
        queue.publish("c", identified=identified)
        cable.plug_in()
        rows += driver.until(1 if identified else 3)
        assert not driver.plan()
    # Known by their message_id, what had been read was not read again.
    assert sorted(bodies(rows)) == (["a", "b", "c"] if identified else ["a", "a", "b", "b", "c"])
    assert queue.ready() == 0


def test_an_outage_that_lasts_fails_the_query(queue: Queue) -> None:
    cable = Cable(queue.port)
    reader = queue.reader(cable.port, reconnectTimeout="0ms")
    with closing(cable), stopped(reader):
        driver = Driver(reader)
        cable.cut()
        with pytest.raises(ConnectorError, match=r"no connection for 0 s: .*reconnectTimeout"):
            wait_until(driver.plan, "a failure")


def test_a_queue_that_is_deleted_fails_the_query(queue: Queue) -> None:
    reader = queue.reader()
    with stopped(reader):
        driver = Driver(reader)
        queue.channel.queue_delete(queue.name)
        with pytest.raises(ConnectorError, match="there is no such queue"):
            wait_until(driver.plan, "a failure")


def test_a_query_that_ends_reads_what_there_was(queue: Queue) -> None:
    queue.publish(*(str(number) for number in range(25)))
    reader = queue.reader(prefetch="10")
    with stopped(reader):
        reader.prepareForTriggerAvailableNow()
        queue.publish("later")
        driver = Driver(reader)
        rows: Rows = []
        while driver.plan():
            rows += driver.rows()
    assert bodies(rows) == [str(number) for number in range(25)]
    assert queue.ready() == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"queue": "none"}, r"queue 'none' on 127\.0\.0\.1:\d+: there is no such queue"),
        ({"username": "ann", "password": "wrong"}, r"refuses user 'ann'.*check username"),
        ({"url": "amqp://127.0.0.1:1"}, r"no broker answers: 127\.0\.0\.1:1: .*check option url"),
        ({"url": "amqp://none.invalid"}, r"no broker answers: none\.invalid:5672"),
        ({"path": "/none"}, "refuses virtual host 'none'"),
    ],
)
def test_what_is_wrong_is_said_by_load(queue: Queue, wrong: dict[str, str], match: str) -> None:
    options = queue.options()
    options["url"] += wrong.get("path", "")
    options |= {key: value for key, value in wrong.items() if key != "path"}
    with pytest.raises(ConnectorError, match=match):
        AmqpDataSource(options).schema()


def test_a_good_source_is_checked_and_leaves_nothing(queue: Queue) -> None:
    queue.publish("a")
    assert AmqpDataSource(queue.options()).schema().fieldNames()[0] == "body"
    assert queue.ready() == 1


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "option url is missing"),
        ({"url": "http://a"}, r"amqp://host:port or amqps://"),
        ({"url": "amqp://guest:guest@a"}, "url has credentials in it"),
        ({"url": "amqp://a"}, "option queue is missing"),
        ({"url": "amqp://a", "queue": "q", "prefetch": "70000"}, "from 1 to 65535"),
        ({"url": "amqp://a", "queue": "q", "que": "q"}, "unknown option que; did you mean queue"),
        ({"url": "amqp://a", "queue": "q", "heartbeat": "0"}, "from 1s to 1h"),
    ],
)
def test_options_that_are_wrong(given: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        AmqpOptions.load(given)
