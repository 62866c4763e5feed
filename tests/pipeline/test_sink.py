"""The sink, batch and streaming, on a real cluster: what is written, and what is refused."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from penstock.pipeline.reasons import reason_of
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.pipeline.brokers import Cable
from tests.pipeline.logs import make_topic, read, values
from tests.pipeline.pipe import Pipe
from tests.support import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def write(frame: DataFrame, cluster: Cluster, **options: str) -> None:
    writer = frame.write.format("penstock").mode("append")
    writer.option("penstock.bootstrap.servers", cluster.bootstrap).options(**options).save()


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id AS string) AS value")


def texts(count: int) -> list[str]:
    return sorted(str(number) for number in range(count))


def test_every_column_becomes_what_it_says(spark: SparkSession, penstock_cluster: Cluster) -> None:
    # One record is of 1970: any bound on the age of records would have it deleted at some time.
    topic = make_topic(penstock_cluster, "sink-columns", 3, **{"retention.ms": "-1"})
    frame = spark.sql(
        """
        SELECT * FROM VALUES
          (X'00ff', 'k1', 0, TIMESTAMP '2026-01-02 03:04:05.678901',
           array(struct('a' AS key, X'01' AS value), struct('a' AS key, NULL AS value))),
          (NULL, 'k2', 1, TIMESTAMP '1970-01-01 00:00:00', array()),
          (X'', NULL, NULL, NULL, NULL)
        AS rows(value, key, partition, timestamp, headers)
        """
    ).coalesce(1)
    before = datetime.datetime.now(datetime.UTC).timestamp() * 1000
    write(frame, penstock_cluster, topic=topic)
    found = read(penstock_cluster, topic)
    first, second, third = sorted(found, key=lambda record: record.key or b"~")
    assert (first.partition, first.value, first.key) == (0, b"\x00\xff", b"k1")
    assert first.headers == (("a", b"\x01"), ("a", None))
    assert (second.partition, second.value, second.headers) == (1, None, ())
    assert (third.value, third.key, third.headers) == (b"", None, ())
    assert third.timestamp_ms >= int(before)
    local = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000).astimezone()
    assert first.timestamp_ms == round(local.timestamp() * 1000)


def test_rows_go_to_the_topics_that_their_column_says_in_their_order(
    spark: SparkSession, penstock_cluster: Cluster
) -> None:
    topics = [make_topic(penstock_cluster, f"sink-fan-{number}", 1) for number in range(3)]
    frame = spark.range(0, 30, 1, 1).selectExpr(
        "concat('sink-fan-', cast(id % 3 AS string)) AS TOPIC", "cast(id AS string) AS Value"
    )
    write(frame, penstock_cluster)
    for number, topic in enumerate(topics):
        found = [record.value.decode() for record in read(penstock_cluster, topic)]
        assert found == [str(value) for value in range(number, 30, 3)]


def test_a_stream_is_written_and_goes_on(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path
) -> None:
    topic = make_topic(penstock_cluster, "sink-stream")
    source = tmp_path / "in"
    source.mkdir()
    for turn in range(2):
        lines = "".join(f"{turn}-{number}\n" for number in range(100))
        (source / f"{turn}.txt").write_text(lines)
        query = (
            spark.readStream.text(str(source))
            .writeStream.format("penstock")
            .option("penstock.bootstrap.servers", penstock_cluster.bootstrap)
            .option("topic", topic)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert len(values(penstock_cluster, topic)) == 100 * (turn + 1)
    assert len(set(values(penstock_cluster, topic))) == 200


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"topics": "t"}, "unknown option topics; did you mean topic"),
        ({"delivery": "at-least-once", "sinkId": "s"}, "sinkId is for delivery=exactly-once"),
    ],
)
def test_a_stream_with_a_wrong_option_writes_nothing_and_goes_on_once_it_is_mended(
    spark: SparkSession,
    penstock_cluster: Cluster,
    tmp_path: Path,
    wrong: dict[str, str],
    says: str,
) -> None:
    topic = make_topic(penstock_cluster, f"sink-mended-{tmp_path.name}")
    source = tmp_path / "in"
    source.mkdir()
    (source / "lines.txt").write_text("".join(f"{line}\n" for line in texts(100)))

    def run(**more: str) -> None:
        options = {"penstock.bootstrap.servers": penstock_cluster.bootstrap, "topic": topic, **more}
        writer = spark.readStream.text(str(source)).writeStream.format("penstock")
        kept = writer.options(**options).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert kept.trigger(availableNow=True).start().awaitTermination(60)

    with pytest.raises(StreamingQueryException, match=says) as caught:
        run(**wrong)
    assert "OptionError" in str(caught.value)
    assert values(penstock_cluster, topic, "read_uncommitted") == []
    run()
    assert values(penstock_cluster, topic) == texts(100)


def test_at_least_once_writes_without_transactions(
    spark: SparkSession, penstock_cluster: Cluster
) -> None:
    topic = make_topic(penstock_cluster, "sink-plain")
    write(numbers(spark, 1000), penstock_cluster, topic=topic, delivery="at-least-once")
    assert values(penstock_cluster, topic, "read_uncommitted") == texts(1000)
    ends = [record.offset for record in read(penstock_cluster, topic) if record.partition == 0]
    assert ends == list(range(len(ends)))  # No mark of a transaction between them.


def test_nothing_of_a_batch_write_is_seen_when_a_task_fails(
    spark: SparkSession, penstock_cluster: Cluster
) -> None:
    topic = make_topic(penstock_cluster, "sink-failing")
    frame = spark.range(0, 2000, 1, 2).selectExpr(
        "CASE WHEN id = 1999 THEN raise_error('no more') ELSE cast(id AS string) END AS value"
    )
    with pytest.raises(Exception, match="no more"):
        write(frame, penstock_cluster, topic=topic)
    # All attempts are aborted, those of tasks that were done as well: readers wait for nobody.
    assert values(penstock_cluster, topic) == []
    assert len(values(penstock_cluster, topic, "read_uncommitted")) >= 1000


def test_tasks_that_are_killed_since_another_failed_keep_no_reader_waiting(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path
) -> None:
    topic = make_topic(penstock_cluster, "sink-killed")
    begun = tmp_path / "begun"

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.column("id")[0].as_py() > 0:
                while not begun.exists():  # Its own limit is Spark's, and the test's.
                    threading.Event().wait(0.05)
                raise ValueError("no more")
            many = pa.array([b"x"] * 30_000, pa.binary())
            yield pa.RecordBatch.from_arrays([many], ["value"])
            yield pa.RecordBatch.from_arrays([many], ["value"])
            begun.touch()
            threading.Event().wait(60)  # Until Spark kills it.

    frame = spark.range(0, 2, 1, 2).mapInArrow(rows, "value binary")
    with pytest.raises(Exception, match="no more"):
        write(frame, penstock_cluster, topic=topic)
    assert values(penstock_cluster, topic) == []


def test_an_empty_write_is_one(spark: SparkSession, penstock_cluster: Cluster) -> None:
    topic = make_topic(penstock_cluster, "sink-empty")
    write(numbers(spark, 0), penstock_cluster, topic=topic)
    assert values(penstock_cluster, topic) == []


REFUSED: dict[str, tuple[Callable[[SparkSession], DataFrame], dict[str, Any], str]] = {
    "an option that nobody knows": (
        lambda spark: numbers(spark, 1),
        {"topic": "t", "topics": "t"},
        "unknown option topics; did you mean topic?",
    ),
    "a column that no record has": (
        lambda spark: numbers(spark, 1).selectExpr("value", "1 AS ofset"),
        {"topic": "t"},
        "a record has no column 'ofset'",
    ),
    "a topic that is not there": (
        lambda spark: numbers(spark, 1),
        {"topic": "sink-colums"},
        "WriteFailedError: the penstock sink: nothing was written, for there is no topic sink-c",
    ),
    "a record that is too large": (
        lambda spark: spark.range(1).selectExpr("repeat('x', 2000000) AS value"),
        {"topic": "sink-refused"},
        "RecordTooLargeError: a record for topic 'sink-refused-",
    ),
    "a partition that is not there": (
        lambda spark: numbers(spark, 1).selectExpr("value", "7 AS partition"),
        {"topic": "sink-refused"},
        "InvalidPartitionsError",
    ),
    "a topic that is null": (
        lambda spark: numbers(spark, 1).selectExpr("value", "cast(NULL AS string) AS topic"),
        {},
        "RowError: the penstock sink: the topic of 1 of 1 rows is null",
    ),
    "a header without a name": (
        lambda spark: numbers(spark, 1).selectExpr(
            "value", "array(struct(cast(NULL AS string) AS key, X'01' AS value)) AS headers"
        ),
        {"topic": "sink-refused"},
        "RowError: the penstock sink: 1 headers are null",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_says_why(
    spark: SparkSession, penstock_cluster: Cluster, case: str
) -> None:
    make, options, wanted = REFUSED[case]
    if options.get("topic") == "sink-refused" or not options:
        with_topic = f"sink-refused-{sorted(REFUSED).index(case)}"
        make_topic(penstock_cluster, with_topic)
        options = {**options, "topic": with_topic} if options else {}
    with pytest.raises(Exception, match=wanted.split("(")[0]) as caught:
        write(make(spark), penstock_cluster, **options)
    assert "Traceback" not in str(caught.value).rsplit(wanted, 1)[1]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_record_above_the_clients_bound_names_the_option(
    spark: SparkSession, penstock_cluster: Cluster, delivery: str
) -> None:
    topic = make_topic(penstock_cluster, f"sink-bound-{delivery}")
    large = spark.range(1).selectExpr("repeat('x', 2000000) AS value")
    with pytest.raises(PySparkException) as caught:
        write(large, penstock_cluster, topic=topic, delivery=delivery)
    assert "raise penstock.max.request.size (and the topic's max.message.bytes)" in reason(caught)


@pytest.mark.parametrize(
    ("name", "config", "value", "says"),
    [
        (
            "large", {"max.message.bytes": "1000"}, "repeat('x', 5000)",
            r"RecordTooLargeError: .*; next: raise the topic's max\.message\.bytes",
        ),
        (
            "keyless", {"cleanup.policy": "compact"}, "'x'",
            "InvalidRecordError: .*; a compacted topic takes none whose key is null",
        ),
    ],
)  # fmt: skip
def test_what_brokers_refuse_says_why_and_what_to_do_in_spark(
    spark: SparkSession, penstock_cluster: Cluster, name: str, config: dict[str, str], *,
    value: str, says: str,
) -> None:  # fmt: skip
    topic = make_topic(penstock_cluster, f"sink-brokers-{name}", 1, **config)
    frame = spark.range(1).selectExpr(f"{value} AS value")
    with pytest.raises(PySparkException) as caught:
        write(frame, penstock_cluster, topic=topic)
    found = reason(caught)
    assert found.startswith("WriteFailedError: the penstock sink: what task ")
    assert re.search(says, found)
    assert "abort()" not in str(caught.value)
    assert values(penstock_cluster, topic) == []


def reason(caught: pytest.ExceptionInfo[PySparkException]) -> str:
    return reason_of(str(caught.value))


def test_a_query_to_a_wrong_address_ends_before_a_task_begins(pipe: Pipe) -> None:
    (port,) = free_ports(1)
    pipe.feed()
    options = pipe.options(
        **{
            "penstock.bootstrap.servers": f"127.0.0.1:{port}",
            "penstock.delivery.timeout.ms": "4000",
            "penstock.request.timeout.ms": "2000",
        }
    )
    said = pipe.fail(pipe.to_sink("penstock", options), "nothing was written")
    assert reason_of(said).startswith(
        "WriteFailedError: the penstock sink: nothing was written to "
        f"penstock.bootstrap.servers=127.0.0.1:{port}: BootstrapError: no bootstrap address"
    )
    assert "task" not in said.lower()


@pytest.mark.parametrize("form", ["writeStream", "foreachBatch"])
def test_a_query_outlives_an_outage_in_which_it_plans_a_batch(pipe: Pipe, form: str) -> None:
    cable = Cable(int(pipe.cluster.bootstrap.split(",")[0].rpartition(":")[2]))
    cable.cut()
    options = pipe.options(**{"penstock.bootstrap.servers": f"127.0.0.1:{cable.port}"})

    def each(frame: DataFrame, _: int) -> None:
        frame.write.format("penstock").mode("append").options(**options).save()

    pipe.feed()
    writer = pipe.to_sink("penstock", options) if form == "writeStream" else pipe.for_each(each)
    try:
        query = pipe.start(writer)
        wait_until(lambda: bool(cable.refused) or not query.isActive, "the sink asks", 90)
        # Longer than one question, which takes penstock.bootstrap.timeout.ms: 5 s.
        until = time.monotonic() + 8
        wait_until(lambda: time.monotonic() > until or not query.isActive, "some seconds pass", 60)
        cable.plug_in()
        assert query.awaitTermination(120)
    finally:
        cable.close()
    assert pipe.read() == pipe.wanted


def test_a_log_cannot_be_overwritten(spark: SparkSession, penstock_cluster: Cluster) -> None:
    writer = numbers(spark, 1).write.format("penstock").mode("overwrite").option("topic", "t")
    with pytest.raises(Exception, match="a log is only appended to"):
        writer.option("penstock.bootstrap.servers", penstock_cluster.bootstrap).save()
