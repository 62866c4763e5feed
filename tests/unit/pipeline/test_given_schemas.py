"""Sources that have columns of their own take no other ones from ``.schema(...)``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from penstock.pipeline.connectors import jdbc
from penstock.pipeline.connectors.jdbc import PostgresDataSource
from penstock.pipeline.connectors.jdbc_queries import column_of
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource, AmqpReader
from penstock.pipeline.connectors.messaging.mqtt import MqttDataSource, MqttReader
from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.errors import OptionError
from penstock.pipeline.source.stream_reader import StreamReader

# Of the columns below, and each is just as wrong as the other: rows come by their position.
OTHERS = [
    StructType().add("b", StringType()).add("a", LongType()),
    StructType().add("a", IntegerType()).add("b", StringType()),
    StructType().add("a", LongType()),
]
SOURCES: dict[str, tuple[DataSource, type]] = {
    "penstock": (
        PenstockDataSource({"penstock.bootstrap.servers": "a:1", "subscribe": "t"}),
        StreamReader,
    ),
    "postgres": (
        PostgresDataSource({
            "url": "postgresql://none.invalid", "table": "t", "mode": "incrementing",
            "incrementingColumn": "a",
        }),
        jdbc._NewRowsReader,
    ),
    "amqp": (
        AmqpDataSource({"url": "amqp://none.invalid", "queue": "q", "checkOnLoad": "false"}),
        AmqpReader,
    ),
    "mqtt": (
        MqttDataSource({
            "url": "mqtt://none.invalid", "topics": "t", "clientId": "c", "checkOnLoad": "false",
        }),
        MqttReader,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PostgreSQL's table."""
    found = [column_of("a", "int8", None, None), column_of("b", "text", None, None)]
    monkeypatch.setattr(jdbc, "_columns", lambda options: found)


@pytest.mark.parametrize("other", OTHERS, ids=["swapped", "other type", "fewer"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_stream_with_another_schema_fails(name: str, other: StructType) -> None:
    source, _ = SOURCES[name]
    refused: Any = source.streamReader(other)
    with pytest.raises(OptionError, match=rf"the penstock.* has its own schema, struct<.*"
                       rf"{other.simpleString()} was given.*leave \.schema\(\) out"):  # fmt: skip
        refused.initialOffset()


@pytest.mark.parametrize("name", ["penstock", "postgres"])
def test_a_batch_query_with_another_schema_fails(name: str) -> None:
    source, _ = SOURCES[name]
    with pytest.raises(OptionError, match="has its own schema"):
        source.reader(OTHERS[0])
    source.reader(source.schema())


@pytest.mark.parametrize("name", SOURCES)
def test_its_own_schema_may_be_given(name: str) -> None:
    source, reader = SOURCES[name]
    as_spark_gives_it = StructType.fromJson(json.loads(source.schema().json()))
    assert isinstance(source.streamReader(as_spark_gives_it), reader)
