"""What tools ask about the cluster as a whole: shared settings, and its feature level."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.service.reassignments import CATCH_UP_MS, DEFAULT_TIMEOUT_MS
from penstock.broker.topics import Controllers
from penstock.raft_meta.core.versions import DRAINS_SINCE
from penstock.v1 import admin_pb2, cluster_pb2
from penstock.wire.errors import (
    InvalidRequestError,
    PenstockError,
    UnsupportedMetadataVersionError,
    error_from_proto,
)

DescribeConfigs = Callable[[], Iterable[admin_pb2.ConfigEntry]]
"""This node's settings in force."""


class VersionedControllers(Controllers, Protocol):
    """What is asked of the controllers."""

    async def supported_by_controllers(self, timeout_ms: int) -> int:
        """The newest metadata.version that every controller knows."""
        ...


class ClusterAdmin:
    """Part of the Admin service. One event loop."""

    def __init__(
        self,
        image: MetadataImage,
        controllers: VersionedControllers,
        describe_configs: DescribeConfigs,
    ) -> None:
        self._image = image
        self._controllers = controllers
        self._describe_configs = describe_configs

    def describe_configs(self, node_id: int) -> admin_pb2.DescribeNodeConfigsResponse:
        """Every setting of this node, and who says so."""
        return admin_pb2.DescribeNodeConfigsResponse(
            node_id=node_id, entries=self._describe_configs()
        )

    async def alter_configs(
        self, request: admin_pb2.AlterClusterConfigsRequest
    ) -> admin_pb2.AlterClusterConfigsResponse:
        """Forward a change of shared settings."""
        try:
            await self._execute(
                cluster_pb2.Command(alter_cluster_configs=request.change), request.timeout_ms
            )
        except PenstockError as error:
            return admin_pb2.AlterClusterConfigsResponse(error=error.to_proto())
        return admin_pb2.AlterClusterConfigsResponse()

    async def raise_version(
        self, request: admin_pb2.RaiseMetadataVersionRequest
    ) -> admin_pb2.RaiseMetadataVersionResponse:
        """Raise the feature level once every controller and broker supports it.

        The brokers are checked where the command is applied, too. A controller that is asked for
        more than it knows would have to end, so that all of them are asked before.
        """
        try:
            known = await self._controllers.supported_by_controllers(CATCH_UP_MS)
            wanted = request.metadata_version or self._newest(known)
            if wanted > known:
                raise UnsupportedMetadataVersionError(
                    f"not every controller knows metadata.version {wanted}; all know {known}: "
                    f"install a newer Penstock on each of them first"
                )
            command = cluster_pb2.RaiseMetadataVersionCommand(metadata_version=wanted)
            await self._execute(
                cluster_pb2.Command(raise_metadata_version=command), request.timeout_ms
            )
        except PenstockError as error:
            return admin_pb2.RaiseMetadataVersionResponse(error=error.to_proto())
        return admin_pb2.RaiseMetadataVersionResponse(metadata_version=wanted)

    async def drain_broker(
        self, request: admin_pb2.DrainBrokerRequest
    ) -> admin_pb2.DrainBrokerResponse:
        """Drain a broker, or take that back; the time is this broker's."""
        since_ms = 0 if request.undo else time.time_ns() // 1_000_000
        command = cluster_pb2.DrainBrokerCommand(node_id=request.node_id, since_ms=since_ms)
        try:
            result = await self._execute(
                cluster_pb2.Command(drain_broker=command), request.timeout_ms
            )
        except PenstockError as error:
            if isinstance(error, InvalidRequestError) and self._is_below(DRAINS_SINCE):
                # An active controller of older software does not even know the command.
                error = UnsupportedMetadataVersionError(
                    f"draining needs metadata.version {DRAINS_SINCE}, and the cluster works at "
                    f"{self._image.metadata_version}: install this Penstock on every node, and run "
                    "`penstock cluster upgrade`"
                )
            return admin_pb2.DrainBrokerResponse(error=error.to_proto())
        remaining = result.drain_broker.remaining_leaderships
        return admin_pb2.DrainBrokerResponse(remaining_leaderships=remaining)

    def _is_below(self, version: int) -> bool:
        return self._image.metadata_version < version

    def _newest(self, known: int) -> int:
        """What all support; at least what is in force."""
        supported = [max(record.max_metadata_version, 1) for record in self._image.brokers.values()]
        return max(min([known, *supported]), self._image.metadata_version)

    async def _execute(
        self, command: cluster_pb2.Command, timeout_ms: int
    ) -> cluster_pb2.CommandResult:
        """Carry the command out and wait until its effect can be seen here, or raise."""
        result = await self._controllers.execute_admin(command, timeout_ms or DEFAULT_TIMEOUT_MS)
        if result.HasField("error"):
            raise error_from_proto(result.error)
        await self._controllers.wait_for_index(result.index, CATCH_UP_MS)
        return result
