"""Marks: sent behind their decision, until they are there; writes that fail, and take-overs."""

from __future__ import annotations

from penstock.broker.core.transaction_values import Identity
from tests.unit.transactions.test_transactional_ids import (
    EMPTY,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    state,
    up,
)
from tests.unit.transactions.transaction_harness import (
    TIMEOUT_MS,
    B,
    Driver,
    code,
    identity_of,
    participant,
)


def test_no_mark_is_sent_before_its_decision_is_committed() -> None:
    d = Driver()
    identity = d.open()
    d.commits_at_once = False
    assert d.end(identity, commit=True) is None
    assert not d.marks
    d.commit()
    assert len(d.marks) == 1
    assert identity_of(d.answer()) == up(identity)


def test_no_answer_is_given_before_what_it_tells_is_committed() -> None:
    d = Driver()
    d.commits_at_once = False
    for ask in (
        d.init,
        d.init,
        lambda: d.add(Identity(101, 0), "orders-0"),
        d.describe,
    ):
        assert ask() is None
    d.commit()
    assert all(code(d.answer(number)) is None for number in range(1, 5))


def test_a_decision_that_could_not_be_written_is_taken_back_with_its_marks() -> None:
    d = Driver()
    identity = d.open()
    d.commits_at_once = False
    d.end(identity, commit=False)
    d.fail_writes()
    d.commits_at_once = True
    assert state(d) == ONGOING
    assert not d.marks
    assert identity_of(d.end(identity, commit=True)) == up(identity), "and may be decided anew"
    assert [mark.commit for mark in d.marks] == [True]


def test_a_timeout_that_could_not_be_written_is_tried_again() -> None:
    d = Driver()
    d.open()
    d.commits_at_once = False
    d.pass_ms(TIMEOUT_MS)
    d.fail_writes()
    d.commits_at_once = True
    assert state(d) == ONGOING
    d.pass_ms(d.settings.retry_ms)
    assert state(d) == PREPARE_ABORT
    assert len(d.marks) == 1


def test_an_init_that_waits_goes_on_where_the_abort_could_not_be_written() -> None:
    d = Driver()
    first = d.open()
    d.commits_at_once = False
    assert d.init(B) is None
    d.fail_writes()
    d.commits_at_once = True
    d.pass_ms(d.settings.retry_ms)
    d.write_marks()
    assert identity_of(d.answer()) == up(first, 2)


def test_marks_that_were_lost_with_another_record_are_sent_again() -> None:
    d = Driver()
    first = d.open()
    second = identity_of(d.end(first, commit=True))
    d.write_marks()
    d.commits_at_once = False
    d.add(second, "orders-0")
    d.fail_writes()
    d.commits_at_once = True
    assert not d.marks
    d.pass_ms(d.settings.retry_ms)
    assert [mark.producer_epoch for mark in d.marks] == [second.epoch], "which costs nothing"
    d.write_marks()
    assert code(d.add(second, "orders-0")) is None


def test_a_later_coordinator_sends_the_marks_again() -> None:
    d = Driver()
    identity = d.open("orders-0", "sales-0")
    d.end(identity, commit=True)
    d.mark_there(d.marks[0], "orders-0")
    d.marks.clear()
    d.crash()
    (mark,) = d.marks
    assert mark.commit
    assert mark.partitions == {participant("orders-0"), participant("sales-0")}
    assert d.add(up(identity), "orders-0") is None
    d.write_marks()
    assert code(d.answer()) is None


def test_marks_of_other_transactions_are_passed_over() -> None:
    d = Driver()
    first = d.open()
    second = identity_of(d.end(first, commit=True))
    (old,) = d.write_marks()
    d.add(second, "orders-0")
    d.end(second, commit=True)
    d.mark_there(old)
    assert state(d) == PREPARE_COMMIT
    d.write_marks()
    assert state(d) == EMPTY


def test_that_all_marks_are_there_is_written_down_after_a_while() -> None:
    d = Driver()
    identity = d.open()
    d.end(identity, commit=True)
    d.write_marks()
    written = len(d.log)
    d.pass_ms(d.settings.note_after_ms)
    assert len(d.log) == written + 1
    d.crash()
    assert not d.marks
    assert identity_of(d.end(identity, commit=True)) == up(identity), "and forgets nothing"


def test_transactions_on_topics_that_are_gone_end() -> None:
    d = Driver()
    first = d.open("orders-0", "sales-0")
    d.remove_topic("orders")
    second = identity_of(d.end(first, commit=True))
    (mark,) = d.marks
    assert mark.partitions == {participant("sales-0")}
    d.remove_topic("sales")
    assert state(d) == EMPTY
    d.add(second, "stock-0")
    d.end(second, commit=True)
    d.topics.ids.clear()
    d.crash()
    assert state(d) == EMPTY, "also where it was removed before the coordinator took over"
