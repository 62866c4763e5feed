"""Answers that clients have yet to take are bounded, in turn and fairly; who takes nothing goes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.broker.config import NodeConfig
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service import limits
from penstock.broker.service.closing import close_connection
from penstock.broker.service.unsent import Share, Unsent, UnsentLimits
from penstock.wire.errors import RequestTimedOutError
from tests.support import eventually

A, B = "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"


class Counts:
    def __init__(self) -> None:
        self.refused = 0
        self.stalled = 0

    def answer_refused(self) -> None:
        self.refused += 1

    def client_stalled(self) -> None:
        self.stalled += 1


class Bench:
    """100 bytes for all, 60 for each, of which 75 are for who has something already."""

    def __init__(self, stalled_ms: int = 60_000) -> None:
        self.counts = Counts()
        self.closed: list[str] = []
        limits = UnsentLimits(max_bytes=100, connection_max_bytes=60, stalled_ms=stalled_ms)
        self.unsent = Unsent(limits, self._close, self.counts)

    def _close(self, peer: str) -> bool:
        self.closed.append(peer)
        return True

    def taking(self, peer: str, size_bytes: int) -> Share:
        share = self.unsent.share(peer)
        share.take(size_bytes)
        return share

    def in_an_hour(self) -> float:
        return asyncio.get_running_loop().time() + 3600


async def test_a_connection_and_all_together_have_their_bounds() -> None:
    bench = Bench()
    first = bench.taking(A, 40)
    other = bench.unsent.share(A)
    assert other.left() == 20
    assert not other.starved
    other.take(20)
    assert other.left() == 0
    assert other.starved
    # The last quarter is for who has nothing to take yet.
    light = bench.unsent.share(B)
    assert light.left() == 40
    light.take(20)
    assert light.left() == 0
    first.release()
    assert other.left() == 35
    assert light.left() == 35


async def test_what_is_released_is_forgotten_once() -> None:
    bench = Bench()
    share = bench.taking(A, 40)
    share.release()
    assert bench.unsent.total_bytes == 0
    assert not bench.unsent._accounts


async def test_who_waits_is_let_in_in_turn_when_there_is_room() -> None:
    bench = Bench()
    first = bench.taking(A, 60)
    waiting = [bench.unsent.share(A) for _ in range(3)]
    rooms = [asyncio.ensure_future(share.room(bench.in_an_hour())) for share in waiting]
    await asyncio.sleep(0)
    assert not any(room.done() for room in rooms)
    first.release()
    for share, room in zip(waiting, rooms, strict=True):
        await asyncio.wait_for(room, 10)
        share.take(60)
        share.release()
    assert not bench.unsent._waiting


async def test_who_waits_in_vain_is_told_what_to_do() -> None:
    bench = Bench()
    bench.taking(A, 60)
    share = bench.unsent.share(A)
    with pytest.raises(
        RequestTimedOutError, match=r"60 bytes .* unsent.connection.max.bytes is 60"
    ):
        await share.room(asyncio.get_running_loop().time())
    bench.taking(B, 40)
    with pytest.raises(RequestTimedOutError, match=r"100 bytes .* raise unsent.max.bytes"):
        await bench.unsent.share("ipv4:127.0.0.1:3").room(asyncio.get_running_loop().time())
    assert bench.counts.refused == 2
    assert not bench.unsent._waiting


async def test_who_leaves_while_it_waits_holds_up_nobody() -> None:
    bench = Bench()
    first = bench.taking(A, 60)
    gone, stays = bench.unsent.share(A), bench.unsent.share(A)
    leaving = asyncio.ensure_future(gone.room(bench.in_an_hour()))
    staying = asyncio.ensure_future(stays.room(bench.in_an_hour()))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    gone.release()
    first.release()
    await asyncio.wait_for(staying, 10)


async def test_only_who_takes_nothing_is_disconnected() -> None:
    bench = Bench(stalled_ms=1500)
    bench.taking(A, 10)
    reading = bench.taking(B, 10)

    def reads() -> bool:
        nonlocal reading
        reading.release()
        reading = bench.taking(B, 10)
        return bool(bench.closed)

    await eventually(reads, 20)
    assert bench.closed == [A]
    assert bench.counts.stalled == 1
    await bench.unsent.stop()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_closed_by_its_peers_name(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with (
            socket.create_connection((host, port)) as client,
            socket.create_connection((host, port)) as bystander,
        ):
            accepted = [listener.accept()[0], listener.accept()[0]]
            number = client.getsockname()[1]
            peer = f"ipv4:{host}:{number}" if "." in host else f"ipv6:%5B{host}%5D:{number}"
            assert not close_connection(peer, {port + 1}), "it is another port's"
            assert close_connection(peer, {port})
            client.settimeout(10)
            assert client.recv(1) == b""
            bystander.sendall(b"x")
            assert accepted[1].recv(1) == b"x"
            for each in accepted:
                each.close()


@pytest.mark.parametrize("which", [0, 1])
async def test_both_ports_for_clients_are_bounded(which: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        names = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
        config = NodeConfig(broker_listen=names[0], external_listen=names[1])
        unsent = limits.unsent_answers(config, BrokerMetrics())
        unfinished = limits.from_clients(config, BrokerMetrics())
        with socket.create_connection((one, other)[which].getsockname()) as client:
            accepted = (one, other)[which].accept()[0]
            found = {each.address for each in unfinished._find()}
            assert client.getsockname() in found
            assert unsent._close(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
            client.settimeout(10)
            assert client.recv(1) == b""
            accepted.close()
        await unfinished.stop()
        await unsent.stop()


async def test_ports_for_nodes_are_looked_after_once_they_are_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metrics = BrokerMetrics()
        nodes = limits.FromNodes(NodeConfig(), metrics, frozenset)
        with socket.create_connection(listener.getsockname()) as stranger:
            accepted = listener.accept()[0]
            assert [*nodes._unfinished._find()] == []
            nodes.opened(listener.getsockname()[1])
            assert [each.address for each in nodes._unfinished._find()] == [stranger.getsockname()]
            accepted.close()
        metrics.incoming("nodes").client_overfull()
        metrics.unsent("nodes").client_stalled()
        shown = metrics.registry.get_sample_value
        assert shown("penstock_overfull_clients_total", {"ports": "nodes"}) == 1
        assert shown("penstock_unfinished_bytes", {"ports": "nodes"}) == 0
        assert shown("penstock_stalled_clients_total", {"ports": "nodes"}) == 1
        assert shown("penstock_unsent_bytes", {"ports": "nodes"}) == 0
        await nodes.stop()


@pytest.mark.parametrize("peer", ["", "unix:/x", "ipv4:nonsense", "ipv4:127.0.0.1:x", "ipv6::1"])
def test_a_peer_that_has_no_such_connection_is_none(peer: str) -> None:
    assert not close_connection(peer, {9092})
