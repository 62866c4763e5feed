"""What a node's settings say of TLS: the files, and which addresses are too open without."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.wire.errors import ConfigurationError
from penstock.wire.transport import format_address

_LOCAL_NAMES: Final = ("localhost", "localhost.", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where a node's credentials are, all PEM: ``tls.ca``, ``tls.certificate`` and ``tls.key``."""

    ca: Path
    certificate: Path
    key: Path


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. Of names, the ones that always mean that."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOCAL_NAMES


def check_exposure(listen: tuple[str, int], *, tls: bool, insecure_allowed: bool) -> None:
    """Raise ConfigurationError for a controller port that anyone on the network could speak to.

    Whoever speaks to it unchecked commands the cluster: Raft's messages and the brokers' come in
    there.
    """
    if tls or insecure_allowed or is_loopback(listen[0]):
        return
    raise ConfigurationError(
        f"controller.listen={format_address(*listen)} can be reached from other machines, and "
        "without TLS whoever reaches it commands the cluster; set tls.ca, tls.certificate and "
        "tls.key (docs/operating/security.md shows how to make them), or listen on 127.0.0.1, or, "
        "where the network itself keeps strangers out, set controller.insecure.allow = true"
    )
