"""Topics of JSON for tests of the examples of streams, and queries over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.client import Producer
from tests.integration.cluster import Cluster
from tests.pipeline.logs import make_topic, read
from tests.support import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

COMPACTED = {"cleanup.policy": "compact"}
_BEGINNING = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
_DEADLINE_S = 240


def at(minutes: float) -> str:
    """So long after the time at which all these streams begin."""
    return (_BEGINNING + timedelta(minutes=minutes)).isoformat()


def minutes(time: str) -> float:
    """The opposite, for times as Spark writes them."""
    return (datetime.fromisoformat(time) - _BEGINNING) / timedelta(minutes=1)


class Streams:
    """One test's topics and checkpoints."""

    def __init__(self, spark: SparkSession, cluster: Cluster, directory: Path, name: str) -> None:
        self.spark, self.cluster, self.directory, self._name = spark, cluster, directory, name
        self.options = {"penstock.bootstrap.servers": cluster.bootstrap}

    def topic(self, name: str, **configs: str) -> str:
        return make_topic(self.cluster, f"{self._name}-{name}", **configs)

    def send(self, topic: str, *values: object, key: str = "") -> None:
        """Objects as JSON, bytes and None as they are; all by the same key, or without one."""
        with Producer(self.cluster.bootstrap) as producer:
            for value in values:
                is_raw = value is None or isinstance(value, bytes)
                data = value if is_raw else json.dumps(value).encode()
                producer.send(topic, data, key.encode() or None)

    def put(self, topic: str, **values: object) -> None:
        """Upserts by key, one after the other."""
        for key, value in values.items():
            self.send(topic, value, key=key)

    def stream(self, topic: str, **options: str) -> DataFrame:
        source = self.spark.readStream.format("penstock").options(**self.options, **options)
        return source.options(subscribe=topic, startingOffsets="earliest").load()

    def run(self, rows: DataFrame, **options: str) -> StreamingQuery:
        """Into the sink, until what is there now is done."""
        writer = rows.writeStream.format("penstock").options(**self.options, **options)
        return self.finish(writer)

    def finish(self, writer: DataStreamWriter, checkpoint: str = "checkpoint") -> StreamingQuery:
        """The same for any writer."""
        kept = writer.option("checkpointLocation", str(self.directory / checkpoint))
        query = kept.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(_DEADLINE_S), "it goes on"
        finally:
            query.stop()
        return query

    def start(self, writer: DataStreamWriter) -> StreamingQuery:
        """On and on."""
        kept = writer.option("checkpointLocation", str(self.directory / "checkpoint"))
        return kept.trigger(processingTime="100 milliseconds").start()

    def wait_for(self, query: StreamingQuery, condition: Callable[[], bool]) -> None:
        """Until it holds; what the query fails by is raised."""

        def holds() -> bool:
            assert query.isActive, query.exception()
            return condition()

        wait_until(holds, "what the query is to write", _DEADLINE_S)

    def crash(self, checkpoint: str = "checkpoint") -> None:
        """As if Spark had died between the sink's commit of the last batch and its own note of it,
        so that the next run repeats that batch.
        """
        commits = self.directory / checkpoint / "commits"
        last = max(int(path.name) for path in commits.glob("[0-9]*"))
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)

    def written(self, topic: str) -> dict[str, list[Any]]:
        """All committed records: for each key its values, in their order."""
        found: dict[str, list[Any]] = {}
        for record in read(self.cluster, topic):
            value = None if record.value is None else json.loads(record.value)
            found.setdefault((record.key or b"").decode(), []).append(value)
        return found
