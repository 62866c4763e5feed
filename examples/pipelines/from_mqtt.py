"""Moves what sensors publish by MQTT into a topic, keyed by the topics they publish under.

Run it with ``penstock dev`` and a Mosquitto::

    python examples/pipelines/from_mqtt.py localhost:9092 sensors mqtt://localhost 'sensors/#'
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
    parser.add_argument("filter", help="which of the broker's topics, such as sensors/+/t")
    parser.add_argument("--client-id", default="penstock-from-mqtt")
    parser.add_argument("--checkpoints", default="checkpoints/from-mqtt")
    arguments = parser.parse_args()
    spark = session("from-mqtt")
    register(spark)
    messages = (
        spark.readStream.format("penstock-mqtt")
        .option("url", arguments.url)
        .option("topics", arguments.filter)
        .option("clientId", arguments.client_id)
        .load()
    )
    query = (
        messages.selectExpr("topic as key", "payload as value")
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
