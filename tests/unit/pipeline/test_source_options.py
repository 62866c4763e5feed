from __future__ import annotations

import pickle

import pytest

from penstock.client import TopicPartition
from penstock.client.config import ConsumerConfig
from penstock.pipeline.errors import OptionError
from penstock.pipeline.source.offsets import EARLIEST, LATEST
from penstock.pipeline.source_options import Place, SourceOptions

BASE = {"penstock.bootstrap.servers": "localhost:9092"}


def load(**options: str) -> SourceOptions:
    return SourceOptions.load({**BASE, "subscribe": "orders", **options})


def load_without(**options: str) -> SourceOptions:
    return SourceOptions.load({**BASE, **options})


def test_the_defaults() -> None:
    found = load()
    assert (found.topics, found.pattern, found.assigned) == (("orders",), None, None)
    assert (found.starting, found.ending) == (None, None)
    assert (found.fail_on_data_loss, found.include_headers) == (True, False)
    assert found.isolation_level == "read_committed"
    assert (found.group_id_prefix, found.min_partitions, found.max_rows) == ("spark", 1, 25_000)
    assert found.for_batch() is found.for_stream() is found
    assert pickle.loads(pickle.dumps(found)) == found


def test_all_of_them() -> None:
    found = load(**{
        "subscribe": "b, a,b", "startingOffsets": '{"a":{"0":5},"b":{"0":-2}}',
        "maxOffsetsPerTrigger": "10", "maxBytesPerTrigger": "20", "minOffsetsPerTrigger": "3",
        "maxTriggerDelay": "5m", "minPartitions": "4", "failOnDataLoss": "false",
        "includeHeaders": "TRUE", "isolation.level": "read_uncommitted", "groupIdPrefix": "team",
        "maxRecordsPerPartition": "70",
        "maxRecordsPerFetch": "50000", "penstock.fetch.max.wait.ms": "50",
    })  # fmt: skip
    assert found.topics == ("a", "b")
    a0, b0 = TopicPartition("a", 0), TopicPartition("b", 0)
    assert found.starting == Place(offsets={a0: 5, b0: EARLIEST})
    assert (found.max_offsets, found.max_bytes, found.min_offsets) == (10, 20, 3)
    assert (found.max_delay_ms, found.min_partitions, found.max_rows) == (300_000, 4, 50_000)
    assert found.max_per_partition == 70
    assert (found.fail_on_data_loss, found.include_headers) == (False, True)
    assert (found.isolation_level, found.group_id_prefix) == ("read_uncommitted", "team")
    assert found.clients.of(ConsumerConfig) == {"fetch_max_wait_ms": 50}


def test_names_count_in_any_case_as_spark_lowers_them() -> None:
    lowered = {key.lower(): value for key, value in {**BASE, "subscribePattern": "a.*"}.items()}
    assert SourceOptions.load(lowered).pattern == "a.*"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"assign": '{"a": [0]}'}, "subscribe and assign contradict each other"),
        ({"startingOffset": "earliest"}, "unknown option startingOffset; did you mean startingO"),
        ({"kafka.bootstrap.servers": "h:1"}, "unknown option kafka.bootstrap.servers"),
        ({"startingOffsets": "earlest"}, "startingOffsets='earlest': earliest, latest or"),
        ({"startingOffsets": '{"a":{"0":1}}'}, "it and subscribe name different topics"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "contradict each other"),
        ({"endingOffsets": "latest", "endingTimestamp": "5"}, "contradict each other"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestamp": "{}"}, "contradict each other"),
        ({"startingOffsets": "latest", "startingOffsetsByTimestamp": "{}"}, "contradict"),
        ({"startingOffsetsByTimestamp": '{"a":{"0":1}}'}, "it and subscribe name different topi"),
        ({"startingOffsetsByTimestamp": '{"orders":{"0":-1}}'}, "-1 is no time in ms"),
        ({"endingOffsetsByTimestamp": "5"}, "endingOffsetsByTimestamp='5': a JSON object"),
        ({"startingOffsetsByTimestampStrategy": "latest"}, "and neither is given"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "x"}, "latest, error"),
        ({"startingTimestamp": "yesterday"}, "a whole number from 0 to"),
        ({"maxOffsetsPerTrigger": "0"}, "a whole number from 1 to"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "is above"),
        ({"maxTriggerDelay": "5m"}, "minOffsetsPerTrigger .*is not given"),
        ({"subscribe": "a,,b"}, "subscribe="),
        ({"subscribe": "a/b"}, "subscribe="),
        ({"isolation.level": "serializable"}, "one of read_committed, read_uncommitted"),
        ({"penstock.group.id": "g"}, "write groupIdPrefix instead"),
        ({"penstock.auto.offset.reset": "latest"}, "write startingOffsets"),
        ({"penstock.max.poll.records": "9"}, "write maxRecordsPerFetch"),
        ({"penstock.enable.auto.commit": "true"}, "leave it out"),
        ({"groupIdPrefix": "x" * 1000}, "groupIdPrefix="),
        ({"path": "orders"}, "unknown option path"),
    ],
)
def test_what_is_wrong_is_refused(options: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        load(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "exactly one of subscribe, subscribePattern or assign is wanted; none"),
        ({"subscribePattern": "a("}, "no regular expression"),
        ({"assign": '{"a": 5}'}, "assign=.*list of partitions"),
        ({"assign": '{"a": [0,1]}', "startingOffsets": '{"a":{"0":5}}'}, "such as a-1"),
        ({"assign": '{"a": [0,1]}', "endingOffsetsByTimestamp": '{"a":{"0":5}}'}, "such as a-1"),
    ],
)
def test_what_is_wrong_with_a_subscription(options: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        load_without(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams"),
        ({"groupIdPrefix": "g"}, "groupIdPrefix is for streams"),
        ({"startingOffsets": "latest"}, "cannot begin at the latest"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "cannot begin at the latest"),
        ({"endingOffsets": "earliest"}, "cannot end at the earliest"),
        ({"endingOffsets": '{"orders":{"0":-2}}'}, "cannot end at the earliest"),
    ],
)
def test_what_a_batch_query_cannot_have(options: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        load(**options).for_batch()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"orders":{"0":5}}'),
    ],
)
def test_what_a_stream_cannot_have(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is for batch queries"):
        load(**{name: value}).for_stream()


def test_places_by_time() -> None:
    a0 = TopicPartition("orders", 0)
    text = '{"orders":{"0":1000}}'
    found = load(startingOffsetsByTimestamp=text, endingOffsetsByTimestamp=text)
    assert found.starting == found.ending == Place(times_ms={a0: 1000})
    strict = {"startingOffsetsByTimestampStrategy": "error"}
    found = load(startingTimestamp="5", endingTimestamp="5", **strict)
    assert found.starting == Place(timestamp_ms=5, has_to_match=True)
    assert found.ending == Place(timestamp_ms=5)
    found = load(startingOffsetsByTimestamp=text, **strict)
    assert found.starting == Place(times_ms={a0: 1000}, has_to_match=True)


def test_the_level_may_be_given_as_the_clients_setting() -> None:
    assert load(**{"penstock.isolation.level": "read_uncommitted"}).isolation_level == (
        "read_uncommitted"
    )
    with pytest.raises(OptionError, match="contradict each other"):
        load(**{"penstock.isolation.level": "read_uncommitted", "isolation.level": _COMMITTED})


_COMMITTED = "read_committed"


def test_places_that_hold_later() -> None:
    a0 = TopicPartition("a", 0)
    assert Place(everywhere=EARLIEST).is_fixed
    assert Place(offsets={a0: 5}).is_fixed
    assert not Place(everywhere=LATEST).is_fixed
    assert not Place(offsets={a0: LATEST}).is_fixed
    assert not Place(timestamp_ms=5).is_fixed
    assert not Place(times_ms={a0: 5}).is_fixed
