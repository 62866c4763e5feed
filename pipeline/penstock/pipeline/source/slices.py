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
    finished: Offsets | None = None,
) -> Sequence[InputPartition]:
    """What the tasks read between two positions, ``minPartitions`` of them at least, and none
    more than ``maxRecordsPerPartition`` offsets.

    The first one is to commit ``finished``. What is to be read of a topic that is gone is lost.
    """
    found: list[Slice] = []
    for one in split(ranges(start, end), options.min_partitions, options.max_per_partition):
        where: TopicPartition = one.partition
        topic = topics.get(where.topic)
        if topic is None or where not in topic.partitions:
            lost(
                f"partition {where}: it is not there any more, and offsets {one.start} to "
                f"{one.end} were to be read",
                fail=options.fail_on_data_loss,
            )
            continue
        found.append(Slice(*where, one.start, one.end, topic.topic_id, topic.timestamp_type))
    if found and finished:
        found[0] = replace(found[0], finished=finished)
    return found
