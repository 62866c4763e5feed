"""Some replica managers on loopback under controllers that are played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from grpc import aio

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import AppendInfo
from penstock.broker.core.verification import Question
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.frame_server import FrameServer
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.reporting import REPORTS_SINCE
from penstock.broker.replication.servicer import ReplicationServicer
from penstock.broker.shut_logs import ShutLogs
from penstock.broker.stand_ins import StandIns
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2, common_pb2, controller_pb2, log_pb2, replication_pb2
from penstock.v1.replication_pb2_grpc import add_ReplicationServicer_to_server
from penstock.wire.errors import (
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidUpdateVersionError,
    NetworkError,
    PenstockError,
)
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.laden import FETCH_RESPONSE
from penstock.wire.records import RecordData, encode_batch
from penstock.wire.topic_config import effective_min_isr
from penstock.wire.transport import SERVER_OPTIONS
from tests.support import eventually
from tests.unit.replication.memory_log import MemoryLog, MemoryLogs

CLUSTER_ID = "cluster"
TOPIC = "orders"
TOPIC_ID = TopicId(b"orders-id-16-by!")
KEY = TopicIdPartition(TOPIC_ID, 0)


def batch(*values: bytes, timestamp_ms: int = 0) -> bytes:
    return encode_batch([RecordData(timestamp_ms, None, value) for value in values])


class BrokerProcess:
    """One broker: what survives a restart is its logs."""

    def __init__(self, cluster: Brokers, node_id: int, logs: MemoryLogs, epoch: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.logs = logs
        self.broker_epoch = epoch
        self.may_serve = True
        self.image = MetadataImage()
        self.deaf = False
        self.stopped = False
        self.unheard: list[cluster_pb2.MetadataDelta] = []
        self.manager = ReplicaManager(
            node_id,
            logs,  # type: ignore[arg-type]
            self.image,
            alter_partition=cluster.alter_partition,
            report_replicas=cluster.report_replicas,
            broker_epoch=lambda: self.broker_epoch,
            may_serve=lambda: self.may_serve,
            open_stream=ReplicationConnector(NodeConnector(None)).open_stream,
            ask_coordinator=self._ask_coordinator,
            lag_max_ms=cluster.lag_max_ms,
        )
        self.asked: list[tuple[Question, Callable[[PenstockError | None], None]]] = []
        logs.on_durable = self.manager.on_durable  # type: ignore[assignment]
        self.counts = {"damaged": 0, "copied": 0}
        reads = partial(
            LeaderReads,
            node_id,
            self.image,
            lambda: self.broker_epoch,
            ReplicationConnector(NodeConnector(None)).open,
        )
        self.shut_logs = ShutLogs(
            StandIns(node_id, self.image, reads=reads),
            self.manager,
            logs.open.get,
            count_damaged=lambda: self._count("damaged"),
            count_mended=lambda: self._count("copied"),
        )
        self.manager.tell_of_shut_logs(self.shut_logs.found)
        self.server: Any = aio.server(options=SERVER_OPTIONS)
        authentication = PeerAuthentication("c", tls=False)
        self.refusals: list[str] = []
        self.served: list[str] = []
        self.located = replication_pb2.LocateResponse()
        servicer = ReplicationServicer(
            self.manager, authentication, self.located, lambda: self.served.append("grpc")
        )
        add_ReplicationServicer_to_server(servicer, self.server)
        self.frames = FrameServer(
            self.manager,
            authentication,
            lambda: None,
            self.manager.transactions.begin_markers,
            cluster_id=CLUSTER_ID,
            node_id=node_id,
            count_refused=self.refusals.append,
            count_served=lambda: self.served.append("frames"),
        )
        self.port = 0

    def _ask_coordinator(
        self, question: Question, on_answer: Callable[[PenstockError | None], None]
    ) -> None:
        """What it asks waits for the test to answer."""
        self.asked.append((question, on_answer))

    async def start(self) -> None:
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        if self.cluster.frames:
            self.located.frames_port = await self.frames.start("127.0.0.1", 0)
            self.located.marks_in_frames = True
        await self.server.start()
        await self.manager.start()

    def _count(self, what: str) -> None:
        self.counts[what] += 1

    async def stop(self) -> None:
        await self.shut_logs.stop()
        await self.manager.stop()
        await self.frames.stop()
        await self.server.stop(0)
        self.deaf = self.stopped = True

    def hear(self, delta: cluster_pb2.MetadataDelta) -> None:
        if self.deaf:
            self.unheard.append(delta)
            return
        change = self.image.apply(delta)
        if change is not None:
            for _ in self.manager.on_metadata(change):
                pass  # All of it at once.
            self.shut_logs.on_metadata()

    def listen(self) -> None:
        """Hear what was missed."""
        self.deaf = False
        unheard, self.unheard = self.unheard, []
        for delta in unheard:
            self.hear(delta)

    def log(self, partition: int = 0) -> MemoryLog:
        return self.logs.open[TopicIdPartition(TOPIC_ID, partition)]

    def partition(self, partition: int = 0) -> Partition:
        found = self.manager.hosted(TopicIdPartition(TOPIC_ID, partition))
        assert found is not None
        return found

    async def append(
        self,
        *values: bytes,
        acks: common_pb2.Acks.ValueType = common_pb2.ACKS_ALL,
        timeout_ms: int = 10_000,
        partition: int = 0,
        **options: Any,
    ) -> AppendInfo:
        return await self.manager.append(
            TOPIC, b"", partition, batch(*values), acks=acks, timeout_ms=timeout_ms, **options
        )

    async def fetch(self, offset: int, **options: Any) -> log_pb2.FetchPartitionResult:
        """Fetch of partition 0; ``wait_ms`` and ``min_bytes`` go to the request."""
        request = log_pb2.FetchRequest(
            max_wait_ms=options.pop("wait_ms", 10_000), min_bytes=options.pop("min_bytes", 1)
        )
        where = common_pb2.TopicPartition(topic=TOPIC, partition=options.pop("partition", 0))
        options.setdefault("current_leader_epoch", -1)
        options.setdefault("last_fetched_epoch", -1)
        request.partitions.add(partition=where, fetch_offset=offset, **options)
        return FETCH_RESPONSE.whole(await self.manager.fetch(request)).partitions[0]


class Brokers:
    """Brokers 1..n and the metadata."""

    def __init__(self, *, lag_max_ms: int, frames: bool = True) -> None:
        self.lag_max_ms = lag_max_ms
        self.frames = frames  # Of brokers that are started from now on.
        self.index = 0
        self.deleted_topics: list[bytes] = []  # Those that a snapshot remembers.
        self.brokers: dict[int, BrokerProcess] = {}
        self.records: dict[int, cluster_pb2.BrokerRecord] = {}
        self.partitions: dict[int, cluster_pb2.PartitionRecord] = {}
        self.topic = cluster_pb2.TopicRecord(topic_id=TOPIC_ID, name=TOPIC)
        self.proposals: list[cluster_pb2.AlterPartitionCommand] = []
        self.reports: list[cluster_pb2.ReportReplicasCommand] = []
        self.metadata_version = METADATA_VERSION
        self.controllers_answer = True
        self.controllers_lose_answers = 0

    def __getitem__(self, node_id: int) -> BrokerProcess:
        return self.brokers[node_id]

    # --- The controllers -------------------------------------------------------------------------

    def publish(self, **changes: Any) -> None:
        self.index += 1
        delta = cluster_pb2.MetadataDelta(index=self.index, cluster_id=CLUSTER_ID, **changes)
        for broker in self.brokers.values():
            broker.hear(delta)

    def snapshot(self) -> cluster_pb2.MetadataDelta:
        return cluster_pb2.MetadataDelta(
            index=self.index,
            cluster_id=CLUSTER_ID,
            metadata_version=self.metadata_version,
            snapshot=True,
            brokers=self.records.values(),
            topics=[self.topic] if self.partitions else [],
            partitions=self.partitions.values(),
            deleted_topics=self.deleted_topics,
        )

    def create_topic(self, *, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
        """All brokers have replicas; partition p is led by the p-th broker, counted from 0."""
        nodes = sorted(self.brokers)
        self.topic.configs.update(configs or {})
        for number in range(partitions):
            shift = number % len(nodes)
            replicas = nodes[shift:] + nodes[:shift]
            self.partitions[number] = cluster_pb2.PartitionRecord(
                topic_id=TOPIC_ID,
                partition=number,
                replicas=replicas,
                isr=replicas,
                leader=replicas[0],
                min_insync_replicas=effective_min_isr(self.topic.configs, len(replicas)),
            )
        self.publish(topics=[self.topic], partitions=self.partitions.values())

    def change(self, partition: int = 0, **fields: Any) -> None:
        """Change a partition's record; leader_epoch follows the leader."""
        record = cluster_pb2.PartitionRecord()
        record.CopyFrom(self.partitions[partition])
        for name, value in fields.items():
            if name in ("isr", "replicas", "offline_replicas"):
                del getattr(record, name)[:]
                getattr(record, name).extend(value)
            else:
                setattr(record, name, value)
        record.min_insync_replicas = effective_min_isr(self.topic.configs, len(record.replicas))
        record.partition_epoch += 1
        if "leader" in fields:
            record.leader_epoch += 1
        self.partitions[partition] = record
        self.publish(partitions=[record])

    def fence(self, node_id: int, *, fenced: bool) -> None:
        record = cluster_pb2.BrokerRecord()
        record.CopyFrom(self.records[node_id])
        record.fenced = fenced
        self.records[node_id] = record
        self.publish(brokers=[record])

    async def alter_partition(
        self, command: cluster_pb2.AlterPartitionCommand
    ) -> controller_pb2.AlterPartitionResponse:
        self.proposals.append(command)
        await asyncio.sleep(0)
        if not self.controllers_answer:
            raise NetworkError("no controller can be reached")
        result = cluster_pb2.AlterPartitionResult()
        for entry in command.partitions:
            answer = result.partitions.add()
            try:
                self._alter(command.node_id, entry)
            except PenstockError as error:
                answer.error.CopyFrom(error.to_proto())
            answer.partition.CopyFrom(self.partitions[entry.partition])
        if self.controllers_lose_answers > 0:
            self.controllers_lose_answers -= 1
            raise NetworkError("the answer was lost")
        return controller_pb2.AlterPartitionResponse(result=result)

    def _alter(self, node_id: int, entry: cluster_pb2.AlterPartitionEntry) -> None:
        record = self.partitions[entry.partition]
        if record.leader != node_id or record.leader_epoch != entry.leader_epoch:
            raise FencedLeaderEpochError("deposed")
        if record.partition_epoch != entry.partition_epoch:
            raise InvalidUpdateVersionError("old")
        for member in entry.new_isr:
            known = self.records[member.node_id]
            stale = known.fenced or known.broker_epoch != member.broker_epoch
            if stale or member.node_id in record.offline_replicas:
                self.change(entry.partition)
                raise IneligibleReplicaError(f"broker {member.node_id} may not join")
        self.change(entry.partition, isr=[member.node_id for member in entry.new_isr])

    async def report_replicas(
        self, command: cluster_pb2.ReportReplicasCommand
    ) -> controller_pb2.ReportReplicasResponse:
        """Take whoever is offline out of the in-sync set, and let the next one in sync lead."""
        self.reports.append(command)
        await asyncio.sleep(0)
        if not self.controllers_answer:
            raise NetworkError("no controller can be reached")
        for entry in command.replicas:
            node, record = command.node_id, self.partitions[entry.partition]
            offline = {*record.offline_replicas} - {node}
            if entry.state == cluster_pb2.REPLICA_STATE_ONLINE:
                self.change(entry.partition, offline_replicas=sorted(offline))
                continue
            rest = [member for member in record.isr if member != node]
            fields: dict[str, Any] = {"offline_replicas": sorted({*offline, node})}
            if rest:
                fields["isr"] = rest
            if record.leader == node:
                fields["leader"] = rest[0] if rest else -1
            self.change(entry.partition, **fields)
        return controller_pb2.ReportReplicasResponse()

    # --- Brokers ---------------------------------------------------------------------------------

    async def start(self, node_id: int, logs: MemoryLogs | None = None) -> BrokerProcess:
        """A process registers and comes up, knowing everything."""
        self.index += 1
        broker = BrokerProcess(self, node_id, logs or MemoryLogs(), self.index)
        await broker.start()
        self.records[node_id] = cluster_pb2.BrokerRecord(
            node_id=node_id, broker_epoch=broker.broker_epoch, host="127.0.0.1", port=broker.port
        )
        self.brokers[node_id] = broker
        broker.hear(self.snapshot())
        self.publish(brokers=[self.records[node_id]])
        return broker

    async def kill(self, node_id: int) -> None:
        """The process dies and is fenced; the first of the rest in sync leads."""
        await self.brokers[node_id].stop()
        self.brokers[node_id].logs.crash()
        self.fence(node_id, fenced=True)
        for number, record in self.partitions.items():
            rest = [member for member in record.isr if member != node_id]
            if len(rest) == len(record.isr) or not rest:
                continue
            if record.leader == node_id:
                self.change(number, isr=rest, leader=rest[0])
            else:
                self.change(number, isr=rest)

    async def restart(self, node_id: int) -> BrokerProcess:
        return await self.start(node_id, self.brokers[node_id].logs)

    def wrongly_offline(self) -> list[tuple[int, int]]:
        """Node and partition of every replica on record as offline that its broker finds sound.

        Of brokers that hear the controllers and are heard. At rest there must be none. A leader is
        passed over: it tells why its followers are out of sync, and not of itself.
        """
        heard = self.controllers_answer and self.metadata_version >= REPORTS_SINCE
        return [
            (node_id, number)
            for node_id, broker in self.brokers.items()
            for number, record in self.partitions.items()
            if heard
            and not broker.deaf
            and node_id in record.offline_replicas
            and (found := broker.manager.hosted(TopicIdPartition(TOPIC_ID, number))) is not None
            and not found.is_leader
            and not broker.manager.why_out_of_sync(found.key)
        ]

    def isr(self, partition: int = 0) -> set[int]:
        return set(self.partitions[partition].isr)


@asynccontextmanager
async def running(
    nodes: int = 3, *, lag_max_ms: int = 10_000, frames: bool = True
) -> AsyncIterator[Brokers]:
    brokers = Brokers(lag_max_ms=lag_max_ms, frames=frames)
    try:
        for node_id in range(1, nodes + 1):
            await brokers.start(node_id)
        yield brokers
        await eventually(lambda: not brokers.wrongly_offline())
    finally:
        for broker in brokers.brokers.values():
            if not broker.stopped:
                await broker.stop()
