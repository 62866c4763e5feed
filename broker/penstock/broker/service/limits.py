"""The limits of a node's ports, by its settings; see docs/operating/limits.md."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Final

from penstock.broker.config import NodeConfig
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.leader import MAX_PUSH_BYTES
from penstock.broker.service.closing import close_connection
from penstock.broker.service.sockets import accepted, can_tell
from penstock.broker.service.taken import Taken
from penstock.broker.service.unfinished import Unfinished
from penstock.broker.service.unsent import Unsent, UnsentLimits
from penstock.raft_meta.arriving import Arrivals
from penstock.raft_meta.guarding import Guarded
from penstock.wire.transport import (
    NODE_CONNECTIONS_MAX,
    SERVER_OPTIONS,
    Option,
    parse_address,
)

_CLIENTS: Final = "clients"
_NODES: Final = "nodes"

_TELL_ALL: Final = frozenset({"WatchMetadata"})
_READ_DISKS: Final = frozenset({"ReadBatches"})


def client_port_options(config: NodeConfig) -> list[Option]:
    """How gRPC serves one of these ports."""
    return [
        *(each for each in SERVER_OPTIONS if each[0] != "grpc.max_receive_message_length"),
        ("grpc.max_receive_message_length", config.request_max_bytes),
        ("grpc.max_concurrent_streams", config.connection_streams_max),
        ("grpc.max_allowed_incoming_connections", config.connections_max),
    ]


def unsent_answers(config: NodeConfig, metrics: BrokerMetrics) -> Unsent:
    """What keeps answers to clients within bounds. On the running loop."""
    return _unsent(config, metrics, _CLIENTS, _client_ports(config))


def _unsent(
    config: NodeConfig, metrics: BrokerMetrics, ports: str, numbers: Container[int]
) -> Unsent:
    unsent = Unsent(
        UnsentLimits(
            max_bytes=config.unsent_max_bytes,
            connection_max_bytes=config.unsent_connection_max_bytes,
            stalled_ms=config.unsent_stalled_ms,
        ),
        partial(close_connection, ports=numbers),
        metrics.unsent(ports),
    )
    metrics.watch_unsent(ports, lambda: unsent.total_bytes)
    return unsent


def reads_taken(guarded: Guarded, unsent: Unsent) -> Taken:
    """Takes the methods for followers in the place of ``guarded``. What they ask for to repair
    their logs counts; their streams have bounds of their own.
    """
    return Taken(guarded, unsent, methods=_READ_DISKS, reserved_bytes=MAX_PUSH_BYTES)


def from_clients(config: NodeConfig, metrics: BrokerMetrics) -> Unfinished:
    """What keeps connections of clients that bring no whole requests within bounds, where the
    system lets it. On the running loop.
    """
    unfinished = Unfinished(
        config.unfinished_max_bytes,
        partial(accepted, _client_ports(config)),
        metrics.incoming(_CLIENTS),
        crowd=_crowd(config.connections_max),
    )
    _begin(unfinished, metrics, _CLIENTS)
    return unfinished


class FromNodes:
    """The same of the ports for nodes alone: that of controllers, and that of followers by gRPC.

    What they may have is theirs alone, so that clients take nothing of it. ``links`` names the
    connections by which controllers are heard: whatever others send, these stay.
    """

    def __init__(
        self, config: NodeConfig, metrics: BrokerMetrics, links: Callable[[], Container[str]]
    ) -> None:
        self._ports: set[int] = set()
        self._unfinished = Unfinished(
            config.unfinished_max_bytes,
            partial(accepted, self._ports),
            metrics.incoming(_NODES),
            crowd=_crowd(NODE_CONNECTIONS_MAX),
            spared=links,
        )
        self.arrivals: Arrivals = self._unfinished.call
        self.unsent: Final = _unsent(config, metrics, _NODES, self._ports)
        _begin(self._unfinished, metrics, _NODES)

    def opened(self, port: int) -> None:
        """Look after this port, too."""
        self._ports.add(port)

    def taken(self, guarded: Guarded) -> Taken:
        """Takes a controller's methods in the place of ``guarded``. Of their answers those count
        that tell all of the metadata. Nothing else waits for room: not brokers' heartbeats.
        """
        return Taken(guarded, self.unsent, methods=_TELL_ALL)

    async def stop(self) -> None:
        """Look no more."""
        await self._unfinished.stop()
        await self.unsent.stop()


def _begin(unfinished: Unfinished, metrics: BrokerMetrics, ports: str) -> None:
    if can_tell():
        metrics.watch_unfinished(ports, lambda: unfinished.total_bytes)
        unfinished.start()


def _crowd(connections_max: int) -> int:
    """So many connections of one port are many. A quarter is left for who has something to ask."""
    return connections_max * 3 // 4


def _client_ports(config: NodeConfig) -> frozenset[int]:
    listens = filter(None, (config.broker_listen, config.external_listen))
    return frozenset(parse_address(listen)[1] for listen in listens)
