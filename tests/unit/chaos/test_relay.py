"""The relay over real sockets, without nodes: servers here, clients here or in another process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.chaos.backends.relay import Relay, Route
from penstock.chaos.cluster import CLIENTS, Link, LinkFault
from tests.support import eventually

NODE = 1
THERE, BACK = Link(CLIENTS, NODE), Link(NODE, CLIENTS)
CUT = LinkFault(cut=True)
HOST = "127.0.0.2"


class Echo:
    """Answers what it is told, and notes how its connections end."""

    def __init__(self) -> None:
        self.heard = b""
        self.ends: list[str] = []
        self.connections = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while said := await reader.read(1 << 16):
                self.heard += said
                writer.write(said)
                await writer.drain()
            self.ends.append("end")
        except OSError:
            self.ends.append("reset")
        finally:
            writer.close()

    def close(self) -> None:
        assert self._server is not None
        self._server.close()


class Stage:
    """A relay before an echo, and another echo that nothing is done to."""

    def __init__(self, relay: Relay, echo: Echo, ports: tuple[int, int]) -> None:
        self.relay = relay
        self.echo = echo
        self.port, self._other_port = ports

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)

    async def let_the_relay_work(self) -> None:
        """Whatever could come through has done so, as what set out later has."""
        reader, writer = await asyncio.open_connection(HOST, self._other_port)
        for _ in range(20):
            writer.write(b"ping")
            await reader.readexactly(4)
        writer.close()

    def cut(self, *links: Link) -> None:
        self.relay.set_faults(dict.fromkeys(links, CUT))


@pytest.fixture
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    relay = Relay(**getattr(request, "param", {}))
    echo, other = Echo(), Echo()
    ports = await echo.start(), await other.start()
    call = "/p.X/Frames"
    relay.listen(
        [
            Route(node, HOST, port, "127.0.0.1", port, call)
            for node, port in zip((NODE, 2), ports, strict=True)
        ]
    )
    yield Stage(relay, echo, ports)
    relay.close()
    echo.close()
    other.close()


async def test_bytes_and_ends_pass(stage: Stage) -> None:
    reader, writer = await stage.connect()
    said = os.urandom(5_000_000)
    writer.write(said)
    writer.write_eof()
    assert await reader.read(-1) == said
    await eventually(lambda: stage.echo.ends == ["end"])
    writer.close()


async def test_a_cut_holds_what_is_said_and_healing_brings_it(stage: Stage) -> None:
    reader, writer = await stage.connect()
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    stage.cut(THERE, BACK)
    stage.cut(THERE, BACK)  # Idempotent.
    writer.write(b"two")
    await stage.let_the_relay_work()
    assert stage.echo.heard == b"one"
    stage.relay.set_faults({})
    stage.relay.set_faults({})
    assert await reader.readexactly(3) == b"two"
    writer.close()


async def test_one_direction_is_cut(stage: Stage) -> None:
    reader, writer = await stage.connect()
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    stage.cut(BACK)
    writer.write(b"two")
    await eventually(lambda: stage.echo.heard == b"onetwo")
    await stage.let_the_relay_work()
    assert not reader._buffer  # type: ignore[attr-defined]  # Nothing has come.
    stage.relay.set_faults({})
    assert await reader.readexactly(3) == b"two"
    writer.close()


@pytest.mark.parametrize("link", [THERE, BACK])
async def test_nobody_connects_through_a_cut(stage: Stage, link: Link) -> None:
    stage.cut(link)
    reader, writer = await stage.connect()
    writer.write(b"hello")
    await stage.let_the_relay_work()
    assert stage.echo.connections == 0
    stage.relay.set_faults({})
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_an_end_in_a_cut_is_heard_after_it(stage: Stage) -> None:
    reader, writer = await stage.connect()
    writer.write(b"one")
    await reader.readexactly(3)
    stage.cut(THERE)
    writer.close()
    await stage.let_the_relay_work()
    assert stage.echo.ends == []
    stage.relay.set_faults({})
    await eventually(lambda: stage.echo.ends == ["end"])


@pytest.mark.parametrize("stage", [{"give_up_s": 0.0}], indirect=True)
async def test_what_a_cut_held_for_longer_than_tcp_tries_is_lost_with_its_connection(
    stage: Stage,
) -> None:
    reader, writer = await stage.connect()
    writer.write(b"one")
    await reader.readexactly(3)
    stage.cut(THERE)
    writer.write(b"two")
    stage.relay.set_faults({})
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(3)
    await eventually(lambda: stage.echo.ends == ["reset"])
    assert stage.echo.heard == b"one"
    writer.close()


async def test_a_reset_is_a_reset_at_the_other_end(stage: Stage) -> None:
    plain = socket.create_connection((HOST, stage.port))
    plain.sendall(b"one")
    await eventually(lambda: stage.echo.heard == b"one")
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    plain.close()
    await eventually(lambda: stage.echo.ends == ["reset"])


async def test_where_nobody_listens_a_connection_is_reset(stage: Stage) -> None:
    stage.echo.close()
    reader, writer = await stage.connect()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()


async def test_latency_is_added_to_each_way(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await stage.connect()
    writer.write(b"one")
    await reader.readexactly(3)
    stage.relay.set_faults({THERE: LinkFault(latency_ms=40), BACK: LinkFault(latency_ms=60)})
    began = loop.time()
    writer.write(b"two")
    await reader.readexactly(3)
    assert loop.time() - began >= 0.1
    writer.close()


async def test_what_waits_for_its_latency_is_healed(stage: Stage) -> None:
    reader, writer = await stage.connect()
    writer.write(b"one")
    await reader.readexactly(3)
    stage.relay.set_faults({THERE: LinkFault(latency_ms=3_600_000)})
    writer.write(b"two")
    late_reader, late_writer = await stage.connect()
    await stage.let_the_relay_work()
    assert (stage.echo.heard, stage.echo.connections) == (b"one", 1)
    stage.relay.set_faults({})
    assert await reader.readexactly(3) == b"two"
    late_writer.write(b"x")
    assert await late_reader.readexactly(1) == b"x"
    for one in (writer, late_writer):
        one.close()


async def test_a_limited_rate_limits_the_sender(stage: Stage) -> None:
    stage.relay.set_faults({THERE: LinkFault(rate_bytes=2_000_000)})
    loop = asyncio.get_running_loop()
    reader, writer = await stage.connect()
    began = loop.time()
    writer.write(bytes(600_000))
    await reader.readexactly(600_000)
    assert loop.time() - began >= 0.25
    writer.close()


async def test_a_slow_reader_holds_up_its_sender_alone(stage: Stage) -> None:
    plain = socket.create_connection((HOST, stage.port))
    plain.setblocking(False)
    sent = 0

    def is_stuck() -> bool:
        nonlocal sent
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += plain.send(bytes(1 << 16))
        return sent > 1 << 20 and len(stage.echo.heard) < sent

    await eventually(is_stuck)
    await stage.let_the_relay_work()
    loop = asyncio.get_running_loop()
    came = 0
    while came < sent:
        came += len(await loop.sock_recv(plain, 1 << 20))
    assert len(stage.echo.heard) == sent
    plain.close()


# --- who is who

_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(b"hello")
while said := connection.recv(100):
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize("is_told_first", [True, False])
async def test_a_link_is_told_by_the_process_that_connects(
    stage: Stage, is_told_first: bool
) -> None:
    """Also if it has connected before the relay is told whose process it is."""
    command = [sys.executable, "-c", _CLIENT, HOST, str(stage.port)]
    # The relay is told of processes, not of tasks: this is one.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:  # noqa: ASYNC220 - it is quick.
        assert client.stdout is not None
        try:
            if not is_told_first:
                assert await asyncio.to_thread(client.stdout.read, 5) == b"hello"
            stage.relay.set_owners({client.pid: 7})
            stage.relay.set_owners({client.pid: 7})
            if is_told_first:
                assert await asyncio.to_thread(client.stdout.read, 5) == b"hello"
            [source] = {one.source for one in stage.relay._connections}
            assert source == 7
            stage.cut(Link(7, NODE), Link(NODE, 7))
            reader, writer = await stage.connect()  # From this process: a client's.
            writer.write(b"mine")
            assert await reader.readexactly(4) == b"mine"
            writer.close()
        finally:
            client.kill()
    await stage.let_the_relay_work()
    assert stage.echo.ends == ["end"], "that of the node is cut, and so is its end"


# --- named messages, with gRPC itself at both ends


class Service(grpc.GenericRpcHandler):
    """Calls that answer with what they are asked, whatever their names."""

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Produce"):
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _stream(self, requests: Any, _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def _answer(self, request: bytes, _context: Any) -> bytes:
        return request


@pytest.fixture
async def channel() -> AsyncIterator[tuple[Relay, grpc.aio.Channel]]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    relay = Relay()
    relay.listen([Route(NODE, HOST, port, "127.0.0.1", port)])
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        yield relay, channel
    relay.close()
    await server.stop(None)


@pytest.mark.parametrize("link", [THERE, BACK])
async def test_messages_of_a_name_wait_alone(
    channel: tuple[Relay, grpc.aio.Channel], link: Link
) -> None:
    relay, opened = channel
    produce: Any = opened.stream_stream("/p.v1.Log/Produce")()  # type: ignore[call-arg]
    fetch: Any = opened.unary_unary("/p.v1.Log/Fetch")  # type: ignore[call-arg]
    await produce.write(b"before")
    assert await produce.read() == b"before"
    relay.set_faults({link: LinkFault(hold=("Produce",), hold_ms=3_600_000)})
    await produce.write(b"held")
    reading = asyncio.ensure_future(produce.read())
    for number in range(200):  # Enough for header tables to be used, and to change.
        said = b"%d" % number * (1 + number * 100)
        assert await fetch(said, metadata=[("n", str(number % 7))], timeout=20) == said
    assert not reading.done()
    relay.set_faults({})
    assert await reading == b"held"
    await produce.write(b"after")
    assert await produce.read() == b"after"
    await produce.done_writing()
    assert await produce.read() == grpc.aio.EOF


async def test_the_answer_to_a_single_call_waits(channel: tuple[Relay, grpc.aio.Channel]) -> None:
    relay, opened = channel
    relay.set_faults({BACK: LinkFault(hold=("AlterPartition",), hold_ms=3_600_000)})
    alter: Any = opened.unary_unary("/p.v1.Controller/AlterPartition")  # type: ignore[call-arg]
    other: Any = opened.stream_stream("/p.v1.Log/Produce")()  # type: ignore[call-arg]
    await other.write(b"opened")
    assert await other.read() == b"opened"
    asked = asyncio.ensure_future(alter(b"smaller"))
    await other.write(b"passes")  # Opened before, it needs no header that would wait.
    assert await other.read() == b"passes"
    assert not asked.done()
    relay.set_faults({})
    assert await asked == b"smaller"
    other.cancel()
