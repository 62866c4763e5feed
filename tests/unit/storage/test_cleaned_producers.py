"""Compaction keeps of each idempotent producer what its retries are recognised by."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.recovery import SavedState
from penstock.wire.records import RecordData, encode_batch, iter_batches
from tests.unit.storage.cleaning import EPOCH, Broker, close_segment, compacted, put, shown
from tests.unit.storage.storage_kit import KEY, open_in, read_all


async def test_the_last_batch_of_a_producer_stays_without_records(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"), producer=(7, 0, 0))
    put(log, ("a", "2"), ("a", "3"), producer=(7, 0, 1))
    put(log, ("a", "4"))
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert shown(log) == {3: ("a", "4")}
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    log.close(save=False)
    again = open_in(tmp_path, config=log.config, saved=SavedState(4))
    entry = again.producers.entry(7)
    assert entry is not None
    assert (entry.producer_epoch, entry.batches[-1].next_sequence) == (0, 3)
    retried = encode_batch(
        [RecordData(1000, b"a", b"2"), RecordData(1001, b"a", b"3")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=1,
    )
    assert again.append_as_leader(retried, EPOCH, now_ms=1).duplicate


async def test_that_batch_goes_once_the_producer_has_written_more(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"), producer=(7, 0, 0))
    put(log, ("a", "2"))
    close_segment(log)
    broker = Broker(log)
    await broker.cleaner.clean_one()
    assert [header.producer_id for header, _ in iter_batches(read_all(log))] == [7, -1]
    put(log, ("a", "3"), producer=(7, 0, 1))
    close_segment(log)
    await broker.cleaner.clean_one()
    assert [header.producer_id for header, _ in iter_batches(read_all(log))] == [-1, 7]


async def test_the_snapshots_of_segments_that_became_one_are_removed(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    broker = Broker(log)
    for sequence in range(20):
        put(log, ("a", str(sequence)), producer=(7, 0, sequence))
        close_segment(log)
        await broker.cleaner.clean_one()
    bases = [segment.base_offset for segment in log.files.segments]
    assert len(bases) <= 3
    assert {offset for offset, _ in snapshots(log.directory)} <= {*bases, log.log_end_offset}
    log.close(save=False)
    again = open_in(tmp_path, config=log.config, saved=SavedState(20))
    entry = again.producers.entry(7)
    assert entry is not None
    assert entry.batches[-1].next_sequence == 20


def producers_batch(offset: int, key: bytes, sequence: int) -> bytes:
    """A batch of producer 7, as a leader pushes it."""
    return encode_batch(
        [RecordData(1000, key, b"v")],
        base_offset=offset,
        leader_epoch=0,
        producer_id=7,
        producer_epoch=0,
        base_sequence=sequence,
    )


@pytest.mark.parametrize("uncommitted", [1, 8])
@pytest.mark.parametrize("cleaned_before", [False, True])
async def test_a_retry_is_recognised_when_what_the_producer_wrote_later_is_cut_off(
    tmp_path: Path, uncommitted: int, *, cleaned_before: bool
) -> None:
    log = compacted(tmp_path)
    broker = Broker(log)
    log.append_as_follower(producers_batch(0, b"a", 0))
    close_segment(log)
    if cleaned_before:
        assert await broker.cleaner.clean_one()
    put(log, ("a", "2"))
    put(log, ("a", "3"))
    close_segment(log)
    tail = [producers_batch(3 + at, b"z", 1 + at) for at in range(uncommitted)]
    log.append_as_follower(b"".join(tail))
    log.flush()
    broker.committed[KEY] = 3
    assert await broker.cleaner.clean_one()
    assert min(shown(log)) == 2, "the producer's first batch is empty"
    for path in log.directory.glob("*.snapshot"):
        path.unlink()  # A follower takes none in the middle of a push.
    log.truncate_to(3)
    assert log.append_as_leader(producers_batch(0, b"a", 0), EPOCH, now_ms=1).duplicate
    assert log.log_end_offset == 3
