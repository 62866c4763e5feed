"""Requests in part are bounded: who has most of them goes, and nobody else, for however long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.unfinished import Incoming, idle, too_many
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.log import LogServicer, add_log_servicer
from penstock.broker.service.sockets import accepted, address_of, can_tell
from penstock.broker.service.unfinished import Unfinished
from penstock.raft_meta.arriving import Arrived
from penstock.raft_meta.guarding import Guarded
from penstock.v1 import log_pb2, replication_pb2
from penstock.v1.log_pb2_grpc import LogStub
from penstock.v1.replication_pb2_grpc import ReplicationStub, add_ReplicationServicer_to_server
from tests.support import eventually
from tests.unit.broker.test_metered_calls import Seen
from tests.unit.broker.test_services import FakeLogs, image_with, produce

MIB = 1024 * 1024
FRAME_BYTES = 16_384


def framed(size_bytes: int, *, tls: bool) -> int:
    """What a request is on the wire, as gRPC sends it."""
    size = size_bytes + 5
    size += 9 * -(-size // FRAME_BYTES)
    return size + 29 * -(-size // FRAME_BYTES) if tls else size


class Wire:
    """A connection as the kernel and gRPC tell of it."""

    def __init__(self, *, tls: bool = True) -> None:
        self.incoming = Incoming(0.0)
        self.tls = tls
        self.received = self.sent = 0
        self.now_s = 0.0

    def request(self, size_bytes: int) -> None:
        self.received += framed(size_bytes, tls=self.tls)
        self.incoming.arrived(size_bytes)

    def part(self, size_bytes: int) -> None:
        self.received += framed(size_bytes, tls=self.tls)

    def look(self, passed_s: float = 1.0) -> int:
        self.now_s += passed_s
        self.incoming.look(self.received, self.sent, self.now_s)
        return int(self.incoming.held_bytes)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("size_bytes", [0, 40, 1_000, 100_000, MIB, 60 * MIB])
def test_whole_requests_leave_nothing_however_many_they_are(size_bytes: int, tls: bool) -> None:
    wire = Wire(tls=tls)
    for _ in range(500):
        for _ in range(20):
            wire.request(size_bytes)
        assert wire.look() == 0


def test_who_reads_for_long_holds_nothing() -> None:
    wire = Wire()
    for _ in range(1_000):
        wire.incoming.begin_call()
        wire.received += 300  # Headers.
        wire.request(120)
        wire.sent += 64 * MIB
        wire.received += 64 * MIB // 32_768 * (26 + 29)  # Two window updates, and a record of TLS.
        wire.received += 10 * 46  # Answers to pings.
        assert wire.look() == 0


def test_what_is_in_part_is_known_beside_what_is_whole() -> None:
    wire = Wire()
    wire.part(20 * MIB)
    assert wire.look() >= 20 * MIB - 4_096
    for _ in range(10):
        wire.request(MIB)
    wire.part(10 * MIB)
    assert wire.look() >= 29 * MIB
    wire.incoming.arrived(30 * MIB)  # All of it is a request now.
    assert wire.look() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * MIB)), max_size=40))
def test_never_more_is_told_than_there_is(steps: list[tuple[bool, int]]) -> None:
    wire, parts = Wire(tls=True), 0
    for whole, size_bytes in steps:
        if whole:
            wire.request(size_bytes)
        else:
            parts += framed(size_bytes, tls=True)
            wire.part(size_bytes)
        assert wire.look() <= parts + 1


def test_what_was_given_up_half_way_is_forgiven_in_time() -> None:
    wire = Wire()
    wire.part(60 * MIB)
    held = wire.look()
    for _ in range(600):
        now = wire.look()
    assert now < held * 0.51
    for _ in range(6_000):
        now = wire.look()
    assert now < MIB // 4


def test_a_number_that_is_anothers_begins_anew() -> None:
    wire = Wire()
    wire.part(20 * MIB)
    wire.look()
    wire.received = 3 * MIB
    assert wire.look() <= 3 * MIB


def holding(size_bytes: int, moved_s: float = 0.0) -> Incoming:
    incoming = Incoming(0.0)
    incoming.held_bytes = size_bytes
    incoming.moved_s = moved_s
    return incoming


def test_those_with_most_go_first_and_no_more_than_need_be() -> None:
    small, large, larger = holding(10), holding(1_000), holding(5_000)
    assert too_many([small, large, larger], 6_010) == []
    assert too_many([small, large, larger], 6_000) == [larger]
    assert too_many([small, large, larger], 900) == [larger, large]
    assert too_many([small, large, larger, holding(0)], 0) == [larger, large, small]


def test_of_those_with_about_the_same_who_waits_longest_goes() -> None:
    slow, quick = holding(1_100, moved_s=1.0), holding(1_200, moved_s=9.0)
    assert too_many([quick, slow], 1_500) == [slow]


def silent_since(began_s: float) -> Incoming:
    return Incoming(began_s)


def test_of_too_many_connections_those_go_that_asked_for_nothing_the_oldest_first() -> None:
    asked, old, new = silent_since(0.0), silent_since(1.0), silent_since(2.0)
    asked.arrived(0)
    assert idle([new, asked, old], 3) == []
    assert idle([new, asked, old], 2) == [old]
    assert idle([new, asked, old], 0) == [old, new]


# --- with sockets --------------------------------------------------------------------------------


class Counts:
    def __init__(self) -> None:
        self.overfull = self.idle = 0

    def client_overfull(self) -> None:
        self.overfull += 1

    def client_idle(self) -> None:
        self.idle += 1


class Pair:
    """A connection that this process accepted. What comes is read, as gRPC does."""

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.client = socket.create_connection((host, port), timeout=10)
        self.accepted, _ = listener.accept()
        name = self.client.getsockname()
        self.peer = f"ipv4:{name[0]}:{name[1]}"

    def bring(self, size_bytes: int) -> None:
        left = size_bytes
        while left:
            step = min(left, 65_536)
            self.client.sendall(b"x" * step)
            left -= step
            while step:
                step -= len(self.accepted.recv(step))

    @property
    def ended(self) -> bool:
        self.client.setblocking(False)
        try:
            return self.client.recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.client.close()
        self.accepted.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@contextlib.contextmanager
def pairs(listener: socket.socket, count: int) -> Iterator[list[Pair]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Pair(listener))) for _ in range(count)]


async def test_who_holds_too_much_is_closed_and_the_others_are_not(
    listener: socket.socket,
) -> None:
    counts = Counts()
    port = listener.getsockname()[1]
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), counts)
    unfinished.start()
    with pairs(listener, 3) as (hostile, busy, silent):
        arrived = unfinished.call(busy.peer)
        unfinished.call(hostile.peer)

        async def all_at_once() -> None:
            busy.bring(20 * MIB)
            arrived(20 * MIB)
            silent.bring(MIB)
            hostile.bring(5 * MIB)

        await all_at_once()
        await eventually(lambda: hostile.ended, 20)
        assert counts.overfull == 1
        hostile.close()
        await eventually(lambda: unfinished.total_bytes < MIB + 65_536, 20)
        assert not busy.ended
        assert not silent.ended
    await unfinished.stop()


async def test_who_is_spared_is_not_closed_for_what_others_sent(listener: socket.socket) -> None:
    """Each of the others has less than it, and all of them together too much."""
    counts = Counts()
    port = listener.getsockname()[1]
    spared: set[str] = set()
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), counts, spared=lambda: spared)
    unfinished.start()
    with pairs(listener, 7) as (link, *others):
        spared.add(link.peer)
        for one in (link, *others):
            unfinished.call(one.peer)
        link.bring(5 * MIB)
        for one in others:
            one.bring(MIB - 65_536)
        await eventually(lambda: counts.overfull > 0, 20)
        await eventually(lambda: not unfinished._in_doubt, 20)
        assert not link.ended
        # Nobody may have more than one request, though.
        link.bring(61 * MIB)
        await eventually(lambda: link.ended, 20)
    await unfinished.stop()


async def test_a_port_that_has_few_connections_left_does_without_idle_ones(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.service.unfinished._SEARCH_S", 0.1)
    counts = Counts()
    port = listener.getsockname()[1]
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), counts, crowd=10)
    unfinished.start()
    with pairs(listener, 5) as busy, pairs(listener, 10) as silent:
        for one in busy:
            unfinished.call(one.peer)(10)
        await eventually(lambda: sum(one.ended for one in silent) == 5, 20)
        assert not any(one.ended for one in busy)
        assert counts.idle == 5
        for one in silent:
            one.close()
        await eventually(lambda: not unfinished._crowded, 20)
    await unfinished.stop()


async def test_a_connection_that_never_called_is_found_too(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request is not whole: gRPC has called nobody."""
    monkeypatch.setattr("penstock.broker.service.unfinished._SEARCH_S", 0.1)
    port = listener.getsockname()[1]
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), Counts())
    unfinished.start()
    with pairs(listener, 1) as (hostile,):
        hostile.bring(5 * MIB)
        await eventually(lambda: hostile.ended, 20)
    await unfinished.stop()


async def test_connections_that_are_gone_are_forgotten(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), Counts())
    unfinished.start()
    with pairs(listener, 20) as some:
        for one in some:
            unfinished.call(one.peer)(10)
        await eventually(lambda: len(unfinished._connections) == 20, 20)
    with pairs(listener, 1) as (last,):
        unfinished.call(last.peer)
        await eventually(
            lambda: len(unfinished._by_address) == len(unfinished._connections) == 1, 20
        )
        assert [*unfinished._by_peer] == [last.peer]
        assert len(unfinished._peers) == 1
    await unfinished.stop()


async def test_a_loop_that_was_busy_is_no_reason_to_close(listener: socket.socket) -> None:
    """What came meanwhile is whole, and was not handed over yet."""
    port = listener.getsockname()[1]
    unfinished = Unfinished(4 * MIB, lambda: accepted({port}), counts := Counts())
    unfinished.start()
    with pairs(listener, 1) as (busy,):
        arrived = unfinished.call(busy.peer)
        await eventually(lambda: bool(unfinished._connections), 20)
        busy.bring(8 * MIB)
        looks: list[bool] = []
        look = unfinished._look

        def looked(now_s: float) -> float:
            delay_s = look(now_s)
            if not looks and unfinished.total_bytes > 4 * MIB:
                asyncio.get_running_loop().call_soon(arrived, 8 * MIB)
            looks.append(unfinished.total_bytes > 4 * MIB)
            return delay_s

        unfinished._look = looked  # type: ignore[method-assign]  # To come right behind it.
        await eventually(lambda: len(looks) > 2, 20)
        assert looks[0]
        assert not any(looks[1:])
        assert not busy.ended
    assert counts.overfull == 0
    await unfinished.stop()


async def test_without_descriptors_to_look_by_nothing_is_forgotten() -> None:
    def none_left() -> Iterator[Any]:
        raise OSError(24, "too many open files")

    unfinished = Unfinished(4 * MIB, none_left, Counts())
    unfinished.start()
    unfinished.call("ipv4:127.0.0.1:1")
    await eventually(lambda: unfinished._searched_s > unfinished._told_s + 60, 20)
    await eventually(lambda: unfinished._search is None and not unfinished._news, 20)
    assert [*unfinished._by_peer] == ["ipv4:127.0.0.1:1"]
    await unfinished.stop()


def test_this_system_tells() -> None:
    assert can_tell()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_what_went_through_a_connection_is_told(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::"
    options = {"family": family, "dualstack_ipv6": family == socket.AF_INET6}
    with socket.create_server((host, 0), **options) as listener:  # type: ignore[arg-type]  # Both fit.
        port = listener.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as client,
            listener.accept()[0] as ours,
        ):
            client.sendall(b"x" * 1_000)
            assert len(ours.recv(600, socket.MSG_WAITALL)) == 600
            [found] = accepted({port})
            assert found.address == client.getsockname()
            assert (told := found.transferred()) is not None
            assert told.received_bytes == 600
            ours.close()
            assert found.transferred() is None
            assert not found.shut_down()


def test_a_number_that_another_has_now_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pairs(listener, 1) as (first,):
            [found] = accepted({port})
            number = first.accepted.fileno()
            first.close()
            with pairs(listener, 1) as (second,):
                # It is the lowest one that is free, and so most likely this one's already.
                taken = os.dup2(second.accepted.fileno(), number)
                assert found.transferred() is None
                assert not found.shut_down()
                assert not second.ended
                if taken != second.accepted.fileno():
                    os.close(taken)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:80", ("127.0.0.1", 80)),
        ("ipv6:%5B::ffff:127.0.0.1%5D:80", ("127.0.0.1", 80)),
        ("ipv6:[fe80::1%25eth0]:80", ("fe80::1", 80)),
        ("unix:/x", None),
    ],
)
def test_peers_are_read(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


# --- with gRPC -----------------------------------------------------------------------------------


async def test_all_requests_of_all_kinds_of_calls_are_counted() -> None:
    server = aio.server()
    told: dict[str, list[int]] = {}

    def arrivals(peer: str) -> Arrived:
        return told.setdefault(peer, []).append

    guarded: Any = Guarded(server, arrivals=arrivals)
    logs = FakeLogs()
    logs.gate.set()
    image = image_with("orders")
    servicer = LogServicer(logs, image, BrokerMetrics(), arrivals=arrivals)  # type: ignore[arg-type]  # A fake.
    add_log_servicer(servicer, guarded)
    add_ReplicationServicer_to_server(Seen(), guarded)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request = produce(1)
    once = log_pb2.ProduceOnceRequest(request=request)
    push = replication_pb2.ReplicationFetchRequest(
        hello=replication_pb2.FollowerHello(cluster_id="c" * 50)
    )
    sizes: list[int] = []
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await LogStub(channel).ProduceOnce(once)
        sizes.append(once.ByteSize())
        stream = LogStub(channel).Produce()  # type: ignore[call-arg]  # The stubs want more.
        for _ in range(2):
            await stream.write(request)
            await stream.read()
            sizes.append(request.ByteSize())
        await stream.done_writing()
        copying = ReplicationStub(channel).Fetch()  # type: ignore[call-arg]  # The stubs want more.
        for _ in range(2):
            await copying.write(push)
            await copying.read()
            sizes.append(push.ByteSize())
        await copying.done_writing()
        assert await copying.code() is grpc.StatusCode.OK
    await server.stop(None)
    [found] = told.values()
    assert found == sizes
