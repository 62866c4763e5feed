"""One node: its directories, and the roles that it plays, started and stopped in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from penstock.broker.broker import Broker
from penstock.broker.config import NodeConfig
from penstock.broker.controller_directory import ControllerDirectory
from penstock.broker.datadir import (
    DirectoryMeta,
    DirectoryUnreadableError,
    lock_directory,
    open_directories,
    use_up_founding,
)
from penstock.broker.graphite import GraphitePusher
from penstock.broker.http import NodeHttp
from penstock.broker.logs import bind_in_json
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.node_facts import NodeFacts
from penstock.broker.node_health import NodeHealth
from penstock.broker.node_http import AskVerdict, NodePages
from penstock.broker.quorum_view import QuorumView
from penstock.broker.readiness import Rollable, why_controller_not_ready
from penstock.broker.service.limits import FromNodes
from penstock.broker.stopping import Stop, stop_all
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.controller import ControllerServer
from penstock.raft_meta.credentials import NodeTls
from penstock.wire.transport import parse_address

log = structlog.get_logger()

_STOP_S: Final = 20.0
"""What a stop may take, all of it, beside the time in which the leaderships are handed over."""


class Node:
    """A controller, a broker, or both in one process. Used on one event loop."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._controller: ControllerServer | None = None
        self._broker: Broker | None = None
        self._health: NodeHealth | None = None
        self._locks: list[int] = []
        self._undo: list[Stop] = []  # What to stop, in order of start.
        self.has_failed = False
        """Its start is given up, and what had been begun is being stopped."""

    async def start(self) -> None:
        """Check the directories and start the roles. Raises typed errors; nothing is left open."""
        config = self._config
        metadata = [config.metadata_directory] if "controller" in config.roles else []
        logs = config.log_directories if "broker" in config.roles else []
        root = Path(config.data_dir)
        meta = open_directories(root, config.node_id, metadata)
        bind_in_json(cluster=meta.cluster_id)
        self._locks = [lock_directory(root)]
        failed = self._claim(root, logs)
        metrics = self._metrics(meta.cluster_id)
        self._health = health = NodeHealth()
        self._undo.append(health.stop)
        pages = NodePages(health, metrics.registry)
        from_nodes = FromNodes(config, metrics, self._links)
        self._undo.append(from_nodes.stop)
        facts = NodeFacts(config, metrics.registry)
        try:
            tls = self._tls(meta.cluster_id)
            if config.metrics_listen:
                # Before anything that may take long: probes ask from the first moment on.
                self._serve_http(pages)
            if "controller" in config.roles:
                self._controller = ControllerServer(
                    self._controller_config(meta),
                    tls,
                    count_refusal=metrics.controller_refused,
                    meter=metrics.traffic,
                    arrivals=from_nodes.arrivals,
                    taken=from_nodes.taken,
                    on_synced=metrics.storage.flush_counts(config.metadata_directory).synced,
                    node=facts,
                )
                metrics.quorum.watch(self._controller.figures)
                shown = [path for path in logs if path not in failed]
                metrics.storage.watch_metadata_room(config.metadata_directory, shown)
                metrics.process.listens("controller", parse_address(config.controller_listen)[1])
                from_nodes.opened(parse_address(config.controller_listen)[1])
                await self._controller.start()
                self._undo.append(self._controller.stop)
                use_up_founding(root)
                controller = self._controller
                health.require(lambda: why_controller_not_ready(controller.status()))
            if "broker" in config.roles:
                self._broker = Broker(
                    config,
                    meta.cluster_id,
                    metrics,
                    tls,
                    from_nodes=from_nodes,
                    facts=facts,
                    failed_directories=failed,
                )
                self._undo.append(self._stop_broker)
                await self._broker.start()
                health.require(self._broker.why_not_ready)
                pages.roll_verdict = self._broker.roll_verdict
            elif config.metrics_listen:
                pages.roll_verdict = self._of_a_controller_alone(tls)
            health.started()
        except BaseException as error:
            await self._give_up(error)
            raise
        log.info("started", roles=sorted(config.roles), cluster=meta.cluster_id)

    async def _give_up(self, error: BaseException) -> None:
        """Stop what the start has begun."""
        self.has_failed = True
        if isinstance(error, asyncio.CancelledError):
            # A thread may write there still: the directories stay locked until the process ends.
            await self._stop_parts()
        else:
            await self.stop()

    def _links(self) -> frozenset[str]:
        """The connections by which other controllers are heard."""
        return frozenset() if self._controller is None else self._controller.links()

    def _metrics(self, cluster_id: str) -> BrokerMetrics:
        """What is measured of this node, sent to Graphite if there is to be one."""
        config = self._config
        metrics = BrokerMetrics(config.metrics_labels_max)
        metrics.process.about(config.node_id, cluster_id, config.roles, config.node_rack)
        if config.metrics_listen or config.metrics_graphite:  # Else nobody sees what it looks at.
            metrics.process.start()
        stops = [metrics.process.stop]
        if config.metrics_graphite:
            graphite = GraphitePusher(
                metrics.registry,
                parse_address(config.metrics_graphite),
                config.metrics_graphite_interval_ms / 1000,
                f"node-{config.node_id}",
            )
            graphite.start()
            stops.append(graphite.stop)

        async def stop() -> None:
            for each in stops:
                each()

        self._undo.append(stop)
        return metrics

    def _claim(self, root: Path, logs: Sequence[Path]) -> dict[Path, str]:
        """Make the broker's directories this process's own; those that it must do without, and why.

        Raises DataDirectoryError when not even one is left, or one is not this node's.
        """
        failed: dict[Path, str] = {}
        for path in logs:
            try:
                open_directories(root, self._config.node_id, [path])
                self._locks.append(lock_directory(path))
            except DirectoryUnreadableError as error:
                failed[path] = error.message
                if len(failed) == len(logs):
                    raise
        return failed

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, or raise what made a role unfit to go on."""
        watched: list[asyncio.Future[object]] = [asyncio.ensure_future(stop.wait())]
        if self._controller is not None:
            watched.append(asyncio.ensure_future(self._controller.wait_failed()))
        if self._broker is not None:
            watched.append(asyncio.ensure_future(self._broker.wait_failed()))
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watched:
                task.cancel()

    def state(self) -> str:
        """How it is, in words for people."""
        return "the node starts" if self._health is None else self._health.state()

    @property
    def stop_timeout_s(self) -> float:
        """What ``stop`` takes at most: controlled.shutdown.timeout.ms and 20 seconds."""
        broker = self._broker
        return _STOP_S + (0.0 if broker is None else broker.hand_over_timeout_ms / 1000)

    async def stop(self) -> None:
        """Stop the broker, then the controller that it needs for its farewell."""
        await self._stop_parts()
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    async def _stop_parts(self) -> None:
        if self._health is not None:
            self._health.stopping()
        await stop_all(self._undo, asyncio.get_running_loop().time() + self.stop_timeout_s)

    async def _stop_broker(self) -> None:
        assert self._broker is not None
        # The rest of the time is the controller's, and of all that was started before.
        await self._broker.stop(_STOP_S * 3 / 4)

    def _serve_http(self, pages: NodePages) -> None:
        http = NodeHttp(self._config.metrics_listen, pages.routes())
        self._undo.append(lambda: asyncio.to_thread(http.close))
        log.info("listening for probes and metrics", address=self._config.metrics_listen)

    def _of_a_controller_alone(self, tls: NodeTls | None) -> AskVerdict:
        """Without a broker there is nobody else who would know the other controllers."""
        config = self._config
        directory = ControllerDirectory(config.voters, NodeConnector(tls))
        self._undo.append(directory.close)
        quorum = QuorumView(directory, config.node_id)
        return Rollable(config.node_id, None, quorum.describe).verdict

    def _tls(self, cluster_id: str) -> NodeTls | None:
        """The node's credentials, if it has any. Raises ConfigurationError for unusable ones."""
        files = self._config.tls_files
        if files is None:
            return None
        return NodeTls(files, cluster_id=cluster_id, node_id=self._config.node_id)

    def _controller_config(self, meta: DirectoryMeta) -> ControllerConfig:
        config = self._config
        return ControllerConfig(
            node_id=config.node_id,
            cluster_id=meta.cluster_id,
            may_found=meta.may_found,
            data_dir=config.metadata_directory,
            listen=parse_address(config.controller_listen),
            voters=config.voters,
            advertised=config.controller_address,
            insecure_allowed=config.controller_insecure_allow,
            election_timeout_min_ms=config.controller_election_timeout_min_ms,
            election_timeout_max_ms=config.controller_election_timeout_max_ms,
            raft_heartbeat_ms=config.controller_raft_heartbeat_ms,
            broker_session_timeout_ms=config.broker_session_timeout_ms,
            broker_disconnect_grace_ms=config.broker_disconnect_grace_ms,
            takeover_grace_ms=config.controller_takeover_grace_ms,
            balance=config.leader_imbalance_enable,
            balance_interval_ms=config.leader_imbalance_check_interval_ms,
            balance_threshold_percent=config.leader_imbalance_threshold_percent,
        )
