"""Damaged logs are mended while they are out of the in-sync set; and scrubbed to be found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker import repair
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.repair import Repairs
from penstock.broker.stand_ins import StandIns
from penstock.broker.storage.damage import Examination
from penstock.broker.storage.log import PartitionLog
from penstock.wire.errors import (
    CorruptRecordError,
    NetworkError,
    OffsetOutOfRangeError,
    PenstockError,
)
from penstock.wire.ids import TopicIdPartition
from tests.support import eventually
from tests.unit.storage.cleaning import COMPACTED, Broker, close_segment, pair_of, put
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    open_in,
    read_all,
    records_of,
)
from tests.unit.storage.test_damage import filled, flip


class Controllers:
    """What the replica manager and the controllers make of a damaged replica."""

    def __init__(self, on_metadata: Callable[[], None], copy: Callable[[], None]) -> None:
        self._on_metadata = on_metadata
        self._copy = copy
        self.reports: list[str] = []
        self.others_in_sync = True

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        self.reports.append("damaged")
        asyncio.get_running_loop().call_soon(self._on_metadata)

    def set_sound(self, key: TopicIdPartition) -> None:
        self.reports.append("sound")

    def may_mend(self, key: TopicIdPartition) -> bool:
        return "damaged" in self.reports and self.others_in_sync

    def copy_anew(self, key: TopicIdPartition) -> bool:
        self.reports.append("dropped")
        self._copy()
        return True


class Reads(LeaderReads):
    """Reads from the leader's log of a kit, without a network."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    async def read(self, key: TopicIdPartition, offset: int) -> bytes:
        self.kit.asked += 1
        await asyncio.sleep(0)
        if self.kit.refusals:
            raise self.kit.refusals.pop(0)
        return self.kit.leader.read(offset, 300, below=EVERYTHING)

    async def close(self) -> None:
        return None


class Peers(StandIns):
    """The other replicas: the one that leads has a kit's other log."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(1, MetadataImage(), reads=lambda: Reads(kit))
        self.leader = 2
        self.alone = False

    def leader_of(self, key: TopicIdPartition) -> tuple[int, int]:
        return self.leader, self.leader

    def none_is_in_sync(self, key: TopicIdPartition) -> bool:
        return self.alone


class Kit(Repairs):
    """Repairs of one log that copies from another one instead of over the network."""

    def __init__(self, log: PartitionLog, leader: PartitionLog) -> None:
        self.log, self.leader = log, leader
        self.here = True
        self.controllers = Controllers(self.on_metadata, self._drop)
        self.counts = {"damaged": 0, "mended": 0}
        self.asked = 0
        self.refusals: list[Exception] = []
        self.peers = Peers(self)
        super().__init__(
            self.peers,
            self.controllers,
            lambda _: self.log if self.here else None,
            count_damaged=lambda: self._count("damaged"),
            count_mended=lambda: self._count("mended"),
        )
        log.home.damage_found = self.found

    def _count(self, what: str) -> None:
        self.counts[what] += 1

    def _drop(self) -> None:
        """The log is dropped, and the leader sends it again, a little at a time."""
        self.log.truncate_fully_and_start_at(self.log.log_start_offset)
        asyncio.get_running_loop().call_soon(self._copy_a_little)

    def _copy_a_little(self) -> None:
        end = self.log.log_end_offset
        if end < self.leader.log_end_offset:
            self.log.append_as_follower(self.leader.read(end, 100, below=EVERYTHING))
            asyncio.get_running_loop().call_soon(self._copy_a_little)
        elif "dropped" in self.controllers.reports:
            self.controllers.reports.append("copied")

    def read_damaged(self) -> None:
        with pytest.raises(CorruptRecordError):
            self.log.read(0, 100, below=EVERYTHING)

    async def until_over(self) -> None:
        await eventually(lambda: not self._tasks)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    made = Kit(filled(tmp_path / "a"), filled(tmp_path / "b"))
    yield made
    await made.stop()


async def test_damage_that_a_read_finds_is_mended_once_the_replica_is_out_of_sync(
    kit: Kit,
) -> None:
    flip(kit.log.files.segments[0].path, 70)
    with capture_logs() as lines:
        kit.read_damaged()
        kit.read_damaged()
        await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.controllers.reports == ["damaged", "sound"]
    assert kit.counts == {"damaged": 1, "mended": 1}
    assert kit.damaged_count == 0
    events = [line["event"] for line in lines]
    assert events == ["damaged batch found", "damaged batch mended"]
    assert (lines[0]["offset"], lines[0]["position"]) == (0, 0)


async def test_who_is_out_of_sync_for_something_else_is_reported_all_the_same(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time: it would come in sync as soon as the other reason is over, and lead."""
    monkeypatch.setattr(kit.controllers, "may_mend", lambda _: True)
    for at in (70, 72):
        flip(kit.log.files.segments[0].path, at)
        kit.read_damaged()
        await kit.until_over()
    assert kit.controllers.reports == ["damaged", "sound"] * 2


async def test_a_replica_that_was_forgotten_meanwhile_is_reported_once_more(kit: Kit) -> None:
    """It was moved away, and came back before it was mended."""
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: "damaged" in kit.controllers.reports)
    kit.controllers.reports.clear()
    kit.on_metadata()
    await eventually(lambda: "damaged" in kit.controllers.reports)
    kit.controllers.others_in_sync = True
    await kit.until_over()
    assert kit.controllers.reports[-1] == "sound"


async def test_the_only_replica_in_sync_is_left_as_it_is_until_another_is(kit: Kit) -> None:
    kit.controllers.others_in_sync = False
    segment = kit.log.files.segments[0]
    flip(segment.path, 70)
    was = segment.path.read_bytes()
    kit.read_damaged()
    await eventually(lambda: "damaged" in kit.controllers.reports)
    await asyncio.sleep(0.05)  # Time in which nothing must happen.
    kit.read_damaged()
    assert kit.damaged_count == 1
    assert (segment.path.read_bytes(), kit.asked) == (was, 0)
    assert kit.log.read(2, 100, below=EVERYTHING), "the rest is served"
    kit.controllers.others_in_sync = True
    kit.on_metadata()
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)


async def test_a_leader_that_does_not_answer_is_asked_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_MIN_BACKOFF_S", 0.001)
    kit.refusals = [NetworkError("gone")] * 3
    flip(kit.log.files.segments[0].path, 70)
    with capture_logs() as lines:
        kit.read_damaged()
        await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)
    assert [line["event"] for line in lines].count("log not mended yet") == 1
    assert kit.counts == {"damaged": 1, "mended": 1}


async def test_what_the_leader_has_not_either_stays_out_of_sync_and_is_tried_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "GIVEN_UP_S", 0.01)
    for log in (kit.log, kit.leader):
        flip(log.files.segments[0].path, 70)
    kit.leader.home.damage_found = lambda _log, _offset: None
    with capture_logs() as lines:
        kit.read_damaged()
        await eventually(lambda: kit.asked > 2)
        kit.read_damaged()
        assert kit.controllers.reports == ["damaged"]
        assert kit.damaged_count == 1
        flip(kit.leader.files.segments[0].path, 70)
        await kit.until_over()
    assert [line["event"] for line in lines if line["log_level"] == "error"][:2] == [
        "damaged batch found",
        "log can't be mended",
    ]
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.controllers.reports == ["damaged", "sound"]


def damaged_on_all(kit: Kit) -> None:
    for log in (kit.log, kit.leader):
        flip(log.files.segments[0].path, 70)
    kit.leader.home.damage_found = lambda _log, _offset: None


async def test_who_asks_for_what_nobody_has_is_told_the_range_and_what_to_do(kit: Kit) -> None:
    damaged_on_all(kit)
    with capture_logs() as lines:
        kit.read_damaged()
        await eventually(lambda: kit.unmendable_count == 1)
    line = next(line for line in lines if line["event"] == "log can't be mended")
    assert (line["offset"], line["end_offset"]) == (0, 2)
    with pytest.raises(CorruptRecordError) as refusal:
        kit.log.read(0, 100, below=EVERYTHING)
    for message in (line["next_step"], refusal.value.message):
        assert "`penstock topics delete-records orders --before 3=2`" in message
    assert "orders-3: offsets 0 to 1 can't be read" in refusal.value.message
    assert f"segment {kit.log.files.segments[0].path}, byte 0" in refusal.value.message
    assert kit.log.read(2, 100, below=EVERYTHING)


async def test_when_what_nobody_has_is_deleted_the_log_is_sound(kit: Kit) -> None:
    damaged_on_all(kit)
    kit.read_damaged()
    await eventually(lambda: kit.unmendable_count == 1)
    kit.on_log_moved(kit.log)
    assert kit.controllers.reports == ["damaged"]
    kit.leader.advance_log_start(2)
    kit.log.advance_log_start(2)  # As the leader says with its next push.
    kit.on_log_moved(kit.log)
    await kit.until_over()
    assert kit.controllers.reports == ["damaged", "sound"]
    assert (kit.unmendable_count, kit.damaged_count, kit.log.lost) == (0, 0, [])
    assert read_all(kit.log) == read_all(kit.leader)


async def test_the_only_replica_in_sync_says_what_is_lost_until_another_is_or_it_is_deleted(
    kit: Kit,
) -> None:
    kit.peers.alone, kit.controllers.others_in_sync = True, False
    first, second = (segment.base_offset for segment in kit.log.files.segments[:2])
    for segment in kit.log.files.segments[:2]:
        flip(segment.path, 70)
    kit.found(kit.log, first)
    await eventually(lambda: len(kit.log.lost) == 1)
    kit.found(kit.log, second)
    await eventually(lambda: len(kit.log.lost) == 2)
    assert [one.named for one in kit.log.lost] == [
        "offsets 0 to 1",
        f"offsets {second} to {second + 1}",
    ]
    assert kit.asked == 0
    kit.log.advance_log_start(first + 2)
    kit.on_log_moved(kit.log)
    await eventually(lambda: len(kit.log.lost) == 1)
    assert kit.controllers.reports[-1] == "damaged"
    kit.leader.advance_log_start(first + 2)
    kit.peers.alone, kit.controllers.others_in_sync = False, True
    kit.on_metadata()
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)


async def test_what_can_be_mended_is_although_something_else_is_lost(kit: Kit) -> None:
    damaged_on_all(kit)
    segments = kit.log.files.segments
    flip(segments[1].path, 70)
    sound = kit.leader.files.segments[1].path.read_bytes()
    for segment in segments[:2]:
        kit.found(kit.log, segment.base_offset)
    await eventually(lambda: segments[1].path.read_bytes() == sound)
    await eventually(lambda: kit.unmendable_count == 1)
    assert kit.damaged_count == 1
    assert kit.controllers.reports == ["damaged"]


async def test_what_does_not_stay_mended_is_given_up(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kit.log.files.segments[0].path

    def flip_again() -> None:
        kit.counts["mended"] += 1
        flip(path, 70)

    flip(path, 70)
    with monkeypatch.context() as patch:
        patch.setattr(kit, "_count_mended", flip_again)
        kit.read_damaged()
        await eventually(lambda: kit.unmendable_count == 1)
    assert kit.counts["mended"] == 3
    [lost] = kit.log.lost
    assert "the disk or the memory is at fault" in lost.reason
    kit.peers.leader = 3
    kit.on_metadata()
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)


async def test_what_is_given_up_is_tried_again_as_soon_as_another_leads(kit: Kit) -> None:
    kit.refusals = [CorruptRecordError("damaged here as well")]
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: not kit.refusals)
    kit.on_metadata()
    await asyncio.sleep(0.05)  # Time in which nothing must happen.
    assert kit.asked == 1
    kit.peers.leader = 3
    kit.on_metadata()
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)


async def test_a_leader_whose_log_begins_later_is_asked_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_MIN_BACKOFF_S", 0.001)
    kit.refusals = [OffsetOutOfRangeError("deleted")]
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: not kit.refusals)
    kit.log.advance_log_start(kit.log.log_end_offset)  # As the leader says with its next push.
    await kit.until_over()
    assert kit.controllers.reports == ["damaged", "sound"]


# --- copying anew --------------------------------------------------------------------------------


@pytest.fixture
async def compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    """A replica that has cleaned what its leader has not, and is damaged there."""
    monkeypatch.setattr(repair, "_LOOK_AGAIN_S", 0.001)
    logs = []
    for name in ("follower", "leader"):
        (tmp_path / name).mkdir()
        log = open_in(tmp_path / name, config=COMPACTED)
        put(log, ("a", "1"), ("b", "1"))
        put(log, ("c", "1"))
        put(log, ("a", "2"))
        close_segment(log)
        put(log, ("z", "1"))
        close_segment(log)
        put(log, ("z", "2"))
        logs.append(log)
    assert await Broker(logs[0]).cleaner.clean_one()
    flip(logs[0].files.segments[0].path, 65)
    made = Kit(*logs)
    yield made
    await made.stop()


async def test_a_replica_that_was_cleaned_otherwise_than_its_leader_is_copied_anew(
    compacted: Kit,
) -> None:
    compacted.read_damaged()
    await compacted.until_over()
    assert read_all(compacted.log) == read_all(compacted.leader)
    assert compacted.controllers.reports == ["damaged", "dropped", "copied", "sound"]
    assert compacted.counts == {"damaged": 1, "mended": 1}
    assert compacted.damaged_count == 0


async def test_nothing_is_dropped_while_the_leader_is_damaged_elsewhere(
    compacted: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "GIVEN_UP_S", 0.01)
    compacted.leader.home.damage_found = lambda _log, _offset: None
    last = compacted.leader.files.segments[-1].path
    flip(last, 65)
    compacted.read_damaged()
    await eventually(lambda: compacted.asked > 8)
    await eventually(lambda: compacted.unmendable_count == 1)
    assert compacted.controllers.reports == ["damaged"]
    assert shown_at(compacted.log, 5) == ("z", "2")
    flip(last, 65)  # It is mended.
    await compacted.until_over()
    assert read_all(compacted.log) == read_all(compacted.leader)
    assert compacted.controllers.reports == ["damaged", "dropped", "copied", "sound"]


async def test_a_log_is_dropped_only_for_the_leader_that_all_of_it_was_read_at(
    compacted: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_MIN_BACKOFF_S", 0.001)
    read_at: dict[int, list[int]] = {2: [], 3: []}

    class Deposed(Reads):
        async def read(self, key: TopicIdPartition, offset: int) -> bytes:
            if offset > 0:
                compacted.peers.leader = 3
            read_at[compacted.peers.leader].append(offset)
            return await super().read(key, offset)

    compacted.peers.reads = lambda: Deposed(compacted)
    compacted.read_damaged()
    await compacted.until_over()
    assert read_at[2] == [0, 0], "the damaged batch, and the first ones of all"
    assert read_at[3].count(0) == 2, "all is read again at whom it is copied from"
    assert compacted.controllers.reports == ["damaged", "dropped", "copied", "sound"]


async def test_how_far_a_copy_goes_is_up_to_whoever_leads(
    compacted: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever for what the one before had, and the next one has not."""

    async def further(*_: object) -> int:
        return compacted.leader.log_end_offset + 5

    monkeypatch.setattr(repair, "read_through", further)
    compacted.read_damaged()
    await eventually(lambda: "copied" in compacted.controllers.reports)
    await asyncio.sleep(0.05)  # Time in which nothing must happen.
    assert compacted.damaged_count == 1
    compacted.peers.leader = 3
    await compacted.until_over()
    assert compacted.controllers.reports == ["damaged", "dropped", "copied", "sound"]


async def test_what_could_not_be_dropped_is_not_taken_for_copied(
    compacted: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_MIN_BACKOFF_S", 0.001)
    copy_anew, refused = compacted.controllers.copy_anew, list[TopicIdPartition]()

    def refuse_once(key: TopicIdPartition) -> bool:
        if not refused:
            refused.append(key)
            return False
        return copy_anew(key)

    monkeypatch.setattr(compacted.controllers, "copy_anew", refuse_once)
    compacted.read_damaged()
    await compacted.until_over()
    assert refused
    assert read_all(compacted.log) == read_all(compacted.leader)
    assert compacted.counts == {"damaged": 1, "mended": 1}


def shown_at(log: PartitionLog, offset: int) -> tuple[str, str | None]:
    [record] = records_of(log.read(offset, 100, below=EVERYTHING))
    return pair_of(record)


async def test_damage_in_several_segments_is_mended_in_one_go(kit: Kit) -> None:
    segments = kit.log.files.segments
    for segment in segments:
        flip(segment.path, 70)
    for segment in segments:
        kit.found(kit.log, segment.base_offset)
    await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.controllers.reports == ["damaged", "sound"]
    assert kit.counts == {"damaged": len(segments), "mended": len(segments)}


async def test_a_log_that_is_dropped_is_mended_no_more(kit: Kit) -> None:
    kit.controllers.others_in_sync = False
    flip(kit.log.files.segments[0].path, 70)
    kit.read_damaged()
    await eventually(lambda: "damaged" in kit.controllers.reports)
    kit.here = False
    kit.on_metadata()
    await kit.until_over()
    assert kit.damaged_count == 0


@pytest.mark.parametrize("finder", ["read", "scrubber"])
async def test_a_log_with_a_hole_is_copied_anew(kit: Kit, finder: str) -> None:
    segment = kit.log.files.segments[1]
    *_, last = segment.walk(0, segment.base_offset)
    os.truncate(segment.path, last.position)
    segment.size_bytes = last.position
    with capture_logs() as lines:
        if finder == "read":
            with pytest.raises(CorruptRecordError):
                kit.log.read(last.header.base_offset, 100, below=EVERYTHING)
        else:
            kit.found(kit.log, Examination(kit.log, segment).run().damages[0].offset)
        await kit.until_over()
    assert read_all(kit.log) == read_all(kit.leader)
    assert kit.controllers.reports == ["damaged", "dropped", "copied", "sound"]
    assert kit.counts == {"damaged": 1, "mended": 1}
    events = [line["event"] for line in lines]
    assert events == [
        "damaged batch found",
        "damaged log is copied anew",
        "damaged log was copied anew",
    ]


async def test_a_false_alarm_changes_nothing(kit: Kit) -> None:
    kit.found(kit.log, 0)
    await kit.until_over()
    assert (kit.counts["damaged"], kit.asked) == (0, 0)
    assert "damaged" not in kit.controllers.reports


async def test_a_damaged_index_is_made_anew_without_a_word_to_anybody(kit: Kit) -> None:
    segment = kit.log.files.segments[0]
    flip(segment.index_path, 2, bit=6)
    kit.found(kit.log, 0)
    await kit.until_over()
    assert "damaged" not in kit.controllers.reports
    assert segment.file_index.load().is_rising()
