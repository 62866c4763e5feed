"""The tasks of a query or of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from penstock.client import TopicPartition
from penstock.pipeline.source.arrow_reading import Slice
from penstock.pipeline.source.cluster_view import Topic
from penstock.pipeline.source.losses import lost
from penstock.pipeline.source.offsets import Offsets
from penstock.pipeline.source.planning import ranges, split
from penstock.pipeline.source_options import SourceOptions


def slices(
    options: SourceOptions,
    topics: Mapping[str, Topic],
    start: Offsets,
    end: Offsets,
    *,
    topic_ids: Mapping[str, str] | None = None,
) -> list[Slice]:
    """What the tasks read between two positions, ``minPartitions`` of them at least, and none
    more than ``maxRecordsPerPartition`` offsets.

    What is to be read of a topic that is gone is lost, and so is it where another one has its name:
    one with another id than the offsets' in ``topic_ids``, if that has one.
    """
    found: list[Slice] = []
    for one in split(ranges(start, end), options.min_partitions, options.max_per_partition):
        where: TopicPartition = one.partition
        topic = topics.get(where.topic)
        if topic is None or where not in topic.partitions:
            why = "it is not there any more"
        elif (topic_ids or {}).get(where.topic, topic.topic_id) != topic.topic_id:
            why = "its topic was deleted and made anew"
        else:
            found.append(Slice(*where, one.start, one.end, topic.topic_id, topic.timestamp_type))
            continue
        lost(
            f"partition {where}: {why}, and offsets {one.start} to {one.end} were to be read",
            fail=options.fail_on_data_loss,
        )
    return found


def finishing(planned: list[Slice], finished: Offsets) -> Sequence[InputPartition]:
    """The same tasks, of which the first one is to commit what the query is done with."""
    if planned and finished:
        planned[0] = replace(planned[0], finished=finished)
    return planned
