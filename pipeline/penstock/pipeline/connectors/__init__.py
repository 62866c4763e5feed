"""Sources and sinks for other systems, each a format of Spark's of its own.

Importing this needs none of their libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Have this session know the formats of this package, by their names."""
    from penstock.pipeline.connectors.elasticsearch.sink import (  # noqa: PLC0415 - needs Spark.
        ElasticsearchDataSource,
    )
    from penstock.pipeline.connectors.messaging.amqp import (  # noqa: PLC0415 - needs Spark.
        AmqpDataSource,
    )
    from penstock.pipeline.connectors.messaging.mqtt import (  # noqa: PLC0415 - needs Spark.
        MqttDataSource,
    )

    for source in (ElasticsearchDataSource, AmqpDataSource, MqttDataSource):
        spark.dataSource.register(source)
