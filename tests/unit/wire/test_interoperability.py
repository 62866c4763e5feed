"""The codec against aiokafka's two and kafka-python's, byte for byte and both ways."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from aiokafka.record._crecords import (
    DefaultRecordBatch as AiokafkaCythonBatch,
)
from aiokafka.record._crecords import (
    DefaultRecordBatchBuilder as AiokafkaCythonBuilder,
)
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as AiokafkaPyBuilder
from aiokafka.record.default_records import _DefaultRecordBatchPy as AiokafkaPyBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

from penstock.wire.compression import Compression
from penstock.wire.records import (
    BatchHeader,
    RecordData,
    decode_batch,
    encode_batch,
    parse_header,
    set_log_append_time,
    verify_batch,
)
from tests.unit.wire.strategies import record_lists

BUILDERS = {
    "aiokafka": AiokafkaPyBuilder,
    "aiokafka-cython": AiokafkaCythonBuilder,
    "kafka-python": KafkaPythonBuilder,
}
BATCHES = {
    "aiokafka": AiokafkaPyBatch,
    "aiokafka-cython": AiokafkaCythonBatch,
    "kafka-python": KafkaPythonBatch,
}
# The field is the broker's to fill in and not under the checksum; Java's clients write -1.
LEADER_EPOCHS = {"aiokafka": -1, "aiokafka-cython": -1, "kafka-python": 0}
EXAMPLES = settings(max_examples=60, deadline=None)

libraries = pytest.mark.parametrize("library", list(BUILDERS))
compressions = pytest.mark.parametrize("compression", list(Compression))


def encode_with(
    library: str,
    records: Sequence[RecordData],
    compression: Compression = Compression.NONE,
    producer: tuple[int, int, int] = (-1, -1, -1),
    is_transactional: bool = False,
) -> bytes:
    builder = BUILDERS[library](
        2, int(compression), int(is_transactional), *producer, 64 * 1024 * 1024
    )
    for offset, record in enumerate(records):
        builder.append(offset, record.timestamp_ms, record.key, record.value, list(record.headers))
    return bytes(builder.build())


def decode_with(library: str, batch: bytes) -> list[tuple[object, ...]]:
    reader = BATCHES[library](batch)
    assert reader.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader]


def expected(records: Sequence[RecordData], base_offset: int = 0) -> list[tuple[object, ...]]:
    return [(base_offset + index, *record) for index, record in enumerate(records)]


producers = st.one_of(
    st.just((-1, -1, -1)),
    st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1)),
)


@libraries
@EXAMPLES
@given(records=record_lists, producer=producers, is_transactional=st.booleans())
def test_plain_batches_are_the_same_bytes(library, records, producer, is_transactional):
    ours = encode_batch(
        records,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        leader_epoch=LEADER_EPOCHS[library],
        is_transactional=is_transactional,
    )
    assert ours == encode_with(
        library, records, producer=producer, is_transactional=is_transactional
    )


@libraries
@compressions
@EXAMPLES
@given(records=record_lists)
def test_what_they_write_we_read(library, compression, records):
    theirs = encode_with(library, records, compression)
    assert [tuple(record) for record in decode_batch(theirs)] == expected(records)


@libraries
@compressions
@EXAMPLES
@given(records=record_lists, base_offset=st.integers(0, 2**62))
def test_what_we_write_they_read(library, compression, records, base_offset):
    ours = encode_batch(records, base_offset=base_offset, compression=compression)
    assert decode_with(library, ours) == expected(records, base_offset)


def compressible(count: int = 200) -> list[RecordData]:
    return [
        RecordData(1_700_000_000_000 + i, b"key-%d" % (i % 7), b"the same line again " * 5)
        for i in range(count)
    ]


@libraries
@compressions
def test_compressed_batches_have_the_same_header(library, compression):
    # The compressed bytes may differ by library and level, and so length and checksum; what the
    # header says of the records may not.
    ours = verify_batch(encode_batch(compressible(), compression=compression))
    theirs = verify_batch(encode_with(library, compressible(), compression))
    assert ours.compression is theirs.compression is compression

    def without_sizes(header: BatchHeader) -> BatchHeader:
        return header._replace(batch_length=0, crc=0, leader_epoch=0)

    assert without_sizes(ours) == without_sizes(theirs)


# aiokafka's C codec, like Java's, compresses whatever it costs.
@pytest.mark.parametrize("library", ["aiokafka", "kafka-python"])
@compressions
def test_incompressible_records_stay_plain(library, compression):
    records = [RecordData(0, None, b"q")]
    ours = encode_batch(records, compression=compression, leader_epoch=LEADER_EPOCHS[library])
    assert ours == encode_with(library, records, compression)


@libraries
@EXAMPLES
@given(records=record_lists, now_ms=st.integers(0, 2**62))
def test_log_append_time_is_read_alike(library, records, now_ms):
    batch = set_log_append_time(encode_batch(records), now_ms)
    ours = [tuple(record) for record in decode_batch(batch)]
    assert ours == decode_with(library, batch)
    assert {record[1] for record in ours} == {now_ms}


@pytest.mark.parametrize("library", list(BATCHES))
def test_headers_are_read_alike(library):
    batch = encode_batch(
        compressible(3),
        base_offset=41,
        compression=Compression.GZIP,
        producer_id=7,
        producer_epoch=3,
        base_sequence=9,
        leader_epoch=5,
        is_transactional=True,
        is_control=False,
    )
    ours = parse_header(batch)
    theirs = BATCHES[library](batch)
    assert theirs.base_offset == ours.base_offset == 41
    assert theirs.next_offset == ours.next_offset == 44
    assert theirs.crc == ours.crc
    assert theirs.attributes == ours.attributes
    assert theirs.last_offset_delta == ours.last_offset_delta
    assert theirs.first_timestamp == ours.base_timestamp_ms
    assert theirs.max_timestamp == ours.max_timestamp_ms
    assert theirs.producer_id == ours.producer_id == 7
    assert theirs.producer_epoch == ours.producer_epoch == 3
    assert theirs.base_sequence == ours.base_sequence == 9
    assert bool(theirs.is_transactional) is ours.is_transactional is True
    assert bool(theirs.is_control_batch) is ours.is_control is False
