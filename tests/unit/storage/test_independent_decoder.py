"""Segments as PartitionLog writes them, read by the record parsers of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiokafka.record.memory_records
import kafka.record.memory_records
import pytest

from penstock.wire.compression import Compression
from penstock.wire.records import Record, RecordData, encode_batch
from tests.unit.storage.storage_kit import PARTITION, open_in, read_all, records_of, small_config

PARSERS = [kafka.record.memory_records.MemoryRecords, aiokafka.record.memory_records.MemoryRecords]
SENT = [
    RecordData(1_700_000_000_000, b"key", b"value", (("trace", b"1"), ("empty", b""))),
    RecordData(1_700_000_000_500, None, b"no key"),
    RecordData(1_699_999_999_000, b"tombstone", None, (("null", None),)),
    RecordData(1_700_000_000_001, b"", b"x" * 300),
]


def parsed(parser: Any, data: bytes) -> Iterator[Record]:
    records = parser(data)
    while (batch := records.next_batch()) is not None:
        assert batch.validate_crc()
        for record in batch:
            yield Record(
                record.offset,
                record.timestamp,
                None if record.key is None else bytes(record.key),
                None if record.value is None else bytes(record.value),
                tuple((name, value) for name, value in record.headers),
            )


@pytest.mark.parametrize("parser", PARSERS, ids=["kafka-python", "aiokafka"])
@pytest.mark.parametrize("compression", list(Compression))
def test_other_decoders_read_what_a_leader_wrote(
    tmp_path: Path, parser: Any, compression: Compression
) -> None:
    log = open_in(tmp_path, config=small_config(segment_bytes=2000))
    for number in range(12):
        sent = encode_batch(
            SENT,
            compression=compression,
            producer_id=4000,
            producer_epoch=2,
            base_sequence=number * len(SENT),
        )
        log.append_as_leader(sent, number // 4, now_ms=1)
    log.close(save=True)
    segments = sorted((tmp_path / str(PARTITION)).glob("*.log"))
    read = [record for path in segments for record in parsed(parser, path.read_bytes())]
    assert [record.offset for record in read] == list(range(12 * len(SENT)))
    for record in read:
        expected = SENT[record.offset % len(SENT)]
        assert record[1:] == tuple(expected)


@pytest.mark.parametrize("parser", PARSERS, ids=["kafka-python", "aiokafka"])
def test_other_decoders_read_log_append_time(tmp_path: Path, parser: Any) -> None:
    log = open_in(tmp_path, config=small_config(log_append_time=True))
    log.append_as_leader(encode_batch(SENT), 3, now_ms=1_800_000_000_000)
    data = read_all(log)
    read = list(parsed(parser, data))
    assert read == records_of(data)
    assert {record.timestamp_ms for record in read} == {1_800_000_000_000}


def test_what_another_project_encoded_is_stored_as_it_came(tmp_path: Path) -> None:
    builder = kafka.record.memory_records.MemoryRecordsBuilder(2, 0, 16_384)
    for record in SENT:
        builder.append(
            timestamp=record.timestamp_ms,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
        )
    builder.close()
    sent = bytes(builder.buffer())
    log = open_in(tmp_path, config=small_config(segment_bytes=2000))
    log.append_as_leader(sent, 3, now_ms=1)
    stored = read_all(log)
    assert stored[16:] == sent[16:]
    assert [tuple(record)[1:] for record in records_of(stored)] == [tuple(one) for one in SENT]
