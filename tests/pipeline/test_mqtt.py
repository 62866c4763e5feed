from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import paho.mqtt.client as mqtt
import pytest

from penstock.pipeline import ConnectorError, OptionError
from penstock.pipeline.connectors.messaging.mqtt import MqttDataSource, MqttOptions, MqttReader
from tests.pipeline.brokers import Cable
from tests.pipeline.reading import Driver, Rows, read
from tests.support import wait_until


class Sensors:
    """Publishes under a topic of its own."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def publish(self, *payloads: str, qos: int = 1, retain: bool = False) -> None:
        for payload in payloads:
            self.client.publish(f"{self.name}/x", payload, qos, retain).wait_for_publish(30)

    def options(self, port: int | None = None, **more: str) -> dict[str, str]:
        return {
            "url": f"mqtt://127.0.0.1:{port or self.port}", "topics": f"{self.name}/#",
            "clientId": self.name, "reconnectTimeout": "60s", **more,
        }  # fmt: skip

    def reader(self, port: int | None = None, **more: str) -> MqttReader:
        return MqttReader(MqttOptions.load(self.options(port, **more)))

    def subscribe(self) -> None:
        """Make the session that keeps what is published while nobody reads."""
        reader = self.reader()
        reader.initialOffset()
        reader.stop()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def sensors(mosquitto_port: int, request: pytest.FixtureRequest) -> Iterator[Sensors]:
    name = request.node.name.replace("[", "-").replace("]", "")
    with closing(Sensors(mosquitto_port, name)) as made:
        yield made


def payloads(rows: Rows) -> list[str]:
    return [row["payload"].decode() for row in rows]


def stopped(reader: MqttReader) -> Any:
    return closing(type("Stop", (), {"close": reader.stop}))


def test_all_columns(sensors: Sensors) -> None:
    sensors.publish("kept", retain=True)
    reader = sensors.reader()
    with stopped(reader):
        driver = Driver(reader)
        driver.plan_of(1)
        (kept,) = driver.rows()
        sensors.publish("ä", qos=0)
        (row,) = driver.until(1)
    at = row.pop("timestamp")
    assert abs(datetime.datetime.now(datetime.UTC) - at) < datetime.timedelta(hours=1)
    name = f"{sensors.name}/x"
    assert row == {
        "topic": name, "payload": "ä".encode(), "qos": 0, "retain": False, "duplicate": False,
    }  # fmt: skip
    assert (kept["payload"], kept["qos"], kept["retain"]) == (b"kept", 1, True)


def test_what_spark_has_not_noted_stays_with_the_broker(sensors: Sensors) -> None:
    sensors.subscribe()
    sensors.publish("a", "b", "c")
    reader = sensors.reader()
    with stopped(reader):
        driver = Driver(reader)
        driver.plan_of(3)
        assert payloads(driver.rows()) == payloads(driver.rows()) == ["a", "b", "c"]

    again = sensors.reader()
    with stopped(again):
        assert read(again, driver.start, driver.end) == []
        following = Driver(again, driver.end)
        following.plan_of(3)
        assert payloads(following.rows()) == ["a", "b", "c"]
        assert all(row["duplicate"] for row in following.rows())
        assert not following.plan()

    last = sensors.reader()
    with stopped(last):
        sensors.publish("d")
        assert payloads(Driver(last).until(1)) == ["d"]


def test_the_prefetch_bounds_what_is_held(sensors: Sensors) -> None:
    sensors.subscribe()
    wanted = [str(number) for number in range(25)]
    sensors.publish(*wanted)
    reader = sensors.reader(prefetch="10")
    with stopped(reader):
        driver = Driver(reader)
        driver.plan_of(10)
        rows = driver.rows()
        rows += driver.until(15)
    assert payloads(rows) == wanted


def test_a_connection_that_breaks_loses_and_doubles_nothing(sensors: Sensors) -> None:
    cable = Cable(sensors.port)
    reader = sensors.reader(cable.port)
    with closing(cable), stopped(reader):
        driver = Driver(reader)
        sensors.publish("a", "b")
        driver.plan_of(2)
        rows = driver.rows()
        cable.cut()
        # It has noticed: what is done with before that comes again, its acknowledgement being lost.
        wait_until(lambda: cable.refused, "the reader tries to connect anew")
        assert driver.rows() == rows
        sensors.publish("c")
        cable.plug_in()
        rows += driver.until(1)
        sensors.publish("d")
        rows += driver.until(1)
        assert not driver.plan()
    assert payloads(rows) == ["a", "b", "c", "d"]


def test_when_a_server_is_gone_the_next_takes_over(sensors: Sensors) -> None:
    # Two ways to one broker, as to a cluster's nodes: the session is the same.
    one, other = Cable(sensors.port), Cable(sensors.port)
    reader = sensors.reader(url=f"mqtt://127.0.0.1:{one.port},mqtt://127.0.0.1:{other.port}")
    with closing(one), closing(other), stopped(reader):
        driver = Driver(reader)
        sensors.publish("a")
        rows = driver.until(1)
        wait_until(lambda: not driver.plan(), "the first batch to be done")
        one.cut()
        sensors.publish("b")
        rows += driver.until(1)
        wait_until(lambda: not driver.plan(), "the second batch to be done")
        one.plug_in()
        other.cut()
        sensors.publish("c")
        rows += driver.until(1)
    assert list(dict.fromkeys(payloads(rows))) == ["a", "b", "c"]


def test_a_server_that_does_not_answer_is_left_for_the_next(sensors: Sensors) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        first = f"mqtt://127.0.0.1:{silent.getsockname()[1]}"
        url = f"{first},mqtt://127.0.0.1:{sensors.port}"
        assert MqttDataSource(sensors.options(url=url, connectTimeout="300ms")).schema()
        reader = sensors.reader(url=url, connectTimeout="300ms")
        with stopped(reader):
            driver = Driver(reader)
            sensors.publish("a")
            assert payloads(driver.until(1)) == ["a"]
        with pytest.raises(ConnectorError, match=r"no broker answers: .*: no answer of a broker"):
            MqttDataSource(sensors.options(url=first, connectTimeout="300ms")).schema()


def test_what_goes_wrong_in_the_clients_thread_fails_the_query(
    sensors: Sensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MqttReader.__module__}.to_row", lambda *_: 1 / 0)
    reader = sensors.reader()
    with stopped(reader):
        driver = Driver(reader)
        sensors.publish("a")
        with pytest.raises(ConnectorError, match=r"ZeroDivisionError: .*report this"):
            wait_until(driver.plan, "a failure")


def test_an_outage_that_lasts_fails_the_query(sensors: Sensors) -> None:
    cable = Cable(sensors.port)
    reader = sensors.reader(cable.port, reconnectTimeout="0ms")
    with closing(cable), stopped(reader):
        driver = Driver(reader)
        cable.cut()
        with pytest.raises(ConnectorError, match=r"no connection for 0 s: .*reconnectTimeout"):
            wait_until(driver.plan, "a failure")


def test_two_queries_under_one_name_are_told(sensors: Sensors) -> None:
    reader, other = sensors.reader(), sensors.reader()
    with stopped(reader), stopped(other):
        driver = Driver(reader)
        other.initialOffset()
        with pytest.raises(ConnectorError, match="give each query a clientId of its own"):
            wait_until(driver.plan, "a failure")


def test_a_query_that_ends_reads_until_it_is_quiet(sensors: Sensors) -> None:
    sensors.subscribe()
    wanted = [str(number) for number in range(25)]
    sensors.publish(*wanted)
    reader = sensors.reader(prefetch="10", availableNowQuiet="1s")
    with stopped(reader):
        reader.prepareForTriggerAvailableNow()
        driver = Driver(reader)
        rows: Rows = []
        while driver.plan():
            rows += driver.rows()
    assert payloads(rows) == wanted


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"username": "ann", "password": "wrong"}, r"refuses client '.*', user 'ann': .*next:"),
        ({"url": "mqtt://127.0.0.1:1"}, r"no broker answers: 127\.0\.0\.1:1: .*check option url"),
        ({"url": "mqtt://none.invalid"}, r"no broker answers: none\.invalid:1883"),
    ],
)
def test_what_is_wrong_is_said_by_load(sensors: Sensors, wrong: dict[str, str], match: str) -> None:
    with pytest.raises(ConnectorError, match=match):
        MqttDataSource({**sensors.options(), **wrong}).schema()


def test_a_check_leaves_the_query_that_runs_alone(sensors: Sensors) -> None:
    reader = sensors.reader()
    with stopped(reader):
        driver = Driver(reader)
        options = {**sensors.options(), "username": "ann", "password": "secret"}
        assert MqttDataSource(options).schema().fieldNames()[0] == "topic"
        sensors.publish("a")
        assert payloads(driver.until(1)) == ["a"]


GOOD = {"url": "mqtt://a", "topics": "t", "clientId": "c"}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"url": "tcp://a"}, r"mqtt://host:port or mqtts://"),
        ({"url": "mqtt://a/path"}, "MQTT has no path"),
        ({"url": "mqtt://a..b"}, r"mqtt://host:port or mqtts://"),
        ({"url": "mqtts://a,mqtt://b"}, r"mqtt:// and mqtts://, so that password and messages"),
        ({"topics": "a/#/b"}, "'a/#/b' is no filter"),
        ({"topics": "a+/b"}, r"'a\+/b' is no filter"),
        ({"topics": "a,"}, "'' is no filter"),
        ({"qos": "2"}, "a whole number from 0 to 1"),
        ({"sessionExpiry": "0"}, "from 1s to 49710d"),
        ({"clientid": ""}, "clientid"),
        ({"client": "c"}, "unknown option client; did you mean clientId"),
    ],
)
def test_options_that_are_wrong(given: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        MqttOptions.load({**GOOD, **given})


def test_a_client_id_is_wanted() -> None:
    with pytest.raises(OptionError, match="option clientId is missing; the broker keeps messages"):
        MqttOptions.load({"url": "mqtt://a", "topics": "t"})
