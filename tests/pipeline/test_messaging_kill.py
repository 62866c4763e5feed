from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import paho.mqtt.client as mqtt
import pika
import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.connectors.messaging.mqtt import MqttOptions, MqttReader
from tests.pipeline import messaging_job

NAME = "killed"
COUNT = 60


def run(directory: Path, *arguments: str) -> int:
    """The job, in a group of processes that ends with it."""
    command = [sys.executable, "-m", "tests.pipeline.messaging_job", *arguments]
    with (directory / "log").open("ab") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    try:
        return started.wait(280)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@pytest.mark.timeout(600)
def test_a_driver_killed_between_write_and_commit_loses_nothing(
    spark: SparkSession, rabbitmq_port: int, mosquitto_port: int, tmp_path: Path
) -> None:
    options = {"url": f"mqtt://127.0.0.1:{mosquitto_port}", "topics": f"{NAME}/#"}
    subscriber = MqttReader(MqttOptions.load({**options, "clientId": NAME}))
    subscriber.initialOffset()
    subscriber.stop()
    publish(rabbitmq_port, mosquitto_port)
    arguments = [str(rabbitmq_port), str(mosquitto_port), NAME, str(tmp_path)]

    assert run(tmp_path, *arguments, "45") == -signal.SIGKILL
    output = tmp_path / "output"
    killed_at = len(output.read_text().splitlines())
    assert 45 <= killed_at < 2 * COUNT
    offsets = {path.name for path in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")}
    commits = {path.name for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")}
    assert len(offsets - commits) == 1, "it was to be killed with a batch under way"

    messaging_job.run(spark, (rabbitmq_port, mosquitto_port), NAME, tmp_path)
    seen = Counter(output.read_text().splitlines())
    wanted = {f"{broker} {number}" for broker in ("amqp", "mqtt") for number in range(COUNT)}
    assert seen.keys() == wanted
    # Written twice is at most what was under way.
    assert seen.total() - len(wanted) <= 40
    assert waiting(rabbitmq_port) == 0


def publish(amqp_port: int, mqtt_port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", amqp_port))
    channel = connection.channel()
    channel.queue_declare(NAME, durable=True)
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.connect("127.0.0.1", mqtt_port)
    client.loop_start()
    for number in range(COUNT):
        channel.basic_publish("", NAME, str(number).encode())
        client.publish(f"{NAME}/x", str(number), qos=1).wait_for_publish(30)
    connection.close()
    client.disconnect()
    client.loop_stop()


def waiting(port: int) -> int:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    try:
        found = connection.channel().queue_declare(NAME, durable=True, passive=True)
        return int(found.method.message_count)
    finally:
        connection.close()
