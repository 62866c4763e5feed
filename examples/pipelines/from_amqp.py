"""Moves the messages of a RabbitMQ queue into a topic, keyed by their routing keys.

Run it with ``penstock dev`` and a RabbitMQ that has the queue::

    penstock topics create orders
    python examples/pipelines/from_amqp.py amqp://localhost orders --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until the queue is empty."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="the broker's, such as amqp://localhost")
    parser.add_argument("queue")
    parser.add_argument("--username", default="guest")
    parser.add_argument("--password", default="guest")
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--topic", default="orders", help="where messages go")
    parser.add_argument("--checkpoints", default="checkpoints/from-amqp")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    with session("from-amqp") as spark:
        messages = (
            spark.readStream.format("penstock-amqp")
            .option("url", arguments.url)
            .option("username", arguments.username)
            .option("password", arguments.password)
            .option("queue", arguments.queue)
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            messages.selectExpr("routingKey AS key", "body AS value")
            .writeStream.format("penstock")
            .option("penstock.bootstrap.servers", arguments.bootstrap)
            .option("topic", arguments.topic)
            .option("checkpointLocation", arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
