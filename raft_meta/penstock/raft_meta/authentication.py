"""Who a peer is: the node that its certificate is made out to, and nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc

_DNS_NAMES: Final = "peer_dns"
"""gRPC's property with the certificate's DNS names alone: in ``x509_subject_alternative_name``
they are mixed with e-mail addresses and URIs, which an authority may give away more freely."""


def node_name(node_id: int, cluster_id: str) -> str:
    """The DNS name, among a certificate's subjectAltName, that makes its holder a node."""
    return f"node-{node_id}.{cluster_id}.penstock"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a peer is turned away, as the status that ends its call."""

    status: grpc.StatusCode
    reason: str


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a call. ``nodes`` is None where everybody is believed: without TLS."""

    cluster_id: str
    nodes: frozenset[int] | None
    names: tuple[str, ...] = ()

    def refusal(self, node_id: int | None = None) -> Refusal | None:
        """Why it may not speak as this node, or, for None, as any; None when it may."""
        if self.nodes is None:
            return None
        if not self.nodes:
            shown = f"is made out to {', '.join(self.names)}" if self.names else "names none"
            return Refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                f"only nodes of cluster {self.cluster_id} may ask this, and the certificate shown "
                f"{shown}; connect with one for node-N.{self.cluster_id}.penstock",
            )
        if node_id is not None and node_id not in self.nodes:
            own = ", ".join(str(node) for node in sorted(self.nodes))
            return Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"node {own}, as its certificate says, may not speak as node {node_id}; check "
                "node.id and tls.certificate",
            )
        return None


class PeerAuthentication:
    """Tells peers by their certificates, which TLS has verified. Without TLS it believes all."""

    def __init__(self, cluster_id: str, *, tls: bool) -> None:
        self._cluster_id = cluster_id
        self._tls = tls
        # Compared exactly: names of clusters differ in the case of letters.
        self._pattern = re.compile(
            rf"node-(0|[1-9][0-9]{{0,9}})\.{re.escape(cluster_id)}\.penstock"
        )

    def identify(self, context: Any) -> Peer:
        """The other end of the call."""
        if not self._tls:
            return self.named(())
        shown = context.auth_context().get(_DNS_NAMES, ())
        return self.named(name.decode("ascii", "replace") for name in shown)

    def named(self, names: Iterable[str]) -> Peer:
        """The other end of a connection, by the DNS names in the certificate that it showed."""
        if not self._tls:
            return Peer(self._cluster_id, None)
        shown = tuple(names)
        found = (self._pattern.fullmatch(name) for name in shown)
        nodes = frozenset(int(match[1]) for match in found if match is not None)
        return Peer(self._cluster_id, nodes, shown)

    async def require(self, context: Any, node_id: int | None = None) -> None:
        """End the call unless its peer may speak as this node, or as any for None."""
        refusal = self.identify(context).refusal(node_id)
        if refusal is not None:
            await context.abort(refusal.status, refusal.reason)
