"""Transactional ids: identities, epochs, ends, timeouts, marks."""

from __future__ import annotations

import pytest

from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.core.transaction_values import LAST_EPOCH, Identity, State
from penstock.v1 import transactions_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.transactions.transaction_harness import (
    ID,
    TIMEOUT_MS,
    WAIT_MS,
    A,
    B,
    C,
    Driver,
    code,
    identity_of,
    participant,
)

EMPTY = transactions_pb2.TRANSACTION_STATE_EMPTY
ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING
PREPARE_COMMIT = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT
PREPARE_ABORT = transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT


def up(identity: Identity, by: int = 1) -> Identity:
    return Identity(identity.producer_id, identity.epoch + by)


def state(driver: Driver, name: str = ID) -> int:
    return int(driver.describe(name).state)


# ---------------------------------------------------------------------- identities


def test_the_first_identity_is_a_fresh_producer_id() -> None:
    d = Driver()
    assert identity_of(d.init()) == (101, 0)
    assert identity_of(d.init(name="another")) == (102, 0)
    assert state(d) == EMPTY


def test_a_producer_that_asks_again_is_given_the_same_identity() -> None:
    d = Driver()
    given = identity_of(d.init(A))
    assert identity_of(d.init(A)) == given
    d.add(given, "orders-0")
    written = len(d.log)
    assert identity_of(d.init(A)) == given
    assert state(d) == ONGOING, "a copy of its request that comes late ends nothing"
    assert len(d.log) == written


def test_a_request_that_comes_after_its_producer_ended_something_changes_nothing() -> None:
    d = Driver()
    identity = d.open()
    after = identity_of(d.end(identity, commit=True))
    d.write_marks()
    written = len(d.log)
    assert code(d.init(A)) is ErrorCode.PRODUCER_FENCED
    assert len(d.log) == written
    assert code(d.add(after, "orders-0")) is None


def test_another_producer_is_given_a_higher_epoch_and_fences_the_first() -> None:
    d = Driver()
    first = identity_of(d.init(A))
    second = identity_of(d.init(B))
    assert second == up(first)
    assert code(d.add(first, "orders-0")) is ErrorCode.PRODUCER_FENCED
    assert code(d.end(first, commit=True)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(second, "orders-0")) is None


def test_a_late_copy_of_a_request_does_not_take_the_id_back() -> None:
    d = Driver()
    identity_of(d.init(A))
    second = identity_of(d.init(B))
    d.add(second, "orders-0")
    written = len(d.log)
    assert code(d.init(A)) is ErrorCode.PRODUCER_FENCED
    d.crash()
    assert code(d.init(A)) is ErrorCode.PRODUCER_FENCED, "whoever coordinates"
    assert len(d.log) == written
    third = identity_of(d.end(second, commit=True))
    d.write_marks()
    assert code(d.init(A)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(third, "orders-0")) is None


def test_what_is_taken_back_of_one_id_is_nothing_of_another() -> None:
    d = Driver()
    one, other = d.open(name="one"), d.open(name="other")
    d.commits_at_once = False
    d.end(one, commit=True, name="one")
    of_one = d.last_request
    d.end(other, commit=True, name="other")
    of_other = d.last_request
    d.fail_writes("one")
    assert state(d, "one") == ONGOING
    assert d.shard.ledger.ids["other"].state is State.PREPARE_COMMIT
    d.commit()
    assert identity_of(d.answer(of_other)) == up(other)
    assert of_one not in d.answers
    d.pass_ms(5_000)
    assert [mark.transactional_id for mark in d.marks] == ["other"], "once"
    d.commits_at_once = True
    assert identity_of(d.end(one, commit=True, name="one")) == up(one)
    assert [mark.transactional_id for mark in d.marks] == ["other", "one"]


def test_five_instances_before_the_last_are_remembered() -> None:
    d = Driver()
    instances = [bytes([number]) * 16 for number in range(7)]
    for instance in instances[:6]:
        identity_of(d.init(instance))
    for instance in instances[:5]:
        assert code(d.init(instance)) is ErrorCode.PRODUCER_FENCED
    identity_of(d.init(instances[6]))
    assert code(d.init(instances[1])) is ErrorCode.PRODUCER_FENCED
    assert code(d.init(instances[0])) is None, "as a process that starts"


def test_init_aborts_what_is_open_and_waits_for_its_marks() -> None:
    d = Driver()
    first = d.open("orders-0", "orders-1")
    assert d.init(B) is None, "its answer waits"
    request = d.last_request
    (mark,) = d.marks
    assert (mark.producer_id, mark.producer_epoch, mark.commit) == (*up(first), False)
    assert mark.partitions == {participant("orders-0"), participant("orders-1")}
    assert code(d.end(first, commit=True)) is ErrorCode.PRODUCER_FENCED
    assert code(d.end(first, commit=False)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(up(first), "orders-0")) is ErrorCode.PRODUCER_FENCED, "nobody was given it"
    assert code(d.end(up(first), commit=True)) is ErrorCode.PRODUCER_FENCED
    d.mark_there(mark, "orders-0")
    assert d.answer(request) is None
    d.mark_there(mark, "orders-1")
    assert identity_of(d.answer(request)) == up(first, 2)
    assert code(d.end(first, commit=False)) is ErrorCode.PRODUCER_FENCED


def test_two_that_take_an_id_over_get_two_identities() -> None:
    d = Driver()
    first = d.open()
    assert d.init(B) is None
    b = d.last_request
    assert d.init(C) is None
    c = d.last_request
    assert d.init(B) is None
    b_again = d.last_request
    d.write_marks()
    assert identity_of(d.answer(b)) == up(first, 2)
    assert identity_of(d.answer(c)) == up(first, 3)
    assert code(d.answer(b_again)) is ErrorCode.PRODUCER_FENCED, "C has it since"


def test_an_init_that_waits_too_long_is_refused_and_can_be_sent_again() -> None:
    d = Driver()
    first = d.open()
    assert d.init(B) is None
    waits = d.last_request
    d.pass_ms(WAIT_MS - 1)
    assert d.answer(waits) is None
    d.pass_ms(1)
    assert code(d.answer(waits)) is ErrorCode.CONCURRENT_TRANSACTIONS
    d.write_marks()
    assert identity_of(d.init(B)) == up(first, 2)


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_timeouts_out_of_bounds_are_refused(timeout_ms: int) -> None:
    d = Driver()
    assert code(d.init(timeout_ms=timeout_ms)) is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert not d.log


@pytest.mark.parametrize("instance", [b"", b"short", b"x" * 17])
def test_an_instance_id_has_16_bytes(instance: bytes) -> None:
    answer = Driver().init(instance)
    assert code(answer) is ErrorCode.INVALID_REQUEST
    assert "16" in answer.error.message


@pytest.mark.parametrize("name", ["", "x" * 513, "__attempt/1/2/3/g"])
def test_bad_ids_are_refused(name: str) -> None:
    assert code(Driver().init(name=name)) is ErrorCode.INVALID_TRANSACTIONAL_ID


def test_without_a_producer_id_init_waits_and_is_told_when_there_is_none() -> None:
    d = Driver()
    d.gives_ids = False
    assert d.init(name="a") is None
    a = d.last_request
    assert d.init(name="b") is None
    b = d.last_request
    assert d.ids_asked == 2
    d.give_id()
    assert identity_of(d.answer(a)) == (101, 0)
    assert d.answer(b) is None
    d.refuse_id()
    assert code(d.answer(b)) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert d.describe("b").error.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_is_decided_once_and_answered_alike_however_often_it_comes(commit: bool) -> None:
    d = Driver()
    identity = d.open()
    after = identity_of(d.end(identity, commit=commit))
    assert after == up(identity)
    assert state(d) == (PREPARE_COMMIT if commit else PREPARE_ABORT)
    written = len(d.log)
    assert identity_of(d.end(identity, commit=commit)) == after
    assert code(d.end(identity, commit=not commit)) is ErrorCode.INVALID_TXN_STATE
    (mark,) = d.write_marks()
    assert (mark.producer_epoch, mark.commit) == (after.epoch, commit)
    assert state(d) == EMPTY
    assert identity_of(d.end(identity, commit=commit)) == after
    assert code(d.end(identity, commit=not commit)) is ErrorCode.INVALID_TXN_STATE
    assert len(d.log) == written, "that all marks are there is no record of its own"


def test_a_late_end_never_decides_about_the_next_transaction() -> None:
    d = Driver()
    first = d.open()
    second = identity_of(d.end(first, commit=True))
    d.write_marks()
    d.add(second, "sales-0")
    assert code(d.end(first, commit=False)) is ErrorCode.INVALID_TXN_STATE
    assert identity_of(d.end(first, commit=True)) == second
    assert state(d) == ONGOING
    third = identity_of(d.end(second, commit=False))
    assert code(d.end(first, commit=True)) is ErrorCode.PRODUCER_FENCED
    assert third == up(second)


def test_an_end_of_nothing_raises_the_epoch_too() -> None:
    d = Driver()
    identity = identity_of(d.init())
    after = identity_of(d.end(identity, commit=True))
    assert after == up(identity)
    assert state(d) == EMPTY
    assert not d.marks
    assert code(d.add(identity, "orders-0")) is ErrorCode.INVALID_TXN_STATE
    assert identity_of(d.end(identity, commit=True)) == after
    assert code(d.end(identity, commit=False)) is ErrorCode.INVALID_TXN_STATE
    assert code(d.add(after, "orders-0")) is None


def test_an_end_of_nothing_waits_for_the_marks_of_the_transaction_before() -> None:
    d = Driver()
    first = d.open()
    second = identity_of(d.end(first, commit=True))
    assert d.end(second, commit=False) is None
    waits = d.last_request
    assert state(d) == PREPARE_COMMIT
    d.write_marks()
    assert identity_of(d.answer(waits)) == up(second)


def test_epochs_and_ids_that_nobody_was_given_are_refused() -> None:
    d = Driver()
    identity = identity_of(d.init())
    assert code(d.end(up(identity), commit=True)) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert code(d.add(up(identity), "orders-0")) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert code(d.end(Identity(7, 0), commit=True)) is ErrorCode.PRODUCER_FENCED
    assert code(d.end(Identity(-1, -1), commit=False)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(Identity(-1, -1), "orders-0")) is ErrorCode.PRODUCER_FENCED
    unknown = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert code(d.end(identity, commit=True, name="never")) is unknown
    assert code(d.add(identity, "orders-0", name="never")) is unknown
    assert state(d) == EMPTY


# ---------------------------------------------------------------------- partitions


def test_partitions_are_added_once() -> None:
    d = Driver()
    identity = d.open("orders-0")
    written = len(d.log)
    assert code(d.add(identity, "orders-0")) is None
    assert len(d.log) == written
    assert code(d.add(identity, "orders-0", "sales-1")) is None
    assert len(d.log) == written + 1
    named = {(one.topic, one.partition) for one in d.describe().partitions}
    assert named == {("orders", 0), ("sales", 1)}


def test_partitions_wait_for_the_marks_of_the_transaction_before() -> None:
    d = Driver()
    first = d.open("orders-0", "sales-0")
    second = identity_of(d.end(first, commit=True))
    assert d.add(second, "orders-0") is None
    waits = d.last_request
    (mark,) = d.marks
    d.mark_there(mark, "orders-0")
    assert d.answer(waits) is None
    d.mark_there(mark, "sales-0")
    assert code(d.answer(waits)) is None
    assert state(d) == ONGOING
    assert d.describe().producer_epoch == second.epoch


def test_partitions_that_wait_too_long_are_refused_as_concurrent() -> None:
    d = Driver()
    first = d.open()
    second = identity_of(d.end(first, commit=True))
    d.add(second, "orders-0")
    d.pass_ms(WAIT_MS)
    assert code(d.answer()) is ErrorCode.CONCURRENT_TRANSACTIONS
    d.write_marks()
    assert state(d) == EMPTY


def test_a_topic_that_the_coordinator_does_not_know_is_not_added() -> None:
    # What it does not know later is gone, and gets no mark: so nothing else may come in.
    d = Driver()
    identity = identity_of(d.init())
    answer = d.add(identity, "orders-0", "unheard-0")
    assert code(answer) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert "unheard" in answer.error.message
    assert state(d) == EMPTY


# ---------------------------------------------------------------------- timeouts


def test_a_transaction_that_lasts_too_long_is_aborted_and_its_producer_goes_on() -> None:
    d = Driver()
    identity = d.open()
    d.pass_ms(TIMEOUT_MS - 1)
    assert state(d) == ONGOING
    d.pass_ms(1)
    assert state(d) == PREPARE_ABORT
    assert code(d.add(identity, "orders-1")) is ErrorCode.TRANSACTION_ABORTABLE
    assert code(d.end(identity, commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
    after = identity_of(d.end(identity, commit=False))
    assert after == up(identity)
    (mark,) = d.write_marks()
    assert (mark.producer_epoch, mark.commit) == (after.epoch, False)
    assert code(d.end(identity, commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
    assert code(d.add(after, "orders-0")) is None


def test_each_transaction_has_its_whole_timeout() -> None:
    d = Driver()
    first = d.open()
    d.pass_ms(TIMEOUT_MS - 1)
    second = identity_of(d.end(first, commit=True))
    d.write_marks()
    d.add(second, "orders-0")
    d.add(second, "orders-1")
    d.pass_ms(TIMEOUT_MS - 1)
    assert state(d) == ONGOING
    d.pass_ms(1)
    assert state(d) == PREPARE_ABORT


def test_a_later_coordinator_counts_from_the_start_in_the_record() -> None:
    d = Driver()
    d.open()
    d.pass_ms(TIMEOUT_MS - 1_000)
    d.crash()
    d.pass_ms(999)
    assert state(d) == ONGOING
    d.pass_ms(1)
    assert state(d) == PREPARE_ABORT


@pytest.mark.parametrize("jump_ms", [-(10**9), 10**9])
def test_a_wall_clock_that_is_wrong_bounds_a_transaction_by_its_timeout(jump_ms: int) -> None:
    d = Driver()
    d.open()
    d.wall_offset_ms += jump_ms
    d.crash()
    d.pass_ms(TIMEOUT_MS if jump_ms < 0 else 0)
    assert state(d) == PREPARE_ABORT


def test_a_person_aborts_and_the_producer_hears_of_it_as_of_a_timeout() -> None:
    d = Driver()
    assert code(d.abort()) is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    identity = d.open()
    assert code(d.abort()) is None
    assert code(d.abort()) is ErrorCode.INVALID_TXN_STATE
    assert code(d.end(identity, commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
    d.write_marks()
    assert code(d.abort()) is ErrorCode.INVALID_TXN_STATE


def test_deadlines_that_moved_are_not_kept_for_ever() -> None:
    d = Driver()
    d.init(name="idle")  # Its deadline stands before those that the other leaves behind.
    identity = identity_of(d.init())
    for _ in range(500):
        d.add(identity, "orders-0")
        identity = identity_of(d.end(identity, commit=True))
        d.write_marks()
        d.pass_ms(d.settings.note_after_ms + TIMEOUT_MS)
    assert len(d.shard._heap) < 100


# ---------------------------------------------------------------------- the end of the epochs


def at_epoch(epoch: int) -> tuple[Driver, Identity]:
    """A producer that has opened a transaction under this epoch."""
    d = Driver()
    identity = identity_of(d.init())
    while identity.epoch < epoch:
        identity = identity_of(d.end(identity, commit=True))
    d.log = d.log[-1:]
    d.committed = 1
    assert code(d.add(identity, "orders-0")) is None
    return d, identity


def test_the_epochs_end_with_a_new_producer_id() -> None:
    d, identity = at_epoch(LAST_EPOCH - 1)
    after = identity_of(d.end(identity, commit=True))
    assert after == (identity.producer_id + 1, 0)
    assert identity_of(d.end(identity, commit=True)) == after
    assert d.add(after, "sales-0") is None, "it waits for the marks"
    waits = d.last_request
    d.crash()
    assert identity_of(d.end(identity, commit=True)) == after
    d.add(after, "sales-0")
    (mark,) = d.write_marks()[-1:]
    assert (mark.producer_id, mark.producer_epoch) == (identity.producer_id, LAST_EPOCH)
    assert d.answer(waits) is None
    assert code(d.answer()) is None
    assert identity_of(d.end(after, commit=False)) == up(after)
    assert code(d.end(identity, commit=True)) is ErrorCode.PRODUCER_FENCED


def test_nothing_is_decided_at_the_end_of_the_epochs_before_there_is_a_new_producer_id() -> None:
    d, identity = at_epoch(LAST_EPOCH - 1)
    d.gives_ids = False
    assert d.end(identity, commit=True) is None
    waits = d.last_request
    assert state(d) == ONGOING
    d.refuse_id()
    assert code(d.answer(waits)) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    d.pass_ms(TIMEOUT_MS)
    assert state(d) == ONGOING
    d.give_id()
    d.pass_ms(TransactionSettings().retry_ms)
    assert state(d) == PREPARE_ABORT


def test_init_at_the_end_of_the_epochs_takes_a_new_producer_id() -> None:
    d, identity = at_epoch(LAST_EPOCH - 1)
    assert d.init(B) is None
    d.write_marks()
    given = identity_of(d.answer())
    assert given.producer_id != identity.producer_id
    assert identity_of(d.init(C)) == up(given)


def test_an_end_of_nothing_at_the_end_of_the_epochs() -> None:
    d = Driver()
    identity = identity_of(d.init())
    while identity.epoch < LAST_EPOCH - 1:
        identity = identity_of(d.end(identity, commit=True))
    assert identity_of(d.end(identity, commit=True)) == (identity.producer_id + 1, 0)


# ---------------------------------------------------------------------- forgetting


def test_an_id_that_nobody_uses_is_forgotten() -> None:
    d = Driver(TransactionSettings(id_expiration_ms=100_000))
    first = d.open()
    d.end(first, commit=True)
    d.write_marks()
    d.pass_ms(99_000)
    assert state(d) == EMPTY
    d.pass_ms(100_000)
    assert d.describe().error.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert d.log[-1].value is None
    assert code(d.end(up(first), commit=True)) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert identity_of(d.init(A)).producer_id != first.producer_id
    d.crash()
    assert state(d) == EMPTY


def test_an_id_with_a_transaction_is_not_forgotten() -> None:
    d = Driver(TransactionSettings(id_expiration_ms=10))
    identity = d.open()
    d.end(identity, commit=True)
    d.pass_ms(10**9)
    assert state(d) == PREPARE_COMMIT


# ---------------------------------------------------------------------- telling


def test_describing_says_which_marks_are_not_there() -> None:
    d = Driver()
    identity = d.open("orders-0", "sales-0")
    start_ms = d.describe().start_ms
    assert start_ms == d.wall_ms
    d.end(identity, commit=True)
    d.mark_there(d.marks[0], "orders-0")
    described = d.describe()
    assert [one.topic for one in described.partitions] == ["sales"]
    assert (described.producer_epoch, described.start_ms) == (identity.epoch + 1, start_ms)
    d.write_marks()
    described = d.describe()
    assert (described.state, described.start_ms) == (EMPTY, -1)
    assert described.transaction_timeout_ms == TIMEOUT_MS
