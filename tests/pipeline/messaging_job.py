"""What the test of killed drivers starts: one query over a queue and a topic, into a file.

    python -m tests.pipeline.messaging_job AMQP_PORT MQTT_PORT NAME DIRECTORY KILL_AT

When as many rows as ``KILL_AT`` are written this kills itself with all its processes: after a
batch is written and before Spark notes that it is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def main(amqp_port: str, mqtt_port: str, name: str, place: str, kill_at: str) -> None:
    """In a driver of its own."""
    directory = Path(place)
    spark = session(
        settings={
            "spark.driver.memory": "500m",
            "spark.local.dir": str(directory / "local"),
            "spark.driver.extraJavaOptions": "-XX:-UsePerfData -XX:TieredStopAtLevel=1",
        }
    )
    run(spark, (int(amqp_port), int(mqtt_port)), name, directory, int(kill_at))
    spark.stop()


def run(
    spark: SparkSession, ports: tuple[int, int], name: str, directory: Path, kill_at: int = 0
) -> None:
    """Read until both brokers, AMQP's and MQTT's, have nothing more."""
    amqp_port, mqtt_port = ports
    amqp = spark.readStream.format("penstock-amqp").options(
        url=f"amqp://127.0.0.1:{amqp_port}", queue=name, maxRowsPerTrigger="20"
    )
    mqtt = spark.readStream.format("penstock-mqtt").options(
        url=f"mqtt://127.0.0.1:{mqtt_port}", topics=f"{name}/#", clientId=name,
        maxRowsPerTrigger="20",
    )  # fmt: skip
    rows = (
        amqp.load()
        .selectExpr("'amqp' as broker", "cast(body as string) as text")
        .union(mqtt.load().selectExpr("'mqtt' as broker", "cast(payload as string) as text"))
    )
    output = directory / "output"

    def write(batch: DataFrame, _: int) -> None:
        lines = [f"{row.broker} {row.text}\n" for row in batch.collect()]
        with output.open("a") as file:
            file.writelines(lines)
        if kill_at and len(output.read_text().splitlines()) >= kill_at:
            os.killpg(0, signal.SIGKILL)

    query = (
        rows.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
