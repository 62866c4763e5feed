"""The Controller service: what brokers ask of the controllers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog

from penstock.raft_meta.active import ControllerShell, HeartbeatStream
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.raft_meta.quorum import Quorum
from penstock.raft_meta.quorum_service import QuorumServicer
from penstock.raft_meta.reports import NodeReports
from penstock.v1 import cluster_pb2, controller_pb2, controller_pb2_grpc
from penstock.wire.errors import (
    InconsistentClusterIdError,
    InvalidRequestError,
    MetadataDivergedError,
    PenstockError,
)

log = structlog.get_logger()

ADMIN_COMMANDS: Final = frozenset(
    {
        "create_topic",
        "delete_topic",
        "create_partitions",
        "alter_topic_configs",
        "elect_leaders",
        "alter_reassignments",
        "alter_cluster_configs",
        "raise_metadata_version",
        "unregister_broker",
        "drain_broker",
    }
)
"""What brokers may forward for an administrator. The rest is between broker and controller."""


class ControllerServicer(QuorumServicer, controller_pb2_grpc.ControllerServicer):
    """The service over the shell and the quorum. One event loop."""

    def __init__(
        self,
        config: ControllerConfig,
        shell: ControllerShell,
        quorum: Quorum,
        node: NodeReports,
    ) -> None:
        super().__init__(config, quorum, lambda: shell.feed.told_index)
        self._shell = shell
        self._node = node

    async def DescribeController(
        self, request: controller_pb2.DescribeControllerRequest, context: Any
    ) -> controller_pb2.DescribeControllerResponse:
        """How this controller's node is."""
        node = await self._node.describe()
        return controller_pb2.DescribeControllerResponse(node=node)

    async def ReadControllerMetrics(
        self, request: controller_pb2.ReadControllerMetricsRequest, context: Any
    ) -> controller_pb2.ReadControllerMetricsResponse:
        """The metrics of this controller's node."""
        metrics = await self._node.read_metrics()
        return controller_pb2.ReadControllerMetricsResponse(metrics=metrics)

    async def RegisterBroker(
        self, request: controller_pb2.RegisterBrokerRequest, context: Any
    ) -> controller_pb2.RegisterBrokerResponse:
        """Register a broker process."""
        conflict = self._shell.registration_conflict(request.registration)
        if conflict is not None:
            return controller_pb2.RegisterBrokerResponse(error=conflict.to_proto())
        command = cluster_pb2.Command(register_broker=request.registration)
        result = await self._execute(command, context)
        if result.HasField("error"):
            return controller_pb2.RegisterBrokerResponse(error=result.error)
        return controller_pb2.RegisterBrokerResponse(
            broker_epoch=result.register_broker.broker_epoch
        )

    async def Heartbeat(
        self,
        request_iterator: AsyncIterator[controller_pb2.BrokerHeartbeatRequest],
        context: Any,
    ) -> AsyncIterator[controller_pb2.BrokerHeartbeatResponse]:
        """Keep a broker unfenced for as long as it speaks."""
        stream = self._shell.open_stream()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            async for response in stream.responses():
                yield response
        finally:
            reader.cancel()
            self._shell.close_stream(stream)

    async def _read(
        self,
        requests: AsyncIterator[controller_pb2.BrokerHeartbeatRequest],
        stream: HeartbeatStream,
    ) -> None:
        # Why the stream broke does not matter: that it did is what the finally tells.
        try:
            with contextlib.suppress(Exception):
                async for request in requests:
                    self._shell.heartbeat(stream, request)
        finally:
            self._shell.close_stream(stream)
            stream.end()

    async def AlterPartition(
        self, request: controller_pb2.AlterPartitionRequest, context: Any
    ) -> controller_pb2.AlterPartitionResponse:
        """Change in-sync sets."""
        result = await self._execute(cluster_pb2.Command(alter_partition=request.change), context)
        if result.HasField("error"):
            return controller_pb2.AlterPartitionResponse(error=result.error)
        return controller_pb2.AlterPartitionResponse(result=result.alter_partition)

    async def ReportReplicas(
        self, request: controller_pb2.ReportReplicasRequest, context: Any
    ) -> controller_pb2.ReportReplicasResponse:
        """Take note of which replicas a broker can serve."""
        result = await self._execute(cluster_pb2.Command(report_replicas=request.report), context)
        if result.HasField("error"):
            return controller_pb2.ReportReplicasResponse(error=result.error)
        return controller_pb2.ReportReplicasResponse()

    async def AllocateProducerIds(
        self, request: controller_pb2.AllocateProducerIdsRequest, context: Any
    ) -> controller_pb2.AllocateProducerIdsResponse:
        """Hand out a block of producer ids."""
        command = cluster_pb2.Command(allocate_producer_ids=request.allocation)
        result = await self._execute(command, context)
        if result.HasField("error"):
            return controller_pb2.AllocateProducerIdsResponse(error=result.error)
        return controller_pb2.AllocateProducerIdsResponse(result=result.allocate_producer_ids)

    async def ExecuteAdmin(
        self, request: controller_pb2.ExecuteAdminRequest, context: Any
    ) -> controller_pb2.ExecuteAdminResponse:
        """Carry out an administrator's command."""
        command = request.command
        kind = command.WhichOneof("body")
        if kind not in ADMIN_COMMANDS:
            error = InvalidRequestError(
                f"{kind or 'an empty command'} is not an administrator's command; "
                f"these are: {', '.join(sorted(ADMIN_COMMANDS))}"
            )
            return controller_pb2.ExecuteAdminResponse(
                result=cluster_pb2.CommandResult(error=error.to_proto())
            )
        if kind == "create_topic" and not command.create_topic.topic_id:
            # Drawn here and not where the command is applied, which must be deterministic.
            command.create_topic.topic_id = uuid.uuid4().bytes
        if kind == "raise_metadata_version":
            command.raise_metadata_version.controller_supports = METADATA_VERSION
        result = await self._execute(command, context)
        # Seldom, and what people look for first when something changed: who asked is in the trace.
        refused = {"error": result.error.message} if result.HasField("error") else {}
        log.info("administrator's command", command=kind, index=result.index, **refused)
        # Whoever waits to see the effect of a command that changed nothing sees it already.
        result.index = min(result.index, self._shell.changed_index)
        return controller_pb2.ExecuteAdminResponse(result=result)

    async def _execute(
        self, command: cluster_pb2.Command, context: Any
    ) -> cluster_pb2.CommandResult:
        remaining_s = context.time_remaining()
        timeout_ms = self._config.propose_timeout_ms
        if remaining_s is not None:
            timeout_ms = max(min(timeout_ms, int(remaining_s * 1000)), 1)
        try:
            return await self._shell.execute(command, timeout_ms=timeout_ms)
        except PenstockError as error:
            return cluster_pb2.CommandResult(error=error.to_proto())

    async def WatchMetadata(
        self,
        request: controller_pb2.WatchMetadataRequest,
        context: Any,
    ) -> AsyncIterator[Any]:
        """Send a snapshot and then every committed change: WatchMetadataResponse, or Encoded."""
        if request.cluster_id != self._config.cluster_id:
            error = InconsistentClusterIdError(
                f"broker {request.node_id} is of cluster {request.cluster_id!r}, and this "
                f"controller of {self._config.cluster_id!r}: check controller.quorum.voters and "
                "the data directory"
            )
            yield controller_pb2.WatchMetadataResponse(error=error.to_proto())
            return
        # An empty directory has nothing to tell, and must not be taken for the metadata.
        await self._quorum.wait_voters()
        try:
            known_index, known_epoch = request.known_index, request.known_controller_epoch
            watcher = self._shell.feed.subscribe(known_index, known_epoch)
        except MetadataDivergedError as error:
            yield controller_pb2.WatchMetadataResponse(error=error.to_proto())
            return
        try:
            async for response in watcher.responses():
                yield response
        finally:
            self._shell.feed.unsubscribe(watcher)
