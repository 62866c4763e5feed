"""What is wrong in a call is refused by the call, and harms nothing that comes after it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    OffsetAndMetadata,
    PenstockError,
    Producer,
    TopicPartition,
)
from penstock.client.errors import (
    InvalidGroupIdError,
    InvalidRequestError,
    InvalidTopicError,
    SerializationError,
)
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster

NOBODY = "127.0.0.1:1"  # Nothing that is refused here gets as far as to a broker.
T0 = TopicPartition("t", 0)

Case = tuple[Callable[[Any], Any], type[PenstockError], str]

PRODUCER: list[Case] = [
    (lambda p: p.send(None), InvalidRequestError, r"topic=None: a topic's name as str is wanted"),
    (lambda p: p.send(b"t"), InvalidRequestError, r"topic=b't': .*decode\(\)"),
    (lambda p: p.send(["t"]), InvalidRequestError, r"topic=\['t'\]: a topic's name"),
    (lambda p: p.send(""), InvalidTopicError, "'' is not allowed: 1 to 249 letters"),
    (lambda p: p.send("a/b"), InvalidTopicError, "'a/b' is not allowed"),
    (lambda p: p.send("\ud800"), InvalidRequestError, "topic=.*UTF-8"),
    (lambda p: p.flush("x"), InvalidRequestError, "timeout_ms='x': a number of milliseconds"),
    (lambda p: p.flush(-1), InvalidRequestError, "timeout_ms=-1: .* from 0 on"),
    (lambda p: p.flush(float("nan")), InvalidRequestError, "timeout_ms=nan"),
    (lambda p: p.close("x"), InvalidRequestError, "timeout_ms='x'"),
    (lambda p: p.partitions_for(5), InvalidRequestError, "topic=5"),
]

RECORD: list[tuple[dict[str, Any], type[PenstockError], str]] = [
    (
        {"partition": "1"},
        InvalidRequestError,
        r"partition='1': a whole number \(such as 1, without quotes\) is wanted",
    ),
    ({"partition": 1.0}, InvalidRequestError, r"partition=1\.0: a whole number"),
    ({"partition": True}, InvalidRequestError, "partition=True: a whole number"),
    (
        {"timestamp_ms": 1.5},
        InvalidRequestError,
        r"timestamp_ms=1\.5: a whole number of milliseconds",
    ),
    ({"timestamp_ms": "5"}, InvalidRequestError, "timestamp_ms='5'"),
    ({"timestamp_ms": -1}, SerializationError, "timestamp_ms=-1 .*out of range"),
    ({"headers": 5}, SerializationError, "headers=5 .*pairs"),
    ({"headers": "ab"}, SerializationError, "header 'a' .*pair"),
    ({"headers": [("a", "1")]}, SerializationError, r"header \('a', '1'\)"),
    ({"headers": [(b"a", b"1")]}, SerializationError, "header "),
    ({"headers": [("a", b"1", b"2")]}, SerializationError, "header "),
    ({"headers": {"\ud800": b"1"}}, SerializationError, "header .*UTF-8"),
    ({"headers": {5: b"1"}}, SerializationError, "header "),
]

CONSUMER: list[Case] = [
    (lambda c: c.poll("x"), InvalidRequestError, "timeout_ms='x'"),
    (lambda c: c.poll(-1), InvalidRequestError, "timeout_ms=-1"),
    (lambda c: c.poll(max_records="5"), InvalidRequestError, "max_records='5'"),
    (lambda c: c.poll(max_records=0), InvalidRequestError, "max_records=0: .* from 1"),
    (lambda c: c.poll_batch("x"), InvalidRequestError, "timeout_ms='x'"),
    (lambda c: c.subscribe(None), InvalidRequestError, "topics=None: a list of topics' names"),
    (lambda c: c.subscribe(b"t"), InvalidRequestError, "topics=b't'"),
    (lambda c: c.subscribe([b"t"]), InvalidRequestError, "topic=b't'"),
    (lambda c: c.subscribe(""), InvalidTopicError, "not allowed"),
    (lambda c: c.subscribe(["a b"]), InvalidTopicError, "'a b' is not allowed"),
    (lambda c: c.subscribe(re.compile(b"t")), InvalidRequestError, "pattern"),
    (lambda c: c.subscribe("t", 5), InvalidRequestError, "listener=5: .*on_partitions_lost"),
    (lambda c: c.assign(T0), InvalidRequestError, r"partitions=.*a list of them"),
    (lambda c: c.assign("t"), InvalidRequestError, "partitions='t'"),
    (lambda c: c.assign([("t", "0")]), InvalidRequestError, "partition='0'"),
    (lambda c: c.assign([("t", 2**31)]), InvalidRequestError, "partition=2147483648"),
    (lambda c: c.assign([(b"t", 0)]), InvalidRequestError, "topic=b't'"),
    (lambda c: c.assign(["t-0"]), InvalidRequestError, "partition='t-0': TopicPartition"),
    (lambda c: c.seek("t", 5), InvalidRequestError, "partition='t'"),
    (lambda c: c.seek(T0, "5"), InvalidRequestError, "offset='5'"),
    (lambda c: c.seek(T0, None), InvalidRequestError, "offset=None"),
    (lambda c: c.seek(T0, 2**63), InvalidRequestError, "offset=9223372036854775808"),
    (lambda c: c.seek_to_beginning([T0]), InvalidRequestError, r"unpack a list with \*"),
    (lambda c: c.seek_to_end("t"), InvalidRequestError, "partition='t'"),
    (lambda c: c.pause([T0]), InvalidRequestError, r"unpack a list with \*"),
    (lambda c: c.resume([T0]), InvalidRequestError, r"unpack a list with \*"),
    (lambda c: c.position("t"), InvalidRequestError, "partition='t'"),
    (lambda c: c.committed("t"), InvalidRequestError, "partition='t'"),
    (lambda c: c.commit(5), InvalidRequestError, "offsets=5: a mapping"),
    (lambda c: c.commit({T0: "5"}), InvalidRequestError, r"offsets\[t-0\]='5'"),
    (lambda c: c.commit({T0: -1}), InvalidRequestError, r"offsets\[t-0\]=-1: .* from 0"),
    (lambda c: c.commit({"t": 1}), InvalidRequestError, "partition='t'"),
    (
        lambda c: c.commit({T0: OffsetAndMetadata(1, metadata=None)}),  # type: ignore[arg-type]
        InvalidRequestError,
        r"offsets\[t-0\]\.metadata=None",
    ),
    (lambda c: c.beginning_offsets(T0), InvalidRequestError, "a list of them"),
    (lambda c: c.end_offsets(["t"]), InvalidRequestError, "partition='t'"),
    (lambda c: c.offsets_for_times({T0: 1.5}), InvalidRequestError, r"timestamps_ms\[t-0\]=1\.5"),
    (lambda c: c.offsets_for_times(5), InvalidRequestError, "timestamps_ms=5: a mapping"),
    (lambda c: c.partitions_for(None), InvalidRequestError, "topic=None"),
    (lambda c: c.close("x"), InvalidRequestError, "timeout_ms='x'"),
]

ADMIN: list[Case] = [
    (lambda a: a.create_topic(None), InvalidRequestError, "name=None"),
    (lambda a: a.create_topic(""), InvalidTopicError, "not allowed"),
    (
        lambda a: a.create_topic("t", "3"),
        InvalidRequestError,
        r"partitions='3': a whole number \(such as 3, without quotes\)",
    ),
    (lambda a: a.create_topic("t", 2**31), InvalidRequestError, "partitions=2147483648"),
    (lambda a: a.create_topic("t", 1, 1.0), InvalidRequestError, r"replication_factor=1\.0"),
    (lambda a: a.create_topic("t", configs="x"), InvalidRequestError, "configs='x': a mapping"),
    (
        lambda a: a.create_topic("t", configs={"retention.ms": None}),
        InvalidRequestError,
        r"configs\['retention\.ms'\]=None: text, a number",
    ),
    (lambda a: a.create_topic("t", configs={5: "x"}), InvalidRequestError, "key of configs=5"),
    (lambda a: a.create_topic("t", validate_only="no"), InvalidRequestError, "True or False"),
    (lambda a: a.create_topic("t", if_not_exists=1), InvalidRequestError, "if_not_exists=1"),
    (
        lambda a: a.create_topic("t", replica_assignments=[1, 2]),
        InvalidRequestError,
        "replica_assignments=1: a list of node ids",
    ),
    (
        lambda a: a.create_topic("t", replica_assignments=[["1"]]),
        InvalidRequestError,
        "node id='1'",
    ),
    (lambda a: a.delete_topic(["t"]), InvalidRequestError, r"name=\['t'\]"),
    (lambda a: a.list_topics(include_internal="x"), InvalidRequestError, "include_internal='x'"),
    (
        lambda a: a.describe_topics("orders"),
        InvalidRequestError,
        r"names='orders': a list of topics' names is wanted; for one, write \['orders'\]",
    ),
    (lambda a: a.describe_topics([None]), InvalidRequestError, "topic=None"),
    (lambda a: a.create_partitions("t", "4"), InvalidRequestError, "total_count='4'"),
    (lambda a: a.describe_configs(None), InvalidRequestError, "topic=None"),
    (lambda a: a.alter_configs(None), InvalidRequestError, "topic=None"),
    (lambda a: a.alter_configs("t", remove="x"), InvalidRequestError, "remove='x': a list"),
    (lambda a: a.alter_configs("t", [1]), InvalidRequestError, r"set_configs=\[1\]: a mapping"),
    (lambda a: a.elect_leaders("t"), InvalidRequestError, "partitions='t'"),
    (lambda a: a.elect_leaders(unclean="x"), InvalidRequestError, "unclean='x'"),
    (lambda a: a.describe_groups("g"), InvalidRequestError, "group_ids='g': a list"),
    (lambda a: a.describe_groups([""]), InvalidGroupIdError, "must not be empty; choose"),
    (
        lambda a: a.describe_groups(["g" * 256]),
        InvalidGroupIdError,
        "256 bytes; 255 are allowed: choose a shorter",
    ),
    (lambda a: a.delete_groups([None]), InvalidRequestError, "group_id=None"),
    (lambda a: a.list_group_offsets(None), InvalidRequestError, "group_id=None"),
    (lambda a: a.list_group_offsets("g", T0), InvalidRequestError, "a list of them"),
    (lambda a: a.alter_group_offsets("g", {T0: "5"}), InvalidRequestError, r"offsets\[t-0\]='5'"),
    (lambda a: a.alter_group_offsets(5, {T0: 5}), InvalidRequestError, "group_id=5"),
    (
        lambda a: a.list_offsets({T0: "last"}),
        InvalidRequestError,
        "partitions.t-0.='last': a time .* or one of 'latest', 'earliest', 'max_timestamp'",
    ),
    (lambda a: a.list_offsets({T0: None}), InvalidRequestError, "=None: a whole number of milli"),
    (lambda a: a.list_offsets([T0]), InvalidRequestError, "a mapping"),
    (
        lambda a: a.delete_records({T0: "5"}),
        InvalidRequestError,
        r"before_offsets\[t-0\]='5'",
    ),
]


def ids(cases: list[Any]) -> list[str]:
    return [case[2] for case in cases]


@pytest.fixture
def producer() -> Iterator[Producer]:
    with Producer(NOBODY, max_block_ms=50, bootstrap_timeout_ms=50) as found:
        yield found


@pytest.mark.parametrize(("call", "kind", "message"), PRODUCER, ids=ids(PRODUCER))
def test_a_producer_refuses(
    producer: Producer, call: Callable[[Any], Any], kind: type[PenstockError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(producer)


@pytest.mark.parametrize(("call", "kind", "message"), CONSUMER, ids=ids(CONSUMER))
def test_a_consumer_refuses(
    call: Callable[[Any], Any], kind: type[PenstockError], message: str
) -> None:
    with (
        Consumer(NOBODY, group_id="g", default_api_timeout_ms=50, bootstrap_timeout_ms=50) as found,
        pytest.raises(kind, match=message),
    ):
        call(found)


@pytest.mark.parametrize(("call", "kind", "message"), ADMIN, ids=ids(ADMIN))
def test_an_admin_client_refuses(
    call: Callable[[Any], Any], kind: type[PenstockError], message: str
) -> None:
    with (
        AdminClient(NOBODY, default_api_timeout_ms=50, bootstrap_timeout_ms=50) as found,
        pytest.raises(kind, match=message),
    ):
        call(found)


async def refused_by(client: Any, cases: list[Case]) -> None:
    async def ask(call: Callable[[Any], Any]) -> None:
        answer = call(client)
        if isinstance(answer, Awaitable):
            await answer

    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            await asyncio.wait_for(ask(call), 20)


async def test_the_asyncio_clients_refuse_the_same() -> None:
    await refused_by(AsyncProducer(NOBODY, max_block_ms=50, bootstrap_timeout_ms=50), PRODUCER)
    await refused_by(AsyncAdminClient(NOBODY, bootstrap_timeout_ms=50), ADMIN)
    consumer = AsyncConsumer(NOBODY, group_id="g", bootstrap_timeout_ms=50)
    await refused_by(consumer, CONSUMER)


@pytest.mark.parametrize("client", [Consumer, AsyncConsumer])
def test_a_consumer_refuses_topics_as_it_is_made(client: Any) -> None:
    with pytest.raises(InvalidRequestError, match="topics=5"):
        client(NOBODY, topics=5)


def test_commit_async_refuses_at_once() -> None:
    with Consumer(NOBODY, group_id="g", bootstrap_timeout_ms=50) as consumer:
        with pytest.raises(InvalidRequestError, match=r"offsets\[t-0\]='5'"):
            consumer.commit_async({T0: "5"})  # type: ignore[dict-item]
        with pytest.raises(InvalidRequestError, match="callback=5"):
            consumer.commit_async({T0: 5}, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arguments", "kind", "message"), RECORD, ids=ids(RECORD))
def test_a_wrong_record_is_refused_and_the_next_one_is_written(
    background: Background, arguments: dict[str, Any], kind: type[PenstockError], message: str
) -> None:
    background.cluster.add_topic("t", 2)
    with Producer(background.cluster.bootstrap) as producer:
        with pytest.raises(kind, match=message):
            producer.send("t", b"wrong", **arguments)
        producer.send("t", b"right", partition=0).result(10)
    assert background.cluster.values("t") == [b"right"]


@pytest.mark.parametrize("topic", [None, b"t", ["t"], 5, "\ud800", ""])
def test_a_producer_outlives_a_wrong_topic(background: Background, topic: Any) -> None:
    background.cluster.add_topic("t")
    with Producer(background.cluster.bootstrap, max_block_ms=2_000) as producer:
        with pytest.raises(PenstockError, match=r"wanted|not allowed"):
            producer.send(topic, b"wrong")
        producer.send("t", b"right").result(10)
    assert background.cluster.values("t") == [b"right"]


async def test_an_async_producer_outlives_a_wrong_topic(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, max_block_ms=2_000) as producer:
        for topic in (None, b"t"):
            with pytest.raises(InvalidRequestError):
                await producer.send(topic, b"wrong")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="partition='0'"):
            await producer.send("t", b"wrong", partition="0")  # type: ignore[arg-type]
        await producer.send_and_wait("t", b"right")
    assert cluster.values("t") == [b"right"]


class Four:
    """What numpy's whole numbers are like."""

    def __index__(self) -> int:
        return 4


def test_what_stands_for_a_whole_number_is_taken(background: Background) -> None:
    background.cluster.add_topic("t", 5)
    with Producer(background.cluster.bootstrap) as producer:
        future = producer.send("t", b"v", partition=Four(), timestamp_ms=Four())  # type: ignore[arg-type]
        place = future.result(10)
    assert (place.partition, place.timestamp_ms) == (4, 4)
    assert type(place.partition) is int


async def test_configs_may_be_numbers_and_booleans(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        configs = {
            "retention.ms": 5,
            "unclean.leader.election.enable": True,
            "min.cleanable.dirty.ratio": 0.25,
            "cleanup.policy": "compact",
        }
        await admin.create_topic("t", configs=configs)
        [described] = await admin.describe_topics(["t"])
    assert described.configs == {
        "retention.ms": "5",
        "unclean.leader.election.enable": "true",
        "min.cleanable.dirty.ratio": "0.25",
        "cleanup.policy": "compact",
    }


async def test_plain_pairs_are_partitions(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap) as consumer:
        await consumer.assign([("t", 0)])  # type: ignore[list-item]
        await consumer.seek(("t", 0), 0)  # type: ignore[arg-type]
        assert await consumer.end_offsets([("t", 0)]) == {T0: 0}  # type: ignore[list-item]
