"""What is counted of retention, the cleaner and the scrubber, under the names that people see."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.broker.scrubber import Progress
from penstock.broker.storage.damage import Damage, mend
from penstock.broker.storage.retention import delete_old
from penstock.broker.storage_metrics import StorageMetrics
from penstock.wire.ids import LeaderEpoch
from tests.unit.storage.cleaning import Broker, close_segment, compacted, put
from tests.unit.storage.storage_kit import NoRoom, batch, open_in, small_config
from tests.unit.storage.test_damage import flip
from tests.unit.storage.test_scrubber import Disks

EPOCH = LeaderEpoch(0)


class Shown:
    """Metrics as they are scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = StorageMetrics(self.registry)

    def __getitem__(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_{name}")

    def deleted(self) -> dict[str, tuple[float | None, float | None]]:
        """Segments and bytes by reason."""
        return {
            why: (
                self.registry.get_sample_value(
                    "penstock_retention_deleted_segments_total", {"reason": why}
                ),
                self.registry.get_sample_value(
                    "penstock_retention_deleted_bytes_total", {"reason": why}
                ),
            )
            for why in ("time", "size", "log_start")
        }


# --- retention -----------------------------------------------------------------------------------


def test_old_segments_are_counted_by_why_they_go_once_they_do(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(segment_bytes=100))
    shown = Shown()
    log.home.segment_deleted = shown.metrics.segment_deleted
    for number in range(9):
        log.append_as_leader(batch(str(number), timestamp_ms=1000 * number), EPOCH, now_ms=0)
    log.flush()
    size = log.size_bytes // 9
    assert shown.deleted() == {"time": (0, 0), "size": (0, 0), "log_start": (0, 0)}

    log.config = small_config(segment_bytes=100, retention_ms=1000)
    log.advance_log_start(delete_old(log, high_watermark=9, now_ms=3500))
    log.config = small_config(segment_bytes=100, retention_bytes=5 * size)
    start = delete_old(log, high_watermark=9, now_ms=0)
    assert start == 4
    assert shown.deleted()["size"] == (0, 0), "it is due, and not deleted yet"
    log.advance_log_start(start)
    log.config = small_config(segment_bytes=100)
    log.advance_log_start(7)  # As a leader's push, or DeleteRecords, has it.
    log.flush()
    assert shown.deleted() == {
        "time": (3, 3 * size),
        "size": (1, size),
        "log_start": (3, 3 * size),
    }


# --- the cleaner ---------------------------------------------------------------------------------


async def test_cleans_are_counted_with_what_they_read_and_write(tmp_path: Path) -> None:
    shown = Shown()
    log = compacted(tmp_path)
    broker = Broker(log, counts=shown.metrics.cleaning)
    broker.clock.now_ms = 7_000
    shown.metrics.cleaning.watch(broker.cleaner)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    before = log.files.segments[0].size_bytes
    assert shown["cleaner_last_clean_timestamp_seconds"] == 0
    assert await broker.cleaner.clean_one()
    assert shown["cleaner_cleans_total"] == 1
    assert shown["cleaner_failures_total"] == 0
    assert shown["cleaner_read_bytes_total"] == 2 * before, "for the keys, and to copy"
    assert shown["cleaner_written_bytes_total"] == log.files.segments[0].size_bytes
    assert shown["cleaner_last_clean_timestamp_seconds"] == 7.0


async def test_the_dirtiest_log_shows_also_while_it_is_not_due(tmp_path: Path) -> None:
    shown = Shown()
    log = compacted(tmp_path, min_cleanable_dirty_ratio=0.6)
    broker = Broker(log, counts=shown.metrics.cleaning)
    shown.metrics.cleaning.watch(broker.cleaner)
    put(log, ("a", "1"))
    close_segment(log)
    assert await broker.cleaner.clean_one()
    assert shown["cleaner_dirtiest_ratio"] == 1
    put(log, ("b", "1"))
    close_segment(log)
    assert not await broker.cleaner.clean_one()
    assert shown["cleaner_dirtiest_ratio"] == pytest.approx(0.5)


async def test_a_log_counts_as_uncleanable_until_it_is_cleaned(tmp_path: Path) -> None:
    shown = Shown()
    log = compacted(tmp_path)
    broker = Broker(log, counts=shown.metrics.cleaning)
    shown.metrics.cleaning.watch(broker.cleaner)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    [segment, _] = log.files.segments
    sound = segment.path.read_bytes()
    segment.overwrite(bytes([sound[70] ^ 1]), 70)
    assert await broker.cleaner.clean_one()
    assert not await broker.cleaner.clean_one()
    assert shown["cleaner_failures_total"] == 1
    assert shown["cleaner_uncleanable_partitions"] == 1
    mend(log, segment, Damage(0, 0, "a bit has flipped"), sound)()
    assert await broker.cleaner.clean_one()
    assert shown["cleaner_failures_total"] == 1
    assert shown["cleaner_uncleanable_partitions"] == 0


async def test_a_topic_that_is_compacted_no_more_has_no_uncleanable_log(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    broker = Broker(log)
    put(log, ("a", "1"))
    close_segment(log)
    flip(log.files.segments[0].path, 65)
    assert await broker.cleaner.clean_one()
    assert broker.cleaner.uncleanable_count == 1
    log.config = small_config()
    assert not await broker.cleaner.clean_one()
    assert broker.cleaner.uncleanable_count == 0


async def test_want_of_room_is_a_failure_and_leaves_the_log_cleanable(tmp_path: Path) -> None:
    shown = Shown()
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    disk = NoRoom()
    disk.full = {"create"}
    log.home.disk = disk
    broker = Broker(log, counts=shown.metrics.cleaning)
    shown.metrics.cleaning.watch(broker.cleaner)
    assert not await broker.cleaner.clean_one()
    assert shown["cleaner_failures_total"] == 1
    assert shown["cleaner_uncleanable_partitions"] == 0


# --- the scrubber --------------------------------------------------------------------------------


async def test_a_round_shows_how_far_it_is_what_it_read_and_what_it_found(tmp_path: Path) -> None:
    shown = Shown()
    disks = Disks(tmp_path, 2)
    first, second = (disks.logs[key] for key in sorted(disks.logs))
    flip(first.files.segments[0].path, 70)
    second.files.segments[1].index_path.write_bytes(b"rubbish")
    scrubber = disks.scrubber(counts=shown.metrics.scrubbing)
    shown.metrics.scrubbing.watch(scrubber, [tmp_path])

    def progress() -> tuple[float | None, float | None]:
        labels = {"directory": str(tmp_path)}
        return (
            shown.registry.get_sample_value("penstock_scrubber_progress_ratio", labels),
            shown.registry.get_sample_value(
                "penstock_scrubber_round_start_timestamp_seconds", labels
            ),
        )

    assert progress() == (0, 0)
    seen = []
    disks.on_found = lambda: seen.append(progress())
    await scrubber.scrub(tmp_path, Progress(3_000, min(disks.logs)))
    await scrubber.stop()
    assert seen == [(0, 3)], "while the first of two is read"
    assert progress() == (1, 3)
    assert shown["scrubber_damaged_segments_total"] == 2
    closed = [segment for log in (first, second) for segment in log.files.segments[:-1]]
    read = shown["scrubber_read_bytes_total"]
    assert read is not None
    assert read >= sum(segment.size_bytes for segment in closed)
