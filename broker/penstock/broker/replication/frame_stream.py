"""One framed connection, as a stream of messages. Either end uses it; see frames.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from penstock.broker.replication.frames import (
    MAX_HELLO_BYTES,
    PREAMBLE,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    encode_header,
)
from penstock.broker.replication.ports import EOF, Push, StreamBrokenError
from penstock.v1 import replication_pb2
from penstock.wire.laden import REPLICATION_PUSH, Laden
from penstock.wire.transport import MAX_MESSAGE_BYTES

MAX_UNREAD_FRAMES: Final = 64
MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""What waits to be read here, and what one piece brings; more is left to the kernel, and so to the
sender."""

MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""What is written beyond what the kernel takes at once before writing waits: the pushes that may be
unanswered fit, so that the next is made while the follower is busy with the one before."""

_WHOLE_BYTES: Final = 64 * 1024
"""Up to here header and body are sent as one piece: that is cheaper than two."""

_FAREWELL_S: Final = 5.0
"""How long the last words may take to reach the other end."""

_STATUS_BY_NUMBER: Final = {status.value[0]: status for status in grpc.StatusCode}


class FrameStream(asyncio.Protocol):
    """The messages of one connection, in order; on one event loop.

    Reading waits for a message, writing until the connection takes more: what is kept here beyond
    what the kernel takes is MAX_UNSENT_BYTES and one message at most. Whatever ends the connection
    ends both: reading then gives EOF after a proper end, and raises StreamBrokenError after any
    other.

    ``parse`` makes of a frame's bytes what is read here, or raises DecodeError. What is written is
    a message, or a push, of which the records are not copied before they are with the kernel.
    """

    def __init__(self, parse: Callable[[bytes], Any]) -> None:
        self._parse = parse
        self._decoder = FrameDecoder(MAX_HELLO_BYTES)
        self._unread: deque[Frame] = deque()
        self._unread_bytes = 0
        self._transport: Any = None  # The type stubs lack what TLS adds.
        self._reader: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._ended: StreamBrokenError | None = None
        self._handle: Callable[[Any], object] | None = None
        self._heard_all = False
        self._held = False
        self._farewell: asyncio.TimerHandle | None = None

    # --- What the event loop calls -------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """The connection stands; under TLS, after the handshake."""
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        transport.write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._ended is not None:
            return
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._end(
                StreamBrokenError(grpc.StatusCode.INVALID_ARGUMENT, error.reason, cause=error.cause)
            )
            return
        if not frames:
            return
        if self._handle is not None:
            self._hand_on(frames)
            return
        self._unread += frames
        self._unread_bytes += sum(len(frame.body) for frame in frames)
        self._wake_reader()
        if not self._held and (
            len(self._unread) > MAX_UNREAD_FRAMES or self._unread_bytes > MAX_UNREAD_BYTES
        ):
            self._held = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The other end sends nothing more."""
        self._heard_all = self._decoder.is_between_frames

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """It takes more again."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """There is no connection any more."""
        if self._heard_all and error is None:
            reason, cause = "the other end closed it", "closed"
        else:
            reason, cause = f"the connection broke ({error or 'in the middle'})", "broken"
        if self._farewell is not None:
            self._farewell.cancel()
        self._end(StreamBrokenError(grpc.StatusCode.UNAVAILABLE, reason, cause=cause))

    # --- What its users call -------------------------------------------------------------------

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The DNS names in the other end's certificate, which TLS has verified; none without."""
        shown = self._transport.get_extra_info("peercert") or {}
        return tuple(name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS")

    def trust(self) -> None:
        """The other end is let in: its messages may be as large as messages are."""
        self._decoder.max_bytes = MAX_MESSAGE_BYTES

    def turn_to(self, parse: Callable[[bytes], Any]) -> None:
        """What comes from now on is of another kind. Nothing may have come that was not read."""
        self._parse = parse

    async def read(self) -> Any:
        """The next message, or EOF. Raises StreamBrokenError."""
        frame = await self._next_frame()
        if frame is None:
            return EOF
        if frame.kind is not Kind.MESSAGE:
            self._misplaced(frame)
        return self._parsed(self._parse, frame)

    async def read_all(self, handle: Callable[[Any], object]) -> None:
        """Hand each message on in the moment in which it comes, until a proper end.

        Raises StreamBrokenError, and what ``handle`` raises. No task is woken for a message: of
        what a small one takes that is a good part.
        """
        while self._unread:
            handle(await self.read())
        self._handle = handle
        try:
            if await self._next_frame() is not None:  # None is handed to it: it waits for the end.
                raise AssertionError("a frame passed the handler by")
        finally:
            self._handle = None

    def _hand_on(self, frames: Sequence[Frame]) -> None:
        assert self._handle is not None
        try:
            for frame in frames:
                if self._ended is not None:
                    return
                if frame.kind is not Kind.MESSAGE:
                    self._misplaced(frame)
                self._handle(self._parsed(self._parse, frame))
        except Exception as error:  # For who waits in read_all.
            self._handle = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)

    async def read_welcome(self) -> replication_pb2.LeaderWelcome:
        """What the leader begins with. Raises StreamBrokenError, with the leader's own reason."""
        frame = await self._next_frame()
        if frame is None:
            raise StreamBrokenError(grpc.StatusCode.UNAVAILABLE, "it was closed at once")
        if frame.kind is not Kind.WELCOME:
            self._misplaced(frame)
        parse = replication_pb2.LeaderWelcome.FromString
        welcome: replication_pb2.LeaderWelcome = self._parsed(parse, frame)
        return welcome

    def write_now(self, message: Message | Push) -> bool:
        """Send a message if the connection takes it without waiting. Raises StreamBrokenError."""
        if self._drained is not None:
            return False
        self._send(Kind.MESSAGE, message)
        return True

    async def write(self, message: Message | Push) -> None:
        """Send a message. Raises StreamBrokenError."""
        self._send(Kind.MESSAGE, message)
        while self._drained is not None:
            await asyncio.shield(self._drained)
        self._check_open()

    def welcome(self, welcome: replication_pb2.LeaderWelcome) -> None:
        """Let the other end in."""
        self.trust()
        self._send(Kind.WELCOME, welcome)

    def refuse(self, status: grpc.StatusCode, reason: str) -> None:
        """End the connection, and let the other end know why."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(StreamBrokenError):
            self._send(Kind.END, replication_pb2.StreamEnd(status=status.value[0], reason=reason))
        self.finish()

    async def abort(self, status: grpc.StatusCode, reason: str) -> None:
        """The same, as a servicer's context does it: raises what it ends by."""
        self.refuse(status, reason)
        raise StreamBrokenError(status, reason, cause="malformed")

    def finish(self) -> None:
        """End the connection once what was sent is with the kernel, or soon without."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            loop = asyncio.get_running_loop()
            self._farewell = loop.call_later(_FAREWELL_S, transport.abort)

    def cancel(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """The same."""
        self.cancel()

    # --- Inside --------------------------------------------------------------------------------

    async def _next_frame(self) -> Frame | None:
        while not self._unread:
            if self._ended is not None:
                if self._ended.cause == "closed":
                    return None
                raise self._ended
            if self._held:
                self._held = False
                self._transport.resume_reading()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        frame = self._unread.popleft()
        self._unread_bytes -= len(frame.body)
        return frame

    def _parsed(self, parse: Callable[[bytes], Any], frame: Frame) -> Any:
        try:
            return parse(frame.body)
        except DecodeError:
            raise StreamBrokenError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "a frame's bytes are no message of this stream",
                cause="malformed",
            ) from None

    def _misplaced(self, frame: Frame) -> None:
        """Raise what a frame means that is not what was waited for."""
        if frame.kind is Kind.END:
            end = self._parsed(replication_pb2.StreamEnd.FromString, frame)
            status = _STATUS_BY_NUMBER.get(end.status, grpc.StatusCode.UNKNOWN)
            raise StreamBrokenError(status, end.reason, cause="refused")
        raise StreamBrokenError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"a {frame.kind.name.lower()} is out of place",
            cause="malformed",
        )

    def _send(self, kind: Kind, message: Message | Push) -> None:
        self._check_open()
        if isinstance(message, Laden):
            parts = REPLICATION_PUSH.parts(message)
        else:
            parts = [message.SerializeToString()]
        size_bytes = sum(map(len, parts))
        parts.insert(0, encode_header(kind, size_bytes))
        if size_bytes <= _WHOLE_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def _check_open(self) -> None:
        if self._transport.is_closing():
            raise self._ended or StreamBrokenError(
                grpc.StatusCode.UNAVAILABLE, "the connection is closed"
            )

    def _end(self, error: StreamBrokenError) -> None:
        if self._ended is None:
            self._ended = error
        self._wake_reader()
        self.resume_writing()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def said_in(first: replication_pb2.ReplicationFetchRequest) -> replication_pb2.FollowerHello:
    """The hello in the first message of a framed connection, whatever it is opened for."""
    return first.coordinator if first.HasField("coordinator") else first.hello


def tune_socket(sock: socket.socket) -> None:
    """Have the kernel find a peer whose machine vanished within 15 seconds, as gRPC does.

    Messages go at once: none waits for another to travel with. Options that this system does not
    have are left out.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 1),
        ("TCP_USER_TIMEOUT", 15_000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
