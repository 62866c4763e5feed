"""The limits of the ports for clients, by a node's settings; see docs/operating/limits.md."""

from __future__ import annotations

from functools import partial

from penstock.broker.config import NodeConfig
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.closing import close_connection
from penstock.broker.service.sockets import accepted, can_tell
from penstock.broker.service.unfinished import Unfinished
from penstock.broker.service.unsent import Unsent, UnsentLimits
from penstock.wire.transport import SERVER_OPTIONS, Option, parse_address


def client_port_options(config: NodeConfig) -> list[Option]:
    """How gRPC serves one of these ports."""
    return [
        *(each for each in SERVER_OPTIONS if each[0] != "grpc.max_receive_message_length"),
        ("grpc.max_receive_message_length", config.request_max_bytes),
        ("grpc.max_concurrent_streams", config.connection_streams_max),
        ("grpc.max_allowed_incoming_connections", config.connections_max),
    ]


def unsent_answers(config: NodeConfig, metrics: BrokerMetrics) -> Unsent:
    """What keeps answers that clients do not take within bounds. On the running loop."""
    unsent = Unsent(
        UnsentLimits(
            max_bytes=config.unsent_max_bytes,
            connection_max_bytes=config.unsent_connection_max_bytes,
            stalled_ms=config.unsent_stalled_ms,
        ),
        partial(close_connection, ports=_client_ports(config)),
        metrics,
    )
    metrics.watch_unsent(lambda: unsent.total_bytes)
    return unsent


def unfinished_requests(config: NodeConfig, metrics: BrokerMetrics) -> Unfinished:
    """What keeps requests in part within bounds, where the system lets it. On the running loop."""
    unfinished = Unfinished(
        config.unfinished_max_bytes, partial(accepted, _client_ports(config)), metrics
    )
    if can_tell():
        metrics.watch_unfinished(lambda: unfinished.total_bytes)
        unfinished.start()
    return unfinished


def _client_ports(config: NodeConfig) -> frozenset[int]:
    listens = filter(None, (config.broker_listen, config.external_listen))
    return frozenset(parse_address(listen)[1] for listen in listens)
