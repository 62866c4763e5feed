"""How a broker reaches one that leads: where it is served, and by what transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog
from grpc import StatusCode, aio

from penstock.broker.replication.frame_stream import FrameStream, said_in, tune_socket
from penstock.broker.replication.ports import (
    EOF,
    LeaderStream,
    MarkersStream,
    Push,
    StreamBrokenError,
)
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import coordination_pb2, replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.laden import REPLICATION_PUSH
from penstock.wire.transport import format_address

logger = structlog.get_logger()

_LOCATE_TIMEOUT_S: Final = 5.0

FRAMES_TIMEOUT_S: Final = 2.0
"""So long a leader may take to welcome a follower that comes with frames. It has just answered by
gRPC: what takes longer is a network that swallows connections to that port."""


class ReplicationConnector:
    """Reaches brokers for replication (penstock.broker.replication.ports). On one event loop.

    The leader is asked first where it serves followers. Frames are used where both ends have them;
    where that fails before the leader has said anything, gRPC is, as with a leader that has none.
    Under TLS both ends of either are known by certificate.
    """

    def __init__(self, connector: NodeConnector, *, frames: bool = True) -> None:
        self._connector = connector
        self._frames = frames
        self._told: dict[int, str] = {}  # Why frames are not used, by leader.

    async def open(self, node_id: int, host: str, port: int) -> aio.Channel:
        """A new channel to where the broker serves followers. Close it. Raises AioRpcError."""
        channel = self._connector.open(format_address(host, port), node_id)
        if not self._connector.is_secure:
            return channel
        try:
            found = await self._locate(channel)
        except BaseException:
            await channel.close(None)
            raise
        return await self._move(channel, node_id, host, found)

    async def open_stream(
        self, node_id: int, host: str, port: int, hello: replication_pb2.FollowerHello
    ) -> LeaderStream:
        """A new stream, the hello said. Close it. Raises StreamBrokenError."""
        channel = self._connector.open(format_address(host, port), node_id)
        try:
            found = await self._locate(channel)
            if found.frames_port and self._frames:
                first = replication_pb2.ReplicationFetchRequest(hello=hello)
                stream = await self._try_frames(
                    node_id, host, found.frames_port, first, REPLICATION_PUSH.parse
                )
                if stream is not None:
                    return await _without(channel, stream)
            channel = await self._move(channel, node_id, host, found)
            return await GrpcStream.begin(channel, hello)
        except BaseException as error:
            await channel.close(None)
            if isinstance(error, aio.AioRpcError):
                raise _broken(error) from error
            raise

    async def open_markers(
        self, node_id: int, host: str, port: int, hello: replication_pb2.FollowerHello
    ) -> MarkersStream | None:
        """A new connection to bring a leader marks, the hello said. End it with ``cancel``.

        None where there is no way but to call WriteMarkers. Raises StreamBrokenError.
        """
        if not self._frames:
            return None
        channel = self._connector.open(format_address(host, port), node_id)
        try:
            found = await self._locate(channel)
        except aio.AioRpcError as error:
            raise _broken(error) from error
        finally:
            await channel.close(None)
        if not found.frames_port or not found.marks_in_frames:
            return None
        first = replication_pb2.ReplicationFetchRequest(coordinator=hello)
        parse = coordination_pb2.MarkersAnswer.FromString
        return await self._try_frames(node_id, host, found.frames_port, first, parse)

    async def _locate(self, channel: aio.Channel) -> replication_pb2.LocateResponse:
        """Where the broker serves followers. Raises AioRpcError."""
        stub: Any = ReplicationStub(channel)
        request = replication_pb2.LocateRequest()
        found: replication_pb2.LocateResponse = await stub.Locate(
            request, timeout=_LOCATE_TIMEOUT_S
        )
        return found

    async def _move(
        self, channel: aio.Channel, node_id: int, host: str, found: replication_pb2.LocateResponse
    ) -> aio.Channel:
        """The channel, or one to the port that is for followers."""
        if not found.port:
            return channel
        await channel.close(None)
        return self._connector.open(format_address(host, found.port), node_id)

    async def _try_frames(
        self,
        node_id: int,
        host: str,
        port: int,
        first: replication_pb2.ReplicationFetchRequest,
        parse: Callable[[bytes], Any],
    ) -> FrameStream | None:
        """The stream, the first message sent; None where the port is no way to this leader.

        Raises StreamBrokenError with the leader's own reason.
        """
        try:
            async with asyncio.timeout(FRAMES_TIMEOUT_S):
                stream = await self._connect(node_id, host, port, first, parse)
        except StreamBrokenError as error:
            if error.cause == "refused":
                raise
            reason = error.reason
        except TimeoutError:
            reason = f"nothing was answered within {FRAMES_TIMEOUT_S:g} s"
        except OSError as error:
            reason = str(error)
        else:
            self._told.pop(node_id, None)
            return stream
        if self._told.get(node_id) != reason:
            self._told[node_id] = reason
            logger.warning(
                "replication goes by gRPC, which costs more: the leader's port for frames does not "
                "serve",
                leader=node_id,
                address=format_address(host, port),
                reason=reason,
                next_step="let brokers reach each other at replication.frames.listen, or set "
                "replication.transport=grpc",
            )
        return None

    async def _connect(
        self,
        node_id: int,
        host: str,
        port: int,
        first: replication_pb2.ReplicationFetchRequest,
        parse: Callable[[bytes], Any],
    ) -> FrameStream:
        loop = asyncio.get_running_loop()
        context = self._connector.tls_context()
        stream = FrameStream(parse)
        transport, _ = await loop.create_connection(
            lambda: stream,
            host,
            port,
            ssl=context,
            server_hostname=None if context is None else self._connector.expected_name(node_id),
        )
        try:
            tune_socket(transport.get_extra_info("socket"))
            refusal = self._connector.refusal(stream.peer_names, node_id)
            if refusal is not None:
                raise StreamBrokenError(refusal.status, refusal.reason)
            await stream.write(first)
            welcome = await stream.read_welcome()
            cluster_id = said_in(first).cluster_id
            if (welcome.cluster_id, welcome.node_id) != (cluster_id, node_id):
                raise StreamBrokenError(
                    StatusCode.FAILED_PRECONDITION,
                    f"broker {welcome.node_id} of cluster {welcome.cluster_id!r} is there instead",
                )
        except BaseException:
            stream.cancel()
            raise
        stream.trust()
        return stream


class GrpcStream:
    """A stream to a leader by gRPC (LeaderStream); it owns the channel."""

    def __init__(self, channel: aio.Channel, call: Any) -> None:
        self._channel = channel
        self._call = call

    @classmethod
    async def begin(cls, channel: aio.Channel, hello: replication_pb2.FollowerHello) -> GrpcStream:
        """Say hello on the channel. Raises StreamBrokenError; the channel is then the caller's."""
        stub: Any = ReplicationStub(channel)  # The type stubs know the blocking calls only.
        stream = cls(channel, stub.Fetch())
        await stream.write(replication_pb2.ReplicationFetchRequest(hello=hello))
        return stream

    async def read_all(self, handle: Callable[[Push], object]) -> None:
        """Hand on each message until the leader ends the stream. Raises StreamBrokenError."""
        while (response := await self._read()) is not EOF:
            handle(REPLICATION_PUSH.beside(response))

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except aio.AioRpcError as error:
            raise _broken(error) from error

    def write_now(self, message: replication_pb2.ReplicationFetchRequest) -> bool:
        """False: gRPC always makes one wait."""
        return False

    async def write(self, message: replication_pb2.ReplicationFetchRequest) -> None:
        """Send a message. Raises StreamBrokenError."""
        try:
            await self._call.write(message)
        except aio.AioRpcError as error:
            raise _broken(error) from error
        except asyncio.InvalidStateError:
            raise StreamBrokenError(StatusCode.UNAVAILABLE, "the call is over") from None

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()

    async def close(self) -> None:
        """End the call and its channel."""
        self._call.cancel()
        await self._channel.close(None)


async def _without(channel: aio.Channel, stream: LeaderStream) -> LeaderStream:
    """The stream, once the channel that is not needed for it is closed."""
    try:
        await channel.close(None)
    except BaseException:
        stream.cancel()
        raise
    return stream


def _broken(error: aio.AioRpcError) -> StreamBrokenError:
    code: Any = error.code()  # An int for a number that gRPC does not know.
    status = code if isinstance(code, StatusCode) else StatusCode.UNKNOWN
    return StreamBrokenError(status, error.details() or status.name, cause="refused")
