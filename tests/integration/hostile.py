"""A client that keeps to HTTP/2 and to nothing else: it opens calls as it likes, takes no answers,
and still answers pings, so that nothing but what it does not take gives it away.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
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

    def _send(self, data: bytes) -> None:
        with self._lock:
            self.socket.sendall(data)

    def _attend(self) -> None:
        """Read what the node says about the connection, and count what it sends of answers."""
        try:
            for kind, flags, _stream, payload in self._frames():
                if kind == SETTINGS and not flags & ACK:
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
