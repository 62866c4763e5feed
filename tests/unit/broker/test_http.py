"""The HTTP port of a node: what it answers, and that nobody who reaches it can harm it."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from penstock.broker import http as node_http
from penstock.broker.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES, NodeHttp, Reply
from penstock.wire.errors import AddressInUseError
from tests.support import wait_until

HELD_S = 20.0


class Port:
    """A port with one path that answers, one that waits to be let go, and one that fails."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.now_s = 0.0
        self.server = NodeHttp(
            "127.0.0.1:0",
            {
                "/ok": lambda _: Reply.verdict(""),
                "/no": lambda _: Reply.verdict("the broker is fenced"),
                "/echo": lambda headers: Reply(200, headers.get("x-name", "").encode()),
                "/held": self._held,
                "/fails": self._fails,
                "/much": lambda _: Reply(200, bytes(64 << 20)),
            },
            clock_s=lambda: self.now_s,
        )

    def _held(self, _: Message) -> Reply:
        assert self.let_go.wait(HELD_S)
        return Reply.verdict("")

    def _fails(self, _: Message) -> Reply:
        raise RuntimeError("a route that fails")

    def get(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.read(), response)
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), 10)


class Answer:
    def __init__(self, status: int, body: bytes, response: http.client.HTTPResponse) -> None:
        self.status, self.body, self.response = status, body, response


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.let_go.set()
    port.server.close()


def ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it; what it sent before is read."""
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_a_path_answers_with_what_its_route_says(port: Port) -> None:
    yes, no = port.get("/ok"), port.get("/no?verbose=1")
    assert (yes.status, yes.body) == (200, b"ok\n")
    assert (no.status, no.body) == (503, b"the broker is fenced\n")
    assert port.get("/echo", headers={"X-Name": "orders"}).body == b"orders"


def test_head_has_no_body(port: Port) -> None:
    answer = port.get("/no", method="HEAD")
    assert (answer.status, answer.body) == (503, b"")
    assert answer.response.getheader("Content-Length") == "21"


def test_other_paths_and_methods_are_refused(port: Port) -> None:
    unknown = port.get("/passwd")
    assert unknown.status == 404
    assert b"/ok" in unknown.body
    assert port.get("/ok", method="DELETE").status == 501


def test_a_route_that_fails_leaves_the_port_as_it_was(port: Port) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        port.get("/fails")
    assert port.get("/ok").status == 200
    wait_until(lambda: port.server.connection_count == 0, "its connection is forgotten")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=rf"127\.0\.0\.1:{number}.*metrics\.listen"):
            NodeHttp(f"127.0.0.1:{number}", {})


def test_garbage_is_refused_and_harms_nobody(port: Port) -> None:
    chance = random.Random(7)
    garbage = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),  # A TLS hello.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(100),
        b"GET\r\n\r\n",
        b"GET /ok HTTP/9.9\r\n\r\n",
        b"GET /ok HTTP/1.1\r\n" + b"x" * 3000 + b"\r\n\r\n",
        b"\0" * 4000,
        b"\r\n" * 100,
        *(chance.randbytes(chance.randrange(1, 5000)) for _ in range(30)),
    ]
    for sent in garbage:
        with port.connect() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert ended(connection), sent[:40]
    assert port.get("/ok").status == 200
    wait_until(lambda: port.server.connection_count == 0, "all of them are gone")


def test_a_request_has_a_largest_size(port: Port) -> None:
    with port.connect() as connection:
        lines = b"".join(b"x-%d: %s\r\n" % (n, b"v" * 900) for n in range(MAX_REQUEST_BYTES // 800))
        connection.sendall(b"GET /ok HTTP/1.1\r\n" + lines)
        assert b" 431 " in connection.recv(100)
    assert port.get("/ok").status == 200


def test_one_that_sends_nothing_or_reads_nothing_is_ended_in_time(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The socket's own limit is for each step: who does a little now and then is not ended by it.
    monkeypatch.setattr(node_http._Handler, "timeout", None)
    silent, unread = port.connect(), port.connect()
    with silent, unread:
        silent.sendall(b"GET /ok HT")
        unread.sendall(b"GET /much HTTP/1.0\r\n\r\n")
        wait_until(lambda: port.server.connection_count == 2, "both are there")
        assert port.get("/ok").status == 200
        port.now_s += node_http.REQUEST_S
        wait_until(lambda: port.server.connection_count == 0, "both are ended")
        assert ended(silent)


def test_whoever_keeps_its_request_back_makes_room(port: Port) -> None:
    slow = [port.connect() for _ in range(MAX_CONNECTIONS)]
    try:
        wait_until(lambda: port.server.connection_count == MAX_CONNECTIONS, "all places are taken")
        assert port.get("/ok").status == 200
        assert ended(slow[0]), "the first is the one that has waited for longest"
        slow[-1].sendall(b"GET /ok HTTP/1.0\r\n\r\n")
        assert slow[-1].recv(15) == b"HTTP/1.0 200 OK"
    finally:
        for connection in slow:
            connection.close()


def test_more_than_are_worked_on_are_refused_and_those_go_on(port: Port) -> None:
    held = [port.connect() for _ in range(MAX_CONNECTIONS)]
    try:
        for connection in held:
            connection.sendall(b"GET /held HTTP/1.0\r\n\r\n")
        wait_until(lambda: all_asked(port), "all are worked on")
        with port.connect() as another:
            assert b"503" in another.recv(100)
        port.let_go.set()
        for connection in held:
            assert connection.recv(15) == b"HTTP/1.0 200 OK"
        assert port.get("/ok").status == 200
    finally:
        for connection in held:
            connection.close()


def all_asked(port: Port) -> bool:
    connections = list(port.server._server._open.values())
    return len(connections) == MAX_CONNECTIONS and all(one.is_asked for one in connections)


def test_many_connections_leave_no_descriptor_behind(port: Port) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    many = [port.connect() for _ in range(400)]
    assert port.get("/ok").status == 200
    assert port.server.connection_count <= MAX_CONNECTIONS
    for connection in many:
        connection.close()
    wait_until(lambda: descriptors() <= before, "all descriptors are closed")


def test_no_descriptors_left_is_waited_out(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    def refuse(_: object) -> None:
        raise OSError(24, "Too many open files")

    pauses = node_http.time.sleep
    monkeypatch.setattr(node_http.time, "sleep", lambda s: (tries.append(s), pauses(s)))
    with monkeypatch.context() as patch:
        patch.setattr(node_http.socketserver.TCPServer, "get_request", refuse)
        with port.connect():
            wait_until(lambda: len(tries) >= 2, "it is tried again, with pauses")
    assert port.get("/ok").status == 200


def test_closing_ends_those_that_are_open() -> None:
    port = Port()
    with port.connect() as connection:
        wait_until(lambda: port.server.connection_count == 1, "it is there")
        port.server.close()
        assert ended(connection)
    with pytest.raises(OSError, match="refused"):
        port.connect()
