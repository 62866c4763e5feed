"""The Groups service: gRPC in front of the group coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sized
from typing import Any, Final
from urllib.parse import unquote

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock.broker.coordinator.coordinator import GroupCoordinator
from penstock.broker.coordinator.streams import MemberStream
from penstock.v1 import groups_pb2
from penstock.v1.groups_pb2_grpc import GroupsServicer as GroupsServicerBase
from penstock.wire.errors import (
    InvalidRequestError,
    PenstockError,
    UnknownServerError,
)
from penstock.wire.transport import parse_address

_MAX_GROUPS_ASKED: Final = 1_000

log = structlog.get_logger()


def peer_host(peer: str) -> str:
    """The host of a gRPC peer such as ``ipv4:127.0.0.1:5000`` or ``ipv6:%5B::1%5D:5000``."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    try:
        return parse_address(unquote(address))[0]
    except ValueError:
        return address


async def _check_count(group_ids: Sized, context: Any) -> None:
    if len(group_ids) > _MAX_GROUPS_ASKED:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{len(group_ids)} groups are asked about; {_MAX_GROUPS_ASKED} are allowed at once",
        )


class GroupsServicer(GroupsServicerBase):
    """Answers group members and tools. Refusals are typed errors in the answers."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator

    async def Heartbeat(  # type: ignore[override]  # The stubs know no handler that writes itself.
        self, request_iterator: AsyncIterator[groups_pb2.GroupHeartbeatRequest], context: Any
    ) -> None:
        """A member's stream: one answer a message, and pushes when something changed."""
        stream = self._coordinator.open_stream(peer_host(context.peer()))
        reader = asyncio.create_task(self._read(request_iterator, stream), name="member stream")
        try:
            while (response := await stream.next()) is not None:
                await context.write(response)
        finally:
            self._coordinator.close_stream(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(
        self,
        request_iterator: AsyncIterator[groups_pb2.GroupHeartbeatRequest],
        stream: MemberStream,
    ) -> None:
        """Hand on a member's messages, all of the same member, one after the other."""
        speaker: tuple[str, str] | None = None
        try:
            async for request in request_iterator:
                speaker = speaker or (request.group_id, request.member_id)
                if (request.group_id, request.member_id) != speaker:
                    error = InvalidRequestError(
                        f"the stream is that of member {speaker[1]!r} of group {speaker[0]!r}; "
                        "open another one for another member"
                    )
                    stream.end(error)
                    return
                await self._coordinator.heartbeat(stream, request)
        except DecodeError:
            stream.end(
                InvalidRequestError(
                    "a message of the stream is no GroupHeartbeatRequest; send what penstock.v1 "
                    "describes"
                )
            )
        except Exception as error:
            # Whatever it was, the member must hear of it.
            log.exception("member stream failed")
            stream.end(UnknownServerError(f"the member's stream failed: {error!r}"))
        finally:
            stream.finish_reading()

    async def CommitOffsets(
        self, request: groups_pb2.CommitOffsetsRequest, context: Any
    ) -> groups_pb2.CommitOffsetsResponse:
        """Store positions."""
        try:
            return await self._coordinator.commit_offsets(request)
        except PenstockError as error:
            return groups_pb2.CommitOffsetsResponse(error=error.to_proto())

    async def CommitTransactionOffsets(
        self, request: groups_pb2.CommitTransactionOffsetsRequest, context: Any
    ) -> groups_pb2.CommitTransactionOffsetsResponse:
        """Store positions in a transaction."""
        try:
            return await self._coordinator.commit_transaction_offsets(request)
        except PenstockError as error:
            refused = groups_pb2.CommitOffsetsResponse(error=error.to_proto())
            return groups_pb2.CommitTransactionOffsetsResponse(commit=refused)

    async def FetchOffsets(
        self, request: groups_pb2.FetchOffsetsRequest, context: Any
    ) -> groups_pb2.FetchOffsetsResponse:
        """Read positions."""
        try:
            return await self._coordinator.fetch_offsets(request)
        except PenstockError as error:
            return groups_pb2.FetchOffsetsResponse(error=error.to_proto())

    async def ListGroups(
        self, request: groups_pb2.ListGroupsRequest, context: Any
    ) -> groups_pb2.ListGroupsResponse:
        """The groups of this broker. UNAVAILABLE while some are still being read."""
        try:
            return await self._coordinator.list_groups()
        except PenstockError as error:
            # The answer has no place for a refusal, and half a list would be taken for all of it.
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise AssertionError("abort raises") from None

    async def DescribeGroups(
        self, request: groups_pb2.DescribeGroupsRequest, context: Any
    ) -> groups_pb2.DescribeGroupsResponse:
        """Groups whole, each with its own refusal."""

        async def describe(group_id: str) -> groups_pb2.GroupDescription:
            try:
                return await self._coordinator.describe_group(group_id)
            except PenstockError as error:
                return groups_pb2.GroupDescription(group_id=group_id, error=error.to_proto())

        await _check_count(request.group_ids, context)
        return groups_pb2.DescribeGroupsResponse(
            groups=await asyncio.gather(*map(describe, request.group_ids))
        )

    async def DeleteOffsets(
        self, request: groups_pb2.DeleteOffsetsRequest, context: Any
    ) -> groups_pb2.DeleteOffsetsResponse:
        """Forget positions of partitions that no member reads."""
        try:
            return await self._coordinator.delete_offsets(request)
        except PenstockError as error:
            return groups_pb2.DeleteOffsetsResponse(error=error.to_proto())

    async def DeleteGroups(
        self, request: groups_pb2.DeleteGroupsRequest, context: Any
    ) -> groups_pb2.DeleteGroupsResponse:
        """Delete groups, each with its own outcome."""

        async def delete(group_id: str) -> groups_pb2.DeleteGroupResult:
            try:
                return await self._coordinator.delete_group(group_id)
            except PenstockError as error:
                return groups_pb2.DeleteGroupResult(group_id=group_id, error=error.to_proto())

        await _check_count(request.group_ids, context)
        return groups_pb2.DeleteGroupsResponse(
            results=await asyncio.gather(*map(delete, request.group_ids))
        )
