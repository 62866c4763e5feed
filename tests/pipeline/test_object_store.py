"""An S3-compatible store both ways, against a local server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession

from penstock.pipeline.connectors.object_store import (
    S3,
    ObjectsDataSource,
    ParquetBatches,
)
from penstock.pipeline.errors import ConcurrentQueryError, OptionError, StaleCheckpointError
from tests.pipeline.stores import running_store


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    with running_store("bucket") as found:
        yield found


def test_a_batch_is_known_by_its_plan(spark: SparkSession, store: S3, tmp_path: Path) -> None:
    planned = tmp_path / "offsets" / "0"
    planned.parent.mkdir()
    planned.write_text("one plan")
    write = ParquetBatches("bucket/planned", store, sink_id="planned", checkpoint=str(tmp_path))
    write(spark.range(5), 0)
    write(spark.range(7), 0)
    planned.write_text("another plan")
    with pytest.raises(StaleCheckpointError, match="another one, by the checkpoint's plan of it"):
        write(spark.range(5), 0)
    assert written(spark, store, "bucket/planned") == list(range(5))


def objects(spark: SparkSession, store: S3, path: str, *, stream: bool, **more: Any) -> DataFrame:
    spark.dataSource.register(ObjectsDataSource)
    reader = (spark.readStream if stream else spark.read).format("penstock-objects")
    return reader.options(
        path=path, endpoint=store.endpoint, region=store.region, accessKey=store.access_key,
        secretKey=store.secret_key, **more,
    ).load()  # fmt: skip


def names(store: S3, path: str) -> list[str]:
    found = store.connect().get_file_info(fs.FileSelector(path, recursive=True))
    return sorted(each.path.removeprefix(path + "/") for each in found if each.is_file)


def test_batches_are_written_once_and_read_once(
    spark: SparkSession, store: S3, tmp_path: Path
) -> None:
    path = "bucket/orders"
    write = ParquetBatches(path, store, sink_id="orders")
    columns = "id as id, timestamp_millis(id) as at, array(id) as ids"
    frame = spark.range(10, numPartitions=3).selectExpr(*columns.split(", "))
    # Whoever died before left more objects than there are tasks now.
    write._write(frame.repartition(5), f"{path}/batch-0000000000").collect()
    write(frame, 0)
    marker, *parts = names(store, path)
    assert marker == "batch-0000000000/_committed.json"
    assert [part[:27] for part in parts] == [f"batch-0000000000/part-{n:05d}" for n in range(3)]
    # The same batch again changes nothing, and another one under its number is not taken for it.
    write(frame, 0)
    with pytest.raises(StaleCheckpointError, match=r"batch 0 under bucket/orders .*10 rows.*99 r"):
        write(spark.range(99).selectExpr(*columns.split(", ")), 0)
    replace(write, checks_replays=False)(spark.range(99).selectExpr(*columns.split(", ")), 0)
    found = objects(spark, store, path, stream=False)
    assert found.schema == frame.schema
    assert sorted(row.id for row in found.collect()) == list(range(10))

    batches: list[list[int]] = []

    def keep(batch: DataFrame, batch_id: int) -> None:
        batches.append(sorted(row.id for row in batch.collect()))

    def run() -> None:
        query = (
            objects(spark, store, path, stream=True, maxFilesPerTrigger=2)
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert [len(batch) for batch in batches] == [6, 4]
    write(frame.where("id = 5"), 1)
    # A batch that is not committed is not there yet.
    write._write(frame.where("id = 7"), f"{path}/batch-0000000002").collect()
    run()
    assert batches[2:] == [[5]]
    write(frame.where("id = 7"), 2)
    run()
    assert batches[3:] == [[7]]


def test_objects_of_others_hide_no_batch(spark: SparkSession, store: S3, tmp_path: Path) -> None:
    path = "bucket/mixed"
    write = ParquetBatches(path, store, sink_id="mixed")
    found: list[list[int]] = []

    def put(name: str, number: int) -> None:
        pq.write_table(pa.table({"id": [number]}), f"{path}/{name}", filesystem=store.connect())

    def run(**options: Any) -> None:
        query = (
            objects(spark, store, path, stream=True, **options)
            .writeStream.foreachBatch(
                lambda batch, _: found.append([r.id for r in batch.collect()])
            )
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    write(spark.range(1), 0)
    put("batch-foo.parquet", 100)
    put("zzz.parquet", 101)
    run()
    write(spark.range(1, 2), 1)
    put("~.parquet", 102)
    # An attempt at a task whose driver believed it dead.
    put("batch-0000000001/part-00000-late.parquet", 1)
    run()
    assert [sorted(batch) for batch in found] == [[0, 100, 101], [1, 102]]
    assert written(spark, store, path) == [0, 1, 100, 101, 102]
    put("a.parquet", 103)
    with pytest.raises(Exception, match=r"DataLossError: .*1 objects came whose .*failOnDataLoss"):
        run()
    write(spark.range(2, 3), 2)
    run(failOnDataLoss=False)
    assert found[2:] == [[2]]


def test_a_batch_that_another_driver_commits_meanwhile_is_written_once(
    spark: SparkSession, store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "bucket/meanwhile"
    real = ParquetBatches._write

    def write(self: ParquetBatches, frame: DataFrame, directory: str) -> DataFrame:
        monkeypatch.setattr(ParquetBatches, "_write", real)
        done = spark.createDataFrame(real(self, frame, directory).collect())
        self(frame, 0)
        # That one takes what it finds for an earlier attempt's.
        return done

    monkeypatch.setattr(ParquetBatches, "_write", write)
    ParquetBatches(path, store, sink_id="meanwhile")(spark.range(5, numPartitions=1), 0)
    assert len(names(store, path)) == 2
    assert written(spark, store, path) == list(range(5))


def test_an_object_that_is_gone_before_the_commit_is_noticed(
    spark: SparkSession, store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "bucket/gone"
    real = ParquetBatches._write

    def write(self: ParquetBatches, frame: DataFrame, directory: str) -> DataFrame:
        done = spark.createDataFrame(real(self, frame, directory).collect())
        # Another driver cleans up after those before it.
        for name in names(store, path):
            store.connect().delete_file(f"{path}/{name}")
        return done

    monkeypatch.setattr(ParquetBatches, "_write", write)
    with pytest.raises(ConcurrentQueryError, match="is gone before the batch was committed"):
        ParquetBatches(path, store, sink_id="gone")(spark.range(1), 0)
    assert names(store, path) == []


def test_an_empty_batch_is_committed_too(spark: SparkSession, store: S3) -> None:
    ParquetBatches("bucket/empty", store, sink_id="empty")(spark.range(0), 0)
    assert names(store, "bucket/empty") == ["batch-0000000000/_committed.json"]
    with pytest.raises(Exception, match=r"no Parquet object under bucket/empty.*\.schema"):
        objects(spark, store, "bucket/empty", stream=False)


def written(spark: SparkSession, store: S3, path: str) -> list[int]:
    return sorted(row.id for row in objects(spark, store, path, stream=False).collect())


def copy(spark: SparkSession, store: S3, source: str, checkpoint: Path, write: Any) -> None:
    """A query over the objects under a path, of which each is a batch."""
    query = (
        objects(spark, store, source, stream=True, maxFilesPerTrigger=1)
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_query_with_a_new_checkpoint_is_refused(
    spark: SparkSession, store: S3, tmp_path: Path
) -> None:
    source = ParquetBatches("bucket/first", store, sink_id="source")
    for batch_id in range(3):
        source(spark.range(batch_id, batch_id + 1, numPartitions=1), batch_id)
    write = ParquetBatches("bucket/copies", store)
    calls: list[int] = []

    def crash_after(batch: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        write(batch, batch_id)
        if calls == [0, 1]:
            raise RuntimeError("the driver dies here")

    with pytest.raises(Exception, match="the driver dies here"):
        copy(spark, store, "bucket/first", tmp_path / "old", crash_after)
    # The same query goes on, and the batch that comes again is its own.
    copy(spark, store, "bucket/first", tmp_path / "old", crash_after)
    assert calls == [0, 1, 1, 2]
    assert written(spark, store, "bucket/copies") == [0, 1, 2]
    # Another query has other rows in its batches of these numbers.
    ParquetBatches("bucket/second", store, sink_id="source")(spark.range(7, 8), 0)
    stale = r"StaleCheckpointError: batch 0 under bucket/copies was written by sink spark-.*next:"
    with pytest.raises(Exception, match=stale):
        copy(spark, store, "bucket/second", tmp_path / "new", write)
    assert written(spark, store, "bucket/copies") == [0, 1, 2]


def test_a_path_has_one_writer_and_no_way_back(spark: SparkSession, store: S3) -> None:
    path = "bucket/mine"
    for batch_id in range(2):
        ParquetBatches(path, store, sink_id="a")(spark.range(batch_id, batch_id + 1), batch_id)
    with pytest.raises(StaleCheckpointError, match="has written batch 1 under bucket/mine, and ba"):
        ParquetBatches(path, store, sink_id="a")(spark.range(9), 0)
    # Also where that batch is not there yet.
    with pytest.raises(StaleCheckpointError, match="sink a, and sink b is to write batch 2"):
        ParquetBatches(path, store, sink_id="b")(spark.range(9), 2)
    with pytest.raises(OptionError, match="pass sink_id="):
        ParquetBatches(path, store)(spark.range(9), 2)
    assert written(spark, store, path) == [0, 1]


def test_two_writes_of_a_batch_need_two_paths(
    spark: SparkSession, store: S3, tmp_path: Path
) -> None:
    ParquetBatches("bucket/third", store, sink_id="source")(spark.range(4, numPartitions=1), 0)

    def twice(batch: DataFrame, batch_id: int) -> None:
        ParquetBatches("bucket/even", store)(batch.where("id % 2 = 0"), batch_id)
        ParquetBatches("bucket/even", store)(batch.where("id % 2 = 1"), batch_id)

    with pytest.raises(Exception, match="SharedSinkIdError: another write of this foreachBatch"):
        copy(spark, store, "bucket/third", tmp_path, twice)
    assert written(spark, store, "bucket/even") == [0, 2]


def test_what_is_no_endpoint_and_what_is_not_shown() -> None:
    with pytest.raises(OptionError, match="is no URL; next: write http"):
        S3("localhost:9000").connect()
    assert "hidden" not in repr(S3(secret_key="hidden"))
