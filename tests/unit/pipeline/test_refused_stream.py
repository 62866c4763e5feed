"""Sources whose streams cannot be: Spark is told why by whatever it asks of the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.types import StructType

from penstock.pipeline.connectors.jdbc import PostgresDataSource
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource
from penstock.pipeline.connectors.messaging.mqtt import MqttDataSource
from penstock.pipeline.connectors.object_store import ObjectsDataSource
from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.errors import OptionError

WRONG: dict[str, DataSource] = {
    "penstock": PenstockDataSource({
        "penstock.bootstrap.servers": "a:1", "subscribe": "t", "endingOffsets": "latest",
    }),
    "postgres": PostgresDataSource({"url": "postgresql://none.invalid", "table": "t"}),
    "objects": ObjectsDataSource({"colour": "red"}),
    "amqp": AmqpDataSource({"colour": "red"}),
    "mqtt": MqttDataSource({"colour": "red"}),
}  # fmt: skip
ASKED: dict[str, Callable[[Any], object]] = {
    "initialOffset": lambda reader: reader.initialOffset(),
    "latestOffset": lambda reader: reader.latestOffset({}, None),
    "partitions": lambda reader: reader.partitions({}, {}),
    "read": lambda reader: reader.read(InputPartition(0)),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", WRONG)
def test_a_reader_that_cannot_be_says_why(name: str, asked: str) -> None:
    schema = WRONG[name].schema() if name == "penstock" else StructType()
    reader = WRONG[name].streamReader(schema=schema)
    with pytest.raises(OptionError):
        ASKED[asked](reader)
    reader.stop()
