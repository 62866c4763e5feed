"""The gRPC services of the fake brokers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    controller_pb2,
    groups_pb2,
    groups_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    node_pb2,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.batch import checksum
from penstock.wire.config_keys import suggest
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    FencedMemberEpochError,
    InvalidPartitionsError,
    LeaderHint,
    NetworkError,
    NotCoordinatorError,
    OffsetOutOfRangeError,
    PenstockError,
    StaleMemberEpochError,
    TopicAlreadyExistsError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    UnknownVoterError,
)
from penstock.wire.ids import TopicPartition
from tests.unit.client.fake_transactions import TransactionServices

if TYPE_CHECKING:
    from tests.unit.client.fake_broker import FakeNode


class FakeServices(
    TransactionServices,
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
            metadata_index=self.cluster.index - self.node.lag_entries,
            brokers=self._brokers(),
            answered_by=self.node.number,
        )

    async def DescribeTopics(self, request: Any, context: Any) -> Any:
        if self.cluster.on_describe is not None:
            answer = await self.cluster.on_describe(self.node)
            if answer is not None:
                return answer
        names = sorted(self.cluster.topics) if request.all_topics else list(request.topics)
        return metadata_pb2.DescribeTopicsResponse(
            topics=[self._describe(name) for name in names],
            brokers=self._brokers(),
            metadata_index=self.cluster.index - self.node.lag_entries,
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
        if self.cluster.on_find_coordinator is not None:
            error = self.cluster.on_find_coordinator(request)
            if error is not None:
                return metadata_pb2.FindCoordinatorResponse(error=error.to_proto())
        node = self.cluster.nodes[self.cluster.coordinator]
        return metadata_pb2.FindCoordinatorResponse(
            coordinator=common_pb2.CurrentLeader(
                node_id=node.number, leader_epoch=1, host="127.0.0.1", port=node.port
            )
        )

    async def InitProducerId(self, request: Any, context: Any) -> Any:
        if request.transactional_id:
            response = transactions_pb2.InitProducerIdResponse()
            await self._answer("InitProducerId", request, response, context)
            return response
        refusal = self.cluster.no_producer_ids
        if refusal is not None:
            return transactions_pb2.InitProducerIdResponse(error=refusal.to_proto())
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
                if request.transactional_id:
                    self.cluster.transactions.admit(
                        request.transactional_id, partition, entry.records
                    )
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
            result.high_watermark = result.last_stable_offset = readable = partition.end
            if partition.open_at is not None:
                result.last_stable_offset = partition.open_at
                if request.isolation_level == common_pb2.ISOLATION_LEVEL_READ_COMMITTED:
                    readable = partition.open_at
            data = b""
            for _, following, batch in partition.batches:
                if entry.fetch_offset < following <= readable and (
                    not data or len(data) + len(batch) <= entry.partition_max_bytes
                ):
                    data += batch
            result.records = data
            result.records_crc = checksum(data)
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

    # --- what people ask of leaders about transactions --------------------------------------

    async def DescribeProducers(self, request: Any, context: Any) -> Any:
        return await self.cluster.on_leader_asked(self.node, request)

    async def CheckHanging(self, request: Any, context: Any) -> Any:
        return await self.cluster.on_leader_asked(self.node, request)

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
                member = self.cluster.new_member(request.member_id)
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
            result = response.results.add(partition=entry.partition)
            topic = self.cluster.topics.get(name.topic)
            if topic is None:
                result.error.CopyFrom(UnknownTopicOrPartitionError(f"no {name}").to_proto())
            elif entry.partition.topic_id not in (b"", topic.topic_id):
                result.error.CopyFrom(UnknownTopicIdError(f"another {name}").to_proto())
            else:
                group.offsets[name] = entry
                commit[name] = entry.offset
        group.commits.append(commit)
        return response

    async def FetchOffsets(self, request: Any, context: Any) -> Any:
        response = groups_pb2.FetchOffsetsResponse()
        try:
            self._check_coordinator()
            if self.cluster.on_fetch_offsets is not None:
                error = self.cluster.on_fetch_offsets(request)
                if error is not None:
                    raise error
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
            self.cluster.asked_ids.append(command.topic_id)
            result = response.results.add(name=command.name)
            topic = self.cluster.topics.get(command.name)
            if topic is not None and topic.topic_id != command.topic_id:
                error = TopicAlreadyExistsError(f"there is a topic {command.name!r}")
                result.error.CopyFrom(error.to_proto())
                continue
            if topic is None:
                topic = self.cluster.add_topic(command.name, command.partition_count)
                topic.topic_id = command.topic_id
                topic.configs.update(command.configs)
            result.topic_id = topic.topic_id
        await self._lose(context)
        return response

    async def CreatePartitions(self, request: Any, context: Any) -> Any:
        response = admin_pb2.CreatePartitionsResponse()
        for wish in request.topics:
            result = response.results.add(name=wish.topic)
            partitions = self.cluster.topics[wish.topic].partitions
            if wish.total_count <= len(partitions):
                error = InvalidPartitionsError(f"{len(partitions)} are there")
                result.error.CopyFrom(error.to_proto())
            else:
                self.cluster.add_partitions(wish.topic, wish.total_count)
        await self._lose(context)
        return response

    async def DeleteTopics(self, request: Any, context: Any) -> Any:
        response = admin_pb2.DeleteTopicsResponse()
        for name, topic_id in zip(request.names, request.topic_ids, strict=True):
            result = response.results.add(name=name)
            topic = self.cluster.topics.get(name)
            if topic is None or topic.topic_id != topic_id:
                error = UnknownTopicOrPartitionError(f"there is no topic {name!r}")
                result.error.CopyFrom(error.to_proto())
            else:
                del self.cluster.topics[name]
        self.cluster.index += 1
        await self._lose(context)
        return response

    async def DrainBroker(self, request: Any, context: Any) -> Any:
        self.cluster.drained.append((request.node_id, request.undo))
        await self._lose(context)
        return admin_pb2.DrainBrokerResponse(remaining_leaderships=3)

    async def DescribeNode(self, request: Any, context: Any) -> Any:
        if request.HasField("controller_id") and self.cluster.knows_controllers:
            return self._of_a_controller(request.controller_id)
        directory = node_pb2.NodeDirectory(
            path="/data", total_bytes=9, free_bytes=8, failure="bad", fsync_us=-1
        )
        return node_pb2.DescribeNodeResponse(
            node_id=self.node.number,
            version="1.2",
            min_metadata_version=1,
            max_metadata_version=6,
            codec_compiled=True,
            roles=["broker"],
            clock_ms=20,
            started_ms=10,
            directories=[directory],
            open_descriptors=5,
            max_descriptors=7,
            resident_bytes=11,
            http_address="h:1",
        )

    def _of_a_controller(self, node_id: int) -> Any:
        self.cluster.asked_controllers.append(node_id)
        if node_id in self.cluster.silent_controllers:
            return node_pb2.DescribeNodeResponse(error=NetworkError("it is silent").to_proto())
        if node_id not in self.cluster.voters:
            error = UnknownVoterError(f"node {node_id} is no controller")
            return node_pb2.DescribeNodeResponse(error=error.to_proto())
        return node_pb2.DescribeNodeResponse(node_id=node_id, roles=["controller"])

    async def ReadMetrics(self, request: Any, context: Any) -> Any:
        text = f"penstock_probe {self.node.number}.0\n"
        return node_pb2.ReadMetricsResponse(node_id=self.node.number, text=text)

    async def UnregisterBroker(self, request: Any, context: Any) -> Any:
        response = admin_pb2.UnregisterBrokerResponse()
        if (
            request.node_id in self.cluster.unregistered
            or request.node_id not in self.cluster.nodes
        ):
            error = BrokerIdNotRegisteredError(f"{request.node_id} is not registered")
            response.error.CopyFrom(error.to_proto())
        self.cluster.unregistered.append(request.node_id)
        await self._lose(context)
        return response

    async def _lose(self, context: Any) -> None:
        """Have the answer to what took effect get lost, if the test wants so."""
        if self.cluster.lost_answers > 0:
            self.cluster.lost_answers -= 1
            await context.abort(self.cluster.lost_as, "the connection broke")

    def _quorum(self) -> controller_pb2.DescribeQuorumResponse:
        return controller_pb2.DescribeQuorumResponse(
            leader_id=1,
            term=4,
            commit_index=9,
            applied_index=8,
            answered_by=self.node.number,
            voters_index=5,
            voters=[
                controller_pb2.QuorumVoter(
                    node_id=number,
                    host=host,
                    port=port,
                    match_index=9 - number,
                    directory_id=bytes(15) + bytes([number]),
                    # The third one lost its disk.
                    found_directory_id=bytes(15) + bytes([number + number // 3]),
                )
                for number, (host, port) in sorted(self.cluster.voters.items())
            ],
        )

    async def DescribeQuorum(self, request: Any, context: Any) -> Any:
        return admin_pb2.AdminDescribeQuorumResponse(quorum=self._quorum())

    async def AlterQuorum(self, request: Any, context: Any) -> Any:
        self.cluster.altered.append(request)
        if self.cluster.on_alter_quorum is not None:
            error = await self.cluster.on_alter_quorum(request)
            if error is not None:
                return admin_pb2.AlterQuorumResponse(error=error.to_proto())
        if request.WhichOneof("change") == "add":
            self.cluster.voters[request.add.node_id] = (request.add.host, request.add.port)
        elif self.cluster.voters.pop(request.remove_node_id, None) is None:
            gone = UnknownVoterError(f"{request.remove_node_id} is no voter")
            await self._lose(context)
            return admin_pb2.AlterQuorumResponse(error=gone.to_proto())
        await self._lose(context)
        return admin_pb2.AlterQuorumResponse(quorum=self._quorum())
