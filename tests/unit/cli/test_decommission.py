"""How far a decommission is, in a line."""

from __future__ import annotations

from penstock.cli.decommission import progress
from penstock.client.descriptions import (
    PartitionDescription,
    PartitionReassignment,
    ReplicaProgress,
)
from penstock.wire.ids import TopicPartition


def at(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def held(number: int, leader: int = 1) -> dict[TopicPartition, PartitionDescription]:
    return {at(number): PartitionDescription(number, leader, 1, (4, 1), (4, 1), (), 1)}


def move(number: int, *lags: int) -> PartitionReassignment:
    replicas = tuple(ReplicaProgress(5 + n, False, 7, lag) for n, lag in enumerate(lags))
    adding = tuple(replica.node_id for replica in replicas)
    return PartitionReassignment(at(number), (5, 1), adding, (4,), 1, replicas)


def test_what_is_still_to_be_copied_is_counted_of_this_nodes_moves() -> None:
    left = held(0) | held(1)
    moves = [move(0, 1_200), move(1, -1), move(2, 99)]
    assert progress(4, 5, left, moves) == (
        "moved 3 of 5 replicas of node 4; 1,200 records are still to be copied"
    )
    assert progress(4, 1, {}, []) == "moved 1 of 1 replica of node 4"


def test_what_cannot_move_is_named() -> None:
    left = {where: one for n in range(5) for where, one in held(n, leader=-1).items()}
    line = progress(4, 5, left, [])
    assert "orders-0, orders-1, orders-2 and 2 more can't move while nobody leads" in line
