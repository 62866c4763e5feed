"""What a broker answers about reassignments, and how it forwards changes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.service.metadata import unknown_topic
from penstock.broker.topics import Controllers
from penstock.v1 import admin_pb2, cluster_pb2, common_pb2
from penstock.wire.errors import PenstockError, UnknownTopicOrPartitionError
from penstock.wire.ids import TopicIdPartition

DEFAULT_TIMEOUT_MS: Final = 30_000
CATCH_UP_MS: Final = 5_000
"""How long an answer waits for this broker to see the change that it reports."""

ReplicaEnds = Callable[[TopicIdPartition], Mapping[int, int] | None]
"""The log end offset by replica of a partition that this broker leads; None for any other."""


def locate(image: MetadataImage, named: common_pb2.TopicPartition) -> TopicIdPartition:
    """The partition's id. Raises UnknownTopicOrPartitionError that says what there is."""
    topic = image.topic(named.topic)
    if topic is None:
        raise unknown_topic(image, named.topic)
    if named.partition not in topic.partitions:
        raise UnknownTopicOrPartitionError(
            f"{named.topic} has no partition {named.partition}; it has {len(topic.partitions)}, "
            f"from 0 to {len(topic.partitions) - 1}; next: name one of these"
        )
    return TopicIdPartition(topic.topic_id, named.partition)


class Reassignments:
    """Part of the Admin service. One event loop."""

    def __init__(
        self, image: MetadataImage, controllers: Controllers, replica_ends: ReplicaEnds
    ) -> None:
        self._image = image
        self._controllers = controllers
        self._replica_ends = replica_ends

    async def alter(
        self, request: admin_pb2.AlterReassignmentsRequest
    ) -> admin_pb2.AlterReassignmentsResponse:
        """Forward the partitions that are known here; answer for each in the request's order."""
        answer = admin_pb2.AlterReassignmentsResponse()
        command = cluster_pb2.AlterReassignmentsCommand(validate_only=request.validate_only)
        forwarded: list[admin_pb2.ReassignmentResult] = []
        for wish in request.reassignments:
            result = answer.results.add(partition=wish.partition)
            try:
                key = locate(self._image, wish.partition)
            except PenstockError as error:
                result.error.CopyFrom(error.to_proto())
                continue
            command.partitions.add(
                topic_id=key.topic_id, partition=key.partition, replicas=wish.replicas
            )
            forwarded.append(result)
        if not forwarded:
            return answer
        try:
            outcome = await self._controllers.execute_admin(
                cluster_pb2.Command(alter_reassignments=command),
                request.timeout_ms or DEFAULT_TIMEOUT_MS,
            )
        except PenstockError as error:
            return admin_pb2.AlterReassignmentsResponse(error=error.to_proto())
        if outcome.HasField("error"):
            return admin_pb2.AlterReassignmentsResponse(error=outcome.error)
        await self._controllers.wait_for_index(outcome.index, CATCH_UP_MS)
        for result, entry in zip(forwarded, outcome.alter_reassignments.partitions, strict=True):
            if entry.HasField("error"):
                result.error.CopyFrom(entry.error)
        return answer

    def list(
        self, request: admin_pb2.ListReassignmentsRequest
    ) -> admin_pb2.ListReassignmentsResponse:
        """Every partition that moves, or of those named the ones that do, in their order."""
        answer = admin_pb2.ListReassignmentsResponse()
        try:
            wanted = [locate(self._image, named) for named in request.partitions]
        except PenstockError as error:
            return admin_pb2.ListReassignmentsResponse(error=error.to_proto())
        for key in wanted or self._moving():
            record = self._image.partition_by_id(key)
            named = self._image.named(key)
            if record is None or named is None or not record.target_replicas:
                continue
            answer.reassignments.add(
                partition=common_pb2.TopicPartition(
                    topic=named.topic, partition=named.partition, topic_id=key.topic_id
                ),
                replicas=record.target_replicas,
                adding_replicas=record.adding_replicas,
                removing_replicas=record.removing_replicas,
                leader=record.leader,
                progress=self._progress(key, record),
            )
        return answer

    def _moving(self) -> Iterator[TopicIdPartition]:
        for topic in sorted(self._image.topics(), key=lambda topic: topic.name):
            for number, record in sorted(topic.partitions.items()):
                if record.target_replicas:
                    yield TopicIdPartition(topic.topic_id, number)

    def _progress(
        self, key: TopicIdPartition, record: cluster_pb2.PartitionRecord
    ) -> Iterator[admin_pb2.ReplicaProgress]:
        ends = self._replica_ends(key) or {}
        leader_end = ends.get(record.leader, -1)
        for node_id in record.replicas:
            end = ends.get(node_id, -1)
            yield admin_pb2.ReplicaProgress(
                node_id=node_id,
                in_sync=node_id in record.isr,
                log_end_offset=end,
                lag=max(leader_end - end, 0) if end >= 0 else -1,
            )
