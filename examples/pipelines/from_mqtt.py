"""Moves what sensors publish by MQTT into a topic, keyed by the topics they publish under.

Run it with ``penstock dev`` and a Mosquitto. What is published before its first start is not seen;
from then on the broker keeps what comes while it is away::

    penstock topics create sensors
    python examples/pipelines/from_mqtt.py mqtt://localhost 'sensors/#' --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until nothing comes for a while."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="the broker's, such as mqtt://localhost")
    parser.add_argument("filter", help="which of the broker's topics, such as sensors/+/t")
    parser.add_argument("--client-id", default="penstock-from-mqtt")
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--topic", default="sensors", help="where messages go")
    parser.add_argument("--checkpoints", default="checkpoints/from-mqtt")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    with session("from-mqtt") as spark:
        messages = (
            spark.readStream.format("penstock-mqtt")
            .option("url", arguments.url)
            .option("topics", arguments.filter)
            .option("clientId", arguments.client_id)
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            messages.selectExpr("topic AS key", "payload AS value")
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
