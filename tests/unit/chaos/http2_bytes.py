"""HTTP/2 frames made by hand."""

from __future__ import annotations

import hpack

from penstock.chaos.backends.following import CONTINUATION, DATA, HEADERS, RST_STREAM

END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


class Sender:
    """Makes the frames of one direction; header blocks depend on those before, as in life."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()

    def request(self, stream: int, path: str, *more: tuple[str, str]) -> bytes:
        return frame(HEADERS, stream, self.block((":path", path), *more), END_HEADERS)

    def split_request(self, stream: int, path: str) -> bytes:
        """Its header block in three frames, the first with padding and a priority."""
        block = self.block((":path", path), ("te", "trailers"))
        first = b"\x03" + b"\0\0\0\0\x10" + block[:2] + b"\0\0\0"
        return (
            frame(HEADERS, stream, first, PADDED | PRIORITY)
            + frame(CONTINUATION, stream, block[2:5])
            + frame(CONTINUATION, stream, block[5:], END_HEADERS)
        )

    def headers(self, stream: int, *fields: tuple[str, str], end: bool = False) -> bytes:
        flags = END_HEADERS | (END_STREAM if end else 0)
        return frame(HEADERS, stream, self.block(*fields), flags)

    def block(self, *fields: tuple[str, str]) -> bytes:
        return bytes(self._encoder.encode(list(fields)))


def data(stream: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, stream, payload, END_STREAM if end else 0)


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, stream, b"\0\0\0\x08")


def frames_in(stream_of_bytes: bytes) -> list[tuple[int, int, bytes]]:
    """Kind, stream and payload of each frame."""
    found, at = [], 0
    while at < len(stream_of_bytes):
        size = int.from_bytes(stream_of_bytes[at : at + 3], "big")
        stream = int.from_bytes(stream_of_bytes[at + 5 : at + 9], "big")
        found.append((stream_of_bytes[at + 3], stream, stream_of_bytes[at + 9 : at + 9 + size]))
        at += 9 + size
    return found
