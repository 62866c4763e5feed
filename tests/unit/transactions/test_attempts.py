"""Task attempts of engines, and the commits of their groups."""

from __future__ import annotations

import pytest

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.core.transaction_values import Cause, Identity, Winner
from penstock.v1 import transactions_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.transactions.transaction_harness import (
    TIMEOUT_MS,
    WAIT_MS,
    B,
    Driver,
    attempt_id,
    begun,
    code,
    identity_of,
    marks,
    participant,
)

ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING
EMPTY = transactions_pb2.TRANSACTION_STATE_EMPTY
PREPARE_ABORT = transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT
PREPARE_COMMIT = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT


def test_a_commit_decides_about_all_attempts_up_to_its_number_in_one_record() -> None:
    d = Driver()
    for task in range(3):
        begun(d, 1, task, 0)
    begun(d, 1, 0, 1)
    begun(d, 0, 0, 0)
    begun(d, 2, 0, 0)
    written = len(d.log)
    winners = [attempt_id(1, 0, 1), attempt_id(1, 1), attempt_id(1, 2)]
    answer = d.commit_group(1, *winners)
    assert code(answer) is None
    assert not answer.is_replay
    assert len(d.log) == written + 1
    assert marks(d) == {
        **dict.fromkeys(winners, True),
        attempt_id(1, 0, 0): False,
        attempt_id(0, 0, 0): False,
    }
    assert d.list() == {attempt_id(2): ONGOING}
    last = d.last_committed()
    assert last.epoch_number == 1
    assert list(map(transaction_codec.winner, last.winners)) == list(map(d.winner, winners))


def test_the_marks_of_a_commit_are_sent_a_few_at_a_time() -> None:
    d = Driver(TransactionSettings(settled_at_once=2))
    for task in range(7):
        begun(d, 1, task)
    fenced = identity_of(d.begin(1, 7))
    assert code(d.commit_group(1, *[attempt_id(1, task) for task in range(7)])) is None
    assert len(d.marks) == 2
    assert d.shard.next_deadline_ms == d.now_ms, "the others follow at once"
    # Whatever comes meanwhile finds all of them decided.
    assert code(d.end(fenced, commit=False, name=attempt_id(1, 7))) is None
    assert code(d.begin(1, 6, 1)) is ErrorCode.STALE_GROUP_COMMIT
    assert code(d.add(fenced, "orders-0", name=attempt_id(1, 7))) is not None
    d.commit_group(2)
    assert d.answer() is None
    waiting = d.last_request
    d.pass_ms(0)
    assert marks(d) == {attempt_id(1, task): True for task in range(7)}
    assert code(d.answer(waiting)) is None
    assert d.list() == {}


def test_a_commit_that_could_not_be_written_settles_nothing_later() -> None:
    d = Driver(TransactionSettings(settled_at_once=2))
    for task in range(7):
        begun(d, 1, task)
    d.commits_at_once = False
    winners = [attempt_id(1, task) for task in range(7)]
    d.commit_group(1, *winners)
    d.fail_writes()
    d.commits_at_once = True
    d.pass_ms(d.settings.retry_ms)
    assert not d.marks
    assert d.list() == dict.fromkeys(winners, ONGOING)
    assert code(d.commit_group(1, *winners)) is None
    d.pass_ms(0)
    assert marks(d) == dict.fromkeys(winners, True)


def test_nothing_was_committed_of_a_group_that_never_did() -> None:
    assert Driver().last_committed().epoch_number == -1


def test_a_commit_is_replayed_with_the_same_winners_and_no_others() -> None:
    d = Driver()
    begun(d, 4, 0)
    begun(d, 4, 1)
    both = [attempt_id(4, 0), attempt_id(4, 1)]
    d.commit_group(4, *both)
    written = len(d.log)
    for winners in (both, both[::-1]):
        answer = d.commit_group(4, *winners)
        assert code(answer) is None
        assert answer.is_replay
    answer = d.commit_group(4, both[0])
    assert code(answer) is ErrorCode.GROUP_COMMIT_CONFLICT
    assert both[1] in answer.error.message
    assert code(d.commit_group(3)) is ErrorCode.STALE_GROUP_COMMIT
    d.write_marks()
    d.crash()
    assert d.commit_group(4, *both).is_replay
    assert code(d.commit_group(4)) is ErrorCode.GROUP_COMMIT_CONFLICT
    assert len(d.log) == written + 2, "the two attempts were forgotten, and nothing else"


def test_a_commit_without_winners() -> None:
    d = Driver()
    begun(d, 1)
    assert code(d.commit_group(1)) is None
    assert marks(d) == {attempt_id(1): False}
    assert d.commit_group(1).is_replay


def test_a_winner_that_wrote_nothing_wins() -> None:
    d = Driver()
    d.begin(1)
    assert code(d.commit_group(1, attempt_id(1))) is None
    assert not d.marks
    assert d.list() == {}


def test_the_next_decision_waits_until_the_attempts_of_the_last_one_have_ended() -> None:
    d = Driver()
    begun(d, 1)
    begun(d, 2)
    d.commit_group(1, attempt_id(1))
    assert d.commit_group(2, attempt_id(2)) is None
    waits = d.last_request
    d.crash()
    assert d.last_committed().epoch_number == 1
    assert d.commit_group(2, attempt_id(2)) is None
    d.write_marks()
    assert d.answer(waits) is None
    assert code(d.answer()) is None
    assert d.last_committed().epoch_number == 2


def test_a_decision_that_waits_too_long_is_refused_and_can_be_sent_again() -> None:
    d = Driver()
    begun(d, 1)
    d.commit_group(1, attempt_id(1))
    begun(d, 2)
    d.commit_group(2, attempt_id(2))
    d.pass_ms(WAIT_MS)
    assert code(d.answer()) is ErrorCode.CONCURRENT_TRANSACTIONS
    d.write_marks()
    assert code(d.commit_group(2, attempt_id(2))) is None


@pytest.mark.parametrize(
    ("winners", "expected"),
    [
        ([attempt_id(1), attempt_id(1)], ErrorCode.INVALID_REQUEST),
        ([attempt_id(1), attempt_id(1, 0, 1)], ErrorCode.INVALID_REQUEST),
        ([attempt_id(2)], ErrorCode.UNKNOWN_ATTEMPT),
        ([attempt_id(1, 9)], ErrorCode.UNKNOWN_ATTEMPT),
        ([Winner(0, 0, 0)], ErrorCode.UNKNOWN_ATTEMPT),
        ([Winner(0, 0, -1)], ErrorCode.INVALID_REQUEST),
        ([Winner(0, -1, 0)], ErrorCode.INVALID_REQUEST),
        ([Winner(-1, 0, 0)], ErrorCode.INVALID_REQUEST),
    ],
)
def test_winners_that_cannot_win_refuse_the_whole_commit(
    winners: list[str | Winner], expected: ErrorCode
) -> None:
    d = Driver()
    begun(d, 1, 0, 0)
    begun(d, 1, 0, 1)
    begun(d, 2, 0, 0)
    written = len(d.log)
    assert code(d.commit_group(1, *winners)) is expected
    assert len(d.log) == written
    assert not d.marks
    assert code(d.commit_group(1, attempt_id(1))) is None


def test_a_winner_that_timed_out_refuses_the_whole_commit() -> None:
    d = Driver()
    begun(d, 1, 0)
    d.pass_ms(TIMEOUT_MS)
    begun(d, 1, 1)
    d.marks.clear()
    both = attempt_id(1, 0), attempt_id(1, 1)
    assert code(d.commit_group(1, *both)) is ErrorCode.UNKNOWN_ATTEMPT
    assert d.last_committed().epoch_number == -1
    assert d.list()[both[1]] == ONGOING


@pytest.mark.parametrize("number", [-1])
def test_numbers_count_from_0(number: int) -> None:
    d = Driver()
    assert code(d.begin(number)) is ErrorCode.INVALID_REQUEST
    assert code(d.begin(1, number)) is ErrorCode.INVALID_REQUEST
    assert code(d.begin(1, 1, number)) is ErrorCode.INVALID_REQUEST
    assert code(d.commit_group(number)) is ErrorCode.INVALID_REQUEST


# ---------------------------------------------------------------------- zombies


def test_an_attempt_of_a_decided_number_is_refused_everywhere() -> None:
    d = Driver()
    winner, loser = begun(d, 1, 0), begun(d, 1, 1)
    d.commit_group(1, attempt_id(1, 0))
    for _ in range(2):
        assert code(d.begin(1, 2)) is ErrorCode.STALE_GROUP_COMMIT
        assert code(d.begin(0, 0)) is ErrorCode.STALE_GROUP_COMMIT
        for task, identity in enumerate((winner, loser)):
            for epoch in (0, 1):
                answer = d.add(
                    Identity(identity.producer_id, epoch), "stock-0", name=attempt_id(1, task)
                )
                assert code(answer) is ErrorCode.PRODUCER_FENCED
        d.write_marks()


def test_one_that_begins_again_fences_the_one_before() -> None:
    d = Driver()
    first = begun(d, 1)
    assert d.begin(1, instance=B) is None, "it waits for the marks of the first"
    waits = d.last_request
    assert code(d.add(first, "sales-0", name=attempt_id(1))) is ErrorCode.PRODUCER_FENCED
    assert marks(d) == {attempt_id(1): False}
    second = identity_of(d.answer(waits))
    assert second.producer_id != first.producer_id
    assert code(d.add(first, "sales-0", name=attempt_id(1))) is ErrorCode.PRODUCER_FENCED
    assert code(d.end(first, commit=False, name=attempt_id(1))) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(second, "sales-0", name=attempt_id(1))) is None
    d.commit_group(1, attempt_id(1))
    (mark,) = d.write_marks()
    assert (mark.producer_id, mark.partitions) == (second.producer_id, {participant("sales-0")})


def test_a_winner_is_the_one_that_began_and_none_that_began_again_under_its_numbers() -> None:
    # An engine runs a stage anew: its driver has what the first wrote all of, the second has
    # written a part.
    d = Driver()
    begun(d, 1, 1)
    begun(d, 1)
    first = d.winner(attempt_id(1))
    d.begin(1, instance=B)
    d.write_marks()
    second = d.winner(attempt_id(1))
    assert first.producer_id != second.producer_id
    d.add(Identity(second.producer_id, 0), "orders-0", name=attempt_id(1))
    written = len(d.log)
    assert code(d.commit_group(1, first, attempt_id(1, 1))) is ErrorCode.UNKNOWN_ATTEMPT
    assert len(d.log) == written, "nothing was decided"
    assert not d.marks
    assert code(d.commit_group(1, second, attempt_id(1, 1))) is None
    for _ in range(2):
        assert code(d.commit_group(1, first, attempt_id(1, 1))) is ErrorCode.GROUP_COMMIT_CONFLICT
        assert d.commit_group(1, attempt_id(1, 1), second).is_replay
        # It was aborted, whatever has become of the other.
        before = Identity(first.producer_id, 0)
        assert code(d.end(before, commit=True, name=attempt_id(1))) is not None
        d.write_marks()
        d.crash()
    assert code(d.end(before, commit=False, name=attempt_id(1))) is None


def test_a_begin_that_comes_late_does_not_take_the_attempt_from_another_one() -> None:
    d = Driver()
    begun(d, 1)
    d.begin(1, instance=B)
    d.write_marks()
    second = identity_of(d.begin(1, instance=B))
    d.crash()
    assert code(d.begin(1)) is ErrorCode.PRODUCER_FENCED
    assert code(d.add(second, "sales-0", name=attempt_id(1))) is None


def test_one_that_begins_again_over_one_that_wrote_nothing() -> None:
    d = Driver()
    first = identity_of(d.begin(1))
    second = identity_of(d.begin(1, instance=B))
    assert second.producer_id != first.producer_id


def test_a_begin_that_is_sent_again_is_given_the_same_identity() -> None:
    d = Driver()
    first = begun(d, 1)
    assert identity_of(d.begin(1)) == first
    d.end(first, commit=False, name=attempt_id(1))
    assert code(d.begin(1)) is ErrorCode.PRODUCER_FENCED, "it has ended"
    assert d.list() == {attempt_id(1): PREPARE_ABORT}


def test_a_begin_that_comes_late_does_not_open_an_attempt_again_that_has_ended() -> None:
    # Else its driver, who had heard that the attempt is done, would commit what it wrote nothing
    # under, while all that it wrote is aborted.
    d = Driver()
    begun(d, 1)
    d.pass_ms(TIMEOUT_MS)
    assert marks(d) == {attempt_id(1): False}
    for _ in range(2):
        assert code(d.begin(1)) is ErrorCode.PRODUCER_FENCED
        assert code(d.commit_group(1, attempt_id(1))) is ErrorCode.UNKNOWN_ATTEMPT
        d.crash()
        d.write_marks()
    assert d.last_committed().epoch_number == -1


def test_an_attempt_that_has_ended_may_begin_again_as_another_one() -> None:
    d = Driver()
    first = begun(d, 1)
    d.pass_ms(TIMEOUT_MS)
    d.write_marks()
    second = identity_of(d.begin(1, instance=B))
    assert second.producer_id != first.producer_id
    assert d.list() == {attempt_id(1): ONGOING}
    assert code(d.end(first, commit=False, name=attempt_id(1))) is ErrorCode.PRODUCER_FENCED


def test_attempts_are_forgotten_when_their_group_has_decided_or_nobody_used_them() -> None:
    d = Driver()
    begun(d, 1)
    begun(d, 2)
    d.pass_ms(TIMEOUT_MS)
    d.write_marks()
    assert d.list() == {attempt_id(1): EMPTY, attempt_id(2): EMPTY}
    d.commit_group(1)
    assert d.list() == {attempt_id(2): EMPTY}
    d.pass_ms(d.settings.id_expiration_ms)
    assert d.list() == {}
    assert d.log[-1].value is None, "forgotten"


# ---------------------------------------------------------------------- ends of attempts


def test_an_attempt_is_aborted_by_its_producer_and_not_committed() -> None:
    d = Driver()
    identity = begun(d, 1)
    assert code(d.end(identity, commit=True, name=attempt_id(1))) is ErrorCode.INVALID_REQUEST
    for _ in range(2):
        answer = d.end(identity, commit=False, name=attempt_id(1))
        assert identity_of(answer) == (-1, -1), "there is no next transaction"
    assert code(d.add(identity, "orders-0", name=attempt_id(1))) is ErrorCode.INVALID_TXN_STATE
    assert marks(d) == {attempt_id(1): False}
    assert d.list() == {attempt_id(1): EMPTY}
    assert code(d.end(identity, commit=False, name=attempt_id(1))) is None
    assert code(d.add(identity, "orders-0", name=attempt_id(1))) is ErrorCode.INVALID_TXN_STATE
    assert code(d.commit_group(1, attempt_id(1))) is ErrorCode.UNKNOWN_ATTEMPT
    assert code(d.commit_group(1)) is None
    assert d.log[-1].value is None, "forgotten"
    assert code(d.end(identity, commit=False, name=attempt_id(1))) is None
    answer = d.add(identity, "orders-0", name=attempt_id(1))
    assert code(answer) is ErrorCode.PRODUCER_FENCED


def test_an_identity_that_was_not_the_attempts_aborts_nothing() -> None:
    d = Driver()
    identity = begun(d, 1)
    for other in (Identity(-1, -1), Identity(1, 0), Identity(identity.producer_id, 1)):
        assert code(d.end(other, commit=False, name=attempt_id(1))) is not None
    assert d.list() == {attempt_id(1): ONGOING}


def test_a_winner_is_not_said_to_be_aborted() -> None:
    d = Driver()
    winner, loser = begun(d, 1, 0), begun(d, 1, 1)
    d.commit_group(1, attempt_id(1, 0))
    for _ in range(2):
        answer = d.end(winner, commit=False, name=attempt_id(1, 0))
        assert code(answer) is ErrorCode.INVALID_TXN_STATE
        assert code(d.end(loser, commit=False, name=attempt_id(1, 1))) is None
        d.write_marks()
    d.begin(2)
    d.commit_group(2, attempt_id(2))
    answer = d.end(winner, commit=False, name=attempt_id(1, 0))
    assert code(answer) is ErrorCode.INVALID_TXN_STATE, "also when its group went on"


def test_an_attempt_times_out() -> None:
    d = Driver()
    identity = begun(d, 1)
    d.pass_ms(TIMEOUT_MS)
    answer = d.add(identity, "orders-0", name=attempt_id(1))
    assert code(answer) is ErrorCode.TRANSACTION_ABORTABLE
    assert marks(d) == {attempt_id(1): False}
    assert d.list() == {attempt_id(1): EMPTY}


def test_an_attempt_that_wrote_nothing_times_out_too() -> None:
    d = Driver()
    d.begin(1)
    d.pass_ms(TIMEOUT_MS)
    assert d.list() == {attempt_id(1): EMPTY}


def test_it_is_told_how_a_group_ended_an_attempt_and_when() -> None:
    d = Driver()
    begun(d, 1, 0)
    begun(d, 1, 1)
    d.pass_ms(10)
    assert d.since(attempt_id(1, 0)) == (ONGOING, 10)
    d.commit_group(1, attempt_id(1, 0))
    d.pass_ms(20)
    assert d.since(attempt_id(1, 0)) == (PREPARE_COMMIT, 20)
    assert d.last_end(attempt_id(1, 0)) == (Cause.GROUP, True)
    assert d.last_end(attempt_id(1, 1)) == (Cause.GROUP, False)


def test_a_person_aborts_an_attempt() -> None:
    d = Driver()
    begun(d, 1)
    assert code(d.abort(attempt_id(1))) is None
    assert marks(d) == {attempt_id(1): False}


# ---------------------------------------------------------------------- failures


def test_a_later_coordinator_ends_the_attempts_that_were_decided() -> None:
    d = Driver()
    begun(d, 1, 0, 0, "orders-0", "sales-0")
    begun(d, 1, 1)
    begun(d, 2, 0)
    d.commit_group(1, attempt_id(1, 0))
    d.mark_there(d.marks[0])
    d.marks.clear()
    d.crash()
    assert d.describe(attempt_id(1, 1)).state == PREPARE_ABORT
    assert marks(d) == {attempt_id(1, 1): False}, "the winner was forgotten with its marks"
    assert d.list() == {attempt_id(2): ONGOING}


def test_a_later_coordinator_that_lost_what_was_not_committed_ends_them_all() -> None:
    d = Driver()
    begun(d, 1, 0)
    begun(d, 1, 1)
    d.commit_group(1, attempt_id(1, 0))
    d.commits_at_once = False
    marks(d)
    assert d.committed < len(d.log), "attempts are forgotten without waiting for it"
    d.crash()
    assert marks(d) == {attempt_id(1, 0): True, attempt_id(1, 1): False}


def test_a_decision_that_could_not_be_written_decided_nothing() -> None:
    d = Driver()
    identity = begun(d, 1)
    d.commits_at_once = False
    assert d.commit_group(1, attempt_id(1)) is None
    assert d.add(identity, "sales-0", name=attempt_id(1)) is None, "nor is its refusal told"
    d.fail_writes()
    d.commits_at_once = True
    assert not d.marks
    assert d.list() == {attempt_id(1): ONGOING}
    assert code(d.add(identity, "sales-0", name=attempt_id(1))) is None
    assert code(d.commit_group(1, attempt_id(1))) is None
    assert {one for mark in d.marks for one in mark.partitions} == {
        participant("orders-0"),
        participant("sales-0"),
    }


def test_a_commit_does_not_wait_on_for_one_that_was_taken_back() -> None:
    d = Driver()
    begun(d, 1)
    begun(d, 2)
    d.commits_at_once = False
    assert d.commit_group(1, attempt_id(1)) is None
    assert d.commit_group(2, attempt_id(2)) is None, "it waits for the attempts of the other"
    waits = d.last_request
    d.fail_writes()
    d.commits_at_once = True
    d.pass_ms(d.settings.retry_ms)
    assert code(d.answer(waits)) is None
    assert marks(d) == {attempt_id(1): False, attempt_id(2): True}
    assert code(d.commit_group(1, attempt_id(1))) is ErrorCode.STALE_GROUP_COMMIT


def test_marks_of_attempts_that_were_lost_with_another_record_are_sent_again() -> None:
    d = Driver()
    begun(d, 1, 0)
    d.commit_group(1, attempt_id(1))
    d.marks.clear()
    d.commits_at_once = False
    d.begin(2)
    d.fail_writes()
    d.commits_at_once = True
    d.pass_ms(d.settings.retry_ms)
    assert marks(d) == {attempt_id(1): True}
    assert d.list() == {}


def test_attempts_and_their_topics_that_are_gone_end() -> None:
    d = Driver()
    begun(d, 1)
    d.commit_group(1, attempt_id(1))
    begun(d, 2, 0, 0, "sales-0")
    d.remove_topic("orders")
    assert code(d.commit_group(2, attempt_id(2))) is None
