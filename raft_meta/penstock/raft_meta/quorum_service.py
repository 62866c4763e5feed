"""The part of the Controller service that is about the quorum itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.raft_meta.quorum import Quorum, QuorumStatus, Role
from penstock.raft_meta.voters import Address, VoterSet
from penstock.v1 import controller_pb2
from penstock.wire.errors import InvalidRequestError, PenstockError

_MAX_PORT: Final = 65_535
_CONFIRM_MS: Final = 500
"""A leader that a majority has not confirmed by then is cut off, or will soon be told so."""


_ROLES: Final = {
    Role.FOLLOWER: controller_pb2.QUORUM_ROLE_FOLLOWER,
    Role.CANDIDATE: controller_pb2.QUORUM_ROLE_CANDIDATE,
    Role.LEADER: controller_pb2.QUORUM_ROLE_LEADER,
}


class QuorumServicer:
    """Who votes, and how far everybody is. One event loop.

    ``told_index`` is the index of the last change that those who follow the metadata are told of.
    """

    def __init__(
        self, config: ControllerConfig, quorum: Quorum, told_index: Callable[[], int]
    ) -> None:
        self._config = config
        self._quorum = quorum
        self._told_index = told_index

    async def DescribeQuorum(  # noqa: N802 - gRPC methods are named as in the protocol.
        self,
        request: controller_pb2.DescribeQuorumRequest,
        context: Any,
    ) -> controller_pb2.DescribeQuorumResponse:
        """Tell how this controller sees the quorum, and whether a majority confirmed it."""
        return await self._describe()

    async def _is_confirmed(self) -> bool:
        """Whether this controller leads, as a majority says after the call (ReadIndex)."""
        before = self._quorum.status()
        if before.role is not Role.LEADER:
            return False
        try:
            await self._quorum.read_index(timeout_ms=_CONFIRM_MS)
        except PenstockError:
            return False
        now = self._quorum.status()
        # What is described is what it knows now, so that it must be the same leadership.
        return now.role is Role.LEADER and now.term == before.term

    async def _describe(self) -> controller_pb2.DescribeQuorumResponse:
        confirmed = await self._is_confirmed()
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
            confirmed=confirmed,
            last_index=status.last_index,
            role=_ROLES[status.role],
            metadata_index=self._told_index() if confirmed else 0,
            supported_metadata_version=METADATA_VERSION,
        )
        if status.voters is None:
            response.founding.founder_node_id = status.founder_id
            response.founding.needs_permission = status.needs_permission
            response.founding.refusals.update(status.founding_refusals)
        voters = status.voters or VoterSet.of(self._config.voters, self._config.voters)
        for member in voters:
            voter = self._voter(status, member.node_id, member.address)
            voter.directory_id = member.directory_id
            response.voters.append(voter)
        if status.catching_up is not None:
            response.catching_up.CopyFrom(self._voter(status, *status.catching_up))
        return response

    def _voter(
        self, status: QuorumStatus, node_id: int, address: Address
    ) -> controller_pb2.QuorumVoter:
        """What this controller knows of a voter, or of one that is to become a voter."""
        host, port = self._quorum.address_of(node_id) or address
        hearing = status.hearings.get(node_id)
        # Of one that never answered the engine knows 0, which would be an empty log.
        unknown = hearing is not None and not hearing.ever_answered
        return controller_pb2.QuorumVoter(
            node_id=node_id,
            host=host,
            port=port,
            match_index=-1 if unknown else status.match_index.get(node_id, -1),
            found_directory_id=status.directories.get(node_id, b""),
            silent_ms=None if hearing is None else hearing.silent_ms,
            unreachable=hearing is not None and not hearing.is_reachable,
        )

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
        return controller_pb2.AlterVotersResponse(quorum=await self._describe())

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
