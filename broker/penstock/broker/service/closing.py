"""Closing one client's connection, which gRPC's servers have no call for."""

from __future__ import annotations

import contextlib
from collections.abc import Container

from penstock.broker.service.sockets import accepted, address_of


def close_connection(peer: str, ports: Container[int]) -> bool:
    """Shut the connection down that this process accepted on one of ``ports`` from ``peer``.

    ``peer`` is as gRPC names it. Whether it was found; gRPC notices as if the peer had left, and
    frees what it kept. On any thread: it looks at every descriptor of the process.
    """
    wanted = address_of(peer)
    if wanted is None:
        return False
    with contextlib.suppress(OSError):
        for connection in accepted(ports):
            if connection.address == wanted:
                return connection.shut_down()
    return False
