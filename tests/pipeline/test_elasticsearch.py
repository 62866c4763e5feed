from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from penstock.client import AdminClient, Consumer
from tests.integration.cluster import Cluster
from tests.unit.pipeline.fake_elasticsearch import FakeElasticsearch, running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "key string, value string, topic string, partition int, offset long"


@pytest.fixture
def fake() -> Iterator[FakeElasticsearch]:
    with running() as made:
        yield made


@pytest.fixture
def records(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A stream of twenty records of two partitions, from files."""
    directory = tmp_path / "records"
    directory.mkdir()
    for partition in range(2):
        rows = [
            {"key": f"k{offset % 5}", "value": json.dumps({"n": offset}), "topic": "Orders",
             "partition": partition, "offset": offset}
            for offset in range(10)
        ]  # fmt: skip
        (directory / f"{partition}.json").write_text("\n".join(map(json.dumps, rows)))
    return spark.readStream.schema(SCHEMA).json(str(directory))


def run(records: DataFrame, checkpoint: Path, **options: str) -> None:
    writer = records.writeStream.format("penstock-elasticsearch").options(**options)
    # As all queries of a declarative pipeline have one. No two of a name run at a time.
    writer = writer.queryName("documents")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def test_a_replayed_batch_leaves_the_same_documents(
    records: DataFrame, fake: FakeElasticsearch, tmp_path: Path
) -> None:
    # The first answer to each task is lost after its documents were written, too.
    fake.answers.extend(["die", 429])
    run(records, tmp_path / "c", url=fake.url, retryBackoff="1ms")
    documents = fake.of("orders")
    assert documents == {f"Orders+{p}+{n}": {"n": n} for p in range(2) for n in range(10)}

    before = len(fake.requests)
    for path in (tmp_path / "c" / "commits").glob("*0*"):  # With the checksum beside it.
        path.unlink()
    run(records, tmp_path / "c", url=fake.url)
    assert len(fake.requests) > before
    assert fake.of("orders") == documents


def test_what_is_refused_fails_the_query_with_its_place(
    records: DataFrame, fake: FakeElasticsearch, tmp_path: Path
) -> None:
    fake.item_error = lambda about, document: (400, "no") if document["n"] == 7 else None
    with pytest.raises(StreamingQueryException, match=r"record Orders-\d@7 .*as_told: no"):
        run(records, tmp_path / "c", url=fake.url)


def test_an_option_that_nobody_knows_is_refused(
    records: DataFrame, fake: FakeElasticsearch, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="unknown option indx; did you mean index"):
        run(records, tmp_path / "c", url=fake.url, indx="a")


def test_aggregates_are_upserted_in_foreach_batch(
    records: DataFrame, fake: FakeElasticsearch, tmp_path: Path
) -> None:
    def write(batch: DataFrame, _: int) -> None:
        made = batch.write.format("penstock-elasticsearch").mode("append")
        made.options(url=fake.url, index="counts", id="key").save()

    counts = records.groupBy("key").count()
    writer = counts.writeStream.outputMode("update").foreachBatch(write)
    writer = writer.option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    assert fake.of("counts") == {f"k{n}": {"key": f"k{n}", "count": 4} for n in range(5)}


def test_refused_rows_become_dead_letters(
    spark: SparkSession, fake: FakeElasticsearch, penstock_cluster: Cluster
) -> None:
    servers = penstock_cluster.bootstrap
    with AdminClient(servers) as admin:
        admin.create_topic("elasticsearch-dead", partitions=1)
    rows = [("a", '{"n": 1}', "T", 0, 5), ("b", "not json", "T", 0, 6)]
    made = spark.createDataFrame(rows, SCHEMA).write.format("penstock-elasticsearch")
    made.mode("append").options(
        url=fake.url, onError="deadLetter", deadLetterTopic="elasticsearch-dead",
        **{"penstock.bootstrap.servers": servers},
    ).save()  # fmt: skip
    assert fake.of("t") == {"T+0+5": {"n": 1}}
    with Consumer(servers, topics=["elasticsearch-dead"], auto_offset_reset="earliest") as consumer:
        letter = next(iter(consumer))
    headers = dict(letter.headers)
    assert (letter.key, letter.value) == (b"b", b"not json")
    assert headers["penstock.offset"] == b"6"
    assert headers["penstock.error.type"] == b"malformed_row"
