"""A batch's length is believed only as far as any batch may go: it decides how much is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.broker.storage.cleaner import filtering
from penstock.broker.storage.cleaner.filtering import AbortedRanges, Filter
from penstock.broker.storage.cleaner.offset_map import SLOT_BYTES, OffsetMap
from penstock.broker.storage.damage import Examination
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.placing import SegmentDamagedError
from penstock.broker.storage.settings import TopicLogConfig
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import HEADER_BYTES, RecordData, encode_batch, parse_header
from penstock.wire.topic_config import MAX_MESSAGE_BYTES
from tests.unit.storage.storage_kit import EVERYTHING, batch, open_in, read_all, small_config
from tests.unit.storage.test_damage import damages, flip

EPOCH = LeaderEpoch(1)
LENGTH_AT = 8
SEGMENT_BYTES = 1 << 30
MIB = 1 << 20


class ReadingDisk(Disk):
    """Knows how much was read at once; tells what is cached from a set of such answers."""

    def __init__(self) -> None:
        self.largest_bytes = 0
        self.reads: list[tuple[int, int]] = []
        self.cached_up_to = 1 << 60

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        self.largest_bytes = max(self.largest_bytes, size)
        self.reads.append((position, size))
        return super().read_at(fd, size, position)

    def is_cached(self, fd: int, position: int, size: int) -> bool:
        return position + size <= self.cached_up_to


def log_of(root: Path, disk: Disk, *values: str) -> PartitionLog:
    config = small_config(segment_bytes=SEGMENT_BYTES, max_message_bytes=MAX_MESSAGE_BYTES)
    log = open_in(root, config=config, disk=disk)
    log.assign_epoch(EPOCH)
    for value in values:
        log.append_as_leader(batch(value), EPOCH, now_ms=0)
    log.flush()
    return log


def grow(log: PartitionLog, size_bytes: int) -> None:
    """Have the segment look as large; what is behind its batches is not read in these tests."""
    segment = log.files.active
    os.truncate(segment.path, size_bytes)
    segment.size_bytes = size_bytes


def test_a_length_that_no_batch_can_have_is_damage_before_anything_is_read(tmp_path: Path) -> None:
    disk = ReadingDisk()
    log = log_of(tmp_path, disk, "a", "b")
    grow(log, 600 * MIB)
    segment = log.files.active
    flip(segment.path, LENGTH_AT, 5)  # 512 MiB.
    with pytest.raises(SegmentDamagedError, match=f"none has more than {MAX_MESSAGE_BYTES}"):
        log.read(0, MIB, below=EVERYTHING)
    findings = Examination(log, segment).run()
    assert (findings.damages[0].offset, findings.error) == (0, None)
    assert disk.largest_bytes <= MIB


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_batch_that_goes_on_behind_one_that_the_index_knows_is_damage(
    tmp_path: Path, *, is_closed: bool
) -> None:
    disk = ReadingDisk()
    log = log_of(tmp_path, disk, "a" * 500, "b" * 500, "c" * 500)
    segment = log.files.active
    if is_closed:
        log.roll()
        log.flush()
    # Not what a segment is closed with: it is as if 20 MiB of batches came after these.
    os.truncate(segment.path, 20 * MIB)
    segment.size_bytes = 20 * MIB
    second = segment.position_of(1)
    assert second is not None
    flip(segment.path, LENGTH_AT, 0)  # 16 MiB.
    disk.largest_bytes = 0
    with pytest.raises(SegmentDamagedError, match="the index knows"):
        log.read(0, MIB, below=EVERYTHING)
    found = damages(log, segment)[0]
    assert (found.offset, found.position, found.end_offset) == (0, 0, 1)
    assert "the index knows" in found.what
    assert disk.largest_bytes <= MIB


def test_a_length_beyond_what_the_index_has_read_of_it_is_damage(tmp_path: Path) -> None:
    """Also where it is within what was asked for: a reader would be told of nothing."""
    log = log_of(tmp_path, Disk(), *("a" * 600_000, "b" * 600_000, "c" * 600_000))
    flip(log.files.active.path, LENGTH_AT + 1, 2)  # 256 KiB more.
    with pytest.raises(SegmentDamagedError, match="the index knows"):
        log.read(0, MIB, below=EVERYTHING)


def test_a_little_of_what_was_read_does_not_keep_all_of_it_in_memory(tmp_path: Path) -> None:
    """What is kept for followers is counted by what of it is whole batches."""
    log = log_of(tmp_path, Disk(), "a" * 20_000, "b" * 600_000, "c" * 600_000)
    log.roll()
    log.flush()
    for max_bytes in (100_000, 700_000):
        found = log.read(0, max_bytes, below=EVERYTHING)
        kept = len(found.obj) if isinstance(found, memoryview) else len(found)
        assert kept <= 2 * len(found)


def test_an_index_that_names_no_batch_makes_none_damaged(tmp_path: Path) -> None:
    disk = ReadingDisk()
    log = log_of(tmp_path, disk, "a" * 500, "b" * MIB, "c" * 500, "d" * 500)
    segment = log.files.active
    log.roll()
    log.flush()
    sound = segment.index_path.read_bytes()
    third = segment.position_of(2)
    assert third is not None
    wrong = (third.position - 1000).to_bytes(4)
    assert third.position.to_bytes(4) in sound
    segment.index_path.write_bytes(sound.replace(third.position.to_bytes(4), wrong))
    assert len(log.read(1, 1000, below=EVERYTHING)) > MIB
    assert damages(log, segment) == []


def test_the_largest_batch_that_any_topic_takes_is_read_and_examined(tmp_path: Path) -> None:
    assert TopicLogConfig.of({"max.message.bytes": str(MAX_MESSAGE_BYTES)})
    overhead = len(batch("x" * MIB * 16)) - MIB * 16
    largest = batch("x" * (MAX_MESSAGE_BYTES - overhead))
    assert len(largest) <= MAX_MESSAGE_BYTES < len(largest) + 8, "but for what a length takes"
    log = log_of(tmp_path, Disk(), "a")
    log.append_as_leader(largest, EPOCH, now_ms=0)
    log.append_as_leader(batch("z"), EPOCH, now_ms=0)
    assert len(read_all(log)) == log.size_bytes > MAX_MESSAGE_BYTES
    assert damages(log, log.files.active) == []


def test_all_of_a_batch_that_is_larger_than_asked_for_is_brought_into_memory(
    tmp_path: Path,
) -> None:
    disk = ReadingDisk()
    log = log_of(tmp_path, disk, "x" * MIB, "y", "z")
    first = log.files.active.position_of(1)
    assert first is not None
    assert log.cold_read(0, 1000) is None
    disk.cached_up_to = 5000
    assert log.cold_read(1, 1) is not None
    warm = log.cold_read(0, 1000)
    assert warm is not None, "the rest of it is not in memory"
    disk.reads.clear()
    warm()
    assert sum(size for _, size in disk.reads) == first.position
    disk.cached_up_to = HEADER_BYTES
    warm = log.cold_read(0, 1000)
    assert warm is not None
    disk.reads.clear()
    warm()
    assert sum(size for _, size in disk.reads) == first.position


def test_a_clean_makes_no_batch_larger_than_any_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its producer compressed better than the cleaner would is left as it is."""
    latest = OffsetMap(100 * SLOT_BYTES)
    latest.put(b"a", 1)
    latest.put(b"b", 2)
    data = encode_batch([RecordData(0, key, b"value" * 10) for key in (b"a", b"a", b"b")])
    rules = Filter(
        latest,
        AbortedRanges(()),
        log_start_offset=0,
        end_offset=3,
        last_batches={},
        epochs={},
        now_ms=0,
        delete_retention_ms=0,
    )
    filtered = rules.apply(parse_header(data), data)
    assert filtered is not None
    assert len(filtered) < len(data)
    monkeypatch.setattr(filtering, "MAX_MESSAGE_BYTES", len(filtered))
    assert rules.apply(parse_header(data), data) == filtered
    monkeypatch.setattr(filtering, "MAX_MESSAGE_BYTES", len(filtered) - 1)
    assert rules.apply(parse_header(data), data) == data
