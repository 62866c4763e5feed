"""A name that stands for another address after a while, as that of a pod does."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from penstock.wire.transport import CHANNEL_OPTIONS, SERVER_OPTIONS

NAME = "penstock-0.test"
MOST_S = 10.0
"""Until the new address is used: gRPC's default makes this 30 s."""
_A, _IN, _ANSWERED, _SECONDS = 1, 1, 0x8180, 0


class Names(asyncio.DatagramProtocol):
    """A DNS server that knows one address for whatever name it is asked for."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack_from("!H", data, end - 4)
        count = 1 if kind == _A else 0
        answer = data[:2] + struct.pack("!5H", _ANSWERED, 1, count, 0, 0) + data[12:end]
        if count:
            answer += struct.pack("!HHHIH", 0xC00C, _A, _IN, _SECONDS, 4)
            answer += socket.inet_aton(self.address)
        self.transport.sendto(answer, addr)


async def serve(host: str, port: int = 0) -> tuple[aio.Server, int]:
    server = aio.server(options=SERVER_OPTIONS)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, port


async def ask(channel: aio.Channel) -> bool:
    """Whether the server can be reached."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
    except aio.AioRpcError:
        return False
    return True


@pytest.mark.timeout(60)
async def test_a_channel_finds_its_peer_at_the_next_address_of_its_name() -> None:
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Names("127.0.0.51"), local_addr=("127.0.0.1", 0)
    )
    dns_port = transport.get_extra_info("sockname")[1]
    servers = [await serve("127.0.0.51")]
    (first, port) = servers[0]
    target = f"dns://127.0.0.1:{dns_port}/{NAME}:{port}"
    try:
        async with aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
            assert await ask(channel)
            await first.stop(0)
            assert not await ask(channel)  # It looks the name up, which has not moved yet.
            names.address = "127.0.0.52"
            servers.append(await serve("127.0.0.52", port))
            async with asyncio.timeout(MOST_S):
                while not await ask(channel):
                    pass  # gRPC tries again after its back-off.
    finally:
        for server, _ in servers:
            await server.stop(0)
        transport.close()
