"""Topics for tests of the source, and streams that end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.client import AdminClient, Producer
from tests.integration.cluster import Cluster


class Topics:
    """Makes and fills topics of one cluster, and reads them by Spark."""

    def __init__(self, spark: SparkSession, cluster: Cluster) -> None:
        self.spark = spark
        self.cluster = cluster

    def make(self, topic: str, partitions: int = 1, configs: dict[str, Any] | None = None) -> None:
        with AdminClient(self.cluster.bootstrap) as admin:
            admin.create_topic(topic, partitions, configs=configs)

    def send(self, topic: str, numbers: Iterable[int], partition: int = 0) -> None:
        """The numbers as values, to one partition."""
        with Producer(self.cluster.bootstrap) as producer:
            values = [b"%d" % number for number in numbers]
            producer.send_many(topic, values, partition=partition).result(60)

    def transact(self, topic: str, numbers: Iterable[int], *, commit: bool) -> None:
        """The same in one transaction."""
        name = f"{topic}-transactions"
        with Producer(self.cluster.bootstrap, transactional_id=name) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for number in numbers:
                producer.send(topic, b"%d" % number, partition=0)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()

    def options(self, topic: str, **options: str) -> dict[str, str]:
        subscription = (
            {} if {"assign", "subscribePattern"} & options.keys() else {"subscribe": topic}
        )
        return {"penstock.bootstrap.servers": self.cluster.bootstrap, **subscription, **options}

    def batch(self, topic: str, **options: str) -> DataFrame:
        return self.spark.read.format("penstock").options(**self.options(topic, **options)).load()

    def values(self, topic: str, **options: str) -> list[int]:
        return numbers(self.batch(topic, **options))

    def stream(self, topic: str, **options: str) -> DataFrame:
        given = self.options(topic, **{"startingOffsets": "earliest", **options})
        return self.spark.readStream.format("penstock").options(**given).load()


def numbers(frame: DataFrame) -> list[int]:
    """The values of a frame as numbers, in order of partition and offset."""
    rows = frame.orderBy("partition", "offset").select("value").collect()
    return [int(row.value) for row in rows]


class Batches:
    """What came of a stream, batch by batch; ``before`` is called with each batch's number."""

    def __init__(self, before: Callable[[int], object] = lambda number: None) -> None:
        self.rows: dict[int, list[Row]] = {}
        self._before = before

    def start(self, frame: DataFrame, checkpoint: Path, **trigger: Any) -> StreamingQuery:
        """Run the stream; by default up to what is there now."""
        return (
            frame.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def run(self, frame: DataFrame, checkpoint: Path) -> StreamingQuery:
        """Run it to its end."""
        query = self.start(frame, checkpoint)
        query.awaitTermination()
        return query

    def _take(self, frame: DataFrame, number: int) -> None:
        self._before(number)
        self.rows[number] = frame.select("partition", "offset", "value").collect()

    @property
    def numbers(self) -> list[int]:
        """All values, sorted."""
        return sorted(int(row.value) for rows in list(self.rows.values()) for row in rows)

    @property
    def sizes(self) -> list[int]:
        """How many rows each batch had, without the empty ones."""
        return [len(rows) for _, rows in sorted(self.rows.items()) if rows]
