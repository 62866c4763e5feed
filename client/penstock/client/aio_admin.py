"""Administration for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast

import grpc

from penstock.client import admin_values, arguments
from penstock.client.background import ForkGuard
from penstock.client.cluster import Cluster, gather_all, now_ms
from penstock.client.config import AdminConfig, AdminSettings
from penstock.client.coordinator import Coordinators
from penstock.client.descriptions import (
    ClusterDescription,
    ConfigEntry,
    CreatedTopic,
    GroupDescription,
    GroupListing,
    QuorumDescription,
    TopicDescription,
)
from penstock.client.leader_calls import LeaderCalls
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.model import OffsetAndMetadata, OffsetAndTimestamp
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    common_pb2,
    groups_pb2,
    groups_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
)
from penstock.wire.errors import (
    ClientClosedError,
    ElectionNotNeededError,
    InvalidRequestError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition

OffsetSpec = int | Literal["earliest", "latest", "max_timestamp"]
"""A time in milliseconds, or the name of a place in the log."""

ConfigValue = str | int | float
"""The value of a topic's config. Numbers, True and False are written as the cluster knows them."""

_SPECS: dict[str, int] = {"latest": -1, "earliest": -2, "max_timestamp": -3}
_READ_MS = 2_000.0  # Beyond this another broker is asked; a reading harms nobody.
# After these a request may have been carried out all the same.
_FATE_UNKNOWN = (NetworkError, RequestTimedOutError, UnknownServerError)
_VISIBLE_MS = 5_000.0  # How long to wait for a new topic to show; it exists anyway.


class AsyncAdminClient:
    """``AdminClient`` for asyncio: the same settings, promises and errors.

    Belongs to the event loop on which it is first used; safe for any number of its tasks.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        **settings: Unpack[AdminSettings],
    ) -> None:
        self.config = AdminConfig.load(bootstrap_servers, settings)
        self._guard = ForkGuard("AdminClient")
        self._cluster = Cluster(self.config)
        self._keeper = MetadataKeeper(self._cluster, lambda: None)
        self._leaders = LeaderCalls(self._cluster, self._keeper)
        self._coordinators = Coordinators(self._cluster)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Free the connections. Idempotent."""
        if self._closed or self._guard.foreign:
            return
        self._closed = True
        await self._keeper.close()
        await self._cluster.close()

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
                lambda response: _only(response.results),
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

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with its records. Raises UnknownTopicOrPartitionError."""
        request = admin_pb2.DeleteTopicsRequest(names=[arguments.topic(name, "name")])
        await self._ask(
            "DeleteTopics",
            request,
            lambda response: _only(response.results),
            stub=admin_pb2_grpc.AdminStub,
        )
        self._cluster.metadata.forget(name)

    async def list_topics(self, *, include_internal: bool = False) -> list[TopicDescription]:
        """Every topic, by name."""
        request = metadata_pb2.DescribeTopicsRequest(
            all_topics=True,
            include_internal=arguments.flag("include_internal", include_internal),
        )
        response = await self._ask("DescribeTopics", request, lambda answer: answer)
        topics = [admin_values.topic(entry) for entry in response.topics]
        return sorted(topics, key=lambda topic: topic.name)

    async def describe_topics(self, names: Iterable[str]) -> list[TopicDescription]:
        """The topics named, in that order. See ``AdminClient.describe_topics``."""
        wanted = arguments.topics(names, "names")
        if not wanted:
            return []
        request = metadata_pb2.DescribeTopicsRequest(topics=wanted)
        response = await self._ask("DescribeTopics", request, _all_described)
        by_name = {entry.name: admin_values.topic(entry) for entry in response.topics}
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
        command = cluster_pb2.CreatePartitionsCommand(
            topic=arguments.topic(topic),
            total_count=arguments.int32("total_count", total_count),
            replica_assignments=_assignments(replica_assignments),
            validate_only=arguments.flag("validate_only", validate_only),
        )
        await self._ask(
            "CreatePartitions",
            admin_pb2.CreatePartitionsRequest(topics=[command]),
            lambda response: _only(response.results),
            stub=admin_pb2_grpc.AdminStub,
        )

    async def describe_configs(self, topic: str) -> list[ConfigEntry]:
        """Every config of a topic with its value in force, by key."""
        result = await self._ask(
            "DescribeConfigs",
            admin_pb2.DescribeConfigsRequest(topics=[arguments.topic(topic)]),
            lambda response: _only(response.topics),
            stub=admin_pb2_grpc.AdminStub,
        )
        entries = [
            ConfigEntry(entry.key, entry.value, entry.source, entry.documentation)
            for entry in result.entries
        ]
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
            lambda response: _only(response.results),
            stub=admin_pb2_grpc.AdminStub,
        )

    async def elect_leaders(
        self, partitions: Iterable[TopicPartition] = (), *, unclean: bool = False
    ) -> dict[TopicPartition, int]:
        """Elect leaders anew. See ``AdminClient.elect_leaders``."""
        request = admin_pb2.ElectLeadersRequest(
            type=cluster_pb2.ELECTION_TYPE_UNCLEAN
            if arguments.flag("unclean", unclean)
            else cluster_pb2.ELECTION_TYPE_PREFERRED,
            partitions=_named(partitions),
        )

        def judge(response: admin_pb2.ElectLeadersResponse) -> dict[TopicPartition, int]:
            _raise_if_error(response)
            leaders: dict[TopicPartition, int] = {}
            for result in response.results:
                if result.HasField("error"):
                    error = error_from_proto(result.error)
                    if isinstance(error, ElectionNotNeededError):
                        continue
                    raise error
                leaders[admin_values.partition(result.partition)] = result.leader
            return leaders

        return cast(
            dict[TopicPartition, int],
            await self._ask("ElectLeaders", request, judge, stub=admin_pb2_grpc.AdminStub),
        )

    # --- the cluster ------------------------------------------------------------------------

    async def describe_cluster(self) -> ClusterDescription:
        """Brokers and the active controller."""
        request = metadata_pb2.DescribeClusterRequest()
        response = await self._ask("DescribeCluster", request, lambda answer: answer)
        return admin_values.cluster(response)

    async def describe_quorum(self) -> QuorumDescription:
        """How the controllers stand."""

        def judge(response: admin_pb2.AdminDescribeQuorumResponse) -> QuorumDescription:
            _raise_if_error(response)
            return admin_values.quorum(response.quorum)

        request = admin_pb2.AdminDescribeQuorumRequest()
        return cast(
            QuorumDescription,
            await self._ask("DescribeQuorum", request, judge, stub=admin_pb2_grpc.AdminStub),
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
                    lambda response: _only(response.results),
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
            partitions=_named(partitions),
            member_epoch=-1,
        )
        response = await self._ask_coordinator(group_id, "FetchOffsets", request, _checked)
        return admin_values.offsets(response.offsets)

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> None:
        """Set committed offsets of a group without members. See ``AdminClient``."""
        request = groups_pb2.CommitOffsetsRequest(
            group_id=arguments.group_id(group_id),
            member_epoch=-1,
            offsets=[
                admin_values.offset_proto(*pair) for pair in arguments.positions(offsets).items()
            ],
        )

        def judge(response: groups_pb2.CommitOffsetsResponse) -> None:
            _raise_if_error(response)
            for result in response.results:
                _raise_if_error(result)

        await self._ask_coordinator(group_id, "CommitOffsets", request, judge)

    async def _describe_group(self, group_id: str) -> GroupDescription:
        request = groups_pb2.DescribeGroupsRequest(group_ids=[group_id])
        entry = await self._ask_coordinator(
            group_id, "DescribeGroups", request, lambda response: _only(response.groups)
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

    async def _ask(
        self,
        method: str,
        request: Any,
        judge: Callable[[Any], Any],
        *,
        stub: Callable[[grpc.aio.Channel], Any] = metadata_pb2_grpc.MetadataStub,
    ) -> Any:
        """What ``judge`` makes of some broker's answer, retrying what is retriable.

        A request with a timeout goes on to the controller and may change something, so that it
        is not repeated on mere silence.
        """
        self._check_open()
        changes = hasattr(request, "timeout_ms")
        deadline = now_ms() + self.config.default_api_timeout_ms
        sent = 0
        unheard = False  # What became of an earlier attempt is not known.

        def bind(channel: grpc.aio.Channel) -> Any:
            nonlocal sent
            sent += 1
            return getattr(stub(channel), method)

        attempt = 0
        while True:
            remaining = deadline - now_ms()
            if changes:
                request.timeout_ms = max(1, int(min(remaining, self.config.request_timeout_ms)))
            try:
                return judge(
                    await self._cluster.ask_any(
                        bind,
                        request,
                        what=f"{stub.__name__.removesuffix('Stub')}.{method}",
                        timeout_ms=remaining,
                        attempt_ms=self.config.request_timeout_ms if changes else _READ_MS,
                        once=changes,
                    )
                )
            except PenstockError as error:
                pause = self._cluster.backoff.delay_ms(attempt)
                # The broker asked may be a moment behind; thrice is sure.
                unknown = isinstance(error, UnknownTopicOrPartitionError) and attempt >= 2
                if unknown or not error.retriable or now_ms() + pause >= deadline:
                    if changes and unheard:
                        error.add_note(
                            f"the request was sent {sent} times, because an earlier answer did "
                            "not come; it may have taken effect then"
                        )
                    raise
                unheard = unheard or isinstance(error, _FATE_UNKNOWN)
                attempt += 1
            await asyncio.sleep(pause / 1000)

    async def _ask_coordinator(
        self, group_id: str, method: str, request: Any, judge: Callable[[Any], Any]
    ) -> Any:
        self._check_open()
        return await self._coordinators.call(
            group_id,
            lambda channel: getattr(groups_pb2_grpc.GroupsStub(channel), method),
            request,
            judge,
            what=f"Groups.{method}",
            timeout_ms=self.config.default_api_timeout_ms,
        )

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

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the admin client is closed")


def _all_described(
    response: metadata_pb2.DescribeTopicsResponse,
) -> metadata_pb2.DescribeTopicsResponse:
    for entry in response.topics:
        _raise_if_error(entry)
    return response


def _only(entries: Sequence[Any]) -> Any:
    """The one entry of an answer to a question about one thing. Raises its error."""
    if len(entries) != 1:
        raise InvalidRequestError(f"the broker answered {len(entries)} entries where 1 was asked")
    _raise_if_error(entries[0])
    return entries[0]


def _checked(response: Any) -> Any:
    _raise_if_error(response)
    return response


def _raise_if_error(message: Any) -> None:
    if message.HasField("error"):
        raise error_from_proto(message.error)


def _assignments(replicas: Sequence[Sequence[int]]) -> list[cluster_pb2.ReplicaAssignment]:
    checked = arguments.assignments(replicas)
    return [cluster_pb2.ReplicaAssignment(replicas=nodes) for nodes in checked]


def _named(partitions: Iterable[TopicPartition]) -> list[common_pb2.TopicPartition]:
    return [admin_values.partition_proto(entry) for entry in arguments.partitions(partitions)]
