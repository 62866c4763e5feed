"""A coordinator over replicas in memory, whose appends a test can hold up or fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.broker.coordinator.coordinator import GroupCoordinator
from penstock.broker.coordinator.ports import LeadershipListener
from penstock.broker.coordinator.streams import MemberStream
from penstock.broker.core.group_events import GroupSettings
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import AppendInfo
from penstock.broker.core.producer_stage import ProducerStage, staged_markers
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.transactions import Marker
from penstock.broker.replication.appending import Target
from penstock.broker.replication.led_transactions import MarkListener
from penstock.v1 import cluster_pb2, common_pb2, groups_pb2
from penstock.wire.errors import (
    NotLeaderError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
)
from penstock.wire.markers import mark_of
from penstock.wire.records import Record, decode_batch, iter_batches, offset_patch, parse_header

OFFSETS = "__consumer_offsets"
PARTITIONS = 4
DEADLINE_S = 5.0


@dataclass
class FakePartition:
    """A log that outlives leaderships. ``high_watermark`` moves by itself unless held."""

    data: bytes = b""
    end: int = 0
    high_watermark: int = 0
    leader_epoch: int | None = None
    producers: ProducerState = field(default_factory=ProducerState)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # How many wait for the high watermark.

    def records(self) -> list[Record]:
        return [r for _, batch in iter_batches(self.data) for r in decode_batch(batch)]

    def cut(self, end: int) -> None:
        kept = [bytes(b) for header, b in iter_batches(self.data) if header.next_offset <= end]
        self.data, self.end = b"".join(kept), end

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class FakeReplicas:
    """The replica manager's part that coordinators use."""

    def __init__(self, topic: str = OFFSETS) -> None:
        self.topic = topic
        self.partitions = {number: FakePartition() for number in range(PARTITIONS)}
        self.listeners: list[LeadershipListener] = []
        self.mark_listeners: list[MarkListener] = []
        self.verified: list[tuple[str, int, int]] = []  # Whose transactions were asked for.
        self.coordinator_answers = asyncio.Event()
        self.coordinator_answers.set()
        self.refuse_transactions_with: PenstockError | None = None
        self.hold_commits = False
        self.refuse_with: PenstockError | None = None  # Raised before anything is appended.
        self.fail_with: PenstockError | None = None  # Raised after the append.
        self.max_batch_bytes = 1 << 23
        self.fenced: PenstockError | None = None  # The broker may not serve.
        self.break_reads_with: list[Exception] = []  # One for each read to come.
        self.append_count = 0
        self.watermark_count = 0  # How often the high watermark was asked for.
        self.refusal_count = 0
        self.read_bytes = 1 << 20

    def add_mark_listener(self, listener: MarkListener) -> None:
        self.mark_listeners.append(listener)

    async def verify_transaction(
        self,
        target: Target,
        transactional_id: str,
        producer: tuple[int, int],
        timeout_ms: int,
    ) -> None:
        log = self._leading(target.partition)
        assert (target.topic, target.topic_id) == (self.topic, topic_id_of(self.topic))
        assert target.current_leader_epoch == log.leader_epoch
        self.verified.append((transactional_id, *producer))
        await self.coordinator_answers.wait()
        if self.refuse_transactions_with is not None:
            raise self.refuse_transactions_with

    def mark(self, partition: int, *markers: Marker) -> None:
        """A leader's marks: in the log, and committed unless that is held."""
        log = self._leading(partition)
        batches = staged_markers(
            ProducerStage(log.producers),
            markers,
            base_offset=log.end,
            leader_epoch=log.leader_epoch or 0,
            now_ms=0,
            seen_ms=0,
        )
        for header, data in batches:
            log.producers.record(header, log.end, 0, mark_of(header, data))
            log.data += data
            log.end = header.next_offset
        for listener in self.mark_listeners:
            listener(self.topic, partition, log.leader_epoch or 0, markers, log.end)
        if not self.hold_commits:
            log.high_watermark = log.end
            log.wake()

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        self.listeners.append(listener)

    def lead(self, partition: int, leader_epoch: int) -> None:
        self.resign(partition)
        self.partitions[partition].leader_epoch = leader_epoch
        for listener in self.listeners:
            listener(self.topic, partition, leader_epoch, True)

    def resign(self, partition: int) -> None:
        log = self.partitions[partition]
        before, log.leader_epoch = log.leader_epoch, None
        log.wake()
        if before is not None:
            for listener in self.listeners:
                listener(self.topic, partition, before, False)

    def commit(self) -> None:
        for log in self.partitions.values():
            log.high_watermark = log.end
            log.wake()

    def _leading(self, partition: int) -> FakePartition:
        if self.fenced is not None:
            raise self.fenced
        log = self.partitions[partition]
        if log.leader_epoch is None:
            raise NotLeaderError(f"not the leader of {partition}")
        return log

    def leader_epoch_of(self, topic: str, partition: int) -> int | None:
        assert topic == self.topic
        return self.partitions[partition].leader_epoch

    def high_watermark(self, topic: str, partition: int) -> int:
        self.watermark_count += 1
        return self._leading(partition).high_watermark

    def log_start_offset(self, topic: str, partition: int) -> int:
        return 0

    def log_end_offset(self, topic: str, partition: int) -> int:
        return self._leading(partition).end

    def read_log(
        self, topic: str, partition: int, offset: int, max_bytes: int, *, to_end: bool
    ) -> bytes:
        assert to_end
        if self.break_reads_with:
            raise self.break_reads_with.pop()
        log = self._leading(partition)
        parts: list[bytes] = []
        for header, batch in iter_batches(log.data):
            if header.next_offset <= offset:
                continue
            if parts and sum(map(len, parts)) + len(batch) > min(max_bytes, self.read_bytes):
                break
            parts.append(bytes(batch))
        return b"".join(parts)

    async def wait_high_watermark(self, topic: str, partition: int, offset: int) -> None:
        log = self.partitions[partition]
        while self._leading(partition).high_watermark < offset:
            log.waiting += 1
            try:
                await log.news.wait()
            finally:
                log.waiting -= 1

    async def append(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        records: bytes,
        *,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        current_leader_epoch: int = -1,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        assert acks == common_pb2.ACKS_ALL
        assert topic_id == topic_id_of(self.topic)
        log = self._leading(partition)
        assert current_leader_epoch == log.leader_epoch
        if self.refuse_with is not None:
            self.refusal_count += 1
            raise self.refuse_with
        stage = ProducerStage(log.producers)
        for header, batch in iter_batches(records):
            if len(batch) > self.max_batch_bytes:
                raise RecordTooLargeError(f"a batch of {len(batch)} bytes")
            if header.producer_id >= 0:
                stage.check(header)
                stage.check_transaction(header, verified)
        self.append_count += 1
        base = log.end
        for header, batch in iter_batches(records):
            log.producers.record(header, log.end, 0)
            whole = offset_patch(bytes(batch), log.end, current_leader_epoch) + bytes(batch)[16:]
            log.data += whole
            log.end = parse_header(whole).next_offset
        if self.fail_with is not None:
            raise self.fail_with
        if not self.hold_commits:
            log.high_watermark = log.end
            await asyncio.sleep(0)
        end = log.end
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self.wait_high_watermark(topic, partition, end)
        except TimeoutError:
            raise RequestTimedOutError("not committed in time") from None
        return AppendInfo(base, end - 1, 0, len(records))


def topic_id_of(name: str) -> bytes:
    return name.encode().ljust(16, b".")[:16]


class World:
    """An image, replicas, and a coordinator that leads every partition of the offsets topic."""

    def __init__(
        self, *, settings: GroupSettings | None = None, offsets_topic: bool = True
    ) -> None:
        self.image = MetadataImage()
        self.replicas = FakeReplicas()
        self.ensured = 0
        self.clock_ahead_ms = 0  # Raise it, and the coordinator's process has stood still.
        self.wall_clock_ahead_ms = 0
        self.coordinator = GroupCoordinator(
            self.replicas,
            self.image,
            ensure_offsets_topic=self._ensure,
            settings=settings or GroupSettings(assignment_interval_ms=0),
            clock_ms=lambda: time.monotonic_ns() // 1_000_000 + self.clock_ahead_ms,
            wall_clock_ms=lambda: time.time_ns() // 1_000_000 + self.wall_clock_ahead_ms,
        )
        self._index = 0
        self.leader_of_offsets = 1
        for node in (1, 2):
            self.change(brokers=[cluster_pb2.BrokerRecord(node_id=node, host=f"n{node}", port=9)])
        if offsets_topic:
            self._make_offsets_topic()
        self.make_topic("orders", 4)

    def change(self, **parts: Any) -> None:
        self._index += 1
        delta = cluster_pb2.MetadataDelta(index=self._index, cluster_id="c", **parts)
        change = self.image.apply(delta)
        assert change is not None
        self.coordinator.on_metadata(change)

    def make_topic(self, name: str, count: int, *, internal: bool = False, leader: int = 1) -> None:
        self.change(
            topics=[
                cluster_pb2.TopicRecord(topic_id=topic_id_of(name), name=name, internal=internal)
            ],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id_of(name), partition=n, leader=leader, replicas=[1, 2]
                )
                for n in range(count)
            ],
        )

    def delete_topic(self, name: str) -> None:
        self.change(removed_topics=[topic_id_of(name)])

    def _make_offsets_topic(self) -> None:
        self.make_topic(OFFSETS, PARTITIONS, internal=True)
        for number in range(PARTITIONS):
            self.replicas.lead(number, 1)

    async def _ensure(self) -> None:
        self.ensured += 1
        await asyncio.sleep(0)
        if self.image.topic(OFFSETS) is None:
            self._make_offsets_topic()

    def move_away(self, group: str) -> None:
        """Another broker becomes the leader of the group's partition."""
        number = partition_for_group(group, PARTITIONS)
        self.change(
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id_of(OFFSETS), partition=number, leader=2, leader_epoch=2
                )
            ]
        )
        self.replicas.resign(number)

    def log_of(self, group: str) -> FakePartition:
        return self.replicas.partitions[partition_for_group(group, PARTITIONS)]

    async def loaded(self) -> None:
        for hosted in list(self.coordinator._hosted.values()):
            async with asyncio.timeout(DEADLINE_S):
                await hosted.wait_loaded()

    async def commit(self, group: str, offset: int, **fields: Any) -> Any:
        return await self.coordinator.commit_offsets(commit_request(group, offset, **fields))

    async def committed(self, group: str) -> dict[tuple[str, int], int]:
        request = groups_pb2.FetchOffsetsRequest(group_id=group)
        response = await self.coordinator.fetch_offsets(request)
        assert not response.HasField("error")
        return {(o.partition.topic, o.partition.partition): o.offset for o in response.offsets}


def commit_request(
    group: str,
    offset: int,
    *,
    partition: int = 0,
    member_id: str = "",
    epoch: int = -1,
    metadata: str = "",
) -> groups_pb2.CommitOffsetsRequest:
    return groups_pb2.CommitOffsetsRequest(
        group_id=group,
        member_id=member_id,
        member_epoch=epoch,
        offsets=[
            groups_pb2.OffsetCommit(
                partition=common_pb2.TopicPartition(topic="orders", partition=partition),
                offset=offset,
                metadata=metadata,
            )
        ],
    )


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    made = World(**options)
    try:
        await made.loaded()
        yield made
    finally:
        await made.coordinator.stop()


class FakeMember:
    """A member on a stream of its own."""

    def __init__(self, where: World, group: str, member_id: str) -> None:
        self._world = where
        self.group, self.member_id = group, member_id
        self.stream = where.coordinator.open_stream("10.0.0.1")

    async def send(self, epoch: int, **fields: Any) -> None:
        request = groups_pb2.GroupHeartbeatRequest(
            group_id=self.group, member_id=self.member_id, member_epoch=epoch, **fields
        )
        await self._world.coordinator.heartbeat(self.stream, request)

    async def join(self, **fields: Any) -> None:
        await self.send(0, subscription=groups_pb2.Subscription(topics=["orders"]), **fields)

    async def next(self) -> groups_pb2.GroupHeartbeatResponse:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.stream.next()
        assert response is not None
        return response

    async def over(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            return await self.stream.next() is None

    @property
    def has_news(self) -> bool:
        return bool(self.stream._queue)

    def reconnect(self) -> None:
        self._world.coordinator.close_stream(self.stream)
        self.stream: MemberStream = self._world.coordinator.open_stream("10.0.0.1")
