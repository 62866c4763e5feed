"""Closed segments are read now and then, so that damage is found before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.scrubber import PROGRESS_FILE, Counts, Progress, Scrubber
from penstock.broker.storage.checkpoints import METADATA_FILE, PartitionMetadata, encode_metadata
from penstock.broker.storage.log import PartitionLog
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import KEY, BrokenDisk
from tests.unit.storage.test_damage import filled, flip


class Disks:
    """Logs of several partitions in one directory."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        keys = [TopicIdPartition(TopicId(bytes([9 - n]) * 16), n) for n in range(count)]
        self.logs = {key: filled(path / str(n)) for n, key in enumerate(keys)}
        self.found: list[tuple[TopicIdPartition, int]] = []
        self.on_found: Callable[[], object] = lambda: None

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        return self.logs.get(key)

    def held_in(self, path: Path) -> list[TopicIdPartition]:
        assert path == self.path
        return list(self.logs)

    def scrubber(
        self,
        *,
        interval_ms: int = 3_600_000,
        counts: Counts | None = None,
        wall_ms: Callable[[], int] = lambda: 5_000,
    ) -> Scrubber:
        return Scrubber(
            [self.path],
            self,
            self._find,
            cluster_id="c1",
            interval_ms=interval_ms,
            bytes_per_second=100_000_000,
            counts=counts,
            wall_clock_ms=wall_ms,
        )

    def _find(self, log: PartitionLog, offset: int) -> None:
        self.found.append((log.key, offset))
        self.on_found()

    def progress(self) -> Progress | None:
        file = self.path / PROGRESS_FILE
        return Progress.decode(file.read_bytes()) if file.exists() else None


async def test_every_closed_segment_is_read_and_the_open_one_is_not(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 1)
    [log] = disks.logs.values()
    for segment in log.files.segments:
        flip(segment.path, 70)
    scrubber = disks.scrubber()
    await scrubber.start()
    await eventually(lambda: disks.progress() is not None)
    await scrubber.stop()
    closed = log.files.segments[:-1]
    assert disks.found == [(KEY, segment.base_offset) for segment in closed]
    assert disks.progress() == Progress(5_000)


@pytest.mark.parametrize("how", ["a bit flipped", "another topic's", "gone"])
async def test_a_file_that_says_whose_log_it_is_is_written_anew_where_it_is_wrong(
    tmp_path: Path, how: str
) -> None:
    disks = Disks(tmp_path, 2)
    logs = list(disks.logs.values())
    for log in logs:
        metadata = encode_metadata(PartitionMetadata(log.key.topic_id, "c1"))
        (log.directory / METADATA_FILE).write_bytes(metadata)
    file = logs[0].directory / METADATA_FILE
    sound = file.read_bytes()
    if how == "a bit flipped":
        flip(file, 20)
    elif how == "gone":
        file.unlink()
    else:
        file.write_bytes(encode_metadata(PartitionMetadata(TopicId(b"?" * 16), "c1")))
    scrubber = disks.scrubber()
    with capture_logs() as lines:
        await scrubber.start()
        await eventually(lambda: disks.progress() == Progress(5_000))
        await scrubber.stop()
    assert file.read_bytes() == sound
    told = [line for line in lines if line["event"] == "partition.metadata written anew"]
    assert [line["partition"] for line in told] == [logs[0].name]
    assert str(file) in told[0]["reason"]


async def test_a_disk_that_was_unmounted_is_no_damaged_index(tmp_path: Path) -> None:
    """What is open can still be read then, and every index seems to be missing."""
    path = tmp_path / "disk"
    path.mkdir()
    disks = Disks(path, 2)
    for log in disks.logs.values():
        log.home.note_identity()
    path.rename(tmp_path / "away")
    path.mkdir()
    scrubber = disks.scrubber()
    with capture_logs() as lines:
        await scrubber.scrub(path, Progress(5_000))
    await scrubber.stop()
    assert not [line for line in lines if line["event"] == "damaged index made anew"]
    for log in disks.logs.values():
        assert log.home.failure is not None
        assert "not the directory that was opened" in log.home.failure.message
    assert list(path.iterdir()) == []


async def test_an_index_that_is_gone_is_made_anew_where_the_directory_is_the_same(
    tmp_path: Path,
) -> None:
    disks = Disks(tmp_path, 1)
    [log] = disks.logs.values()
    log.home.note_identity()
    segment = log.files.segments[0]
    segment.index_path.unlink()
    scrubber = disks.scrubber()
    await scrubber.scrub(tmp_path, Progress(5_000))
    await scrubber.stop()
    assert segment.index_path.exists()
    assert log.home.failure is None


async def test_a_round_goes_on_where_the_last_process_stopped(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 3)
    for log in disks.logs.values():
        for segment in log.files.segments:
            flip(segment.path, 70)
    _, second, third = sorted(disks.logs)
    second_base = disks.logs[second].files.segments[1].base_offset
    scrubber = disks.scrubber()
    assert await scrubber.scrub(tmp_path, Progress(3_000, second, 1)) == Progress(3_000)
    expected = [second_base]
    expected += [segment.base_offset for segment in disks.logs[third].files.segments[:-1]]
    assert [offset for _, offset in disks.found] == expected
    await scrubber.stop()


async def test_the_next_round_begins_when_its_time_has_come(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 1)
    now_ms = 5_000
    scrubber = disks.scrubber(interval_ms=20, wall_ms=lambda: now_ms)
    await scrubber.start()
    await eventually(lambda: disks.progress() == Progress(5_000))
    [log] = disks.logs.values()
    flip(log.files.segments[0].path, 70)
    now_ms = 5_020
    await eventually(lambda: bool(disks.found))
    await scrubber.stop()


async def test_progress_that_can_not_be_read_begins_a_round(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 1)
    (tmp_path / PROGRESS_FILE).write_bytes(b"rubbish")
    scrubber = disks.scrubber()
    await scrubber.start()
    await eventually(lambda: (tmp_path / PROGRESS_FILE).read_bytes() != b"rubbish")
    await scrubber.stop()
    assert disks.progress() == Progress(5_000)


def test_progress_outlives_the_process() -> None:
    for progress in (Progress(7), Progress(7, TopicIdPartition(TopicId(b"x" * 16), 3), 99)):
        assert Progress.decode(progress.encode()) == progress


async def test_a_disk_that_fails_while_it_is_read_fails_its_directory(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 1)
    [log] = disks.logs.values()
    broken = BrokenDisk()
    broken.failing = {"read"}
    log.home.disk = broken
    scrubber = disks.scrubber()
    await scrubber.start()
    await eventually(lambda: log.home.failure is not None)
    await scrubber.stop()
    assert disks.found == []


async def test_an_interval_of_zero_reads_nothing(tmp_path: Path) -> None:
    scrubber = Disks(tmp_path, 1).scrubber(interval_ms=0)
    await scrubber.start()
    assert not scrubber._tasks
    await scrubber.stop()
