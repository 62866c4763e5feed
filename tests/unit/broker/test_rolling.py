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
    judge,
    why_not_roll,
)


def brokers(*down: int, drained: tuple[int, ...] = (), count: int = 3) -> list[BrokerStanding]:
    """``drained`` one after the other."""
    return [
        BrokerStanding(node, node not in down, drained.index(node) + 1 if node in drained else 0)
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
    standing = brokers(*down, drained=drained)
    # Where a drained node is a controller too, that says so: not here.
    controllers = quorum(count=5)
    reasons = why_not_roll(1, [partition(isr, min_isr)], standing, controllers)
    assert len(reasons) == 1
    assert said in reasons[0]
    assert "; next: " in reasons[0]


def test_a_replica_that_is_not_in_sync_keeps_nothing_up() -> None:
    assert why_not_roll(3, [partition([1, 2])], brokers(), quorum()) == []
    assert why_not_roll(3, [partition([1])], brokers(), quorum()) == []


def test_a_node_that_is_drained_itself_may_stop() -> None:
    assert why_not_roll(1, [partition([1, 2, 3])], brokers(drained=(1,)), quorum()) == []


def test_of_nodes_that_are_drained_at_once_the_first_may_leave_and_no_other() -> None:
    both = brokers(drained=(2, 1))
    whole = [partition([1, 2, 3])]
    assert why_not_roll(2, whole, both, quorum()) == []
    (about_partitions, about_controllers) = why_not_roll(1, whole, both, quorum())
    assert "broker 2 is drained" in about_partitions
    assert "controller 2 is drained" in about_controllers
    # The first has left, and comes back anew: the next.
    assert why_not_roll(1, whole, brokers(2, drained=(2, 1)), quorum({}, 2)) != []
    assert why_not_roll(1, whole, brokers(drained=(1,)), quorum()) == []


@pytest.mark.parametrize(
    ("partitions", "controllers", "passes"),
    [
        ([partition([1], 1, replicas=1)], quorum(), False),
        ([partition([1, 2, 3], 3)], quorum(), False),
        ([partition([1, 2])], quorum(), True),
        ([partition([1], 1)], quorum(), True),
        ([partition([1], 1, replicas=1), partition([1, 2])], quorum(), True),
        ([], quorum(count=1), False),
        ([], quorum(count=2), False),
        ([], quorum({}, 2, count=2), False),
        ([], quorum({}, 2), True),
        ([], QuorumStanding((), "nobody leads"), True),
    ],
)
def test_whether_it_is_worth_to_wait_is_told(
    partitions: list[PartitionStanding], controllers: QuorumStanding, passes: bool
) -> None:
    verdict = judge(1, partitions, brokers(), controllers)
    assert verdict.reasons
    assert verdict.passes == passes


def test_who_is_not_drained_itself_leaves_to_no_drained_one() -> None:
    assert why_not_roll(3, [partition([1, 2, 3])], brokers(drained=(2,)), quorum()) != []
    # Where no partition suffers the controllers may.
    (reason,) = why_not_roll(3, [], brokers(drained=(2,)), quorum())
    assert "controller 2 is drained" in reason


def test_a_broker_that_is_down_already_can_be_stopped() -> None:
    assert why_not_roll(1, [partition([1])], brokers(1), quorum({}, 1)) == []
    assert why_not_roll(9, [], brokers(), quorum()) == []


@pytest.mark.parametrize(
    ("down", "drained", "step"),
    [
        ((), (3,), "next: `penstock drain 3 --undo`, or restart what is drained; wait until"),
        ((2,), (), "next: start node 2; wait until"),
        ((2,), (3,), "next: start node 2; `penstock drain 3 --undo`, or restart"),
        ((2,), (2,), "next: start node 2; wait until"),  # A start ends its drain.
        ((4,), (5,), "next: wait until"),  # They have no replica of it.
        ((), (), "next: wait until"),
    ],
)
def test_what_brings_the_others_back_is_said(
    down: tuple[int, ...], drained: tuple[int, ...], step: str
) -> None:
    standing = brokers(*down, drained=drained, count=5)
    everybody = [1, 2, 3] if {2, 3} & {*down, *drained} else [1, 2]
    reasons = why_not_roll(1, [partition(everybody)], standing, quorum(count=1))
    assert step in reasons[0]


def test_what_brings_controllers_back_is_said() -> None:
    (reason,) = why_not_roll(1, [], brokers(drained=(3,)), quorum())
    assert "next: `penstock drain 3 --undo`, or restart what is drained; wait until" in reason
    (reason,) = why_not_roll(1, [], brokers(drained=(3,)), quorum({}, 2))
    assert "next: start node 2; `penstock drain 3 --undo`" in reason
    (reason,) = why_not_roll(1, [], brokers(), quorum({2: CAUGHT_UP_ENTRIES + 1}))
    assert "next: wait until they have caught up" in reason


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


@given(nodes, standings, st.sets(nodes), st.lists(nodes, unique=True))
def test_what_may_be_stopped_leaves_every_partition_writable_that_was(
    node: int, partitions: list[PartitionStanding], down: set[int], drained: list[int]
) -> None:
    known = brokers(*down, drained=tuple(drained), count=5)
    allowed = not why_not_roll(node, partitions, known, QuorumStanding(()))
    before = drained[: drained.index(node)] if node in drained else drained

    def suffers(one: PartitionStanding) -> bool:
        left = {member for member in one.isr if member not in {*down, *before, node}}
        return node in one.isr and len(left) < max(1, one.min_isr)

    assert allowed == (node in down or not any(map(suffers, partitions)))


@given(standings, st.lists(nodes, unique=True, min_size=2))
def test_of_drained_nodes_one_at_a_time_takes_a_replica_away(
    partitions: list[PartitionStanding], drained: list[int]
) -> None:
    known = brokers(drained=tuple(drained), count=5)
    # Each of these may leave, one after the other and without any of them being back.
    leave = {node for node in drained if not why_not_roll(node, partitions, known, quorum(count=5))}
    for one in partitions:
        if leave & set(one.isr):
            assert len(set(one.isr) - leave) >= max(1, one.min_isr)
    assert len(leave) <= 2, "a majority of the controllers stays"
