"""What commits of groups keep, when groups are forgotten, and how a coordinator takes them over."""

from __future__ import annotations

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import TransactionSettings
from penstock.v1 import transactions_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.transactions.transaction_harness import (
    GROUP,
    TIMEOUT_MS,
    Driver,
    attempt_id,
    begun,
    code,
    marks,
)

ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING


def test_a_commit_keeps_what_its_engine_gave_along_and_a_replay_does_not_change_it() -> None:
    d = Driver()
    assert code(d.commit_group(0, metadata=b"planned")) is None
    assert d.commit_group(0, metadata=b"other").is_replay
    d.crash()
    assert d.last_committed().metadata == b"planned"
    d.commit_group(1)
    assert d.last_committed().metadata == b""
    assert code(d.commit_group(2, metadata=bytes(4_097))) is ErrorCode.INVALID_REQUEST
    assert code(d.commit_group(2, metadata=bytes(4_096))) is None


def test_a_group_that_has_ended_is_forgotten_and_one_that_goes_on_is_not() -> None:
    d = Driver()
    begun(d, 0)
    assert code(d.commit_group(0, attempt_id(0), ends_group=True)) is None
    d.write_marks()
    d.pass_ms(d.settings.id_expiration_ms - 1)
    d.crash()
    assert d.last_committed().epoch_number == 0
    assert d.commit_group(0, d.winner(attempt_id(0))).is_replay, "a late copy"
    d.pass_ms(1)
    assert d.last_committed().epoch_number == -1
    assert d.log[-1].key == transaction_codec.group_key(GROUP)
    assert d.log[-1].value is None
    assert d.shard.next_deadline_ms is None

    assert code(d.commit_group(3)) is None
    d.pass_ms(10 * d.settings.id_expiration_ms)
    assert d.last_committed().epoch_number == 3
    assert d.shard.next_deadline_ms is None


def test_a_group_that_goes_on_after_its_end_is_not_forgotten() -> None:
    d = Driver()
    d.commit_group(0, ends_group=True)
    d.commit_group(1)
    d.pass_ms(10 * d.settings.id_expiration_ms)
    assert d.last_committed().epoch_number == 1


def test_a_group_is_not_forgotten_while_attempts_have_not_ended() -> None:
    d = Driver()
    begun(d, 0)
    d.commit_group(0, attempt_id(0), ends_group=True)
    d.pass_ms(2 * d.settings.id_expiration_ms)
    assert d.last_committed().epoch_number == 0, "else its attempt would not be committed any more"
    assert marks(d) == {attempt_id(0): True}
    d.pass_ms(0)
    assert d.last_committed().epoch_number == -1


def test_a_group_that_could_not_be_forgotten_is_tried_again_later() -> None:
    d = Driver()
    d.commit_group(0, ends_group=True)
    d.commits_at_once = False
    d.pass_ms(d.settings.id_expiration_ms)
    d.fail_writes()
    assert d.last_committed().epoch_number == 0
    assert d.shard.next_deadline_ms == d.now_ms + d.settings.retry_ms
    d.commits_at_once = True
    d.pass_ms(d.settings.retry_ms)
    assert d.last_committed().epoch_number == -1


def test_a_coordinator_that_loads_sends_the_marks_of_a_commit_a_few_at_a_time() -> None:
    d = Driver(TransactionSettings(settled_at_once=2))
    names = [attempt_id(1, task) for task in range(7)]
    for task in range(7):
        begun(d, 1, task)
    begun(d, 2)
    d.commit_group(1, *names)
    d.pass_ms(0)
    d.pass_ms(TIMEOUT_MS - 1)
    d.marks.clear()
    d.crash()
    assert len(d.marks) == 2
    assert d.shard.next_deadline_ms == d.now_ms, "the others follow at once"
    d.pass_ms(0)
    assert marks(d) == dict.fromkeys(names, True)
    assert d.list() == {attempt_id(2): ONGOING}
