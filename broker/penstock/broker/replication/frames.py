"""The bytes of a framed connection between brokers: what Fetch carries, without gRPC.

Each end begins with PREAMBLE: eight letters and the version of the format. Frames follow: four
bytes of length, the most significant first, one byte of kind, and so many bytes of a message. The
follower's first message is the hello, the leader's first frame the welcome, or the end. From then
on there are ReplicationFetchRequests in one direction and ReplicationFetchResponses in the other.

Nothing here touches a socket.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.wire.transport import MAX_MESSAGE_BYTES

_MAGIC: Final = b"penstock"
VERSION: Final = 1
PREAMBLE: Final = _MAGIC + struct.pack(">H", VERSION)

MAX_HELLO_BYTES: Final = 1024
"""The largest frame of somebody who was not let in yet."""

_HEADER: Final = struct.Struct(">IB")
_SMALL_BYTES: Final = 4096
_GATHERED_BYTES: Final = 64 * 1024


class Kind(IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    WELCOME = 2
    END = 3


_KINDS: Final = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One frame: what it holds, as bytes."""

    kind: Kind
    body: bytes


class FrameError(Exception):
    """The bytes are no frames of ours. ``cause`` is a word to count it by."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


def encode_header(kind: Kind, size_bytes: int) -> bytes:
    """What goes before the bytes of a message. Raises FrameError for one that nobody would take."""
    if size_bytes > MAX_MESSAGE_BYTES:
        raise FrameError(
            "oversize",
            f"a message of {size_bytes} bytes is larger than a frame may be ({MAX_MESSAGE_BYTES})",
        )
    return _HEADER.pack(size_bytes, kind)


class FrameDecoder:
    """Finds frames in bytes that come in pieces.

    A length is checked before anything is kept for it, and what is kept grows with what has come,
    never with what is announced. After a FrameError the connection is of no use.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_bytes = max_bytes
        """The largest body that is taken. To be raised once the peer is known."""
        self._parts: list[bytes | bytearray] = []
        self._size = 0
        self._began = False
        self._open: Kind | None = None  # A frame of this kind has begun: of its body are the parts,
        self._length = 0  # and so long will it be.

    @property
    def is_between_frames(self) -> bool:
        """Whether nothing of a frame has come that has not come whole."""
        return self._began and self._open is None and not self._size

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes; the frames that are whole now. Raises FrameError."""
        if self._open is not None:
            missing = self._length - self._size
            if len(data) < missing:
                self._keep(data)
                return []
            body = self._taken(data[:missing])
            frame, self._open = Frame(self._open, body), None
            return [frame, *self._split(data, missing)]
        data, at = self._taken(data), 0
        if not self._began:
            _check_magic(data)  # At once: whoever speaks another protocol waits for an answer.
            if len(data) < len(PREAMBLE):
                self._keep(data)
                return []
            _check_version(data)
            self._began, at = True, len(PREAMBLE)
        return self._split(data, at)

    def _taken(self, data: bytes) -> bytes:
        """What was kept, and this."""
        if self._size:
            data = b"".join((*self._parts, data))
            self._parts.clear()
            self._size = 0
        return data

    def _split(self, data: bytes, at: int) -> list[Frame]:
        frames: list[Frame] = []
        end = len(data)
        while end - at >= _HEADER.size:
            length, number = _HEADER.unpack_from(data, at)
            kind = self._checked(length, number)
            begin = at + _HEADER.size
            if end - begin < length:
                self._open, self._length, at = kind, length, begin
                break
            at = begin + length
            frames.append(Frame(kind, data[begin:at]))
        if at < end:
            self._keep(data[at:])
        return frames

    def _checked(self, length: int, number: int) -> Kind:
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError("malformed", f"a frame of kind {number}, which does not exist")
        if length > self.max_bytes:
            raise FrameError(
                "oversize",
                f"a frame of {length} bytes is announced, {self.max_bytes} are the most here",
            )
        return kind

    def _keep(self, data: bytes) -> None:
        """Keep a piece. Small ones are put together: each object costs more than its bytes."""
        self._size += len(data)
        last = self._parts[-1] if self._parts else None
        if len(data) >= _SMALL_BYTES:
            self._parts.append(data)
        elif isinstance(last, bytearray) and len(last) < _GATHERED_BYTES:
            last += data
        else:
            self._parts.append(bytearray(data))


def _check_magic(data: bytes) -> None:
    if not _MAGIC.startswith(data[: len(_MAGIC)]):
        raise FrameError(
            "stranger", "the first bytes are not those of a broker of Penstock that follows"
        )


def _check_version(data: bytes) -> None:
    (version,) = struct.unpack_from(">H", data, len(_MAGIC))
    if version != VERSION:
        raise FrameError("version", f"frames of version {version}; this broker knows {VERSION}")
