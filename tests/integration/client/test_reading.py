"""How consumers read from real nodes: as columns, from a time on, and whatever the isolation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from penstock.client import AdminClient, AsyncConsumer, Consumer, Producer, TopicPartition
from tests.integration.client.forms import Form, verdict
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster, running_cluster

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def filled(cluster: Cluster, topic: str, count: int, partitions: int = 2) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions, 3)
    with Producer(cluster.bootstrap) as producer:
        for number in range(count):
            producer.send(
                topic,
                b"%d" % number if number % 3 else None,
                key=b"k%d" % number,
                partition=number % partitions,
                headers={"n": b"%d" % number} if number % 5 == 0 else None,
                timestamp_ms=1_700_000_000_000 + number,
            )


def check_rows(rows: list[dict[str, Any]], topic: str, count: int) -> None:
    """That these are the records of ``filled``, each once and in order."""
    found: dict[int, list[int]] = {}
    for row in rows:
        number = int(row["key"][1:])
        assert row["topic"] == topic
        assert row["value"] == (b"%d" % number if number % 3 else None)
        assert row["headers"] == ([{"key": "n", "value": b"%d" % number}] if not number % 5 else [])
        assert row["timestamp"] == datetime.fromtimestamp(1_700_000_000 + number / 1000, UTC)
        found.setdefault(row["partition"], []).append(row["offset"])
    assert found == {
        partition: list(range(len(range(partition, count, 2)))) for partition in range(2)
    }


def test_tables_hold_every_record_and_are_processed_when_the_next_is_asked_for(
    cluster: Cluster,
) -> None:
    filled(cluster, "columns", 3_000)
    settings: Any = {"group_id": "columns", "auto_offset_reset": "earliest"}
    rows: list[dict[str, Any]] = []
    with Consumer(
        cluster.bootstrap, topics="columns", value_deserializer="json", **settings
    ) as consumer:
        while len(rows) < 1_000:
            table = consumer.fetch_arrow(5_000, max_records=700)
            assert isinstance(table, pa.Table)
            assert table.num_rows <= 700
            rows += table.to_pylist()
        consumer.commit()
        commits = consumer.committed(TopicPartition("columns", 0), TopicPartition("columns", 1))
        assert sum(entry.offset for entry in commits.values() if entry) == len(rows)
    with Consumer(cluster.bootstrap, topics="columns", **settings) as consumer:
        while len(rows) < 3_000:
            rows += consumer.fetch_arrow(5_000).to_pylist()
        assert consumer.fetch_arrow(1).num_rows == 0
    check_rows(rows, "columns", 3_000)


async def test_tables_mix_with_other_ways_of_reading_and_with_seeks(cluster: Cluster) -> None:
    filled(cluster, "mixed", 2_000)
    names = TopicPartition("mixed", 0), TopicPartition("mixed", 1)
    async with AsyncConsumer(
        cluster.bootstrap, topics="mixed", auto_offset_reset="earliest"
    ) as consumer:
        found: dict[int, list[int]] = {0: [], 1: []}
        for turn in range(2):
            while sum(map(len, found.values())) < 2_000:
                record = await anext(consumer)
                found[record.partition].append(record.offset)
                for polled in await consumer.poll(5_000, max_records=7):
                    found[polled.partition].append(polled.offset)
                table = await consumer.fetch_arrow(100, max_records=301)
                for row in table.select(["partition", "offset"]).to_pylist():
                    found[row["partition"]].append(row["offset"])
            assert found == {0: list(range(1_000)), 1: list(range(1_000))}
            if not turn:
                await consumer.seek_to_beginning(*names)
                found = {0: [], 1: []}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "asyncio"])
@pytest.mark.parametrize("in_group", [True, False], ids=["group", "alone"])
async def test_reading_begins_so_long_ago(
    cluster: Cluster, *, is_async: bool, in_group: bool
) -> None:
    form = Form(cluster.bootstrap, is_async)
    topic = f"aged-{is_async}-{in_group}"
    now_ms = int(time.time() * 1000)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(topic, 2, 3)
    async with form.producer() as producer:
        for number, age_ms in enumerate((7_200_000, 5_400_000, 600_000, 1_000)):
            stamp_ms = now_ms - age_ms
            sent = producer.send(topic, b"%d" % number, partition=0, timestamp_ms=stamp_ms)
            await verdict(sent)
        await verdict(producer.send(topic, b"old", partition=1, timestamp_ms=now_ms - 7_200_000))
    async with form.consumer(
        topics=topic,
        group_id=topic if in_group else None,
        auto_offset_reset="by_duration:PT1H",
    ) as consumer:
        found: list[bytes] = []
        while len(found) < 2:
            found += [record.value for record in await settle(consumer.poll(5_000))]
        assert found == [b"2", b"3"]
        end = await settle(consumer.position(TopicPartition(topic, 1)))
        assert end == 1, "the end, as all is too old"
        await settle(consumer.seek(TopicPartition(topic, 0), 1_000))  # Out of range.
        assert (await settle(consumer.poll(5_000)))[0].value == b"2"


@pytest.mark.parametrize("level", ["read_uncommitted", "read_committed"])
async def test_either_isolation_level_reads_what_is_outside_of_transactions(
    cluster: Cluster, level: Any
) -> None:
    topic = level.replace("_", "-")
    filled(cluster, topic, 10)
    async with AsyncConsumer(
        cluster.bootstrap, topics=topic, auto_offset_reset="earliest", isolation_level=level
    ) as consumer:
        assert len([await anext(consumer) for _ in range(10)]) == 10
