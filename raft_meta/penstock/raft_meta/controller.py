"""A controller: the engine, the state machine and the two services on the controller port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog
from grpc import aio

from penstock.raft_meta.active import ControllerShell
from penstock.raft_meta.arriving import Arrivals
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.exposure import check_exposure
from penstock.raft_meta.figures import ControllerFigures, Elections, figures_of
from penstock.raft_meta.guarding import Guarded, NodesOnly, Speaker
from penstock.raft_meta.listening import bind
from penstock.raft_meta.metering import Meter, SyncObserver, nobody_observes
from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.refusals import RefusalCounter, nobody_counts
from penstock.raft_meta.reports import NodeReports, NothingTold
from penstock.raft_meta.service import ControllerServicer
from penstock.v1 import controller_pb2_grpc, raft_pb2_grpc
from penstock.wire.transport import NODE_SERVER_OPTIONS, format_address

log = structlog.get_logger()

_STOP_GRACE_S: Final = 0.2

_SPEAKERS: Final[Mapping[str, Speaker]] = {
    "RegisterBroker": lambda request: int(request.registration.node_id),
    "Heartbeat": lambda request: int(request.node_id),
    "AlterPartition": lambda request: int(request.change.node_id),
    "ReportReplicas": lambda request: int(request.report.node_id),
    "AllocateProducerIds": lambda request: int(request.allocation.node_id),
    "WatchMetadata": lambda request: int(request.node_id),
}
"""Who speaks, by method of the Controller service: under TLS it must be that node. A Raft stream
says it in its hello, which the link checks. The rest is what any node may ask."""


class ControllerServer:
    """One controller process' part. Start, serve, stop, on one event loop; not to be restarted."""

    def __init__(
        self,
        config: ControllerConfig,
        tls: NodeTls | None = None,
        *,
        count_refusal: RefusalCounter = nobody_counts,
        meter: Meter | None = None,
        arrivals: Arrivals | None = None,
        taken: Callable[[Guarded], Any] | None = None,
        on_synced: SyncObserver = nobody_observes,
        node: NodeReports | None = None,
    ) -> None:
        self._config = config
        self._node = node or NothingTold()
        self._tls = tls
        self._shell = ControllerShell(config, count_refusal=count_refusal)
        self._meter = meter
        self._arrivals = arrivals
        self._taken = taken
        self._elections = Elections()
        self._quorum = RaftQuorum(
            config, self._shell, tls, levels=self._shell.levels, on_synced=on_synced
        )
        self._shell.bind(self._quorum)
        self._quorum.add_leadership_listener(self._elections.on_leadership)
        self._server: aio.Server | None = None
        self.port = config.listen[1]

    async def start(self) -> None:
        """Listen and take part in the quorum. Nothing is left open when it raises.

        Raises AddressInUseError, ConfigurationError for an address that needs TLS and has none,
        or DataDirectoryError for a directory that is not ours or is damaged. Returns before there
        is a leader.
        """
        config, tls = self._config, self._tls
        check_exposure(config.listen, tls=tls is not None, insecure_allowed=config.insecure_allowed)
        server = aio.server(options=NODE_SERVER_OPTIONS)
        self.port = bind(server, config.listen, setting="controller.listen", tls=tls)
        authentication = PeerAuthentication(config.cluster_id, tls=tls is not None)
        guarded: Any = Guarded(
            server, NodesOnly(authentication, _SPEAKERS), self._meter, arrivals=self._arrivals
        )  # What the generated code calls of a server.
        raft_pb2_grpc.add_RaftServicer_to_server(self._quorum.link, guarded)
        if self._taken is not None:
            guarded = self._taken(guarded)
        controller_pb2_grpc.add_ControllerServicer_to_server(
            ControllerServicer(config, self._shell, self._quorum, self._node), guarded
        )
        self._server = server
        try:
            await self._quorum.start()
            await server.start()
        except BaseException:
            await self.stop()
            raise
        log.info("controller listens", address=format_address(self._config.listen[0], self.port))

    async def stop(self) -> None:
        """Leave the quorum and close everything; what is committed is on disk. Safe to repeat.

        The active controller hands its office over first, so that nobody waits for an election.
        """
        server, self._server = self._server, None
        if server is None:
            return
        if await self._quorum.hand_over():
            log.info("handed over", leader_id=self._quorum.status().leader_id)
        self._shell.stop()
        await self._quorum.stop()
        await server.stop(_STOP_GRACE_S)

    def wait_failed(self) -> asyncio.Future[None]:
        """A future that fails with what makes this controller unfit to go on; the node must end."""
        return self._quorum.wait_failed()

    def status(self) -> QuorumStatus:
        """How this controller sees the quorum."""
        return self._quorum.status()

    def links(self) -> frozenset[str]:
        """The connections by which other controllers are heard, as gRPC names them."""
        return self._quorum.link.connections()

    def figures(self) -> ControllerFigures:
        """What is measured of this controller. On any thread."""
        return figures_of(
            self._quorum.status(),
            self._shell.state,
            self._elections.count,
            is_active=self._shell.is_active,
            changed_index=self._shell.changed_index,
        )
