"""Administration for asyncio."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from penstock.client import admin_values, arguments
from penstock.client.admin_calls import checked, only, raise_if_error
from penstock.client.aio_cluster_admin import ClusterAdmin, ConfigValue
from penstock.client.aio_node_admin import NodeAdmin
from penstock.client.aio_partition_admin import PartitionAdmin, named
from penstock.client.aio_transaction_admin import TransactionAdmin
from penstock.client.cluster import gather_all, now_ms
from penstock.client.descriptions import (
    ConfigEntry,
    CreatedTopic,
    GroupDescription,
    GroupListing,
    TopicDescription,
)
from penstock.client.model import OffsetAndMetadata, OffsetAndTimestamp
from penstock.client.out_of_sync import ask_why
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    groups_pb2,
    groups_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
)
from penstock.wire.errors import (
    InvalidPartitionsError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition

OffsetSpec = int | Literal["earliest", "latest", "max_timestamp"]
"""A time in milliseconds, or the name of a place in the log."""

_SPECS: dict[str, int] = {"latest": -1, "earliest": -2, "max_timestamp": -3}
_VISIBLE_MS = 5_000.0  # How long to wait for a new topic to show; it exists anyway.


class AsyncAdminClient(PartitionAdmin, ClusterAdmin, NodeAdmin, TransactionAdmin):
    """``AdminClient`` for asyncio: the same settings, promises and errors.

    Belongs to the event loop on which it is first used; safe for any number of its tasks.
    """

    # --- topics -----------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 3,
        configs: Mapping[str, ConfigValue] | None = None,
        *,
        if_not_exists: bool = False,
        replica_assignments: Sequence[Sequence[int]] = (),
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Make a topic. See ``AdminClient.create_topic``."""
        placed = _assignments(replica_assignments)
        partitions = arguments.int32("partitions", partitions)
        replication_factor = arguments.int32("replication_factor", replication_factor)
        command = cluster_pb2.CreateTopicCommand(
            name=arguments.topic(name, "name"),
            # By which a repeated request is known for this one, should its answer be lost.
            topic_id=uuid.uuid4().bytes,
            partition_count=0 if placed else partitions,
            replication_factor=0 if placed else replication_factor,
            configs=arguments.configs({} if configs is None else configs),
            replica_assignments=placed,
            validate_only=arguments.flag("validate_only", validate_only),
        )
        if_not_exists = arguments.flag("if_not_exists", if_not_exists)
        request = admin_pb2.CreateTopicsRequest(topics=[command])
        try:
            result = await self._ask(
                "CreateTopics",
                request,
                lambda response: only(response.results),
                stub=admin_pb2_grpc.AdminStub,
            )
        except TopicAlreadyExistsError:
            if not if_not_exists:
                raise
            [found] = await self.describe_topics([name])
            return CreatedTopic(name, found.topic_id, created=False)
        if not validate_only:
            await self._await_visible(name)
        return CreatedTopic(
            name,
            admin_values.topic_id_text(result.topic_id),
            created=not validate_only,
            replicas=tuple(tuple(entry.replicas) for entry in result.replica_assignments),
        )

    async def delete_topic(self, name: str, *, topic_id: str | None = None) -> None:
        """Delete a topic with its records. See ``AdminClient.delete_topic``."""
        name = arguments.topic(name, "name")
        if topic_id is None:
            [found] = await self.describe_topics([name])
            topic_id = found.topic_id
        request = admin_pb2.DeleteTopicsRequest(
            names=[name], topic_ids=[arguments.topic_id(topic_id)]
        )

        async def is_gone(error: PenstockError) -> bool:
            return isinstance(error, UnknownTopicOrPartitionError)  # It was there before.

        await self._ask(
            "DeleteTopics",
            request,
            lambda response: only(response.results),
            stub=admin_pb2_grpc.AdminStub,
            took_effect=is_gone,
        )
        self._cluster.metadata.forget(name)

    async def list_topics(
        self, *, include_internal: bool = False, since_index: int = 0
    ) -> list[TopicDescription]:
        """Every topic, by name. See ``AdminClient.list_topics``."""
        request = metadata_pb2.DescribeTopicsRequest(
            all_topics=True,
            include_internal=arguments.flag("include_internal", include_internal),
        )
        judge = self._knowing(since_index, _all_described)
        response = await self._ask("DescribeTopics", request, judge)
        topics = [admin_values.topic(entry) for entry in response.topics]
        return sorted(topics, key=lambda topic: topic.name)

    async def describe_topics(
        self, names: Iterable[str], *, out_of_sync: bool = False
    ) -> list[TopicDescription]:
        """The topics named, in that order. See ``AdminClient.describe_topics``."""
        wanted = arguments.topics(names, "names")
        if not wanted:
            return []
        why = arguments.flag("out_of_sync", out_of_sync)
        request = metadata_pb2.DescribeTopicsRequest(topics=wanted, out_of_sync=why)
        response = await self._ask("DescribeTopics", request, _all_described)
        if why:
            await ask_why(self._cluster, response)
        by_name = {
            entry.name: admin_values.topic(entry, out_of_sync=why) for entry in response.topics
        }
        return [by_name[name] for name in wanted]

    async def create_partitions(
        self,
        topic: str,
        total_count: int,
        *,
        replica_assignments: Sequence[Sequence[int]] = (),
        validate_only: bool = False,
    ) -> None:
        """Raise the partition count. See ``AdminClient.create_partitions``."""
        placed = _assignments(replica_assignments)
        command = cluster_pb2.CreatePartitionsCommand(
            topic=arguments.topic(topic),
            total_count=arguments.int32("total_count", total_count),
            replica_assignments=placed,
            validate_only=arguments.flag("validate_only", validate_only),
        )

        async def are_there(error: PenstockError) -> bool:
            if not isinstance(error, InvalidPartitionsError):
                return False
            [found] = await self.describe_topics([topic])
            added = found.partitions[len(found.partitions) - len(placed) :] if placed else ()
            return found.partition_count == command.total_count and all(
                entry.replicas == tuple(wanted.replicas)
                for entry, wanted in zip(added, placed, strict=True)
            )

        await self._ask(
            "CreatePartitions",
            admin_pb2.CreatePartitionsRequest(topics=[command]),
            lambda response: only(response.results),
            stub=admin_pb2_grpc.AdminStub,
            took_effect=are_there,
        )

    async def describe_configs(self, topic: str) -> list[ConfigEntry]:
        """Every config of a topic with its value in force, by key."""
        result = await self._ask(
            "DescribeConfigs",
            admin_pb2.DescribeConfigsRequest(topics=[arguments.topic(topic)]),
            lambda response: only(response.topics),
            stub=admin_pb2_grpc.AdminStub,
        )
        entries = [admin_values.config(entry) for entry in result.entries]
        return sorted(entries, key=lambda entry: entry.key)

    async def alter_configs(
        self,
        topic: str,
        set_configs: Mapping[str, ConfigValue] | None = None,
        remove: Iterable[str] = (),
        *,
        validate_only: bool = False,
    ) -> None:
        """Set some configs and reset others. See ``AdminClient.alter_configs``."""
        command = cluster_pb2.AlterTopicConfigsCommand(
            topic=arguments.topic(topic),
            set=arguments.configs({} if set_configs is None else set_configs, "set_configs"),
            remove=arguments.texts("remove", remove, "configs' names"),
            validate_only=arguments.flag("validate_only", validate_only),
        )
        await self._ask(
            "AlterConfigs",
            admin_pb2.AlterConfigsRequest(topics=[command]),
            lambda response: only(response.results),
            stub=admin_pb2_grpc.AdminStub,
        )

    # --- groups -----------------------------------------------------------------------------

    async def list_groups(self) -> list[GroupListing]:
        """Every consumer group, by id. Raises NetworkError when a living broker does not answer,
        for its groups would be missing.
        """
        cluster = await self.describe_cluster()
        self._cluster.metadata.replace_brokers(admin_values.broker_protos(cluster))
        living = [broker.node_id for broker in cluster.brokers if not broker.fenced]

        async def ask(node_id: int) -> list[GroupListing]:
            response = await self._cluster.call(
                node_id,
                lambda channel: groups_pb2_grpc.GroupsStub(channel).ListGroups,
                groups_pb2.ListGroupsRequest(),
                timeout_ms=self.config.default_api_timeout_ms,
                what="Groups.ListGroups",
            )
            return [
                GroupListing(entry.group_id, entry.state, entry.member_count, node_id)
                for entry in response.groups
            ]

        listings = await gather_all([ask(node_id) for node_id in living])
        # A group that moved while we asked is listed by both; one listing is enough.
        by_id = {entry.group_id: entry for found in listings for entry in found}
        return [by_id[group_id] for group_id in sorted(by_id)]

    async def describe_groups(self, group_ids: Iterable[str]) -> list[GroupDescription]:
        """The groups named, in that order. See ``AdminClient.describe_groups``."""
        return [await self._describe_group(entry) for entry in arguments.group_ids(group_ids)]

    async def delete_groups(self, group_ids: Iterable[str]) -> None:
        """Delete empty groups with their offsets. See ``AdminClient.delete_groups``."""
        first: PenstockError | None = None
        for group_id in arguments.group_ids(group_ids):
            request = groups_pb2.DeleteGroupsRequest(group_ids=[group_id])
            try:
                await self._ask_coordinator(
                    group_id,
                    "DeleteGroups",
                    request,
                    lambda response: only(response.results),
                )
            except PenstockError as error:
                first = first or error
        if first is not None:
            raise first

    async def list_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The committed offsets of a group; none named means all that it has."""
        request = groups_pb2.FetchOffsetsRequest(
            group_id=arguments.group_id(group_id),
            partitions=named(partitions),
            member_epoch=-1,
        )
        response = await self._ask_coordinator(group_id, "FetchOffsets", request, checked)
        return admin_values.offsets(response.offsets)

    async def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        only_forward: bool = False,
    ) -> None:
        """Set committed offsets of a group without members. See ``AdminClient``."""
        request = groups_pb2.CommitOffsetsRequest(
            group_id=arguments.group_id(group_id),
            member_epoch=-1,
            offsets=[
                admin_values.offset_proto(*pair) for pair in arguments.positions(offsets).items()
            ],
            only_forward=only_forward,
        )
        await self._ask_coordinator(group_id, "CommitOffsets", request, _judge_each)

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> None:
        """Forget committed offsets. See ``AdminClient.delete_group_offsets``."""
        request = groups_pb2.DeleteOffsetsRequest(
            group_id=arguments.group_id(group_id), partitions=named(partitions)
        )
        await self._ask_coordinator(group_id, "DeleteOffsets", request, _judge_each)

    async def _describe_group(self, group_id: str) -> GroupDescription:
        request = groups_pb2.DescribeGroupsRequest(group_ids=[group_id])
        entry = await self._ask_coordinator(
            group_id, "DescribeGroups", request, lambda response: only(response.groups)
        )
        coordinator = await self._coordinators.find(group_id, self.config.default_api_timeout_ms)
        return admin_values.group(entry, coordinator)

    # --- logs -------------------------------------------------------------------------------

    async def list_offsets(
        self, partitions: Mapping[TopicPartition, OffsetSpec]
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Offsets by place or time. See ``AdminClient.list_offsets``."""
        self._check_open()
        times = arguments.times(partitions, _SPECS)
        return await self._leaders.list_offsets(times, self.config.default_api_timeout_ms)

    async def delete_records(
        self, before_offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Delete the records before each offset (-1: all); the new log start offsets."""
        self._check_open()
        return await self._leaders.delete_records(
            arguments.offsets_by_partition("before_offsets", before_offsets, -1),
            self.config.default_api_timeout_ms,
        )

    # --- inside -----------------------------------------------------------------------------

    async def _await_visible(self, name: str) -> None:
        """Wait until the cluster shows the topic with a leader for each partition."""
        deadline = now_ms() + min(_VISIBLE_MS, self.config.default_api_timeout_ms)
        request = metadata_pb2.DescribeTopicsRequest(topics=[name])
        while now_ms() < deadline:
            try:
                response = await self._cluster.ask_any(
                    lambda channel: metadata_pb2_grpc.MetadataStub(channel).DescribeTopics,
                    request,
                    what="Metadata.DescribeTopics",
                    timeout_ms=max(1.0, deadline - now_ms()),
                )
            except (NetworkError, RequestTimedOutError):
                return  # It was made; that it cannot be seen now is another matter.
            entry = response.topics[0] if response.topics else None
            if entry is not None and not entry.HasField("error"):
                self._cluster.metadata.apply(response, now_ms())
                if all(partition.leader >= 0 for partition in entry.partitions):
                    return
            await asyncio.sleep(0.02)


def _all_described(
    response: metadata_pb2.DescribeTopicsResponse,
) -> metadata_pb2.DescribeTopicsResponse:
    raise_if_error(response)
    for entry in response.topics:
        raise_if_error(entry)
    return response


def _assignments(replicas: Sequence[Sequence[int]]) -> list[cluster_pb2.ReplicaAssignment]:
    checked = arguments.assignments(replicas)
    return [cluster_pb2.ReplicaAssignment(replicas=nodes) for nodes in checked]


def _judge_each(
    response: groups_pb2.CommitOffsetsResponse | groups_pb2.DeleteOffsetsResponse,
) -> None:
    raise_if_error(response)
    for result in response.results:
        raise_if_error(result)
