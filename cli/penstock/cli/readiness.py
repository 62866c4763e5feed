"""Whether a cluster is ready for clients, as its brokers themselves say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import grpc

from penstock.raft_meta.exposure import TlsFiles
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.transport import CHANNEL_OPTIONS

_CALL_SECONDS: Final = 2.0


class Listening(Protocol):
    """A node, as far as it can be asked."""

    @property
    def node_id(self) -> int:
        """Its number."""
        ...

    @property
    def address(self) -> str:
        """Where its broker listens."""
        ...


def describe_unready(plans: Sequence[Listening], tls: TlsFiles | None = None) -> str:
    """What the cluster still lacks, in words; empty when every broker sees it whole.

    Every broker is asked, not one: each serves from its own copy of the metadata.
    """
    wanted = {plan.node_id for plan in plans}
    for plan in plans:
        answer = describe_cluster(plan, tls)
        if answer is None:
            return f"node {plan.node_id} does not answer at {plan.address} yet"
        if answer.controller_id < 0:
            return f"node {plan.node_id} knows no active controller yet"
        known = {broker.node_id for broker in answer.brokers if not broker.fenced}
        if missing := sorted(wanted - known):
            names = ", ".join(str(node_id) for node_id in missing)
            return f"node {plan.node_id} sees these nodes as fenced or unknown still: {names}"
        # After a stop of all nodes the metadata still call each of them alive: ask it itself.
        if not is_serving(plan, tls):
            return f"node {plan.node_id} is not registered with the controllers yet"
    return ""


def is_serving(plan: Listening, tls: TlsFiles | None = None) -> bool:
    """Whether the broker itself says that it serves clients."""
    # Comes with what nodes need: whoever lacks it is told so before this is reached.
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415 - as said above.

    with _channel(plan, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def describe_cluster(
    plan: Listening, tls: TlsFiles | None = None
) -> metadata_pb2.DescribeClusterResponse | None:
    """One broker's picture of the cluster; None when it does not answer."""
    with _channel(plan, tls) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        try:
            return stub.DescribeCluster(
                metadata_pb2.DescribeClusterRequest(), timeout=_CALL_SECONDS
            )
        except grpc.RpcError:
            return None


def _channel(plan: Listening, tls: TlsFiles | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(plan.address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes()
    )
    return grpc.secure_channel(plan.address, credentials, options=CHANNEL_OPTIONS)
