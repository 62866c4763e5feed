"""No damage that is known is forgotten, whatever fails; and none is seen in what is sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker import repair, scrubber
from penstock.broker.storage.damage import Examination
from penstock.broker.storage.damage_notes import NOTE_FILE, noted_damage, noting
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from penstock.wire.ids import LeaderEpoch, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import FullDisk, batch, read_all, values_of
from tests.unit.storage.test_damage import filled, flip
from tests.unit.storage.test_repair import Kit, Reads
from tests.unit.storage.test_scrubber import Disks


@pytest.fixture
async def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    monkeypatch.setattr(repair, "_MIN_BACKOFF_S", 0.001)
    made = Kit(filled(tmp_path / "a"), filled(tmp_path / "b"))
    yield made
    await made.stop()


def assert_sound(kit: Kit) -> None:
    for segment in kit.log.files.segments:
        assert not Examination(kit.log, segment).run().damages
    assert read_all(kit.log) == read_all(kit.leader)
    assert not (kit.log.directory / NOTE_FILE).exists()
    assert kit.damaged_count == 0


def whether_it_was(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether all of it was sound and nothing noted, whenever the replica was called sound."""
    were: list[bool] = []
    tell = kit.controllers.set_sound

    def set_sound(key: TopicIdPartition) -> None:
        segments = kit.log.files.segments
        is_sound = not any(Examination(kit.log, segment).run().damages for segment in segments)
        were.append(is_sound and noted_damage(kit.log) == ())
        tell(key)

    monkeypatch.setattr(kit.controllers, "set_sound", set_sound)
    return were


async def test_after_a_fault_of_its_own_it_goes_on_with_what_is_damaged(kit: Kit) -> None:
    kit.refusals = [RuntimeError("a fault"), RuntimeError("another")]
    flip(kit.log.files.segments[0].path, 70)
    with capture_logs() as lines:
        kit.read_damaged()
        await kit.until_over()
    assert [line["event"] for line in lines].count("mending failed") == 2
    assert kit.controllers.reports == ["damaged", "sound"]
    assert_sound(kit)


async def test_a_fault_makes_nobody_forget_what_is_damaged_when_more_is_found(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_sound = whether_it_was(kit, monkeypatch)
    first, second = kit.log.files.segments[:2]
    for segment in (first, second):
        flip(segment.path, 70)
    kit.refusals = [RuntimeError("a fault")]
    kit.found(kit.log, first.base_offset)
    await eventually(lambda: not kit.refusals)
    kit.found(kit.log, second.base_offset)
    await kit.until_over()
    assert were_sound == [True]
    assert_sound(kit)


async def test_while_it_fails_again_and_again_the_note_stays_and_nothing_is_called_sound(
    kit: Kit,
) -> None:
    kit.refusals = [RuntimeError("a fault")] * 1000
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: kit.asked > 3)
    assert noted_damage(kit.log) == (0,)
    assert kit.controllers.reports == ["damaged"]
    kit.refusals.clear()
    await kit.until_over()
    assert_sound(kit)


async def test_what_was_noted_before_is_mended_too_before_all_is_called_sound(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_sound = whether_it_was(kit, monkeypatch)
    first, second = kit.log.files.segments[:2]
    for segment in (first, second):
        flip(segment.path, 70)
    noting(kit.log, (first.base_offset + 1,))()  # As where segments have begun elsewhere since.
    kit.found(kit.log, second.base_offset)
    await kit.until_over()
    assert were_sound == [True]
    assert_sound(kit)
    assert kit.counts == {"damaged": 2, "mended": 2}


async def test_a_note_that_found_no_room_is_tried_again_before_long(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "ASK_AGAIN_S", 0.01)
    kit.peers.alone = True
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    sound_disk, kit.log.home.disk = kit.log.home.disk, FullDisk(0)
    kit.read_damaged()
    await eventually(lambda: kit.unmendable_count == 1)
    assert noted_damage(kit.log) == ()
    kit.log.home.disk = sound_disk
    await eventually(lambda: noted_damage(kit.log) == (0,))
    assert kit.unmendable_count == 1


async def test_what_is_found_while_it_waits_to_be_out_of_sync_is_noted(kit: Kit) -> None:
    kit.controllers.others_in_sync = False
    first, second = kit.log.files.segments[:2]
    flip(first.path, 70)
    kit.found(kit.log, first.base_offset)
    await eventually(lambda: "damaged" in kit.controllers.reports)
    flip(second.path, 70)
    kit.found(kit.log, second.base_offset)
    await eventually(lambda: noted_damage(kit.log) == (first.base_offset, second.base_offset))
    assert kit.asked == 0


async def test_a_full_disk_is_not_written_to_whenever_the_metadata_move(kit: Kit) -> None:
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    kit.log.home.disk = FullDisk(0)
    with capture_logs() as lines:
        kit.read_damaged()
        await eventually(lambda: "damaged" in kit.controllers.reports)
        for _ in range(50):
            kit.on_metadata()
            await asyncio.sleep(0)
    assert [line["event"] for line in lines].count("damage not noted") == 1


# --- logs that are cut while they are looked at ---------------------------------------------------


def cut_and_regrown(log: PartitionLog, segment: Segment) -> None:
    """Other batches, of a newer leader epoch, come where the segment had its own."""
    log.truncate_to(segment.base_offset + 1)
    assert log.log_end_offset == segment.base_offset
    for number in range(12):
        log.append_as_leader(batch(f"other value {number}", "y" * 33), LeaderEpoch(5), now_ms=0)
    log.flush()
    assert segment in log.files.segments[:-1]


class LateExamination(Examination):
    """Reads a segment that was cut, and has grown again, since it was to be looked at."""

    def __init__(self, log: PartitionLog, segment: Segment) -> None:
        super().__init__(log, segment)
        if log.epochs.last_epoch != 5:
            cut_and_regrown(log, segment)


async def test_what_a_cut_log_seems_to_lack_is_not_reported_as_damaged(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "Examination", LateExamination)
    kit.found(kit.log, 0)
    await kit.until_over()
    assert kit.log.epochs.last_epoch == 5
    assert kit.controllers.reports == ["sound"]
    assert kit.counts == {"damaged": 0, "mended": 0}


async def test_the_scrubber_finds_no_damage_in_a_log_that_is_cut_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "Examination", LateExamination)
    disks = Disks(tmp_path, 1)
    [log] = disks.logs.values()
    made = disks.scrubber()
    await made.start()
    await eventually(lambda: disks.progress() is not None)
    await made.stop()
    assert log.epochs.last_epoch == 5
    assert disks.found == []


async def test_nothing_is_written_into_a_log_that_was_cut_while_the_leader_was_asked(
    kit: Kit,
) -> None:
    segment = kit.log.files.segments[0]

    class Slow(Reads):
        async def read(self, key: TopicIdPartition, offset: int) -> bytes:
            records = await super().read(key, offset)
            cut_and_regrown(kit.log, segment)
            return records

    kit.peers.reads = lambda: Slow(kit)
    flip(segment.path, 70)
    kit.found(kit.log, 0)
    await kit.until_over()
    assert kit.counts == {"damaged": 1, "mended": 0}
    assert kit.controllers.reports == ["damaged", "sound"]
    assert values_of(kit.log)[::2] == [f"other value {number}" for number in range(12)]
