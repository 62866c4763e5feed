"""The topic of a benchmark: one that is there, or one that is made for the run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.connections import admin_client
from penstock.cli.errors import explain, report
from penstock.cli.settings import Settings
from penstock.cli.topics import default_replication
from penstock.wire.errors import PenstockError, UnknownTopicOrPartitionError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    from penstock.client import AdminClient


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Which topic, and how it is made where it is not there."""

    name: str | None
    partitions: int
    replication_factor: int | None
    keep: bool


@dataclass(frozen=True, slots=True)
class BenchTopic:
    """The topic of a run; ``is_new`` when the run made it."""

    name: str
    is_new: bool
    partitions: int


@contextmanager
def bench_topic(settings: Settings, plan: TopicPlan) -> Iterator[BenchTopic]:
    """The topic, made when there is none of its name, and then deleted at the end if not kept."""
    with admin_client(settings) as admin:
        topic = _find_or_make(admin, plan)
        try:
            yield topic
        finally:
            if topic.is_new and plan.keep:
                report(f"kept topic {topic.name}")
            elif topic.is_new:
                _delete(admin, topic.name)


def _find_or_make(admin: AdminClient, plan: TopicPlan) -> BenchTopic:
    if plan.name is not None:
        try:
            [found] = admin.describe_topics([plan.name])
        except UnknownTopicOrPartitionError:
            report(f"there is no topic {plan.name}: making one for this run")
        else:
            return BenchTopic(plan.name, is_new=False, partitions=found.partition_count)
    name = plan.name or f"penstock-bench-{uuid.uuid4().hex[:8]}"
    replicas = plan.replication_factor or default_replication(admin)
    admin.create_topic(name, plan.partitions, replicas)
    return BenchTopic(name, is_new=True, partitions=plan.partitions)


def _delete(admin: AdminClient, name: str) -> None:
    """Delete what the run made. That it cannot be must not hide what was measured."""
    try:
        admin.delete_topic(name)
    except PenstockError as error:
        report(explain(error).replace("error: ", f"topic {name} could not be deleted: ", 1))


def readable_records(settings: Settings, topic: BenchTopic) -> int:
    """How many offsets the topic's logs have now: its records, where none was compacted away."""
    partitions = [TopicPartition(topic.name, number) for number in range(topic.partitions)]
    with admin_client(settings) as admin:
        starts = admin.list_offsets(dict.fromkeys(partitions, "earliest"))
        ends = admin.list_offsets(dict.fromkeys(partitions, "latest"))
    return sum(ends[entry].offset - starts[entry].offset for entry in partitions)
