"""Follows an HTTP/2 connection that passes by: where frames begin, and to which call each belongs.

Nothing is changed on the way. Frames are told from one another by their nine bytes of header; the
header blocks of requests are decoded, since a call's name is in there alone, and each one changes
how the next is to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import hpack

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
CONTINUATION: Final = 9
_PREFACE_KIND: Final = -1
_HEADER_BYTES: Final = 9
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITY: Final = 0x20
_MAX_REMEMBERED: Final = 1024
_MAX_TABLE_BYTES: Final = 1 << 24
"""What the two ends have agreed on is theirs; this only bounds what we keep."""


class Mark(NamedTuple):
    """A frame ends at ``end`` of the bytes that were fed; a header block counts as one frame."""

    end: int
    kind: int
    stream: int
    path: str
    """Of the call; empty where that is not known."""


class _Paths:
    """Header blocks and the ``:path`` in each."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._decoder.max_allowed_table_size = _MAX_TABLE_BYTES
        # What the very same bytes mean, as long as no block has changed how they are read. Most
        # calls on a connection are the same ones again.
        self._known: dict[bytes, str] = {}

    def read(self, block: bytes) -> str:
        """The path; empty without one. Raises HPACKError."""
        found = self._known.get(block)
        if found is not None:
            return found
        size, newest = self._decoder.header_table.maxsize, self._newest()
        path = ""
        for name, value in self._decoder.decode(block, raw=True):
            if name == b":path":
                path = bytes(value).decode(errors="replace")
        # An entry that was put into the table is at its front; none leaves without another one
        # coming, or a change of the size.
        if self._newest() is not newest or self._decoder.header_table.maxsize != size:
            self._known.clear()
        elif len(self._known) < _MAX_REMEMBERED:
            self._known[block] = path
        return path

    def _newest(self) -> object:
        entries = self._decoder.header_table.dynamic_entries
        return entries[0] if entries else None


Calls = dict[int, str]
"""The paths of the calls that are open on one connection, by stream; its directions share it."""


def is_named(path: str, names: Sequence[str]) -> bool:
    """Whether a path such as /penstock.v1.Log/Produce is one of ``names``."""
    return any(path.endswith(("/" + name, "." + name)) for name in names)


class Follower:
    """One direction of a connection. ``requests``: that of whoever has connected.

    It gives up on what is no HTTP/2 (``is_lost``), and finds no frames from then on.
    """

    def __init__(self, calls: Calls, *, requests: bool) -> None:
        self.is_lost = False
        self._calls = calls
        self._paths = _Paths() if requests else None
        self._left = len(PREFACE) if requests else 0
        self._kind = _PREFACE_KIND
        self._flags = 0
        self._stream = 0
        self._head = b""
        self._payload: bytearray | None = bytearray() if requests else None  # Of what is read.
        self._block = bytearray()  # The header block so far.

    def feed(self, data: bytes | memoryview) -> list[Mark]:
        """Take the next bytes; the frames that end in them."""
        marks: list[Mark] = []
        at, size = 0, len(data)
        while at < size and not self.is_lost:
            if self._left:
                taken = min(self._left, size - at)
                if self._payload is not None:
                    self._payload += data[at : at + taken]
                at += taken
                self._left -= taken
            else:
                part = bytes(data[at : at + _HEADER_BYTES - len(self._head)])
                self._head += part
                at += len(part)
                if len(self._head) < _HEADER_BYTES:
                    break
                self._begin()
            if not self._left:
                path = self._calls.get(self._stream, "")  # Before the frame ends the call.
                if self._finish():
                    marks.append(Mark(at, self._kind, self._stream, path))
        return [] if self.is_lost else marks

    def _begin(self) -> None:
        head, self._head = self._head, b""
        self._left = int.from_bytes(head[:3], "big")
        self._kind, self._flags = head[3], head[4]
        self._stream = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
        is_read = self._paths is not None and self._kind in (HEADERS, CONTINUATION)
        self._payload = bytearray() if is_read else None

    def _finish(self) -> bool:
        """The frame is whole; whether it ends what must not be torn."""
        payload, self._payload = self._payload, None
        if self._kind == _PREFACE_KIND:
            self.is_lost = bytes(payload or b"") != PREFACE
            return True
        if self._kind in (HEADERS, CONTINUATION):
            if payload is not None:
                self._block += self._fragment(payload)
            if not self._flags & _END_HEADERS:
                return False
            if self._paths is not None:
                self._open_call(self._paths)
            if self._kind == CONTINUATION:
                self._kind = HEADERS  # What it was the last part of.
        if self._kind == RST_STREAM or (self._paths is None and self._flags & _END_STREAM):
            self._calls.pop(self._stream, None)
        return True

    def _fragment(self, payload: bytearray) -> bytearray:
        if self._kind == CONTINUATION:
            return payload
        start = end = 0
        if self._flags & _PADDED:
            start, end = 1, payload[0] if payload else 0
        if self._flags & _PRIORITY:
            start += 5
        return payload[start : len(payload) - end]

    def _open_call(self, paths: _Paths) -> None:
        block, self._block = bytes(self._block), bytearray()
        try:
            path = paths.read(block)
        except hpack.HPACKError:
            self.is_lost = True
            return
        if path:
            self._calls[self._stream] = path


class Holder:
    """Lets the frames of some calls wait, and all others by, on one direction of a connection.

    What must stay in its order does: the frames of one call, and all header blocks, since each
    one changes how the next is to be read. So the end of a call whose answer waits has the
    headers of later calls wait with it.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._began = b""  # A frame that has not come whole, nothing of which was passed on.
        self._is_torn = False  # A part of the frame that is coming was passed on.
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._streams: dict[int, int] = {}  # How many frames of each call wait.
        self._waiting_of: deque[tuple[int, int]] = deque()
        self._headers = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nor a part of a frame."""
        return not self._waiting and not self._began

    @property
    def next_due(self) -> float | None:
        """When the next one that waits may go."""
        return self._waiting[0][0] if self._waiting else None

    @property
    def waiting_bytes(self) -> int:
        """How much is kept."""
        return len(self._began) + sum(len(frame) for _, frame in self._waiting)

    def watch(self, data: bytes | memoryview) -> None:
        """These bytes went by while nothing was to wait."""
        marks = self._follower.feed(data)
        self._is_torn = not marks or marks[-1].end < len(data)

    def feed(self, data: bytes, names: Sequence[str], now: float, hold_s: float) -> list[bytes]:
        """Take bytes; those that go on at once."""
        offset = len(self._began)
        marks = self._follower.feed(data)
        if self._follower.is_lost:
            return [*self.flush(), data]
        whole, at = self._began + data, 0
        passed: list[bytes] = []
        for mark in marks:
            frame, at = whole[at : offset + mark.end], offset + mark.end
            torn, self._is_torn = self._is_torn, False
            if not torn and self._waits(mark, names):
                self._put(mark, frame, now + hold_s)
            else:
                passed.append(frame)
        rest = whole[at:]
        if self._is_torn:
            passed.append(rest)
            rest = b""
        self._began = rest
        return passed

    def take_due(self, now: float) -> list[bytes]:
        """What has waited for its time."""
        found = []
        while self._waiting and self._waiting[0][0] <= now:
            found.append(self._waiting.popleft()[1])
            kind, stream = self._waiting_of.popleft()
            self._headers -= kind == HEADERS
            self._streams[stream] -= 1
            if not self._streams[stream]:
                del self._streams[stream]
        return found

    def flush(self) -> list[bytes]:
        """Everything, since nothing is to wait any more."""
        found = self.take_due(float("inf"))
        if self._began:
            found.append(self._began)
            self._began, self._is_torn = b"", True
        return found

    def _waits(self, mark: Mark, names: Sequence[str]) -> bool:
        if mark.kind == DATA and is_named(mark.path, names):
            return True
        if mark.kind == HEADERS and self._headers:
            return True
        return mark.kind in (DATA, HEADERS, RST_STREAM) and mark.stream in self._streams

    def _put(self, mark: Mark, frame: bytes, due: float) -> None:
        # One queue, by time: what waits for others alone goes right behind them.
        last = self._waiting[-1][0] if self._waiting else due
        self._waiting.append((max(last, due) if mark.kind == DATA else last, frame))
        self._waiting_of.append((mark.kind, mark.stream))
        self._streams[mark.stream] = self._streams.get(mark.stream, 0) + 1
        self._headers += mark.kind == HEADERS
