"""Transactions at the end of a log: who may write in one, and the marks that end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.core.ports import AppendInfo
from penstock.broker.core.transactions import Marker, OpenTransaction
from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.log import PartitionLog
from penstock.wire.errors import (
    FencedLeaderEpochError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTxnStateError,
    OutOfOrderSequenceError,
    TransactionTornError,
)
from penstock.wire.ids import LeaderEpoch
from penstock.wire.markers import MarkerType, encode_marker, marker_type
from penstock.wire.records import iter_batches
from tests.unit.storage.storage_kit import batch, open_in, transactional

EPOCH = LeaderEpoch(1)


def write(
    log: PartitionLog,
    sequence: int,
    *,
    epoch: int = 0,
    verified: tuple[int, int] | None = None,
    producer_id: int = 7,
) -> AppendInfo:
    data = transactional("v", producer=(producer_id, epoch, sequence))
    return log.append_as_leader(data, EPOCH, now_ms=5, verified=verified)


def end(log: PartitionLog, *epochs: int, commit: bool = True) -> AppendInfo:
    markers = [Marker(7, epoch, commit, 3) for epoch in epochs]
    return log.append_markers(markers, EPOCH, now_ms=6)


def opened(root: Path) -> PartitionLog:
    """A log in which producer 7 has a transaction open."""
    log = open_in(root)
    write(log, 0, verified=(7, 0))
    return log


@pytest.mark.parametrize("verified", [None, (7, 1), (8, 0)])
def test_no_transaction_begins_that_is_not_verified(
    tmp_path: Path, verified: tuple[int, int] | None
) -> None:
    log = open_in(tmp_path)
    with pytest.raises(InvalidTxnStateError, match="has begun no transaction"):
        write(log, 0, verified=verified)
    assert log.log_end_offset == 0
    assert not log.has_open_transaction(7, 0)


def test_what_is_open_needs_no_asking(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert write(log, 1).base_offset == 1
    assert write(log, 1).duplicate
    assert log.has_open_transaction(7, 0)
    assert not log.has_open_transaction(7, 1)
    assert log.open_transactions() == [OpenTransaction(7, 0, 0)]


def test_nothing_is_written_beside_an_open_transaction(tmp_path: Path) -> None:
    log = opened(tmp_path)
    plain = batch("v", producer=(7, 0, 1))
    with pytest.raises(InvalidTxnStateError, match="outside of it"):
        log.append_as_leader(plain, EPOCH, now_ms=5)
    end(log, 1)
    log.append_as_leader(batch("v", producer=(7, 1, 0)), EPOCH, now_ms=5)


def test_no_transaction_begins_before_the_one_before_has_ended(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with pytest.raises(InvalidTxnStateError, match="of epoch 0 open"):
        write(log, 0, epoch=1, verified=(7, 1))
    end(log, 1)
    write(log, 0, epoch=1, verified=(7, 1))
    assert log.open_transactions() == [OpenTransaction(7, 1, 2)]


def test_a_mark_fences_what_comes_late(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert end(log, 1).base_offset == 1
    assert not log.has_open_transaction(7, 0)
    for verified in (None, (7, 0)):
        with pytest.raises(InvalidProducerEpochError):
            write(log, 1, verified=verified)
    with pytest.raises(OutOfOrderSequenceError):
        write(log, 1, epoch=1, verified=(7, 1))


def test_a_mark_that_comes_again_does_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    end(log, 1)
    write(log, 0, epoch=1, verified=(7, 1))
    for late in (0, 1):
        assert end(log, late) == AppendInfo(-1, -1, -1, 0)
    assert log.has_open_transaction(7, 1)
    assert log.log_end_offset == 3


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_mark_that_contradicts_the_one_that_is_there_is_refused(
    tmp_path: Path, commit: bool, goes_on: bool
) -> None:
    log = opened(tmp_path)
    end(log, 1, commit=commit)
    if goes_on:  # What the epoch writes after its mark makes nobody forget what that said.
        write(log, 0, epoch=1, verified=(7, 1))
    before = log.log_end_offset
    with pytest.raises(TransactionTornError, match="of producer 7 that ends under epoch 1"):
        end(log, 1, commit=not commit)
    with pytest.raises(TransactionTornError):
        log.append_markers([Marker(8, 1, True, 3), Marker(7, 1, not commit, 3)], EPOCH, now_ms=6)
    assert log.log_end_offset == before
    assert end(log, 1, commit=commit) == AppendInfo(-1, -1, -1, 0)
    assert end(log, 0, commit=not commit) == AppendInfo(-1, -1, -1, 0), "that is long over"


def with_snapshot(log: PartitionLog, root: Path) -> PartitionLog:
    log.roll()
    log.flush()
    return started(log, root)


def started(log: PartitionLog, root: Path) -> PartitionLog:
    log.close(save=False)
    return open_in(root)


def opened_beside(root: Path) -> PartitionLog:
    other = root / "follower"
    other.mkdir()
    return open_in(other)


def followed(log: PartitionLog, root: Path) -> PartitionLog:
    other = opened_beside(root)
    sent = b""
    end_offset = 0
    while end_offset < log.log_end_offset:
        sent += log.read(end_offset, 10_000, below=log.log_end_offset)
        end_offset = list(iter_batches(sent))[-1][0].next_offset
    other.append_as_follower(sent)
    return other


def followed_over_segments(log: PartitionLog, root: Path) -> PartitionLog:
    """A segment begins within the append, and what is known there is written down."""
    for _ in range(10):
        log.append_as_leader(batch("v" * 100), EPOCH, now_ms=5)
    other = followed(log, root)
    other.flush()
    assert snapshots(other.directory)
    return started(other, root / "follower")


def handed_over(log: PartitionLog, root: Path) -> PartitionLog:
    other, end_offset = opened_beside(root), log.log_end_offset
    other.truncate_fully_and_start_at(end_offset, log.producers_below(end_offset))
    return other


def cut(log: PartitionLog, _root: Path) -> PartitionLog:
    there = log.log_end_offset
    write(log, 0, epoch=1, verified=(7, 1))
    end(log, 2)
    log.truncate_to(there)
    return log


def cut_after_a_start(log: PartitionLog, root: Path) -> PartitionLog:
    there = log.log_end_offset
    write(log, 0, epoch=1, verified=(7, 1))
    end(log, 2)
    log = started(log, root)
    log.truncate_to(there)
    return log


@pytest.mark.parametrize(
    "later",
    [
        started,
        with_snapshot,
        followed,
        followed_over_segments,
        handed_over,
        cut,
        cut_after_a_start,
    ],
)
@pytest.mark.parametrize("commit", [True, False])
def test_what_a_mark_said_is_known_later(
    tmp_path: Path, later: Callable[[PartitionLog, Path], PartitionLog], commit: bool
) -> None:
    log = opened(tmp_path)
    end(log, 1, commit=commit)
    log = later(log, tmp_path)
    with pytest.raises(TransactionTornError):
        end(log, 1, commit=not commit)
    assert end(log, 1, commit=commit) == AppendInfo(-1, -1, -1, 0)


def test_a_mark_that_was_cut_says_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    end(log, 1, commit=False)
    log.truncate_to(1)
    assert end(log, 1, commit=True).base_offset == 1


def test_a_mark_is_taken_for_a_producer_that_never_wrote_here(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    assert end(log, 4).last_offset == 0
    with pytest.raises(InvalidProducerEpochError):
        write(log, 0, epoch=3, verified=(7, 3))


def test_marks_go_into_one_append(tmp_path: Path) -> None:
    log = opened(tmp_path)
    write(log, 0, producer_id=8, verified=(8, 0))
    markers = [
        Marker(7, 1, True, 3),
        Marker(7, 1, True, 3),  # Known by the one before.
        Marker(8, 1, False, 3),
        Marker(9, 1, False, 3),
    ]
    info = log.append_markers(markers, EPOCH, now_ms=6)
    assert (info.base_offset, info.last_offset) == (2, 4)
    assert info.records == log.read(2, 10_000, below=5)
    found = [
        (header.producer_id, header.leader_epoch, marker_type(data))
        for header, data in iter_batches(info.records)
    ]
    assert found == [(7, 1, MarkerType.COMMIT), (8, 1, MarkerType.ABORT), (9, 1, MarkerType.ABORT)]
    assert [one.producer_id for one in log.aborted_transactions(0, below=5)] == [8]
    assert log.open_transactions() == []
    assert log.append_markers([], EPOCH, now_ms=6) == AppendInfo(-1, -1, -1, 0)


def test_marks_of_an_older_leader_are_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.assign_epoch(LeaderEpoch(2))
    with pytest.raises(FencedLeaderEpochError):
        end(log, 1)


def test_no_client_writes_marks(tmp_path: Path) -> None:
    log = opened(tmp_path)
    data = encode_marker(
        MarkerType.COMMIT, producer_id=7, producer_epoch=1, coordinator_epoch=0, timestamp_ms=1
    )
    with pytest.raises(InvalidRecordError, match="control"):
        log.append_as_leader(data, EPOCH, now_ms=5, verified=(7, 1))


def test_only_internal_logs_take_batches_without_a_sequence(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    with pytest.raises(InvalidRecordError, match="negative"):
        write(log, -1, verified=(7, 0))
    log.internal = True
    write(log, -1, verified=(7, 0))
    assert write(log, -1).base_offset == 1
    with pytest.raises(InvalidTxnStateError):
        write(log, -1, epoch=1, verified=(7, 1))
    end(log, 1)
    with pytest.raises(InvalidProducerEpochError):
        write(log, -1, verified=(7, 0))
    with pytest.raises(InvalidRecordError, match="negative"):
        log.append_as_leader(batch("v", producer=(7, 1, -1)), EPOCH, now_ms=5)


def test_what_is_open_is_known_after_a_restart_and_a_cut(tmp_path: Path) -> None:
    opened(tmp_path).flush()
    log = open_in(tmp_path)
    assert log.has_open_transaction(7, 0)
    end(log, 1)
    log.close(save=True)
    log = open_in(tmp_path)
    assert not log.has_open_transaction(7, 0)
    log.truncate_to(1)
    assert log.open_transactions() == [OpenTransaction(7, 0, 0)]
    log.truncate_to(0)
    assert log.open_transactions() == []
