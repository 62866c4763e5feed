from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition, format_topic_id
from penstock.wire.transport import (
    CHANNEL_OPTIONS,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    format_address,
    parse_address,
    tune_malloc,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9092", ("localhost", 9092)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("  broker-1.example:65535 ", ("broker-1.example", 65_535)),
        ("[::1]:9092", ("::1", 9092)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:",
        ":9092",
        "[]:9092",
        "localhost:65536",
        "localhost:-1",
        "localhost:9092a",
        "localhost:90 92",
        "9092",
    ],
)
def test_what_is_no_address_is_named(text):
    with pytest.raises(ValueError, match="is not an address; write host:port") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True),
    st.ip_addresses().map(str),
)


@given(host=hosts, port=st.integers(0, 65_535))
def test_addresses_are_read_as_they_are_written(host, port):
    assert parse_address(format_address(host, port)) == (host, port)


@given(text=st.text(max_size=30))
def test_any_text_is_an_address_or_a_value_error(text):
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert host
    assert 0 <= port <= 65_535


@pytest.mark.parametrize("options", [SERVER_OPTIONS, CHANNEL_OPTIONS])
def test_each_option_is_set_once_and_messages_may_be_large(options):
    assert len(dict(options)) == len(options)
    assert dict(options)["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
    assert dict(options)["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES


def test_tuning_the_allocator_is_harmless():
    tune_malloc()
    tune_malloc()
    assert len(bytearray(80 * 1024 * 1024)) == 80 * 1024 * 1024


def test_partitions_read_as_people_write_them():
    topic_id = TopicId(uuid.UUID("12345678-1234-5678-1234-567812345678").bytes)
    assert str(TopicPartition("orders", 3)) == "orders-3"
    assert str(TopicIdPartition(topic_id, 3)) == "12345678-1234-5678-1234-567812345678-3"
    assert format_topic_id(b"") == "?"


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("http://localhost:9092", "http"),
        ("HTTPS://localhost:9092/", "HTTPS"),
        (" PLAINTEXT://h:1 ", "PLAINTEXT"),
    ],
)
def test_a_url_is_refused_with_what_to_leave_out(text: str, scheme: str) -> None:
    with pytest.raises(ValueError, match=f"write HOST:PORT without {scheme}://, such as local"):
        parse_address(text)


@pytest.mark.parametrize("text", ["local/host:9092", "a b:9092"])
def test_a_host_with_what_no_host_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)
