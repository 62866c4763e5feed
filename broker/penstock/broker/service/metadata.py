"""The Metadata service: any broker answers from its own picture of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc

from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import ImageChange, MetadataImage, Topic
from penstock.broker.service.kept_answers import KeptAnswers
from penstock.broker.service.watching import Recent, Touched, Watcher
from penstock.broker.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from penstock.v1 import cluster_pb2, common_pb2, metadata_pb2
from penstock.v1.metadata_pb2_grpc import MetadataServicer as MetadataServicerBase
from penstock.wire.config_keys import suggest
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    InvalidGroupIdError,
    InvalidRequestError,
    InvalidTransactionalIdError,
    PenstockError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicId, TopicIdPartition, format_topic_id
from penstock.wire.transactional_ids import coordinating_key

_PATIENCE_S: Final = 3.0  # What a first start and the first news of a controller may take.
_HASTE_S: Final = 1.0
"""Whoever gives less asks again and again, and is told within that time why it waits."""


WhyOutOfSync = Callable[[TopicIdPartition], Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]]
"""Why replicas of a partition are not in sync, by node id, as far as this broker knows."""


def nobody_knows(
    _key: TopicIdPartition,
) -> Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]:
    """For a broker that has no replicas to tell of."""
    return {}


def describe_broker(
    record: cluster_pb2.BrokerRecord, offline_replica_count: int, leader_count: int
) -> metadata_pb2.BrokerDescription:
    """A broker as clients may know it."""
    return metadata_pb2.BrokerDescription(
        node_id=record.node_id,
        host=record.host,
        port=record.port,
        rack=record.rack,
        fenced=record.fenced,
        in_controlled_shutdown=record.in_controlled_shutdown,
        broker_epoch=record.broker_epoch,
        min_metadata_version=record.min_metadata_version,
        max_metadata_version=record.max_metadata_version,
        offline_replica_count=offline_replica_count,
        drained_since_ms=record.drained_since_ms,
        leader_count=leader_count,
        external_host=record.external_host,
        external_port=record.external_port,
    )


def describe_topic(topic: Topic) -> metadata_pb2.TopicDescription:
    """A topic with its partitions in order."""
    return metadata_pb2.TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id,
        internal=topic.record.internal,
        configs=topic.record.configs,
        partitions=[
            metadata_pb2.PartitionDescription(
                partition=number,
                leader=record.leader,
                leader_epoch=record.leader_epoch,
                replicas=record.replicas,
                isr=record.isr,
                elr=record.elr,
                partition_epoch=record.partition_epoch,
                offline_replicas=record.offline_replicas,
                min_insync_replicas=record.min_insync_replicas,
            )
            for number, record in sorted(topic.partitions.items())
        ],
    )


def unknown_topic(image: MetadataImage, name: str) -> UnknownTopicOrPartitionError:
    """The refusal for a name that no topic has; it names the near one."""
    known = [topic.name for topic in image.topics()]
    return UnknownTopicOrPartitionError(
        f"there is no topic {name!r}{suggest(name, known)} "
        "(topics are not created by use, but by `penstock topics create NAME`)"
    )


class MetadataServicer(MetadataServicerBase):
    """Answers from the image; waits for nobody but for a coordinators' topic to be made.

    Before the image has come, nothing is said about topics: that there are none would be taken for
    the truth. ``require_founded`` raises ClusterNotFoundedError when waiting for it is in vain.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        ensure_topic: Callable[[str], Awaitable[Topic]],
        require_founded: Callable[[], Awaitable[None]],
        why_out_of_sync: WhyOutOfSync = nobody_knows,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._heard = asyncio.Event()
        self._require_founded = require_founded
        self._why_out_of_sync = why_out_of_sync
        self._ensure_topic = ensure_topic
        self.answers: Final = KeptAnswers(lambda: image.version)
        """Those to questions that many ask."""
        self._watchers: set[Watcher] = set()
        self._recent = Recent()

    def on_change(self, change: ImageChange) -> None:
        """Tell the watchers. To be called after the image took the change over."""
        self._heard.set()
        if change.snapshot:
            self._recent.restart(change.index)
            for watcher in self._watchers:
                watcher.offer_everything()
            return
        touched = self._touched_by(change)
        self._recent.add(touched)
        for watcher in self._watchers:
            watcher.offer(touched)

    async def DescribeCluster(
        self, request: metadata_pb2.DescribeClusterRequest, context: Any
    ) -> metadata_pb2.DescribeClusterResponse:
        """Describe the brokers and who controls."""
        image = self._image
        return metadata_pb2.DescribeClusterResponse(
            cluster_id=image.cluster_id,
            controller_id=image.controller_id,
            controller_epoch=image.controller_epoch,
            metadata_index=image.index,
            brokers=self._brokers(),
            answered_by=self._node_id,
            metadata_version=image.metadata_version,
        )

    async def DescribeTopics(
        self, request: metadata_pb2.DescribeTopicsRequest, context: Any
    ) -> metadata_pb2.DescribeTopicsResponse:
        """Describe topics by name, by id, or all."""
        image = self._image
        if image.index < 1:
            try:
                await self._hear(context)
            except PenstockError as error:
                return metadata_pb2.DescribeTopicsResponse(error=error.to_proto())
        if request.out_of_sync:  # It takes more than the image to tell.
            return self._describe(request)
        return self.answers.answer(
            metadata_pb2.DescribeTopicsResponse,
            request.SerializeToString(deterministic=True),
            lambda: self._describe(request),
        )

    def _describe(
        self, request: metadata_pb2.DescribeTopicsRequest
    ) -> metadata_pb2.DescribeTopicsResponse:
        image = self._image
        if request.all_topics:
            found = [
                topic
                for topic in sorted(image.topics(), key=lambda topic: topic.name)
                if request.include_internal or not topic.record.internal
            ]
            described = [describe_topic(topic) for topic in found]
        else:
            described = [self._describe_name(name) for name in request.topics]
            described += [self._describe_id(topic_id) for topic_id in request.topic_ids]
        if request.out_of_sync:
            for topic in described:
                self._say_why(topic)
        return metadata_pb2.DescribeTopicsResponse(
            topics=described,
            brokers=self._brokers(),
            metadata_index=image.index,
            cluster_id=image.cluster_id,
        )

    def _say_why(self, topic: metadata_pb2.TopicDescription) -> None:
        for entry in topic.partitions:
            if len(entry.isr) == len(entry.replicas):
                continue
            key = TopicIdPartition(TopicId(topic.topic_id), entry.partition)
            for node_id, reason in sorted(self._why_out_of_sync(key).items()):
                if node_id not in entry.isr:  # What it acts on may be a moment behind the image.
                    entry.out_of_sync.add(node_id=node_id, reason=reason)

    async def FindCoordinator(
        self, request: metadata_pb2.FindCoordinatorRequest, context: Any
    ) -> metadata_pb2.FindCoordinatorResponse:
        """Name the leader of the offsets partition that a group hashes to."""
        try:
            leader = await self._coordinator(request)
        except PenstockError as error:
            return metadata_pb2.FindCoordinatorResponse(error=error.to_proto())
        return metadata_pb2.FindCoordinatorResponse(coordinator=leader)

    async def Watch(
        self, request: metadata_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[metadata_pb2.WatchResponse]:
        """Send what the topics are now, or what of them changed since, then whatever changes."""
        if self._image.index < 1:
            await self._heard.wait()
        watcher = Watcher(frozenset(request.topics))
        self._watchers.add(watcher)
        try:
            yield self._first(watcher, request.known_index)
            while True:
                change = await watcher.next()
                yield self._everything(watcher) if change is None else self._told(*change)
        finally:
            self._watchers.discard(watcher)

    async def _hear(self, context: Any) -> None:
        """Wait for the image; where it does not come, end the call or raise."""
        left_s = context.time_remaining()
        patience_s = _PATIENCE_S if left_s is None or left_s > _HASTE_S else left_s / 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._heard.wait()
                return
        await self._require_founded()
        await context.abort(
            grpc.StatusCode.UNAVAILABLE,
            f"broker {self._node_id} has heard nothing of the cluster's topics from a controller "
            "since it started; next: see `penstock quorum status`",
        )

    def _first(self, watcher: Watcher, known_index: int) -> metadata_pb2.WatchResponse:
        missed = self._recent.since(known_index) if known_index > 0 else None
        if missed is None or known_index > self._image.index:
            return self._everything(watcher)
        return self._told(missed.watched_by(watcher.topics), missed.brokers)

    def _brokers(self) -> list[metadata_pb2.BrokerDescription]:
        offline, led = self._image.offline_counts, self._image.leader_counts
        return [
            describe_broker(record, offline[node_id], led[node_id])
            for node_id, record in sorted(self._image.brokers.items())
        ]

    def _describe_name(self, name: str) -> metadata_pb2.TopicDescription:
        topic = self._image.topic(name)
        if topic is not None:
            return describe_topic(topic)
        return metadata_pb2.TopicDescription(
            name=name, error=unknown_topic(self._image, name).to_proto()
        )

    def _describe_id(self, topic_id: bytes) -> metadata_pb2.TopicDescription:
        topic = self._image.topic_by_id(TopicId(topic_id))
        if topic is not None:
            return describe_topic(topic)
        error = UnknownTopicIdError(f"no topic has the id {format_topic_id(topic_id)}")
        return metadata_pb2.TopicDescription(topic_id=topic_id, error=error.to_proto())

    async def _coordinator(
        self, request: metadata_pb2.FindCoordinatorRequest
    ) -> common_pb2.CurrentLeader:
        name, key = _keeper(request)
        topic = self._image.topic(name) or await self._ensure_topic(name)
        number = partition_for_group(key, len(topic.partitions))
        record = topic.partitions.get(number)
        broker = None if record is None else self._image.brokers.get(record.leader)
        if record is None or broker is None:
            raise CoordinatorNotAvailableError(
                f"{request.key!r}: {name}-{number} has no leader now; try again"
            )
        return common_pb2.CurrentLeader(
            node_id=record.leader,
            leader_epoch=record.leader_epoch,
            host=broker.host,
            port=broker.port,
        )

    def _everything(self, watcher: Watcher) -> metadata_pb2.WatchResponse:
        names = watcher.topics or {
            topic.name for topic in self._image.topics() if not topic.record.internal
        }
        return self._told(frozenset(names), brokers=True, everything=True)

    def _told(
        self, names: frozenset[str], brokers: bool, *, everything: bool = False
    ) -> metadata_pb2.WatchResponse:
        ordered = sorted(names)

        def make() -> metadata_pb2.WatchResponse:
            return metadata_pb2.WatchResponse(
                metadata_index=self._image.index,
                topics=[self._describe_name(name) for name in ordered],
                brokers=self._brokers() if brokers else [],
                everything=everything,
            )

        asked = metadata_pb2.WatchRequest(topics=ordered).SerializeToString(deterministic=True)
        question = bytes((brokers, everything)) + asked
        return self.answers.answer(metadata_pb2.WatchResponse, question, make)

    def _touched_by(self, change: ImageChange) -> Touched:
        ids = {TopicId(record.topic_id) for record in change.partitions} | set(change.topics)
        present = (self._image.topic_by_id(topic_id) for topic_id in ids)
        topics = [*change.removed_topics, *(topic for topic in present if topic is not None)]
        return Touched(
            change.index,
            frozenset(topic.name for topic in topics if not topic.record.internal),
            frozenset(topic.name for topic in topics if topic.record.internal),
            bool(change.brokers),
        )


def _keeper(request: metadata_pb2.FindCoordinatorRequest) -> tuple[str, str]:
    """The topic that keeps what is asked about, and the key that says in which partition."""
    match request.type:
        case metadata_pb2.COORDINATOR_TYPE_GROUP:
            if not request.key:
                raise InvalidGroupIdError("a group id must not be empty")
            return OFFSETS_TOPIC, request.key
        case metadata_pb2.COORDINATOR_TYPE_TRANSACTION:
            if not request.key:
                raise InvalidTransactionalIdError("a transactional id must not be empty")
            return TRANSACTIONS_TOPIC, coordinating_key(request.key)
        case _:
            raise InvalidRequestError(
                "groups and transactional ids have coordinators; send COORDINATOR_TYPE_GROUP or "
                "COORDINATOR_TYPE_TRANSACTION"
            )
