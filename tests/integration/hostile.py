"""A client that keeps to HTTP/2 and to nothing else: it opens calls as it likes, takes no answers,
and still answers pings, so that nothing but what it does not take gives it away.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

from hpack import Encoder

from penstock.v1 import common_pb2, log_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, RST_STREAM = 0, 1, 4, 6, 7, 8, 3
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
FETCH = "/penstock.v1.Log/Fetch"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class Hostile:
    """One connection. ``window_bytes`` is what it lets each answer have before it takes any."""

    def __init__(self, address: str, window_bytes: int = 0, *, reads: bool = True) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self._encoder = Encoder()
        self._next_stream = 1
        self._lock = threading.Lock()
        self.closed = threading.Event()
        """The node has closed the connection."""
        self.refused: list[int] = []
        """The error codes of streams that were reset."""
        self.taken_bytes = 0
        # What may be sent: on the connection, and on each stream beside what they begin with.
        self._windows: defaultdict[int, int] = defaultdict(int, {0: 65_535})
        self._first_window = 65_535
        self._may_send = threading.Condition()
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window_bytes)
        self._send(PREFACE + frame(SETTINGS, 0, 0, settings))
        if reads:
            threading.Thread(target=self._attend, daemon=True).start()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def call(self, path: str, request: bytes | None, *, ends: bool = True) -> int:
        """Begin a call, with one message unless that is None; the stream."""
        with self._lock:
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            headers = self._encoder.encode(
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", path),
                    (":authority", "node"),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                ]
            )
        sent = frame(HEADERS, END_HEADERS, stream, headers)
        if request is not None:
            message = b"\0" + struct.pack(">I", len(request)) + request
            sent += frame(DATA, END_STREAM if ends else 0, stream, message)
        self._send(sent)
        return stream

    def send_part(self, stream: int, data: bytes) -> None:
        """Send bytes of a message, as far and as soon as the node's windows let it.

        Raises OSError once the node has closed the connection.
        """
        view = memoryview(data)
        while view:
            with self._may_send:
                while not (size := min(len(view), 16_384, self._window(stream))):
                    if self.closed.is_set():
                        raise ConnectionResetError
                    self._may_send.wait(1)
                self._windows[0] -= size
                self._windows[stream] -= size
            self._send(frame(DATA, 0, stream, bytes(view[:size])))
            view = view[size:]

    def reset(self, stream: int) -> None:
        """Give a call up (CANCEL)."""
        self._send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def _window(self, stream: int) -> int:
        return max(0, min(self._windows[0], self._first_window + self._windows[stream]))

    def _opened(self, stream: int, payload: bytes) -> None:
        with self._may_send:
            self._windows[stream] += struct.unpack(">I", payload)[0]
            self._may_send.notify_all()

    def _settled(self, payload: bytes) -> None:
        with self._may_send:
            for setting, value in struct.iter_unpack(">HI", payload):
                if setting == INITIAL_WINDOW_SIZE:
                    self._first_window = value
            self._may_send.notify_all()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self.socket.sendall(data)

    def _attend(self) -> None:
        """Read what the node says about the connection, and count what it sends of answers."""
        try:
            for kind, flags, stream, payload in self._frames():
                if kind == WINDOW_UPDATE:
                    self._opened(stream, payload)
                elif kind == SETTINGS and not flags & ACK:
                    self._settled(payload)
                    self._send(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    self._send(frame(PING, ACK, 0, payload))
                elif kind == RST_STREAM:
                    self.refused.append(struct.unpack(">I", payload)[0])
                elif kind == DATA:
                    self.taken_bytes += len(payload)
        except (OSError, EOFError):
            pass
        self.closed.set()
        with self._may_send:
            self._may_send.notify_all()

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        self.socket.settimeout(None)
        with self.socket.makefile("rb") as stream:
            while True:
                head = stream.read(9)
                if len(head) < 9:
                    raise EOFError
                (size,) = struct.unpack(">I", b"\0" + head[:3])
                kind, flags, number = struct.unpack(">BBI", head[3:])
                yield kind, flags, number, stream.read(size)


def fetch_request(
    topic: str, *, offset: int = 0, max_bytes: int = 50 * 1024 * 1024, max_wait_ms: int = 500
) -> bytes:
    """A fetch of all that one partition has, as bytes."""
    return log_pb2.FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        partitions=[
            log_pb2.FetchPartition(
                partition=common_pb2.TopicPartition(topic=topic, partition=0),
                fetch_offset=offset,
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=max_bytes,
            )
        ],
    ).SerializeToString()
