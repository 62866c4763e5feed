"""The broker role: logs, replication, coordinators and services, wired together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.broker.config import NodeConfig
from penstock.broker.controller_link import BrokerIdentity, ControllerLink
from penstock.broker.coordinator.coordinator import GroupCoordinator
from penstock.broker.coordinator.service import GroupsServicer
from penstock.broker.core.group_events import GroupSettings
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.live_config import LiveConfig
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.leader import ReplicationServicer
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.service.admin import AdminServicer
from penstock.broker.service.health import HealthServicer
from penstock.broker.service.log import LogServicer
from penstock.broker.service.metadata import MetadataServicer
from penstock.broker.service.transactions import TransactionsServicer
from penstock.broker.storage.clock import steady_clock_ms
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.broker.topics import OffsetsTopic
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.exposure import is_loopback
from penstock.raft_meta.guarding import Guarded, NodesOnly
from penstock.raft_meta.listening import bind
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    groups_pb2,
    groups_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    replication_pb2,
    replication_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import DiskFullError, StorageError
from penstock.wire.transport import SERVER_OPTIONS, format_address, parse_address

log = structlog.get_logger()

_GRACE_S = 0.5
"""How long requests in progress may take to end when the broker stops."""

_SERVICES = [
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (log_pb2, "Log"),
        (replication_pb2, "Replication"),
        (metadata_pb2, "Metadata"),
        (groups_pb2, "Groups"),
        (transactions_pb2, "Transactions"),
        (admin_pb2, "Admin"),
        (health_pb2, "Health"),
    )
]


class Broker:
    """One broker. Start, serve, stop, on one event loop; not to be restarted."""

    def __init__(
        self,
        config: NodeConfig,
        cluster_id: str,
        metrics: BrokerMetrics,
        tls: NodeTls | None = None,
    ) -> None:
        self._config = config
        self._live = LiveConfig(config)
        self._cluster_id = cluster_id
        self._tls = tls
        self._authentication = PeerAuthentication(cluster_id, tls=tls is not None)
        self._connector = NodeConnector(tls)
        self._image = MetadataImage()
        self._metrics = metrics
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._undo: list[Callable[[], Awaitable[None]]] = []
        self._logs = LogManager(
            config.log_directories,
            LogSettings(
                flush_policy=FlushPolicy(config.flush_policy),
                flush_interval_ms=config.flush_interval_ms,
                min_free_bytes=config.log_min_free_bytes,
            ),
            self._on_durable,
            steady_clock_ms(),
            cluster_id=cluster_id,
            on_directory_failed=self._on_directory_failed,
        )
        self._link: ControllerLink
        self._replicas: ReplicaManager
        self._offsets_topic: OffsetsTopic
        self._groups: GroupCoordinator
        self._metadata: MetadataServicer

    async def start(self) -> None:
        """Recover the logs, listen, and begin to register; serving begins once unfenced.

        Raises AddressInUseError or DataDirectoryError. Call :meth:`stop` even after a failure.
        """
        # Recovery reads files for as long as it takes; the controller role must not wait for it.
        await asyncio.to_thread(self._logs.open)
        self._undo.append(self._close_logs)
        report_unopened(self._logs)
        self._link = self._make_link()
        self._replicas = ReplicaManager(
            self._config.node_id,
            self._logs,
            self._image,
            alter_partition=self._link.alter_partition,
            broker_epoch=lambda: self._link.broker_epoch,
            may_serve=self._link.may_serve,
            channel_factory=ReplicationConnector(self._connector).open,
            lag_max_ms=self._config.replica_lag_time_max_ms,
        )
        await self._replicas.start()
        self._undo.append(self._replicas.stop)
        self._groups = self._make_groups()
        self._undo.append(self._groups.stop)
        await self._listen()
        await self._link.start()
        self._undo.append(self._link.stop)

    async def stop(self) -> None:
        """Hand the leaderships over, then stop in the reverse order of the start."""
        if self._undo and self._undo[-1] == self._link.stop:
            moved = await self._link.shut_down_controlled(
                self._live.now.controlled_shutdown_timeout_ms
            )
            if not moved:
                log.warning("stopping without having handed the leaderships over")
        while self._undo:
            await self._undo.pop()()

    async def wait_failed(self) -> None:
        """Wait for ever, or raise what makes this broker unfit to go on."""
        link = asyncio.ensure_future(self._link.wait_failed())
        try:
            done, _ = await asyncio.wait((link, self._failed), return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            link.cancel()

    def _make_link(self) -> ControllerLink:
        config = self._config
        host, port = config.advertised
        identity = BrokerIdentity(
            cluster_id=self._cluster_id,
            node_id=config.node_id,
            host=host,
            port=port,
            rack=config.node_rack,
            previous_broker_epoch=self._logs.previous_broker_epoch(),
        )
        return ControllerLink(
            identity,
            config.voters,
            self._image,
            connector=self._connector,
            heartbeat_interval_ms=config.broker_heartbeat_interval_ms,
            session_timeout_ms=config.broker_session_timeout_ms,
            on_change=self._on_change,
            on_registered=self._on_registered,
        )

    def _make_groups(self) -> GroupCoordinator:
        config = self._config
        self._offsets_topic = OffsetsTopic(
            self._image,
            self._link,
            partition_count=config.offsets_topic_num_partitions,
            replication_factor=config.offsets_topic_replication_factor,
        )
        return GroupCoordinator(
            self._replicas,
            self._image,
            ensure_offsets_topic=self._offsets_topic.ensure,
            settings=GroupSettings(
                heartbeat_interval_ms=config.group_heartbeat_interval_ms,
                min_session_timeout_ms=config.group_min_session_timeout_ms,
                max_session_timeout_ms=config.group_max_session_timeout_ms,
            ),
        )

    async def _listen(self) -> None:
        listen = parse_address(self._config.broker_listen)
        if self._tls is None and not is_loopback(listen[0]):
            log.warning(
                "whoever reaches this broker may read, write and delete everything",
                address=self._config.broker_listen,
                next_step="set tls.ca, tls.certificate and tls.key, or see that the network keeps "
                "strangers out",
            )
        server = aio.server(options=SERVER_OPTIONS)
        guarded: Any = Guarded(server)  # Not all of a server: what the generated code calls.
        self._metadata = MetadataServicer(
            self._config.node_id, self._image, self._offsets_topic.ensure
        )
        log_pb2_grpc.add_LogServicer_to_server(
            LogServicer(self._replicas, self._image, self._metrics), guarded
        )
        self._add_replication(server, await self._listen_for_followers())
        metadata_pb2_grpc.add_MetadataServicer_to_server(self._metadata, guarded)
        groups_pb2_grpc.add_GroupsServicer_to_server(GroupsServicer(self._groups), guarded)
        transactions_pb2_grpc.add_TransactionsServicer_to_server(
            TransactionsServicer(self._link.allocate_producer_ids), guarded
        )
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminServicer(
                self._config.node_id,
                self._image,
                self._link,
                self._replicas.replica_ends,
                self._live.describe,
            ),
            guarded,
        )
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(self._link.may_serve), server)
        reflection.enable_server_reflection([*_SERVICES, reflection.SERVICE_NAME], server)
        bind(
            server,
            listen,
            setting="broker.listen",
            tls=self._tls,
            client_certificates=self._config.tls_client_auth == "required",
        )
        await server.start()
        self._undo.append(lambda: server.stop(_GRACE_S))
        log.info("listening", address=self._config.broker_listen, tls=self._tls is not None)

    async def _listen_for_followers(self) -> int:
        """Serve followers on a port of their own where they must be; its number, else 0.

        A port asks each peer for a certificate or none: where clients need none, the brokers
        need another.
        """
        if self._tls is None or self._config.tls_client_auth == "required":
            return 0
        server = aio.server(options=SERVER_OPTIONS)
        self._add_replication(server, 0)
        listen = self._config.replication_address
        port = bind(server, listen, setting="replication.listen", tls=self._tls)
        await server.start()
        self._undo.append(lambda: server.stop(_GRACE_S))
        log.info("listening for followers", address=format_address(listen[0], port))
        return port

    def _add_replication(self, server: aio.Server, port: int) -> None:
        nodes_only = NodesOnly(self._authentication, open_methods=frozenset({"Locate"}))
        guarded: Any = Guarded(server, nodes_only)
        replication_pb2_grpc.add_ReplicationServicer_to_server(
            ReplicationServicer(self._replicas, self._authentication, port), guarded
        )

    def _on_change(self, change: ImageChange) -> None:
        if change.cluster_configs:
            self._reconfigure()
        self._replicas.on_metadata(change)
        self._groups.on_metadata(change)
        self._metadata.on_change(change)

    def _reconfigure(self) -> None:
        """Go by the settings that the cluster shares now."""
        self._live.take(self._image.cluster_configs)
        now = self._live.now
        self._replicas.set_lag_max_ms(now.replica_lag_time_max_ms)
        self._logs.set_min_free_bytes(now.log_min_free_bytes)
        log.info("settings of the cluster taken over", configs=self._image.cluster_configs)

    def _on_registered(self, broker_epoch: int) -> None:
        self._logs.record_broker_epoch(broker_epoch)
        self._replicas.on_registered()

    def _on_durable(self, partition_log: PartitionLog) -> None:
        self._replicas.on_durable(partition_log)

    def _on_directory_failed(self, path: Path, error: StorageError) -> None:
        """End the process: then the controllers move what it led to replicas that work."""
        if not self._failed.done():
            failure = StorageError(f"data directory {path} failed: {error.message}")
            self._failed.set_exception(failure)

    async def _close_logs(self) -> None:
        await asyncio.to_thread(self._logs.close)


def report_unopened(logs: LogManager) -> None:
    """Say in the log which replicas this broker has on its disks and yet can't serve."""
    for key, error in logs.unopened().items():
        if isinstance(error, DiskFullError):
            continue  # Reported when it is tried again, until there is room.
        log.error(
            "partition not opened, its replica here is offline",
            topic_partition_id=str(key),
            reason=error.message,
            next_step="move the directory named above away and restart this broker; it then copies "
            "the partition anew from its leader",
        )
