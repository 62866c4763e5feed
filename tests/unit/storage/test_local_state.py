"""What local state keeps of a partition, and what becomes of it when a bit flips."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import lmdb
import pytest

from penstock.broker.core.last_run import RunMark
from penstock.broker.storage.disk import Disk, make_directories
from penstock.broker.storage.local_state import (
    DIRECTORY_NAME,
    LocalState,
    LocalStateDamagedError,
    PartitionState,
)
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.unit.storage.storage_kit import Clock

KEY = TopicIdPartition(TopicId(b"0123456789abcdef"), 3)
OTHER = TopicIdPartition(KEY.topic_id, 4)
STATE = PartitionState(30, 10, 40, 20)
PAGE_BYTES = 4096
PACKED, PACKED_OTHER = (struct.pack(">16sI", *key) for key in (KEY, OTHER))


def stored(root: Path, value: bytes | None = None) -> bytes:
    """What LMDB has of KEY; after putting ``value`` there, if given."""
    environment = lmdb.open(str(root / DIRECTORY_NAME), map_size=1 << 20)
    with environment, environment.begin(write=True) as transaction:
        if value is not None:
            transaction.put(PACKED, value)
        return bytes(transaction.get(PACKED) or b"")


def saved(root: Path) -> None:
    state = LocalState(root, 1 << 20)
    state.put(KEY, STATE)
    state.put(OTHER, STATE)
    state.close(None)


def opened(root: Path) -> LocalState:
    return LocalState(root, 1 << 20)


def test_no_bit_that_flips_is_believed() -> None:
    sound = STATE.encode(PACKED)
    assert PartitionState.decode(PACKED, sound) == STATE
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        assert PartitionState.decode(PACKED, bytes(damaged)) is None, bit
    assert PartitionState.decode(PACKED_OTHER, sound) is None, "it is another partition's"
    for size in (0, 23, 25, 31, 33, 35):
        assert PartitionState.decode(PACKED, sound[:size]) is None


@pytest.mark.parametrize("count", [3, 4])
def test_what_earlier_versions_wrote_is_read_and_gets_a_checksum(
    tmp_path: Path, count: int
) -> None:
    saved(tmp_path)
    stored(tmp_path, struct.pack(f">{count}q", *STATE[:count]))
    state = opened(tmp_path)
    before = PartitionState(*STATE[:count])
    assert state.get(KEY) == before
    state.write()
    state.close(None)
    assert stored(tmp_path) == before.encode(PACKED)


def test_an_impossible_value_of_an_earlier_version_is_damaged() -> None:
    assert PartitionState.decode(PACKED, struct.pack(">4q", 0, -1, 0, 0)) is None


def test_pages_that_lmdb_did_not_write_are_noticed_before_it_writes_to_them(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    path = tmp_path / DIRECTORY_NAME / "data.mdb"
    data = bytearray(path.read_bytes())
    for page in range(2 * PAGE_BYTES, len(data), PAGE_BYTES):
        data[page + 14 : page + 16] = bytes(2)  # Where its free room ends. Reading needs it not.
    path.write_bytes(data)
    with pytest.raises(LocalStateDamagedError, match="is not as it was written"):
        opened(tmp_path)


def test_damage_is_not_taken_for_nothing_until_the_partition_is_given_up(tmp_path: Path) -> None:
    saved(tmp_path)
    stored(tmp_path, b"?" * 36)
    for _ in range(2):
        state = opened(tmp_path)
        with pytest.raises(StorageError, match="fails its checksum"):
            state.get(KEY)
        assert state.get(OTHER) == STATE
        assert state.known() == {KEY, OTHER}
        state.keep_only([KEY, OTHER])
        state.close(None)
    state = opened(tmp_path)
    state.keep_only([OTHER])
    assert state.get(KEY) == PartitionState()
    state.close(None)
    assert stored(tmp_path) == b""


def test_a_partition_made_anew_has_nothing_of_what_was_damaged(tmp_path: Path) -> None:
    saved(tmp_path)
    stored(tmp_path, b"?" * 36)
    state = opened(tmp_path)
    state.forget(KEY)
    assert state.get(KEY) == PartitionState()
    state.close(None)
    assert stored(tmp_path) == b""


def test_a_clean_stop_says_which_partitions_were_shut_until_the_next_run_begins(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    opened(tmp_path).close(RunMark(7, frozenset()), {KEY})
    assert PartitionState.decode(PACKED, stored(tmp_path)) is None, "so earlier versions read it"
    state = opened(tmp_path)
    assert (state.left_shut, state.get(KEY), state.get(OTHER)) == ({KEY}, STATE, STATE)
    assert state.clean_stop is not None
    state.begin_run()
    state.close(None)
    state = opened(tmp_path)
    assert (state.left_shut, state.get(KEY), state.clean_stop) == (set(), STATE, None)
    state.close(None, {KEY})
    assert opened(tmp_path).left_shut == set(), "after no clean stop none is opened as it is"


def test_no_bit_that_flips_opens_what_was_left_shut(tmp_path: Path) -> None:
    saved(tmp_path)
    opened(tmp_path).close(RunMark(7, frozenset()), {KEY})
    sound = stored(tmp_path)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        stored(tmp_path, bytes(damaged))
        state = opened(tmp_path)
        with pytest.raises(StorageError, match="fails its checksum"):
            state.get(KEY)
        state.begin_run()
        state.close(None)
        assert stored(tmp_path) == damaged, "it is not forgotten"


def test_a_damaged_partition_stays_damaged_over_a_clean_stop(tmp_path: Path) -> None:
    saved(tmp_path)
    damaged = stored(tmp_path)[:-1]
    stored(tmp_path, damaged)
    opened(tmp_path).close(RunMark(7, frozenset()), {KEY})
    assert stored(tmp_path) == damaged


def test_nothing_gets_known_by_being_shut(tmp_path: Path) -> None:
    saved(tmp_path)
    unknown = TopicIdPartition(KEY.topic_id, 5)
    opened(tmp_path).close(RunMark(7, frozenset()), {unknown})
    assert opened(tmp_path).known() == {KEY, OTHER}


def test_a_mark_of_the_run_takes_that_of_what_was_shut_away_too(tmp_path: Path) -> None:
    saved(tmp_path)
    opened(tmp_path).close(RunMark(7, frozenset()), {KEY})
    state = opened(tmp_path)
    state.mark_durable_run(RunMark(8, frozenset()))
    del state  # A crash, before anything else was written.
    state = opened(tmp_path)
    assert (state.clean_stop, state.left_shut, state.get(KEY)) == (None, set(), STATE)


class Naming(Disk):
    """Notes in their order which directories are made and synced, and when LMDB commits."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.calls: list[tuple[str, str]] = []
        self.failing = ""

    def _note(self, call: str, path: Path) -> None:
        self.calls.append((call, str(path.relative_to(self._root))))

    def make_directory(self, path: Path) -> None:
        self._note("make", path)
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._note("sync", path)
        if path.name == self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)

    def commit(self, environment: Path) -> None:
        self._note("commit", environment)


def test_every_directory_above_a_new_one_is_on_the_disk_before_it(tmp_path: Path) -> None:
    disk = Naming(tmp_path)
    make_directories(disk, tmp_path / "disks" / "a")
    assert disk.calls == [("make", "disks"), ("sync", "."), ("make", "disks/a"), ("sync", "disks")]
    disk.calls.clear()
    make_directories(disk, tmp_path / "disks" / "a")
    assert disk.calls == []


def test_a_directory_whose_name_could_not_be_synced_is_made_again(tmp_path: Path) -> None:
    disk = Naming(tmp_path)
    disk.failing = "disks"
    with pytest.raises(OSError, match="Input/output"):
        make_directories(disk, tmp_path / "disks" / "a")
    disk.calls.clear()
    disk.failing = ""
    make_directories(disk, tmp_path / "disks" / "a")
    assert disk.calls == [("make", "disks/a"), ("sync", "disks")]


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_directories(Disk(), path)


def test_local_state_is_committed_where_a_power_cut_finds_it(tmp_path: Path) -> None:
    disk = Naming(tmp_path)
    names = [("sync", DIRECTORY_NAME), ("sync", ".")]
    LocalState(tmp_path, 1 << 20, disk)._environment.close()  # It crashed before it began.
    assert disk.calls == [("make", DIRECTORY_NAME), *names]
    disk.calls.clear()
    state = LocalState(tmp_path, 1 << 20, disk)
    state.begin_run()
    assert disk.calls == [*names, ("commit", DIRECTORY_NAME)]
    state.close(None)
    disk.calls.clear()
    LocalState(tmp_path, 1 << 20, disk).close(None)
    assert ("sync", DIRECTORY_NAME) not in disk.calls


def test_the_name_of_a_data_directory_is_on_the_disk_before_what_is_in_it(tmp_path: Path) -> None:
    disk = Naming(tmp_path)
    manager = LogManager(
        [tmp_path / "disks" / "a"], LogSettings(), lambda _: None, Clock(), disk=disk
    )
    manager.open()
    manager.close()
    first_commit = disk.calls.index(("commit", "disks/a/.state"))
    assert {call for call in disk.calls[:first_commit] if call[0] == "sync"} == {
        ("sync", path) for path in (".", "disks", "disks/a", "disks/a/.state")
    }
