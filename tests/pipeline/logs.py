"""Topics as tests of pipelines make them and read them back, beside Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from penstock.client import AdminClient, Consumer, ConsumerRecord, Producer, TopicPartition
from tests.integration.cluster import Cluster
from tests.support import wait_until

Isolation = Literal["read_committed", "read_uncommitted"]


def make_topic(cluster: Cluster, name: str, partitions: int = 2, **configs: str) -> str:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions, configs=configs)
    return name


def fill(cluster: Cluster, topic: str, values: Iterable[str]) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send_many(topic, [value.encode() for value in values]).result(60)


def read(
    cluster: Cluster, topic: str, isolation: Isolation = "read_committed", *, settled: bool = True
) -> list[ConsumerRecord]:
    """All that the topic has, by partition and offset.

    ``settled``: waits until no transaction is open in it, so that what is committed is all that
    will ever be.
    """
    with (
        Consumer(cluster.bootstrap, isolation_level=isolation) as consumer,
        Consumer(cluster.bootstrap, isolation_level="read_uncommitted") as anything,
    ):
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]

        def none_open() -> bool:
            return consumer.end_offsets(partitions) == anything.end_offsets(partitions)

        if settled:
            wait_until(none_open, f"no transaction is open in {topic}", 60.0)
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        found: list[ConsumerRecord] = []

        def all_read() -> bool:
            found.extend(consumer.poll(100, max_records=100_000))
            return all(consumer.position(one) >= ends[one] for one in partitions)

        wait_until(all_read, f"{topic} is read up to {ends}", 60.0)
    return sorted(found, key=lambda record: (record.partition, record.offset))


def values(cluster: Cluster, topic: str, isolation: Isolation = "read_committed") -> list[str]:
    """The values alone, sorted."""
    return sorted(record.value.decode() for record in read(cluster, topic, isolation))


def repeated(found: Iterable[str]) -> dict[str, int]:
    """Those that are there more than once."""
    return {value: count for value, count in Counter(found).items() if count > 1}
