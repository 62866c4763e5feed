"""A controller: the engine, the state machine and the two services on the controller port."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from grpc import aio

from penstock.raft_meta.active import ControllerShell
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.service import ControllerServicer
from penstock.v1 import controller_pb2_grpc, raft_pb2_grpc
from penstock.wire.errors import AddressInUseError
from penstock.wire.transport import SERVER_OPTIONS, format_address

log = structlog.get_logger()

_STOP_GRACE_S: Final = 0.2


class ControllerServer:
    """One controller process' part. Start, serve, stop, on one event loop; not to be restarted."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._shell = ControllerShell(config)
        self._quorum = RaftQuorum(config, self._shell)
        self._shell.bind(self._quorum)
        self._server: aio.Server | None = None
        self.port = config.listen[1]

    async def start(self) -> None:
        """Listen and take part in the quorum. Nothing is left open when it raises.

        Raises AddressInUseError, or DataDirectoryError for a directory that is not ours or is
        damaged. Returns before there is a leader.
        """
        server = aio.server(options=SERVER_OPTIONS)
        address = format_address(*self._config.listen)
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise AddressInUseError(
                f"cannot listen on {address}: another process uses the port, or the address is "
                "not this machine's; change controller.listen or stop the other process"
            )
        raft_pb2_grpc.add_RaftServicer_to_server(self._quorum.link, server)
        controller_pb2_grpc.add_ControllerServicer_to_server(
            ControllerServicer(self._config, self._shell, self._quorum), server
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
