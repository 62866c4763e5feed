from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from penstock.client import AdminClient, AsyncAdminClient, AsyncProducer, BootstrapError
from tests.unit.client.fake_broker import FakeCluster


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def failure(servers: str) -> str:
    async with AsyncAdminClient(servers, bootstrap_timeout_ms=300) as admin:
        with pytest.raises(BootstrapError) as caught:
            await admin.describe_cluster()
    return caught.value.message


async def test_a_refused_connection_says_so(closed_port: int) -> None:
    message = await failure(f"127.0.0.1:{closed_port}")
    assert f"127.0.0.1:{closed_port}: connection refused" in message
    assert "Check the addresses" in message


async def test_a_name_says_what_it_resolved_to(closed_port: int) -> None:
    message = await failure(f"localhost:{closed_port}")
    assert f"localhost:{closed_port}: resolved to 127.0.0.1: connection refused" in message


async def test_a_name_that_does_not_resolve_is_no_missing_broker() -> None:
    message = await failure("no-such-host.invalid:9092")
    assert "the name 'no-such-host.invalid' does not resolve" in message


async def test_every_address_is_named(closed_port: int) -> None:
    message = await failure(f"no-such-host.invalid:1,127.0.0.1:{closed_port}")
    assert "no-such-host.invalid" in message
    assert f"127.0.0.1:{closed_port}: connection refused" in message


async def test_something_that_is_no_broker_is_told_apart() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        message = await failure(f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}: something listens, but does not answer as a Penstock" in message


async def test_another_grpc_service_is_told_apart() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        message = await failure(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
    assert "does not answer as a Penstock broker (UNIMPLEMENTED" in message


async def test_an_address_that_never_answers_is_told_apart() -> None:
    with socket.socket() as silent:  # Listens, accepts nothing, says nothing.
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        message = await failure(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "something listens, but does not answer as a Penstock broker" in message
    assert "DEADLINE_EXCEEDED" in message


async def test_one_good_address_is_enough(cluster: FakeCluster, closed_port: int) -> None:
    servers = f"no-such-host.invalid:1,127.0.0.1:{closed_port},{cluster.bootstrap}"
    async with AsyncAdminClient(servers, bootstrap_timeout_ms=5_000) as admin:
        assert (await admin.describe_cluster()).cluster_id == "fake"


async def test_a_cluster_that_comes_up_in_time_is_waited_for(cluster: FakeCluster) -> None:
    bootstrap = cluster.bootstrap
    for node in cluster.nodes.values():
        await node.stop()
    async with AsyncAdminClient(bootstrap, bootstrap_timeout_ms=15_000) as admin:
        asking = asyncio.ensure_future(admin.describe_cluster())
        await asyncio.wait([asking], timeout=0.2)
        for node in cluster.nodes.values():
            await node.start()
        assert (await asking).cluster_id == "fake"


async def test_a_producer_says_it_at_the_first_send_and_may_try_again(
    closed_port: int,
) -> None:
    producer = AsyncProducer(f"127.0.0.1:{closed_port}", bootstrap_timeout_ms=100)
    for _ in range(2):
        with pytest.raises(BootstrapError, match="connection refused"):
            await producer.send("t", b"v")
    await producer.close()


def test_the_synchronous_client_says_the_same(closed_port: int) -> None:
    with (
        AdminClient(f"127.0.0.1:{closed_port}", bootstrap_timeout_ms=100) as admin,
        pytest.raises(BootstrapError, match="connection refused"),
    ):
        admin.list_topics()
