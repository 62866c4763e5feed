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
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import (
    DuplicateSequenceError,
    FencedMemberEpochError,
    InvalidProducerEpochError,
    LeaderHint,
    NotCoordinatorError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    PenstockError,
    StaleMemberEpochError,
    TopicAlreadyExistsError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import Record, decode_batch, offset_patch, verify_producer_batch
from penstock.wire.topic_config import suggest
from penstock.wire.transport import SERVER_OPTIONS

KEPT_BATCHES = 5


@dataclass
class FakePartition:
    leader: int
    leader_epoch: int = 0
    batches: list[tuple[int, int, bytes]] = field(default_factory=list)  # Base, next, bytes.
    start: int = 0
    end: int = 0
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
        self.on_fetch: Callable[[FakeNode, log_pb2.FetchRequest], Awaitable[Any]] | None = None
        self.on_describe: Callable[[FakeNode], Awaitable[Any]] | None = None
        self.on_heartbeat: (
            Callable[[groups_pb2.GroupHeartbeatRequest], PenstockError | None] | None
        ) = None
        self.on_commit: Callable[[groups_pb2.CommitOffsetsRequest], PenstockError | None] | None
        self.on_commit = None
        self.produced: list[tuple[int, log_pb2.ProduceRequest]] = []
        self.appended = asyncio.Condition()

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

    async def start(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        services = _Services(self)
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


class _Services(
    log_pb2_grpc.LogServicer,
    metadata_pb2_grpc.MetadataServicer,
    groups_pb2_grpc.GroupsServicer,
    transactions_pb2_grpc.TransactionsServicer,
    admin_pb2_grpc.AdminServicer,
):
    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.cluster = node.cluster

    # --- metadata ---------------------------------------------------------------------------

    def _brokers(self) -> list[metadata_pb2.BrokerDescription]:
        return [
            metadata_pb2.BrokerDescription(
                node_id=node.number, host="127.0.0.1", port=node.port, fenced=node.server is None
            )
            for node in self.cluster.nodes.values()
        ]

    async def DescribeCluster(self, request: Any, context: Any) -> Any:
        return metadata_pb2.DescribeClusterResponse(
            cluster_id="fake",
            controller_id=1,
            controller_epoch=3,
            metadata_index=self.cluster.index,
            brokers=self._brokers(),
            answered_by=self.node.number,
        )

    async def DescribeTopics(self, request: Any, context: Any) -> Any:
        if self.cluster.on_describe is not None:
            await self.cluster.on_describe(self.node)
        names = sorted(self.cluster.topics) if request.all_topics else list(request.topics)
        return metadata_pb2.DescribeTopicsResponse(
            topics=[self._describe(name) for name in names],
            brokers=self._brokers(),
            metadata_index=self.cluster.index,
            cluster_id="fake",
        )

    def _describe(self, name: str) -> metadata_pb2.TopicDescription:
        topic = self.cluster.topics.get(name)
        if topic is None:
            known = suggest(name, list(self.cluster.topics))
            error = UnknownTopicOrPartitionError(f"there is no topic {name!r}{known}")
            return metadata_pb2.TopicDescription(name=name, error=error.to_proto())
        return metadata_pb2.TopicDescription(
            name=name,
            topic_id=topic.topic_id,
            configs=topic.configs,
            partitions=[
                metadata_pb2.PartitionDescription(
                    partition=number,
                    leader=partition.leader,
                    leader_epoch=partition.leader_epoch,
                    replicas=sorted(self.cluster.nodes),
                    isr=sorted(self.cluster.nodes),
                )
                for number, partition in enumerate(topic.partitions)
            ],
        )

    async def FindCoordinator(self, request: Any, context: Any) -> Any:
        node = self.cluster.nodes[self.cluster.coordinator]
        return metadata_pb2.FindCoordinatorResponse(
            coordinator=common_pb2.CurrentLeader(
                node_id=node.number, leader_epoch=1, host="127.0.0.1", port=node.port
            )
        )

    async def InitProducerId(self, request: Any, context: Any) -> Any:
        self.cluster.next_producer_id += 1
        return transactions_pb2.InitProducerIdResponse(
            producer_id=self.cluster.next_producer_id, producer_epoch=0
        )

    # --- the log ----------------------------------------------------------------------------

    async def Produce(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            self.cluster.produced.append((self.node.number, request))
            if self.cluster.on_produce is not None:
                told = await self.cluster.on_produce(self.node, request)
                if told == "drop":
                    continue
                if isinstance(told, log_pb2.ProduceResponse):
                    yield told
                    continue
                if told == "append-and-break":
                    self._produce(request)
                    return
                if told == "break":
                    return
            response = self._produce(request)
            await self.cluster.wake()
            if request.acks != common_pb2.ACKS_NONE:
                yield response

    def _produce(self, request: log_pb2.ProduceRequest) -> log_pb2.ProduceResponse:
        response = log_pb2.ProduceResponse(correlation_id=request.correlation_id)
        for entry in request.partitions:
            result = response.partitions.add(partition=entry.partition, log_append_time_ms=-1)
            try:
                partition = self.cluster.find(entry.partition, self.node)
                result.base_offset = partition.append(entry.records)
            except PenstockError as error:
                result.error.CopyFrom(error.to_proto())
        return response

    async def Fetch(self, request: Any, context: Any) -> Any:
        if self.cluster.on_fetch is not None:
            told = await self.cluster.on_fetch(self.node, request)
            if told is not None:
                return told
        deadline = asyncio.get_running_loop().time() + request.max_wait_ms / 1000
        while True:
            response, size = self._fetch(request)
            left = deadline - asyncio.get_running_loop().time()
            if size >= request.min_bytes or left <= 0:
                return response
            async with self.cluster.appended:
                try:
                    await asyncio.wait_for(self.cluster.appended.wait(), left)
                except TimeoutError:
                    return response

    def _fetch(self, request: Any) -> tuple[log_pb2.FetchResponse, int]:
        response = log_pb2.FetchResponse()
        size = 0
        for entry in request.partitions:
            result = response.partitions.add(partition=entry.partition)
            try:
                partition = self.cluster.find(entry.partition, self.node)
                if not partition.start <= entry.fetch_offset <= partition.end:
                    raise OffsetOutOfRangeError(
                        f"offset {entry.fetch_offset} is not in {partition.start} to "
                        f"{partition.end}"
                    )
            except PenstockError as error:
                result.error.CopyFrom(error.to_proto())
                size += request.min_bytes
                continue
            result.high_watermark = partition.end
            data = b""
            for _, following, batch in partition.batches:
                if following > entry.fetch_offset and (
                    not data or len(data) + len(batch) <= entry.partition_max_bytes
                ):
                    data += batch
            result.records = data
            size += len(data)
        return response, size

    async def ListOffsets(self, request: Any, context: Any) -> Any:
        response = log_pb2.ListOffsetsResponse()
        for entry in request.partitions:
            result = response.partitions.add(
                partition=entry.partition, offset=-1, timestamp_ms=-1, leader_epoch=-1
            )
            try:
                partition = self.cluster.find(entry.partition, self.node)
            except PenstockError as error:
                result.error.CopyFrom(error.to_proto())
                continue
            if entry.timestamp_ms == -1:
                result.offset = partition.end
            elif entry.timestamp_ms == -2:
                result.offset = partition.start
            else:
                for record in partition.records():
                    if record.timestamp_ms >= entry.timestamp_ms:
                        result.offset, result.timestamp_ms = record.offset, record.timestamp_ms
                        break
        return response

    async def DeleteRecords(self, request: Any, context: Any) -> Any:
        response = log_pb2.DeleteRecordsResponse()
        for entry in request.partitions:
            partition = self.cluster.find(entry.partition, self.node)
            end = partition.end if entry.before_offset < 0 else entry.before_offset
            partition.start = max(partition.start, end)
            response.partitions.add(partition=entry.partition, low_watermark=partition.start)
        return response

    # --- groups -----------------------------------------------------------------------------

    async def Heartbeat(self, request_iterator: Any, context: Any) -> Any:
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read_heartbeats(request_iterator, outbox))
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read_heartbeats(self, request_iterator: Any, outbox: Any) -> None:
        try:
            async for request in request_iterator:
                try:
                    self._heartbeat(request, outbox)
                except PenstockError as error:
                    outbox.put_nowait(groups_pb2.GroupHeartbeatResponse(error=error.to_proto()))
        finally:
            outbox.put_nowait(None)

    def _heartbeat(self, request: groups_pb2.GroupHeartbeatRequest, outbox: Any) -> None:
        if self.cluster.on_heartbeat is not None:
            error = self.cluster.on_heartbeat(request)
            if error is not None:
                raise error
        self._check_coordinator()
        group = self.cluster.groups[request.group_id]
        if request.member_epoch < 0:
            group.members.pop(request.member_id, None)
            self.cluster.rebalance(group)
            return
        member = group.members.get(request.member_id)
        if request.member_epoch == 0:
            if member is None or not request.owned.partitions:
                member = FakeMember(request.member_id, (), "")
                group.members[request.member_id] = member
                group.epoch += 1
                member.epoch = group.epoch
        elif member is None:
            raise UnknownMemberIdError(f"no member {request.member_id}")
        elif request.member_epoch > member.epoch:
            raise FencedMemberEpochError("never given out")
        assert member is not None
        member.outbox = outbox
        member.instance = request.group_instance_id
        if request.HasField("subscription"):
            member.topics = tuple(request.subscription.topics)
            member.pattern = request.subscription.topic_pattern
            if request.member_epoch > 0:
                outbox.put_nowait(self.cluster.response(member, tell=True))
        if request.HasField("owned"):
            member.owned = {
                TopicPartition(entry.topic, number)
                for entry in request.owned.partitions
                for number in entry.partitions
            }
        self.cluster.rebalance(group)
        outbox.put_nowait(self.cluster.response(member))

    def _check_coordinator(self) -> None:
        if self.cluster.coordinator != self.node.number:
            node = self.cluster.nodes[self.cluster.coordinator]
            hint = LeaderHint(node.number, 1, "127.0.0.1", node.port)
            raise NotCoordinatorError("elsewhere", leader=hint)

    async def CommitOffsets(self, request: Any, context: Any) -> Any:
        response = groups_pb2.CommitOffsetsResponse()
        try:
            self._check_coordinator()
            if self.cluster.on_commit is not None:
                error = self.cluster.on_commit(request)
                if error is not None:
                    raise error
            group = self.cluster.groups[request.group_id]
            member = group.members.get(request.member_id)
            if request.member_id:
                if member is None:
                    raise UnknownMemberIdError(f"no member {request.member_id}")
                for entry in request.offsets:
                    name = TopicPartition(entry.partition.topic, entry.partition.partition)
                    if name not in member.owned | (member.told or set()):
                        raise StaleMemberEpochError(f"{name} is not yours")
            elif group.members:
                raise UnknownMemberIdError("the group has members")
        except PenstockError as error:
            response.error.CopyFrom(error.to_proto())
            return response
        commit = {}
        for entry in request.offsets:
            name = TopicPartition(entry.partition.topic, entry.partition.partition)
            group.offsets[name] = entry
            commit[name] = entry.offset
            response.results.add(partition=entry.partition)
        group.commits.append(commit)
        return response

    async def FetchOffsets(self, request: Any, context: Any) -> Any:
        response = groups_pb2.FetchOffsetsResponse()
        try:
            self._check_coordinator()
        except PenstockError as error:
            response.error.CopyFrom(error.to_proto())
            return response
        group = self.cluster.groups[request.group_id]
        wanted = request.partitions or [entry.partition for entry in group.offsets.values()]
        for partition in wanted:
            name = TopicPartition(partition.topic, partition.partition)
            known = group.offsets.get(name)
            if known is not None:
                response.offsets.append(known)
            else:
                response.offsets.add(partition=partition, offset=-1)
        return response

    async def ListGroups(self, request: Any, context: Any) -> Any:
        response = groups_pb2.ListGroupsResponse()
        if self.cluster.coordinator == self.node.number:
            for name, group in self.cluster.groups.items():
                response.groups.add(
                    group_id=name,
                    state="stable" if group.members else "empty",
                    member_count=len(group.members),
                )
        return response

    # --- administration ---------------------------------------------------------------------

    async def CreateTopics(self, request: Any, context: Any) -> Any:
        response = admin_pb2.CreateTopicsResponse()
        for command in request.topics:
            result = response.results.add(name=command.name)
            if command.name in self.cluster.topics:
                error = TopicAlreadyExistsError(f"there is a topic {command.name!r}")
                result.error.CopyFrom(error.to_proto())
                continue
            topic = self.cluster.add_topic(command.name, command.partition_count)
            topic.configs.update(command.configs)
            result.topic_id = topic.topic_id
        return response

    async def DeleteTopics(self, request: Any, context: Any) -> Any:
        response = admin_pb2.DeleteTopicsResponse()
        for name in request.names:
            result = response.results.add(name=name)
            if self.cluster.topics.pop(name, None) is None:
                error = UnknownTopicOrPartitionError(f"there is no topic {name!r}")
                result.error.CopyFrom(error.to_proto())
        self.cluster.index += 1
        return response
