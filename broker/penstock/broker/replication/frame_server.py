"""The port for frames, where followers and coordinators are served, and what stands before it."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog

from penstock.broker.replication.frame_stream import FrameStream, said_in, tune_socket
from penstock.broker.replication.leader import FollowerStream, LeaderSide, follower_status
from penstock.broker.replication.ports import EOF, BeginMarkers, StreamBrokenError
from penstock.broker.replication.taking_marks import CoordinatorStream
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.v1 import coordination_pb2, replication_pb2
from penstock.wire.errors import AddressInUseError, PenstockError
from penstock.wire.transport import format_address

logger = structlog.get_logger()

HELLO_TIMEOUT_S: Final = 10.0
"""So long a connection may take until it has said who it is, the TLS handshake included."""

MAX_UNKNOWN: Final = 64
"""Connections at a time of which it is not known yet who they are; more are closed at once. With
MAX_HELLO_BYTES and what one read brings this bounds what strangers can make a broker keep."""

_BACKLOG: Final = 128
_ACCEPT_PAUSE_S: Final = 0.1
_TELL_EVERY_S: Final = 60.0
_NO_SUCH_FAMILY: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Refused:
    """Counts refused connections by cause, and writes of each cause one line a minute at most:
    a stranger must not be able to fill the log.
    """

    def __init__(self, count: Callable[[str], None], clock_s: Callable[[], float]) -> None:
        self._count = count
        self._clock_s = clock_s
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def add(self, cause: str, reason: str, peer: str) -> None:
        """A connection was refused."""
        self._count(cause)
        now_s = self._clock_s()
        last_s = self._told_s.get(cause)
        if last_s is not None and now_s - last_s < _TELL_EVERY_S:
            self._untold[cause] = self._untold.get(cause, 0) + 1
            return
        self._told_s[cause] = now_s
        logger.warning(
            "replication connection refused",
            peer=peer,
            cause=cause,
            reason=reason,
            more_since_last_told=self._untold.pop(cause, 0),
        )


class FrameServer:
    """Serves followers that come with frames, and coordinators with marks. Used on one event loop.

    ``server_context`` gives what each accepted connection is secured with, None for no TLS;
    ``begin_markers`` writes marks to what is led here; ``count_refused`` is told the cause of each
    refusal, ``count_served`` of each follower let in.
    """

    def __init__(
        self,
        manager: LeaderSide,
        authentication: PeerAuthentication,
        server_context: Callable[[], ssl.SSLContext | None],
        begin_markers: BeginMarkers,
        *,
        cluster_id: str,
        node_id: int,
        count_refused: Callable[[str], None],
        count_served: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._authentication = authentication
        self._server_context = server_context
        self._begin_markers = begin_markers
        self._coordinators: dict[int, FrameStream] = {}  # One connection a node.
        self._welcome = replication_pb2.LeaderWelcome(cluster_id=cluster_id, node_id=node_id)
        self._refused = Refused(count_refused, clock_s)
        self._count_served = count_served
        self._listeners: list[socket.socket] = []
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()  # And not in the hands of their task yet.
        self._unknown = 0

    async def start(self, host: str, port: int) -> int:
        """Listen there; the port, which matters where 0 was asked for.

        Raises AddressInUseError that names the address and the setting.
        """
        try:
            self._listeners = await _listen(host, port)
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on {format_address(host, port)}: {error.strerror or error}; change "
                "replication.frames.listen or stop the other process"
            ) from None
        for listener in self._listeners:
            self._watch(listener)
        return _port_of(self._listeners[0])

    async def stop(self) -> None:
        """Take no more connections and end those there are."""
        loop = asyncio.get_running_loop()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            loop.remove_reader(listener)
        for timer in self._resting.values():
            timer.cancel()
        tasks = [*self._serving]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for sock in (*listeners, *self._accepted):
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        """Take the connections that wait, a bounded number at a time: others want the loop too."""
        for _ in range(_BACKLOG):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._refused.add("exhausted", str(error), "-")
                    self._rest(listener)
                    return
                continue  # The connection broke before it was taken.
            sock.setblocking(False)
            self._take(sock, format_address(*address[:2]))

    def _rest(self, listener: socket.socket) -> None:
        """Look again when there may be room."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._resting[listener] = loop.call_later(_ACCEPT_PAUSE_S, self._watch, listener)

    def _watch(self, listener: socket.socket) -> None:
        self._resting.pop(listener, None)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _take(self, sock: socket.socket, peer: str) -> None:
        if self._unknown >= MAX_UNKNOWN:
            sock.close()
            self._refused.add(
                "crowded", f"{MAX_UNKNOWN} connections have not said yet who they are", peer
            )
            return
        self._unknown += 1
        self._accepted.add(sock)
        task = asyncio.create_task(self._serve(sock, peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        self._accepted.discard(sock)
        try:
            stream = await self._open(sock, peer)
            if stream is None:
                return
            try:
                first = await self._let_in(stream, peer)
            except BaseException:
                stream.cancel()
                raise
        finally:
            self._unknown -= 1
        if first is not None:
            await self._attend(stream, first, peer)

    async def _open(self, sock: socket.socket, peer: str) -> FrameStream | None:
        """The connection, secured if it must be; None when that failed."""
        loop = asyncio.get_running_loop()
        stream = FrameStream(replication_pb2.ReplicationFetchRequest.FromString)
        try:
            tune_socket(sock)
            context = self._server_context()
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await loop.connect_accepted_socket(
                    lambda: stream,  # Under TLS uvloop gives back a protocol of its own.
                    sock,
                    ssl=context,
                    ssl_handshake_timeout=None if context is None else HELLO_TIMEOUT_S,
                )
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):  # A TimeoutError is one.
                raise
            cause = "tls" if isinstance(error, ssl.SSLError) else "broken"
            reason = f"no connection came about ({str(error) or type(error).__name__})"
            self._refused.add(cause, reason, peer)
            return None
        return stream

    async def _let_in(
        self, stream: FrameStream, peer: str
    ) -> replication_pb2.ReplicationFetchRequest | None:
        """What it began with; None for somebody who may not be here, and was told so."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await _first(stream)
            self._check(stream, said_in(first))
        except TimeoutError:
            reason = f"no hello came within {HELLO_TIMEOUT_S:g} s"
            refusal = StreamBrokenError(grpc.StatusCode.DEADLINE_EXCEEDED, reason, cause="silent")
        except StreamBrokenError as error:
            refusal = error
        except PenstockError as error:
            refusal = StreamBrokenError(
                follower_status(error), error.message, cause=error.code.name.lower()
            )
        else:
            if first.HasField("coordinator"):
                stream.turn_to(coordination_pb2.MarkersRequest.FromString)
            stream.welcome(self._welcome)
            return first
        stream.refuse(refusal.status, refusal.reason)
        if refusal.status is not grpc.StatusCode.UNAVAILABLE:  # Else it comes again soon.
            self._refused.add(refusal.cause, refusal.reason, peer)
        return None

    def _check(self, stream: FrameStream, hello: replication_pb2.FollowerHello) -> None:
        """Raise StreamBrokenError or a PenstockError unless who says so may be served."""
        refusal = self._authentication.named(stream.peer_names).refusal(hello.node_id)
        if refusal is not None:
            raise StreamBrokenError(refusal.status, refusal.reason, cause="certificate")
        self._manager.check_follower(hello)

    async def _attend(
        self, stream: FrameStream, first: replication_pb2.ReplicationFetchRequest, peer: str
    ) -> None:
        try:
            if first.HasField("coordinator"):
                await self._take_marks(stream, first.coordinator.node_id)
            else:
                self._count_served()
                await FollowerStream(self._manager, first.hello).run(stream)
        except StreamBrokenError as error:
            if error.status is grpc.StatusCode.UNAVAILABLE:
                return  # It went, as brokers may.
            stream.refuse(error.status, error.reason)
            self._refused.add(error.cause, error.reason, peer)
        except Exception:
            logger.exception("serving a broker failed", peer_node=said_in(first).node_id)
        finally:
            stream.finish()

    async def _take_marks(self, stream: FrameStream, node_id: int) -> None:
        """Serve a coordinator. It has one connection: an earlier one is dead, or soon will be."""
        earlier = self._coordinators.pop(node_id, None)
        if earlier is not None:
            earlier.cancel()
        self._coordinators[node_id] = stream
        try:
            await CoordinatorStream(stream, self._begin_markers).run()
        finally:
            if self._coordinators.get(node_id) is stream:
                del self._coordinators[node_id]


async def _first(stream: FrameStream) -> replication_pb2.ReplicationFetchRequest:
    """What a broker begins with. Raises StreamBrokenError for anything else."""
    first: Any = await stream.read()
    if first is EOF:
        raise StreamBrokenError(
            grpc.StatusCode.CANCELLED, "it was closed without a hello", cause="silent"
        )
    if first.WhichOneof("message") not in ("hello", "coordinator"):
        await stream.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be the hello"
        )
    said: replication_pb2.ReplicationFetchRequest = first
    return said


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of the host, at one port. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            bound = _port_of(listeners[0]) if listeners else port
            listeners.append(_bound(family, (address[0], bound, *address[2:])))
        except OSError as error:
            failure = error
            if port and error.errno not in _NO_SUCH_FAMILY:
                break
            failure = None if listeners else error
    if failure is not None or not listeners:
        for listener in listeners:
            listener.close()
        raise failure or OSError(errno.EADDRNOTAVAIL, "the host has no address")
    return listeners


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" stands for IPv4 as well, as it does for the port of gRPC.
            alone = address[0] != "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port
