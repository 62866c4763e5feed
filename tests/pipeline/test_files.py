"""Files both ways by Spark's own formats, with topics at the other end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.client import AdminClient, Consumer
from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.functions import from_json, to_json
from tests.integration.cluster import Cluster
from tests.support import wait_until

SCHEMA = "id bigint, name string"
ROWS = [(1, "a"), (2, "b"), (3, "c")]


def run(writer: Any, checkpoint: Path) -> None:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None


def write_file(directory: Path, kind: str, name: str, rows: list[tuple[int, str]]) -> None:
    texts = {
        "csv": "id,name\n" + "".join(f"{one},{two}\n" for one, two in rows),
        "json": "".join(json.dumps({"id": one, "name": two}) + "\n" for one, two in rows),
        "text": "".join(f"{one} {two}\n" for one, two in rows),
    }
    # Renamed into place, as whoever watches a directory needs it.
    directory.mkdir(exist_ok=True)
    hidden = directory / f".{name}"
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(
            pa.table({"id": [one for one, _ in rows], "name": [two for _, two in rows]}), hidden
        )
    else:
        hidden.write_text(texts[kind])
    hidden.rename(directory / name)


def watched(spark: SparkSession, directory: Path, kind: str) -> DataFrame:
    reader = spark.readStream.format(kind)
    if kind == "text":
        return reader.load(str(directory)).select(sf.col("value").cast("binary").alias("value"))
    frame = reader.schema(SCHEMA).option("header", "true").load(str(directory))
    return frame.select(to_json(sf.struct("id", "name")).alias("value"))


def values(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    found: list[bytes] = []
    with Consumer(cluster.bootstrap, topics=[topic], auto_offset_reset="earliest") as consumer:

        def enough() -> bool:
            found.extend(record.value for record in consumer.poll(timeout_ms=500))
            return len(found) >= count

        wait_until(enough, f"{count} records of {topic}")
    return sorted(found)


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "text"])
def test_a_watched_directory_goes_to_a_topic_and_back_to_files(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    topic = f"files-{kind}"
    spark.dataSource.register(PenstockDataSource)
    with AdminClient(penstock_cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=2)
    incoming = tmp_path / "incoming"

    def into_topic() -> None:
        writer = watched(spark, incoming, kind).writeStream.format("penstock")
        options = {"penstock.bootstrap.servers": penstock_cluster.bootstrap, "topic": topic}
        run(writer.options(**options), tmp_path / "in")

    write_file(incoming, kind, "one", ROWS[:2])
    into_topic()
    write_file(incoming, kind, "two", ROWS[2:])
    # A file is read once, also by a query that was started again.
    into_topic()
    written = [f"{one} {two}".encode() for one, two in ROWS]
    if kind != "text":
        written = [f'{{"id":{one},"name":"{two}"}}'.encode() for one, two in ROWS]
    assert values(penstock_cluster, topic, 3) == written

    records = (
        spark.readStream.format("penstock")
        .option("penstock.bootstrap.servers", penstock_cluster.bootstrap)
        .option("subscribe", topic).option("startingOffsets", "earliest").load()
    )  # fmt: skip
    if kind == "text":
        rows = records.select(sf.col("value").cast("string").alias("value"))
        wanted: list[tuple[Any, ...]] = [(each.decode(),) for each in written]
    else:
        rows = records.select(from_json("value", SCHEMA).alias("value")).select("value.*")
        wanted = list(ROWS)
    outgoing = str(tmp_path / "outgoing")
    for _ in range(2):
        run(rows.writeStream.format(kind).option("path", outgoing), tmp_path / "out")
    found = spark.read.schema(rows.schema).format(kind).load(outgoing).collect()
    assert sorted(map(tuple, found)) == wanted


def test_hadoop_paths_go_by_their_scheme(spark: SparkSession, tmp_path: Path) -> None:
    """viewfs is Hadoop's own, in the pip install as hdfs is, and needs no cluster."""
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.test.link./data", tmp_path.as_uri())
    write_file(tmp_path / "incoming", "json", "one", ROWS)
    frame = spark.readStream.schema(SCHEMA).json("viewfs://test/data/incoming")
    run(
        frame.writeStream.format("parquet").option("path", "viewfs://test/data/outgoing"),
        tmp_path / "checkpoint",
    )
    found = spark.read.parquet("viewfs://test/data/outgoing").collect()
    assert sorted(map(tuple, found)) == ROWS
    assert list((tmp_path / "outgoing").glob("*.parquet"))
    # The client of HDFS is there too: it knows the scheme, and misses only a name node.
    assert spark.sparkContext._jvm is not None
    loaded = spark.sparkContext._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(
        "hdfs", hadoop
    )
    assert loaded.getSimpleName() == "DistributedFileSystem"
