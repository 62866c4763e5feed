"""The group coordinator of one broker: every group whose partition this broker leads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock.broker.coordinator import refusals
from penstock.broker.coordinator.hosted import HostPorts
from penstock.broker.coordinator.hosted_groups import GroupContext, HostedGroups
from penstock.broker.coordinator.led_partitions import LedPartitions
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.coordinator.streams import MemberStream
from penstock.broker.core.group_events import (
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    FetchOffsets,
    GroupSettings,
    ListGroups,
)
from penstock.broker.core.image_topics import ImageTopics
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.transactions import Marker
from penstock.broker.replication.appending import Target
from penstock.broker.topics import OFFSETS_TOPIC
from penstock.v1 import groups_pb2
from penstock.wire.errors import InvalidRequestError, PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.names import check_group_id
from penstock.wire.transactional_ids import check_writing_id

_VERIFY_TIMEOUT_MS: Final = 5_000
_MAX_EPOCH: Final = 2**15 - 1


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
        on_rebalance: Callable[[], None] = lambda: None,
    ) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._topics = ImageTopics(image)
        ports = HostPorts(replicas, clock_ms, wall_clock_ms)
        context = GroupContext(self._topics, settings or GroupSettings(), on_rebalance)
        self._hosted = LedPartitions(
            OFFSETS_TOPIC,
            replicas,
            image,
            ensure_topic=ensure_offsets_topic,
            make=lambda place: HostedGroups(place, ports, context),
        )
        self._replicas = replicas
        self._stream_count = 0
        replicas.add_mark_listener(self._on_marks)

    def count_states(self) -> tuple[Counter[str], int]:
        """Groups coordinated here by state, and the members of all of them. On any thread."""
        states: Counter[str] = Counter()
        members = 0
        for hosted in self._hosted.hosted():
            of_one, its_members = hosted.count_states()
            states.update(of_one)
            members += its_members
        return states, members

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

    def _on_marks(
        self,
        topic: str,
        partition: int,
        leader_epoch: int,
        markers: Sequence[Marker],
        end_offset: int,
    ) -> None:
        """Transactions that may have positions of groups have ended."""
        hosted = self._hosted.get(partition) if topic == OFFSETS_TOPIC else None
        if hosted is not None and hosted.place.leader_epoch == leader_epoch:
            hosted.marked(markers, end_offset)

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

    async def commit_transaction_offsets(
        self, request: groups_pb2.CommitTransactionOffsetsRequest
    ) -> groups_pb2.CommitTransactionOffsetsResponse:
        """Store positions that are the group's when a transaction commits; answered when durable.

        The group's partition is taken into the transaction first, as by any leader. What its
        coordinator refuses that with is raised as well.
        """
        commit = request.commit
        _check_transaction(request)
        hosted = await self._route(commit.group_id)
        hosted.check_commit(commit)  # A zombie is not to have its transaction grow.
        now_ms = self._wall_clock_ms()
        if commit.offsets:
            await self._verify(hosted, request)
        answer: groups_pb2.CommitTransactionOffsetsResponse = await hosted.ask(
            lambda request_id: CommitTransactionOffsets(
                commit.group_id, request_id, request, now_ms
            )
        )
        return answer

    async def _verify(
        self, hosted: HostedGroups, request: groups_pb2.CommitTransactionOffsetsRequest
    ) -> None:
        place = hosted.place
        try:
            await self._replicas.verify_transaction(
                Target(place.topic, place.topic_id, place.partition, place.leader_epoch),
                request.transactional_id,
                (request.producer_id, request.producer_epoch),
                _VERIFY_TIMEOUT_MS,
            )
        except PenstockError as error:
            raise refusals.for_coordinated(error) from None

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


def _check_transaction(request: groups_pb2.CommitTransactionOffsetsRequest) -> None:
    check_writing_id(request.transactional_id)
    if request.producer_id < 0 or not 0 <= request.producer_epoch <= _MAX_EPOCH:
        raise InvalidRequestError(
            f"no transaction has producer id {request.producer_id} and epoch "
            f"{request.producer_epoch}; send those of InitProducerId, or of the last EndTransaction"
        )
