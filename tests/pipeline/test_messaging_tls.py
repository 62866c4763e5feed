"""Messages over TLS, from brokers that want a certificate of who reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as mqtt
import pika
import pytest

from penstock.cli.certificates import Authority, TlsFiles, write_files
from penstock.pipeline import ConnectorError
from penstock.pipeline.connectors.messaging.amqp import AmqpDataSource, AmqpOptions, AmqpReader
from penstock.pipeline.connectors.messaging.mqtt import MqttOptions, MqttReader
from penstock.pipeline.connectors.tls import TlsOptions
from tests.pipeline.brokers import mosquitto, rabbitmq
from tests.pipeline.reading import Driver

pytestmark = pytest.mark.timeout(300)


class Party(NamedTuple):
    """A broker's port, and who may speak to it."""

    port: int
    tls: dict[str, str]

    def context(self) -> Any:
        return TlsOptions(
            self.tls["caFile"], self.tls["certificateFile"], self.tls["keyFile"], verify=True
        ).context("the test")


def party(directory: Path) -> tuple[TlsFiles, dict[str, str]]:
    """The files of a server, and the options of a client that it lets in."""
    authority = Authority()
    server = write_files(
        directory, "server", authority, authority.issue("server", ["localhost", "127.0.0.1"])
    )
    client = write_files(directory, "client", authority, authority.issue("client", ["client"]))
    options = {
        "caFile": str(client.ca),
        "certificateFile": str(client.certificate),
        "keyFile": str(client.key),
    }
    return server, options


@pytest.fixture(scope="module")
def mosquitto_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    directory = tmp_path_factory.mktemp("mosquitto-tls")
    server, client = party(directory / "tls")
    with mosquitto(directory, server) as port:
        yield Party(port, client)


@pytest.fixture(scope="module")
def rabbitmq_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    directory = tmp_path_factory.mktemp("rabbitmq-tls")
    server, client = party(directory / "tls")
    with rabbitmq(directory, server) as port:
        yield Party(port, client)


def stopped(reader: AmqpReader | MqttReader) -> Any:
    return closing(type("Stop", (), {"close": reader.stop}))


def test_mqtt(mosquitto_tls: Party) -> None:
    url = f"mqtts://localhost:{mosquitto_tls.port}"
    options = {"url": url, "topics": "x", "clientId": "tls", **mosquitto_tls.tls}
    reader = MqttReader(MqttOptions.load(options))
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.tls_set_context(mosquitto_tls.context())
    with stopped(reader):
        driver = Driver(reader)
        client.connect("localhost", mosquitto_tls.port)
        client.loop_start()
        client.publish("x", "hello", 1).wait_for_publish(30)
        (row,) = driver.until(1)
        client.disconnect()
        client.loop_stop()
    assert row["payload"] == b"hello"


def test_amqp(rabbitmq_tls: Party) -> None:
    parameters = pika.ConnectionParameters(
        "localhost", rabbitmq_tls.port, ssl_options=pika.SSLOptions(rabbitmq_tls.context())
    )
    with closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        channel.queue_declare("tls", durable=True)
        channel.basic_publish("", "tls", b"hello")
    url = f"amqps://localhost:{rabbitmq_tls.port}"
    reader = AmqpReader(AmqpOptions.load({"url": url, "queue": "tls", **rabbitmq_tls.tls}))
    with stopped(reader):
        (row,) = Driver(reader).until(1)
    assert row["body"] == b"hello"


@pytest.mark.parametrize(
    "wrong",
    [{"certificateFile": None, "keyFile": None}, {"caFile": None}],
    ids=["without a certificate", "of an unknown authority"],
)
def test_who_may_not_speak_is_told_at_load(rabbitmq_tls: Party, wrong: dict[str, None]) -> None:
    tls = {name: value for name, value in rabbitmq_tls.tls.items() if name not in wrong}
    url = f"amqps://localhost:{rabbitmq_tls.port}"
    source = AmqpDataSource({"url": url, "queue": "tls", "connectTimeout": "5s", **tls})
    with pytest.raises(ConnectorError, match=r"(?i)certificate|tls|ssl|connect"):
        source.schema()
