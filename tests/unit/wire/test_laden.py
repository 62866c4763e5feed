"""Messages whose records lie beside them say what Protocol Buffers' own objects say."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.v1 import common_pb2, log_pb2, replication_pb2
from penstock.wire.laden import FETCH_RESPONSE, PRODUCE_REQUEST, REPLICATION_PUSH, LadenType
from penstock.wire.varint import encode_unsigned

LARGE = 20_000
"""Bytes of records with which a message is not copied any more."""

INT64 = st.integers(-(2**63), 2**63 - 1)
RECORDS = st.one_of(
    st.binary(max_size=50),
    st.builds(
        lambda byte, size: byte * size, st.binary(min_size=1, max_size=1), st.integers(0, 2 * LARGE)
    ),
)


def fill_produce(message: Any, number: int, records: bytes) -> None:
    message.partitions.add(
        partition=common_pb2.TopicPartition(topic="orders", partition=3, topic_id=b"\x7a" * 16),
        current_leader_epoch=number & 0xFFFF,
        records=records,
    )


def fill_fetch(message: Any, number: int, records: bytes) -> None:
    result = message.partitions.add(
        high_watermark=number, log_start_offset=-1, records=records, records_crc=0x7A7A7A7A
    )
    if number % 2:
        result.error.message = "x" * (number % 300)
        result.aborted_transactions.add(producer_id=number, first_offset=5)


def fill_push(message: Any, number: int, records: bytes) -> None:
    push = message.pushes.add(high_watermark=number, base_offset=number, records=records)
    push.partition.topic_id = b"\x7a" * 16
    if number % 3 == 0:
        push.producers = b"p" * (number % 5000)


KINDS: list[Any] = [
    (PRODUCE_REQUEST, log_pb2.ProduceRequest(correlation_id=7, timeout_ms=-1), fill_produce),
    (FETCH_RESPONSE, log_pb2.FetchResponse(), fill_fetch),
    (REPLICATION_PUSH, replication_pb2.ReplicationFetchResponse(sequence=2**40), fill_push),
]


def filled(head: Any, fill: Any, entries: list[tuple[int, bytes]]) -> Any:
    message = type(head)()
    message.CopyFrom(head)
    for number, records in entries:
        fill(message, number, records)
    return message


@given(st.sampled_from(KINDS), st.lists(st.tuples(INT64, RECORDS), max_size=5))
@example(KINDS[0], [(1, bytes(LARGE))])
@example(KINDS[1], [(1, b""), (2, bytes(LARGE)), (3, b"few")])
@example(KINDS[2], [(3, bytes(LARGE)), (6, bytes(LARGE))])
def test_what_is_parsed_and_what_is_laid_is_the_message(
    kind: tuple[LadenType[Any], Any, Any], entries: list[tuple[int, bytes]]
) -> None:
    laden_type, head, fill = kind
    message = filled(head, fill, entries)
    laden = laden_type.parse(message.SerializeToString())
    assert [bytes(part) for part in laden.records] == [records for _, records in entries]
    assert laden.records_bytes == sum(len(records) for _, records in entries)
    assert laden_type.whole(laden) == message
    without = laden_type.parse(
        filled(head, fill, [(n, b"") for n, _ in entries]).SerializeToString()
    )
    without.records = [memoryview(records) for _, records in entries]
    assert type(head).FromString(laden_type.to_bytes(without)) == message
    assert b"".join(laden_type.parts(without)) == laden_type.to_bytes(without)


def test_large_records_are_views_of_what_came() -> None:
    _, head, fill = KINDS[0]
    data = filled(head, fill, [(1, bytes(LARGE)), (2, b"few")]).SerializeToString()
    large, few = PRODUCE_REQUEST.parse(data).records
    assert isinstance(large, memoryview)
    assert large.obj is data
    assert bytes(few) == b"few"


def test_large_records_are_not_copied_into_what_goes() -> None:
    _, head, fill = KINDS[2]
    laden = REPLICATION_PUSH.parse(filled(head, fill, [(1, b"")]).SerializeToString())
    records = bytes(LARGE)
    laden.records = [records]
    assert any(part is records for part in REPLICATION_PUSH.parts(laden))


def test_of_a_field_that_comes_twice_the_last_one_counts() -> None:
    def field(number: int, value: bytes) -> bytes:
        return encode_unsigned(number << 3 | 2) + encode_unsigned(len(value)) + value

    twice = field(15, bytes(LARGE)) + encode_unsigned(2 << 3) + b"\x05" + field(15, b"last" * 1000)
    laden = PRODUCE_REQUEST.parse(field(15, twice))
    [entry] = laden.message.partitions
    assert entry.current_leader_epoch == 5
    assert [bytes(part) for part in laden.records] == [b"last" * 1000]


@pytest.mark.parametrize("beyond", [1, 5, 3 * LARGE])
def test_records_that_go_on_behind_their_entry_are_refused(beyond: int) -> None:
    """Though what follows them, another entry or nothing, may be there."""
    entry = (
        b"\x10\x05" + encode_unsigned(15 << 3 | 2) + encode_unsigned(LARGE + beyond) + bytes(LARGE)
    )
    data = encode_unsigned(15 << 3 | 2) + encode_unsigned(len(entry)) + entry
    for following in (b"", data):
        with pytest.raises(DecodeError):
            PRODUCE_REQUEST.parse(data + following)


def test_fields_that_nobody_knows_are_kept_and_groups_are_left_to_protocol_buffers() -> None:
    unknown = b"".join(
        (
            encode_unsigned(900 << 3), b"\x96\x01",
            encode_unsigned(901 << 3 | 1), bytes(8),
            encode_unsigned(902 << 3 | 2), b"\x03abc",
            encode_unsigned(903 << 3 | 5), bytes(4),
        )
    )  # fmt: skip
    group = encode_unsigned(904 << 3 | 3) + b"\x08\x01" + encode_unsigned(904 << 3 | 4)
    _, head, fill = KINDS[0]
    data = filled(head, fill, [(1, bytes(LARGE))]).SerializeToString()
    for extra in (unknown, group):
        laden = PRODUCE_REQUEST.parse(extra + data)
        assert [bytes(part) for part in laden.records] == [bytes(LARGE)]
        assert laden.message.SerializeToString().endswith(extra) or extra is group


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 60),
)
@example(KINDS[0], [(0, 255)], 0)
@example(KINDS[0], [(2, 0)], 0)
@example(KINDS[0], [(0, 0)], 1)
def test_bytes_that_are_damaged_are_taken_as_protocol_buffers_takes_them(
    kind: tuple[LadenType[Any], Any, Any], damage: list[tuple[int, int]], cut: int
) -> None:
    """The same message, or the same refusal: never another one, and never another error."""
    laden_type, head, fill = kind
    message = filled(head, fill, [(3, bytes(LARGE)), (4, b"few"), (5, b"\x7a" * LARGE)])
    data = bytearray(message.SerializeToString())
    for at, byte in damage:
        data[at % len(data)] = byte
        data[-1 - at % len(data)] = byte
    damaged = bytes(data[: len(data) - cut])
    try:
        expected = type(head).FromString(damaged)
    except DecodeError:
        with pytest.raises(DecodeError):
            laden_type.parse(damaged)
        return
    assert laden_type.whole(laden_type.parse(damaged)) == expected
