"""When a node may be stopped: the rule, case by case and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.rolling import (
    CAUGHT_UP_ENTRIES,
    BrokerStanding,
    PartitionStanding,
    QuorumStanding,
    VoterStanding,
    why_not_roll,
)


def brokers(*down: int, drained: tuple[int, ...] = (), count: int = 3) -> list[BrokerStanding]:
    return [
        BrokerStanding(node, serves=node not in down, drained=node in drained)
        for node in range(1, count + 1)
    ]


def partition(isr: list[int], min_isr: int = 2, replicas: int = 3) -> PartitionStanding:
    return PartitionStanding("orders-0", range(1, replicas + 1), isr, min_isr, isr[0])


def quorum(behind: dict[int, int] | None = None, *silent: int, count: int = 3) -> QuorumStanding:
    behind = behind or {}
    nodes = range(1, count + 1)
    return QuorumStanding(
        [VoterStanding(node, behind.get(node, 0), node not in silent) for node in nodes]
    )


def test_a_whole_cluster_can_do_without_any_node() -> None:
    for node in (1, 2, 3):
        assert why_not_roll(node, [partition([1, 2, 3])], brokers(), quorum()) == []


@pytest.mark.parametrize(
    ("isr", "min_isr", "down", "drained", "said"),
    [
        ([1, 2], 2, (), (), "fewer replicas of orders-0 are in sync than min.insync.replicas"),
        ([1, 2, 3], 2, (3,), (), "fewer replicas of orders-0"),  # In sync as far as is known yet.
        ([1, 2, 3], 2, (), (3,), "fewer replicas of orders-0"),
        ([1], 1, (), (), "only replica in sync of orders-0"),
        ([1, 2], 1, (2,), (), "only replica in sync of orders-0"),
        ([1, 2, 3], 1, (2,), (3,), "only replica in sync of orders-0"),
        ([1, 2, 3], 3, (), (), "min.insync.replicas of orders-0 is as large"),
    ],
)
def test_a_partition_that_would_suffer_is_named(
    isr: list[int], min_isr: int, down: tuple[int, ...], drained: tuple[int, ...], said: str
) -> None:
    reasons = why_not_roll(1, [partition(isr, min_isr)], brokers(*down, drained=drained), quorum())
    assert len(reasons) == 1
    assert said in reasons[0]
    assert "; next: " in reasons[0]


def test_a_replica_that_is_not_in_sync_keeps_nothing_up() -> None:
    assert why_not_roll(3, [partition([1, 2])], brokers(), quorum()) == []
    assert why_not_roll(3, [partition([1])], brokers(), quorum()) == []


def test_a_node_that_is_drained_itself_may_stop() -> None:
    assert why_not_roll(1, [partition([1, 2, 3])], brokers(drained=(1,)), quorum()) == []


def test_a_broker_that_is_down_already_can_be_stopped() -> None:
    assert why_not_roll(1, [partition([1])], brokers(1), quorum({}, 1)) == []
    assert why_not_roll(9, [], brokers(), quorum()) == []


def test_many_partitions_are_one_reason_each_kind() -> None:
    many = [PartitionStanding(f"t-{n}", (1, 2, 3), (1, 2), 2, 1) for n in range(500)]
    reasons = why_not_roll(1, [*many, partition([1], 1)], brokers(), quorum())
    assert len(reasons) == 2
    assert "orders-0" in reasons[0]
    assert "t-0, t-1, t-2 and 497 more" in reasons[1]


@pytest.mark.parametrize(
    ("standing", "said"),
    [
        (quorum({}, 2), "controller 2 does not answer"),
        (quorum({2: CAUGHT_UP_ENTRIES + 1}), "2 is 1001 entries behind"),
        (quorum({2: -1}), "2 has not been heard yet"),
        (quorum(count=2), "add controllers"),
        (quorum(count=1), "the only one"),
        (QuorumStanding((), "no majority confirms who leads"), "no majority confirms who leads"),
    ],
)
def test_controllers_that_would_be_missing_are_named(standing: QuorumStanding, said: str) -> None:
    reasons = why_not_roll(1, [], brokers(), standing)
    assert len(reasons) == 1
    assert said in reasons[0]
    assert "; next: " in reasons[0]


def test_five_controllers_can_miss_one_more() -> None:
    assert why_not_roll(1, [], brokers(), quorum({}, 2, count=5)) == []
    assert why_not_roll(1, [], brokers(), quorum({}, 2, 3, count=5)) != []


def test_controllers_do_not_keep_a_broker_that_is_none() -> None:
    assert why_not_roll(7, [], brokers(count=7), quorum({}, 2)) == []
    assert why_not_roll(7, [], brokers(count=7), QuorumStanding((), "nobody leads")) != []


nodes = st.integers(1, 5)
standings = st.lists(
    st.tuples(st.sets(nodes, min_size=1), st.integers(1, 4)).map(
        lambda drawn: PartitionStanding("p-0", (1, 2, 3, 4, 5), sorted(drawn[0]), drawn[1], 1)
    ),
    max_size=4,
)


@given(nodes, standings, st.sets(nodes), st.sets(nodes))
def test_what_may_be_stopped_leaves_every_partition_writable_that_was(
    node: int, partitions: list[PartitionStanding], down: set[int], drained: set[int]
) -> None:
    known = brokers(*down, drained=tuple(drained), count=5)
    allowed = not why_not_roll(node, partitions, known, quorum(count=5))

    def suffers(one: PartitionStanding) -> bool:
        left = {member for member in one.isr if member not in {*down, *drained, node}}
        return node in one.isr and len(left) < max(1, one.min_isr)

    assert allowed == (node in down or not any(map(suffers, partitions)))
