"""A cluster of brokers inside the test's process, which can be told to misbehave.

The nodes share one picture of the cluster and one log a partition, so that a move of leadership
needs no replication. Produce keeps the broker's idempotence rules: the last five batches of a
producer, no gaps, epochs that only rise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    groups_pb2,
    groups_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    transactions_pb2_grpc,
)
from penstock.wire.errors import (
    DuplicateSequenceError,
    InvalidProducerEpochError,
    LeaderHint,
    NotLeaderError,
    OutOfOrderSequenceError,
    PenstockError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import Record, decode_batch, offset_patch, verify_producer_batch
from penstock.wire.transport import SERVER_OPTIONS
from tests.unit.client.fake_services import FakeServices
from tests.unit.client.fake_transactions import FakeTransactions

KEPT_BATCHES = 5


@dataclass
class FakePartition:
    leader: int
    leader_epoch: int = 0
    batches: list[tuple[int, int, bytes]] = field(default_factory=list)  # Base, next, bytes.
    start: int = 0
    end: int = 0
    open_at: int | None = None  # Where a transaction begins that is open: nothing is stable behind.
    # Producer id: its epoch and its last batches as (first sequence, last, offset).
    producers: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(default_factory=dict)

    def append(self, data: bytes) -> int:
        header = verify_producer_batch(data)
        if header.producer_id >= 0:
            known = self._known(header)
            if known is not None:
                return known
        base = self.end
        stored = offset_patch(data, base, self.leader_epoch) + data[16:]
        self.end = base + header.record_count
        self.batches.append((base, self.end, stored))
        if header.producer_id >= 0:
            epoch, last = self.producers.get(header.producer_id, (header.producer_epoch, []))
            if epoch != header.producer_epoch:
                last = []
            last = [*last, (header.base_sequence, header.last_sequence, base)][-KEPT_BATCHES:]
            self.producers[header.producer_id] = (header.producer_epoch, last)
        return base

    def _known(self, header: Any) -> int | None:
        epoch, last = self.producers.get(header.producer_id, (-1, []))
        if header.producer_epoch < epoch:
            raise InvalidProducerEpochError(f"epoch {header.producer_epoch} after {epoch}")
        for first, end, base in last if header.producer_epoch == epoch else ():
            if (first, end) == (header.base_sequence, header.last_sequence):
                return base
        expected = (last[-1][1] + 1) % 2**31 if last and header.producer_epoch == epoch else 0
        if header.base_sequence == expected:
            return None
        if last and header.producer_epoch == epoch and header.base_sequence < last[0][0]:
            raise DuplicateSequenceError("older than the last five")
        raise OutOfOrderSequenceError(f"sequence {header.base_sequence}, expected {expected}")

    def records(self) -> list[Record]:
        return [record for _, _, data in self.batches for record in decode_batch(data)]


@dataclass
class FakeTopic:
    name: str
    topic_id: bytes
    partitions: list[FakePartition]
    configs: dict[str, str] = field(default_factory=dict)


@dataclass
class FakeMember:
    member_id: str
    topics: tuple[str, ...]
    pattern: str
    epoch: int = 0
    owned: set[TopicPartition] = field(default_factory=set)
    told: set[TopicPartition] | None = None
    outbox: asyncio.Queue[groups_pb2.GroupHeartbeatResponse | None] = field(
        default_factory=asyncio.Queue
    )
    instance: str = ""


@dataclass
class FakeGroup:
    epoch: int = 0
    members: dict[str, FakeMember] = field(default_factory=dict)
    offsets: dict[TopicPartition, groups_pb2.OffsetCommit] = field(default_factory=dict)
    commits: list[dict[TopicPartition, int]] = field(default_factory=list)


ProduceHook = Callable[["FakeNode", log_pb2.ProduceRequest], Awaitable[Any]]


async def nobody_asks(node: FakeNode, request: Any) -> Any:
    raise AssertionError("no test said what leaders know of transactions")


class FakeCluster:
    """``node_count`` brokers, numbered from 1, on free ports of 127.0.0.1."""

    def __init__(self, node_count: int = 3) -> None:
        self.nodes = {number: FakeNode(self, number) for number in range(1, node_count + 1)}
        self.topics: dict[str, FakeTopic] = {}
        self.groups: dict[str, FakeGroup] = defaultdict(FakeGroup)
        self.coordinator = 1
        self.next_producer_id = 1000
        self.next_topic = 1
        self.index = 1
        self.heartbeat_interval_ms = 100
        # Tests replace these to make brokers misbehave.
        self.on_produce: ProduceHook | None = None
        self.no_producer_ids: PenstockError | None = None  # Why none are given.
        self.on_fetch: Callable[[FakeNode, log_pb2.FetchRequest], Awaitable[Any]] | None = None
        self.on_leader_asked: Callable[[FakeNode, Any], Awaitable[Any]] = nobody_asks
        self.on_describe: Callable[[FakeNode], Awaitable[Any]] | None = None
        self.on_heartbeat: (
            Callable[[groups_pb2.GroupHeartbeatRequest], PenstockError | None] | None
        ) = None
        self.on_commit: Callable[[groups_pb2.CommitOffsetsRequest], PenstockError | None] | None
        self.on_commit = None
        self.on_find_coordinator: (
            Callable[[metadata_pb2.FindCoordinatorRequest], PenstockError | None] | None
        ) = None
        self.on_fetch_offsets: (
            Callable[[groups_pb2.FetchOffsetsRequest], PenstockError | None] | None
        ) = None
        self.on_alter_quorum: (
            Callable[[admin_pb2.AlterQuorumRequest], Awaitable[PenstockError | None]] | None
        ) = None
        self.produced: list[tuple[int, log_pb2.ProduceRequest]] = []
        self.voters = {number: ("127.0.0.1", 9000 + number) for number in self.nodes}
        self.silent_controllers: set[int] = set()
        self.asked_controllers: list[int] = []
        self.knows_controllers = True  # That DescribeNode may name one.
        self.altered: list[admin_pb2.AlterQuorumRequest] = []
        self.asked_ids: list[bytes] = []  # Of topics to make, request by request.
        self.unregistered: list[int] = []
        self.drained: list[tuple[int, bool]] = []
        self.lost_answers = 0  # So many changes take effect and are not answered.
        self.lost_as = grpc.StatusCode.UNAVAILABLE
        self.appended = asyncio.Condition()
        self.transactions = FakeTransactions(self)

    async def start(self) -> FakeCluster:
        for node in self.nodes.values():
            await node.start()
        return self

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()

    async def __aenter__(self) -> FakeCluster:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes.values())

    def add_topic(self, name: str, partitions: int = 1, leader: int | None = None) -> FakeTopic:
        numbers = sorted(self.nodes)
        topic = FakeTopic(
            name,
            self.next_topic.to_bytes(16, "big"),
            [
                FakePartition(leader or numbers[number % len(numbers)])
                for number in range(partitions)
            ],
        )
        self.next_topic += 1
        self.topics[name] = topic
        self.index += 1
        self.rebalance_all()
        return topic

    def add_partitions(self, name: str, total: int) -> None:
        partitions = self.topics[name].partitions
        partitions += [FakePartition(min(self.nodes)) for _ in range(total - len(partitions))]

    def delete_topic(self, name: str) -> None:
        del self.topics[name]
        self.index += 1
        self.rebalance_all()

    def partition(self, name: str, number: int = 0) -> FakePartition:
        return self.topics[name].partitions[number]

    def move(self, name: str, number: int, leader: int) -> None:
        partition = self.partition(name, number)
        partition.leader = leader
        partition.leader_epoch += 1
        self.index += 1

    def values(self, name: str, number: int = 0) -> list[bytes | None]:
        return [record.value for record in self.partition(name, number).records()]

    def put(self, name: str, number: int, data: bytes) -> int:
        """Append a batch as if some producer had sent it."""
        return self.partition(name, number).append(data)

    async def wake(self) -> None:
        async with self.appended:
            self.appended.notify_all()

    def find(self, proto: common_pb2.TopicPartition, node: FakeNode) -> FakePartition:
        topic = self.topics.get(proto.topic)
        if topic is None or proto.partition >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"there is no {proto.topic}-{proto.partition}")
        if proto.topic_id and proto.topic_id != topic.topic_id:
            raise UnknownTopicIdError("another topic of this name")
        partition = topic.partitions[proto.partition]
        if partition.leader != node.number:
            raise NotLeaderError("it leads elsewhere", leader=node.hint_for(partition))
        return partition

    # --- groups: one coordinator; range over sorted members, revoke before assign --------------

    def target(self, group: FakeGroup, member: FakeMember) -> set[TopicPartition]:
        wanted: set[TopicPartition] = set()
        for topic in self.topics.values():
            members = sorted(m.member_id for m in group.members.values() if topic.name in m.topics)
            if member.member_id not in members:
                continue
            place = members.index(member.member_id)
            wanted |= {
                TopicPartition(topic.name, number)
                for number in range(len(topic.partitions))
                if number % len(members) == place
            }
        return wanted

    def new_member(self, member_id: str) -> FakeMember:
        return FakeMember(member_id, (), "")

    def rebalance_all(self) -> None:
        for group in self.groups.values():
            self.rebalance(group)

    def rebalance(self, group: FakeGroup) -> None:
        for member in group.members.values():
            target = self.target(group, member)
            others = {
                partition
                for other in group.members.values()
                if other is not member
                for partition in other.owned | (other.told or set())
            }
            allowed = target - others
            if allowed != member.told:
                member.told = allowed
                group.epoch += 1
                member.epoch = group.epoch
                member.outbox.put_nowait(self.response(member, tell=True))

    def response(
        self, member: FakeMember, *, tell: bool = False
    ) -> groups_pb2.GroupHeartbeatResponse:
        response = groups_pb2.GroupHeartbeatResponse(
            member_id=member.member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
        )
        if tell:
            response.assignment.SetInParent()
            by_topic: dict[str, list[int]] = defaultdict(list)
            for partition in sorted(member.told or ()):
                by_topic[partition.topic].append(partition.partition)
            for name, numbers in by_topic.items():
                response.assignment.partitions.add(
                    topic=name, topic_id=self.topics[name].topic_id, partitions=numbers
                )
        return response


class FakeNode:
    """One broker. ``stop`` breaks its connections as a dying process would."""

    def __init__(self, cluster: FakeCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.port = 0
        self.server: grpc.aio.Server | None = None
        self.lag_entries = 0  # So much less of the metadata it knows than the others.

    async def start(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        services = FakeServices(self)
        log_pb2_grpc.add_LogServicer_to_server(services, self.server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(services, self.server)
        groups_pb2_grpc.add_GroupsServicer_to_server(services, self.server)
        transactions_pb2_grpc.add_TransactionsServicer_to_server(services, self.server)
        admin_pb2_grpc.add_AdminServicer_to_server(services, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)

    def hint_for(self, partition: FakePartition) -> LeaderHint:
        port = self.cluster.nodes[partition.leader].port
        return LeaderHint(partition.leader, partition.leader_epoch, "127.0.0.1", port)
