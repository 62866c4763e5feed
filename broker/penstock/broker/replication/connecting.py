"""How a follower finds the port of another broker that serves followers."""

from __future__ import annotations

from typing import Any, Final

from grpc import aio

from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.transport import format_address

_LOCATE_TIMEOUT_S: Final = 5.0


class ReplicationConnector:
    """Opens channels to brokers for replication (penstock.broker.replication.ports).

    Under TLS the leader is asked first: where clients need no certificate, their port asks nobody
    for one, and followers are served at another. Both ends of either are known by certificate.
    """

    def __init__(self, connector: NodeConnector) -> None:
        self._connector = connector

    async def open(self, node_id: int, host: str, port: int) -> aio.Channel:
        """A new channel to where the broker serves followers. Close it. Raises AioRpcError."""
        channel = self._connector.open(format_address(host, port), node_id)
        if not self._connector.is_secure:
            return channel
        try:
            stub: Any = ReplicationStub(channel)
            request = replication_pb2.LocateRequest()
            found = await stub.Locate(request, timeout=_LOCATE_TIMEOUT_S)
        except BaseException:
            await channel.close(None)
            raise
        if not found.port:
            return channel
        await channel.close(None)
        return self._connector.open(format_address(host, found.port), node_id)
