"""The Admin service: tools ask any broker, which forwards changes to the active controller."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any, Final, Protocol

from penstock.broker.core.metadata_image import MetadataImage, replication_factor
from penstock.broker.service.cluster_admin import (
    ClusterAdmin,
    DescribeConfigs,
    VersionedControllers,
)
from penstock.broker.service.controller_facts import ControllerFacts
from penstock.broker.service.metadata import unknown_topic
from penstock.broker.service.reassignments import (
    CATCH_UP_MS,
    DEFAULT_TIMEOUT_MS,
    Reassignments,
    ReplicaEnds,
    locate,
)
from penstock.raft_meta.reports import NodeReports
from penstock.v1 import admin_pb2, cluster_pb2, common_pb2, controller_pb2, node_pb2
from penstock.v1.admin_pb2_grpc import AdminServicer as AdminServicerBase
from penstock.wire.errors import (
    AccessForbiddenError,
    ErrorCode,
    InvalidRequestError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.topic_config import TOPIC_CONFIGS, effective_min_isr

_TOPIC_ID_BYTES: Final = 16


class AdminControllers(VersionedControllers, Protocol):
    """What is asked of the active controller."""

    async def describe_quorum(self, timeout_ms: int) -> controller_pb2.DescribeQuorumResponse:
        """The active controller's view."""
        ...

    async def alter_voters(
        self, request: controller_pb2.AlterVotersRequest, timeout_ms: int
    ) -> controller_pb2.AlterVotersResponse:
        """Add or remove one voter."""
        ...


class AdminServicer(AdminServicerBase):
    """Forwards, and answers once this broker itself has seen the change."""

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        controllers: AdminControllers,
        replica_ends: ReplicaEnds,
        describe_configs: DescribeConfigs,
        *,
        node: NodeReports,
        ask_controllers: ControllerFacts,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._controllers = controllers
        self._reassignments = Reassignments(image, controllers, replica_ends)
        self._cluster = ClusterAdmin(image, controllers, describe_configs)
        self._node = node
        self._ask_controllers = ask_controllers

    async def CreateTopics(
        self, request: admin_pb2.CreateTopicsRequest, context: Any
    ) -> admin_pb2.CreateTopicsResponse:
        """Make topics side by side."""
        results = await asyncio.gather(
            *(self._create_topic(wish, request.timeout_ms) for wish in request.topics)
        )
        return admin_pb2.CreateTopicsResponse(results=results)

    async def DeleteTopics(
        self, request: admin_pb2.DeleteTopicsRequest, context: Any
    ) -> admin_pb2.DeleteTopicsResponse:
        """Delete topics side by side."""
        ids = list(request.topic_ids) or [b""] * len(request.names)
        if len(ids) != len(request.names):
            error = InvalidRequestError(
                f"{len(request.names)} topics are named with {len(ids)} ids; next: give each its "
                "own, or none"
            ).to_proto()
            refused = [admin_pb2.TopicResult(name=name, error=error) for name in request.names]
            return admin_pb2.DeleteTopicsResponse(results=refused)
        results = await asyncio.gather(
            *(
                self._delete_topic(name, topic_id, request.timeout_ms)
                for name, topic_id in zip(request.names, ids, strict=True)
            )
        )
        return admin_pb2.DeleteTopicsResponse(results=results)

    async def CreatePartitions(
        self, request: admin_pb2.CreatePartitionsRequest, context: Any
    ) -> admin_pb2.CreatePartitionsResponse:
        """Raise partition counts side by side."""
        results = await asyncio.gather(
            *(
                self._change(
                    wish.topic, cluster_pb2.Command(create_partitions=wish), request.timeout_ms
                )
                for wish in request.topics
            )
        )
        return admin_pb2.CreatePartitionsResponse(results=results)

    async def AlterConfigs(
        self, request: admin_pb2.AlterConfigsRequest, context: Any
    ) -> admin_pb2.AlterConfigsResponse:
        """Set and reset configs side by side."""
        results = await asyncio.gather(
            *(
                self._change(
                    wish.topic, cluster_pb2.Command(alter_topic_configs=wish), request.timeout_ms
                )
                for wish in request.topics
            )
        )
        return admin_pb2.AlterConfigsResponse(results=results)

    async def DescribeConfigs(
        self, request: admin_pb2.DescribeConfigsRequest, context: Any
    ) -> admin_pb2.DescribeConfigsResponse:
        """Every config in force, and whether the topic or the default says so."""
        return admin_pb2.DescribeConfigsResponse(
            topics=[self._configs_of(name) for name in request.topics]
        )

    async def ElectLeaders(
        self, request: admin_pb2.ElectLeadersRequest, context: Any
    ) -> admin_pb2.ElectLeadersResponse:
        """Elect leaders for the partitions named, or wherever the preferred one does not lead."""
        try:
            partitions = list(request.partitions) or list(self._not_preferred())
            return await self._elect(request, partitions)
        except PenstockError as error:
            return admin_pb2.ElectLeadersResponse(error=error.to_proto())

    async def DescribeQuorum(
        self, request: admin_pb2.AdminDescribeQuorumRequest, context: Any
    ) -> admin_pb2.AdminDescribeQuorumResponse:
        """The active controller's view of the quorum."""
        try:
            quorum = await self._controllers.describe_quorum(CATCH_UP_MS)
        except PenstockError as error:
            return admin_pb2.AdminDescribeQuorumResponse(error=error.to_proto())
        return admin_pb2.AdminDescribeQuorumResponse(quorum=quorum)

    async def UnregisterBroker(
        self, request: admin_pb2.UnregisterBrokerRequest, context: Any
    ) -> admin_pb2.UnregisterBrokerResponse:
        """Remove a fenced broker's registration."""
        wish = cluster_pb2.UnregisterBrokerCommand(node_id=request.node_id)
        name = f"broker {request.node_id}"
        command = cluster_pb2.Command(unregister_broker=wish)
        result = await self._change(name, command, request.timeout_ms)
        error = result.error if result.HasField("error") else None
        return admin_pb2.UnregisterBrokerResponse(error=error)

    async def AlterReassignments(
        self, request: admin_pb2.AlterReassignmentsRequest, context: Any
    ) -> admin_pb2.AlterReassignmentsResponse:
        """Begin, change and cancel reassignments."""
        return await self._reassignments.alter(request)

    async def ListReassignments(
        self, request: admin_pb2.ListReassignmentsRequest, context: Any
    ) -> admin_pb2.ListReassignmentsResponse:
        """List what moves, and how far the replicas of partitions led here are."""
        return self._reassignments.list(request)

    async def AlterQuorum(
        self, request: admin_pb2.AlterQuorumRequest, context: Any
    ) -> admin_pb2.AlterQuorumResponse:
        """Add or remove one voter."""
        wish = controller_pb2.AlterVotersRequest()
        match request.WhichOneof("change"):
            case "add":
                wish.add.CopyFrom(request.add)
            case "remove_node_id":
                wish.remove_node_id = request.remove_node_id
        try:
            answer = await self._controllers.alter_voters(
                wish, request.timeout_ms or DEFAULT_TIMEOUT_MS
            )
        except PenstockError as error:
            return admin_pb2.AlterQuorumResponse(error=error.to_proto())
        if answer.HasField("error"):
            return admin_pb2.AlterQuorumResponse(error=answer.error)
        return admin_pb2.AlterQuorumResponse(quorum=answer.quorum)

    async def RaiseMetadataVersion(
        self, request: admin_pb2.RaiseMetadataVersionRequest, context: Any
    ) -> admin_pb2.RaiseMetadataVersionResponse:
        """Raise the feature level, if all nodes support it."""
        return await self._cluster.raise_version(request)

    async def DescribeNodeConfigs(
        self, request: admin_pb2.DescribeNodeConfigsRequest, context: Any
    ) -> admin_pb2.DescribeNodeConfigsResponse:
        """Every setting of this node, and who says so."""
        return self._cluster.describe_configs(self._node_id)

    async def AlterClusterConfigs(
        self, request: admin_pb2.AlterClusterConfigsRequest, context: Any
    ) -> admin_pb2.AlterClusterConfigsResponse:
        """Set and reset settings that the whole cluster shares."""
        return await self._cluster.alter_configs(request)

    async def DrainBroker(
        self, request: admin_pb2.DrainBrokerRequest, context: Any
    ) -> admin_pb2.DrainBrokerResponse:
        """Hand a broker's leaderships over, or let it have them again."""
        return await self._cluster.drain_broker(request)

    async def DescribeNode(
        self, request: node_pb2.DescribeNodeRequest, context: Any
    ) -> node_pb2.DescribeNodeResponse:
        """How this node is, or a controller."""
        if not request.HasField("controller_id"):
            return await self._node.describe()
        try:
            return await self._ask_controllers.describe(request.controller_id)
        except PenstockError as error:
            return node_pb2.DescribeNodeResponse(error=error.to_proto())

    async def ReadMetrics(
        self, request: node_pb2.ReadMetricsRequest, context: Any
    ) -> node_pb2.ReadMetricsResponse:
        """The metrics of this node, or of a controller."""
        if not request.HasField("controller_id"):
            return await self._node.read_metrics()
        try:
            return await self._ask_controllers.read_metrics(request.controller_id)
        except PenstockError as error:
            return node_pb2.ReadMetricsResponse(error=error.to_proto())

    async def _create_topic(
        self, wish: cluster_pb2.CreateTopicCommand, timeout_ms: int
    ) -> admin_pb2.TopicResult:
        command = cluster_pb2.Command(create_topic=wish)
        # By its id a repeated command is known for the same topic: a client that draws it itself
        # may repeat its request, and what is drawn here covers a repeated forwarding alone.
        drawn = len(wish.topic_id) == _TOPIC_ID_BYTES and any(wish.topic_id)
        topic_id = wish.topic_id if drawn else uuid.uuid4().bytes
        command.create_topic.topic_id = topic_id
        command.create_topic.internal = False
        result = await self._change(wish.name, command, timeout_ms)
        if result.error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
            made = self._image.topic(wish.name)
            if made is not None and made.topic_id == topic_id:
                result.ClearField("error")
        return result

    async def _delete_topic(
        self, name: str, topic_id: bytes, timeout_ms: int
    ) -> admin_pb2.TopicResult:
        topic = self._image.topic(name)
        if topic_id and (topic is None or topic.topic_id != topic_id):
            # Deleted since, maybe by this very request before its answer was lost; or not known
            # here yet. The controllers know.
            return await self._delete_by_id(name, topic_id, timeout_ms)
        if topic is None:
            error: PenstockError = unknown_topic(self._image, name)
            return admin_pb2.TopicResult(name=name, error=error.to_proto())
        if topic.record.internal:
            error = AccessForbiddenError(
                f"{name} is the cluster's own topic: without it all committed offsets are lost; "
                "remove those of one group with AdminClient.delete_groups"
            )
            return admin_pb2.TopicResult(name=name, error=error.to_proto())
        deletion = cluster_pb2.DeleteTopicCommand(topic_id=topic.topic_id)
        return await self._change(name, cluster_pb2.Command(delete_topic=deletion), timeout_ms)

    async def _delete_by_id(
        self, name: str, topic_id: bytes, timeout_ms: int
    ) -> admin_pb2.TopicResult:
        deletion = cluster_pb2.DeleteTopicCommand(topic_id=topic_id, name=name)
        command = cluster_pb2.Command(delete_topic=deletion)
        answer = await self._change(name, command, timeout_ms)
        if answer.error.code == ErrorCode.UNKNOWN_TOPIC_ID:
            gone = UnknownTopicOrPartitionError(
                f"topic {name!r} is not there any more: it was deleted since its id was asked for"
            )
            answer.error.CopyFrom(gone.to_proto())
        return answer

    async def _change(
        self, name: str, command: cluster_pb2.Command, timeout_ms: int
    ) -> admin_pb2.TopicResult:
        answer = admin_pb2.TopicResult(name=name)
        try:
            result = await self._controllers.execute_admin(
                command, timeout_ms or DEFAULT_TIMEOUT_MS
            )
        except PenstockError as error:
            answer.error.CopyFrom(error.to_proto())
            return answer
        if result.HasField("error"):
            # Nothing changed, so no change of this index will ever arrive here. Only a topic that
            # is there, and not known here yet, is worth waiting for: our own first try made it.
            exists = result.error.code == ErrorCode.TOPIC_ALREADY_EXISTS
            if exists and self._image.topic(name) is None:
                await self._controllers.wait_for_index(result.index - 1, CATCH_UP_MS)
            answer.error.CopyFrom(result.error)
            return answer
        await self._controllers.wait_for_index(result.index, CATCH_UP_MS)
        if result.HasField("create_topic"):
            answer.topic_id = result.create_topic.topic_id
            answer.replica_assignments.extend(result.create_topic.replica_assignments)
        return answer

    def _configs_of(self, name: str) -> admin_pb2.TopicConfigs:
        topic = self._image.topic(name)
        if topic is None:
            return admin_pb2.TopicConfigs(
                topic=name, error=unknown_topic(self._image, name).to_proto()
            )
        configs = dict(topic.record.configs)
        replicas = min(replication_factor(record) for record in topic.partitions.values())
        in_force = {"min.insync.replicas": str(effective_min_isr(configs, replicas))}
        entries = [
            admin_pb2.ConfigEntry(
                key=key,
                value=configs.get(key, in_force.get(key, entry.default)),
                source="topic" if key in configs else "default",
                documentation=entry.documentation,
                dynamic=True,
            )
            for key, entry in TOPIC_CONFIGS.items()
        ]
        return admin_pb2.TopicConfigs(topic=name, entries=entries)

    def _not_preferred(self) -> Iterable[common_pb2.TopicPartition]:
        for topic in self._image.topics():
            for number, record in topic.partitions.items():
                if record.leader != record.replicas[0] and record.replicas[0] in record.isr:
                    yield common_pb2.TopicPartition(topic=topic.name, partition=number)

    async def _elect(
        self,
        request: admin_pb2.ElectLeadersRequest,
        partitions: list[common_pb2.TopicPartition],
    ) -> admin_pb2.ElectLeadersResponse:
        command = cluster_pb2.Command(
            elect_leaders=cluster_pb2.ElectLeadersCommand(
                type=request.type,
                partitions=[
                    cluster_pb2.ElectionPartition(topic_id=key.topic_id, partition=key.partition)
                    for key in (locate(self._image, partition) for partition in partitions)
                ],
            )
        )
        result = await self._controllers.execute_admin(
            command, request.timeout_ms or DEFAULT_TIMEOUT_MS
        )
        await self._controllers.wait_for_index(result.index, CATCH_UP_MS)
        answer = admin_pb2.ElectLeadersResponse()
        if result.HasField("error"):
            answer.error.CopyFrom(result.error)
        for partition, outcome in zip(partitions, result.elect_leaders.partitions, strict=False):
            elected = answer.results.add(partition=partition, leader=outcome.leader)
            if outcome.HasField("error"):
                elected.error.CopyFrom(outcome.error)
        return answer
