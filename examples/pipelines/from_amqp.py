"""Moves the messages of a RabbitMQ queue into a topic, keyed by their routing keys.

Run it with ``penstock dev`` and a RabbitMQ that has the queue::

    python examples/pipelines/from_amqp.py localhost:9092 orders amqp://localhost orders
"""

from __future__ import annotations

import argparse

from penstock.pipeline import session
from penstock.pipeline.connectors import register


def main() -> None:
    """Go on until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap")
    parser.add_argument("topic")
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("--username", default="guest")
    parser.add_argument("--password", default="guest")
    parser.add_argument("--checkpoints", default="checkpoints/from-amqp")
    arguments = parser.parse_args()
    spark = session("from-amqp")
    register(spark)
    messages = (
        spark.readStream.format("penstock-amqp")
        .option("url", arguments.url)
        .option("username", arguments.username)
        .option("password", arguments.password)
        .option("queue", arguments.queue)
        .load()
    )
    query = (
        messages.selectExpr("routingKey as key", "body as value")
        .writeStream.format("penstock")
        .option("penstock.bootstrap.servers", arguments.bootstrap)
        .option("topic", arguments.topic)
        .option("checkpointLocation", arguments.checkpoints)
        .start()
    )
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
