from __future__ import annotations

import contextlib
import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.compression import Compression
from penstock.wire.errors import CorruptRecordError, InvalidRecordError
from penstock.wire.records import (
    HEADER_BYTES,
    BatchBuilder,
    BatchHeader,
    Record,
    RecordData,
    decode_batch,
    encode_batch,
    iter_batches,
    offset_patch,
    parse_header,
    record_size_bound,
    set_log_append_time,
    verify_batch,
    verify_producer_batch,
)
from tests.unit.wire.strategies import MAX_TIMESTAMP_MS, record_data, record_lists

THREE = [
    RecordData(1000, b"k", b"v", (("h", b"1"), ("h", None))),
    RecordData(900, None, b"w"),
    RecordData(1100, b"k", None),
]


def with_crc(batch: bytes | bytearray) -> bytes:
    """The batch with the checksum that its bytes ask for, so that a test sees what lies behind."""
    out = bytearray(batch)
    struct.pack_into(">I", out, 17, crc32c(bytes(out[21:])))
    return bytes(out)


def patched(batch: bytes, layout: str, at: int, value: int) -> bytes:
    out = bytearray(batch)
    struct.pack_into(layout, out, at, value)
    return with_crc(out)


def with_records(data: bytes, *, count: int, last_delta: int | None = None) -> bytes:
    """A sound header before records that may be anything."""
    head = bytearray(encode_batch([RecordData(1000, None, b"")])[:HEADER_BYTES])
    struct.pack_into(">i", head, 8, HEADER_BYTES - 12 + len(data))
    struct.pack_into(">i", head, 23, count - 1 if last_delta is None else last_delta)
    struct.pack_into(">i", head, 57, count)
    return with_crc(head + data)


# --- the format ---------------------------------------------------------------------------------


def test_a_batch_by_hand():
    batch = encode_batch(
        [RecordData(1000, b"k", b"v", (("h", None),)), RecordData(998, None, b"")],
        base_offset=7,
        producer_id=4,
        producer_epoch=5,
        base_sequence=6,
        leader_epoch=3,
        is_transactional=True,
    )
    records = bytes.fromhex("16 00 00 00 02 6b 02 76 02 02 68 010c 00 03 02 01 00 00")
    tail = struct.pack(">hiqqqhii", 0x10, 1, 1000, 1000, 4, 5, 6, 2) + records
    head = struct.pack(">qiibI", 7, 4 + 1 + 4 + len(tail), 3, 2, crc32c(tail))
    assert batch == head + tail


def test_the_header_by_name():
    batch = encode_batch(
        THREE, base_offset=10, producer_id=1, producer_epoch=2, base_sequence=2**31 - 2
    )
    header = parse_header(batch)
    assert header == BatchHeader(
        base_offset=10,
        batch_length=len(batch) - 12,
        leader_epoch=-1,
        magic=2,
        crc=crc32c(batch[21:]),
        attributes=0,
        last_offset_delta=2,
        base_timestamp_ms=1000,
        max_timestamp_ms=1100,
        producer_id=1,
        producer_epoch=2,
        base_sequence=2**31 - 2,
        record_count=3,
    )
    assert header.size_bytes == len(batch)
    assert header.last_offset == 12
    assert header.next_offset == 13
    assert header.last_sequence == 0  # After 2^31 - 1 comes 0.
    assert header.compression is Compression.NONE
    assert not any((header.is_transactional, header.is_control, header.is_log_append_time))


def test_no_producer_has_no_last_sequence():
    assert parse_header(encode_batch(THREE)).last_sequence == -1


@pytest.mark.parametrize("compression", list(Compression))
@settings(max_examples=60, deadline=None)
@given(
    records=record_lists,
    base_offset=st.integers(0, 2**62),
    marks=st.tuples(st.booleans(), st.booleans()),
)
def test_round_trip(compression, records, base_offset, marks):
    batch = encode_batch(
        records,
        base_offset=base_offset,
        compression=compression,
        producer_id=9,
        is_transactional=marks[0],
        is_control=marks[1],
    )
    header = verify_batch(batch)
    assert (header.is_transactional, header.is_control) == marks
    assert header.max_timestamp_ms == max(record.timestamp_ms for record in records)
    decoded = decode_batch(batch)
    assert decoded == [Record(base_offset + index, *record) for index, record in enumerate(records)]
    # What was decoded encodes to the same bytes: a Record is RecordLike.
    again = encode_batch(
        decoded,
        base_offset=base_offset,
        compression=compression,
        producer_id=9,
        is_transactional=marks[0],
        is_control=marks[1],
    )
    assert again == batch


def test_many_records_and_long_ones():
    records = [
        RecordData(i * 1000, b"%d" % i, bytes(i % 300), (("n" * (i % 70), bytes(i % 130)),))
        for i in range(20_000)
    ]
    batch = encode_batch(records)
    assert [record[1:] for record in decode_batch(batch)] == records
    big = RecordData(0, b"k" * 100_000, b"v" * 3_000_000)
    assert decode_batch(encode_batch([big])) == [Record(0, *big)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_goes_in(kind):
    batch = encode_batch([RecordData(5, kind(b"key"), kind(b"value"), (("h", kind(b"x")),))])
    assert batch == encode_batch([RecordData(5, b"key", b"value", (("h", b"x"),))])
    assert decode_batch(kind(batch)) == [Record(0, 5, b"key", b"value", (("h", b"x"),))]
    assert verify_batch(kind(batch)) == parse_header(kind(batch))


def test_a_view_of_wide_items_counts_bytes():
    wide = memoryview(struct.pack("<2I", 1, 2)).cast("I")
    assert decode_batch(encode_batch([RecordData(0, None, wide)]))[0].value == bytes(wide)
    assert record_size_bound(None, wide) >= 8


# --- the builder --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(records=record_lists)
def test_the_builder_knows_its_size(records):
    builder = BatchBuilder()
    assert builder.size_bytes == HEADER_BYTES
    for count, record in enumerate(records, 1):
        before = builder.size_bytes
        bound = record_size_bound(record.key, record.value, record.headers)
        grown = builder.append(*record)
        assert builder.size_bytes == before + grown
        assert grown <= bound
        assert builder.record_count == count
    assert len(builder.build()) == builder.size_bytes
    assert builder.max_timestamp_ms == max(record.timestamp_ms for record in records)


def test_the_builder_builds_again():
    builder = BatchBuilder()
    builder.append(1, b"a", b"b")
    first = builder.build(producer_id=1, producer_epoch=0, base_sequence=0)
    again = builder.build(producer_id=1, producer_epoch=1, base_sequence=0)
    assert (parse_header(first).producer_epoch, parse_header(again).producer_epoch) == (0, 1)
    assert first[HEADER_BYTES:] == again[HEADER_BYTES:]
    builder.append(2, None, None)
    assert [record.offset for record in decode_batch(builder.build())] == [0, 1]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        encode_batch([])


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (RecordData(-2, None, None), ValueError),
        (RecordData(2**63, None, None), ValueError),
        (RecordData(0, "text", None), TypeError),
        (RecordData(0, None, 12), TypeError),
        (RecordData(0, None, [1, 2]), TypeError),
        (RecordData(0, None, None, (("\ud800", b""),)), ValueError),
        (RecordData(0, None, None, ((b"bytes", b""),)), AttributeError),
        (RecordData(0, None, None, (("h", "text"),)), TypeError),
    ],
)
def test_the_builder_is_as_it_was_after_a_refusal(record, error):
    builder = BatchBuilder()
    with pytest.raises(error):
        builder.append(*record)
    assert (builder.size_bytes, builder.record_count) == (HEADER_BYTES, 0)
    builder.append(3, b"a", b"b")
    with pytest.raises(error):
        builder.append(*record)
    assert builder.build() == encode_batch([RecordData(3, b"a", b"b")])


@pytest.mark.parametrize("timestamp_ms", [-1, 0, MAX_TIMESTAMP_MS])
def test_the_ends_of_time(timestamp_ms):
    records = [RecordData(timestamp_ms, None, b""), RecordData(0, None, b"")]
    batch = encode_batch(records)
    assert [record.timestamp_ms for record in decode_batch(batch)] == [timestamp_ms, 0]
    assert parse_header(batch).max_timestamp_ms == max(timestamp_ms, 0)


# --- what a broker does -------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    records=record_lists,
    base_offset=st.integers(0, 2**62),
    leader_epoch=st.integers(-1, 2**31 - 1),
)
def test_the_offset_patch_is_all_that_changes(records, base_offset, leader_epoch):
    batch = encode_batch(records)
    stored = offset_patch(batch, base_offset, leader_epoch) + batch[16:]
    assert stored == offset_patch(parse_header(batch), base_offset, leader_epoch) + batch[16:]
    assert stored == encode_batch(records, base_offset=base_offset, leader_epoch=leader_epoch)
    assert verify_batch(stored).base_offset == base_offset


@settings(max_examples=60)
@given(records=record_lists, now_ms=st.integers(0, 2**62))
def test_log_append_time(records, now_ms):
    stamped = set_log_append_time(encode_batch(records, base_offset=3), now_ms)
    assert stamped == encode_batch(records, base_offset=3, log_append_time_ms=now_ms)
    header = verify_batch(stamped)
    assert header.is_log_append_time
    assert header.max_timestamp_ms == now_ms
    assert {record.timestamp_ms for record in decode_batch(stamped)} == {now_ms}


@settings(max_examples=60)
@given(lists=st.lists(record_lists, max_size=5), cut=st.integers(0, 10**6))
def test_iterating_whole_batches(lists, cut):
    batches = [encode_batch(records) for records in lists]
    data = b"".join(batches)
    found = list(iter_batches(data))
    assert [bytes(view) for _, view in found] == batches
    assert [header for header, _ in found] == [parse_header(batch) for batch in batches]
    if not data:
        return
    assert all(view.obj is data for _, view in found)  # Views, not copies.
    cut %= len(data)
    ends = [sum(map(len, batches[:n])) for n in range(len(batches) + 1)]
    whole = max(n for n, end in enumerate(ends) if end <= cut)
    torn = list(iter_batches(data[:cut], allow_torn_tail=True))
    assert [bytes(view) for _, view in torn] == batches[:whole]
    if cut not in ends:
        with pytest.raises(CorruptRecordError):
            list(iter_batches(data[:cut]))


def test_a_torn_tail_is_no_excuse_for_a_bad_header():
    batch = encode_batch(THREE)
    for at, value, message in ((16, 1, "magic 1"), (8, 0xFF, "length -")):
        bad = bytearray(batch + batch)
        bad[len(batch) + at] = value
        with pytest.raises(CorruptRecordError, match=message):
            list(iter_batches(bad, allow_torn_tail=True))


# --- what is refused ----------------------------------------------------------------------------


def test_a_producers_batch():
    sound = encode_batch(THREE, producer_id=1, producer_epoch=0, base_sequence=0)
    assert verify_producer_batch(sound) == parse_header(sound)
    assert verify_producer_batch(encode_batch(THREE))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (encode_batch(THREE, is_control=True), InvalidRecordError, "control"),
        (encode_batch(THREE, is_transactional=True), InvalidRecordError, "InitProducerId"),
        (
            encode_batch(THREE, producer_id=1, producer_epoch=-1, base_sequence=0),
            InvalidRecordError,
            "epoch -1",
        ),
        (
            encode_batch(THREE, producer_id=1, producer_epoch=0, base_sequence=-1),
            InvalidRecordError,
            "base sequence -1",
        ),
        (patched(encode_batch(THREE), ">i", 23, 9), CorruptRecordError, "that it has 10"),
        (encode_batch(THREE)[:-1], CorruptRecordError, "says at byte 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_producer_may_not_send(batch, error, message):
    with pytest.raises(error, match=message):
        verify_producer_batch(batch)


SOUND = encode_batch(THREE, base_offset=5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (b"", "needs 61 bytes, but 0 are there"),
        (SOUND[:60], "needs 61 bytes, but 60 are there"),
        (SOUND[:-1], "says at byte 8 that it has 95 bytes, but it has 94"),
        (SOUND + b"x", "says at byte 8 that it has 95 bytes, but it has 96"),
        (patched(SOUND, ">b", 16, 1), "magic 1; only magic 2"),
        (patched(SOUND, ">i", 8, 48), "length 48; 49 is the least"),
        (patched(SOUND, ">i", 8, -1), "length -1"),
        (SOUND[:-1] + b"\x7f", "at byte 17 that its CRC-32C is 0x"),
        (patched(SOUND, ">h", 21, 5), "unknown compression 5 at byte 22"),
        (patched(SOUND, ">h", 21, 7), "unknown compression 7 at byte 22"),
        (patched(SOUND, ">q", 0, -1), "offsets -1 to 1"),
        (patched(SOUND, ">q", 0, 2**63 - 2), "offsets 9223372036854775806 to 9223372036854775808"),
        (patched(SOUND, ">i", 23, -1), "offsets 5 to 4"),
        (patched(SOUND, ">i", 57, -1), "byte 57 that it has -1 records for 3 offsets"),
        (patched(SOUND, ">i", 57, 4), "byte 57 that it has 4 records for 3 offsets"),
        (patched(SOUND, ">h", 21, 1), "records of the batch at offset 5, from byte 61: bad gzip"),
        (patched(SOUND, ">i", 57, 2), "follow the last record of the batch at offset 5, at byte"),
        (with_records(b"", count=2**31 - 1), "2147483647 records, which 0 bytes cannot hold"),
    ],
    ids=lambda value: value if isinstance(value, str) else "batch",
)
def test_errors_of_a_batch_say_what_and_where(batch, message):
    with pytest.raises(CorruptRecordError, match=message):
        decode_batch(batch)


@pytest.mark.parametrize("attributes", [5, 6, 7])
def test_a_compression_from_the_future_is_found_before_the_records_are_read(attributes):
    # A broker never decompresses, and must not store what no consumer could.
    with pytest.raises(CorruptRecordError, match=f"unknown compression {attributes} at byte 22"):
        verify_batch(patched(SOUND, ">h", 21, attributes))


RECORD = bytes.fromhex("0e 00 00 00 01 02 76 00")  # One record: null key, value "v".


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (RECORD[:-1], "record 0 of 1 at byte 0 .* its length is 7, but 6 bytes follow"),
        (b"\x0a" + RECORD[1:], "its length is 5, but"),
        (b"\x01" + RECORD[1:], "its length is -1, but"),
        (b"\xff" * 11, "more than 64 bits"),
        (bytes.fromhex("0e 00 00 02 01 02 76 00"), "offset delta 1, where 0 to 0 is allowed"),
        (bytes.fromhex("0e 00 00 01 01 02 76 00"), "offset delta -1, where 0 to 0 is allowed"),
        (bytes.fromhex("10 00 d30f 00 01 02 76 00"), "its timestamp is -2 ms"),
        (bytes.fromhex("0e 00 00 00 03 02 76 00"), "its key at byte 4 has length -2"),
        (bytes.fromhex("0e 00 00 00 08 02 76 00"), "its key at byte 4 has length 4, but 3 bytes"),
        (bytes.fromhex("0e 00 00 00 01 08 76 00"), "its value at byte 5 has length 4, but 2 bytes"),
        (bytes.fromhex("0e 00 00 00 01 04 76 00"), "it is cut short"),
        (bytes.fromhex("0e 00 00 00 01 00 00 00"), "its fields end at byte 7, .* length says 8"),
        (bytes.fromhex("0e 00 00 00 01 02 76 02"), "it claims 1 headers in 0 bytes"),
        (bytes.fromhex("0e 00 00 00 01 02 76 01"), "it claims -1 headers"),
        (bytes.fromhex("12 00 00 00 01 02 76 02 01 01"), "its header name at byte 8 is null"),
        (bytes.fromhex("12 00 00 00 01 02 76 02 08 01"), "header name at byte 8 has length 4"),
        (bytes.fromhex("14 00 00 00 01 02 76 02 02 ff 01"), "name at byte 8 is not UTF-8"),
        (bytes.fromhex("14 00 00 00 01 02 76 02 02 68 08"), "header value at byte 10 has length 4"),
        (RECORD + b"\x00", "1 bytes follow the last record"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_errors_of_a_record_say_what_and_where(data, message):
    with pytest.raises(CorruptRecordError, match=message):
        decode_batch(with_records(data, count=1))


def test_offsets_rise_within_a_batch():
    second = bytes.fromhex("0e 00 00 02 01 02 76 00")
    assert [r.offset for r in decode_batch(with_records(RECORD + second, count=2))] == [0, 1]
    with pytest.raises(CorruptRecordError, match="record 1 of 2 at byte 8"):
        decode_batch(with_records(RECORD + RECORD, count=2))


def test_a_compacted_batch_has_gaps_and_may_be_empty():
    late = bytes.fromhex("0e 00 00 0a 01 02 76 00")
    batch = with_records(RECORD + late, count=2, last_delta=9)
    assert [record.offset for record in decode_batch(batch)] == [0, 5]
    assert decode_batch(with_records(b"", count=0, last_delta=9)) == []


def test_decompression_is_bounded():
    batch = encode_batch([RecordData(0, None, bytes(100_000))] * 50, compression=Compression.ZSTD)
    assert len(batch) < 2000
    assert len(decode_batch(batch)) == 50
    with pytest.raises(CorruptRecordError, match="more than the 1000000 bytes allowed"):
        decode_batch(batch, max_bytes=1_000_000)


# --- anything at all ----------------------------------------------------------------------------


def decoded_or_refused(batch: bytes | bytearray) -> list[Record] | None:
    """Only CorruptRecordError counts as a refusal; anything else fails the test."""
    try:
        return decode_batch(batch, max_bytes=10_000_000)
    except CorruptRecordError:
        return None


@settings(max_examples=200)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_refused(garbage):
    assert decoded_or_refused(garbage) is None
    with contextlib.suppress(CorruptRecordError):
        assert not list(iter_batches(garbage)) or len(garbage) >= HEADER_BYTES


@settings(max_examples=300)
@given(records=st.binary(max_size=120), count=st.integers(0, 12))
def test_garbage_behind_a_sound_header(records, count):
    found = decoded_or_refused(with_records(records, count=count, last_delta=12))
    assert found is None or len(found) == count


@pytest.mark.parametrize("compression", list(Compression))
@settings(max_examples=150, deadline=None)
@given(
    records=st.lists(record_data, min_size=1, max_size=5),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.one_of(st.just(0), st.integers(0, 200)),
)
def test_a_changed_batch_is_refused_or_decodes(compression, records, changes, cut):
    batch = bytearray(encode_batch(records, compression=compression))
    sound = bytes(batch)
    for position, byte in changes:
        batch[position % len(batch)] = byte
    damaged = bytes(batch[: len(batch) - min(cut, len(batch))])
    if damaged[16:] != sound[16:]:
        # The checksum catches any change behind the first 16 bytes.
        assert decoded_or_refused(damaged) is None
    if len(damaged) >= HEADER_BYTES:
        # With the checksum made right again, what lies behind it must still hold.
        decoded_or_refused(with_crc(damaged))
        relength = bytearray(damaged)
        struct.pack_into(">i", relength, 8, len(damaged) - 12)
        relength[16] = 2
        decoded_or_refused(with_crc(relength))
