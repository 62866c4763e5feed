"""How each kind of fault is brought about, and what an operator does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from penstock.chaos.simulator.checkers import check
from penstock.chaos.simulator.cluster import Cluster
from penstock.chaos.simulator.faults import DAMAGED_LOG, Fault
from penstock.chaos.simulator.forgetting import lose_tail
from penstock.chaos.simulator.plan import Plan
from penstock.chaos.simulator.transactions.broker import STEPS, TRANSACTIONS_TOPIC
from penstock.chaos.simulator.transactions.positions import OFFSETS_TOPIC
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

TOPIC: Final = "simulated"
SECOND_TOPIC: Final = "fleeting"
REPLICATION_FACTOR: Final = 3
_MAX_PARTITIONS: Final = 4
_LEAP_MS: Final = 2500
_SLOW_MS: Final = 2500
"""How far clocks leap, and how slow disks and networks get, goes by how long the fault lasts; what
lasts for minutes is no worse than this.
"""
_OF_A_NODE: Final = (
    "stall",
    "late metadata",
    "clock",
    "slow disk",
    "failed flush",
    "failed disk",
    "bit flip",
)
_DOWN: Final = (
    "kill",
    "kill leader",
    "kill coordinator",
    "power loss",
    "power loss everywhere",
    "lost disk",
)


class Strikes:
    """Carries out faults on a cluster. ``rng`` decides what the schedule leaves open, and
    ``damage`` which logs do not open, and why.

    ``end_producer`` ends some producer's process, and begins another one; ``hold_up`` lets one
    stand still for so many milliseconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        rng: Random,
        damage: Random,
        *,
        end_producer: Callable[[], None],
        hold_up: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._rng = rng
        self._damage = damage
        self._hold_up = hold_up
        self._overdue: dict[tuple[int, TopicIdPartition], int] = {}  # In which leader epoch.
        self._topics = 0
        self._others: dict[str, Callable[[], None]] = {
            "another controller": cluster.quorum.elect,
            "stale entry": self._stale_entry,
            "lost tail": lambda: lose_tail(cluster, rng) if self._all_sound() else None,
            "min isr": self._change_min_isr,
            "delete records": self._delete_records,
            "move": lambda: self._move(self._any_partition(), self._drawn_replicas()),
            "add partition": self._add_partition,
            "topic": self._make_or_delete_topic,
            "another producer": end_producer,
            "elect": self._elect,
        }

    def strike(self, fault: Fault) -> None:
        """Let it go wrong."""
        if fault.kind in self._others:
            self._others[fault.kind]()
        elif fault.kind == DAMAGED_LOG:
            self._cluster.damage_log(fault.nodes[0], self._damage, down_for_ms=fault.for_ms)
        elif fault.kind in _DOWN:
            nodes = fault.nodes
            if fault.kind == "kill leader":
                nodes = tuple(self._leaders()[:1])
            elif fault.kind == "kill coordinator":
                nodes = tuple(self._coordinators()[:1])
            self._down(nodes, fault)
        elif fault.kind == "hold up a client":
            self._hold_up(fault.for_ms)
        elif fault.kind == "end after":
            self._cluster.end_after(self._rng.choice(STEPS))
        elif fault.kind == "restart":
            self._cluster.shut_down(fault.nodes[0], fault.for_ms)
        elif fault.kind in _OF_A_NODE:
            self._trouble(fault.nodes[0], fault)
        else:
            self._disturb(fault)

    # Nodes.

    def _down(self, nodes: Sequence[int], fault: Fault) -> None:
        if fault.kind == "lost disk" and not self._may_lose_disk(nodes[0]):
            return
        for node_id in nodes:
            lost_disk = fault.kind == "lost disk"
            power_loss = lost_disk or fault.kind.startswith("power loss")
            self._cluster.crash(node_id, power_loss=power_loss, lost_disk=lost_disk)
            self._cluster.start_later(node_id, self._rng.randint(1, fault.for_ms))

    def _may_lose_disk(self, node_id: int) -> bool:
        """A node that is down or rotting already is trouble enough; its metadata stay."""
        cluster = self._cluster
        return cluster.nodes[node_id].broker is not None and self._all_sound()

    def _all_sound(self) -> bool:
        return not any(node.disk.shut for node in self._cluster.nodes.values()) and not any(
            contents.flipped
            for node in self._cluster.nodes.values()
            for key in node.disk.partitions()
            if (contents := node.disk.contents(key)) is not None
        )

    def _leaders(self) -> list[int]:
        return [
            broker.node_id
            for broker in self._cluster.brokers()
            if any(partition.is_leader for partition in broker.partitions.values())
        ]

    def _coordinators(self) -> list[int]:
        """In an order by chance."""
        found = [
            partition.broker.node_id
            for partition in self._cluster.hosted()
            if partition.is_leader and self._is_coordinators(partition.key)
        ]
        return self._rng.sample(found, len(found))

    def _is_coordinators(self, key: TopicIdPartition) -> bool:
        """Whether a partition is of a topic in which coordinators keep transactions or groups."""
        topics = map(self._cluster.metadata().topic, (TRANSACTIONS_TOPIC, OFFSETS_TOPIC))
        return any(topic is not None and topic.topic_id == key.topic_id for topic in topics)

    def _trouble(self, node_id: int, fault: Fault) -> None:
        scheduler, node = self._cluster.scheduler, self._cluster.nodes[node_id]
        match fault.kind:
            case "stall":
                scheduler.held_until_ms[node_id] = scheduler.now_ms + fault.for_ms
            case "late metadata":
                if node.broker is not None:
                    node.broker.act_late(fault.for_ms)
            case "clock":
                node.clock.leap(self._rng.choice((1, -1)) * min(fault.for_ms, _LEAP_MS))
            case "slow disk":
                node.disk.slow_ms = min(fault.for_ms, _SLOW_MS) // 3
                scheduler.after(fault.for_ms, node.disk.hurry)
            case "failed flush":
                node.disk.flush_fails = True
            case "failed disk":
                self._fail_disk(node_id, fault)
            case _:
                self._flip_bit(node_id)

    def _fail_disk(self, node_id: int, fault: Fault) -> None:
        broker = self._cluster.nodes[node_id].broker
        if broker is not None and broker.partitions:
            hosted = sorted(broker.partitions)
            keys = self._rng.sample(hosted, self._rng.randint(1, len(hosted)))
            self._cluster.fail_disk(node_id, keys, mended_ms=fault.for_ms)

    def _flip_bit(self, node_id: int) -> None:
        """One log at a time, and of what is whole on the disk of another that may lead."""
        broker = self._cluster.nodes[node_id].broker
        if broker is None or not self._all_sound():
            return
        checkers = self._cluster.checkers
        able = [
            partition
            for key, partition in broker.partitions.items()
            if (record := checkers.partitions.get(key)) is not None  # Its topic may be deleted.
            and node_id in record.isr
            and checkers.is_intact_elsewhere(node_id, key)
        ]
        if able:
            partition = self._rng.choice(able)
            kept = checkers.kept_elsewhere(node_id, partition.key)
            at = partition.log.flip_bit(self._rng, partition.replica.high_watermark, kept)
            if at is not None:
                broker.note(f"{partition.key.partition} on {node_id}: a bit flips at {at}")

    # The network.

    def _disturb(self, fault: Fault) -> None:
        network = self._cluster.network
        if fault.kind == "reset":
            network.reset(*fault.nodes)
            return
        self._cluster.scheduler.after(fault.for_ms, network.heal)
        if fault.kind == "slow network":
            slow_ms = min(fault.for_ms, _SLOW_MS) // 10
            network.slow_ms.update(dict.fromkeys(fault.nodes, slow_ms))
        elif fault.kind == "one way":
            network.cut(*fault.nodes)
        else:
            for near in fault.nodes:
                for far in sorted(set(self._plan.nodes).difference(fault.nodes)):
                    network.cut(near, far)
                    network.cut(far, near)

    # The operator.

    def create_topic(self, name: str, partitions: int, topic_id: bytes = b"") -> None:
        """Have a topic made, under a new id where ``topic_id`` is not given."""
        self._topics += 1
        body = cluster_pb2.CreateTopicCommand(
            name=name,
            topic_id=topic_id or self._topics.to_bytes(16, "big"),
            partition_count=partitions,
            replication_factor=REPLICATION_FACTOR,
        )
        if self._plan.min_isr is not None:
            body.configs["min.insync.replicas"] = str(self._plan.min_isr)
        if self._plan.unclean:
            body.configs["unclean.leader.election.enable"] = "true"
        self._cluster.administer(cluster_pb2.Command(create_topic=body))

    def _make_or_delete_topic(self) -> None:
        if self._cluster.metadata().topic(SECOND_TOPIC) is None:
            self.create_topic(SECOND_TOPIC, 1)
        else:
            body = cluster_pb2.DeleteTopicCommand(name=SECOND_TOPIC)
            self._cluster.administer(cluster_pb2.Command(delete_topic=body))

    def _add_partition(self) -> None:
        topic = self._cluster.metadata().topic(TOPIC)
        if topic is None:
            return
        count = len(self._cluster.metadata().partitions(topic.topic_id)) + 1
        if count <= _MAX_PARTITIONS:
            body = cluster_pb2.CreatePartitionsCommand(topic=TOPIC, total_count=count)
            self._cluster.administer(cluster_pb2.Command(create_partitions=body))

    def _change_min_isr(self) -> None:
        body = cluster_pb2.AlterTopicConfigsCommand(topic=TOPIC)
        number = self._rng.randint(0, REPLICATION_FACTOR)
        if number:
            body.set["min.insync.replicas"] = str(number)
        else:  # The default then: 2, or 1 while a partition has fewer than three replicas.
            body.remove.append("min.insync.replicas")
        self._cluster.administer(cluster_pb2.Command(alter_topic_configs=body))

    def _stale_entry(self) -> None:
        quorum = self._cluster.quorum
        if quorum.entries:
            quorum.replay(self._rng.choice(quorum.entries))

    def _delete_records(self) -> None:
        for partition in self._cluster.hosted():
            if partition.is_leader:
                start, end = partition.log.log_start_offset, partition.replica.high_watermark
                offset = self._rng.randint(start, end)
                self._cluster.checkers.log_of(partition.key).delete_below(offset)
                partition.delete_below(offset)

    def delete_what_is_lost(self) -> None:
        """Again and again: of a damaged batch that nobody has whole any more, up to its end."""
        for partition in self._cluster.hosted():
            at = partition.log.first_damage()
            if at is not None and partition.is_leader and not self._is_anywhere(partition.key, at):
                [damaged, *_] = partition.log.batches_from(at)
                end = min(damaged.header.next_offset, partition.replica.high_watermark)
                partition.broker.note(f"{partition.key.partition}: deleted below {end}, for damage")
                self._cluster.checkers.log_of(partition.key).delete_below(end)
                partition.delete_below(end)
        self._cluster.scheduler.after(1000, self.delete_what_is_lost)

    def _is_anywhere(self, key: TopicIdPartition, offset: int) -> bool:
        """Whether any disk has the committed batch at an offset as it was."""
        sound = self._cluster.checkers.log_of(key).batch_at(offset)
        return any(
            batch.data == sound
            for node in self._cluster.nodes.values()
            if (contents := node.disk.contents(key)) is not None
            for batch in contents.batches[contents.index_of(offset) :][:1]
        )

    def put_logs_right(self) -> None:
        """Again and again: a person sees to logs that do not open and can't be copied."""
        overdue, self._overdue = self._overdue, {}
        for node_id, node in self._cluster.nodes.items():
            for key in list(node.disk.shut):
                partition = self._cluster.checkers.partitions.get(key)
                if partition is None or node_id not in partition.replicas or node.broker is None:
                    continue
                leads = node_id not in partition.isr and partition.leader > 0
                if not (leads and self._cluster.checkers.lacks_nothing(partition.leader, key)):
                    self._cluster.put_right(node_id, key)
                    continue
                place, epoch = (node_id, key), partition.leader_epoch
                check(
                    overdue.get(place) != epoch,
                    f"{key.partition}: broker {node_id} does not copy its log anew, though "
                    f"{partition.leader} leads, and has all of it",
                )
                self._overdue[place] = epoch
        self._cluster.scheduler.after(1000, self.put_logs_right)

    def _any_partition(self) -> TopicIdPartition:
        return self._rng.choice(sorted(self._cluster.checkers.partitions))

    def _drawn_replicas(self) -> list[int]:
        """None at times, which cancels."""
        count = self._rng.choice((0, 1, 2, 2, 2, 3, 3))
        return self._rng.sample(self._plan.nodes, count)

    def _move(self, key: TopicIdPartition, replicas: Sequence[int]) -> None:
        body = cluster_pb2.AlterReassignmentsCommand()
        body.partitions.add(topic_id=key.topic_id, partition=key.partition, replicas=replicas)
        self._cluster.administer(cluster_pb2.Command(alter_reassignments=body))

    def move_back(self) -> None:
        """Again and again: to three replicas, as those who wait for the end expect."""
        for key, partition in self._cluster.checkers.partitions.items():
            if partition.target or len(partition.replicas) != REPLICATION_FACTOR:
                self._move(key, self._plan.nodes[:REPLICATION_FACTOR])
        self._cluster.scheduler.after(1000, self.move_back)

    def _elect(self) -> None:
        key = self._any_partition()
        body = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_PREFERRED)
        if self._plan.unclean:
            body.type = cluster_pb2.ELECTION_TYPE_UNCLEAN
            self._cluster.checkers.unclean_ordered.add(key)
        body.partitions.add(topic_id=TopicId(key.topic_id), partition=key.partition)
        self._cluster.administer(cluster_pb2.Command(elect_leaders=body))
