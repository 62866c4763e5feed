"""The examples as programs, started as their docstrings say, with a Spark of their own."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paho.mqtt.client as mqtt
import pika
import pytest

from penstock.pipeline.connectors.messaging.mqtt import MqttOptions, MqttReader
from tests.integration.ports import free_ports
from tests.pipeline.projects import SPARK_TIMEOUT_S, environment
from tests.pipeline.streams import COMPACTED, Streams
from tests.support import wait_until
from tests.unit.pipeline.fake_elasticsearch import running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
# Of what demos run (test_access_log.py) one is a program that goes on until Ctrl-C.
NAMES = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*.py")
    if not (path.parent / "demo.py").exists() or path.name in ("queries.py", "detect.py")
)


class Program:
    """An example in a group of processes of its own, as a terminal would start it."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self.log = directory / "log"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / name), *arguments],
                cwd=directory,
                env={**environment(directory), "SPARK_LOCAL_DIRS": str(directory)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def interrupt(self) -> None:
        """Ctrl-C, which all processes of a terminal hear."""
        os.killpg(self._process.pid, signal.SIGINT)

    def status(self) -> int:
        """With what it ended."""
        return self._process.wait(SPARK_TIMEOUT_S)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def last_line(self) -> str:
        return self.log.read_text().splitlines()[-1]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(directory: Path, name: str, *arguments: str) -> Iterator[Program]:
    program = Program(directory, name, *arguments)
    try:
        yield program
    finally:
        program.kill()


def run(directory: Path, name: str, *arguments: str) -> None:
    with started(directory, name, *arguments, "--once") as program:
        assert program.status() == 0, program.log.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_is_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    first = (EXAMPLES / name).read_text().splitlines()[0].strip('"')
    assert " ".join(said.split()).count(first) == 1
    assert "--once" in said


def test_one_goes_on_until_ctrl_c_and_then_where_it_stopped(streams: Streams) -> None:
    orders, target = streams.topic("orders"), streams.topic("totals", **COMPACTED)
    arguments = (
        "streams/totals.py", "--bootstrap", streams.cluster.bootstrap,
        "--orders", orders, "--totals", target,
    )  # fmt: skip
    streams.send(orders, {"customer": "ann", "cents": 5})
    with started(streams.directory, *arguments) as program:
        wait_until(
            lambda: bool(streams.written(target)) or not program.is_running(),
            "the totals are written",
            SPARK_TIMEOUT_S,
        )
        assert program.is_running(), program.log.read_text()
        program.interrupt()
        assert program.status() == 0, program.log.read_text()
    assert "Traceback" not in program.log.read_text()
    streams.send(orders, {"customer": "ann", "cents": 6}, {"customer": "bob", "cents": 1})
    run(streams.directory, *arguments)
    assert streams.written(target) == {
        "ann": [{"orders": 1, "cents": 5}, {"orders": 2, "cents": 11}],
        "bob": [{"orders": 1, "cents": 1}],
    }


def test_a_wrong_address_is_said_in_a_line(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with started(tmp_path, "streams/enrich.py", "--bootstrap", address, "--once") as program:
        assert program.status() == 1
    line = program.last_line()
    assert line.startswith("QueryFailedError: query ")
    assert "BootstrapError: no bootstrap address could be used" in line
    assert f"{address}: connection refused" in line


def test_messages_of_a_queue_go_to_a_topic(streams: Streams, rabbitmq_port: int) -> None:
    topic, queue = streams.topic("orders"), "example"
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbitmq_port)) as broker:
        channel = broker.channel()
        channel.queue_declare(queue, durable=True)
        for number in range(3):
            channel.basic_publish("", queue, str(number).encode())
    run(
        streams.directory, "from_amqp.py", f"amqp://127.0.0.1:{rabbitmq_port}", queue,
        "--bootstrap", streams.cluster.bootstrap, "--topic", topic,
    )  # fmt: skip
    assert streams.written(topic) == {queue: [0, 1, 2]}


def test_what_is_published_goes_to_a_topic(streams: Streams, mosquitto_port: int) -> None:
    topic, url = streams.topic("sensors"), f"mqtt://127.0.0.1:{mosquitto_port}"
    # As if it had run before: from then on the broker keeps what is published.
    before = MqttReader(
        MqttOptions.load({"url": url, "topics": "example/#", "clientId": "example"})
    )
    before.initialOffset()
    before.stop()
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.connect("127.0.0.1", mosquitto_port)
    client.loop_start()
    for number in range(3):
        client.publish("example/x", str(number), qos=1).wait_for_publish(30)
    client.disconnect()
    client.loop_stop()
    run(
        streams.directory, "from_mqtt.py", url, "example/#", "--client-id", "example",
        "--bootstrap", streams.cluster.bootstrap, "--topic", topic,
    )  # fmt: skip
    assert streams.written(topic) == {"example/x": [0, 1, 2]}


def test_what_each_key_said_last_goes_to_elasticsearch(streams: Streams) -> None:
    topic = streams.topic("users")
    streams.put(topic, ann={"age": 1}, bob={"age": 2})
    streams.put(topic, ann={"age": 3}, bob=None)
    with running() as fake:
        run(
            streams.directory, "to_elasticsearch.py", topic, fake.url,
            "--bootstrap", streams.cluster.bootstrap,
        )  # fmt: skip
        assert fake.of(topic.lower()) == {"ann": {"age": 3}, "bob": None}
