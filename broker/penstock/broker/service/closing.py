"""Closing one client's connection, which gRPC's servers have no call for."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")


def close_connection(peer: str, port: int) -> bool:
    """Shut the connection down that this process accepted on ``port`` from ``peer``.

    ``peer`` is as gRPC names it: ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``. Whether it was found;
    gRPC notices as if the peer had left, and frees what it kept. On any thread: it looks at every
    descriptor of the process.
    """
    wanted = _address(peer)
    if wanted is None:
        return False
    for entry in list(_DESCRIPTORS.iterdir()):
        # A descriptor of our own of the same socket: that number may be another's in a moment.
        try:
            own = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            continue
        with connection, contextlib.suppress(OSError, ValueError, IndexError):
            host, number = connection.getpeername()[:2]
            if connection.getsockname()[1] == port and (_plain(host), number) == wanted:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _address(peer: str) -> tuple[str, int] | None:
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
