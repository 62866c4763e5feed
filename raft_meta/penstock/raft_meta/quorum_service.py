"""The part of the Controller service that is about the quorum itself."""

from __future__ import annotations

from typing import Any

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.raft_meta.quorum import Quorum
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import controller_pb2
from penstock.wire.errors import InvalidRequestError, PenstockError

_MAX_PORT = 65_535


class QuorumServicer:
    """Who votes, and how far everybody is. One event loop."""

    def __init__(self, config: ControllerConfig, quorum: Quorum) -> None:
        self._config = config
        self._quorum = quorum

    async def DescribeQuorum(  # noqa: N802 - gRPC methods are named as in the protocol.
        self,
        request: controller_pb2.DescribeQuorumRequest,
        context: Any,
    ) -> controller_pb2.DescribeQuorumResponse:
        """Tell how this controller sees the quorum."""
        return self._describe()

    def _describe(self) -> controller_pb2.DescribeQuorumResponse:
        status = self._quorum.status()
        response = controller_pb2.DescribeQuorumResponse(
            leader_id=status.leader_id,
            term=status.term,
            commit_index=status.commit_index,
            applied_index=status.applied_index,
            answered_by=status.node_id,
            voters_index=status.voters_index,
            awaited_node_ids=status.awaited,
            directory_id=status.directory_id,
            supported_metadata_version=METADATA_VERSION,
        )
        voters = status.voters or VoterSet.of(self._config.voters, self._config.voters)
        for member in voters:
            host, port = self._quorum.address_of(member.node_id) or member.address
            response.voters.add(
                node_id=member.node_id,
                host=host,
                port=port,
                match_index=status.match_index.get(member.node_id, -1),
                directory_id=member.directory_id,
                found_directory_id=status.directories.get(member.node_id, b""),
            )
        return response

    async def AlterVoters(  # noqa: N802 - gRPC methods are named as in the protocol.
        self,
        request: controller_pb2.AlterVotersRequest,
        context: Any,
    ) -> controller_pb2.AlterVotersResponse:
        """Add or remove one voter."""
        remaining_s = context.time_remaining()
        timeout_ms = self._config.propose_timeout_ms
        if remaining_s is not None:
            timeout_ms = max(int(remaining_s * 1000), 1)
        try:
            await self._alter(request, timeout_ms)
        except PenstockError as error:
            return controller_pb2.AlterVotersResponse(error=error.to_proto())
        return controller_pb2.AlterVotersResponse(quorum=self._describe())

    async def _alter(self, request: controller_pb2.AlterVotersRequest, timeout_ms: int) -> None:
        match request.WhichOneof("change"):
            case "add":
                add = request.add
                if add.node_id < 0 or not add.host or not 0 < add.port <= _MAX_PORT:
                    raise InvalidRequestError(
                        f"controller {add.node_id} at {add.host!r}:{add.port} can not be a voter; "
                        "next: say node id, host and port of its controller.advertised"
                    )
                address = (add.host, add.port)
                await self._quorum.add_voter(add.node_id, address, timeout_ms=timeout_ms)
            case "remove_node_id":
                await self._quorum.remove_voter(request.remove_node_id, timeout_ms=timeout_ms)
            case _:
                raise InvalidRequestError("no change of the voters is named; next: add or remove")
