"""A server that speaks Elasticsearch's bulk interface, keeps documents, and fails as it is told."""

from __future__ import annotations

import gzip
import json
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

Item = dict[str, Any]


@dataclass
class Request:
    """What came in."""

    headers: dict[str, str]
    path: str
    query: dict[str, list[str]]
    size: int
    operations: list[tuple[str, Item]]


@dataclass
class FakeElasticsearch:
    """Documents by index and id: their version and their source.

    ``answers`` has what is to happen to the next requests, one each: a status for the whole of it,
    "die" to close the connection once it is carried out, "die early" before. ``item_error`` says of
    an action the status and reason that it is refused with.
    """

    documents: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    answers: deque[int | str] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    item_error: Callable[[Item, Any], tuple[int, str] | None] = lambda about, document: None
    connections: int = 0
    url: str = ""

    def of(self, index: str) -> dict[str, Any]:
        return {key: source for (name, key), (_, source) in self.documents.items() if name == index}

    def bulk(self, body: bytes) -> list[tuple[str, Item, Any]]:
        lines = body.split(b"\n")
        assert lines.pop() == b"", "a bulk request ends in a newline"
        found = []
        pending = iter(lines)
        for line in pending:
            ((kind, about),) = json.loads(line).items()
            found.append((kind, about, None if kind == "delete" else json.loads(next(pending))))
        return found

    def carry_out(self, kind: str, about: Item, document: Any) -> Item:
        if (error := self.item_error(about, document)) is not None:
            return {"status": error[0], "error": {"type": "as_told", "reason": error[1]}}
        place = (about["_index"], about["_id"])
        version, there = self.documents.get(place, (-1, None))
        if about.get("version_type") == "external":
            if about["version"] <= version:
                reason = f"current version [{version}] is higher or equal"
                kind_of = "version_conflict_engine_exception"
                return {"status": 409, "error": {"type": kind_of, "reason": reason}}
            version = about["version"]
        else:
            version += 1
        if kind == "delete":
            self.documents[place] = (version, None)
            if there is None:
                return {"status": 404, "result": "not_found"}
            return {"status": 200, "result": "deleted"}
        if kind == "update":
            document = {**(there or {}), **document["doc"]}
        self.documents[place] = (version, document)
        return {"status": 201 if there is None else 200}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: ClassVar[FakeElasticsearch]
    lock: ClassVar[threading.Lock]

    def setup(self) -> None:
        super().setup()
        with self.lock:
            self.fake.connections += 1

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(sent) if self.headers["Content-Encoding"] == "gzip" else sent
        with self.lock:
            parts = urlsplit(self.path)
            operations = self.fake.bulk(body)
            self.fake.requests.append(
                Request(
                    dict(self.headers), parts.path, parse_qs(parts.query), len(sent),
                    [(kind, about) for kind, about, _ in operations],
                )
            )  # fmt: skip
            answer = self.fake.answers.popleft() if self.fake.answers else 200
            if answer == "die early":
                self.close_connection = True
                return
            items = []
            if answer in ("die", 200):
                items = [{kind: self.fake.carry_out(kind, *rest)} for kind, *rest in operations]
        if answer == "die":
            self.close_connection = True
            return
        self.answer(int(answer), {"items": items} if answer == 200 else {"error": "as told"})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            data = gzip.compress(data)
        self.send_response(status)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # A client that goes away is what some tests are about.


@contextmanager
def running(tls: ssl.SSLContext | None = None) -> Iterator[FakeElasticsearch]:
    """One on a free port of the loopback interface."""
    fake = FakeElasticsearch()
    handler = type("Handler", (_Handler,), {"fake": fake, "lock": threading.Lock()})
    with _Server(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        fake.url = f"{scheme}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
