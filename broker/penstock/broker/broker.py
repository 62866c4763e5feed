"""The broker role: logs, replication, coordinators and services, wired together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from grpc import aio

from penstock.broker.acting import MetadataActor
from penstock.broker.client_ports import ClientServices, client_server, open_port
from penstock.broker.config import NodeConfig
from penstock.broker.controller_link import ControllerLink
from penstock.broker.coordinator.asking import CoordinatorQuestions
from penstock.broker.coordinator.lags import GroupLags
from penstock.broker.coordinator.service import GroupsServicer
from penstock.broker.coordinators import Coordinators
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.rolling import RollVerdict
from penstock.broker.found_logs import report_unopened, tell_of_damage
from penstock.broker.identity import BrokerIdentity
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.live_config import LiveConfig
from penstock.broker.measuring import watch_broker
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.node_facts import NodeFacts
from penstock.broker.peers import Peers
from penstock.broker.readiness import Picture, Rollable
from penstock.broker.repair import Repairs
from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.frame_server import FrameServer
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.reporting import REPORTS_SINCE
from penstock.broker.replication.servicer import ReplicationServicer
from penstock.broker.retention import Retention
from penstock.broker.scrubber import Scrubber
from penstock.broker.service import limits
from penstock.broker.service.admin import AdminServicer
from penstock.broker.service.controller_facts import ControllerFacts
from penstock.broker.service.coordination import CoordinationServicer
from penstock.broker.service.health import HealthServicer
from penstock.broker.service.limits import FromNodes
from penstock.broker.service.log import LogServicer
from penstock.broker.service.metadata import MetadataServicer
from penstock.broker.service.outside import ToldOutside
from penstock.broker.service.transactions import TransactionsServicer
from penstock.broker.service.unsent import Unsent
from penstock.broker.shut_logs import ShutLogs
from penstock.broker.stand_ins import StandIns
from penstock.broker.stopping import Stop, stop_all
from penstock.broker.storage.cleaner.cleaner import LogCleaner
from penstock.broker.storage.clock import steady_clock_ms
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import CleanerSettings, FlushPolicy, LogSettings
from penstock.raft_meta.arriving import Arrivals
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.guarding import Guarded, NodesOnly
from penstock.raft_meta.listening import bind
from penstock.raft_meta.tls_contexts import TlsContexts
from penstock.v1 import (
    coordination_pb2,
    coordination_pb2_grpc,
    replication_pb2,
    replication_pb2_grpc,
)
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicIdPartition
from penstock.wire.transport import NODE_SERVER_OPTIONS, format_address

log = structlog.get_logger()

_GRACE_S = 0.5
"""How long requests in progress may take to end when the broker stops."""

_FOR_NODES: Final = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in ((replication_pb2, "Replication"), (coordination_pb2, "Coordination"))
)
"""Services of broker.listen that clients have no use for."""


class Broker:
    """One broker. Start, serve, stop, on one event loop; not to be restarted."""

    def __init__(
        self,
        config: NodeConfig,
        cluster_id: str,
        metrics: BrokerMetrics,
        tls: NodeTls | None = None,
        *,
        facts: NodeFacts,
        from_nodes: FromNodes,
        failed_directories: Mapping[Path, str] | None = None,
    ) -> None:
        self._config = config
        self._facts = facts
        self._from_nodes = from_nodes
        self._live = LiveConfig(config)
        self._cluster_id = cluster_id
        self._tls = tls
        self._authentication = PeerAuthentication(cluster_id, tls=tls is not None)
        self._connector = NodeConnector(tls)
        self._image = MetadataImage()
        self._metrics = metrics
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._undo: list[Stop] = []
        self._logs = LogManager(
            config.log_directories,
            LogSettings(
                flush_policy=FlushPolicy(config.flush_policy),
                flush_interval_ms=config.flush_interval_ms,
                min_free_bytes=config.log_min_free_bytes,
                preallocate=config.log_preallocate,
                segment_bytes=config.log_segment_bytes,
            ),
            self._on_durable,
            steady_clock_ms(),
            cluster_id=cluster_id,
            on_directory_failed=self._on_directory_failed,
            on_damage=self._on_damage,
            on_log_failed=self._on_log_failed,
            on_segment_deleted=metrics.storage.segment_deleted,
            flush_counts=metrics.storage.flush_counts,
            failed=failed_directories,
        )
        self._repairs: Repairs | None = None  # While there are replicas, as the next.
        self._shut_logs: ShutLogs | None = None
        self._loop = asyncio.get_running_loop()
        self._hosts = False  # There are replicas to tell of a failed directory.
        self._link: ControllerLink
        self._actor: MetadataActor
        self._replicas: ReplicaManager
        self._coordinators: Coordinators
        self._metadata: MetadataServicer

    async def start(self) -> None:
        """Recover the logs, listen, and begin to register; serving begins once unfenced.

        Raises AddressInUseError or DataDirectoryError. Call :meth:`stop` even after a failure.
        """
        # Recovery reads files for as long as it takes; the controller role must not wait for it.
        await asyncio.to_thread(self._logs.open)
        self._undo.append(self._close_logs)
        report_unopened(self._logs)
        self._facts.watch(self._logs.homes)
        self._link = self._make_link()
        replication = ReplicationConnector(
            self._connector, frames=self._config.replication_transport == "frames"
        )
        peers = Peers(self._image, replication.open)
        self._undo.append(peers.close)
        questions = CoordinatorQuestions(
            self._config.node_id, self._image, peers, self._add_partitions
        )
        self._undo.append(questions.stop)
        self._replicas = ReplicaManager(
            self._config.node_id,
            self._logs,
            self._image,
            alter_partition=self._link.alter_partition,
            report_replicas=self._link.report_replicas,
            broker_epoch=lambda: self._link.broker_epoch,
            may_serve=self._link.may_serve,
            open_stream=replication.open_stream,
            ask_coordinator=questions.ask,
            lag_max_ms=self._config.replica_lag_time_max_ms,
            catch_up_bytes_per_second=self._config.replication_catchup_max_bytes_per_second,
        )
        await self._replicas.start()
        self._undo.append(self._replicas.stop)
        self._hosts = True
        watch_broker(self._metrics, self._replicas, self._logs, self._image, self._link)
        await self._start_repairs()
        retention = Retention(
            self._replicas,
            self._logs,
            interval_ms=self._config.log_retention_check_interval_ms,
        )
        await retention.start()
        self._undo.append(retention.stop)
        cleaner = self._make_cleaner()
        self._metrics.storage.cleaning.watch(cleaner)
        await cleaner.start()
        self._undo.append(cleaner.stop)
        self._coordinators = Coordinators(
            self._config,
            self._image,
            self._link,
            self._replicas,
            peers,
            open_markers=replication.open_markers,
            metrics=self._metrics.coordinators,
        )
        self._undo.append(self._coordinators.stop)
        if self._config.metrics_listen or self._config.metrics_graphite:
            lags = GroupLags(
                self._config.node_id,
                self._image,
                self._replicas,
                self._coordinators.groups.committed,
                open_channel=self._connector.open,
                show=self._metrics.coordinators.group_lags,
            )
            lags.start()
            self._undo.append(lags.stop)
        await self._listen()
        self._actor = self._make_actor()
        self._undo.append(self._actor.stop)
        await self._link.start()
        self._undo.append(self._link.stop)

    async def _start_repairs(self) -> None:
        config = self._config
        reads = partial(
            LeaderReads,
            config.node_id,
            self._image,
            lambda: self._link.broker_epoch,
            ReplicationConnector(self._connector).open,
        )
        stand_ins = StandIns(config.node_id, self._image, reads=reads)
        self._repairs = Repairs(
            stand_ins,
            self._replicas,
            self._logs.get,
            count_damaged=self._metrics.damaged,
            count_mended=self._metrics.mended,
        )
        self._undo.append(self._repairs.stop)
        self._shut_logs = ShutLogs(
            stand_ins,
            self._replicas,
            self._logs.get,
            count_damaged=self._metrics.damaged_log,
            count_mended=self._metrics.copied_log,
        )
        self._undo.append(self._shut_logs.stop)
        self._replicas.tell_of_shut_logs(self._shut_logs.found)
        both = self._repairs, self._shut_logs
        self._metrics.watch_damage(
            lambda: sum(one.damaged_count for one in both),
            lambda: sum(one.unmendable_count for one in both),
        )
        tell_of_damage(self._logs, self._repairs.found)
        scrubber = Scrubber(
            config.log_directories,
            self._logs,
            self._repairs.found,
            cluster_id=self._cluster_id,
            interval_ms=config.scrub_interval_ms,
            bytes_per_second=config.scrub_max_bytes_per_second,
            counts=self._metrics.storage.scrubbing,
        )
        self._metrics.storage.scrubbing.watch(scrubber, config.log_directories)
        await scrubber.start()
        self._undo.append(scrubber.stop)

    @property
    def hand_over_timeout_ms(self) -> int:
        """How long a stop waits for the leaderships to be elsewhere."""
        return self._live.now.controlled_shutdown_timeout_ms

    async def stop(self, timeout_s: float) -> None:
        """Hand the leaderships over, then stop in the reverse order of the start: in so long."""
        if self._undo and self._undo[-1] == self._link.stop:
            moved = await self._link.shut_down_controlled(self.hand_over_timeout_ms)
            if not moved:
                log.warning("stopping without having handed the leaderships over")
        await stop_all(self._undo, self._loop.time() + timeout_s)
        if self._failed.done():
            self._failed.exception()  # A start that failed has said why; asyncio need not.

    def why_not_ready(self) -> str:
        """Why clients should be sent elsewhere; empty once it serves. Of one that has started."""
        return self._link.why_not_ready()

    async def roll_verdict(self) -> RollVerdict:
        """Whether this node may be stopped now; see penstock.broker.core.rolling."""
        link = self._link
        picture = Picture(self._image, link.wait_for_index)
        return await Rollable(self._config.node_id, picture, link.describe_quorum).verdict()

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
            external=config.external,
        )
        return ControllerLink(
            identity,
            config.voters,
            self._image,
            connector=self._connector,
            heartbeat_interval_ms=config.broker_heartbeat_interval_ms,
            session_timeout_ms=config.broker_session_timeout_ms,
            on_change=self._on_change,
            until_idle=self._until_idle,
            on_registered=self._on_registered,
            may_be_let_in=lambda: self._replicas.is_settled,
        )

    def _make_cleaner(self) -> LogCleaner:
        config = self._config
        return LogCleaner(
            self._logs,
            CleanerSettings(
                threads=config.log_cleaner_threads,
                io_max_bytes_per_second=config.log_cleaner_io_max_bytes_per_second,
                dedupe_buffer_bytes=config.log_cleaner_dedupe_buffer_bytes,
                backoff_ms=config.log_cleaner_backoff_ms,
            ),
            counts=self._metrics.storage.cleaning,
        )

    async def _listen(self) -> None:
        config = self._config
        unfinished = limits.from_clients(config, self._metrics)
        unsent = limits.unsent_answers(config, self._metrics)
        self._undo += [unfinished.stop, unsent.stop]
        served = partial(
            client_server,
            config,
            self._client_services(unsent, unfinished.call),
            self._metrics.traffic,
            unsent=unsent,
            arrivals=unfinished.call,
        )
        server = served(beside=_FOR_NODES)
        self._add_replication(
            server,
            replication_pb2.LocateResponse(
                port=await self._listen_for_followers(),
                frames_port=(frames_port := await self._listen_for_frames()),
                marks_in_frames=frames_port > 0,
            ),
            unfinished.call,
            unsent,
        )
        await self._open("broker", server, config.broker_listen)
        if config.external_listen:
            outside = served(tell=ToldOutside(self._image))
            await self._open("external", outside, config.external_listen)

    async def _open(self, listener: str, server: aio.Server, address: str) -> None:
        port = await open_port(
            server, self._config, self._tls, setting=f"{listener}.listen", address=address
        )
        self._undo.append(lambda: server.stop(_GRACE_S))
        self._metrics.process.listens(listener, port)

    def _client_services(self, unsent: Unsent, arrivals: Arrivals) -> ClientServices:
        self._metadata = MetadataServicer(
            self._config.node_id,
            self._image,
            self._coordinators.topics.ensure,
            self._link.require_founded,
            self._replicas.why_out_of_sync,
        )
        coordinators = self._coordinators
        return ClientServices(
            log=LogServicer(self._replicas, self._image, self._metrics, unsent, arrivals),
            metadata=self._metadata,
            groups=GroupsServicer(coordinators.groups),
            transactions=TransactionsServicer(
                coordinators.producer_ids.take,
                coordinators.transactions,
                self._replicas.transactions,
                coordinators.hanging.judge,
            ),
            admin=AdminServicer(
                self._config.node_id,
                self._image,
                self._link,
                self._replicas.replica_ends,
                self._live.describe,
                node=self._facts,
                ask_controllers=ControllerFacts(self._link, self._connector.open),
            ),
            health=HealthServicer(self._link.may_serve),
        )

    async def _listen_for_followers(self) -> int:
        """Serve followers on a port of their own where they must be; its number, else 0.

        A port asks each peer for a certificate or none: where clients need none, the brokers
        need another.
        """
        if self._tls is None or self._config.tls_client_auth == "required":
            return 0
        server = aio.server(options=NODE_SERVER_OPTIONS)
        nodes = self._from_nodes
        self._add_replication(
            server, replication_pb2.LocateResponse(), nodes.arrivals, nodes.unsent
        )
        listen = self._config.replication_address
        port = bind(server, listen, setting="replication.listen", tls=self._tls)
        self._from_nodes.opened(port)
        await server.start()
        self._undo.append(lambda: server.stop(_GRACE_S))
        self._metrics.process.listens("replication", port)
        log.info("listening for followers", address=format_address(listen[0], port))
        return port

    async def _listen_for_frames(self) -> int:
        """Serve followers that come with frames, if there are to be any; the port, else 0."""
        if self._config.replication_transport != "frames":
            return 0
        contexts = None if self._tls is None else TlsContexts(self._tls)
        server = FrameServer(
            self._replicas,
            self._authentication,
            (lambda: None) if contexts is None else contexts.server,
            self._replicas.transactions.begin_markers,
            cluster_id=self._cluster_id,
            node_id=self._config.node_id,
            count_refused=self._metrics.stream_refused,
            count_served=partial(self._metrics.stream_served, "frames"),
        )
        host, wanted = self._config.frames_address
        port = await server.start(host, wanted)
        self._undo.append(server.stop)
        self._metrics.process.listens("frames", port)
        log.info("listening for frames", address=format_address(host, port))
        return port

    def _add_replication(
        self,
        server: aio.Server,
        located: replication_pb2.LocateResponse,
        arrivals: Arrivals,
        unsent: Unsent,
    ) -> None:
        nodes_only = NodesOnly(self._authentication, open_methods=frozenset({"Locate"}))
        guarded = Guarded(server, nodes_only, self._metrics.traffic, arrivals=arrivals)
        reads: Any = limits.reads_taken(guarded, unsent)
        replication_pb2_grpc.add_ReplicationServicer_to_server(
            ReplicationServicer(
                self._replicas,
                self._authentication,
                located,
                partial(self._metrics.stream_served, "grpc"),
            ),
            reads,
        )
        coordination: Any = Guarded(
            server, NodesOnly(self._authentication), self._metrics.traffic, arrivals=arrivals
        )
        coordination_pb2_grpc.add_CoordinationServicer_to_server(
            CoordinationServicer(
                self._config.node_id,
                self._image,
                self._add_partitions,
                self._replicas.transactions.write_markers,
                self._find_transactions,
            ),
            coordination,
        )

    async def _add_partitions(
        self, request: coordination_pb2.AddPartitionsRequest
    ) -> coordination_pb2.AddPartitionsResponse:
        return await self._coordinators.transactions.add_partitions(request)

    async def _find_transactions(
        self, request: coordination_pb2.FindTransactionsRequest
    ) -> coordination_pb2.FindTransactionsResponse:
        return await self._coordinators.transactions.find_transactions(request)

    def _make_actor(self) -> MetadataActor:
        return MetadataActor(
            self._replicas,
            first=self._before_the_replicas,
            # Clients are told when all of it is so.
            followers=(
                self._tell_repairs,
                self._coordinators.on_metadata,
                self._metadata.on_change,
                self._metrics.traffic.on_metadata,
            ),
            on_caught_up=self._link.heartbeat_soon,
            on_failed=self._fail,
        )

    async def _on_change(self, change: ImageChange) -> None:
        await self._actor.on_change(change)

    async def _until_idle(self) -> None:
        await self._actor.until_idle()

    def _before_the_replicas(self, change: ImageChange) -> None:
        if change.cluster_configs:
            self._reconfigure()
        self._check_directories()

    def _tell_repairs(self, _change: ImageChange) -> None:
        if self._repairs is not None:
            self._repairs.on_metadata()
        if self._shut_logs is not None:
            self._shut_logs.on_metadata()

    def _fail(self, error: BaseException) -> None:
        """End the process: this broker is unfit to go on."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _reconfigure(self) -> None:
        """Go by the settings that the cluster shares now."""
        self._live.take(self._image.cluster_configs)
        now = self._live.now
        self._replicas.set_lag_max_ms(now.replica_lag_time_max_ms)
        self._replicas.set_catch_up_rate(now.replication_catchup_max_bytes_per_second)
        self._logs.set_min_free_bytes(now.log_min_free_bytes)
        log.info("settings of the cluster taken over", configs=self._image.cluster_configs)

    def _on_registered(self, broker_epoch: int) -> None:
        self._logs.record_broker_epoch(broker_epoch)
        self._replicas.on_registered()
        self._actor.on_registered()

    def _on_durable(self, partition_log: PartitionLog) -> None:
        self._replicas.on_durable(partition_log)
        if self._repairs is not None:
            self._repairs.on_log_moved(partition_log)

    def _on_damage(self, partition_log: PartitionLog, offset: int) -> None:
        if self._repairs is not None:  # Before that nothing is served.
            self._repairs.found(partition_log, offset)

    def _on_directory_failed(self, path: Path, error: StorageError) -> None:
        """On any thread, in the midst of what failed."""
        self._loop.call_soon_threadsafe(self._directory_failed, path, error)

    def _directory_failed(self, path: Path, error: StorageError) -> None:
        """Go on with the other directories; the controllers are told of what was in this one."""
        self._check_directories()
        if self._hosts and not self._failed.done():
            self._replicas.on_logs_failed(self._logs.held_in(path), error)

    def _on_log_failed(self, key: TopicIdPartition, error: StorageError) -> None:
        """On any thread, as above."""
        self._loop.call_soon_threadsafe(self._log_failed, key, error)

    def _log_failed(self, key: TopicIdPartition, error: StorageError) -> None:
        """Go on with all other logs, unless nobody would learn that one has failed."""
        if self._image.index >= 0 and self._image.metadata_version < REPORTS_SINCE:
            self._fail(error)
        elif self._hosts:
            self._replicas.on_logs_failed([key], error)

    def _check_directories(self) -> None:
        """End the process when no directory is left, or nobody would learn that one has failed.

        Then the controllers move all that it led to replicas that work.
        """
        failed = self._logs.failed_directories
        if not failed or self._failed.done():
            return
        told = self._image.index < 0 or self._image.metadata_version >= REPORTS_SINCE
        if told and len(failed) < len(self._config.log_directories):
            return
        paths = ", ".join(map(str, failed))
        why = (
            "no other is left"
            if told
            else f"metadata.version {self._image.metadata_version} does not let the controllers "
            "know; run `penstock cluster upgrade` once every node is new"
        )
        self._failed.set_exception(StorageError(f"data directory {paths} failed, and {why}"))

    async def _close_logs(self) -> None:
        await asyncio.to_thread(self._logs.close)
