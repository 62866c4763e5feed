"""Batches with records taken out."""

from __future__ import annotations

from typing import Any

import aiokafka.record.memory_records
import hypothesis.strategies as st
import kafka.record.memory_records
import pytest
from hypothesis import given, settings

from penstock.wire.errors import CorruptRecordError, InvalidRecordError
from penstock.wire.records import (
    Compression,
    Record,
    RecordData,
    decode_batch,
    encode_batch,
    iter_batches,
    parse_header,
    verify_batch,
    verify_producer_batch,
)
from penstock.wire.rewriting import (
    emptied,
    filler,
    is_filler,
    read_spans,
    trimmed_filler,
    with_only,
)

PARSERS = [kafka.record.memory_records.MemoryRecords, aiokafka.record.memory_records.MemoryRecords]
ROOM = 1 << 24
TEXT = st.none() | st.binary(max_size=300)
RECORDS = st.lists(
    st.builds(
        RecordData,
        st.integers(-1, 2**62),
        TEXT,
        TEXT,
        st.lists(st.tuples(st.text(max_size=5), TEXT), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(
    records=RECORDS,
    compression=st.sampled_from(list(Compression)),
    chosen=st.sets(st.integers(0, 7), min_size=1),
    horizon_ms=st.none() | st.integers(0, 2**63 - 1),
    append_time_ms=st.none() | st.integers(0, 2**50),
)
def test_what_stays_is_as_it_was_whatever_goes(
    records: list[RecordData],
    compression: Compression,
    chosen: set[int],
    horizon_ms: int | None,
    append_time_ms: int | None,
) -> None:
    batch = encode_batch(
        records,
        base_offset=70,
        compression=compression,
        producer_id=5,
        producer_epoch=6,
        base_sequence=7,
        leader_epoch=8,
        log_append_time_ms=append_time_ms,
    )
    header = parse_header(batch)
    found = read_spans(batch, header, max_bytes=ROOM)
    before = decode_batch(batch)
    assert [(span.offset, span.timestamp_ms, span.key) for span in found.spans] == [
        (record.offset, record.timestamp_ms, record.key) for record in before
    ]
    assert [span.has_value for span in found.spans] == [one.value is not None for one in before]
    picked = sorted(chosen & set(range(len(records)))) or [0]
    kept = [found.spans[at] for at in picked]
    rewritten = with_only(header, found, kept, delete_horizon_ms=horizon_ms)
    assert decode_batch(rewritten) == [before[at] for at in picked]
    after = verify_batch(rewritten)
    same = ("base_offset", "leader_epoch", "last_offset_delta", "producer_id", "producer_epoch")
    for name in (*same, "base_sequence", "is_log_append_time"):
        assert getattr(after, name) == getattr(header, name), name
    assert after.record_count == len(picked)
    assert after.delete_horizon_ms == horizon_ms
    assert after.max_timestamp_ms == max(before[at].timestamp_ms for at in picked)
    assert after.compression in (header.compression, Compression.NONE)


@settings(max_examples=300)
@given(records=st.binary(max_size=120), count=st.integers(0, 12))
def test_garbage_is_refused(records: bytes, count: int) -> None:
    header = parse_header(encode_batch([RecordData(0, b"k", b"v")] * 12))
    header = header._replace(record_count=count)
    try:
        found = read_spans(bytes(61) + records, header, max_bytes=ROOM)
    except CorruptRecordError:
        return
    assert sum(span.end - span.start for span in found.spans) == len(records)


def test_a_batch_without_records_keeps_its_producer_and_its_sequence() -> None:
    batch = encode_batch(
        [RecordData(5, b"k", b"v" * 100)] * 3,
        base_offset=10,
        compression=Compression.ZSTD,
        producer_id=5,
        producer_epoch=6,
        base_sequence=7,
        leader_epoch=8,
    )
    left = emptied(parse_header(batch))
    header = verify_batch(left)
    assert decode_batch(left) == []
    assert (header.base_offset, header.last_offset, header.last_sequence) == (10, 12, 9)
    assert (header.producer_id, header.producer_epoch, header.leader_epoch) == (5, 6, 8)
    assert not is_filler(header)


def test_a_filler_covers_offsets_and_can_be_begun_later() -> None:
    header = verify_batch(filler(10, 99, 4, 1234))
    assert is_filler(header)
    assert (header.base_offset, header.last_offset, header.leader_epoch) == (10, 99, 4)
    later = verify_batch(trimmed_filler(header, 50))
    assert later._replace(crc=0) == verify_batch(filler(50, 99, 4, 1234))._replace(crc=0)


def other_decoders_view(parser: Any, data: bytes) -> list[Record]:
    found = parser(data)
    records = []
    while (batch := found.next_batch()) is not None:
        assert batch.validate_crc()
        records += [Record(one.offset, one.timestamp, one.key, one.value) for one in batch]
    return records


@pytest.mark.parametrize("parser", PARSERS, ids=["kafka-python", "aiokafka"])
@pytest.mark.parametrize("compression", list(Compression))
def test_other_decoders_read_it_all(parser: Any, compression: Compression) -> None:
    sent = [RecordData(100 + number, b"%d" % number, b"v" * 50) for number in range(5)]
    batch = encode_batch(sent, base_offset=3, compression=compression)
    header = parse_header(batch)
    found = read_spans(batch, header, max_bytes=ROOM)
    kept = [found.spans[1], found.spans[4]]
    data = b"".join(
        (
            with_only(header, found, kept, delete_horizon_ms=9000),
            filler(8, 20, 0, 50),
            encode_batch(sent[:1], base_offset=21),
        )
    )
    assert other_decoders_view(parser, data) == [
        Record(4, 101, b"1", b"v" * 50),
        Record(7, 104, b"4", b"v" * 50),
        Record(21, 100, b"0", b"v" * 50),
    ]
    assert [header.base_offset for header, _ in iter_batches(data)] == [3, 8, 21]


def test_a_producer_may_not_say_when_tombstones_go() -> None:
    batch = encode_batch([RecordData(0, b"k", None)])
    header = parse_header(batch)
    found = read_spans(batch, header, max_bytes=ROOM)
    marked = with_only(header, found, found.spans, delete_horizon_ms=1)
    with pytest.raises(InvalidRecordError, match="bit 6"):
        verify_producer_batch(marked)
