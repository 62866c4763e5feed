"""Drives a ClusterState as an active controller's shell would: epochs, sequences, indexes."""

from __future__ import annotations

from typing import Any

from penstock.broker.core.metadata_image import MetadataImage
from penstock.raft_meta.core.cluster_state import Applied, ClusterState
from penstock.raft_meta.core.model import Partition
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2
from penstock.wire.errors import error_from_proto

CLUSTER = "a-cluster"


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def incarnation(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Driver:
    """A state with a claimed epoch and a brokers' image that follows its deltas."""

    def __init__(
        self,
        brokers: int = 0,
        racks: dict[int, str] | None = None,
        metadata_version: int = METADATA_VERSION,
    ) -> None:
        self.state = ClusterState()
        self.image = MetadataImage()
        self.index = 0
        self.sequence = 0
        self.epoch = 0
        self.log: list[tuple[int, bytes]] = []
        self.restored: ClusterState | None = None  # Another controller's, if it is to follow.
        self.claim(1, metadata_version=metadata_version)
        for node in range(1, brokers + 1):
            self.start(node, rack=(racks or {}).get(node, ""))

    def apply_bytes(self, payload: bytes) -> Applied:
        self.index += 1
        self.log.append((self.index, payload))
        applied = self.state.apply(self.index, payload)
        if applied.delta is not None:
            assert self.image.apply(applied.delta) is not None
        return applied

    def claim(
        self,
        epoch: int,
        node: int = 1,
        cluster_id: str = CLUSTER,
        metadata_version: int = METADATA_VERSION,
    ) -> Applied:
        body = cluster_pb2.BecomeControllerCommand(
            controller_id=node, cluster_id=cluster_id, metadata_version=metadata_version
        )
        command = cluster_pb2.Command(controller_epoch=epoch, become_controller=body)
        applied = self.apply_bytes(command.SerializeToString())
        if not applied.result.HasField("error"):
            self.epoch, self.sequence = epoch, 0
        return applied

    def run(self, **body: Any) -> cluster_pb2.CommandResult:
        """The result of a command, with the next sequence; an error comes as it is."""
        self.sequence += 1
        command = cluster_pb2.Command(controller_epoch=self.epoch, sequence=self.sequence, **body)
        return self.apply_bytes(command.SerializeToString()).result

    def ok(self, **body: Any) -> cluster_pb2.CommandResult:
        """As run, but an error is raised."""
        result = self.run(**body)
        if result.HasField("error"):
            raise error_from_proto(result.error)
        return result

    # Shorthands.

    def register(self, node: int, life: int = 1, previous: int = -1, **changes: Any) -> int:
        body = self.registration(node, life, previous, **changes)
        return self.ok(register_broker=body).register_broker.broker_epoch

    def registration(
        self,
        node: int,
        life: int = 1,
        previous: int = -1,
        *,
        rack: str = "",
        supports: int = 0,
        follows: int | None = None,
        external: tuple[str, int] = ("", 0),
    ) -> cluster_pb2.RegisterBrokerCommand:
        return cluster_pb2.RegisterBrokerCommand(
            node_id=node,
            incarnation_id=incarnation(node * 1000 + life),
            cluster_id=CLUSTER,
            host="127.0.0.1",
            port=9000 + node,
            rack=rack,
            previous_broker_epoch=previous,
            supported_metadata_version=supports,
            follows_broker_epoch=follows,
            external_host=external[0],
            external_port=external[1],
        )

    def about(self, node: int) -> dict[str, int]:
        return {"node_id": node, "broker_epoch": self.state.brokers[node].broker_epoch}

    def fence(self, node: int) -> None:
        self.ok(fence_broker=cluster_pb2.FenceBrokerCommand(**self.about(node)))

    def unfence(self, node: int) -> None:
        self.ok(unfence_broker=cluster_pb2.UnfenceBrokerCommand(**self.about(node)))

    def start(self, node: int, life: int = 1, previous: int = -1, rack: str = "") -> int:
        epoch = self.register(node, life, previous, rack=rack)
        self.unfence(node)
        return epoch

    def shut_down(self, node: int) -> int:
        body = cluster_pb2.ControlledShutdownCommand(**self.about(node))
        result = self.ok(controlled_shutdown=body)
        return result.controlled_shutdown.remaining_leaderships

    def create(
        self,
        name: str = "orders",
        assignments: list[list[int]] | None = None,
        *,
        number: int = 1,
        partitions: int = 0,
        replication_factor: int = 0,
        **configs: str,
    ) -> bytes:
        body = cluster_pb2.CreateTopicCommand(
            name=name,
            topic_id=topic_id(number),
            partition_count=partitions,
            replication_factor=replication_factor,
            configs={key.replace("_", "."): text for key, text in configs.items()},
            replica_assignments=[
                cluster_pb2.ReplicaAssignment(replicas=nodes) for nodes in assignments or []
            ],
        )
        return self.ok(create_topic=body).create_topic.topic_id

    def move(
        self, replicas: list[int], *, topic: int = 1, number: int = 0, validate_only: bool = False
    ) -> cluster_pb2.AlterReassignmentsEntryResult:
        """Begin or change a reassignment; no replicas cancel it."""
        body = cluster_pb2.AlterReassignmentsCommand(validate_only=validate_only)
        body.partitions.add(topic_id=topic_id(topic), partition=number, replicas=replicas)
        return self.ok(alter_reassignments=body).alter_reassignments.partitions[0]

    def report(
        self, node: int, state: cluster_pb2.ReplicaState.ValueType, *numbers: int, topic: int = 1
    ) -> cluster_pb2.CommandResult:
        """A broker says how its replicas of these partitions are."""
        body = cluster_pb2.ReportReplicasCommand(**self.about(node))
        for number in numbers or (0,):
            body.replicas.add(topic_id=topic_id(topic), partition=number, state=state)
        return self.run(report_replicas=body)

    def partition(self, number: int = 0, topic: int = 1) -> Partition:
        found = self.state.partition(topic_id(topic), number)
        assert found is not None
        return found

    def alter(
        self,
        isr: list[int],
        *,
        node: int | None = None,
        epochs: dict[int, int] | None = None,
        leader_epoch: int | None = None,
        partition_epoch: int | None = None,
        broker_epoch: int | None = None,
        topic: int = 1,
        number: int = 0,
    ) -> cluster_pb2.CommandResult:
        """The leader's wish, with the epochs that are right unless others are given."""
        now = self.state.partition(topic_id(topic), number) or Partition((1,), (1,), (), 1, 0, 0)
        node = now.leader if node is None else node
        brokers = self.state.brokers
        epochs = epochs or {}
        entry = cluster_pb2.AlterPartitionEntry(
            topic_id=topic_id(topic),
            partition=number,
            leader_epoch=now.leader_epoch if leader_epoch is None else leader_epoch,
            partition_epoch=now.partition_epoch if partition_epoch is None else partition_epoch,
        )
        for member in isr:
            known = brokers[member].broker_epoch if member in brokers else 0
            entry.new_isr.add(node_id=member, broker_epoch=epochs.get(member, known))
        return self.run(
            alter_partition=cluster_pb2.AlterPartitionCommand(
                node_id=node,
                broker_epoch=brokers[node].broker_epoch if broker_epoch is None else broker_epoch,
                partitions=[entry],
            )
        )
