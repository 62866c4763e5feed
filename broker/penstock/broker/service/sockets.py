"""The connections that this process accepted on its ports: gRPC's, of which it tells nothing.

Linux tells of a socket what came through it (``TCP_INFO``, tcp(7)). The descriptors are gRPC's: it
closes them when it likes, and their numbers may be another's then. So whose they are is asked
whenever they are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import termios
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

Address = tuple[str, int]

_DESCRIPTORS = Path("/dev/fd")
_ASK: Final = -1
_AT_ONCE: Final = struct.pack("=ii", 1, 0)
_TCP_INFO_BYTES: Final = 136
_TRANSFERRED: Final = struct.Struct("=QQ")  # What the peer has acknowledged, and what it sent.
_TRANSFERRED_AT: Final = 120


class Transferred(NamedTuple):
    """What went through a connection since it began."""

    received_bytes: int
    """What this process has read of it."""
    sent_bytes: int
    """What its peer has acknowledged."""


class Connection:
    """One of them, by its descriptor."""

    __slots__ = ("_descriptor", "_family", "_peer", "address", "port")

    def __init__(self, descriptor: int, family: int, peer: Any, port: int) -> None:
        self._descriptor = descriptor
        self._family = family
        self._peer = peer
        self.address: Address = _plain(peer[0]), peer[1]
        """The peer's, as ``address_of`` has it."""
        self.port = port
        """That of ours which it came to."""

    def transferred(self) -> Transferred | None:
        """What went through it; None when it is gone."""
        try:
            with _borrowed(self._descriptor, self._family) as connection:
                if connection.getpeername() != self._peer:
                    return None
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                waiting = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        except OSError:
            return None
        sent, received = _TRANSFERRED.unpack_from(told, _TRANSFERRED_AT)
        return Transferred(received - int.from_bytes(waiting, sys.byteorder), sent)

    def shut_down(self) -> bool:
        """End the connection. gRPC notices as if the peer had left, and frees what it kept."""
        # A descriptor of our own of the same socket: the number may be another's in a moment.
        try:
            own = os.dup(self._descriptor)
        except OSError:
            return False
        try:
            with _borrowed(own, self._family) as connection:
                if connection.getpeername() != self._peer:
                    return False
                # The kernel neither waits for a peer that goes on sending, nor keeps what it sent.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        finally:
            os.close(own)
        return True


def can_tell() -> bool:
    """Whether this system tells what came through a socket."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError), socket.socket() as probe:
        told = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return len(told) == _TCP_INFO_BYTES
    return False


def accepted(ports: Container[int]) -> Iterator[Connection]:
    """All connections to these ports of ours. On any thread: it looks at every descriptor.

    Raises OSError where none is left to look by.
    """
    with os.scandir(_DESCRIPTORS) as entries:
        numbers = [int(entry.name) for entry in entries]
    for number in numbers:
        with contextlib.suppress(OSError, ValueError, IndexError), _borrowed(number) as connection:
            peer = connection.getpeername()
            if (port := connection.getsockname()[1]) in ports:
                yield Connection(number, connection.family, peer, port)


@contextlib.contextmanager
def _borrowed(descriptor: int, family: int = _ASK) -> Iterator[socket.socket]:
    """A socket that is somebody else's, and is not closed. Its family is asked for if need be."""
    kind, protocol = (_ASK, _ASK) if family == _ASK else (socket.SOCK_STREAM, 0)
    borrowed = socket.socket(family, kind, protocol, fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def address_of(peer: str) -> Address | None:
    """Of a peer as gRPC names it: ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, number = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not number.isdecimal():
        return None
    try:
        return _plain(host.removeprefix("[").removesuffix("]")), int(number)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """One spelling of an address: of IPv4 in IPv6, the former."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)
