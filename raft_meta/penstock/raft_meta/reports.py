"""What a node tells of itself to whoever asks: the port to what finds it out."""

from __future__ import annotations

from typing import Protocol

from penstock.v1 import node_pb2
from penstock.wire.errors import UnsupportedVersionError


class NodeReports(Protocol):
    """What the node tells of itself; penstock.broker.node_facts.NodeFacts is the real one."""

    async def describe(self) -> node_pb2.DescribeNodeResponse:
        """Its software, clock, disks and process."""
        ...

    async def read_metrics(self) -> node_pb2.ReadMetricsResponse:
        """Its metrics, as text."""
        ...


class NothingTold:
    """For a controller that is alone in its process, without a node around it."""

    async def describe(self) -> node_pb2.DescribeNodeResponse:
        """A refusal."""
        return node_pb2.DescribeNodeResponse(error=self._refusal().to_proto())

    async def read_metrics(self) -> node_pb2.ReadMetricsResponse:
        """A refusal."""
        return node_pb2.ReadMetricsResponse(error=self._refusal().to_proto())

    def _refusal(self) -> UnsupportedVersionError:
        return UnsupportedVersionError(
            "this controller runs without a node, which could tell of itself; next: start it with "
            "`penstock node`"
        )
