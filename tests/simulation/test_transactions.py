"""Clusters whose clients write transactions, under faults; and what the checkers of them read."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.transaction_codec import group_key, group_value, id_key, id_value
from penstock.broker.core.transaction_values import (
    NOBODY,
    Cause,
    GroupCommit,
    Participant,
    State,
    Transaction,
    Winner,
)
from penstock.broker.core.transaction_values import Identity as CoreIdentity
from penstock.chaos.simulator.checkers import Violation
from penstock.chaos.simulator.history import CommittedLog
from penstock.chaos.simulator.simulation import Simulation
from penstock.chaos.simulator.transactions.anomalies import last_stable_offset
from penstock.chaos.simulator.transactions.history import (
    Decided,
    GroupDecided,
    History,
    Identity,
    Kind,
    Taken,
)
from penstock.chaos.simulator.transactions.observer import Observer, logged_batch
from penstock.chaos.simulator.transactions.reading import committed_records
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.markers import MarkerType, encode_marker
from penstock.wire.records import RecordData, encode_batch
from tests.simulation.test_replay import told

SEEDS = 24
SEEDS_A_TEST = 8
KEY = TopicIdPartition(TopicId(b"t" * 16), 0)
STATE = TopicIdPartition(TopicId(b"s" * 16), 0)


@pytest.mark.simulation
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_no_promise_is_broken(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_A_TEST):
        report = Simulation(seed, given={"transactions": True}).run()
        assert report.violation is None, str(report)
        assert report.read > 0, str(report)
        totals += report.totals
    for figure in (
        "transactions committed",
        "transactions aborted",
        "transactions aborted against a wish",
        "attempts committed",
        "attempts aborted",
        "outcomes never told",
        "group commits told",
        "positions committed",
        "positions aborted",
        "positions told that are stable",
        "decisions that kept",
        "kept and lapsed",
    ):
        assert totals[figure] > 0, f"{figure}: a run without them shows nothing; {totals}"


@pytest.mark.simulation
def test_without_faults_of_brokers_most_is_committed() -> None:
    report = Simulation(3, faults=[], given={"transactions": True}).run()
    assert report.violation is None, str(report)
    totals = report.totals
    assert totals["transactions committed"] > 60
    assert totals["group commits"] > 3
    assert totals["transactions undecided"] == 0


@pytest.mark.simulation
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    assert told(5, "1", "--transactions") == told(5, "2", "--transactions")


# --- what the checkers read ----------------------------------------------------------------------


def data(producer_id: int, offset: int, *values: bytes) -> bytes:
    return encode_batch(
        [RecordData(0, None, value) for value in values],
        base_offset=offset,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=offset,
        is_transactional=True,
    )


def mark(producer_id: int, offset: int, kind: MarkerType) -> bytes:
    return encode_marker(
        kind,
        producer_id=producer_id,
        producer_epoch=1,
        coordinator_epoch=0,
        timestamp_ms=0,
        base_offset=offset,
    )


def plain(offset: int, value: bytes) -> bytes:
    return encode_batch([RecordData(0, None, value)], base_offset=offset)


def committed(*batches: bytes) -> CommittedLog:
    log = CommittedLog()
    log.batches.extend(batches)
    return log


def observer(key: TopicIdPartition, *batches: bytes) -> Observer:
    logs = {key: committed(*batches)}
    seen = Observer(History(), logs.__getitem__, lambda which: which == STATE)
    seen.look(key)
    return seen


def test_batches_are_read_for_what_they_are() -> None:
    seen = observer(
        KEY,
        data(7, 0, b"a", b"b"),
        plain(2, b"c"),
        mark(7, 3, MarkerType.COMMIT),
        mark(8, 4, MarkerType.ABORT),
    )
    kinds = [(batch.kind, batch.identity.producer_id, batch.values) for batch in seen.logs[KEY]]
    assert kinds == [
        (Kind.DATA, 7, (b"a", b"b")),
        (Kind.PLAIN, -1, (b"c",)),
        (Kind.COMMIT, 7, ()),
        (Kind.ABORT, 8, ()),
    ]


def test_records_of_aborted_transactions_and_marks_are_left_out() -> None:
    records = b"".join(
        (
            data(7, 0, b"a"),
            data(8, 1, b"b"),
            plain(2, b"c"),
            mark(7, 3, MarkerType.ABORT),
            data(7, 4, b"d"),
            mark(8, 5, MarkerType.COMMIT),
            mark(7, 6, MarkerType.COMMIT),
        )
    )
    left = [record.value for record in committed_records(records, [(7, 0)])]
    assert left == [b"b", b"c", b"d"]
    assert [record.value for record in committed_records(records, [])] == [b"a", b"b", b"c", b"d"]


def state(**changes: object) -> bytes:
    value = Transaction(
        **{
            "state": State.ONGOING,
            "producer_id": 7,
            "epoch": 4,
            "timeout_ms": 1,
            "updated_ms": 1,
            "instance_id": b"i" * 16,
            "last": NOBODY,
            "start_ms": 1,
            "partitions": frozenset([Participant(KEY.topic_id, 0, "t")]),
            **changes,
        }  # type: ignore[arg-type]
    )
    return encode_batch([RecordData(0, id_key("t"), id_value(value))])


def test_decisions_are_read_from_what_coordinators_write() -> None:
    decided = state(
        state=State.PREPARE_COMMIT,
        epoch=5,
        last=CoreIdentity(7, 4),
        last_committed=True,
        last_cause=Cause.PRODUCER,
    )
    ended = state(
        state=State.EMPTY,
        epoch=6,
        last=CoreIdentity(7, 5),
        last_committed=False,
        last_cause=Cause.PRODUCER,
        partitions=frozenset(),
    )
    commit = GroupCommit(3, (Winner(1, 2, 7),), 1)
    group = encode_batch([RecordData(0, group_key("g"), group_value(commit))])
    forgotten = encode_batch([RecordData(0, id_key("t"), None)])
    seen = observer(STATE, state(), decided, ended, group, forgotten)
    assert seen.history.events == [
        Taken("t", b"i" * 16),
        Decided(Identity(7, 4), True),
        Decided(Identity(7, 4), True),
        Decided(Identity(7, 5), False),
        GroupDecided("g", 3, ("7@__attempt/3/1/2/g",)),
    ]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("dcap")), max_size=20))
def test_the_last_stable_offset_is_that_of_the_definition(steps: list[tuple[int, str]]) -> None:
    batches = [
        data(producer_id, offset, b"%d" % offset)
        if what == "d"
        else plain(offset, b"%d" % offset)
        if what == "p"
        else mark(producer_id, offset, MarkerType.COMMIT if what == "c" else MarkerType.ABORT)
        for offset, (producer_id, what) in enumerate(steps)
    ]
    seen = observer(KEY, *batches)
    log = [logged_batch(batch) for batch in batches]
    for high_watermark in range(len(batches) + 1):
        stable = last_stable_offset(log, high_watermark)
        seen.check_stable(KEY, high_watermark, stable, "a leader has")
        if log:
            with pytest.raises(Violation, match="a transaction is open there from"):
                seen.check_stable(KEY, high_watermark, stable + 1, "a leader has")


def test_a_last_stable_offset_that_goes_back() -> None:
    seen = observer(KEY, plain(0, b"a"), plain(1, b"b"))
    seen.check_leader(KEY, 3, 2, 2)
    seen.check_leader(KEY, 4, 1, 1)
    with pytest.raises(Violation, match=r"in leader epoch 3 .* from 2 back to 1"):
        seen.check_leader(KEY, 3, 2, 1)
