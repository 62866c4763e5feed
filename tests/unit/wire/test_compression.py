from __future__ import annotations

import gzip
import struct
import tracemalloc

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.compression import Compression, compress, decompress
from penstock.wire.errors import CorruptRecordError

COMPRESSED = [kind for kind in Compression if kind is not Compression.NONE]
all_kinds = pytest.mark.parametrize("kind", list(Compression))
compressed_kinds = pytest.mark.parametrize("kind", COMPRESSED)
MEGABYTE = 1024 * 1024

blobs = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda part, times: part * times, st.binary(max_size=60), st.integers(0, 3000)),
)


def test_ids_are_those_on_the_wire():
    assert {kind.name: int(kind) for kind in Compression} == {
        "NONE": 0,
        "GZIP": 1,
        "SNAPPY": 2,
        "LZ4": 3,
        "ZSTD": 4,
    }


@all_kinds
@settings(deadline=None)
@given(data=blobs)
def test_round_trip(kind, data):
    for buffer in (data, bytearray(data), memoryview(data)):
        packed = compress(kind, buffer)
        assert decompress(kind, packed, max_bytes=len(data)) == data
        assert decompress(kind, memoryview(packed), max_bytes=len(data)) == data
    assert compress(kind, data) == compress(kind, data)


@all_kinds
@settings(deadline=None)
@given(data=blobs.filter(bool))
def test_one_byte_less_than_needed_is_refused(kind, data):
    with pytest.raises(CorruptRecordError, match=f"more than the {len(data) - 1} bytes allowed"):
        decompress(kind, compress(kind, data), max_bytes=len(data) - 1)


@compressed_kinds
@settings(deadline=None)
@given(data=blobs.filter(bool), cut=st.integers(0, 10**6))
def test_cut_short_is_corrupt_or_shorter(kind, data, cut):
    packed = compress(kind, data)
    packed = packed[: cut % len(packed)]
    try:
        out = decompress(kind, packed, max_bytes=MEGABYTE)
    except CorruptRecordError:
        return
    # Only snappy's block stream has no end mark: it may be cut between blocks.
    assert kind is Compression.SNAPPY
    assert len(out) < len(data)
    assert data.startswith(out)


def decompressed_or_refused(kind: Compression, data: bytes | bytearray, *, max_bytes: int) -> bytes:
    """Only CorruptRecordError counts as a refusal; anything else fails the test."""
    try:
        return decompress(kind, data, max_bytes=max_bytes)
    except CorruptRecordError:
        return b""


@compressed_kinds
@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_corrupt_or_bounded(kind, garbage):
    assert len(decompressed_or_refused(kind, garbage, max_bytes=1000)) <= 1000


@compressed_kinds
@settings(max_examples=200, deadline=None)
@given(
    data=blobs.filter(bool),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_changed_stream_is_corrupt_or_bounded(kind, data, changes):
    packed = bytearray(compress(kind, data))
    for position, byte in changes:
        packed[position % len(packed)] = byte
    limit = 2 * MEGABYTE
    assert len(decompressed_or_refused(kind, packed, max_bytes=limit)) <= limit


def zeros_of_unknown_size(size: int) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    return compressor.compress(bytes(size))


@pytest.mark.parametrize(
    ("kind", "bomb"),
    [
        (Compression.GZIP, gzip.compress(bytes(64 * MEGABYTE))),
        (Compression.SNAPPY, compress(Compression.SNAPPY, bytes(64 * MEGABYTE))),
        (Compression.SNAPPY, bytes(cramjam.snappy.compress_raw(bytes(64 * MEGABYTE)))),
        (Compression.LZ4, lz4.frame.compress(bytes(64 * MEGABYTE))),
        (Compression.ZSTD, zstandard.compress(bytes(64 * MEGABYTE))),
        (Compression.ZSTD, zeros_of_unknown_size(64 * MEGABYTE)),
    ],
    ids=["gzip", "snappy-xerial", "snappy-raw", "lz4", "zstd", "zstd-unsized"],
)
def test_a_bomb_is_refused_in_little_memory(kind, bomb):
    with pytest.raises(CorruptRecordError, match=r"more than|did not decompress full frame"):
        decompress(kind, bomb, max_bytes=MEGABYTE)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError):
            decompress(kind, bomb, max_bytes=MEGABYTE)
        assert tracemalloc.get_traced_memory()[1] < 4 * MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "liar"),
    [
        # Each claims about a gigabyte and holds nothing.
        (Compression.SNAPPY, b"\xff\xff\xff\xff\x03\x00"),
        (Compression.ZSTD, b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 2**30) + b"\x01\x00\x00"),
    ],
    ids=["snappy", "zstd"],
)
def test_a_claim_that_the_bytes_cannot_hold_is_refused_before_memory_is_taken(kind, liar):
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="can hold"):
            decompress(kind, liar, max_bytes=2**31)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


def test_members_of_gzip_are_joined():
    packed = gzip.compress(b"one ") + gzip.compress(b"two")
    assert decompress(Compression.GZIP, packed, max_bytes=7) == b"one two"
    with pytest.raises(CorruptRecordError, match="more than the 6 bytes"):
        decompress(Compression.GZIP, packed, max_bytes=6)
    with pytest.raises(CorruptRecordError, match="at byte 24"):
        decompress(Compression.GZIP, gzip.compress(b"one ") + b"rubbish", max_bytes=100)


def test_snappy_is_framed_as_java_does():
    packed = compress(Compression.SNAPPY, b"x" * 40_000)
    assert packed[:16] == b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
    (first,) = struct.unpack_from(">i", packed, 16)
    assert cramjam.snappy.decompress_raw_len(packed[20 : 20 + first]) == 32 * 1024


@pytest.mark.parametrize("level", [1, 3, 19, 22])
def test_zstd_is_read_at_every_level(level):
    # A stream whose size is unknown announces its level's whole window: 128 MiB at level 22.
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False).compressobj()
    packed = compressor.compress(b"a line\n" * 1000) + compressor.flush()
    assert decompress(Compression.ZSTD, packed, max_bytes=7000) == b"a line\n" * 1000


def test_raw_snappy_is_read_as_java_does():
    packed = bytes(cramjam.snappy.compress_raw(b"no frame"))
    assert decompress(Compression.SNAPPY, packed, max_bytes=8) == b"no frame"


def test_lz4_blocks_are_independent():
    # KIP-57: Java's reader refuses linked blocks. Frame descriptor: version 1, independent blocks.
    packed = compress(Compression.LZ4, b"y" * 200_000)
    assert packed[:4] == b"\x04\x22\x4d\x18"
    assert packed[4] & 0b1110_0000 == 0b0110_0000
    info = lz4.frame.get_frame_info(packed)
    assert info["block_size"] == 64 * 1024
    assert not info["content_checksum"]
    assert not info["block_checksum"]


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Compression.GZIP, b"", "ends too early, at byte 0"),
        (Compression.GZIP, b"not gzip", "bad gzip member at byte 0"),
        (Compression.GZIP, compress(Compression.GZIP, b"abc")[:-1], "ends too early, at byte 22"),
        (Compression.SNAPPY, b"", "bad snappy block at byte 0"),
        (Compression.SNAPPY, b"\x82SNAPPY\x00\x00\x00", "ends at byte 10 inside its header"),
        (
            Compression.SNAPPY,
            compress(Compression.SNAPPY, b"") + b"\x00\x00",
            "ends at byte 18 inside a block length",
        ),
        (
            Compression.SNAPPY,
            compress(Compression.SNAPPY, b"") + struct.pack(">i", 9) + b"1234",
            "block at byte 16 has length 9, but 4 bytes follow",
        ),
        (
            Compression.SNAPPY,
            compress(Compression.SNAPPY, b"") + struct.pack(">i", -1),
            "block at byte 16 has length -1",
        ),
        (Compression.LZ4, b"", "ends too early, at byte 0"),
        (Compression.LZ4, b"neither frame nor block", "bad lz4 frame"),
        (Compression.LZ4, compress(Compression.LZ4, b"abc") + b"de", "2 bytes follow"),
        (Compression.ZSTD, b"", "bad zstd frame of 0 bytes"),
        (Compression.ZSTD, b"neither frame nor block", "bad zstd frame of 23 bytes"),
        (Compression.ZSTD, compress(Compression.ZSTD, b"abc") + b"de", "2 bytes of unused data"),
        (Compression.NONE, b"abcd", "more than the 3 bytes allowed"),
    ],
)
def test_errors_say_what_is_wrong_and_where(kind, data, message):
    with pytest.raises(CorruptRecordError, match=message):
        decompress(kind, data, max_bytes=3)
