"""The HTTP port of a node (``metrics.listen``): its metrics, and what probes ask.

Served by threads, so that it answers while the event loop is busy, or stands still. Whoever can
reach the port may send anything: connections, bytes and time of each are bounded, and where all
places are taken the one that has kept its request back for longest makes room.
"""

from __future__ import annotations

import errno
import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Self

import structlog

from penstock.wire.errors import AddressInUseError
from penstock.wire.transport import parse_address

MAX_CONNECTIONS: Final = 32
MAX_REQUEST_BYTES: Final = 16_384
REQUEST_S: Final = 10.0
"""From accepting a connection to the last byte of the answer; then it is closed, done or not."""

_BACKLOG: Final = 1_024
"""Of connections to be accepted; one that finds no place there comes again after a second, and a
probe that is as patient as Kubernetes by default has given up by then.
"""
_LOOK_S: Final = 0.25  # How often connections that are too old are looked for.
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_PAUSE_S: Final = 0.1
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a path answers."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    encoding: str = ""

    @classmethod
    def verdict(cls, why_not: str) -> Self:
        """200, or 503 and why, as probes want it."""
        return cls(503 if why_not else 200, f"{why_not or 'ok'}\n".encode())


Route = Callable[[Message], Reply]
"""Called in a thread of its own with the request's headers."""


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    since_s: float
    is_asked: bool = False  # The whole request is here.


class NodeHttp:
    """Answers GET and HEAD for the paths of ``routes``. Made and closed on one thread.

    Raises AddressInUseError that names ``address`` when nothing can listen there.
    """

    def __init__(
        self,
        address: str,
        routes: Mapping[str, Route],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        host, port = parse_address(address)
        try:
            self._server = _Server(host, port, routes, clock_s)
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: {error.strerror}; change metrics.listen or stop the "
                "other process"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="http", daemon=True
        )
        self._thread.start()

    @property
    def connection_count(self) -> int:
        """How many connections are open."""
        return self._server.connection_count

    def close(self) -> None:
        """Take no more connections, and end those that there are. Takes a quarter of a second."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.end_all()


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = _BACKLOG

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        clock_s: Callable[[], float],
    ) -> None:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self.routes = routes
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}  # In order of acceptance, by id of the socket.
        super().__init__((str(where[0]), int(where[1])), _Handler)

    @property
    def connection_count(self) -> int:
        return len(self._open)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                # What waits stays in the queue, and the loop around us would ask without a pause.
                time.sleep(_EXHAUSTED_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._admit(request):
            with suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            super().shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="http request", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # No more threads can be had.
            self.shutdown_request(request)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # It went away, or was too slow.
        except Exception:
            log.exception("a request over HTTP failed")
        finally:
            self.shutdown_request(request)

    def _admit(self, request: socket.socket) -> bool:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                slowest = next((one for one in self._open.values() if not one.is_asked), None)
                if slowest is None:
                    return False
                self._end(slowest)
                del self._open[id(slowest.socket)]
            self._open[id(request)] = _Connection(request, self._clock_s())
            return True

    def asked(self, request: socket.socket) -> None:
        """The whole request is here: what remains takes our time and not its sender's."""
        with self._lock:
            connection = self._open.get(id(request))
            if connection is not None and connection.socket is request:
                connection.is_asked = True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            connection = self._open.get(id(request))
            if connection is not None and connection.socket is request:
                del self._open[id(request)]
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End those that are over time: their threads find their sockets shut."""
        before_s = self._clock_s() - REQUEST_S
        with self._lock:
            for connection in self._open.values():
                if connection.since_s <= before_s:
                    self._end(connection)

    def end_all(self) -> None:
        with self._lock:
            for connection in self._open.values():
                self._end(connection)

    @staticmethod
    def _end(connection: _Connection) -> None:
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)


class _Bounded(io.RawIOBase):
    """The bytes of a request, and no more than so many."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST_BYTES

    @property
    def is_used_up(self) -> bool:
        return self._left <= 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._left)
        count = self._connection.recv_into(buffer, wanted) if wanted else 0
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "penstock"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._bounded = _Bounded(self.connection)
        self.rfile = io.BufferedReader(self._bounded)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.asked(self.connection)
        if self._bounded.is_used_up:
            self.send_error(431)
            return
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        if route is None:
            known = " ".join(sorted(self.server.routes))
            self._send(Reply(404, f"there is {known}\n".encode()))
            return
        self._send(route(self.headers))

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        if reply.encoding:
            self.send_header("Content-Encoding", reply.encoding)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """In words of ours: those of the library repeat what was sent."""
        self.server.asked(self.connection)
        self.close_connection = True
        self.command = self.command or "GET"
        self._send(Reply(code, b"this is no request that is answered here\n"))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there.
        """Nothing is logged of a request."""
