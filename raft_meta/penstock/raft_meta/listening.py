"""Binding a node's ports, under TLS or without."""

from __future__ import annotations

from grpc import aio

from penstock.raft_meta.credentials import NodeTls
from penstock.wire.errors import AddressInUseError
from penstock.wire.transport import format_address

Address = tuple[str, int]


def bind(
    server: aio.Server,
    listen: Address,
    *,
    setting: str,
    tls: NodeTls | None,
    client_certificates: bool = True,
) -> int:
    """Have ``server`` listen there; the port, which matters where 0 was asked for.

    Under TLS peers must show a certificate of the authority's unless ``client_certificates`` is
    False. Raises AddressInUseError that names the address and the setting.
    """
    address = format_address(*listen)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(
                address, tls.server_credentials(client_certificates=client_certificates)
            )
    except RuntimeError:
        port = 0
    if not port:
        raise AddressInUseError(
            f"cannot listen on {address}: another process uses the port, or the address is not "
            f"this machine's; change {setting} or stop the other process"
        )
    return port
