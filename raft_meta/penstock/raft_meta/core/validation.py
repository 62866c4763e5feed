"""The invariants of the cluster's state, for tests."""

from __future__ import annotations

from collections import Counter

from penstock.raft_meta.core import reassignment
from penstock.raft_meta.core.model import NO_LEADER, Partition, Topic
from penstock.raft_meta.core.tables import Tables


def validate(tables: Tables) -> None:
    """Raise AssertionError that says which invariant is broken, and where."""
    assert tables.topics.keys() == tables.partitions.keys(), "topics and partitions differ"
    names = {topic.name: topic_id for topic_id, topic in tables.topics.items()}
    assert names == tables.topic_ids, "topic names and topics differ"
    for node_id, broker in tables.brokers.items():
        assert node_id == broker.node_id >= 0, f"broker {broker} is kept as {node_id}"
    for topic_id, partitions in tables.partitions.items():
        topic = tables.topics[topic_id]
        assert partitions, f"topic {topic.name} has no partitions"
        for number, partition in enumerate(partitions):
            _validate_partition(tables, topic, f"{topic.name}-{number}", partition)
    _validate_counts(tables)


def _validate_partition(tables: Tables, topic: Topic, name: str, partition: Partition) -> None:
    isr, replicas = set(partition.isr), set(partition.replicas)
    say = f"{name}: {partition}"
    assert partition.replicas, say
    assert len(replicas) == len(partition.replicas), f"replicas repeat: {say}"
    order = {node: position for position, node in enumerate(partition.replicas)}
    for members in (partition.isr, partition.elr, partition.offline):
        assert replicas.issuperset(members), f"not a replica: {say}"
        assert list(members) == sorted(set(members), key=order.__getitem__), f"order: {say}"
    assert isr, f"the in-sync set is empty: {say}"
    assert isr.isdisjoint(partition.elr), f"in sync and eligible: {say}"
    assert set(partition.elr).isdisjoint(partition.offline), f"eligible though offline: {say}"
    _validate_move(topic, say, partition)
    threshold = min(topic.min_isr(partition.replication_factor), len(replicas))
    assert len(isr) < threshold or not partition.elr, f"eligible while enough are in sync: {say}"
    if partition.leader == NO_LEADER:
        assert len(isr) == 1, f"several in sync, but no leader: {say}"
        for node in (*partition.isr, *partition.elr):
            broker = tables.brokers.get(node)
            offline = node in partition.offline
            assert offline or broker is None or not broker.usable, f"{node} could lead: {say}"
        return
    leads = tables.brokers.get(partition.leader)
    if leads is not None and leads.drained_since_ms:
        for node in isr:
            other = tables.brokers.get(node)
            spared = other is None or not other.usable or other.drained_since_ms
            assert spared, f"{partition.leader} is drained, yet leads though {node} could: {say}"
    assert partition.leader in isr, f"the leader is not in sync: {say}"
    for node in isr:
        broker = tables.brokers.get(node)
        assert broker is not None, f"{node} is in sync but not registered: {say}"
        assert not broker.fenced, f"{node} is in sync but fenced: {say}"
        assert node not in partition.offline, f"{node} is in sync but offline: {say}"
        if broker.in_controlled_shutdown:
            assert node == partition.leader, f"{node} is in sync but shuts down: {say}"
            assert len(isr) == 1, f"{node} shuts down, yet leads though others could: {say}"


def _validate_move(topic: Topic, say: str, partition: Partition) -> None:
    before = reassignment.original(partition)
    assert before, f"all replicas are only being added: {say}"
    assert partition.replicas == (*before, *partition.adding), f"order of the move: {say}"
    if not partition.target:
        assert not partition.adding, f"adding without a target: {say}"
        assert not partition.removing, f"removing without a target: {say}"
        return
    assert set(partition.target) == set(partition.replicas) - set(partition.removing), say
    assert partition.target != before, f"the move leads nowhere: {say}"
    arrived = reassignment.has_arrived(partition, topic.min_isr(len(partition.target)))
    assert not arrived, f"the move is over: {say}"


def _validate_counts(tables: Tables) -> None:
    everything = [partition for _, partition in tables.all_partitions()]
    leaders = Counter(part.leader for part in everything if part.leader != NO_LEADER)
    assert +tables.leaders == leaders, "leader counts are off"
    assert +tables.preferred == Counter(part.replicas[0] for part in everything)
    assert +tables.replicas == Counter(node for part in everything for node in part.replicas)
    assert tables.leaderless == sum(part.leader == NO_LEADER for part in everything)
    assert tables.not_preferred == sum(part.leader != part.replicas[0] for part in everything)
    assert tables.partition_count == len(everything)
