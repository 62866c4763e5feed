"""The compiled codec does what the reference does: results and errors, for whatever it is given."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire import codec, reference
from penstock.wire.columns import BytesColumn, Columns
from penstock.wire.compression import Compression
from penstock.wire.errors import CorruptRecordError
from penstock.wire.record import Bounds, Record, RecordData
from penstock.wire.records import (
    HEADER_BYTES,
    decode_batch,
    decode_batch_as,
    decode_columns,
    encode_batch,
)
from penstock.wire.varint import encode_varint
from tests.unit.wire.strategies import headers, payloads, record_data, record_lists

compiled: Any = pytest.importorskip("penstock.wire._codec", reason="there was no C compiler")

MAX = 2**63 - 1
BOUNDS = st.tuples(
    st.integers(-2, 14),
    st.sampled_from([0, 7, MAX - 3, -1, -5, -(2**63)]),
    st.sampled_from([-1, 0, 11, 2**31 - 1]),
    st.sampled_from([-2, -1, 0, 1_700_000_000_000, MAX, -(2**63)]),
    st.sampled_from([0, 1]),
).filter(lambda bounds: bounds[1] + bounds[2] <= MAX)  # As verify_batch has seen to.


class Framed(NamedTuple):
    """A Record between what it shares with others."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    topic_id: bytes


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or the error with what it says."""
    try:
        return function(*arguments)
    except (CorruptRecordError, ValueError, TypeError) as error:
        return type(error), str(error)


def plain(columns: Any) -> Any:
    """Columns, with bytes for whatever buffers they have."""
    if isinstance(columns, tuple) and not isinstance(columns, Record):
        return tuple(plain(one) for one in columns)
    return bytes(columns) if isinstance(columns, bytearray | memoryview) else columns


def body_of(records: list[RecordData]) -> bytes:
    return encode_batch(records)[HEADER_BYTES:]


def agree_on(data: bytes, *numbers: int) -> None:
    bounds = Bounds(*numbers)
    expected = outcome(reference.parse_records, data, bounds)
    assert outcome(compiled.parse_records, data, bounds) == expected
    for least_offset in (-1, bounds.base_offset + 2):
        same = (data, bounds, least_offset, Framed, ("t", 3), (b"id",))
        assert outcome(compiled.parse_records_as, *same) == outcome(
            reference.parse_records_as, *same
        )
    least_offset, sound = (
        min(bounds.base_offset + 1, MAX),
        raw_record(b"\0", b"\0", b"\2k", b"\1", b"\0"),
    )
    parts = [
        (sound, Bounds(1, 3, 0, 4, 1), 0, 9),
        (data, bounds, -1, 2),
        (data, bounds, least_offset, 9),
        (sound, Bounds(1, 99, 0, 4, 1), 0, 1),
    ]
    ours = columns_of(compiled.ColumnsBuilder(), parts)
    assert ours == columns_of(reference.ColumnsBuilder(), parts)
    columns = outcome(compiled.parse_columns, data, bounds)
    assert plain(columns) == plain(outcome(reference.parse_columns, data, bounds))


def columns_of(builder: Any, parts: list[tuple[bytes, Bounds, int, int]]) -> Any:
    """What is said of each part, and the columns in the end."""
    said = [outcome(builder.add, *part) for part in parts]
    return said, builder.record_count, builder.last_offset, plain(builder.build())


def test_it_is_the_one_that_serves() -> None:
    assert codec.IS_COMPILED
    assert issubclass(codec.RecordsBody, compiled.RecordsBody)


# --- writing -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-1, MAX), payloads, payloads, headers), max_size=12))
def test_the_same_records_make_the_same_bytes(records: list[tuple[Any, ...]]) -> None:
    ours, theirs = compiled.RecordsBody(), reference.RecordsBody()
    for record in records:
        assert outcome(ours.append, *record) == outcome(theirs.append, *record)
        for name in ("size_bytes", "record_count", "base_timestamp_ms", "max_timestamp_ms"):
            assert getattr(ours, name) == getattr(theirs, name)
    assert bytes(ours.body()) == bytes(theirs.body())


def test_times_too_far_apart_are_refused_alike() -> None:
    ours, theirs = compiled.RecordsBody(), reference.RecordsBody()
    for timestamp_ms in (-1, MAX - 1, MAX):
        refusal = outcome(theirs.append, timestamp_ms, None, b"")
        assert outcome(ours.append, timestamp_ms, None, b"") == refusal
    assert refusal == (ValueError, f"{2**63} does not fit into 64 bits")
    assert bytes(ours.body()) == bytes(theirs.body())


@given(record_lists)
def test_records_of_any_kind_are_added_alike(records: list[RecordData]) -> None:
    ours, theirs = compiled.RecordsBody(), reference.RecordsBody()
    ours.extend(records)
    ours.extend(Record(0, *one) for one in records)
    theirs.extend([*records, *records])
    assert bytes(ours.body()) == bytes(theirs.body())


NO_RECORDS: list[tuple[Any, ...]] = [
    (-2, None, b""),
    (2**63, None, b""),
    (-(2**70), None, b""),
    (0, "text", b""),
    (0, None, 7),
    (0, None, b"", [("\ud800", b"")]),
    (0, None, b"", [("name", "text")]),
    (0, None, b"", [("name",)]),
    ("now", None, b""),
    (1.5, None, b""),
]


@pytest.mark.parametrize("record", NO_RECORDS)
def test_what_is_refused_is_so_alike_and_leaves_nothing_behind(record: tuple[Any, ...]) -> None:
    ours, theirs = compiled.RecordsBody(), reference.RecordsBody()
    for body in (ours, theirs):
        body.append(5, b"k", b"v")
    (kind, _) = refusal = outcome(theirs.append, *record)
    assert outcome(ours.append, *record)[0] is kind
    if kind is ValueError:
        assert outcome(ours.append, *record) == refusal
    for body in (ours, theirs):
        body.append(6, bytearray(b"k"), memoryview(b"vw")[1:])
    assert bytes(ours.body()) == bytes(theirs.body())
    assert ours.record_count == 2


def test_many_records_and_large_ones_are_written_alike() -> None:
    ours, theirs = compiled.RecordsBody(), reference.RecordsBody()
    for number in range(20_000):
        record = (number, None if number % 3 else b"%d" % number, b"x" * (number % 300))
        assert ours.append(*record) == theirs.append(*record)
    ours.append(0, None, b"y" * 3_000_000)
    theirs.append(0, None, b"y" * 3_000_000)
    assert bytes(ours.body()) == bytes(theirs.body())


# --- reading -------------------------------------------------------------------------------------


@given(record_lists, BOUNDS)
def test_the_same_bytes_are_the_same_records(
    records: list[RecordData], bounds: tuple[int, int, int, int, int]
) -> None:
    data = body_of(records)
    agree_on(data, *bounds)
    agree_on(data, len(records), *bounds[1:])
    agree_on(data, len(records), 5, len(records) - 1, records[0].timestamp_ms, 1)


@given(st.binary(max_size=60), BOUNDS)
def test_any_bytes_are_judged_alike(data: bytes, bounds: tuple[int, int, int, int, int]) -> None:
    agree_on(data, *bounds)


@given(record_lists, st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_what_was_mutated_is_judged_alike(records: list[RecordData], chance: random.Random) -> None:
    sound = body_of(records)
    for _ in range(8):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[place] ^= 1 << chance.randrange(8)
                case 1:
                    data[place] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
                case 2:
                    del data[place : place + chance.randint(1, 9)]
                    data = data or bytearray(1)
                case _:
                    data[place:place] = chance.randbytes(chance.randint(1, 9))
        count = len(records) + chance.choice((0, 0, 0, 1, -1))
        agree_on(bytes(data), count, 3, len(records) + 1, records[0].timestamp_ms, 1)


def raw_record(*fields: bytes) -> bytes:
    body = b"\x00" + b"".join(fields)
    return encode_varint(len(body)) + body


LONG_ZERO = b"\x80" * 9 + b"\x00"
CROOKED = {
    "a null with more bytes than it needs": raw_record(b"\0", b"\0", b"\x81\0", b"\x81\0", b"\0"),
    "numbers of ten bytes": raw_record(LONG_ZERO, LONG_ZERO, b"\x01", b"\x01", LONG_ZERO),
    "a number of 65 bits": raw_record(b"\x80" * 9 + b"\x02", b"\0", b"\x01", b"\x01", b"\0"),
    "a number of eleven bytes": raw_record(b"\x80" * 10 + b"\0", b"\0", b"\x01", b"\x01", b"\0"),
    "the longest step back in time": raw_record(b"\xff" * 9 + b"\x01", b"\0", b"\1", b"\1", b"\0"),
    "the longest step on in time": raw_record(
        b"\xfe" + b"\xff" * 8 + b"\x01", b"\0", b"\x01", b"\x01", b"\0"
    ),
    "a length of -2": raw_record(b"\0", b"\0", b"\x03", b"\x01", b"\0"),
    "a key beyond its record": raw_record(b"\0", b"\0", b"\x7e", b"\x01", b"\0"),
    "a value up to the end of its record": raw_record(b"\0", b"\0", b"\x01", b"\x04vw"),
    "a record of six bytes": raw_record(b"\0", b"\0", b"\x01", b"\x01"),
    "headers that are none": raw_record(b"\0", b"\0", b"\x01", b"\x01", b"\x02"),
    "a header name that is null": raw_record(b"\0", b"\0", b"\x01", b"\x01", b"\x02\x01\x01"),
    "a header name that is no text": raw_record(b"\0", b"\0", b"\1", b"\1", b"\4\2a\1\2\xff\1"),
    "fewer headers than it has": raw_record(b"\0", b"\0", b"\1", b"\1", b"\2\2a\1\2b\1"),
    "more headers than it has": raw_record(b"\0", b"\0", b"\1", b"\1", b"\4\2a\1"),
    "-1 headers": raw_record(b"\0", b"\0", b"\x01", b"\x01", b"\x01"),
    "a byte after the last field": raw_record(b"\0", b"\0", b"\x01", b"\x01", b"\0", b"\0"),
}


@pytest.mark.parametrize("name", CROOKED)
@pytest.mark.parametrize("base_ms", [-(2**63), -2, -1, 0, 1, MAX])
def test_crooked_records_are_judged_alike(name: str, base_ms: int) -> None:
    for data in (CROOKED[name], CROOKED[name] + raw_record(b"\0", b"\2", b"\1", b"\1", b"\0")):
        for count in (0, 1, 2, 3):
            agree_on(data, count, 0, 1, base_ms, 1)
    for cut in range(len(CROOKED[name])):
        agree_on(CROOKED[name][:cut], 1, MAX, 1, base_ms, 1)


def test_records_are_ours_and_last_longer_than_what_they_were_read_from() -> None:
    made = [RecordData(9, b"k" * 40, b"v" * 40, (("h", b"1"),)) for _ in range(500)]
    records = decode_batch(encode_batch(made, base_offset=7))
    assert type(records[0]) is Record
    assert records[499] == Record(506, 9, b"k" * 40, b"v" * 40, (("h", b"1"),))
    assert {record.value for record in records} == {b"v" * 40}
    assert {*records} == {Record(offset, *made[0]) for offset in range(7, 507)}, "by their hashes"


def test_records_of_another_kind_are_of_that_kind_and_begin_where_they_are_to() -> None:
    made = [RecordData(9, b"k%d" % number, None) for number in range(500)]
    batch = encode_batch(made, base_offset=7, leader_epoch=3)
    header, records = decode_batch_as(batch, 500, Framed, ("t", 3), (b"id",))
    assert (header.base_offset, header.leader_epoch, len(records)) == (7, 3, 7)
    assert type(records[0]) is Framed
    assert records[0] == Framed("t", 3, 500, 9, b"k493", None, (), b"id")
    assert len({*records}) == 7, "by their hashes"
    assert decode_batch_as(batch, 507, Framed, ("t", 3), (b"id",))[1] == []


def test_records_can_be_of_no_kind_that_is_no_tuple() -> None:
    body = body_of([RecordData(1, None, b"v")])
    for kind in (list, object, 7):
        given = (body, Bounds(1, 0, 0, 1, 1), 0, kind, (), ())
        refusal = outcome(reference.parse_records_as, *given)
        assert refusal[0] is TypeError
        assert outcome(compiled.parse_records_as, *given) == refusal


# --- columns -------------------------------------------------------------------------------------


def strings_of(column: BytesColumn, count: int) -> list[bytes | None]:
    ends = array("i", bytes(column.offsets))
    assert len(ends) == count + 1
    validity = None if column.validity is None else bytes(column.validity)
    return [
        bytes(column.data[start:end])
        if validity is None or validity[place >> 3] >> (place & 7) & 1
        else None
        for place, (start, end) in enumerate(pairwise(ends))
    ]


def records_of(columns: Columns) -> list[Record]:
    count = columns.record_count
    headers: list[tuple[tuple[str, bytes | None], ...]] = [()] * count
    if columns.headers is not None:
        ends = array("i", bytes(columns.headers.offsets))
        names = [
            str(name, "utf-8")
            for name in strings_of(columns.headers.names, ends[-1])
            if name is not None
        ]
        pairs = list(zip(names, strings_of(columns.headers.values, ends[-1]), strict=True))
        headers = [tuple(pairs[a:b]) for a, b in pairwise(ends)]
    return [
        Record(*fields)
        for fields in zip(
            array("q", bytes(columns.offsets)),
            array("q", bytes(columns.timestamps_ms)),
            strings_of(columns.keys, count),
            strings_of(columns.values, count),
            headers,
            strict=True,
        )
    ]


@given(record_lists, st.sampled_from(Compression), st.one_of(st.none(), st.just(77)))
def test_columns_hold_what_records_do(
    records: list[RecordData], compression: Compression, log_append_time_ms: int | None
) -> None:
    batch = encode_batch(
        records,
        base_offset=12,
        compression=compression,
        log_append_time_ms=log_append_time_ms,
    )
    columns = decode_columns(batch)
    assert records_of(columns) == decode_batch(batch)
    assert columns.keys.null_count == sum(record.key is None for record in records)


@given(record_data)
def test_columns_of_a_batch_that_is_damaged_say_so(record: RecordData) -> None:
    batch = bytearray(encode_batch([record]))
    batch[-1] ^= 1
    with pytest.raises(CorruptRecordError, match="CRC"):
        decode_columns(batch)
