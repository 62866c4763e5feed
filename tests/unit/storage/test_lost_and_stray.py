"""What a start finds missing, and what it keeps although nobody asks for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.broker.core.epoch_history import EpochEntry
from penstock.broker.storage.checkpoints import EPOCHS_FILE, encode_epochs
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import Clock, batch, values_of

ONE, TWO = TopicId(b"1" * 16), TopicId(b"2" * 16)
EPOCH = 17
Open = Callable[..., LogManager]


@pytest.fixture
def open_logs() -> Iterator[Open]:
    managers = []

    def open_manager(*paths: Path, disk: Disk | None = None) -> LogManager:
        manager = LogManager(
            paths, LogSettings(), lambda _: None, Clock(), cluster_id="c1", disk=disk
        )
        manager.open()
        manager.record_broker_epoch(EPOCH)
        managers.append(manager)
        return manager

    yield open_manager
    for manager in managers:
        manager.close()


def fill(manager: LogManager, partitions: int = 2) -> None:
    """Give each of the partitions a segment for each of three records, and stop cleanly."""
    for partition in range(partitions):
        log = manager.get_or_create("t", partition, ONE, {"segment.bytes": "1024"})
        for value in "abc":
            log.append_as_leader(batch(value * 700), 0, now_ms=1)
    manager.close()


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


def strays(root: Path) -> list[Path]:
    return list(root.glob("*/t-*.stray"))


# --- missing -------------------------------------------------------------------------------------


async def test_a_stop_with_everything_there_again_is_clean(open_logs: Open, tmp_path: Path) -> None:
    fill(open_logs(tmp_path / "a", tmp_path / "b"))
    again = open_logs(tmp_path / "b", tmp_path / "a")
    assert again.previous_broker_epoch() == EPOCH
    assert [log.log_end_offset for log in again.logs()] == [3, 3]


@pytest.mark.parametrize("how", ["emptied", "taken out of the settings", "state lost"])
async def test_a_stop_is_not_clean_once_a_data_directory_is_gone(
    open_logs: Open, tmp_path: Path, how: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    fill(open_logs(*paths))
    if how == "taken out of the settings":
        paths.pop()
    else:
        shutil.rmtree(paths[1] / (".state" if how == "state lost" else ""))
    manager = open_logs(*paths)
    assert manager.previous_broker_epoch() == -1
    manager.close()
    assert open_logs(*paths).previous_broker_epoch() == EPOCH, "that was known by then"


async def test_a_stop_is_not_clean_when_a_directory_is_of_another_time(
    open_logs: Open, tmp_path: Path
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    fill(open_logs(*paths))
    shutil.copytree(paths[1], tmp_path / "copy")
    open_logs(*paths).close()
    open_logs(paths[0]).close()
    shutil.rmtree(paths[1])
    (tmp_path / "copy").rename(paths[1])
    assert open_logs(*paths).previous_broker_epoch() == -1


async def test_a_stop_is_not_clean_once_a_partition_is_gone(
    open_logs: Open, tmp_path: Path
) -> None:
    fill(open_logs(tmp_path))
    shutil.rmtree(tmp_path / "t-0")
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    assert manager.get_or_create("t", 0, ONE, {}).log_end_offset == 0, "to be copied anew"
    manager.close()
    assert open_logs(tmp_path).previous_broker_epoch() == EPOCH


async def test_a_log_of_which_local_state_is_damaged_stays_shut(
    open_logs: Open, tmp_path: Path
) -> None:
    fill(open_logs(tmp_path))
    environment = lmdb.open(str(tmp_path / ".state"), map_size=1 << 20)
    with environment, environment.begin(write=True) as transaction:
        (key, value), *_ = ((k, v) for k, v in transaction.cursor() if k.startswith(ONE))
        damaged = bytearray(value)
        damaged[15 - 5] ^= 1  # Of the log start, which is 2 to the 40th then.
        transaction.put(key, bytes(damaged))
    was = segments(tmp_path / "t-0")
    for _ in range(2):
        manager = open_logs(tmp_path)
        assert manager.previous_broker_epoch() == -1
        assert [log.name for log in manager.logs()] == ["t-1"]
        with pytest.raises(StorageError, match=r"t-0: .*fails its checksum; move .*t-0 away"):
            manager.get_or_create("t", 0, ONE, {})
        manager.close()
    assert segments(tmp_path / "t-0") == was
    stray = tmp_path / f"t-0.{ONE.hex()}.stray"
    (tmp_path / "t-0").rename(stray)
    open_logs(tmp_path).close()
    stray.rename(tmp_path / "t-0")
    again = open_logs(tmp_path).get_or_create("t", 0, ONE, {})
    assert (again.log_start_offset, values_of(again)) == (0, [value * 700 for value in "abc"])


async def test_a_log_without_its_segments_stays_shut(open_logs: Open, tmp_path: Path) -> None:
    fill(open_logs(tmp_path))
    for path in (tmp_path / "t-1").glob("*.log"):
        path.unlink()
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    assert [log.name for log in manager.logs()] == ["t-0"]
    with pytest.raises(StorageError, match=r"no segments, but was on the disk up to 3.*is kept"):
        manager.get_or_create("t", 1, ONE, {})


async def test_a_log_without_its_last_segment_stays_shut(open_logs: Open, tmp_path: Path) -> None:
    fill(open_logs(tmp_path))
    segments(tmp_path / "t-1")[-1].unlink()
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    assert [log.name for log in manager.logs()] == ["t-0"]


async def test_a_log_without_its_first_segment_stays_shut(open_logs: Open, tmp_path: Path) -> None:
    """Once it leads all the others would delete what it does not have."""
    fill(open_logs(tmp_path))
    segments(tmp_path / "t-1")[0].unlink()
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    assert [log.name for log in manager.logs()] == ["t-0"]
    with pytest.raises(StorageError, match="begins at offset 1, but was on the disk from 0 on"):
        manager.get_or_create("t", 1, ONE, {})


async def test_a_start_that_only_the_epochs_tell_of_is_believed(
    open_logs: Open, tmp_path: Path
) -> None:
    """As versions left it that deleted first and noted the new start later."""
    fill(open_logs(tmp_path))
    segments(tmp_path / "t-1")[0].unlink()
    (tmp_path / "t-1" / EPOCHS_FILE).write_bytes(encode_epochs([EpochEntry(0, 1)]))
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    found = manager.get(TopicIdPartition(ONE, 1))
    assert found is not None
    assert (found.log_start_offset, found.log_end_offset) == (1, 3)


async def test_a_partition_put_back_is_checked_and_the_stop_not_clean(
    open_logs: Open, tmp_path: Path
) -> None:
    fill(open_logs(tmp_path))
    (tmp_path / "t-1").rename(tmp_path / "aside")
    open_logs(tmp_path).close()
    (tmp_path / "aside").rename(tmp_path / "t-1")
    manager = open_logs(tmp_path)
    found = manager.get(TopicIdPartition(ONE, 1))
    assert found is not None
    assert (found.opened_clean, found.log_end_offset) == (False, 3)
    assert manager.previous_broker_epoch() == -1


async def test_deleting_partitions_leaves_the_stop_clean(open_logs: Open, tmp_path: Path) -> None:
    fill(open_logs(tmp_path))
    manager = open_logs(tmp_path)
    manager.delete(TopicIdPartition(ONE, 0))
    manager.set_aside(TopicIdPartition(ONE, 1))
    manager.close()
    assert open_logs(tmp_path).previous_broker_epoch() == EPOCH


# --- stray ---------------------------------------------------------------------------------------


async def test_a_partition_set_aside_keeps_every_byte_and_its_name_is_free(
    open_logs: Open, tmp_path: Path
) -> None:
    fill(open_logs(tmp_path), partitions=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "t-0").iterdir()}
    manager = open_logs(tmp_path)
    key = TopicIdPartition(ONE, 0)
    log = manager.get(key)
    assert log is not None
    manager.set_aside(key)
    assert manager.logs() == []
    with pytest.raises(StorageError, match="t-0: the log is closed"):
        log.append_as_leader(batch("d"), 0, now_ms=1)
    stray = tmp_path / f"t-0.{ONE.hex()}.stray"
    assert {path.name: path.read_bytes() for path in stray.iterdir()} == before
    assert manager.get_or_create("t", 0, TWO, {}).directory == tmp_path / "t-0"
    manager.close()
    again = open_logs(tmp_path)
    assert [log.key.topic_id for log in again.logs()] == [TWO]
    assert {path.name: path.read_bytes() for path in stray.iterdir()} == before
    manager.set_aside(key)  # It is not here any more.


async def test_each_log_that_is_kept_for_its_damage_has_a_place_of_its_own(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    kept: dict[Path, str] = {}
    for value in "abc":
        log = manager.get_or_create("t", 0, ONE, {})
        log.append_as_leader(batch(value * 700), 0, now_ms=1)
        place = manager.keep_damaged(TopicIdPartition(ONE, 0))
        assert place not in kept
        kept[place] = value
    assert not (tmp_path / "t-0").exists()
    assert len({place.stem for place in kept} | {"t-0"}) == 4
    for place, value in kept.items():
        [segment] = segments(place)
        assert value.encode() * 700 in segment.read_bytes()


async def test_a_partition_set_aside_can_be_put_back(open_logs: Open, tmp_path: Path) -> None:
    fill(open_logs(tmp_path), partitions=1)
    manager = open_logs(tmp_path)
    manager.set_aside(TopicIdPartition(ONE, 0))
    manager.close()
    (tmp_path / f"t-0.{ONE.hex()}.stray").rename(tmp_path / "t-0")
    [log] = open_logs(tmp_path).logs()
    assert values_of(log) == ["a" * 700, "b" * 700, "c" * 700]


@pytest.mark.parametrize("restarted", [False, True])
async def test_no_empty_log_takes_the_place_of_one_set_aside(
    open_logs: Open, tmp_path: Path, restarted: bool
) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    fill(open_logs(*paths), partitions=1)
    manager = open_logs(*paths)
    manager.set_aside(TopicIdPartition(ONE, 0))
    if restarted:
        manager.close()
        manager = open_logs(*paths)
    [stray] = strays(tmp_path)
    told = f"the records of t-0 were set aside in {stray} .* rename that to {stray.parent}/t-0 "
    for _ in range(2):
        with pytest.raises(StorageError, match=told):
            manager.get_or_create("t", 0, ONE, {})
    assert manager.get_or_create("t", 0, TWO, {}).log_end_offset == 0
    shutil.rmtree(stray)
    assert manager.get_or_create("t", 0, ONE, {}).log_end_offset == 0


async def test_setting_aside_is_on_the_disk_before_it_is_over(
    open_logs: Open, tmp_path: Path
) -> None:
    class Watched(Disk):
        seen: list[set[str]] = []  # noqa: RUF012 - one disk a test.

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if path == tmp_path:
                self.seen.append({entry.name for entry in path.iterdir()})

    disk = Watched()
    manager = open_logs(tmp_path, disk=disk)
    manager.get_or_create("t", 0, ONE, {})
    manager.set_aside(TopicIdPartition(ONE, 0))
    assert disk.seen[-1] == {".state", f"t-0.{ONE.hex()}.stray"}


# --- made anew while the last one is being flushed ------------------------------------------------


async def test_a_flush_of_a_deleted_log_writes_nothing_into_the_next_one(
    open_logs: Open, tmp_path: Path
) -> None:
    class Gated(Disk):
        """Lets no flush in another thread than the loop's end while the gate is shut."""

        gate = threading.Event()
        begun = threading.Event()

        def sync_data(self, fd: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.begun.set()
                assert self.gate.wait(20)
            super().sync_data(fd)

    disk = Gated()
    manager = open_logs(tmp_path, disk=disk)
    configs = {"segment.bytes": "1024"}
    old = manager.get_or_create("t", 0, ONE, configs)
    for value in "abc":
        old.append_as_leader(batch(value * 700, producer=(7, 0, "abc".index(value))), 5, now_ms=1)
    await eventually(disk.begun.is_set)
    manager.delete(old.key)
    new = manager.get_or_create("t", 0, TWO, configs)
    before = sorted(path.name for path in new.directory.iterdir())
    disk.gate.set()
    await eventually(lambda: not manager._directories[0]._flusher._under_way)
    assert sorted(path.name for path in new.directory.iterdir()) == before
    new.append_as_leader(batch("new"), 0, now_ms=1)
    await eventually(lambda: new.durable_offset == 1)
    manager.close()
    [found] = open_logs(tmp_path).logs()
    assert (found.key.topic_id, values_of(found), found.last_epoch) == (TWO, ["new"], 0)
    assert found.producers.entry(7) is None


# --- in the way ----------------------------------------------------------------------------------


async def test_what_is_in_the_way_of_a_new_log_is_left_as_it_is(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    manager.get_or_create("t", 0, ONE, {})
    kept = tmp_path / f"t-0.{TWO.hex()}" / "00000000000000000000.log"
    kept.parent.mkdir()
    kept.write_bytes(b"records")
    with pytest.raises(StorageError, match=str(kept.parent)):
        manager.get_or_create("t", 0, TWO, {})
    assert kept.read_bytes() == b"records"
    assert not manager.failed_directories
    shutil.rmtree(kept.parent)
    assert manager.get_or_create("t", 0, TWO, {}).directory == kept.parent


async def test_what_somebody_made_in_the_same_moment_is_left_as_it_is(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_logs(tmp_path)
    kept = tmp_path / "t-0" / "records"
    mkdir = Path.mkdir

    def late(path: Path) -> None:
        if path == kept.parent:
            mkdir(path)
            kept.write_bytes(b"records")
        mkdir(path)

    monkeypatch.setattr(Path, "mkdir", late)
    with pytest.raises(StorageError):
        manager.get_or_create("t", 0, ONE, {})
    assert kept.read_bytes() == b"records"
