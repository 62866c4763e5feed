"""What consumers promise, over real nodes, with the sync and with the asyncio consumer.

What groups promise is in test_groups.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    ClientClosedError,
    InvalidGroupIdError,
    InvalidRequestError,
    LeaderNotAvailableError,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    OffsetOutOfRangeError,
    Producer,
    SerializationError,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from tests.integration.client.forms import Form
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

FULL = 60
"""Records of the topic that all tests read: twenty in each of its three partitions."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


@pytest.fixture(scope="module")
def producer(cluster: Cluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap, linger_ms=0) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def form(cluster: Cluster, request: pytest.FixtureRequest) -> Form:
    return Form(cluster.bootstrap, request.param)


@pytest.fixture(scope="module")
def full(admin: AdminClient, producer: Producer) -> str:
    """A topic that all tests read: the value is the offset, and the time a hundred times that."""
    admin.create_topic("full", 3)
    for number in range(FULL):
        offset = number // 3
        producer.send("full", b"%d" % offset, partition=number % 3, timestamp_ms=offset * 100)
    producer.flush()
    return "full"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for a topic or a group."""
    return re.sub(r"[^a-z]+", "-", request.node.name.lower()).strip("-")


def place(topic: str, partition: int = 0) -> TopicPartition:
    return TopicPartition(topic, partition)


async def poll(consumer: Any, count: int, **limits: Any) -> list[Any]:
    """At least so many records."""
    found: list[Any] = []
    while len(found) < count:
        records = await settle(consumer.poll(20_000, **limits))
        assert records, f"{len(found)} of {count} records"
        found += records
    return found


async def take(consumer: Any, count: int) -> list[Any]:
    """So many records by iteration."""
    found: list[Any] = []
    if hasattr(consumer, "__anext__"):
        async for record in consumer:
            found.append(record)
            if len(found) == count:
                break
    else:
        for record in consumer:
            found.append(record)
            if len(found) == count:
                break
    return found


def check_full(records: list[Any]) -> None:
    """All of the topic, each partition in order."""
    assert len(records) == FULL
    for partition in range(3):
        mine = [record for record in records if record.partition == partition]
        assert [record.offset for record in mine] == list(range(20))
        assert [record.value for record in mine] == [b"%d" % offset for offset in range(20)]
        assert {record.topic for record in mine} == {"full"}


# --- what is read, and how ------------------------------------------------------------------------


async def test_topics_are_read_by_iteration(form: Form, full: str) -> None:
    async with form.consumer(topics=[full], auto_offset_reset="earliest") as consumer:
        check_full(await take(consumer, FULL))
        assert consumer.subscription() == (full,)
        assert consumer.assignment() == {place(full, number) for number in range(3)}
        assert await settle(consumer.partitions_for(full)) == (0, 1, 2)


async def test_polls_are_limited_and_an_empty_one_ends_in_time(form: Form, full: str) -> None:
    async with form.consumer(auto_offset_reset="earliest", max_poll_records=7) as consumer:
        consumer.subscribe(full)
        first = await settle(consumer.poll(20_000))
        second = await settle(consumer.poll(20_000, max_records=3))
        assert (1 <= len(first) <= 7, 1 <= len(second) <= 3) == (True, True)
        left = FULL - len(first) - len(second)
        check_full(first + second + await poll(consumer, left))
        assert await settle(consumer.poll(0)) == []
        assert await settle(consumer.trouble()) is None


async def test_batches_are_by_partition(form: Form, full: str) -> None:
    async with form.consumer(topics=full, auto_offset_reset="earliest") as consumer:
        found: list[Any] = []
        while len(found) < FULL:
            for partition, records in (await settle(consumer.poll_batch(20_000))).items():
                assert {record.topic_partition for record in records} == {partition}
                found += records
        check_full(found)


async def test_a_pattern_takes_in_topics_made_later(
    form: Form, admin: AdminClient, producer: Producer, name: str
) -> None:
    admin.create_topic(f"{name}-one")
    async with form.consumer(
        topics=re.compile(f"{name}-.*"), auto_offset_reset="earliest", metadata_max_age_ms=200
    ) as consumer:
        assert await settle(consumer.poll(0)) == []
        while not consumer.assignment():
            await settle(consumer.poll(50))
        admin.create_topic(f"{name}-two")
        producer.send(f"{name}-two", b"v").result(30)
        [record] = await poll(consumer, 1)
        assert (record.topic, record.value) == (f"{name}-two", b"v")


async def test_partitions_are_assigned_by_hand_and_exchanged(form: Form, full: str) -> None:
    async with form.consumer(auto_offset_reset="earliest") as consumer:
        await settle(consumer.assign([place(full, 1)]))
        assert {record.partition for record in await poll(consumer, 20)} == {1}
        await settle(consumer.assign([place(full, 2)]))
        assert {record.partition for record in await poll(consumer, 20)} == {2}
        with pytest.raises(InvalidRequestError, match="no partition 3"):
            await settle(consumer.assign([place(full, 3)]))
        with pytest.raises(InvalidRequestError, match="assign"):
            consumer.subscribe(full)
        await settle(consumer.unsubscribe())
        consumer.subscribe(full)
        check_full(await poll(consumer, FULL))


async def test_what_does_not_exist_is_said_and_may_come_later(
    form: Form, admin: AdminClient, producer: Producer, name: str
) -> None:
    async with form.consumer(topics=name, auto_offset_reset="earliest") as consumer:
        with pytest.raises(UnknownTopicOrPartitionError, match=name):
            await settle(consumer.poll(5_000))
        admin.create_topic(name)
        producer.send(name, b"v").result(30)
        assert [record.value for record in await poll(consumer, 1)] == [b"v"]


async def test_every_group_gets_every_record(form: Form, full: str, name: str) -> None:
    for group in (f"{name}-one", f"{name}-two"):
        async with form.consumer(
            topics=full, group_id=group, auto_offset_reset="earliest"
        ) as consumer:
            check_full(await poll(consumer, FULL))
        async with form.consumer(topics=full, group_id=group) as consumer:
            while len(consumer.assignment()) < 3:
                assert await settle(consumer.poll(50)) == []
            positions = [await settle(consumer.position(place(full, p))) for p in range(3)]
            assert positions == [20] * 3


async def test_records_larger_than_what_is_fetched_at_once_are_read(
    form: Form, admin: AdminClient, producer: Producer, name: str
) -> None:
    admin.create_topic(name, 2)
    values = {b"%d" % number * 50_000 for number in range(10)}
    for number, value in enumerate(sorted(values)):
        producer.send(name, value, partition=number % 2)
    producer.flush()
    limits = {"max_partition_fetch_bytes": 1, "fetch_max_bytes": 1_024, "prefetch_max_bytes": 0}
    assert {record.value for record in await form.read(name, 10, **limits)} == values


# --- positions ------------------------------------------------------------------------------------


async def test_seeking(form: Form, full: str) -> None:
    one = place(full, 1)
    async with form.consumer() as consumer:
        await settle(consumer.assign([one]))
        await settle(consumer.seek(one, 15))
        assert await settle(consumer.position(one)) == 15
        assert [record.offset for record in await poll(consumer, 5)] == [15, 16, 17, 18, 19]
        await settle(consumer.seek_to_beginning())
        assert await settle(consumer.position(one)) == 0
        assert (await poll(consumer, 1))[0].offset == 0
        await settle(consumer.seek_to_end(one))
        assert await settle(consumer.position(one)) == 20
        assert await settle(consumer.poll(50)) == []
        with pytest.raises(InvalidRequestError, match="not assigned"):
            await settle(consumer.seek(place(full, 0), 0))


async def test_offsets_by_time_and_the_ends_of_the_log(form: Form, full: str) -> None:
    one, two = place(full, 1), place(full, 2)
    async with form.consumer() as consumer:
        found = await settle(consumer.offsets_for_times({one: 501, two: 1_000_000}))
        assert found[one] == OffsetAndTimestamp(6, 600, found[one].leader_epoch)
        assert found[two] is None
        await settle(consumer.assign([one]))
        await settle(consumer.seek(one, found[one].offset))
        assert [record.timestamp_ms for record in await poll(consumer, 14)][:2] == [600, 700]
        assert await settle(consumer.beginning_offsets([one, two])) == {one: 0, two: 0}
        assert await settle(consumer.end_offsets([one, two])) == {one: 20, two: 20}


async def test_paused_partitions_hand_out_nothing_and_lose_nothing(form: Form, full: str) -> None:
    one = place(full, 1)
    async with form.consumer(topics=full, auto_offset_reset="earliest") as consumer:
        first = await settle(consumer.poll(20_000, max_records=1))
        await settle(consumer.pause(one))
        assert consumer.paused() == {one}
        rest = await poll(consumer, 40 - sum(record.partition != 1 for record in first))
        assert 1 not in {record.partition for record in rest}
        assert await settle(consumer.poll(50)) == []
        await settle(consumer.resume(one))
        assert consumer.paused() == frozenset()
        last = await poll(consumer, FULL - len(first) - len(rest))
        check_full(first + rest + last)


async def test_where_reading_begins(form: Form, full: str, producer: Producer, admin: Any) -> None:
    async with form.consumer(topics=full, auto_offset_reset="none") as consumer:
        with pytest.raises(NoOffsetError, match="full-"):
            await settle(consumer.poll(20_000))
    name = f"begin-{form.is_async}".lower()
    admin.create_topic(name)
    producer.send(name, b"before").result(30)
    async with form.consumer(topics=name) as consumer:  # latest
        while not consumer.assignment():
            await settle(consumer.poll(0))
        assert await settle(consumer.position(place(name))) == 1
        producer.send(name, b"after").result(30)
        assert [record.value for record in await poll(consumer, 1)] == [b"after"]
    assert [record.value for record in await form.read(name, 2)] == [b"before", b"after"]


async def test_a_position_that_the_log_no_longer_has_follows_the_policy(
    form: Form, admin: AdminClient, producer: Producer, name: str
) -> None:
    admin.create_topic(name)
    for number in range(5):
        producer.send(name, b"%d" % number)
    producer.flush()
    admin.delete_records({place(name): 3})
    for policy, offsets in (("earliest", [3, 4]), ("latest", []), ("none", None)):
        async with form.consumer(auto_offset_reset=policy) as consumer:
            await settle(consumer.assign([place(name)]))
            await settle(consumer.seek(place(name), 1))
            if offsets is None:
                with pytest.raises(OffsetOutOfRangeError, match="offsets 3 to 5"):
                    await settle(consumer.poll(20_000))
                continue
            found = await settle(consumer.poll(20_000 if offsets else 500))
            assert [record.offset for record in found] == offsets
            assert await settle(consumer.position(place(name))) == 5


async def test_a_record_that_does_not_deserialise_is_named_and_can_be_passed(
    form: Form, admin: AdminClient, producer: Producer, name: str
) -> None:
    admin.create_topic(name)
    for value in (b"1", b"{", b"3"):
        producer.send(name, value)
    producer.flush()
    async with form.consumer(
        topics=name, auto_offset_reset="earliest", value_deserializer="json"
    ) as consumer:
        found = await settle(consumer.poll(20_000))
        assert [record.value for record in found] == [1]
        with pytest.raises(SerializationError, match=f"{name}-0@1"):
            await settle(consumer.poll(20_000))
        await settle(consumer.seek(place(name), 2))
        assert [record.value for record in await poll(consumer, 1)] == [3]


# --- commits --------------------------------------------------------------------------------------


async def test_commits_by_hand(form: Form, full: str, name: str) -> None:
    one, two = place(full, 1), place(full, 2)
    settings = {"group_id": name, "enable_auto_commit": False, "auto_offset_reset": "earliest"}
    async with form.consumer(**settings) as consumer:
        await settle(consumer.assign([one, two]))
        await poll(consumer, 40)
        assert await settle(consumer.committed(one, two)) == {one: None, two: None}
        await settle(consumer.commit({one: 5}))
        words = OffsetAndMetadata(7, metadata="by worker 7")
        await settle(consumer.commit({two: words}))
        found = await settle(consumer.committed(one, two))
        assert (found[one].offset, found[two]) == (5, words)
    async with form.consumer(**settings) as consumer:  # Auto commit is off: that is all there is.
        await settle(consumer.assign([one, two]))
        records = await poll(consumer, 28)
        offsets = [(record.partition, record.offset) for record in records]
        assert (min(offsets), min(entry for entry in offsets if entry[0] == 2)) == ((1, 5), (2, 7))
        await settle(consumer.commit())
        found = await settle(consumer.committed())
        assert {entry.offset for entry in found.values()} == {20}


async def test_commits_that_nobody_waits_for_keep_their_order(
    form: Form, full: str, name: str
) -> None:
    one = place(full, 1)
    async with form.consumer(group_id=name, enable_auto_commit=False) as consumer:
        await settle(consumer.assign([one]))
        if form.is_async:
            tasks = [asyncio.create_task(consumer.commit({one: offset})) for offset in range(10)]
            await asyncio.gather(*tasks)
        else:
            heard: list[BaseException | None] = []
            futures = [
                consumer.commit_async({one: offset}, callback=heard.append) for offset in range(10)
            ]
            futures[-1].result(20)
            wait_until(lambda: heard == [None] * 10, "all callbacks")
        assert (await settle(consumer.committed(one)))[one].offset == 9


async def test_without_a_group_nothing_is_committed(form: Form, full: str) -> None:
    async with form.consumer(topics=full, auto_offset_reset="earliest") as consumer:
        await poll(consumer, 1)
        for call in (consumer.commit, lambda: consumer.committed(place(full))):
            with pytest.raises(InvalidGroupIdError, match="group_id"):
                await settle(call())


# --- when nothing comes, and the end --------------------------------------------------------------


async def test_what_has_no_leader_is_said_while_the_rest_is_read(
    form: Form, cluster: Cluster, admin: AdminClient, producer: Producer, name: str
) -> None:
    admin.create_topic(name, replica_assignments=[[3], [1]])
    for partition in (0, 1):
        producer.send(name, b"%d" % partition, partition=partition)
    producer.flush()
    cluster.nodes[3].kill()
    try:
        async with form.consumer(topics=name, auto_offset_reset="earliest") as consumer:
            assert [record.value for record in await poll(consumer, 1)] == [b"1"]
            trouble = None
            async with asyncio.timeout(20):
                while not isinstance(trouble, LeaderNotAvailableError):
                    assert await settle(consumer.poll(50)) == []
                    trouble = await settle(consumer.trouble())
            assert f"{name}-0" in trouble.message
            cluster.nodes[3].start()
            assert [record.value for record in await poll(consumer, 1)] == [b"0"]
            assert await settle(consumer.trouble()) is None
    finally:
        cluster.start()


async def test_a_closed_consumer_refuses(form: Form, full: str) -> None:
    async with form.consumer(topics=full) as consumer:
        await settle(consumer.close())
        await settle(consumer.close())
        for call in (consumer.poll, consumer.commit, lambda: take(consumer, 1)):
            with pytest.raises(ClientClosedError):
                await settle(call())
