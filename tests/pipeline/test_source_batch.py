from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.client import AdminClient, Consumer, Producer, TopicPartition
from penstock.pipeline.reasons import reason_of
from tests.integration.cluster import Cluster
from tests.pipeline.source_tools import Topics, numbers
from tests.support import wait_until

pytestmark = pytest.mark.timeout(600)


# Retention goes by the records' own times, which are old in some of these tests.
FOR_EVER = {"retention.ms": -1}


@pytest.fixture(scope="module")
def topics(spark: SparkSession, penstock_cluster: Cluster) -> Topics:
    return Topics(spark, penstock_cluster)


def test_all_columns(topics: Topics) -> None:
    topics.make("source-columns", 2, FOR_EVER)
    topics.make("source-log-time", 1, {"message.timestamp.type": "LogAppendTime"})
    with Producer(topics.cluster.bootstrap) as producer:
        headers = [("a", b"1"), ("a", None), ("é", b"")]
        futures = [
            producer.send(
                "source-columns", b"v", b"k", partition=1, timestamp_ms=1_500, headers=headers
            ),
            producer.send("source-columns", None, b"tombstone", partition=1, timestamp_ms=2_000),
            producer.send("source-columns", b"", None, partition=0, timestamp_ms=0),
            producer.send("source-log-time", b"x", timestamp_ms=5),
        ]
        for future in futures:
            future.result(60)
    frame = topics.batch("source-columns", includeHeaders="true").orderBy("partition", "offset")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )

    def at(seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, UTC).astimezone().replace(tzinfo=None)

    table = frame.toArrow()
    assert table.column("timestamp").cast(pa.timestamp("ms", "UTC")).to_pylist() == [
        datetime.fromtimestamp(seconds, UTC) for seconds in (0, 1.5, 2)
    ]
    assert [tuple(row.values()) for row in table.drop(["timestamp"]).to_pylist()] == [
        (None, b"", "source-columns", 0, 0, 0, []),
        (b"k", b"v", "source-columns", 1, 0, 0, _pairs(*headers)),
        (b"tombstone", None, "source-columns", 1, 1, 0, []),
    ]
    assert "headers" not in topics.batch("source-columns").columns
    row = topics.batch("source-log-time").collect()[0]
    assert row.timestampType == 1
    assert row.timestamp > at(5)


def _pairs(*headers: tuple[str, bytes | None]) -> list[dict[str, object]]:
    return [{"key": key, "value": value} for key, value in headers]


def test_ranges_by_offset(topics: Topics) -> None:
    topics.make("source-offsets", 2)
    topics.send("source-offsets", range(100), 0)
    topics.send("source-offsets", range(100, 200), 1)
    everything = list(range(200))
    assert topics.values("source-offsets") == everything
    ends = {
        "startingOffsets": '{"source-offsets":{"0":10,"1":-2}}',
        "endingOffsets": '{"source-offsets":{"0":-1,"1":5}}',
    }
    assert topics.values("source-offsets", **ends) == [*range(10, 105)]
    assert topics.values("x", assign='{"source-offsets":[1]}') == everything[100:]
    assert topics.values("x", subscribePattern="source-offs.ts") == everything
    assert topics.values("x", subscribePattern="source-of") == []
    split = topics.batch("source-offsets", minPartitions="7", maxRecordsPerFetch="9")
    assert split.rdd.getNumPartitions() == 7
    assert numbers(split) == everything
    small = topics.batch("source-offsets", maxRecordsPerPartition="30")
    assert small.rdd.getNumPartitions() == 8
    assert numbers(small) == everything


def test_ranges_by_time(topics: Topics) -> None:
    topics.make("source-times", 2, FOR_EVER)
    with Producer(topics.cluster.bootstrap) as producer:
        for number in range(20):
            producer.send("source-times", b"%d" % number, partition=0, timestamp_ms=1_000 * number)
    between = {"startingTimestamp": "4500", "endingTimestamp": "7000"}
    assert topics.values("source-times", **between) == [5, 6]
    assert topics.values("source-times", startingTimestamp="18000") == [18, 19]
    assert topics.values("source-times", startingTimestamp="90000") == []
    assert topics.values("source-times", endingTimestamp="90000") == list(range(20))
    # By partition; in the other one there is nothing, neither before these times nor after them.
    by_partition = {
        "startingOffsetsByTimestamp": '{"source-times":{"0":2500,"1":0}}',
        "endingOffsetsByTimestamp": '{"source-times":{"0":5000,"1":5000}}',
    }
    assert topics.values("source-times", **by_partition) == [3, 4]
    strict = {**by_partition, "startingOffsetsByTimestampStrategy": "error"}
    with pytest.raises(AnalysisException, match="no record of source-times-1 is of that time"):
        topics.values("source-times", **strict)
    assert topics.values("x", assign='{"source-times":[0]}', **{
        **strict,
        "startingOffsetsByTimestamp": '{"source-times":{"0":2500}}',
        "endingOffsetsByTimestamp": '{"source-times":{"0":5000}}',
    }) == [3, 4]  # fmt: skip
    with pytest.raises(AnalysisException, match=r"name each partition .*source-times-1"):
        topics.values("source-times", startingOffsetsByTimestamp='{"source-times":{"0":5}}')


def test_transactions_leave_no_trace(topics: Topics) -> None:
    topics.make("source-transactions")
    topics.transact("source-transactions", range(10), commit=True)
    topics.transact("source-transactions", range(10, 20), commit=False)
    topics.send("source-transactions", range(20, 30))
    topics.transact("source-transactions", range(30, 40), commit=False)
    committed = [*range(10), *range(20, 30)]
    # The range ends in what was aborted and in a mark: there is no record to wait for.
    assert topics.values("source-transactions") == committed
    assert topics.values("source-transactions", minPartitions="9") == committed
    everything = {"isolation.level": "read_uncommitted"}
    assert topics.values("source-transactions", **everything) == list(range(40))
    with Producer(topics.cluster.bootstrap, transactional_id="source-open") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("source-transactions", b"100").result(60)
        assert topics.values("source-transactions") == committed
        assert topics.values("source-transactions", **everything)[-1] == 100
        producer.abort_transaction()


def test_a_compacted_topic(topics: Topics) -> None:
    topics.make(
        "source-compacted",
        1,
        {
            "cleanup.policy": "compact",
            "segment.bytes": 1024 * 1024,
            "min.cleanable.dirty.ratio": 0.01,
            "delete.retention.ms": 0,
        },
    )
    where = TopicPartition("source-compacted", 0)
    with (
        Producer(topics.cluster.bootstrap) as producer,
        Consumer(topics.cluster.bootstrap) as consumer,
    ):
        consumer.assign([where])

        def compacted() -> bool:
            for number in range(20):
                producer.send(where.topic, b"%d" % number + b" " * 60_000, b"%d" % (number % 5))
            producer.flush()
            consumer.seek(where, 0)
            return consumer.poll(10_000, 1)[0].offset > 0

        wait_until(compacted, "the topic was compacted", 60)
        end = consumer.end_offsets([where])[where]
    rows = topics.batch("source-compacted").select("offset", "key").collect()
    assert 0 < len(rows) < end
    assert {row.key for row in rows} == {b"%d" % number for number in range(5)}
    # Each range ends in a gap, or begins in one.
    split = topics.batch("source-compacted", minPartitions="40").select("offset", "key").collect()
    assert len(split) == len(set(split))
    assert set(split) <= set(rows)  # Compaction goes on meanwhile.
    newest = {row.key: row.offset for row in sorted(rows)}
    assert {row.key: row.offset for row in sorted(split)} == newest


def test_retention_that_was_faster(topics: Topics) -> None:
    topics.make("source-lost")
    topics.send("source-lost", range(100))
    with AdminClient(topics.cluster.bootstrap) as admin:
        admin.delete_records({TopicPartition("source-lost", 0): 40})
    assert topics.values("source-lost") == list(range(40, 100))
    early = {"startingOffsets": '{"source-lost":{"0":10}}'}
    with pytest.raises(PySparkException, match=r"DataLossError.*from offset 10 on.*begins at off"):
        topics.values("source-lost", **early)
    goes_on = {**early, "failOnDataLoss": "false"}
    assert topics.values("source-lost", **goes_on) == list(range(40, 100))
    gone = {**goes_on, "endingOffsets": '{"source-lost":{"0":30}}'}
    assert topics.values("source-lost", **gone) == []
    late = {"endingOffsets": '{"source-lost":{"0":101}}'}
    with pytest.raises(PySparkException, match=r"DataLossError.*offset 101 was asked") as caught:
        topics.values("source-lost", **late)
    assert "endingOffsets: partition source-lost-0: " in str(caught.value)
    assert "ends at 100: its log has never come so far" in str(caught.value)
    assert "retention" not in reason_of(str(caught.value))
    begins_late = {"startingOffsets": '{"source-lost":{"0":102}}'}
    with pytest.raises(
        PySparkException, match="startingOffsets: partition source-lost-0: offset 1"
    ):
        topics.values("source-lost", **begins_late)
    assert topics.values("source-lost", **begins_late, failOnDataLoss="false") == []
    assert topics.values("source-lost", **late, failOnDataLoss="false") == list(range(40, 100))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"startingOffset": "earliest"}, "unknown option .*did you mean startingOffsets"),
        ({"penstock.fetch.max.byts": "1"}, "did you mean penstock.fetch.max.bytes"),
        ({"assign": '{"a":[0]}', "subscribe": "a"}, "contradict each other"),
        ({"penstock.bootstrap.servers": "nowhere"}, "'nowhere' is not an address"),
        ({"maxOffsetsPerTrigger": "many"}, "a whole number"),
    ],
)
def test_a_wrong_option_is_refused_when_the_frame_is_made(
    topics: Topics, options: dict[str, str], match: str
) -> None:
    with pytest.raises(AnalysisException, match=match):
        topics.batch("any", **options)


def test_what_is_wrong_for_a_batch_is_refused_before_it_runs(topics: Topics) -> None:
    topics.make("source-wrong", 2)
    with pytest.raises(AnalysisException, match="maxOffsetsPerTrigger is for streams"):
        topics.values("source-wrong", maxOffsetsPerTrigger="5")
    with pytest.raises(AnalysisException, match=r"name each partition .*source-wrong-1"):
        topics.values("source-wrong", startingOffsets='{"source-wrong":{"0":5}}')
    with pytest.raises(AnalysisException, match="no-such-topic"):
        topics.values("no-such-topic")
    with pytest.raises(AnalysisException, match="source-wrong-7"):
        topics.values("x", assign='{"source-wrong":[7]}')
    reader = topics.spark.read.format("penstock").options(**topics.options("source-wrong"))
    typed = reader.schema(StructType().add("value", "string")).load()
    with pytest.raises(AnalysisException, match="has its own schema"):
        typed.count()
