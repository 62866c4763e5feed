"""Raft messages between controllers: one gRPC stream in each direction, typed, checked, bounded.

Nothing here is relied on for safety: messages may be lost at any time, and are when a queue is
full or a connection breaks. Raft sends again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
import structlog
from grpc import aio

from penstock.raft_meta.config import Address
from penstock.v1 import raft_pb2, raft_pb2_grpc
from penstock.wire.transport import CHANNEL_OPTIONS, format_address

log = structlog.get_logger()

QUEUE_BYTES: Final = 32 * 1024 * 1024
"""What may wait for one peer. Beyond it messages are dropped, as by a network."""
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0

Message = raft_pb2.RaftExchangeRequest


class _Outlet:
    """The stream to one peer. Keeps it open; drops what was meant for an earlier one."""

    def __init__(self, peer: int, address: Address, hello: Message) -> None:
        self._peer = peer
        self._hello = hello
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._news = asyncio.Event()
        self._channel = aio.insecure_channel(format_address(*address), options=CHANNEL_OPTIONS)
        self._stub = raft_pb2_grpc.RaftStub(self._channel)
        self._complaint = ""
        self._task = asyncio.create_task(self._keep_open(), name=f"raft to {peer}")

    def send(self, message: Message) -> None:
        size = message.ByteSize()
        if self._queued_bytes + size > QUEUE_BYTES:
            return
        self._queue.append(message)
        self._queued_bytes += size
        self._news.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    async def _keep_open(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                await self._stream()
            except (aio.AioRpcError, asyncio.InvalidStateError) as error:
                self._complain(error)
            if asyncio.get_running_loop().time() - began_s > _BACKOFF_MAX_S:
                backoff_s = _BACKOFF_MIN_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    async def _stream(self) -> None:
        """Send what comes until the stream ends, and raise why it did."""
        # A peer that is down costs nothing: the call waits for the connection.
        call: Any = self._stub.Exchange(wait_for_ready=True)  # type: ignore[call-arg]  # So are the stubs.
        call.add_done_callback(lambda _call: self._news.set())
        try:
            await call.write(self._hello)
            self._queue.clear()  # Older than the connection: Raft has newer ones by now.
            self._queued_bytes = 0
            while not call.done():
                while self._queue:
                    message = self._queue.popleft()
                    self._queued_bytes -= message.ByteSize()
                    await call.write(message)
                self._complaint = ""
                self._news.clear()
                if not call.done():
                    await self._news.wait()
            await call
        finally:
            call.cancel()

    def _complain(self, error: Exception) -> None:
        reason = error.details() if isinstance(error, aio.AioRpcError) else str(error)
        if reason and reason != self._complaint:
            self._complaint = reason
            log.info("raft stream ended", peer=self._peer, reason=reason)


class RaftLink(raft_pb2_grpc.RaftServicer):
    """The streams to and from all peers, and the Raft service. One event loop.

    ``on_message(peer, message)`` and ``on_lost(peer)`` are called on the loop, for the newest
    stream of each peer only.
    """

    def __init__(
        self,
        *,
        node_id: int,
        cluster_id: str,
        voters: Mapping[int, Address],
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._peers = {peer: address for peer, address in voters.items() if peer != node_id}
        self._on_message = on_message
        self._on_lost = on_lost
        self._outlets: dict[int, _Outlet] = {}
        self._newest: dict[int, object] = {}  # Each peer's incoming stream.
        self._refused: set[str] = set()

    def start(self) -> None:
        """Connect to every peer, and keep doing so."""
        for peer, address in self._peers.items():
            hello = raft_pb2.RaftHello(
                cluster_id=self._cluster_id, node_id=self._node_id, receiver_node_id=peer
            )
            self._outlets[peer] = _Outlet(peer, address, Message(hello=hello))

    async def stop(self) -> None:
        """Close every stream to a peer."""
        outlets, self._outlets = self._outlets, {}
        await asyncio.gather(*(outlet.close() for outlet in outlets.values()))

    def send(self, peer: int, message: Message) -> None:
        """Queue a message; it may be lost."""
        outlet = self._outlets.get(peer)
        if outlet is not None:
            outlet.send(message)

    async def Exchange(  # noqa: N802 - gRPC methods are named as in the protocol.
        self, request_iterator: AsyncIterator[Message], context: Any
    ) -> raft_pb2.RaftExchangeResponse:
        """Take one peer's messages, after checking who it says it is."""
        peer = await self._introduce(request_iterator, context)
        stream = object()
        self._newest[peer] = stream
        try:
            async for message in request_iterator:
                if self._newest.get(peer) is not stream:
                    break
                self._on_message(peer, message)
        finally:
            if self._newest.get(peer) is stream:
                del self._newest[peer]
                self._on_lost(peer)
        return raft_pb2.RaftExchangeResponse()

    async def _introduce(self, messages: AsyncIterator[Message], context: Any) -> int:
        try:
            first = await anext(messages)
        except StopAsyncIteration:
            first = Message()
        hello = first.hello
        refusal = ""
        if not first.HasField("hello"):
            refusal = "a Raft stream begins with a hello"
        elif hello.cluster_id != self._cluster_id:
            refusal = (
                f"node {hello.node_id} is of cluster {hello.cluster_id!r}, and this controller of "
                f"{self._cluster_id!r}: controller.quorum.voters mixes two clusters"
            )
        elif hello.receiver_node_id != self._node_id:
            refusal = (
                f"node {hello.node_id} looks for node {hello.receiver_node_id} here, but this is "
                f"node {self._node_id}: controller.quorum.voters disagree"
            )
        elif hello.node_id not in self._peers:
            refusal = f"node {hello.node_id} is not among the other voters of {self._node_id}"
        if refusal:
            if refusal not in self._refused and len(self._refused) < 100:
                self._refused.add(refusal)
                log.warning("raft stream refused", reason=refusal, peer=context.peer())
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return int(hello.node_id)
