"""The Coordination service: what brokers ask each other about transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.admitting import check_cluster
from penstock.v1 import coordination_pb2
from penstock.v1.coordination_pb2_grpc import (
    CoordinationServicer as CoordinationServicerBase,
)
from penstock.wire.errors import PenstockError

AddPartitions = Callable[
    [coordination_pb2.AddPartitionsRequest], Awaitable[coordination_pb2.AddPartitionsResponse]
]
WriteMarkers = Callable[
    [coordination_pb2.WriteMarkersRequest], Awaitable[coordination_pb2.WriteMarkersResponse]
]
FindTransactions = Callable[
    [coordination_pb2.FindTransactionsRequest],
    Awaitable[coordination_pb2.FindTransactionsResponse],
]


class CoordinationServicer(CoordinationServicerBase):
    """Answers leaders and coordinators, each question or mark for itself.

    ``add_partitions`` and ``find_transactions`` are the coordinator of this broker, and may raise
    PenstockError;
    ``write_markers`` writes to what this broker leads.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        add_partitions: AddPartitions,
        write_markers: WriteMarkers,
        find_transactions: FindTransactions,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._add_partitions = add_partitions
        self._write_markers = write_markers
        self._find_transactions = find_transactions

    async def AddPartitions(
        self, request: coordination_pb2.AddPartitionsRequest, context: Any
    ) -> coordination_pb2.AddPartitionsResponse:
        """Take partitions into transactions."""
        try:
            check_cluster(self._node_id, self._image, request.cluster_id)
            return await self._add_partitions(request)
        except PenstockError as error:
            refusal = coordination_pb2.AddPartitionsResult(error=error.to_proto())
            return coordination_pb2.AddPartitionsResponse(results=[refusal] * len(request.entries))

    async def FindTransactions(
        self, request: coordination_pb2.FindTransactionsRequest, context: Any
    ) -> coordination_pb2.FindTransactionsResponse:
        """Say which transactions coordinators here will end."""
        try:
            check_cluster(self._node_id, self._image, request.cluster_id)
            return await self._find_transactions(request)
        except PenstockError as error:
            refusal = coordination_pb2.FoundTransactions(error=error.to_proto())
            results = [refusal] * len(request.coordinators)
            return coordination_pb2.FindTransactionsResponse(results=results)

    async def WriteMarkers(
        self, request: coordination_pb2.WriteMarkersRequest, context: Any
    ) -> coordination_pb2.WriteMarkersResponse:
        """End transactions in what is led here."""
        return await self._write_markers(request)
