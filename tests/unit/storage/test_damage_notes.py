"""What is damaged of a log is known after a restart, until it is mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.found_logs import tell_of_damage
from penstock.broker.storage.checkpoints import CheckpointDamagedError
from penstock.broker.storage.damage_notes import (
    NOTE_FILE,
    encode_note,
    noted_damage,
    noting,
    read_note,
)
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import LogSettings
from penstock.wire.ids import LeaderEpoch, TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import (
    KEY,
    TOPIC_ID,
    BrokenDisk,
    Clock,
    FullDisk,
    batch,
    open_in,
    read_all,
)
from tests.unit.storage.test_damage import filled, flip
from tests.unit.storage.test_repair import Kit, Reads


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    made = Kit(filled(tmp_path / "a"), filled(tmp_path / "b"))
    yield made
    await made.stop()


@pytest.mark.parametrize("bases", [(), (7,), (12, 0, 7)])
def test_a_note_outlives_the_process(tmp_path: Path, bases: tuple[int, ...]) -> None:
    (tmp_path / NOTE_FILE).write_bytes(encode_note(TOPIC_ID, bases))
    assert read_note(tmp_path, TOPIC_ID) == tuple(sorted(bases))


def test_without_a_note_or_with_one_of_another_topic_nothing_is_known(tmp_path: Path) -> None:
    assert read_note(tmp_path, TOPIC_ID) == ()
    (tmp_path / NOTE_FILE).write_bytes(encode_note(TopicId(b"a" * 16), (1,)))
    assert read_note(tmp_path, TOPIC_ID) == ()


def test_every_bit_that_flips_in_a_note_is_found(tmp_path: Path) -> None:
    path, sound = tmp_path / NOTE_FILE, encode_note(TOPIC_ID, (0, 7))
    for bit in range(8 * len(sound)):
        path.write_bytes(sound)
        flip(path, bit // 8, bit % 8)
        try:
            assert read_note(tmp_path, TOPIC_ID) == (0, 7), bit  # The last line's end, or a case.
        except CheckpointDamagedError:
            continue
    for size in range(len(sound) - 1):
        path.write_bytes(sound[:size])
        with pytest.raises(CheckpointDamagedError):
            read_note(tmp_path, TOPIC_ID)


def test_the_name_of_a_note_is_on_the_disk_before_it_is_relied_on(tmp_path: Path) -> None:
    class NamesDisk(Disk):
        """Knows the names that a power cut leaves."""

        kept: frozenset[str] = frozenset()

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            self.kept = frozenset(one.name for one in path.iterdir())

    log = filled(tmp_path)
    disk = log.home.disk = NamesDisk()
    noting(log, (0,))()
    assert NOTE_FILE in disk.kept


def test_a_note_that_can_not_be_read_makes_every_segment_suspect(tmp_path: Path) -> None:
    log = filled(tmp_path)
    (log.directory / NOTE_FILE).write_bytes(b"rubbish")
    assert noted_damage(log) == tuple(segment.base_offset for segment in log.files.segments)


async def test_damage_is_noted_when_it_is_found_and_forgotten_when_it_is_mended(kit: Kit) -> None:
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: "damaged" in kit.controllers.reports)
    assert noted_damage(kit.log) == (0,)
    kit.controllers.others_in_sync = True
    kit.on_metadata()
    await kit.until_over()
    assert not (kit.log.directory / NOTE_FILE).exists()


async def test_several_damaged_segments_are_noted_as_they_are_mended(kit: Kit) -> None:
    asked = asyncio.Event()

    class Hanging(Reads):
        async def read(self, key: TopicIdPartition, offset: int) -> bytes:
            asked.set()
            await asyncio.Event().wait()
            return b""

    kit.peers.reads = lambda: Hanging(kit)
    kit.controllers.others_in_sync = False
    for segment in kit.log.files.segments[:2]:
        flip(segment.path, 70)
        kit.found(kit.log, segment.base_offset)
    second = kit.log.files.segments[1].base_offset
    await eventually(lambda: "damaged" in kit.controllers.reports)
    assert noted_damage(kit.log) == (0, second)
    kit.controllers.others_in_sync = True
    kit.on_metadata()
    await asked.wait()
    assert noted_damage(kit.log) == (0, second), "not before it is mended"


async def test_what_was_known_before_a_restart_is_reported_before_it_is_looked_at(
    kit: Kit,
) -> None:
    second = kit.log.files.segments[1]
    flip(second.path, 70)
    kit.log.noted_damage = (second.base_offset,)
    kit.found(kit.log, second.base_offset)
    assert kit.controllers.reports == ["damaged"], "the broker may be let in with the next turn"
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.controllers.reports[-1] == "sound"
    assert kit.log.noted_damage == ()


async def test_a_note_of_what_is_sound_by_now_is_taken_back(kit: Kit) -> None:
    noting(kit.log, (0,))()
    kit.log.noted_damage = noted_damage(kit.log)
    kit.found(kit.log, 0)
    await kit.until_over()
    assert kit.controllers.reports == ["damaged", "sound"]
    assert noted_damage(kit.log) == ()


async def test_a_start_tells_of_what_was_noted(tmp_path: Path) -> None:
    def manager() -> LogManager:
        return LogManager([tmp_path], LogSettings(), lambda _: None, Clock())

    logs = manager()
    logs.open()
    log = logs.get_or_create("orders", 3, TOPIC_ID, {"segment.bytes": "100"}, is_new=True)
    for number in range(3):
        log.append_as_leader(batch(f"value {number}"), LeaderEpoch(1), now_ms=0)
    second = log.files.segments[1]
    noting(log, (second.base_offset,))()
    logs.close()
    logs = manager()
    logs.open()
    told: list[tuple[object, int]] = []
    tell_of_damage(logs, lambda log, offset: told.append((log.key, offset)))
    assert told == [(KEY, second.base_offset)]
    logs.close()


async def test_without_room_damage_is_mended_all_the_same(kit: Kit) -> None:
    disk = FullDisk(0)
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    sound_disk, kit.log.home.disk = kit.log.home.disk, disk
    with capture_logs() as lines:
        kit.read_damaged()
        await eventually(lambda: "damaged" in kit.controllers.reports)
    assert "damage not noted" in [line["event"] for line in lines]
    assert kit.log.home.failure is None
    assert noted_damage(kit.log) == ()
    kit.log.home.disk = sound_disk
    kit.controllers.others_in_sync = True
    kit.on_metadata()
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)


async def test_a_disk_that_can_not_take_the_note_fails(kit: Kit) -> None:
    broken = BrokenDisk()
    broken.failing = {"write"}
    flip(kit.log.files.segments[0].path, 70)
    kit.log.home.disk = broken
    kit.read_damaged()
    await eventually(lambda: kit.log.home.failure is not None)
    assert "sound" not in kit.controllers.reports


async def test_a_damaged_leader_epoch_that_a_recovery_finds_is_mended(kit: Kit) -> None:
    """In the segment that is appended to: the only one of what was flushed that it reads."""
    root = kit.log.directory.parent
    for value in ("a", "b", "c"):
        data = batch(value, base_offset=kit.log.log_end_offset, leader_epoch=kit.log.last_epoch)
        for log in (kit.log, kit.leader):
            log.append_as_follower(data)
    kit.log.flush()
    point, epochs = kit.log.recovery_point, kit.log.epochs.entries
    placed = kit.log.files.active.position_of(point - 2)
    assert placed is not None
    path = kit.log.files.active.path
    kit.log.close(save=False)
    flip(path, placed.position + 13)
    kit.log = open_in(root, saved=SavedState(recovery_point=point))
    assert kit.log.noted_damage == (point - 2,)
    kit.found(kit.log, point - 2)
    assert kit.controllers.reports == ["damaged"], "before the broker is let in"
    await kit.until_over()
    assert kit.controllers.reports[-1] == "sound"
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.log.epochs.entries == epochs
