from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from penstock.client import AdminClient, AsyncConsumer, AsyncProducer, ConfigurationError
from penstock.client.config import (
    AdminConfig,
    AdminSettings,
    CommonConfig,
    ConsumerConfig,
    ConsumerSettings,
    ProducerConfig,
    ProducerSettings,
)
from penstock.client.offset_reset import duration_ms
from penstock.wire.compression import Compression


def producer(**settings: Any) -> ProducerConfig:
    return ProducerConfig.load("localhost:9092", settings)


def consumer(**settings: Any) -> ConsumerConfig:
    return ConsumerConfig.load("localhost:9092", settings)


def test_the_defaults_are_those_of_kafka_4() -> None:
    config = producer()
    assert (config.acks, config.acks_number, config.enable_idempotence) == ("all", -1, True)
    assert (config.linger_ms, config.batch_size, config.compression) == (5, 16_384, "none")
    assert (config.retries, config.delivery_timeout_ms) == (2**31 - 1, 120_000)
    assert (config.request_timeout_ms, config.max_request_size) == (30_000, 1_048_576)
    assert (config.buffer_memory, config.max_block_ms) == (33_554_432, 60_000)
    assert (config.retry_backoff_ms, config.retry_backoff_max_ms) == (100, 1_000)
    assert config.max_in_flight_requests_per_connection == 5
    reader = consumer(group_id="g")
    assert (reader.auto_offset_reset, reader.enable_auto_commit) == ("latest", True)
    assert (reader.auto_commit_interval_ms, reader.max_poll_records) == (5_000, 500)
    assert (reader.fetch_min_bytes, reader.fetch_max_bytes) == (1, 52_428_800)
    assert (reader.fetch_max_wait_ms, reader.max_partition_fetch_bytes) == (500, 2_097_152)
    assert (reader.session_timeout_ms, reader.max_poll_interval_ms) == (45_000, 300_000)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (ProducerConfig, ProducerSettings),
        (ConsumerConfig, ConsumerSettings),
        (AdminConfig, AdminSettings),
    ],
)
def test_what_the_type_checker_allows_is_what_is_there(
    config: type[CommonConfig], settings: type
) -> None:
    fields = {field.name for field in dataclasses.fields(config)} - {"bootstrap"}
    assert fields == set(typing.get_type_hints(settings))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("linger", "linger_ms"),
        ("lingerms", "linger_ms"),
        ("compression_type", "compression"),
        ("batchsize", "batch_size"),
        ("max_in_flight_requests", "max_in_flight_requests_per_connection"),
        ("idempotence", "enable_idempotence"),
    ],
)
def test_an_unknown_setting_names_the_near_one(name: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown producer setting '{name}'.*'{near}'"):
        producer(**{name: 1})


def test_an_unknown_setting_that_is_near_nothing_lists_all() -> None:
    with pytest.raises(ConfigurationError, match=r"the settings are .*auto_offset_reset"):
        consumer(xyzzy=1)


def test_a_transactional_producer_is_idempotent_or_refused() -> None:
    config = producer(transactional_id="billing", transaction_timeout_ms=10_000)
    assert (config.enable_idempotence, config.acks_number) == (True, -1)
    assert (config.transactional_id, config.transaction_timeout_ms) == ("billing", 10_000)
    for contradiction in (
        {"acks": 1},
        {"enable_idempotence": False},
        {"retries": 0},
        {"max_in_flight_requests_per_connection": 6},
    ):
        with pytest.raises(ConfigurationError, match="transactional_id contradicts"):
            producer(transactional_id="billing", **contradiction)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transactional_id": ""}, "must not be empty"),
        ({"transactional_id": "__attempt/1/2/3/g"}, "kept for the attempts of engines"),
        ({"transactional_id": "x" * 513}, "512 are allowed"),
        ({"transactional_id": 7}, "text or None"),
        ({"transaction_timeout_ms": 1}, "transactional_id is not"),
        ({"transactional_id": "t", "transaction_timeout_ms": 0}, "from 1"),
    ],
)
def test_what_no_transactional_producer_can_have_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        producer(**settings)


def test_every_client_refuses_at_once() -> None:
    for make in (AsyncProducer, AsyncConsumer, AdminClient):
        with pytest.raises(ConfigurationError, match=r"unknown .* setting 'foo'"):
            make("localhost:9092", foo=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linger_ms": -1}, "linger_ms=-1: a whole number from 0"),
        ({"linger_ms": 1.5}, "linger_ms=1.5"),
        ({"linger_ms": True}, "linger_ms=True"),
        ({"batch_size": "1"}, "batch_size='1'"),
        ({"max_request_size": 64 * 1024 * 1024}, "max_request_size"),
        ({"acks": 2}, "acks=2: one of 'all', 0, 1"),
        ({"acks": True}, "acks=True"),
        ({"compression": "brotli"}, "'none', 'gzip', 'snappy', 'lz4', 'zstd'"),
        ({"enable_idempotence": "yes"}, "True or False"),
        ({"client_id": 7}, "client_id=7: text"),
        ({"partitioner": "random"}, "'default', 'round_robin' or a callable"),
        ({"key_serializer": "avro"}, "'bytes', 'str', 'json' or pass a callable"),
        ({"acks": 1, "enable_idempotence": True}, "contradicts acks=1"),
        (
            {"max_in_flight_requests_per_connection": 6, "enable_idempotence": True},
            "brokers remember 5",
        ),
        ({"retries": 0, "enable_idempotence": True}, "contradicts retries=0"),
        ({"delivery_timeout_ms": 100, "request_timeout_ms": 200}, "make it at least 205"),
        ({"delivery_timeout_ms": 5}, "is not above linger_ms=5"),
        ({"retry_backoff_ms": 200, "retry_backoff_max_ms": 100}, "is above"),
    ],
)
def test_what_a_producer_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        producer(**settings)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_offset_reset": "smallest"}, "'earliest', 'latest', 'none' or 'by_duration:'"),
        ({"auto_offset_reset": 3}, "'earliest', 'latest', 'none' or 'by_duration:'"),
        ({"auto_offset_reset": "by_duration:3D"}, "such as P3D, PT1H or P1DT12H"),
        ({"isolation_level": "serializable"}, "'read_uncommitted', 'read_committed'"),
        ({"group_id": ""}, "names no group"),
        ({"group_id": 5}, "text or None"),
        ({"group_instance_id": "i"}, "group_id is not"),
        ({"enable_auto_commit": True}, "needs a group_id"),
        ({"max_poll_records": 0}, "from 1"),
        ({"value_deserializer": "xml"}, "'json'"),
    ],
)
def test_what_a_consumer_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        consumer(**settings)
    assert message in caught.value.message


def test_settings_that_follow_from_others() -> None:
    assert producer(acks=1).enable_idempotence is False
    assert producer(acks="0").acks_number == 0
    assert producer(acks=-1).enable_idempotence is True
    assert producer(delivery_timeout_ms=1_000).request_timeout_ms == 995
    assert producer(request_timeout_ms=500_000).delivery_timeout_ms == 500_005
    assert producer(retry_backoff_ms=5_000).retry_backoff_max_ms == 5_000
    assert producer(retry_backoff_max_ms=50).retry_backoff_ms == 50
    assert producer(compression="zstd").compression_kind is Compression.ZSTD
    assert consumer().enable_auto_commit is False


@pytest.mark.parametrize(
    ("servers", "found"),
    [
        ("a:1", (("a", 1),)),
        ("a:1, b:2", (("a", 1), ("b", 2))),
        (["a:1", "[::1]:2"], (("a", 1), ("::1", 2))),
    ],
)
def test_bootstrap_addresses(servers: Any, found: object) -> None:
    assert ProducerConfig.load(servers, {}).bootstrap == found


@pytest.mark.parametrize("servers", ["", "localhost", "a:b", [], [1], 9092, "a:70000"])
def test_bad_bootstrap_addresses(servers: Any) -> None:
    with pytest.raises(ConfigurationError, match="bootstrap_servers"):
        ProducerConfig.load(servers, {})


@pytest.mark.parametrize("servers", [[1], ["a:1", None], [b"a:1"], b"a:1", 9092])
def test_addresses_that_are_no_text_are_named_with_what_is_wanted(servers: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"bootstrap_servers=.*'host:port,host:port' or a"):
        ProducerConfig.load(servers, {})


def test_a_loaded_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        producer().linger_ms = 7  # type: ignore[misc]


@pytest.mark.parametrize("servers", ["http://localhost:9092", ["h:1", "http://localhost:9092"]])
def test_a_url_is_no_bootstrap_address(servers: str | list[str]) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT without http://"):
        ProducerConfig.load(servers, {})


@pytest.mark.parametrize("group_id", ["g" * 256, "\u00e9" * 128, "\ud800"])
def test_a_group_id_that_no_group_can_have_is_refused(group_id: str) -> None:
    with pytest.raises(ConfigurationError, match=r"group_id: .*choose (a shorter one|another)"):
        ConsumerConfig.load("h:1", {"group_id": group_id})
    ConsumerConfig.load("h:1", {"group_id": "g" * 255})


@pytest.mark.parametrize(
    ("duration", "milliseconds"),
    [
        ("P3D", 259_200_000),
        ("PT1H", 3_600_000),
        ("P1DT2H3M4S", 93_784_000),
        ("PT0.25S", 250),
        ("PT90M", 5_400_000),
        ("PT0S", 0),
    ],
)
def test_a_reset_by_duration_is_one_of_iso_8601(duration: str, milliseconds: int) -> None:
    policy = f"by_duration:{duration}"
    assert consumer(auto_offset_reset=policy).auto_offset_reset == policy
    assert duration_ms(policy) == milliseconds


@pytest.mark.parametrize(
    "duration", ["", "P", "PT", "P1DT", "-PT1H", "P1Y", "P2W", "1H", "PT1.5H", "PT1H ", "pt1h"]
)
def test_what_is_no_duration_is_refused(duration: str) -> None:
    with pytest.raises(ConfigurationError, match="such as P3D, PT1H or P1DT12H"):
        consumer(auto_offset_reset=f"by_duration:{duration}")


def test_both_isolation_levels_are_taken() -> None:
    assert consumer().isolation_level == "read_uncommitted"
    assert consumer(isolation_level="read_committed").isolation_level == "read_committed"
