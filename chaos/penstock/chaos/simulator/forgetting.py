"""Disks that forget what they had confirmed, under leaders that run.

As when a machine is set back to a snapshot of a moment ago. Nothing is promised of what such a
leader writes before a follower shows it that it has more; so here one does so at once.
"""

from __future__ import annotations

from random import Random

from penstock.broker.core.partition_events import FollowerPositioned
from penstock.chaos.simulator.cluster import Cluster
from penstock.chaos.simulator.partition import SimulatedPartition


def lose_tail(cluster: Cluster, rng: Random) -> None:
    """Some leader's disk forgets records, as a follower that has them states its position.

    Another replica that may lead has all of them.
    """
    able = [
        (partition, position)
        for partition in cluster.hosted()
        for position in _who_has_more(cluster, partition)
    ]
    if not able:
        return
    partition, position = rng.choice(able)
    broker, key = partition.broker, partition.key
    offset = rng.choice(_written_in(partition, position.log_end_offset)[-10:])
    broker.note(f"{key.partition} on {broker.node_id}: the disk forgets all from {offset} on")
    cluster.checkers.records_lost(broker.node_id, broker.broker_epoch, [key])
    partition.log.forget(offset)
    partition.handle(position)
    partition.log_moved()
    cluster.restart_later(broker, rng.randint(100, 2000))


def _written_in(partition: SimulatedPartition, below: int) -> list[int]:
    """Where the batches begin that were written in this leadership, below an offset."""
    log = partition.log
    return [
        batch.header.base_offset
        for batch in log.contents.batches
        if batch.header.leader_epoch == partition.replica.leader_epoch
        and log.log_start_offset < batch.header.base_offset < below
    ]


def _who_has_more(cluster: Cluster, partition: SimulatedPartition) -> list[FollowerPositioned]:
    """What followers would say that have records of this very leadership."""
    replica, key = partition.replica, partition.key
    node_id = partition.broker.node_id
    if not partition.is_leader or not cluster.checkers.is_intact_elsewhere(node_id, key):
        return []
    positions = [
        FollowerPositioned(
            node_id=other.broker.node_id,
            session=known.session,
            broker_epoch=known.broker_epoch,
            leader_epoch=replica.leader_epoch,
            log_end_offset=other.log.log_end_offset,
            last_epoch=other.log.last_epoch,
            log_start_offset=other.log.log_start_offset,
            now_ms=partition.broker.now_ms,
        )
        for other in cluster.hosted()
        if other.key == key
        and (known := replica.followers().get(other.broker.node_id)) is not None
        and known.matched
        and known.broker_epoch == other.broker.broker_epoch
        and other.replica.leader_epoch == replica.leader_epoch == other.log.last_epoch
        and other.log.durable_offset == other.log.log_end_offset
    ]
    return [at for at in positions if _written_in(partition, at.log_end_offset)]
