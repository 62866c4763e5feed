"""Administration of partitions: elections and reassignments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from penstock.client import admin_values, arguments
from penstock.client.admin_calls import READ_MS, AdminCalls, raise_if_error
from penstock.client.cluster import gather_all
from penstock.client.descriptions import PartitionReassignment
from penstock.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2
from penstock.wire.errors import ElectionNotNeededError, PenstockError, error_from_proto
from penstock.wire.ids import TopicPartition


class PartitionAdmin(AdminCalls):
    """A part of AsyncAdminClient."""

    async def elect_leaders(
        self, partitions: Iterable[TopicPartition] = (), *, unclean: bool = False
    ) -> dict[TopicPartition, int]:
        """Elect leaders anew. See ``AdminClient.elect_leaders``."""
        request = admin_pb2.ElectLeadersRequest(
            type=cluster_pb2.ELECTION_TYPE_UNCLEAN
            if arguments.flag("unclean", unclean)
            else cluster_pb2.ELECTION_TYPE_PREFERRED,
            partitions=named(partitions),
        )

        def judge(response: admin_pb2.ElectLeadersResponse) -> dict[TopicPartition, int]:
            raise_if_error(response)
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

    async def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Move replicas. See ``AdminClient.alter_partition_reassignments``."""
        request = admin_pb2.AlterReassignmentsRequest(
            validate_only=arguments.flag("validate_only", validate_only)
        )
        for where, replicas in arguments.reassignments(reassignments).items():
            request.reassignments.add(
                partition=admin_values.partition_proto(where), replicas=replicas
            )
        if not request.reassignments:
            return

        def judge(response: admin_pb2.AlterReassignmentsResponse) -> None:
            raise_if_error(response)
            for result in response.results:
                raise_if_error(result)

        await self._ask("AlterReassignments", request, judge, stub=admin_pb2_grpc.AdminStub)

    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] = ()
    ) -> list[PartitionReassignment]:
        """What moves. See ``AdminClient.list_partition_reassignments``."""

        def judge(
            response: admin_pb2.ListReassignmentsResponse,
        ) -> list[admin_pb2.PartitionReassignment]:
            raise_if_error(response)
            return list(response.reassignments)

        request = admin_pb2.ListReassignmentsRequest(partitions=named(partitions))
        listed = cast(
            list[admin_pb2.PartitionReassignment],
            await self._ask("ListReassignments", request, judge, stub=admin_pb2_grpc.AdminStub),
        )
        told = await self._told_by_leaders(listed)
        return [
            admin_values.reassignment(told.get(admin_values.partition(entry.partition), entry))
            for entry in listed
        ]

    async def _told_by_leaders(
        self, listed: Iterable[admin_pb2.PartitionReassignment]
    ) -> dict[TopicPartition, admin_pb2.PartitionReassignment]:
        """The same by the leaders' brokers, which know how far the replicas are; if they answer."""
        by_leader: dict[int, list[common_pb2.TopicPartition]] = {}
        for entry in listed:
            if entry.leader >= 0:
                by_leader.setdefault(entry.leader, []).append(entry.partition)
        if not by_leader:
            return {}
        cluster = await self.describe_cluster()
        self._cluster.metadata.replace_brokers(admin_values.broker_protos(cluster))

        async def ask(
            leader: int, wanted: list[common_pb2.TopicPartition]
        ) -> list[admin_pb2.PartitionReassignment]:
            try:
                response = await self._cluster.call(
                    leader,
                    lambda channel: admin_pb2_grpc.AdminStub(channel).ListReassignments,
                    admin_pb2.ListReassignmentsRequest(partitions=wanted),
                    timeout_ms=READ_MS,
                    what="Admin.ListReassignments",
                )
            except PenstockError:
                return []  # What the first broker said stands, without offsets.
            return list(response.reassignments)

        answers = await gather_all([ask(*question) for question in by_leader.items()])
        return {
            admin_values.partition(entry.partition): entry for found in answers for entry in found
        }


def named(partitions: Iterable[TopicPartition]) -> list[common_pb2.TopicPartition]:
    """Partitions as a request names them."""
    return [admin_values.partition_proto(entry) for entry in arguments.partitions(partitions)]
