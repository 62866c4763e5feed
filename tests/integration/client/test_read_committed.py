"""Consumers of committed records over real nodes, in every way in which they read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    AsyncConsumer,
    Consumer,
    Producer,
    TopicPartition,
)
from tests.integration.client.forms import Form
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be broken."""
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def form(request: pytest.FixtureRequest, cluster: Cluster) -> Form:
    return Form(cluster.bootstrap, is_async=request.param)


@pytest.fixture
def topic(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(name, 1, 3)
    return name


def transact(producer: Producer, topic: str, *values: bytes, commit: bool = True) -> None:
    producer.begin_transaction()
    for value in values:
        producer.send(topic, value, partition=0)
    producer.flush()
    if commit:
        producer.commit_transaction()
    else:
        producer.abort_transaction()


def write_history(bootstrap: str, topic: str) -> list[bytes]:
    """Transactions that are committed, aborted and between each other; what is committed of them.

    The log ends with a mark.
    """
    with (
        Producer(bootstrap, transactional_id=f"{topic}-a") as first,
        Producer(bootstrap, transactional_id=f"{topic}-b") as second,
        Producer(bootstrap) as plain,
    ):
        transact(first, topic, b"1", b"2")
        first.begin_transaction()
        first.send(topic, b"aborted", partition=0)
        first.flush()
        transact(second, topic, b"3")
        plain.send(topic, b"4", partition=0)
        plain.flush()
        first.send(topic, b"aborted", partition=0)
        first.flush()
        first.abort_transaction()
        transact(second, topic, b"5")
        transact(second, topic, b"aborted", commit=False)
    return [b"1", b"2", b"3", b"4", b"5"]


async def read(consumer: Any, how: str, count: int) -> list[bytes]:
    """So many values, and whatever comes with them."""
    found: list[bytes] = []
    while len(found) < count:
        match how:
            case "iterate" if hasattr(consumer, "__anext__"):
                found.append((await asyncio.wait_for(anext(consumer), 30)).value)
            case "iterate":
                found.append(next(consumer).value)
            case "poll":
                found += [one.value for one in await settle(consumer.poll(PATIENCE_MS))]
            case "poll_batch":
                batches = await settle(consumer.poll_batch(PATIENCE_MS))
                found += [one.value for records in batches.values() for one in records]
            case _:
                table = await settle(consumer.fetch_arrow(PATIENCE_MS))
                found += table.column("value").to_pylist()
    return found


@pytest.mark.parametrize("how", ["iterate", "poll", "poll_batch", "fetch_arrow"])
async def test_what_was_aborted_is_left_out_and_gone_past(form: Form, topic: str, how: str) -> None:
    expected = await asyncio.to_thread(write_history, form.bootstrap, topic)
    partition = TopicPartition(topic, 0)
    async with form.consumer(
        topics=topic,
        group_id=topic,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        enable_auto_commit=False,
    ) as consumer:
        assert await read(consumer, how, len(expected)) == expected
        [end] = (await settle(consumer.end_offsets([partition]))).values()
        assert end > len(expected) + 3, "aborted records and marks"
        while await settle(consumer.position(partition)) < end:
            assert await settle(consumer.poll(200)) == []
        assert await settle(consumer.poll(200)) == []
        assert await settle(consumer.current_lag(partition)) == 0
        await settle(consumer.commit())
        committed = (await settle(consumer.committed(partition)))[partition]
        assert committed.offset == end, "behind the marks, or the group would never catch up"
        assert await settle(consumer.positions()) == {partition: committed}


async def test_a_group_that_waits_for_the_next_record_has_committed_past_the_marks(
    cluster: Cluster, topic: str
) -> None:
    partition = TopicPartition(topic, 0)
    found: list[bytes] = []
    async with AsyncConsumer(
        cluster.bootstrap,
        topics=topic,
        group_id=topic,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        auto_commit_interval_ms=100,
    ) as consumer:

        async def iterate() -> None:
            async for record in consumer:
                found.append(record.value)  # noqa: PERF401 - it never ends.

        def has_no_lag() -> bool:
            latest = admin.list_offsets({partition: "latest"})[partition].offset
            committed = admin.list_group_offsets(topic)
            return partition in committed and committed[partition].offset == latest

        iterating = asyncio.create_task(iterate())
        try:
            expected = await asyncio.to_thread(write_history, cluster.bootstrap, topic)
            with AdminClient(cluster.bootstrap) as admin:
                await asyncio.to_thread(wait_until, has_no_lag, "the group has committed all")
        finally:
            iterating.cancel()
            await asyncio.gather(iterating, return_exceptions=True)
    assert found == expected


@pytest.mark.parametrize("how", ["poll", "fetch_arrow"])
async def test_who_reads_all_gets_what_was_aborted_but_no_marks(
    form: Form, topic: str, how: str
) -> None:
    await asyncio.to_thread(write_history, form.bootstrap, topic)
    async with form.consumer(topics=topic, auto_offset_reset="earliest") as consumer:
        found = await read(consumer, how, 8)
        assert await settle(consumer.poll(200)) == []
    assert found == [b"1", b"2", b"aborted", b"3", b"4", b"aborted", b"5", b"aborted"]


async def test_latest_is_where_the_oldest_open_transaction_begins(form: Form, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    with Producer(form.bootstrap, transactional_id=topic) as producer:
        transact(producer, topic, b"before")
        producer.begin_transaction()
        producer.send(topic, b"1", partition=0)
        await asyncio.to_thread(producer.flush)
        with Producer(form.bootstrap) as plain:
            plain.send(topic, b"2", partition=0).result()
        async with form.consumer(
            topics=topic, auto_offset_reset="latest", isolation_level="read_committed"
        ) as consumer:
            assert await settle(consumer.poll(200)) == []
            assert await settle(consumer.position(partition)) == 2
            while (lag := await settle(consumer.current_lag(partition))) is None:
                assert await settle(consumer.poll(200)) == []  # Until a fetch is answered.
            assert lag == 0
            await asyncio.to_thread(producer.commit_transaction)
            assert await read(consumer, "poll", 2) == [b"1", b"2"]


def committed_values(bootstrap: str, topic: str) -> list[bytes]:
    """All that can be read of committed records now."""
    partition = TopicPartition(topic, 0)
    found: list[bytes] = []
    with Consumer(bootstrap, isolation_level="read_committed") as consumer:
        consumer.assign([partition])
        consumer.seek_to_beginning()

        def is_read() -> bool:
            found.extend(record.value for record in consumer.poll(100))
            [end] = consumer.end_offsets([partition]).values()
            return consumer.position(partition) >= end

        wait_until(is_read, "all committed records are read")
    return found


def test_all_is_as_it_was_after_every_node_was_killed(fresh: Cluster) -> None:
    """What is open, what was aborted, and where readers stop: known again from the logs."""
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("killed", 1, 3)
    expected = write_history(fresh.bootstrap, "killed")
    settings: Any = {"transactional_id": "open", "transaction_timeout_ms": 600_000}
    with Producer(fresh.bootstrap, **settings) as producer:
        producer.begin_transaction()
        producer.send("killed", b"open", partition=0)
        producer.flush()
        with Producer(fresh.bootstrap) as plain:
            plain.send("killed", b"behind", partition=0).result()
        before = committed_values(fresh.bootstrap, "killed")
        assert before == expected
        for node in fresh.nodes.values():
            node.kill()
        for node in fresh.nodes.values():
            node.start()
        fresh.wait_ready()
        assert committed_values(fresh.bootstrap, "killed") == expected
        producer.commit_transaction()
        wait_until(
            lambda: committed_values(fresh.bootstrap, "killed") == [*expected, b"open", b"behind"],
            "what was open is committed",
        )
