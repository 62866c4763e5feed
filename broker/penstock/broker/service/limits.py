"""The limits of the port that clients reach, by a node's settings; see docs/operating/limits.md."""

from __future__ import annotations

from functools import partial

import structlog

from penstock.broker.config import NodeConfig
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.closing import close_connection
from penstock.broker.service.sockets import accepted, can_tell
from penstock.broker.service.unfinished import Unfinished
from penstock.broker.service.unsent import Unsent, UnsentLimits
from penstock.raft_meta.exposure import is_loopback
from penstock.wire.transport import SERVER_OPTIONS, Option, parse_address

log = structlog.get_logger()


def warn_of_strangers(config: NodeConfig) -> None:
    """Say in the log what it means that others than this machine reach that port without TLS."""
    if not is_loopback(parse_address(config.broker_listen)[0]):
        log.warning(
            "whoever reaches this broker may read, write and delete everything",
            address=config.broker_listen,
            next_step="set tls.ca, tls.certificate and tls.key, or see that the network keeps "
            "strangers out",
        )


def client_port_options(config: NodeConfig) -> list[Option]:
    """How gRPC serves that port."""
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
        partial(close_connection, port=parse_address(config.broker_listen)[1]),
        metrics,
    )
    metrics.watch_unsent(lambda: unsent.total_bytes)
    return unsent


def unfinished_requests(config: NodeConfig, metrics: BrokerMetrics) -> Unfinished:
    """What keeps requests in part within bounds, where the system lets it. On the running loop."""
    port = parse_address(config.broker_listen)[1]
    unfinished = Unfinished(config.unfinished_max_bytes, partial(accepted, port), metrics)
    if can_tell():
        metrics.watch_unfinished(lambda: unfinished.total_bytes)
        unfinished.start()
    return unfinished
