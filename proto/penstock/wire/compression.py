"""The compressions of Kafka's record batches, in the framing that Kafka's own clients use.

gzip is one or more gzip members; snappy is xerial's block stream (raw snappy is read as well);
lz4 is one LZ4 frame of independent blocks (KIP-57); zstd is one frame (KIP-110).

What is decompressed may come from anyone: every function here bounds its output before it makes
it, and answers garbage with CorruptRecordError. All functions are safe from any thread.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Callable
from typing import Final

from penstock.wire.errors import CorruptRecordError

# The compressors' libraries load when first used: an idle node, which stores batches as they
# come, never needs them.

Buffer = bytes | bytearray | memoryview


class Compression(enum.IntEnum):
    """How the records of a batch are compressed; the values are those on the wire."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_INT32: Final = struct.Struct(">i")

# No format can make more than this many bytes out of one; what a stream claims beyond it is a lie
# that needs no memory to be found out.
_SNAPPY_MAX_RATIO: Final = 22
_LZ4_MAX_RATIO: Final = 255
_ZSTD_MAX_RATIO: Final = 32 * 1024
_SLACK_BYTES: Final = 128 * 1024


def _compress_gzip(data: Buffer) -> bytes:
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def _compress_snappy(data: Buffer) -> bytes:
    import cramjam  # noqa: PLC0415 - see above.

    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(_INT32.pack(len(block)))
        parts.append(block)
    return b"".join(parts)


def _compress_lz4(data: Buffer) -> bytes:
    import lz4.frame  # noqa: PLC0415 - see above.

    compressed: bytes = lz4.frame.compress(
        data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, store_size=False
    )
    return compressed


def _compress_zstd(data: Buffer) -> bytes:
    import zstandard  # noqa: PLC0415 - see above.

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)


def _too_large(kind: Compression, max_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the {kind.name.lower()} data decompresses to more than the {max_bytes} bytes allowed"
    )


def _decompress_gzip(data: Buffer, max_bytes: int) -> bytes:
    parts = []
    room = max_bytes
    rest: Buffer = data
    while True:
        decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            part = decompressor.decompress(rest, room + 1)
        except zlib.error as error:
            at = len(data) - len(rest)
            raise CorruptRecordError(f"bad gzip member at byte {at}: {error}") from None
        room -= len(part)
        if room < 0:
            raise _too_large(Compression.GZIP, max_bytes)
        parts.append(part)
        if not decompressor.eof:
            raise CorruptRecordError(f"the gzip data ends too early, at byte {len(data)}")
        rest = decompressor.unused_data
        if not rest:
            return b"".join(parts)


def _snappy_block(block: Buffer, at: int, room: int, max_bytes: int) -> bytes:
    import cramjam  # noqa: PLC0415 - see above.

    try:
        claimed = cramjam.snappy.decompress_raw_len(block)
        if claimed > len(block) * _SNAPPY_MAX_RATIO:
            raise CorruptRecordError(
                f"the snappy block at byte {at} claims {claimed} bytes, more than {len(block)} "
                "bytes can hold"
            )
        if claimed > room:
            raise _too_large(Compression.SNAPPY, max_bytes)
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise CorruptRecordError(f"bad snappy block at byte {at}: {error}") from None


def _decompress_snappy(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _snappy_block(view, 0, max_bytes, max_bytes)
    end = len(view)
    position = len(_XERIAL_HEADER)
    if end < position:
        raise CorruptRecordError(f"the snappy data ends at byte {end} inside its header")
    parts = []
    room = max_bytes
    while position < end:
        start = position + _INT32.size
        if start > end:
            raise CorruptRecordError(f"the snappy data ends at byte {end} inside a block length")
        (length,) = _INT32.unpack_from(view, position)
        if not 0 <= length <= end - start:
            raise CorruptRecordError(
                f"the snappy block at byte {position} has length {length}, but {end - start} bytes "
                "follow"
            )
        part = _snappy_block(view[start : start + length], start, room, max_bytes)
        room -= len(part)
        parts.append(part)
        position = start + length
    return b"".join(parts)


def _decompress_lz4(data: Buffer, max_bytes: int) -> bytes:
    import lz4.frame  # noqa: PLC0415 - see above.

    decompressor = lz4.frame.LZ4FrameDecompressor()
    limit = min(max_bytes, len(data) * _LZ4_MAX_RATIO + _SLACK_BYTES) + 1
    try:
        out: bytes = decompressor.decompress(data, max_length=limit)
    except RuntimeError as error:
        raise CorruptRecordError(f"bad lz4 frame: {error}") from None
    if len(out) > max_bytes:
        raise _too_large(Compression.LZ4, max_bytes)
    if not decompressor.eof:
        raise CorruptRecordError(f"the lz4 frame ends too early, at byte {len(data)}")
    if decompressor.unused_data:
        raise CorruptRecordError(
            f"{len(decompressor.unused_data)} bytes follow the lz4 frame, which ends at byte "
            f"{len(data) - len(decompressor.unused_data)}"
        )
    return out


def _decompress_zstd(data: Buffer, max_bytes: int) -> bytes:
    import zstandard  # noqa: PLC0415 - see above.

    try:
        # A frame may claim any size; -1 when it does not say.
        claimed = zstandard.frame_content_size(data)
        if claimed > max_bytes:
            raise _too_large(Compression.ZSTD, max_bytes)
        if claimed > len(data) * _ZSTD_MAX_RATIO + _SLACK_BYTES:
            raise CorruptRecordError(
                f"the zstd frame claims {claimed} bytes, more than {len(data)} bytes can hold"
            )
        limit = min(max_bytes, len(data) * _ZSTD_MAX_RATIO + _SLACK_BYTES)
        return zstandard.ZstdDecompressor().decompress(
            data, max_output_size=limit, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptRecordError(f"bad zstd frame of {len(data)} bytes: {error}") from None


_COMPRESSORS: Final[dict[Compression, Callable[[Buffer], bytes]]] = {
    Compression.NONE: bytes,
    Compression.GZIP: _compress_gzip,
    Compression.SNAPPY: _compress_snappy,
    Compression.LZ4: _compress_lz4,
    Compression.ZSTD: _compress_zstd,
}

_DECOMPRESSORS: Final[dict[Compression, Callable[[Buffer, int], bytes]]] = {
    Compression.GZIP: _decompress_gzip,
    Compression.SNAPPY: _decompress_snappy,
    Compression.LZ4: _decompress_lz4,
    Compression.ZSTD: _decompress_zstd,
}


def compress(kind: Compression, data: Buffer) -> bytes:
    """``data`` compressed as Kafka's clients read it. The same input gives the same output."""
    return _COMPRESSORS[kind](data)


def decompress(kind: Compression, data: Buffer, *, max_bytes: int) -> bytes:
    """What ``data`` was compressed from.

    Raises CorruptRecordError when it is malformed, ends too early, has bytes left over or would
    come to more than ``max_bytes``; never uses much more memory than that.
    """
    if kind is not Compression.NONE:
        return _DECOMPRESSORS[kind](data, max_bytes)
    if len(data) > max_bytes:
        raise _too_large(kind, max_bytes)
    return bytes(data)
