from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.core.ports import DamagedLogError, Log
from penstock.broker.found_logs import report_unopened
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import DataDirectoryError, RecordTooLargeError, StorageError
from penstock.wire.ids import LeaderEpoch, TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import EVERYTHING, BrokenDisk, Clock, batch, values_of

ONE, TWO = TopicId(b"1" * 16), TopicId(b"2" * 16)


class GatedDisk(Disk):
    """Lets no fdatasync end while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.syncs = 0

    def sync_data(self, fd: int) -> None:
        self.syncs += 1
        self.begun.set()
        assert self.gate.wait(20)
        super().sync_data(fd)


class Kit:
    """Makes managers on the same directories, one after the other."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.durable: list[tuple[str, int]] = []
        self.failed: list[Path] = []
        self.moved = asyncio.Event()
        self.managers: list[LogManager] = []

    def _on_durable(self, log: PartitionLog) -> None:
        self.durable.append((log.name, log.durable_offset))
        self.moved.set()

    def open(
        self, *, disk: Disk | None = None, cluster_id: str = "c1", **settings: object
    ) -> LogManager:
        manager = LogManager(
            self.paths,
            LogSettings(**({"checkpoint_interval_ms": 20} | settings)),  # type: ignore[arg-type]
            self._on_durable,
            Clock(),
            cluster_id=cluster_id,
            on_directory_failed=lambda path, _: self.failed.append(path),
            disk=disk,
        )
        manager.open()
        self.managers.append(manager)
        return manager

    async def until_durable(self, *logs: Log) -> None:
        await eventually(lambda: all(log.durable_offset == log.log_end_offset for log in logs))


def crash(manager: LogManager, kit: Kit) -> None:
    """Leave the files as a kill would: copied aside before the close tidies them up."""
    for path in kit.paths:
        # What is being deleted goes away in the background, under the copy's eyes.
        deleted = shutil.ignore_patterns("*-delete")
        shutil.copytree(path, path.with_name(path.name + "-crashed"), ignore=deleted)
    manager.close()
    for path in kit.paths:
        shutil.rmtree(path)
        path.with_name(path.name + "-crashed").rename(path)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    kit = Kit(tmp_path / "logs")
    yield kit
    for manager in kit.managers:
        manager.close()


async def test_an_append_becomes_durable_and_is_told(kit: Kit) -> None:
    log = kit.open().get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    assert log.durable_offset == 0
    await kit.until_durable(log)
    assert kit.durable == [("t-0", 2)]


async def test_one_round_covers_everything_that_came_while_the_last_was_under_way(
    kit: Kit,
) -> None:
    disk = GatedDisk()
    manager = kit.open(disk=disk)
    logs = [manager.get_or_create("t", partition, ONE, {}) for partition in range(3)]
    disk.gate.clear()
    disk.begun.clear()
    logs[0].append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(disk.begun.is_set)
    for _ in range(10):
        for log in logs:
            log.append_as_leader(batch("b"), 0, now_ms=1)
            manager.flush_soon(log)
        await asyncio.sleep(0)
    assert [log.durable_offset for log in logs] == [0, 0, 0]
    before = disk.syncs
    disk.gate.set()
    await kit.until_durable(*logs)
    assert kit.durable == [("t-0", 1), ("t-0", 11), ("t-1", 10), ("t-2", 10)]
    # One sync a log, and those of the epoch checkpoints.
    assert disk.syncs - before <= 2 * len(logs) + 1


async def test_a_cut_during_a_flush_keeps_the_promise(kit: Kit) -> None:
    disk = GatedDisk()
    log = kit.open(disk=disk).get_or_create("t", 0, ONE, {})
    disk.gate.clear()
    disk.begun.clear()
    for value in ("a", "b", "c"):
        log.append_as_leader(batch(value), 1, now_ms=1)
    await eventually(disk.begun.is_set)
    threading.Timer(0.05, disk.gate.set).start()  # The cut syncs as well.
    log.truncate_to(1)
    log.append_as_follower(batch("x", base_offset=1, leader_epoch=2))
    assert log.durable_offset <= 1
    await kit.until_durable(log)
    assert log.durable_offset == 2
    assert values_of(log) == ["a", "x"]


async def test_a_log_deleted_during_its_flush_goes_quietly(kit: Kit) -> None:
    disk = GatedDisk()
    manager = kit.open(disk=disk)
    log, other = (manager.get_or_create("t", partition, ONE, {}) for partition in range(2))
    disk.gate.clear()
    disk.begun.clear()
    log.append_as_leader(batch("a"), 0, now_ms=1)
    other.append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(disk.begun.is_set)
    manager.delete(log.key)
    assert manager.get(log.key) is None
    disk.gate.set()
    await kit.until_durable(other)
    await eventually(
        lambda: sorted(path.name for path in kit.paths[0].iterdir()) == [".state", "t-1"]
    )
    with pytest.raises(StorageError, match="t-0: the log is closed"):
        log.append_as_leader(batch("b"), 0, now_ms=1)
    assert not kit.failed
    manager.delete(log.key)


async def test_a_failed_flush_fails_the_directory_and_nothing_more_is_promised(
    kit: Kit,
) -> None:
    disk = BrokenDisk()
    manager = kit.open(disk=disk)
    log, other = (manager.get_or_create("t", partition, ONE, {}) for partition in range(2))
    disk.failing = {"sync"}
    log.append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(lambda: bool(kit.failed))
    disk.failing = set()
    assert kit.failed == [kit.paths[0]]
    assert log.durable_offset == 0
    for one in (log, other):
        with pytest.raises(StorageError, match="logs failed while flushing t-0"):
            one.append_as_leader(batch("b"), 0, now_ms=1)
        with pytest.raises(StorageError):
            one.read(0, 100, below=EVERYTHING)
    with pytest.raises(StorageError):
        manager.get_or_create("t", 2, ONE, {})
    manager.close()
    assert kit.open().previous_broker_epoch() == -1


async def test_a_failed_directory_takes_down_only_its_own_partitions(tmp_path: Path) -> None:
    class HalfBroken(BrokenDisk):
        def open(self, path: Path, flags: int) -> int:
            if "bad" in path.parts:
                self._check("open")
            return super().open(path, flags)

    kit, disk = Kit(tmp_path / "good", tmp_path / "bad"), HalfBroken()
    manager = kit.open(disk=disk)
    logs = [manager.get_or_create("t", partition, ONE, {}) for partition in range(4)]
    assert {log.directory.parent.name for log in logs} == {"good", "bad"}
    disk.failing = {"open"}
    for log in logs:
        log.append_as_leader(batch("a"), 0, now_ms=1)  # Writes the epoch checkpoint.
    await eventually(lambda: bool(kit.failed))
    good = [log for log in logs if log.directory.parent.name == "good"]
    for log in good:
        log.append_as_leader(batch("b"), 0, now_ms=1)
    await kit.until_durable(*good)
    assert kit.failed == [tmp_path / "bad"]
    fresh = manager.get_or_create("t", 9, ONE, {})
    assert fresh.directory.parent.name == "good"
    manager.close()


async def test_a_clean_stop_leaves_the_broker_epoch_and_everything_saved(kit: Kit) -> None:
    manager = kit.open()
    assert manager.previous_broker_epoch() == -1
    manager.record_broker_epoch(17)
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b", "c", producer=(7, 0, 0)), 4, now_ms=1)
    manager.checkpoint_high_watermark(log.key, 2)
    log.advance_log_start(1)
    manager.close()

    manager = kit.open()
    assert manager.previous_broker_epoch() == 17
    again = manager.get(log.key)
    assert again is not None
    assert again.opened_clean
    assert (again.log_start_offset, again.log_end_offset, again.durable_offset) == (1, 3, 3)
    assert manager.high_watermark(log.key) == 2
    assert again.last_epoch == 4
    assert again.producers.entry(7) is not None
    assert manager.get_or_create("t", 0, ONE, {}) is again


async def test_a_crash_is_not_taken_for_a_clean_stop(kit: Kit) -> None:
    manager = kit.open(flush_policy=FlushPolicy.OS)
    manager.record_broker_epoch(17)
    log = manager.get_or_create("t", 0, ONE, {})
    manager.close()
    manager = kit.open(flush_policy=FlushPolicy.OS)
    manager.record_broker_epoch(18)
    again = manager.get_or_create("t", 0, ONE, {})
    again.append_as_leader(batch("a", "b"), 0, now_ms=1)
    await kit.until_durable(again)
    crash(manager, kit)
    manager = kit.open(flush_policy=FlushPolicy.OS)
    assert manager.previous_broker_epoch() == -1
    found = manager.get(log.key)
    assert found is not None
    assert values_of(found) == ["a", "b"]


async def test_a_directory_added_later_does_not_make_the_stop_unclean(tmp_path: Path) -> None:
    kit = Kit(tmp_path / "first")
    manager = kit.open()
    manager.record_broker_epoch(5)
    manager.close()
    kit.paths = (tmp_path / "first", tmp_path / "second")
    manager = kit.open()
    assert manager.previous_broker_epoch() == 5
    manager.record_broker_epoch(6)
    manager.close()
    assert kit.open().previous_broker_epoch() == 6
    kit.managers[-1].close()


async def test_state_is_saved_before_long_without_a_stop(kit: Kit) -> None:
    manager = kit.open()
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b", "c"), 0, now_ms=1)
    await kit.until_durable(log)
    manager.checkpoint_high_watermark(log.key, 3)
    directory = manager._directories[0]
    await eventually(lambda: directory._use_state().get(log.key).high_watermark == 3)
    await eventually(lambda: not directory._use_state()._changed)
    await eventually(lambda: directory._saves.timer is None)
    crash(manager, kit)
    manager = kit.open()
    assert manager.high_watermark(log.key) == 3
    assert manager._directories[0]._use_state().get(log.key).recovery_point == 3


async def keep_high_watermark(kit: Kit) -> LogManager:
    """Three records, all known to be committed, and that on the disk; nothing is saved later."""
    manager = kit.open(checkpoint_interval_ms=3_600_000)
    log = manager.get_or_create("t", 0, ONE, {})
    for value in ("a", "b", "c"):
        log.append_as_leader(batch(value), 0, now_ms=1)
    await kit.until_durable(log)
    manager.checkpoint_high_watermark(log.key, 3)
    manager._directories[0]._note(log.key)
    manager._directories[0]._use_state().write()
    return manager


async def test_records_after_a_cut_are_not_taken_for_committed_by_a_crash(kit: Kit) -> None:
    manager = await keep_high_watermark(kit)
    [log] = manager.logs()
    log.truncate_to(1)
    log.append_as_leader(batch("x", "y"), 1, now_ms=1)
    assert manager.high_watermark(log.key) == 1, "a save would keep it otherwise"
    crash(manager, kit)
    manager = kit.open()
    assert manager.high_watermark(log.key) == 1


async def test_records_in_the_place_of_lost_ones_are_not_taken_for_committed(kit: Kit) -> None:
    manager = await keep_high_watermark(kit)
    [log] = manager.logs()
    first = len(log.read(0, 1, below=1))
    crash(manager, kit)
    with (kit.paths[0] / "t-0" / "00000000000000000000.log").open("r+b") as segment:
        segment.truncate(first)
    state = LocalState(kit.paths[0], 2**20)
    state.put(log.key, state.get(log.key)._replace(recovery_point=0))  # As with flush.policy=os.
    state.close(None)
    manager = kit.open(checkpoint_interval_ms=3_600_000)
    [log] = manager.logs()
    assert (log.log_end_offset, manager.high_watermark(log.key)) == (1, 1)
    log.append_as_leader(batch("x", "y"), 1, now_ms=1)
    crash(manager, kit)
    manager = kit.open()
    assert (manager.logs()[0].log_end_offset, manager.high_watermark(log.key)) == (3, 1)


async def test_an_idle_manager_has_no_timers_and_no_work(kit: Kit) -> None:
    manager = kit.open()
    logs = [manager.get_or_create("t", partition, ONE, {}) for partition in range(4)]
    for log in logs:
        log.append_as_leader(batch("a"), 0, now_ms=1)
    await kit.until_durable(*logs)
    directory = manager._directories[0]
    await eventually(lambda: directory._saves.timer is None and not directory._saves.changed)
    flusher = directory._flusher
    assert (flusher._begins, flusher._under_way, flusher._waiting) == (None, [], {})
    assert not any(log.needs_flush for log in logs)


async def test_with_interval_a_flush_waits_for_its_time(kit: Kit) -> None:
    disk = GatedDisk()
    manager = kit.open(disk=disk, flush_policy=FlushPolicy.INTERVAL, flush_interval_ms=30)
    log = manager.get_or_create("t", 0, ONE, {})
    disk.syncs = 0
    for _ in range(5):
        log.append_as_leader(batch("a"), 0, now_ms=1)
        await asyncio.sleep(0)
    assert (disk.syncs, log.durable_offset) == (0, 5)
    await eventually(lambda: log.recovery_point == 5)
    assert kit.durable == []


async def test_with_os_only_closed_segments_are_flushed(kit: Kit) -> None:
    disk = GatedDisk()
    manager = kit.open(disk=disk, flush_policy=FlushPolicy.OS)
    log = manager.get_or_create("t", 0, ONE, {"segment.bytes": "4096"})
    disk.syncs = 0
    log.append_as_leader(batch("a" * 1000), 0, now_ms=1)
    flusher = manager._directories[0]._flusher
    assert (flusher._begins, flusher._under_way, flusher._waiting) == (None, [], {})
    assert disk.syncs == 0
    for _ in range(4):
        log.append_as_leader(batch("a" * 1000), 0, now_ms=1)
    await eventually(lambda: log.recovery_point == 5)


async def test_deleted_partitions_do_not_come_back(kit: Kit) -> None:
    manager = kit.open()
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    await kit.until_durable(log)
    manager.checkpoint_high_watermark(log.key, 2)
    manager.delete(log.key)
    again = manager.get_or_create("t", 0, ONE, {})
    assert (again.log_end_offset, manager.high_watermark(log.key)) == (0, 0)
    manager.delete(log.key)  # The files of the first may not be gone yet.
    leftover = kit.paths[0] / f"t-0.{ONE.hex()}-delete"
    await eventually(lambda: not leftover.exists())
    leftover.mkdir()
    manager.close()
    manager = kit.open()
    assert manager.logs() == []
    await eventually(lambda: not leftover.exists())


async def test_a_partition_made_anew_after_a_crash_remembers_nothing(kit: Kit) -> None:
    manager = kit.open(checkpoint_interval_ms=60_000)
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    await kit.until_durable(log)
    manager._directories[0]._save_all()
    manager.delete(log.key)
    manager.get_or_create("t", 0, ONE, {})
    crash(manager, kit)
    manager = kit.open()
    found = manager.get(log.key)
    assert found is not None, manager.unopened()
    assert found.log_end_offset == 0


async def test_two_topics_of_one_name_do_not_touch_each_other(kit: Kit) -> None:
    manager = kit.open()
    old = manager.get_or_create("t", 0, ONE, {})
    old.append_as_leader(batch("old"), 0, now_ms=1)
    new = manager.get_or_create("t", 0, TWO, {})
    new.append_as_leader(batch("new"), 0, now_ms=1)
    assert old.directory != new.directory
    manager.close()
    manager = kit.open()
    found = {log.key.topic_id: values_of(log) for log in manager.logs()}
    assert found == {ONE: ["old"], TWO: ["new"]}
    manager.delete(TopicIdPartition(ONE, 0))
    assert [log.name for log in manager.logs()] == ["t-0"]


async def test_new_configs_hold_from_the_next_append_on(kit: Kit) -> None:
    manager = kit.open()
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a" * 500), 0, now_ms=1)
    manager.update_configs(ONE, {"max.message.bytes": "400"})
    with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes is 400"):
        log.append_as_leader(batch("a" * 500), 0, now_ms=1)


async def test_a_damaged_log_stays_shut_and_the_others_open(kit: Kit) -> None:
    manager = kit.open()
    manager.record_broker_epoch(3)
    bad, good = (manager.get_or_create("t", partition, ONE, {}) for partition in range(2))
    for log in (bad, good):
        log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    manager.checkpoint_high_watermark(bad.key, 1)
    manager.close()
    path = bad.directory / "00000000000000000000.log"
    path.write_bytes(path.read_bytes()[:-1])
    manager = kit.open()
    assert [log.name for log in manager.logs()] == ["t-1"]
    assert "t-0" in manager.unopened()[bad.key].message
    with capture_logs() as said:
        report_unopened(manager)
    (entry,) = said
    assert entry["log_level"] == "error"
    assert entry["topic_partition_id"] == str(bad.key)
    assert str(bad.directory) in entry["reason"]
    assert "copied anew by itself" in entry["next_step"]
    assert manager.previous_broker_epoch() == -1
    for _ in range(2):
        with pytest.raises(DamagedLogError, match=r"t-0 holds is kept as it is") as refusal:
            manager.get_or_create("t", 0, ONE, {})
    assert (refusal.value.end_offset, refusal.value.committed_offset) == (2, 1)
    manager.delete(bad.key)
    assert manager.get_or_create("t", 0, ONE, {}).log_end_offset == 0


async def test_a_directory_of_another_cluster_is_refused(kit: Kit) -> None:
    manager = kit.open()
    manager.get_or_create("t", 0, ONE, {})
    manager.close()
    with pytest.raises(DataDirectoryError, match="belongs to cluster 'c1', not to 'c2'; next: "):
        kit.open(cluster_id="c2")
    assert kit.open().logs() != []


async def test_what_a_crash_while_a_partition_was_made_leaves_is_removed(kit: Kit) -> None:
    manager = kit.open()
    manager.close()
    (kit.paths[0] / "t-0").mkdir()
    (kit.paths[0] / "lost+found").mkdir()
    precious = kit.paths[0] / "u-0"
    precious.mkdir()
    (precious / "00000000000000000000.log").write_bytes(b"something")
    manager = kit.open()
    assert not (kit.paths[0] / "t-0").exists()
    assert precious.exists(), "data that nobody knows is kept"
    with pytest.raises(StorageError, match=r"u-0 may be those in .*move the directory away"):
        manager.get_or_create("u", 0, ONE, {})
    precious.rename(kit.paths[0] / "lost+found" / "u-0")
    assert manager.get_or_create("u", 0, ONE, {}).log_end_offset == 0


@pytest.mark.parametrize("field", [b"topic_id: ", b"cluster_id: ", b"version: ", b"crc32c: "])
async def test_records_whose_owner_cannot_be_told_are_kept_and_nothing_is_made_in_their_place(
    kit: Kit, field: bytes
) -> None:
    manager = kit.open()
    manager.record_broker_epoch(3)
    bad, good = (manager.get_or_create("t", partition, ONE, {}) for partition in range(2))
    for log in (bad, good):
        log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    bad.flush()
    bad.advance_log_start(1)
    manager.close()
    path = bad.directory / "partition.metadata"
    sound = path.read_bytes()
    at = sound.index(field) + len(field)
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    manager = kit.open()
    assert [log.name for log in manager.logs()] == ["t-1"]
    assert manager.previous_broker_epoch() == -1
    manager.record_broker_epoch(4)
    for topic_id in (ONE, TWO):
        with pytest.raises(
            StorageError, match=r"t-0 may be those in .*; .*copy partition\.metadata"
        ):
            manager.get_or_create("t", 0, topic_id, {})
        await manager.make_ahead({TopicIdPartition(topic_id, 0): bad.partition}, is_new=True)
    assert not list(kit.paths[0].glob("t-0.*"))
    assert manager.get_or_create("t", 2, ONE, {}).log_end_offset == 0
    manager.close()
    shutil.copy(good.directory / path.name, path)  # As the message says.
    assert path.read_bytes() == sound
    manager = kit.open()
    assert manager.previous_broker_epoch() == -1, "nobody had looked at all of it"
    again = manager.get_or_create("t", 0, ONE, {})
    assert (again.log_start_offset, again.log_end_offset, again.opened_clean) == (1, 2, False)


async def test_a_long_topic_name_can_be_deleted(kit: Kit) -> None:
    manager = kit.open()
    log = manager.get_or_create("n" * 249, 0, ONE, {})
    manager.delete(log.key)
    await eventually(lambda: [path.name for path in kit.paths[0].iterdir()] == [".state"])


@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_closing_waits_for_what_is_under_way(kit: Kit, where: str) -> None:
    disk = GatedDisk()
    manager = kit.open(disk=disk)
    log = manager.get_or_create("t", 0, ONE, {})
    disk.gate.clear()
    disk.begun.clear()
    log.append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(disk.begun.is_set)
    log.append_as_leader(batch("b"), 0, now_ms=1)
    threading.Timer(0.05, disk.gate.set).start()
    if where == "loop":
        manager.close()
    else:
        await asyncio.to_thread(manager.close)
    assert log.recovery_point == 2
    assert kit.durable == []
    found = kit.open().get(log.key)
    assert found is not None
    assert found.opened_clean
    assert values_of(found) == ["a", "b"]


async def test_a_flush_that_fails_during_the_close_leaves_no_clean_marker(kit: Kit) -> None:
    class FailsLate(GatedDisk):
        def sync_data(self, fd: int) -> None:
            shut = not self.gate.is_set()
            super().sync_data(fd)
            if shut:
                raise OSError(5, "Input/output error")

    disk = FailsLate()
    manager = kit.open(disk=disk)
    manager.record_broker_epoch(4)
    log = manager.get_or_create("t", 0, ONE, {})
    disk.gate.clear()
    disk.begun.clear()
    log.append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(disk.begun.is_set)
    threading.Timer(0.05, disk.gate.set).start()
    manager.close()
    assert kit.failed == [kit.paths[0]]
    assert kit.open().previous_broker_epoch() == -1


async def test_segments_are_as_large_as_the_node_says_unless_the_topic_does(kit: Kit) -> None:
    manager = kit.open(segment_bytes=4096)
    key, own = TopicIdPartition(ONE, 0), {"segment.bytes": "1000000"}
    log = manager.get_or_create("a", 0, ONE, {}, internal=False, is_new=True)
    sizes = []
    for configs in ({}, own, {}):
        manager.update_configs(ONE, configs)
        before = len(log.files.segments)
        for _ in range(6):
            log.append_as_leader(batch("x" * 1000), LeaderEpoch(0), now_ms=1)
        sizes.append(len(log.files.segments) - before)
    assert sizes == [1, 0, 2]
    manager.update_configs(ONE, {"max.message.bytes": "5075"})
    log.append_as_leader(batch("x" * 5000), LeaderEpoch(0), now_ms=1)
    manager.update_configs(ONE, {})
    assert manager.get(key) is log
    with pytest.raises(
        RecordTooLargeError,
        match=r"segment\.bytes is 4096;.*`penstock topics alter a --config segment\.bytes=1048588`",
    ):
        log.append_as_leader(batch("x" * 5000), LeaderEpoch(0), now_ms=1)
