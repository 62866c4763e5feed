"""Records of __transaction_state as earlier versions have written them."""

from __future__ import annotations

import pytest

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_codec import ReplayedId
from penstock.broker.core.transaction_events import CommitGroup, Loaded
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.transaction_values import (
    UNKNOWN_PRODUCER,
    Cause,
    Identity,
    State,
    Transaction,
    Winner,
)
from penstock.v1 import transactions_pb2
from penstock.wire.errors import CorruptRecordError, ErrorCode
from tests.unit.transactions.transaction_harness import (
    WAIT_MS,
    Driver,
    attempt_id,
    code,
    participant,
)

WRITTEN_MS = 1_700_000_000_000

# Two attempts at epoch number 1, of tasks 0 and 1, with the producer ids 100 and 101 and the
# partitions orders-0 and orders-1; the group's commit is for that of task 1, by its id.
ATTEMPTS = {
    "0a175f5f617474656d70742f312f302f302f71756572792d31": (
        "0802106420ffffffffffffffffff0128ffffffffffffffffff0140e0d4034880d095ffbc315080d095ffbc315a"
        "1a0a066f72646572731a106f72646572732e2e2e2e2e2e2e2e2e2e621069696969696969696969696969696969"
        "68ffffffffffffffffff01"
    ),
    "0a175f5f617474656d70742f312f312f302f71756572792d31": (
        "0802106520ffffffffffffffffff0128ffffffffffffffffff0140e0d4034880d095ffbc315080d095ffbc315a"
        "1c0a066f726465727310011a106f72646572732e2e2e2e2e2e2e2e2e2e62106969696969696969696969696969"
        "696968ffffffffffffffffff01"
    ),
}
COMMIT = {
    "120771756572792d31": ("080112175f5f617474656d70742f312f312f302f71756572792d311880d095ffbc31"),
}
PAYMENTS = "0a087061796d656e7473"
PAYMENTS_VALUE = (
    "080310071804200728033001380140e0d4034880d095ffbc315080d095ffbc315a1a0a066f72646572731a106f7264"
    "6572732e2e2e2e2e2e2e2e2e2e5a1b0a0573616c657310021a1073616c65732e2e2e2e2e2e2e2e2e2e2e6210696969"
    "6969696969696969696969696968ffffffffffffffffff01"
)


def loaded(records: dict[str, str]) -> Driver:
    """A coordinator that takes over these records."""
    d = Driver()
    shard = TransactionShard(d.topics, d.settings)
    for key, value in records.items():
        assert shard.replay(bytes.fromhex(key), bytes.fromhex(value))
    d.shard = shard
    d.handle(Loaded(d.wall_ms))
    return d


def test_a_commit_that_names_its_winners_by_their_ids_is_carried_out() -> None:
    d = loaded(ATTEMPTS | COMMIT)
    assert {mark.transactional_id: mark.commit for mark in d.write_marks()} == {
        attempt_id(1, 0): False,
        attempt_id(1, 1): True,
    }


def test_a_commit_that_names_its_winners_by_their_ids_is_replayed() -> None:
    d = loaded(ATTEMPTS | COMMIT)
    d.write_marks()
    assert [transaction_codec.winner(one) for one in d.last_committed().winners] == [
        Winner(1, 0, UNKNOWN_PRODUCER)
    ]
    assert d.commit_group(1, Winner(1, 0, 101)).is_replay
    assert code(d.commit_group(1, Winner(0, 0, 100))) is ErrorCode.GROUP_COMMIT_CONFLICT
    both = Winner(1, 0, 101), Winner(0, 0, 100)
    assert code(d.commit_group(1, *both)) is ErrorCode.GROUP_COMMIT_CONFLICT
    assert code(d.commit_group(1)) is ErrorCode.GROUP_COMMIT_CONFLICT


def test_numbers_win_at_the_epoch_number_of_their_commit_only() -> None:
    """That of number 0 was not decided by a commit before, and loses with this one."""
    older = {
        key.replace("2f312f312f30", "2f302f312f30"): value
        for key, value in ATTEMPTS.items()
        if "2f312f312f30" in key
    }
    d = loaded(ATTEMPTS | older | COMMIT)
    won = {mark.transactional_id: mark.commit for mark in d.write_marks()}
    assert won == {attempt_id(1, 0): False, attempt_id(1, 1): True, attempt_id(0, 1): False}


def test_a_commit_that_is_asked_for_by_ids_is_refused() -> None:
    """It has no winners for who does not read them, and would abort the attempt that it names."""
    d = loaded(ATTEMPTS)
    request = transactions_pb2.CommitGroupRequest(
        group="query-1", epoch_number=1, winner_ids=[attempt_id(1, 1)]
    )
    d.handle(CommitGroup(1_000, request, d.now_ms + WAIT_MS))
    assert code(d.answer(1_000)) is ErrorCode.INVALID_REQUEST
    assert not d.write_marks()


def test_a_commit_for_what_is_no_attempt_is_corrupt() -> None:
    [(key, value)] = COMMIT.items()
    damaged = bytes.fromhex(value).replace(b"__attempt", b"__attemxt")
    with pytest.raises(CorruptRecordError, match="no attempt's id"):
        transaction_codec.decode(bytes.fromhex(key), damaged)


def test_a_transaction_whose_marks_are_on_their_way_is_read() -> None:
    key, value = bytes.fromhex(PAYMENTS), bytes.fromhex(PAYMENTS_VALUE)
    assert transaction_codec.decode(key, value) == ReplayedId(
        "payments",
        Transaction(
            State.PREPARE_COMMIT,
            producer_id=7,
            epoch=4,
            timeout_ms=60_000,
            updated_ms=WRITTEN_MS,
            instance_id=b"i" * 16,
            last=Identity(7, 3),
            last_committed=True,
            last_cause=Cause.PRODUCER,
            start_ms=WRITTEN_MS,
            partitions=frozenset({participant("orders-0"), participant("sales-2")}),
        ),
    )
