"""Columns to records: what a table says is what is written, and nothing is queued of a bad one."""

from __future__ import annotations

import datetime
import sys
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from penstock.client import (
    AsyncProducer,
    ConfigurationError,
    InvalidPartitionsError,
    InvalidRequestError,
    Producer,
    RecordTooLargeError,
    SerializationError,
)
from penstock.client.core.partitioner import partition_for_key
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster

COUNT = 40_000  # More than one chunk.
VALUES = [None if number % 7 == 0 else b"value %d" % number for number in range(COUNT)]
KEYS = [b"key %d" % (number % 97) for number in range(COUNT)]
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


def records_of(cluster: FakeCluster, number: int) -> list[Any]:
    return cluster.partition("t", number).records()


def test_rows_are_written_in_their_order_with_their_keys_and_times(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    table = pa.table(
        {
            "timestamp": pa.array(range(COUNT), pa.int64()),
            "value": pa.array(VALUES, pa.large_binary()),
            "key": pa.array([key.decode() for key in KEYS], pa.string()),
        }
    )
    with Producer(cluster.bootstrap) as producer:
        places = producer.send_arrow("t", table).result(60)
        assert len(places) == COUNT
        assert places[17].timestamp_ms == 17
        there = producer.send_arrow("t", table.slice(20, 10).to_batches()[0], partition=1)
        assert {place.partition for place in there.result(30)} == {1}
    for number in range(3):
        wanted = [
            (time_ms, key, value)
            for time_ms, (key, value) in enumerate(zip(KEYS, VALUES, strict=True))
            if partition_for_key(key, 3) == number
        ]
        found = [(one.timestamp_ms, one.key, one.value) for one in records_of(cluster, number)]
        assert found[: len(wanted)] == wanted


async def test_headers_and_partitions_have_columns_too(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    time = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "value": pa.array(["a", "b", None]),
            "partition": pa.array([2, None, 0], pa.int64()),
            "headers": pa.array([[("h", b"1"), ("h", None)], None, []], pa.list_(HEADER)),
            "timestamp": pa.array([time] * 3, pa.timestamp("us", tz="UTC")),
        }
    )
    async with AsyncProducer(cluster.bootstrap) as producer:
        places = await (await producer.send_arrow("t", table))
        empty = await (await producer.send_arrow("t", table.slice(0, 0)))
    assert [places[0].partition, places[2].partition] == [2, 0]
    assert len(empty) == 0
    [record] = [one for one in records_of(cluster, 2) if one.value == b"a"]
    assert record.headers == (("h", b"1"), ("h", None))
    assert record.timestamp_ms == int(time.timestamp() * 1000)
    assert records_of(cluster, 0)[-1].value is None


def test_many_rows_keep_their_headers(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 1))
    headers: list[Any] = [
        [("a", b"%d" % number), ("n\xe4me", None)][: number % 4] if number % 4 != 3 else None
        for number in range(COUNT)
    ]
    table = pa.table(
        {
            "value": pa.array(VALUES, pa.binary()),
            "headers": pa.array(headers, pa.list_(HEADER)),
            "partition": pa.array([0, None] * (COUNT // 2), pa.int32()),
        }
    )
    with Producer(cluster.bootstrap) as producer:
        assert len(producer.send_arrow("t", table.slice(1)).result(60)) == COUNT - 1
    found = [(one.value, list(one.headers)) for one in records_of(cluster, 0)]
    wanted = [(value, some or []) for value, some in zip(VALUES, headers, strict=True)]
    assert found == wanted[1:]


VALUE = pa.array([b"v"])


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"key": VALUE}, InvalidRequestError, "value, and at most once"),
        ({"value": VALUE, "offset": pa.array([1])}, InvalidRequestError, "are value, offset"),
        ({"value": pa.array([1])}, InvalidRequestError, "'value' is int64: binary"),
        ({"value": VALUE, "timestamp": pa.array(["x"])}, InvalidRequestError, "'timestamp' is"),
        (
            {"value": VALUE, "timestamp": pa.array([None], pa.int64())},
            InvalidRequestError,
            "timestamp is null",
        ),
        ({"value": VALUE, "timestamp": pa.array([-5])}, SerializationError, "timestamp_ms=-5"),
        ({"value": VALUE, "headers": pa.array([1])}, InvalidRequestError, "'headers' is"),
        (
            {"value": VALUE, "headers": pa.array([[(None, b"1")]], pa.list_(HEADER))},
            SerializationError,
            "header",
        ),
        (
            {"value": VALUE, "headers": pa.array([[None]], pa.list_(HEADER))},
            SerializationError,
            "header None",
        ),
        (
            {
                "value": VALUE,
                "headers": pa.array([[("h", b"h" * 2_000_000)]], pa.list_(HEADER)),
            },
            RecordTooLargeError,
            "2000",
        ),
        ({"value": VALUE, "partition": pa.array([-1])}, InvalidPartitionsError, "0 to 2"),
        ({"value": VALUE, "partition": pa.array([2**40])}, InvalidRequestError, "'partition'"),
        (
            {"value": pa.array([b"v", b"w"]), "partition": pa.array([0, 7])},
            InvalidPartitionsError,
            "0 to 2",
        ),
        ({"value": pa.array([b"v", b"v" * 2_000_000])}, RecordTooLargeError, "2000"),
    ],
    ids=str,
)
def test_a_bad_table_is_refused_before_anything_is_queued(
    background: Background, columns: dict[str, Any], error: type[Exception], says: str
) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(error, match=says):
            producer.send_arrow("t", pa.table(columns))
        producer.flush()
    assert [cluster.values("t", number) for number in range(3)] == [[], [], []]


def test_what_is_no_table_and_a_missing_pyarrow_are_said(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(InvalidRequestError, match=r"data=list: a pyarrow\.Table"):
            producer.send_arrow("t", [b"v"])
        without = mock.patch.dict(sys.modules, {"pyarrow": None})
        with without, pytest.raises(ConfigurationError, match=r"pip install 'penstock\[arrow\]'"):
            producer.send_arrow("t", pa.table({"value": VALUE}))
