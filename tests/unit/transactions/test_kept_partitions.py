"""Partitions that stay in the producer's next transaction (ADR 13), as the coordinator has them."""

from __future__ import annotations

import pytest

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import Mark, TransactionSettings
from penstock.broker.core.transaction_values import (
    KEPT_PAUSE_MS,
    LAST_EPOCH,
    Cause,
    Identity,
    State,
)
from penstock.v1 import transaction_records_pb2, transactions_pb2
from penstock.wire.errors import CorruptRecordError, ErrorCode
from tests.unit.transactions.transaction_harness import (
    ID,
    TIMEOUT_MS,
    B,
    Driver,
    attempt_id,
    code,
    identity_of,
    participant,
)

EMPTY = transactions_pb2.TRANSACTION_STATE_EMPTY
ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING
KEPT = transactions_pb2.TRANSACTION_STATE_KEPT
PREPARE_COMMIT = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT
PREPARE_ABORT = transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT
DEADLINE_MS = KEPT_PAUSE_MS + TIMEOUT_MS


def up(identity: Identity, by: int = 1) -> Identity:
    return Identity(identity.producer_id, identity.epoch + by)


def names(partitions: object) -> set[str]:
    return {f"{one.topic}-{one.partition}" for one in partitions}  # type: ignore[attr-defined]


def kept(*partitions: str, driver: Driver | None = None) -> tuple[Driver, Identity]:
    """A producer whose partitions were kept, and the identity of its next transaction."""
    d = driver or Driver()
    wanted = partitions or ("orders-0", "sales-1")
    answer = d.end(d.open(*wanted), commit=True, keep=wanted)
    assert answer.kept_ms == KEPT_PAUSE_MS
    return d, identity_of(answer)


def only_mark(d: Driver) -> Mark:
    (mark,) = d.marks
    return mark


# ---------------------------------------------------------------------- what is kept


def test_what_is_kept_is_of_this_transaction() -> None:
    d = Driver()
    identity = d.open("orders-0", "orders-1", "sales-1")
    answer = d.end(identity, commit=True, keep=("orders-1", "sales-1", "stock-0", "orders-7"))
    assert answer.kept_ms == KEPT_PAUSE_MS
    mark = only_mark(d)
    assert names(mark.partitions) == {"orders-0", "orders-1", "sales-1"}
    assert names(mark.kept) == {"orders-1", "sales-1"}


def test_an_abort_keeps_as_well() -> None:
    d = Driver()
    answer = d.end(d.open("orders-0"), commit=False, keep=("orders-0",))
    assert answer.kept_ms == KEPT_PAUSE_MS
    assert names(only_mark(d).kept) == {"orders-0"}


def test_nothing_is_kept_where_nothing_is_named_or_nothing_was_written() -> None:
    d = Driver()
    identity = d.open("orders-0")
    answer = d.end(identity, commit=True)
    assert (answer.kept_ms, only_mark(d).kept) == (0, frozenset())
    d.write_marks()
    assert d.end(up(identity), commit=True, keep=("orders-0",)).kept_ms == 0
    assert d.describe().state == EMPTY


def test_a_topic_that_is_gone_is_not_kept() -> None:
    d = Driver()
    identity = d.open("orders-0", "stock-0")
    d.remove_topic("stock")
    assert d.end(identity, commit=True, keep=("orders-0", "stock-0")).kept_ms == KEPT_PAUSE_MS
    assert names(only_mark(d).kept) == {"orders-0"}


def test_one_record_a_transaction_and_none_for_what_follows() -> None:
    d, identity = kept()
    written = len(d.log)
    for _ in range(5):
        d.write_marks()
        answer = d.end(identity, commit=True, keep=("orders-0", "sales-1"))
        assert answer.kept_ms == KEPT_PAUSE_MS
        identity = identity_of(answer)
        written += 1
        assert len(d.log) == written
        assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}


def test_what_is_not_kept_again_is_not_in_the_one_after() -> None:
    d, identity = kept("orders-0", "orders-1")
    d.write_marks()
    following = identity_of(d.end(identity, commit=True, keep=("orders-1",)))
    mark = only_mark(d)
    assert names(mark.partitions) == {"orders-0", "orders-1"}
    assert names(mark.kept) == {"orders-1"}
    d.write_marks()
    d.end(following, commit=True)
    assert names(only_mark(d).partitions) == {"orders-1"}


# ---------------------------------------------------------------------- asking for it


def test_who_asks_for_what_is_kept_is_answered_at_once_without_a_record() -> None:
    d, identity = kept()
    written = len(d.log)
    assert code(d.add(identity, "orders-0")) is None
    assert code(d.add(identity, "sales-1", "orders-0")) is None
    assert len(d.log) == written
    d.write_marks()
    assert code(d.add(identity, "orders-0")) is None
    assert len(d.log) == written


def test_no_answer_before_the_decision_is_committed() -> None:
    d = Driver()
    identity = d.open("orders-0")
    d.commits_at_once = False
    assert d.end(identity, commit=True, keep=("orders-0",)) is None
    assert d.add(up(identity), "orders-0") is None
    assert not d.marks
    d.fail_writes()
    d.commits_at_once = True
    assert code(d.add(up(identity), "orders-0")) is ErrorCode.INVALID_PRODUCER_EPOCH


@pytest.mark.parametrize("asked", [("orders-1",), ("orders-0", "orders-1")])
def test_who_asks_for_more_waits_for_the_marks(asked: tuple[str, ...]) -> None:
    d, identity = kept()
    assert d.add(identity, *asked) is None
    d.write_marks()
    assert code(d.answer()) is None
    assert names(d.describe().partitions) == {"orders-0", "sales-1", "orders-1"}
    assert d.describe().state == ONGOING


def test_who_asks_for_what_the_transaction_before_had_and_was_not_kept_waits() -> None:
    d = Driver()
    identity = d.open("orders-0", "orders-1")
    d.end(identity, commit=True, keep=("orders-0",))
    assert d.add(up(identity), "orders-1") is None
    assert code(d.add(up(identity), "orders-0")) is None
    d.write_marks()
    assert names(d.describe().partitions) == {"orders-0", "orders-1"}


def test_the_epoch_before_is_not_let_in() -> None:
    d, identity = kept()
    assert code(d.add(up(identity, -1), "orders-0")) is ErrorCode.INVALID_TXN_STATE
    assert code(d.add(up(identity, 1), "orders-0")) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_the_end_of_the_next_one_waits_for_the_marks() -> None:
    d, identity = kept()
    assert d.end(identity, commit=True) is None
    d.mark_there(d.marks[0], "orders-0")
    assert d.answer() is None
    d.write_marks()
    assert identity_of(d.answer()) == up(identity)
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}


# ---------------------------------------------------------------------- asking again


def test_who_asks_again_is_told_how_long_it_is_still_kept() -> None:
    d, identity = kept()
    half_ms = TIMEOUT_MS // 2
    for passed_ms, left_ms in (
        (300, KEPT_PAUSE_MS - 300),
        (KEPT_PAUSE_MS, 1),
        (half_ms, 1),
    ):
        d.pass_ms(passed_ms)
        answer = d.end(up(identity, -1), commit=True)
        assert (identity_of(answer), answer.kept_ms) == (identity, left_ms)
        d.write_marks()
        d.load()


def test_who_asks_again_is_told_that_it_is_not_kept_any_more() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(DEADLINE_MS)
    answer = d.end(up(identity, -1), commit=True)
    assert (identity_of(answer), answer.kept_ms) == (up(identity), 0)


# ---------------------------------------------------------------------- it counts as open


def test_what_is_kept_is_aborted_after_the_pause_and_the_timeout() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(DEADLINE_MS - 1)
    assert d.describe().state == ONGOING
    d.pass_ms(1)
    mark = only_mark(d)
    assert (mark.producer_epoch, mark.commit) == (identity.epoch + 1, False)
    assert names(mark.partitions) == {"orders-0", "sales-1"}
    assert not mark.kept
    d.write_marks()
    assert d.describe().state == EMPTY


def test_of_what_lapsed_the_end_is_told() -> None:
    d, _ = kept()
    d.write_marks()
    assert d.last_end() == (Cause.PRODUCER, True)
    d.pass_ms(DEADLINE_MS)
    assert d.last_end() == (Cause.COORDINATOR, False)
    d.write_marks()
    assert d.last_end() == (Cause.COORDINATOR, False)


def test_it_is_told_since_when_something_is_kept() -> None:
    d, _ = kept()
    d.pass_ms(20)
    d.write_marks()
    d.pass_ms(10)
    assert d.since() == (KEPT, 30)


def test_the_deadline_stands_over_a_reload_and_after_it_was_noted() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(TransactionSettings().note_after_ms)
    noted = d.log[-1]
    assert noted.value is not None
    d.crash()
    assert not d.marks, "it was noted that they are there"
    d.pass_ms(DEADLINE_MS - TransactionSettings().note_after_ms - 1)
    assert d.describe().state == ONGOING
    d.pass_ms(1)
    assert d.describe().state == PREPARE_ABORT
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}
    assert only_mark(d).producer_epoch == identity.epoch + 1


def test_marks_that_take_long_do_not_move_the_deadline() -> None:
    d, _ = kept()
    d.pass_ms(DEADLINE_MS - 1)
    assert d.describe().state == PREPARE_COMMIT
    d.pass_ms(1)
    assert d.describe().state == PREPARE_ABORT


def test_whoever_begins_within_the_pause_has_the_whole_timeout() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(KEPT_PAUSE_MS - 10)
    assert code(d.add(identity, "stock-0")) is None
    d.pass_ms(TIMEOUT_MS - 1)
    assert d.describe().state == ONGOING
    d.pass_ms(1)
    assert d.describe().state == PREPARE_ABORT


def test_adding_more_does_not_move_the_deadline() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(DEADLINE_MS - 10)
    assert code(d.add(identity, "stock-0")) is None
    d.pass_ms(9)
    assert d.describe().state == ONGOING
    d.pass_ms(1)
    assert d.describe().state == PREPARE_ABORT
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1", "stock-0"}


@pytest.mark.parametrize("marked", [False, True])
def test_taking_the_id_over_ends_it_everywhere_before_it_is_answered(marked: bool) -> None:
    d, identity = kept()
    if marked:
        d.write_marks()
    assert d.init(B) is None
    waits = d.last_request
    if not marked:
        d.write_marks()
        assert d.answer(waits) is None
    mark = only_mark(d)
    assert (mark.producer_epoch, mark.commit) == (identity.epoch + 1, False)
    assert names(mark.partitions) == {"orders-0", "sales-1"}
    d.write_marks()
    assert identity_of(d.answer(waits)) == up(identity, 2)
    assert code(d.end(identity, commit=True)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(identity, "orders-0")) is ErrorCode.PRODUCER_FENCED


def test_a_person_can_abort_it() -> None:
    d, identity = kept()
    d.write_marks()
    assert code(d.abort()) is None
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}
    assert code(d.add(identity, "orders-0")) is ErrorCode.TRANSACTION_ABORTABLE


def test_a_producer_that_has_paused_refreshes_its_identity_by_an_abort() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(2 * KEPT_PAUSE_MS)
    answer = d.end(identity, commit=False)
    assert (identity_of(answer), answer.kept_ms) == (up(identity), 0)
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}
    d.write_marks()
    assert d.describe().state == EMPTY


def test_marks_in_a_deleted_topic_are_not_waited_for() -> None:
    d, identity = kept("orders-0", "stock-0")
    d.remove_topic("stock")
    d.write_marks()
    d.pass_ms(DEADLINE_MS)
    assert names(only_mark(d).partitions) == {"orders-0"}
    d.write_marks()
    assert identity_of(d.end(identity, commit=False)) == up(identity)


def test_all_that_is_kept_is_deleted() -> None:
    d, identity = kept("stock-0")
    d.remove_topic("stock")
    assert d.describe().state == KEPT
    d.pass_ms(DEADLINE_MS)
    assert d.describe().state == EMPTY
    assert identity_of(d.end(identity, commit=False)) == up(identity)


# ---------------------------------------------------------------------- one that lapsed


def test_the_outcome_before_one_that_lapsed_is_still_told() -> None:
    """A producer that stood still may ask how its last transaction ended, and not know of more."""
    d, identity = kept()
    d.write_marks()
    d.pass_ms(DEADLINE_MS)
    for _ in range(2):
        before = up(identity, -1)
        assert identity_of(d.end(before, commit=True)) == up(identity)
        assert code(d.end(before, commit=False)) is ErrorCode.INVALID_TXN_STATE
        assert code(d.end(identity, commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
        assert identity_of(d.end(identity, commit=False)) == up(identity)
        assert code(d.add(identity, "orders-0")) is ErrorCode.TRANSACTION_ABORTABLE
        d.crash()
        d.write_marks()


def test_after_one_that_lapsed_all_goes_on() -> None:
    d, identity = kept()
    d.write_marks()
    d.pass_ms(DEADLINE_MS)
    d.write_marks()
    assert code(d.add(up(identity), "orders-0")) is None
    answer = d.end(up(identity), commit=True, keep=("orders-0",))
    assert (identity_of(answer), answer.kept_ms) == (up(identity, 2), KEPT_PAUSE_MS)
    assert code(d.end(identity, commit=False)) is ErrorCode.PRODUCER_FENCED
    d.write_marks()
    assert d.shard.ledger.ids[ID].lapsed is False


def test_one_that_was_asked_for_does_not_lapse() -> None:
    d, identity = kept()
    d.write_marks()
    d.add(identity, "stock-0")
    d.pass_ms(TIMEOUT_MS)
    value = d.shard.ledger.ids[ID]
    assert (value.last, value.last_cause, value.lapsed) == (identity, Cause.COORDINATOR, False)


def test_an_id_is_forgotten_once_what_was_kept_has_lapsed() -> None:
    d = Driver(TransactionSettings(id_expiration_ms=100))
    kept(driver=d)
    d.write_marks()
    d.pass_ms(DEADLINE_MS)
    d.write_marks()
    d.pass_ms(100_000)
    assert d.describe().error.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


# ---------------------------------------------------------------------- loading


def test_a_coordinator_that_loads_says_again_what_is_kept() -> None:
    d, identity = kept()
    first = only_mark(d)
    d.write_marks()
    d.crash()
    assert d.marks == [first]
    assert code(d.add(identity, "orders-0")) is None
    d.write_marks()
    assert d.describe().state == KEPT
    assert identity_of(d.end(identity, commit=True)) == up(identity)


def test_a_mark_that_is_sent_again_says_nothing_of_a_topic_that_is_gone() -> None:
    d, _ = kept("orders-0", "stock-0")
    d.remove_topic("stock")
    d.marks.clear()
    d.crash()
    mark = only_mark(d)
    assert names(mark.partitions) == names(mark.kept) == {"orders-0"}


def test_what_could_not_be_written_leaves_it_kept() -> None:
    d, identity = kept()
    d.write_marks()
    d.commits_at_once = False
    d.end(identity, commit=True)
    d.fail_writes()
    d.commits_at_once = True
    assert code(d.add(identity, "orders-0")) is None
    d.write_marks()
    assert d.describe().state == KEPT
    d.pass_ms(DEADLINE_MS)
    assert names(only_mark(d).partitions) == {"orders-0", "sales-1"}


@pytest.mark.parametrize("at", [-1, 1])
def test_a_record_that_keeps_what_it_does_not_have(at: int) -> None:
    d, _ = kept("orders-0")
    change = d.log[-1]
    assert change.value is not None
    value = transaction_records_pb2.TransactionValue.FromString(change.value)
    value.kept[:] = [at]
    with pytest.raises(CorruptRecordError, match="are kept"):
        transaction_codec.decode(change.key, value.SerializeToString())


def test_the_record_of_what_is_kept_is_an_open_transaction() -> None:
    d, _ = kept()
    decided_ms = d.wall_ms
    d.write_marks()
    d.pass_ms(TransactionSettings().note_after_ms)
    value = d.shard.ledger.ids[ID]
    assert (value.state, value.start_ms) == (State.ONGOING, decided_ms)
    assert value.kept == value.partitions == frozenset(map(participant, ("orders-0", "sales-1")))


# ---------------------------------------------------------------------- where nothing is kept


def at_epoch(epoch: int) -> tuple[Driver, Identity]:
    d = Driver()
    identity = identity_of(d.init())
    while identity.epoch < epoch:
        identity = identity_of(d.end(identity, commit=True))
    assert code(d.add(identity, "orders-0")) is None
    return d, identity


def test_nothing_is_kept_for_another_producer_id() -> None:
    d, identity = at_epoch(LAST_EPOCH - 1)
    answer = d.end(identity, commit=True, keep=("orders-0",))
    assert answer.kept_ms == 0
    assert identity_of(answer).producer_id != identity.producer_id
    assert not only_mark(d).kept


def test_what_lapses_at_the_end_of_the_epochs_takes_a_new_producer_id() -> None:
    d, identity = at_epoch(LAST_EPOCH - 2)
    following = identity_of(d.end(identity, commit=True, keep=("orders-0",)))
    d.write_marks()
    d.pass_ms(DEADLINE_MS + TransactionSettings().retry_ms)
    assert only_mark(d).producer_epoch == LAST_EPOCH
    after = identity_of(d.end(identity, commit=True))
    assert after == identity_of(d.end(following, commit=False)) == (identity.producer_id + 1, 0)
    d.write_marks()
    assert code(d.add(after, "orders-0")) is None
    assert identity_of(d.end(identity, commit=True)) == after


def test_nothing_is_kept_for_attempts() -> None:
    d = Driver()
    begun = identity_of(d.begin(0))
    d.add(begun, "orders-0", name=attempt_id(0))
    answer = d.end(begun, commit=False, name=attempt_id(0), keep=("orders-0",))
    assert answer.kept_ms == 0
    assert not only_mark(d).kept


# ---------------------------------------------------------------------- telling


def test_what_is_only_kept_is_no_transaction_that_goes_on_for_long() -> None:
    d, identity = kept()
    decided_ms = d.wall_ms
    d.write_marks()
    d.pass_ms(2 * KEPT_PAUSE_MS - 1)
    assert d.list() == {ID: KEPT}
    assert d.list(KEPT) == {ID: KEPT}
    assert d.list(ONGOING, EMPTY) == {}
    assert d.list(min_duration_ms=1) == {}
    described = d.describe()
    assert (described.state, described.start_ms) == (KEPT, decided_ms)
    assert names(described.partitions) == {"orders-0", "sales-1"}
    assert described.producer_epoch == identity.epoch
    d.add(identity, "stock-0")
    assert d.list(min_duration_ms=1) == {ID: ONGOING}


def test_what_was_not_given_up_in_time_goes_on() -> None:
    """Its producer writes, and perhaps holds readers back, or is gone."""
    d, _ = kept()
    decided_ms = d.wall_ms
    d.write_marks()
    d.pass_ms(2 * KEPT_PAUSE_MS)
    assert d.list(ONGOING, min_duration_ms=2 * KEPT_PAUSE_MS) == {ID: ONGOING}
    assert d.list(KEPT) == {}
    assert (d.describe().state, d.describe().start_ms) == (ONGOING, decided_ms)


def test_while_marks_are_on_their_way_what_is_kept_is_not_said_to_hang() -> None:
    d = Driver()
    d.end(d.open("orders-0", "orders-1", "sales-1"), commit=True, keep=("orders-0",))
    d.mark_there(d.marks[0], "orders-0", "orders-1")
    described = d.describe()
    assert described.state == PREPARE_COMMIT
    assert names(described.partitions) == {"orders-0", "sales-1"}
