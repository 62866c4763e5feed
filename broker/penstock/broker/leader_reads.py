"""Reads batches from whoever leads a partition, for who mends a log with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import grpc
from grpc import aio

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.ports import ChannelFactory
from penstock.v1 import cluster_pb2, replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.errors import NetworkError, error_from_proto
from penstock.wire.ids import TopicIdPartition

_READ_BYTES: Final = 256 * 1024
_TIMEOUT_S: Final = 10.0


class _Address(NamedTuple):
    """Whom a channel leads to: a broker that registered anew may be another process."""

    node_id: int
    host: str
    port: int
    broker_epoch: int


class LeaderReads:
    """Asks the leaders of partitions for batches, over one channel as long as it is one leader.

    Used on one event loop, by one task at a time. ``close`` it when nothing more is read for a
    while: it may be used again after that.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        broker_epoch: Callable[[], int],
        channel_factory: ChannelFactory,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._broker_epoch = broker_epoch
        self._channel_factory = channel_factory
        self._channel: tuple[_Address, aio.Channel] | None = None

    async def read(self, key: TopicIdPartition, offset: int) -> bytes:
        """Whole batches from ``offset`` on, 256 KiB of them or one: as the leader has them.

        Raises NetworkError, or the leader's refusal: CorruptRecordError where its log is damaged
        there, OffsetOutOfRangeError where it has no such offset.
        """
        response = await self._ask(key, offset)
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return bytes(response.records)

    async def log_start(self, key: TopicIdPartition) -> int:
        """Where the leader's log begins. Raises NetworkError, or the leader's refusal."""
        response = await self._ask(key, 0)
        if response.HasField("log_start_offset"):
            return int(response.log_start_offset)
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return 0  # A leader of an earlier version: it has the offset that was asked for.

    async def _ask(self, key: TopicIdPartition, offset: int) -> replication_pb2.ReadBatchesResponse:
        record = self._image.partition_by_id(key)
        leader = None if record is None else self._image.brokers.get(record.leader)
        if record is None or leader is None:
            raise NetworkError("the partition has no leader to copy from now")
        request = self._request(key, record, offset)
        address = _Address(leader.node_id, leader.host, leader.port, leader.broker_epoch)
        try:
            stub: Any = ReplicationStub(await self._channel_to(address))
            response = await stub.ReadBatches(request, timeout=_TIMEOUT_S)
        except aio.AioRpcError as error:
            await self.close()  # The next attempt begins with what may be another port.
            code = error.code()
            name = code.name if isinstance(code, grpc.StatusCode) else str(code)
            raise NetworkError(f"broker {leader.node_id}: {name} {error.details()}") from error
        assert isinstance(response, replication_pb2.ReadBatchesResponse)
        return response

    def _request(
        self, key: TopicIdPartition, record: cluster_pb2.PartitionRecord, offset: int
    ) -> replication_pb2.ReadBatchesRequest:
        return replication_pb2.ReadBatchesRequest(
            hello=replication_pb2.FollowerHello(
                cluster_id=self._image.cluster_id,
                node_id=self._node_id,
                broker_epoch=self._broker_epoch(),
            ),
            partition=replication_pb2.ReplicaPartition(
                topic_id=key.topic_id, partition=key.partition
            ),
            leader_epoch=record.leader_epoch,
            offset=offset,
            max_bytes=_READ_BYTES,
        )

    async def _channel_to(self, address: _Address) -> aio.Channel:
        if self._channel is not None and self._channel[0] != address:
            await self.close()
        if self._channel is None:
            opened = await self._channel_factory(address.node_id, address.host, address.port)
            self._channel = address, opened
        return self._channel[1]

    async def close(self) -> None:
        """Give the channel back."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel[1].close(None)
