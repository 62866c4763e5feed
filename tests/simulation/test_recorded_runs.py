"""What clients of simulated clusters see is written down, and judged by the harness's checkers."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from penstock.chaos.history import History, Type
from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.judging import judge_recording
from penstock.chaos.simulator.recording import Recording
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.simulation import Report, Simulation, shrink
from penstock.chaos.simulator.transactions.history import (
    Acknowledged,
    Attempt,
    Began,
    Consumed,
    EndAsked,
    Ended,
    GroupAsked,
    GroupTold,
    Identity,
    Sent,
)
from penstock.chaos.simulator.transactions.told import Told
from penstock.chaos.verdict import Valid
from penstock.client.core.subscription import Rebalance
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

TOPIC_ID = TopicId(b"topic-of-sixteen")
KEY = TopicIdPartition(TOPIC_ID, 0)
OTHER = TopicIdPartition(TOPIC_ID, 1)
TRANSACTIONS = {"transactions": True}


def recording(*, kept: bool = True) -> Recording:
    made = Recording(Scheduler(Random(0)), kept=kept)
    made.topics_are([(TOPIC_ID, "orders")])
    return made


def events(history: History) -> list[tuple[str, str, str]]:
    return [(one.p, one.type.value, one.f) for one in history.events]


def verdicts(made: Recording, *, transactions: bool = False) -> Mapping[str, Valid]:
    judged = judge_recording(made, without=(), expiring=(), transactions=transactions)
    return {verdict.checker: verdict.valid for verdict in judged}


# --- what is written down


def test_appends_that_are_under_way_together_are_processes_of_their_own() -> None:
    made = recording()
    first = made.append("producer-1.7", KEY, [b"a", b"b"], process="producer-1")
    second = made.append("producer-1.7", KEY, [b"c"], process="producer-1", acks="1")
    second.acknowledged(2)
    first.acknowledged(0)
    history = made.history()
    assert events(history) == [
        ("producer-1", "invoke", "append"),
        ("producer-1.1", "invoke", "append"),
        ("producer-1.1", "ok", "append"),
        ("producer-1", "ok", "append"),
    ]
    one, other = history.operations
    assert one.invoked.value == {
        "topic": "orders",
        "partition": 0,
        "producer": "producer-1.7",
        "acks": "all",
        "first": 0,
        "count": 2,
    }
    assert (other.invoked.value["first"], other.invoked.value["acks"]) == (2, "1")
    assert (one.value["runs"], other.value["runs"]) == ([[0, 2, 0]], [[2, 1, 2]])


def test_what_is_read_is_told_in_runs_by_producer_and_number() -> None:
    made = recording()
    made.append("one", KEY, [b"a", b"b"], process="one").acknowledged(0)
    made.append("two", KEY, [b"c"], process="two").acknowledged(2)
    poll = made.poll("reader", KEY, 0, committed=False)
    poll.given([(0, b"a"), (1, b"b"), (2, b"c"), (3, b"of nobody")], 4, 4)
    made.poll("reader", KEY, 4, committed=True).refused("NOT_LEADER: refused")
    read, refused = made.history().of("poll")
    assert read.invoked.value["positions"] == {"orders-0": 0}
    assert read.value["runs"] == [
        ["orders-0", 0, "one", 0, 2],
        ["orders-0", 2, "two", 0, 1],
        ["orders-0", 3, "?nobody", 0, 1],
    ]
    assert refused.type is Type.FAIL
    assert refused.invoked.value["isolation"] == "read_committed"
    assert verdicts(made)["phantom"] is Valid.FALSE


def test_a_topic_that_comes_again_under_its_name_has_another_one() -> None:
    made = recording()
    made.topics_are([])
    again = TopicId(b"another-sixteen!")
    made.topics_are([(again, "orders")])
    assert made.name_of(TopicIdPartition(again, 0)) == "orders.2-0"
    assert [one.invoked.value for one in made.history().of("delete")] == [{"topic": "orders"}]


def test_partitions_may_be_left_out() -> None:
    made = recording()
    made.append("one", KEY, [b"a"], process="one").acknowledged(0)
    made.append("one", OTHER, [b"b"], process="one").acknowledged(0)
    assert [one.value["runs"] for one in made.history({KEY}).operations] == [[[0, 1, 0]]]
    assert len(made.history().operations) == 2


def test_what_is_not_kept_is_not_there() -> None:
    made = recording(kept=False)
    made.append("one", KEY, [b"a"], process="one").acknowledged(0)
    made.topics_are([])
    assert not made.history().events


# --- transactions


def positions(
    member: str, epoch: int, key: TopicIdPartition, offset: int
) -> groups_pb2.CommitOffsetsRequest:
    commit = groups_pb2.CommitOffsetsRequest(
        group_id="workers", member_id=member, member_epoch=epoch
    )
    partition = common_pb2.TopicPartition(topic="orders", partition=key.partition)
    commit.offsets.add(partition=partition, offset=offset)
    return commit


def begun(told: Told, txn: int, attempt: Attempt | None = None) -> None:
    told.note(Began(txn, "transfers-0", Identity(1, txn), attempt))


def test_a_transaction_is_told_with_what_it_reads_writes_and_moves() -> None:
    made = recording()
    told = Told(made)
    made.append("one", OTHER, [b"read"], process="one").acknowledged(5)
    begun(told, 1)
    told.note(Consumed(1, (b"read",), "workers", ((OTHER, 5),)))
    told.sends_positions(1, positions("m1", 4, OTHER, 6)).ok()
    told.note(Sent(1, KEY, (b"a",), (-3,)))
    told.note(Sent(1, OTHER, (b"b",), (3,)))
    told.note(Acknowledged(1, (b"a",), 7))
    told.note(EndAsked(1, commit=True))
    told.note(EndAsked(1, commit=True))  # Asked again: it is the same.
    told.note(Ended(1, commit=True))
    told.note(Ended(1, commit=True))
    history = made.history()
    whole = [(one.invoked.f, one.type.value) for one in history.operations[1:]]
    assert whole == [
        ("begin", "ok"),
        ("read-from", "ok"),
        ("send-offsets", "ok"),
        ("append", "ok"),
        ("append", "info"),
        ("transfer", "ok"),
        ("commit", "ok"),
    ]
    [read] = history.of("read-from")
    assert read.invoked.value["runs"] == [["orders-1", 5, "one", 0, 1]]
    [moved] = history.of("send-offsets")
    assert moved.invoked.value == {
        "txn": "txn-1",
        "group": "workers",
        "member": "m1",
        "generation": 4,
        "offsets": {"orders-1": 6},
    }
    [transfer] = history.of("transfer")
    assert transfer.invoked.value == {"txn": "txn-1", "amounts": [-3, 3]}


def test_a_commit_fails_where_its_producer_is_told_that_it_is_aborted() -> None:
    made = recording()
    told = Told(made)
    begun(told, 1)
    told.note(EndAsked(1, commit=True))
    told.note(Ended(1, commit=False))
    assert [(one.invoked.f, one.type.value) for one in made.history().of("commit", "abort")] == [
        ("commit", "fail"),
        ("abort", "ok"),
    ]


def test_an_attempt_is_committed_by_its_group() -> None:
    made = recording()
    told = Told(made)
    begun(told, 1, Attempt("winner", "group-0", 1, 0))
    begun(told, 2, Attempt("loser", "group-0", 1, 0))
    told.note(GroupAsked("group-0", 1, ("winner",)))
    [asked] = made.history().of("commit")
    assert (asked.invoked.value["txn"], asked.type) == ("txn-1", Type.INFO)
    told.note(GroupTold("group-0", 1, ("winner",), is_replay=False))
    [committed] = made.history().of("commit")
    assert committed.type is Type.OK


def test_a_member_that_acts_after_another_one_got_its_partition_is_a_zombie() -> None:
    made = recording()
    told = Told(made)
    its = (TopicPartition("orders", 0),)
    told.rebalanced("workers", "m1", 4, Rebalance(1, assigned=its))
    begun(told, 1)
    told.sends_positions(1, positions("m1", 4, KEY, 6)).ok()
    assert verdicts(made, transactions=True)["zombie-commit"] is Valid.TRUE
    told.rebalanced("workers", "m2", 5, Rebalance(1, assigned=its))
    told.sends_positions(1, positions("m1", 4, KEY, 7))  # Of which nobody knows.
    assert verdicts(made, transactions=True)["zombie-commit"] is Valid.TRUE
    told.sends_positions(1, positions("m1", 4, KEY, 8)).ok()
    assert verdicts(made, transactions=True)["zombie-commit"] is Valid.FALSE
    assert verdicts(made, transactions=True)["group-exclusive"] is Valid.TRUE
    told.rebalanced("workers", "m1", 5, Rebalance(2, lost=its))
    told.rebalanced("workers", "m3", 5, Rebalance(1, assigned=its))
    # A group that never got an offset may have been forgotten, and its generations begun anew.
    assert verdicts(made, transactions=True)["group-exclusive"] is Valid.TRUE
    told.note(EndAsked(1, commit=True))
    told.note(Ended(1, commit=True))
    assert verdicts(made, transactions=True)["group-exclusive"] is Valid.FALSE


# --- runs


@pytest.mark.simulation
@pytest.mark.parametrize(("seed", "given"), [(1, {}), (0, TRANSACTIONS)])
def test_a_clean_seed_is_judged_true_by_what_clients_saw(
    seed: int, given: Mapping[str, object]
) -> None:
    plain = Simulation(seed, given=given).run()
    report = Simulation(seed, given=given, recorded=True).run()
    assert report.violation is None, str(report)
    assert report.judged is Valid.TRUE, report.verdicts
    assert {"lost-write", "duplicate"} <= {verdict.checker for verdict in report.verdicts}
    # To write down what happens changes nothing.
    assert (report.steps, report.virtual_ms) == (plain.steps, plain.virtual_ms)
    assert report.story == plain.story


def flagged(report: Report) -> set[str]:
    return {verdict.checker for verdict in report.flagged}


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("name", "checkers"),
    [
        ("aborted-transactions-are-left-out", {"aborted-read"}),
        ("open-transactions-are-served", {"aborted-read", "precommitted-read"}),
    ],
)
def test_clients_see_what_a_known_bug_does(name: str, checkers: set[str]) -> None:
    bug = BUGS[name]
    with bug.planted():
        report = Simulation(0, bug.faults, only=bug.shown_by, given=bug.given, recorded=True).run()
    assert report.violation is not None
    assert checkers <= flagged(report), str(report)


@pytest.mark.simulation
def test_what_clients_see_is_shrunk_to_the_fewest_faults() -> None:
    bug = BUGS["retries-are-appended-again"]
    given = {**bug.given, "hands_over": True}
    with bug.planted():
        report = Simulation(0, given=given, recorded=True).run()
        assert "duplicate" in flagged(report), str(report)
        smaller = shrink(report, runs=5)
    assert "duplicate" in flagged(smaller)
    assert len(smaller.faults) < len(report.faults)
    assert "duplicate" in str(smaller)
