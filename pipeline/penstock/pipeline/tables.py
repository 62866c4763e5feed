"""Tables in compacted topics: what each key said last, and upserts of what a query changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from penstock.client import AdminClient
from penstock.client.config import AdminConfig
from penstock.pipeline.errors import OptionError, SchemaError
from penstock.pipeline.sink_options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WHERE: Final = "upserts into a topic"


def read_table(spark: SparkSession, topic: str, options: Mapping[str, str]) -> DataFrame:
    """The table that a compacted topic is: of each key the last record, unless it is a tombstone.

    ``options`` are those of the source ``penstock`` for batches, without ``subscribe``. The columns
    are the source's, one row for each key; records without a key are left out. Nothing is read yet.
    Spark plans what a source in Python reads when the frame is first used, and once: a streaming
    query that joins with it sees the table as it was then. For the table as it is, call this in
    ``foreachBatch``.
    """
    source = spark.read.format("penstock").options(**options).option("subscribe", topic)
    return latest_by_key(source.load()).where("value IS NOT NULL")


def latest_by_key(records: DataFrame) -> DataFrame:
    """Of each topic and key the last record, be it a tombstone; those without a key are left out.

    ``records`` is no stream: a batch query's, or what ``foreachBatch`` is given. It has the columns
    topic, partition, offset, key and timestamp of the source, and any others.

    Within a partition the greatest offset is the last, as for the cleaner. Where partitions were
    added to the topic a key may be in two of them: of those the greatest timestamp counts.
    """
    keyed = records.where("key IS NOT NULL").withColumn("row", sf.struct("*"))
    by_partition = keyed.groupBy("topic", "key", "partition").agg(
        sf.max_by("row", "offset").alias("row")
    )
    newest = by_partition.groupBy("topic", "key").agg(
        sf.max_by("row", "row.timestamp").alias("row")
    )
    return newest.select("row.*")


def upserts_into(
    topic: str, options: Mapping[str, str], *, latest_by: str | None = None
) -> TopicUpserts:
    """What ``foreachBatch`` calls to upsert each batch's rows into a compacted topic.

    It is for the output mode update, which Spark has for no sink in Python: each batch has the rows
    that changed, and the topic is the table of what each key said last. ``options`` are those of
    the sink, without ``topic``. ``latest_by`` names a column by which the last of a batch's rows
    for a key counts, and which is not written; without it a key may come once a batch, as it does
    when it is made of all columns that an aggregation groups by.

    Asks the cluster whether the topic is compacted. Raises OptionError where it is not, for then
    it would keep every update, and any error of a client that does not get an answer.
    """
    sink = {**options, "topic": topic}
    client = SinkOptions.load(sink).client
    with AdminClient(client.bootstrap_servers, **client.of(AdminConfig)) as admin:
        configs = {entry.key: entry.value for entry in admin.describe_configs(topic)}
    policy = configs["cleanup.policy"]
    if "compact" not in policy.split(","):
        raise OptionError(
            f"{_WHERE}: topic {topic} has cleanup.policy={policy}, and would keep every update of "
            f"a key; next: penstock topics alter {topic} --config cleanup.policy=compact"
        )
    return TopicUpserts(sink, latest_by)


@dataclass(frozen=True, slots=True)
class TopicUpserts:
    """Made by ``upserts_into``."""

    options: Mapping[str, str] = field(repr=False)
    latest_by: str | None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write a batch. Raises SchemaError where it has no such columns."""
        missing = {"key", "value", self.latest_by or "key"} - set(rows.columns)
        if missing:
            raise SchemaError(
                f"{_WHERE} need columns key and value, where a value of NULL deletes, and the "
                f"batch has no column {', '.join(sorted(missing))}; next: select them"
            )
        upserts = rows if self.latest_by is None else _last(rows, self.latest_by)
        upserts.write.format("penstock").mode("append").options(**self.options).save()


def _last(rows: DataFrame, by: str) -> DataFrame:
    others = [name for name in rows.columns if name not in ("key", by)]
    # Within a struct NULL is an order as well, the lowest: max_by would leave such rows out.
    last = rows.groupBy("key").agg(sf.max_by(sf.struct(*others), sf.struct(by)).alias("row"))
    return last.select("key", "row.*")
