"""The Replication service: followers that come by gRPC, and what they ask besides the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from penstock.broker.replication.leader import (
    MAX_PUSH_BYTES,
    FollowerStream,
    LeaderSide,
    follower_status,
)
from penstock.broker.replication.ports import EOF, Push, StreamBrokenError
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.v1 import replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationServicer as ReplicationServicerBase
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.laden import REPLICATION_PUSH


class ReplicationServicer(ReplicationServicerBase):
    """Serves the followers of what this broker leads.

    ``authentication`` says who a follower is by its certificate, ``located`` where followers are
    served, ``count_served`` is told of each that is let in.
    """

    def __init__(
        self,
        manager: LeaderSide,
        authentication: PeerAuthentication,
        located: replication_pb2.LocateResponse,
        count_served: Callable[[], None] = lambda: None,
    ) -> None:
        self._manager = manager
        self._authentication = authentication
        self._located = located
        self._count_served = count_served

    async def Locate(  # noqa: N802 - the protocol's name for it.
        self, request: replication_pb2.LocateRequest, context: Any
    ) -> replication_pb2.LocateResponse:
        """Say where followers are served."""
        return self._located

    async def ReadBatches(  # noqa: N802 - the protocol's name for it.
        self, request: replication_pb2.ReadBatchesRequest, context: Any
    ) -> replication_pb2.ReadBatchesResponse:
        """Read what a follower's log is damaged at."""
        await self._authentication.require(context, request.hello.node_id)
        key = TopicIdPartition(TopicId(request.partition.topic_id), request.partition.partition)
        start = None  # It is told as soon as it is known, with a refusal too.
        try:
            self._manager.check_follower(request.hello)
            start = self._manager.log_start_in(key, request.leader_epoch)
            records = await self._manager.read_batches(
                key, request.leader_epoch, request.offset, min(request.max_bytes, MAX_PUSH_BYTES)
            )
        except PenstockError as error:
            return replication_pb2.ReadBatchesResponse(
                error=error.to_proto(), log_start_offset=start
            )
        return replication_pb2.ReadBatchesResponse(records=records, log_start_offset=start)

    async def Fetch(  # type: ignore[override]  # noqa: N802 - the protocol's name for it.
        self, request_iterator: Any, context: Any
    ) -> None:
        """Serve one follower until it goes; see penstock.v1.Replication."""
        first = await context.read()
        if first is EOF:
            return
        if first.WhichOneof("message") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be the hello"
            )
        await self._authentication.require(context, first.hello.node_id)
        try:
            self._manager.check_follower(first.hello)
        except PenstockError as error:
            await context.abort(follower_status(error), error.message)
        self._count_served()
        try:
            await FollowerStream(self._manager, first.hello).run(_ServedByGrpc(context))
        except StreamBrokenError as error:
            await context.abort(error.status, error.reason)


class _ServedByGrpc:
    """A follower's stream by gRPC (ServedStream)."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read_all(
        self, handle: Callable[[replication_pb2.ReplicationFetchRequest], object]
    ) -> None:
        """Hand on each message until the follower ends its side."""
        while (request := await self._context.read()) is not EOF:
            handle(request)

    async def write(self, message: Push) -> None:
        """Send a message."""
        await self._context.write(REPLICATION_PUSH.whole(message))
