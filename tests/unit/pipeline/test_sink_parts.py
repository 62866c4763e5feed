"""The sink's pure parts: options, columns, rows, who writes, what the driver concludes."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.client import (
    InvalidRecordError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.client.config import AttemptConfig, CommitConfig
from penstock.pipeline.errors import ConcurrentQueryError, OptionError, RowError, SchemaError
from penstock.pipeline.sink import exactly_once
from penstock.pipeline.sink.columns import check
from penstock.pipeline.sink.failures import write_failed
from penstock.pipeline.sink.identity import Epoch, Place, mark_of, marked, place_of
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.replays import Content, plan_of
from penstock.pipeline.sink.rows import by_topic
from penstock.pipeline.sink.verdict import TaskDone, verdict
from penstock.pipeline.sink_options import Delivery, SinkOptions

SERVERS = {"penstock.bootstrap.servers": "localhost:9092"}
HEADERS = ArrayType(StructType().add("key", StringType()).add("value", BinaryType()))
OPTIONS = SinkOptions.load({**SERVERS, "topic": "t"})
EPOCH = Epoch("spark-q-t", 7, 5, of_query=True)


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


# --- options ------------------------------------------------------------------------------------


def test_options_have_the_topic_for_a_sink_id() -> None:
    options = SinkOptions.load({**SERVERS, "TOPIC": "orders", "checkpointlocation": "/x"})
    assert (options.topic, options.sink_id) == ("orders", "orders")
    assert options.delivery is Delivery.EXACTLY_ONCE
    assert SinkOptions.load(SERVERS).sink_id == "penstock"
    assert SinkOptions.load({**SERVERS, "topic": "t", "sinkId": "s"}).sink_id == "s"
    assert pickle.loads(pickle.dumps(options)) == options


def test_client_settings_go_to_those_who_have_them() -> None:
    given = {
        "penstock.transaction.timeout.ms": "5000",
        "penstock.default.api.timeout.ms": "7000",
        "penstock.compression": "lz4",
    }
    client = SinkOptions.load({**SERVERS, **given}).client
    assert client.of(AttemptConfig) == {"transaction_timeout_ms": 5000, "compression": "lz4"}
    assert client.of(CommitConfig) == {"default_api_timeout_ms": 7000}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"topics": "t"}, "unknown option topics; did you mean topic?"),
        ({"delivery": "twice"}, "exactly-once, at-least-once"),
        ({"sinkId": "x" * 250}, "at most 249 bytes"),
        ({"delivery": "at-least-once", "sinkId": "s"}, "sinkId is for delivery=exactly-once"),
        (
            {"penstock.acks": "1"},
            "(the default; the other is at-least-once) contradicts penstock.acks='1'; it needs",
        ),
        ({"penstock.enable.idempotence": "false"}, "contradicts penstock.enable.idempotence=False"),
        ({"delivery": "exactly-once", "penstock.retries": "0"}, "contradicts penstock.retries=0"),
        ({"penstock.value.serializer": "json"}, "columns of bytes or text"),
        ({"penstock.transactional.id": "mine"}, "set sinkId instead"),
        ({"delivery": "at-least-once", "penstock.transaction.timeout.ms": "5"}, "no transactions"),
        (
            {"delivery": "at-least-once", "penstock.acks": "0"},
            "penstock.acks='0': nothing would be acknowledged",
        ),
        ({"penstock.linger": "5"}, "penstock.linger"),
        ({"txnAppId": "a"}, "txnAppId and txnVersion go together"),
        ({"txnVersion": "1"}, "txnAppId and txnVersion go together"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "a whole number from 0"),
        ({"txnAppId": "x" * 2000, "txnVersion": "1"}, "txnAppId="),
        ({"delivery": "at-least-once", "txnAppId": "a", "txnVersion": "1"}, "for delivery=exactly"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        SinkOptions.load({**SERVERS, **given})
    assert says in str(caught.value)


def test_overwriting_is_refused() -> None:
    with pytest.raises(OptionError, match="mode\\('append'\\)"):
        SinkPlan.of({**SERVERS, "topic": "t"}, schema(value=StringType()), overwrite=True)


def test_a_stream_has_its_numbers_from_spark() -> None:
    given = {**SERVERS, "topic": "t", "txnAppId": "a", "txnVersion": "1"}
    assert SinkPlan.of(given, schema(value=StringType())).options.transaction == ("a", 1)
    with pytest.raises(OptionError, match=r"a query .*has its id and the numbers"):
        SinkPlan.of(given, schema(value=StringType()), stream=True)


def test_a_checkpoint_without_effect_is_refused() -> None:
    given = {**SERVERS, "topic": "t", "checkpointLocation": "/c", "delivery": "at-least-once"}
    with pytest.raises(OptionError, match=r"checkpointLocation is for delivery=exactly-once"):
        SinkPlan.of(given, schema(value=StringType()))
    # A query hands it over by itself.
    assert SinkPlan.of(given, schema(value=StringType()), stream=True).options.topic == "t"
    given |= {"delivery": "exactly-once", "txnAppId": "a", "txnVersion": "1"}
    with pytest.raises(OptionError, match=r"checkpointLocation .* txnAppId"):
        SinkPlan.of(given, schema(value=StringType()))


# --- columns ------------------------------------------------------------------------------------


def test_all_columns_in_any_case() -> None:
    columns = schema(
        Value=BinaryType(),
        KEY=StringType(),
        topic=StringType(),
        partition=IntegerType(),
        timestamp=TimestampType(),
        headers=HEADERS,
    )
    assert check(columns, None) == ("value", "key", "topic", "partition", "timestamp", "headers")


@pytest.mark.parametrize(
    ("columns", "topic", "says"),
    [
        ({"key": StringType()}, "t", "column 'value' is missing; the columns are key"),
        ({"value": IntegerType()}, "t", "'value' is int, and STRING or BINARY is wanted"),
        ({"value": StringType(), "offset": LongType()}, "t", "no column 'offset'"),
        ({"value": StringType(), "partitions": LongType()}, "t", "did you mean 'partition'"),
        ({"value": StringType(), "partition": LongType()}, "t", "'partition' is bigint"),
        ({"value": StringType(), "timestamp": TimestampNTZType()}, "t", "TIMESTAMP is wanted"),
        ({"value": StringType(), "headers": ArrayType(StringType())}, "t", "ARRAY<STRUCT<"),
        ({"value": StringType(), "VALUE": StringType()}, "t", "several columns 'value'"),
        ({"value": StringType()}, None, "nothing says the topic"),
        ({"value": StringType(), "topic": StringType()}, "t", "leave the option out"),
    ],
)
def test_columns_that_are_refused(columns: dict[str, Any], topic: str | None, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check(schema(**columns), topic)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("value", LongType(), "CAST(value AS STRING)"),
        ("key", TimestampType(), "CAST(key AS STRING)"),
        ("value", schema(a=LongType()), "to_json(value)"),
        ("value", ArrayType(LongType()), "to_json(value)"),
        ("key", MapType(StringType(), LongType()), "to_json(key)"),
        ("value", NullType(), "CAST(value AS STRING)"),
    ],
)
def test_advice_is_what_spark_takes_for_the_type(name: str, kind: DataType, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check(schema(**{"value": StringType(), name: kind}), "t")
    assert str(caught.value).endswith(f"next: write {says}")


# --- rows ---------------------------------------------------------------------------------------


def split(
    columns: dict[str, pa.Array], topic: str | None = None
) -> dict[str, dict[str, list[Any]]]:
    batch = pa.record_batch(columns)
    found = [(name, rows.to_pydict()) for name, rows in by_topic(batch, list(columns), topic, 42)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_rows_are_split_by_topic_in_their_order() -> None:
    topics = pa.array(["b", "a", "b", "c", "a", "b"])
    numbers = pa.array([b"%d" % number for number in range(6)])
    assert split({"topic": topics, "value": numbers}) == {
        "b": {"value": [b"0", b"2", b"5"]},
        "a": {"value": [b"1", b"4"]},
        "c": {"value": [b"3"]},
    }
    assert split({"topic": topics.take([0, 2]), "value": numbers.take([0, 2])}) == {
        "b": {"value": [b"0", b"2"]}
    }
    assert split({"value": numbers[:0], "topic": topics[:0]}) == {}


def test_timestamps_are_milliseconds_and_now_where_there_are_none() -> None:
    times = pa.array([1_999, None], pa.timestamp("us", tz="UTC"))
    rows = split({"value": pa.array(["a", "b"]), "timestamp": times}, "t")
    assert rows == {"t": {"value": ["a", "b"], "timestamp": [1, 42]}}


def test_rows_that_can_be_no_records() -> None:
    value = pa.array(["a", "b"])
    with pytest.raises(RowError, match="topic of 1 of 2 rows is null"):
        split({"value": value, "topic": pa.array(["t", None])})
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    for pair in (None, {"key": None, "value": b""}):
        headers = pa.array([[pair], [{"key": "k", "value": None}]], kind)
        with pytest.raises(RowError, match="1 headers are null"):
            split({"value": value, "headers": headers}, "t")


# --- who writes ---------------------------------------------------------------------------------


class Context:
    """What a task knows of itself."""

    def __init__(self, properties: dict[str, str], attempt: int = 3) -> None:
        self.getLocalProperty = properties.get
        self._attempt = attempt

    def partitionId(self) -> int:
        return 2

    def taskAttemptId(self) -> int:
        return self._attempt


IN_QUERY = {
    "sql.streaming.queryId": "q",
    "streaming.sql.batchId": "7",
    "spark.app.id": "app",
    "spark.app.startTime": "1",
    "spark.sql.execution.root.id": "9",
    "spark.sql.execution.id": "10",
}


def place(attempt: int = 3, **changed: str) -> Any:
    context: Any = Context({**IN_QUERY, **changed}, attempt)
    return place_of(context, OPTIONS, "alone")


def test_a_write_may_say_itself_who_writes_and_what_number_it_has() -> None:
    options = SinkOptions.load({**SERVERS, "topic": "t", "txnAppId": "orders", "txnVersion": "41"})
    for properties in ({}, IN_QUERY):
        context: Any = Context(properties)
        epoch = place_of(context, options, "alone").epoch
        assert (epoch.group, epoch.number, epoch.of_query) == ("spark-txn-6-orders-t", 41, True)


def test_no_two_writers_share_a_group_whatever_their_names_are() -> None:
    names = ["orders", "orders-eu", "orders-eu-audit", "6-orders", "q", "q-t"]
    sinks = ["t", "audit", "eu-audit", "eu-audit-t", "orders-t", "t/replays"]
    groups = set()
    for name in names:
        for sink in sinks:
            given = {**SERVERS, "sinkId": sink, "txnAppId": name, "txnVersion": "41"}
            context: Any = Context(IN_QUERY)
            groups.add(place_of(context, SinkOptions.load(given), "alone").epoch.group)
    for sink in sinks:
        context = Context(IN_QUERY)
        options = SinkOptions.load({**SERVERS, "sinkId": sink})
        groups.add(place_of(context, options, "alone").epoch.group)
    assert len(groups) == (len(names) + 1) * len(sinks)
    claims = {exactly_once._CLAIMS + group for group in groups}
    assert not claims & groups


def test_a_task_of_a_query_says_which_batch_it_is() -> None:
    found = place()
    assert (found.epoch.group, found.epoch.number, found.partition) == ("spark-q-t", 7, 2)
    assert found.epoch.of_query
    assert mark_of(found.attempt) == found.epoch.mark == mark_of(marked(found.epoch.mark))
    assert 0 <= found.attempt < 2**63


def test_each_attempt_has_a_number_of_its_own() -> None:
    assert place(3).attempt != place(4).attempt


def test_the_mark_is_that_of_one_execution_of_the_batch() -> None:
    mark = place().epoch.mark
    assert place(**{"spark.sql.execution.id": "11"}).epoch.mark == mark  # Another write of it.
    for name in ("spark.app.id", "spark.app.startTime", "spark.sql.execution.root.id"):
        assert place(**{name: "8"}).epoch.mark != mark


def test_a_task_of_no_query_writes_for_itself() -> None:
    context: Any = Context({"spark.sql.execution.root.id": "9"})
    found = place_of(context, OPTIONS, "alone")
    assert found.epoch == Epoch("alone", 0, 0, of_query=False)


# --- what the driver concludes ------------------------------------------------------------------


def test_winners_are_those_that_wrote_something() -> None:
    found = verdict([TaskDone(EPOCH, "a"), TaskDone(EPOCH), TaskDone(EPOCH, "b")])
    assert found is not None
    assert (found.winners, found.committed_by) == (("a", "b"), None)


def test_a_repetition_says_who_was_first() -> None:
    found = verdict([TaskDone(EPOCH, committed_by=9), TaskDone(EPOCH, committed_by=9)])
    assert found is not None
    assert (found.winners, found.committed_by) == ((), 9)


def test_nothing_is_left_to_commit_of_what_is_written_at_least_once() -> None:
    assert verdict([TaskDone(None), TaskDone(None)]) is None


def test_a_commit_while_the_tasks_ran_is_somebody_elses() -> None:
    with pytest.raises(ConcurrentQueryError, match="batch 7 of spark-q-t"):
        verdict([TaskDone(EPOCH, "a"), TaskDone(EPOCH, committed_by=9)])


def test_a_query_may_have_a_name() -> None:
    # Spark hands what DataStreamWriter.queryName was given to the sink, as one of its options.
    given = {"queryname": "n", "topic": "t", "penstock.bootstrap.servers": "localhost:9092"}
    assert SinkOptions.load(given).topic == "t"


@pytest.mark.parametrize("epoch", [EPOCH, Epoch("spark-batch-x", 0, 0, of_query=False)])
def test_the_group_of_a_write_of_its_own_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, epoch: Epoch
) -> None:
    committed: list[tuple[str, int, bool]] = []

    class Commits(contextlib.AbstractContextManager["Commits"]):
        def __init__(self, servers: Any, group: str, **settings: Any) -> None:
            self.group = group

        def __exit__(self, *error: object) -> None:
            pass

        def commit(self, number: int, winners: list[str], *, ends_group: bool, **_: bytes) -> bool:
            committed.append((self.group, number, ends_group))
            return False

    monkeypatch.setattr(exactly_once, "GroupCommits", Commits)
    plan = SinkPlan(OPTIONS, ("value",), "spark-batch-x")
    exactly_once.commit(plan, [TaskDone(epoch, "a-handle")], one=True)
    assert committed == [(epoch.group, epoch.number, not epoch.of_query)]
    if not epoch.of_query:
        exactly_once.abort(plan, [])
        assert committed[1:] == [("spark-batch-x", 0, True)]


# --- replays ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (Content(3, "a"), Content(3, "a"), False),
        (Content(3, "a"), Content(3, "b"), True),
        # A query may make other rows of the same, and the plan says that it is the same.
        (Content(3, "a"), Content(4, "a"), False),
        (Content(3, "a"), Content(3, ""), False),
        (Content(3, ""), Content(4, "b"), True),
    ],
)
def test_batches_are_told_apart_by_plans_or_else_by_rows(
    one: Content, other: Content, differs: bool
) -> None:
    assert one.differs_from(other) is differs
    assert other.differs_from(one) is differs
    assert Content.decode(one.encode()) == one


@pytest.mark.parametrize("metadata", [b"", b"planned", b"[]", b'{"rows": 1}', b"\xff"])
def test_commits_of_others_say_nothing_of_their_content(metadata: bytes) -> None:
    assert Content.decode(metadata) is None


def test_a_plan_is_the_file_of_its_offsets(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a place"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "7").write_text("v1")
    found = plan_of(str(checkpoint), 7)
    assert found
    assert plan_of(checkpoint.as_uri(), 7) == found
    (checkpoint / "offsets" / "8").write_text("v2")
    assert plan_of(str(checkpoint), 8) not in ("", found)
    assert plan_of(str(checkpoint), 9) == ""
    assert plan_of("hdfs://somewhere/else", 7) == ""
    assert plan_of(None, 7) == ""


# --- what cannot be committed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (
            RecordTooLargeError("9 bytes"),
            "RecordTooLargeError: 9 bytes; next: raise the topic's max",
        ),
        (InvalidRecordError("no key"), "InvalidRecordError: no key; next: mend these rows before"),
        (RequestTimedOutError("late"), "RequestTimedOutError: late; next: see to the brokers"),
    ],
)
def test_a_write_that_failed_says_why_and_what_to_do_in_spark(
    cause: PenstockError, says: str
) -> None:
    dropped = TransactionAbortableError("next: abort(), then begin anew")
    dropped.__cause__ = cause
    error = TransactionAbortableError("next: abort(), then begin anew")
    error.__cause__ = dropped
    failed = write_failed(Place(EPOCH, 3, 1), error)
    assert "what task 3 of batch 7 of spark-q-t has written" in str(failed)
    assert says in str(failed)
    assert "abort()" not in str(failed)
    assert failed.__cause__ is cause


def test_a_transaction_that_the_cluster_ended_is_its_own_cause() -> None:
    error = TransactionAbortableError("it timed out")
    failed = write_failed(Place(EPOCH, 3, 1), error)
    assert "TransactionAbortableError: it timed out; next: " in str(failed)
    assert failed.__cause__ is error
