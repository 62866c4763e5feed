"""Raft messages between controllers: one gRPC stream in each direction, typed, checked, bounded.

Nothing here is relied on for safety: messages may be lost at any time, and are when a queue is
full or a connection breaks. Raft sends again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
import structlog
from grpc import aio

from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.voters import DIRECTORY_ID_BYTES, Address
from penstock.v1 import raft_pb2, raft_pb2_grpc
from penstock.wire.transport import format_address

log = structlog.get_logger()

QUEUE_BYTES: Final = 32 * 1024 * 1024
"""What may wait for one peer. Beyond it messages are dropped, as by a network."""
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0
_TRY_ADDRESS_S: Final = 1.0
"""So long an address is tried where there is another one to try."""
_CONNECT_S: Final = 5.0
"""After so long without a connection its reason is told, and the certificate is looked at again:
a peer may have refused an old one."""

_SHOWN_CHARACTERS: Final = 300
"""Of what a node that was refused says, such as the id of its cluster."""

Message = raft_pb2.RaftExchangeRequest


_NOBODY_LISTENS: Final = "Failed to connect to remote host"
"""How gRPC says that TCP had no connection: certificates had no part in it yet."""


class _Outlet:
    """The stream to one peer. Keeps it open; drops what was meant for an earlier one."""

    def __init__(
        self,
        peer: int,
        addresses: Callable[[], Sequence[Address]],
        hello: Message,
        connector: NodeConnector,
    ) -> None:
        self._peer = peer
        self._addresses = addresses
        self._connector = connector
        self._hello = hello
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._news = asyncio.Event()
        self._address = addresses()[0]
        self._credentials = connector.credentials()
        self._channel = connector.open(format_address(*self._address), peer)
        self._complaint = ""
        self.failure = ""
        """Why there was no stream, or it ended, the last time; it may be open again."""
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
            # Whatever goes wrong is said and tried again: nobody else sends to this peer.
            try:
                await self._stream()
            except Exception as error:
                self._complain(error)
            if asyncio.get_running_loop().time() - began_s > 2 * _BACKOFF_MAX_S:
                backoff_s = _BACKOFF_MIN_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            try:
                await self._renew_channel()
            except Exception as error:
                self._complain(error)

    async def _renew_channel(self) -> None:
        """Go on to the next address that is known, if there are several, and connect with the
        certificate that the files hold now, if they have changed.
        """
        credentials, address = self._connector.credentials(), self._next_address()
        if credentials is not self._credentials or address != self._address:
            renewed = self._connector.open(format_address(*address), self._peer)
            retired, self._channel = self._channel, renewed
            self._credentials, self._address = credentials, address
            await retired.close(None)

    def _next_address(self) -> Address:
        addresses = list(dict.fromkeys(self._addresses())) or [self._address]
        position = addresses.index(self._address) + 1 if self._address in addresses else 0
        return addresses[position % len(addresses)]

    async def _stream(self) -> None:
        """Send what comes until the stream ends, and raise why it did."""
        # A peer that is down costs nothing: the call waits for the connection.
        stub = raft_pb2_grpc.RaftStub(self._channel)
        call: Any = stub.Exchange(wait_for_ready=True)  # type: ignore[call-arg]  # So are the stubs.
        call.add_done_callback(lambda _call: self._news.set())
        try:
            several = len(set(self._addresses())) > 1
            try:
                async with asyncio.timeout(_TRY_ADDRESS_S if several else _CONNECT_S):
                    await call.write(self._hello)
            except TimeoutError:
                await self._tell_why_not_connected(stub)
                return
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

    async def _tell_why_not_connected(self, stub: raft_pb2_grpc.RaftStub) -> None:
        """Say what keeps the channel from connecting: a call that waits is not told."""
        call: Any = stub.Exchange(timeout=_CONNECT_S)  # type: ignore[call-arg]  # As above.
        try:
            await call.write(self._hello)
            await call.done_writing()
            await call
        except aio.AioRpcError as error:
            self.failure = _in_words(error)
            reason = error.details() or ""
            if reason != self._complaint:
                self._complaint = reason
                log.warning(
                    "no connection to another controller",
                    peer=self._peer,
                    address=self._address,
                    reason=reason,
                    next_step=step_to_connect(reason),
                )
        finally:
            call.cancel()

    def _complain(self, error: Exception) -> None:
        # A write into a stream that the peer ended fails as INTERNAL, which says nothing.
        if isinstance(error, aio.AioRpcError) and (
            not self.failure or error.code() is not grpc.StatusCode.INTERNAL
        ):
            self.failure = _in_words(error)
        reason = error.details() if isinstance(error, aio.AioRpcError) else str(error)
        reason = reason or type(error).__name__
        if reason != self._complaint:
            self._complaint = reason
            if isinstance(error, aio.AioRpcError | asyncio.InvalidStateError):
                log.info("raft stream ended", peer=self._peer, reason=reason)
            else:  # Nothing of the network's.
                log.error("the raft stream failed", peer=self._peer, exc_info=error)


def _in_words(error: aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no details'}"


def step_to_connect(reason: str) -> str:
    """What to do where gRPC had no connection to another controller, for this reason."""
    runs = "check that it runs there"
    if _NOBODY_LISTENS in reason:
        return f"{runs}, and can be reached from here"
    return (
        f"{runs}, and that tls.* is set on both or on neither, with certificates of one authority"
    )


class _Inlet:
    """One stream from a peer."""

    __slots__ = ("connection",)

    def __init__(self, connection: str) -> None:
        self.connection = connection


class RaftLink(raft_pb2_grpc.RaftServicer):
    """The streams to and from all peers, and the Raft service. One event loop.

    ``on_message(peer, message)`` and ``on_lost(peer)`` are called on the loop, for the newest
    stream of each peer only. Any node of the cluster may open a stream: who counts is decided by
    the voter set, which a new leader may know and this node not yet.
    """

    def __init__(
        self,
        *,
        node_id: int,
        cluster_id: str,
        voters: Mapping[int, Address],
        advertised: Address,
        connector: NodeConnector,
        authentication: PeerAuthentication,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._advertised = advertised
        self._configured = {peer: address for peer, address in voters.items() if peer != node_id}
        self._wanted = dict(self._configured)  # Whom to keep a stream to.
        self._told: dict[int, Address] = {}  # Where peers say that they are.
        self._directory_id = b""
        self._connector = connector
        self._authentication = authentication
        self._on_message = on_message
        self._on_lost = on_lost
        self._running = False
        self._outlets: dict[int, _Outlet] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._newest: dict[int, _Inlet] = {}  # Each peer's incoming stream.
        self._refused: set[str] = set()
        self._refusals: dict[int, str] = {}

    def start(self, directory_id: bytes) -> None:
        """Begin to connect; ``directory_id`` is that of this node's metadata directory."""
        self._directory_id = directory_id
        self._running = True
        self.reach(self._wanted)

    def reach(self, peers: Mapping[int, Address]) -> None:
        """Keep streams to these peers, and to whoever has one to this node."""
        self._wanted = {peer: address for peer, address in peers.items() if peer != self._node_id}
        if not self._running:
            return
        for peer in self._wanted:
            self._outlet(peer)
        for peer in [peer for peer in self._outlets if not self._is_needed(peer)]:
            self._drop(peer)

    def addresses_of(self, peer: int) -> list[Address]:
        """Where a peer may be: where it says, where the settings say, where the voter set says.

        What it says comes first: of a controller that was replaced the settings, and for a while
        the voter set, still name the old place, and brokers are sent to the first.
        """
        books = (self._told, self._configured, self._wanted)
        return [book[peer] for book in books if peer in book and book[peer][0]]

    def connected(self) -> frozenset[int]:
        """Who has a stream to this node."""
        return frozenset(self._newest)

    def connections(self) -> frozenset[str]:
        """What the streams come by of those that this node wants to reach, as gRPC names it."""
        newest = self._newest.items()
        return frozenset(inlet.connection for peer, inlet in newest if peer in self._wanted)

    def heard_at(self, peer: int) -> Address | None:
        """Where a peer said that it is; None for one that was not heard, or did not say."""
        return self._told.get(peer)

    def failure_of(self, peer: int) -> str:
        """Why a stream to a peer was not had, or ended, the last time; empty for no reason."""
        outlet = self._outlets.get(peer)
        return "" if outlet is None else outlet.failure

    def refusals(self) -> dict[int, str]:
        """Why those of the settings that are not connected were refused here the last time. On any
        thread.
        """
        refused = [*self._refusals.items()]
        return {peer: why for peer, why in refused if peer not in self._newest}

    def _is_needed(self, peer: int) -> bool:
        return peer in self._wanted or peer in self._newest

    def _outlet(self, peer: int) -> _Outlet | None:
        outlet = self._outlets.get(peer)
        if outlet is None and self._running and self.addresses_of(peer):
            hello = raft_pb2.RaftHello(
                cluster_id=self._cluster_id,
                node_id=self._node_id,
                receiver_node_id=peer,
                directory_id=self._directory_id,
                host=self._advertised[0],
                port=self._advertised[1],
            )
            outlet = self._outlets[peer] = _Outlet(
                peer, lambda: self.addresses_of(peer), Message(hello=hello), self._connector
            )
        return outlet

    def _drop(self, peer: int) -> None:
        self._told.pop(peer, None)
        outlet = self._outlets.pop(peer, None)
        if outlet is not None:
            task = asyncio.ensure_future(outlet.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Close every stream to a peer."""
        self._running = False
        outlets, self._outlets = self._outlets, {}
        await asyncio.gather(*(outlet.close() for outlet in outlets.values()), *self._closing)

    def send(self, peer: int, message: Message) -> None:
        """Queue a message; it may be lost."""
        outlet = self._outlet(peer)
        if outlet is not None:
            outlet.send(message)

    async def Exchange(  # noqa: N802 - gRPC methods are named as in the protocol.
        self, request_iterator: AsyncIterator[Message], context: Any
    ) -> raft_pb2.RaftExchangeResponse:
        """Take one peer's messages, after checking who it says it is."""
        peer = await self._introduce(request_iterator, context)
        stream = _Inlet(context.peer())
        self._newest[peer] = stream
        try:
            async for message in request_iterator:
                if self._newest.get(peer) is not stream:
                    break
                self._on_message(peer, message)
        finally:
            if self._newest.get(peer) is stream:
                del self._newest[peer]
                if peer not in self._wanted:
                    self._drop(peer)
                self._on_lost(peer)
        return raft_pb2.RaftExchangeResponse()

    async def _introduce(self, messages: AsyncIterator[Message], context: Any) -> int:
        try:
            first = await anext(messages)
        except StopAsyncIteration:
            first = Message()
        hello = first.hello
        refusal, status = "", grpc.StatusCode.FAILED_PRECONDITION
        forged = self._authentication.identify(context).refusal(hello.node_id)
        if not first.HasField("hello"):
            refusal = "a Raft stream begins with a hello"
        elif forged is not None:
            refusal, status = forged.reason, forged.status
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
        elif hello.node_id == self._node_id or hello.node_id < 0:
            refusal = f"node {hello.node_id} is not another node than {self._node_id}"
        elif len(hello.directory_id) != DIRECTORY_ID_BYTES:
            refusal = f"node {hello.node_id} does not say which directory is its own"
        if refusal:
            if hello.node_id in self._configured:  # Of no stranger's, who may be many.
                self._refusals[hello.node_id] = refusal[:_SHOWN_CHARACTERS]
            if refusal not in self._refused and len(self._refused) < 100:
                self._refused.add(refusal)
                log.warning("raft stream refused", reason=refusal, peer=context.peer())
            await context.abort(status, refusal)
        self._refusals.pop(hello.node_id, None)
        if hello.host and hello.port > 0:
            self._told[hello.node_id] = (hello.host, hello.port)
        return int(hello.node_id)
