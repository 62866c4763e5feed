"""What Spark looks for, as in pyspark_penstock: it takes one data source of each such module."""

from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource as DefaultSource

__all__ = ["DefaultSource"]
