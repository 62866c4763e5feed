"""Plans of `penstock partitions reassign --from-broker`."""

from __future__ import annotations

import pytest

from penstock.cli.draining import drain
from penstock.wire.errors import InvalidReplicaAssignmentError
from penstock.wire.ids import TopicPartition


def of(*replicas: tuple[int, ...]) -> dict[TopicPartition, tuple[int, ...]]:
    return {TopicPartition("orders", number): nodes for number, nodes in enumerate(replicas)}


def racks(*nodes: int) -> dict[int, str]:
    return dict.fromkeys(nodes, "")


def test_each_replica_of_the_broker_is_replaced_in_its_place() -> None:
    replicas = of((1, 2, 3), (2, 3, 1), (2, 3, 5))
    assert drain(1, replicas, racks(4), racks(2, 3, 4, 5)) == of((4, 2, 3), (2, 3, 4))


def test_replicas_go_where_there_are_fewest() -> None:
    replicas = of((1,), (1,), (1,), (2,), (2,))
    moved = drain(1, replicas, racks(2, 3), racks(2, 3))
    assert list(moved.values()) == [(3,), (3,), (2,)]


def test_a_rack_that_holds_no_other_replica_goes_before_an_emptier_broker() -> None:
    where = {1: "a", 2: "b", 3: "b", 4: "a"}
    replicas = of((1, 2), (4, 3), (4, 3))
    candidates = {3: "b", 4: "a"}
    assert drain(1, replicas, candidates, where) == of((4, 2))


def test_only_what_is_named_moves_and_all_of_it_counts() -> None:
    replicas = of((1,), (1,), (2,))
    only = {TopicPartition("orders", 1)}
    assert drain(1, replicas, racks(2, 3), racks(2, 3), only) == {TopicPartition("orders", 1): (3,)}


def test_a_broker_without_replicas_has_nothing_to_move() -> None:
    assert drain(9, of((1, 2)), racks(1, 2), racks(1, 2)) == {}


def test_where_no_broker_is_left_to_take_a_replica_some_are_named_with_a_way_out() -> None:
    replicas = of(*[(1, 2, 3)] * 5)
    with pytest.raises(InvalidReplicaAssignmentError) as refused:
        drain(3, replicas, racks(1, 2), racks(1, 2, 3))
    assert refused.value.message == (
        "orders-0, orders-1, orders-2 and 2 more have replicas on every broker that could take "
        "one (1, 2); next: add a broker, or keep fewer copies of them first, as with "
        "`penstock partitions reassign orders:0 --replicas 1,2`"
    )


def test_without_any_broker_to_take_replicas_it_says_so() -> None:
    with pytest.raises(InvalidReplicaAssignmentError, match="no other broker is live"):
        drain(1, of((1,)), {}, racks(1))
