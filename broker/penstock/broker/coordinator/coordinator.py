"""The group coordinator of one broker: every group whose partition this broker leads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from penstock.broker.coordinator.hosted import HostPorts
from penstock.broker.coordinator.hosted_groups import GroupContext, HostedGroups
from penstock.broker.coordinator.led_partitions import LedPartitions
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.coordinator.streams import MemberStream
from penstock.broker.core.group_events import (
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    FetchOffsets,
    GroupSettings,
    ListGroups,
)
from penstock.broker.core.image_topics import ImageTopics
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.topics import OFFSETS_TOPIC
from penstock.v1 import groups_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.names import check_group_id


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class GroupCoordinator:
    """Coordinates groups; see proto/penstock/v1/groups.proto for what each request means.

    Construct it before the replicas take their first metadata, call :meth:`on_metadata` after
    each change was applied to ``image``, and :meth:`stop` before the replicas stop. Used on one
    event loop. Everything raises PenstockError; no answer is given before what it tells is
    committed.
    """

    def __init__(
        self,
        replicas: ReplicaLog,
        image: MetadataImage,
        *,
        ensure_offsets_topic: Callable[[], Awaitable[object]],
        settings: GroupSettings | None = None,
        clock_ms: Callable[[], int] = _monotonic_ms,
        wall_clock_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._topics = ImageTopics(image)
        ports = HostPorts(replicas, clock_ms, wall_clock_ms)
        context = GroupContext(self._topics, settings or GroupSettings())
        self._hosted = LedPartitions(
            OFFSETS_TOPIC,
            replicas,
            image,
            ensure_topic=ensure_offsets_topic,
            make=lambda place: HostedGroups(place, ports, context),
        )
        self._stream_count = 0

    async def stop(self) -> None:
        """Stop coordinating: every stream ends with a typed error."""
        self._hosted.stop()

    # ------------------------------------------------------------------ what happens to it

    def on_metadata(self, change: ImageChange) -> None:
        """Act on what has just been applied to the image."""
        news = self._topics.news(change)
        if news is not None:
            for hosted in self._hosted.values():
                hosted.topics_changed(news)

    # ------------------------------------------------------------------ members' streams

    def open_stream(self, client_host: str) -> MemberStream:
        """A new stream, newer than all before it."""
        self._stream_count += 1
        return MemberStream(self._stream_count, client_host)

    def close_stream(self, stream: MemberStream) -> None:
        """The connection is gone. The member stays until its session times out."""
        stream.close()
        for hosted in self._hosted.values():
            hosted.forget_stream(stream)

    async def heartbeat(
        self, stream: MemberStream, request: groups_pb2.GroupHeartbeatRequest
    ) -> None:
        """Take one message of a member. It is answered on the stream, once, whatever happens."""
        stream.received()
        try:
            hosted = await self._route(request.group_id)
            hosted.heartbeat(stream, request)
        except PenstockError as error:
            stream.reply(
                groups_pb2.GroupHeartbeatResponse(
                    error=error.to_proto(), member_id=request.member_id
                )
            )

    # ------------------------------------------------------------------ requests

    async def commit_offsets(
        self, request: groups_pb2.CommitOffsetsRequest
    ) -> groups_pb2.CommitOffsetsResponse:
        """Store positions; answered when they are durable."""
        hosted = await self._route(request.group_id)
        now_ms = self._wall_clock_ms()
        answer: groups_pb2.CommitOffsetsResponse = await hosted.ask(
            lambda request_id: CommitOffsets(request.group_id, request_id, request, now_ms)
        )
        return answer

    async def fetch_offsets(
        self, request: groups_pb2.FetchOffsetsRequest
    ) -> groups_pb2.FetchOffsetsResponse:
        """Read positions; every commit answered before is seen."""
        hosted = await self._route(request.group_id)
        answer: groups_pb2.FetchOffsetsResponse = await hosted.ask(
            lambda request_id: FetchOffsets(request.group_id, request_id, request)
        )
        return answer

    async def describe_group(self, group_id: str) -> groups_pb2.GroupDescription:
        """One group whole."""
        hosted = await self._route(group_id)
        answer: groups_pb2.GroupDescription = await hosted.ask(
            lambda request_id: DescribeGroup(group_id, request_id)
        )
        return answer

    async def delete_group(self, group_id: str) -> groups_pb2.DeleteGroupResult:
        """Delete an empty group with its offsets."""
        hosted = await self._route(group_id)
        answer: groups_pb2.DeleteGroupResult = await hosted.ask(
            lambda request_id: DeleteGroup(group_id, request_id)
        )
        return answer

    def committed(self) -> dict[str, dict[TopicPartition, int]]:
        """By group the positions of partitions whose topic exists, of what is loaded here."""
        return {
            group_id: positions
            for hosted in self._hosted.values()
            for group_id, positions in hosted.committed().items()
        }

    async def delete_offsets(
        self, request: groups_pb2.DeleteOffsetsRequest
    ) -> groups_pb2.DeleteOffsetsResponse:
        """Forget positions; answered when that is durable."""
        hosted = await self._route(request.group_id)
        answer: groups_pb2.DeleteOffsetsResponse = await hosted.ask(
            lambda request_id: DeleteOffsets(request.group_id, request_id, request)
        )
        return answer

    async def list_groups(self) -> groups_pb2.ListGroupsResponse:
        """The groups that this broker coordinates, all of them or an error.

        Waits a while for partitions that are still being read.
        """
        answer = groups_pb2.ListGroupsResponse()
        for shard in await self._hosted.all_loaded():
            if self._hosted.leads(shard):
                answer.groups.extend((await shard.ask(ListGroups)).groups)
        answer.groups.sort(key=lambda listing: listing.group_id)
        return answer

    async def _route(self, group_id: str) -> HostedGroups:
        check_group_id(group_id)
        return await self._hosted.route(group_id)
