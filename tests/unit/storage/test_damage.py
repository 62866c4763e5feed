"""A bit flips in a segment: it is found, and mended from another replica's batches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.broker.storage.damage import MAX_KEPT, Damage, Examination, kept, mend, patch_of
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import LeaderEpoch
from tests.unit.storage.storage_kit import EVERYTHING, batch, open_in, read_all, small_config


def filled(root: Path, count: int = 12) -> PartitionLog:
    """A log of several segments with several batches each, of two leader epochs."""
    root.mkdir(exist_ok=True)
    log = open_in(root, config=small_config(segment_bytes=700))
    for number in range(count):
        epoch = LeaderEpoch(1 if number < 5 else 3)
        log.append_as_leader(batch(f"value {number}", "x" * 40), epoch, now_ms=0)
    log.flush()
    assert len(log.files.segments) >= 3
    return log


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def damages(log: PartitionLog, segment: Segment) -> list[Damage]:
    findings = Examination(log, segment).run()
    assert findings.error is None
    return findings.damages


def mend_all(log: PartitionLog, segment: Segment, other: PartitionLog) -> int:
    """Mend as Repairs does; how many stretches it took."""
    count = 0
    while found := damages(log, segment):
        for damage in found:
            sound = other.read(damage.offset, 300, below=EVERYTHING)
            patch = patch_of(log, segment, damage, sound)
            assert patch is not None
            mend(log, segment, damage, patch)()
            count += 1
    return count


def test_a_sound_log_has_no_damage(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    read: list[int] = []
    for segment in log.files.segments:
        findings = Examination(log, segment).run(read.append)
        assert (findings.damages, findings.index_is_damaged) == ([], False)
    assert sum(read) == log.size_bytes


def test_every_bit_that_flips_is_found_and_mended(tmp_path: Path) -> None:
    other = filled(tmp_path / "b")
    log = filled(tmp_path / "a")
    segment = log.files.segments[1]
    sound = segment.path.read_bytes()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(sound) - 1), st.integers(0, 7))
    def check(position: int, bit: int) -> None:
        segment.path.write_bytes(sound)
        flip(segment.path, position, bit)
        [first, *_] = damages(log, segment)
        assert first.position <= position
        mend_all(log, segment, other)
        assert segment.path.read_bytes() == sound

    check()
    assert read_all(log) == read_all(other)


def test_a_destroyed_stretch_is_mended(tmp_path: Path) -> None:
    other = filled(tmp_path / "b")
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    sound = segment.path.read_bytes()

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(sound) - 1), st.binary(min_size=1, max_size=400))
    def check(begin: int, rubbish: bytes) -> None:
        end = min(begin + len(rubbish), len(sound))
        segment.path.write_bytes(sound[:begin] + rubbish[: end - begin] + sound[end:])
        mend_all(log, segment, other)
        assert segment.path.read_bytes() == sound

    check()


def test_damage_is_told_with_its_offset_and_the_sound_rest_is_read(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    second = next(placed for placed in segment.walk(0, 0) if placed.position > 0)
    flip(segment.path, second.position + 70)
    [damage] = damages(log, segment)
    assert (damage.offset, damage.position) == (second.header.base_offset, second.position)
    assert "CRC" in damage.what
    assert log.read(0, 1 << 20, below=EVERYTHING), "what lies before it is served"
    with pytest.raises(CorruptRecordError):
        log.read(damage.offset, 1 << 20, below=EVERYTHING)
    assert log.read(second.header.next_offset, 1 << 20, below=EVERYTHING), "and what lies after"


def test_a_read_of_a_damaged_batch_tells_of_it(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    told: list[tuple[PartitionLog, int]] = []
    log.home.damage_found = lambda found, offset: told.append((found, offset))
    flip(log.files.segments[0].path, 70)
    with pytest.raises(CorruptRecordError):
        log.read(0, 100, below=EVERYTHING)
    assert told == [(log, 0)]


def test_damage_is_told_with_where_one_can_read_on(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    places = list(segment.walk(0, 0))
    known = [entry.relative_offset for entry in segment.file_index.load().entries()]
    assert known, "the index knows of batches within the segment"
    for placed in places:
        offset, behind = placed.header.base_offset, placed.header.next_offset
        for position, ends in (
            (70, behind),  # Within the records.
            (8, next((at for at in known if at > offset), log.files.segments[1].base_offset)),
        ):
            was = segment.read_at(1, placed.position + position)
            flip(segment.path, placed.position + position, bit=7)
            [damage, *_] = damages(log, segment)
            assert (damage.offset, damage.end_offset) == (offset, ends)
            if ends < log.files.segments[1].base_offset:
                assert log.read(ends, 100, below=EVERYTHING), "what is behind can be read"
            segment.overwrite(was, placed.position + position)


def test_the_active_segment_is_read_on_by_its_index_in_memory(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(index_interval_bytes=1, segment_bytes=1 << 20))
    for number in range(5):
        log.append_as_leader(batch(f"value {number}"), LeaderEpoch(1), now_ms=0)
    log.flush()
    [active] = log.files.segments
    places = list(active.walk(0, 0))
    flip(active.path, places[1].position + 8, bit=7)  # The length.
    flip(active.path, places[3].position + 70)
    assert [(one.offset, one.end_offset) for one in damages(log, active)] == [(1, 2), (3, 4)]


def test_a_header_that_is_damaged_below_the_logs_start_is_no_damage(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    flip(segment.path, 8, bit=7)
    [damage] = damages(log, segment)
    assert 0 < damage.end_offset < segment.base_offset + len(list(log.files.segments)) * 100
    log.advance_log_start(damage.end_offset)
    assert damages(log, log.files.segments[0]) == []
    assert read_all(log)


def test_a_hole_is_told_with_where_it_ends(tmp_path: Path) -> None:
    log = filled(tmp_path)
    first, second = log.files.segments[:2]
    offsets = [placed.header.base_offset for placed in first.walk(0, 0)]
    cut(log, first, offsets[1])
    [damage] = damages(log, first)
    assert (damage.offset, damage.end_offset) == (offsets[1], second.base_offset)


def test_damage_that_is_come_upon_before_the_read_proper_is_told(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    told: list[int] = []
    log.home.damage_found = lambda _, offset: told.append(offset)
    flip(log.files.segments[0].path, 3, bit=5)  # Where the header is.
    with pytest.raises(CorruptRecordError):
        log.cold_read(1, 100)
    assert told == [1]


def test_batches_that_do_not_fit_are_no_patch(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    flip(segment.path, 70)
    [damage] = damages(log, segment)
    longer = batch("another value", "y" * 41, leader_epoch=1)
    assert patch_of(log, segment, damage, longer) is None
    assert patch_of(log, segment, damage, b"") is None
    damaged_too = bytearray(batch("value 0", "x" * 40, leader_epoch=1))
    damaged_too[-1] ^= 1
    assert patch_of(log, segment, damage, bytes(damaged_too)) is None


def test_what_was_damaged_is_kept_and_not_for_ever(tmp_path: Path) -> None:
    other = filled(tmp_path / "b")
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    for _ in range(MAX_KEPT):
        for placed in list(segment.walk(0, 0)):
            flip(segment.path, placed.position + 70)
            before = segment.path.read_bytes()[placed.position :]
            mend_all(log, segment, other)
            newest = kept(log.directory)[-1]
            assert before.startswith(newest.read_bytes())
    assert len(kept(log.directory)) <= MAX_KEPT
    log.close(save=True)
    assert read_all(open_in(tmp_path / "a")) == read_all(other), "a start passes over them"


@pytest.mark.parametrize("position", [2, 6])
def test_a_damaged_index_is_found_and_made_anew(tmp_path: Path, position: int) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    assert segment.index is None
    flip(segment.index_path, position, bit=6)
    findings = Examination(log, segment).run()
    assert findings.index_is_damaged
    assert not findings.damages
    segment.mend_index()
    assert not Examination(log, segment).run().index_is_damaged


@pytest.mark.parametrize("interval_bytes", [1, 10_000])
def test_every_bit_that_flips_in_an_index_file_is_found(
    tmp_path: Path, interval_bytes: int
) -> None:
    """An index of several entries, and one of which there is only the last time."""
    segment, log = timed(tmp_path, interval_bytes)
    assert (segment.time_index_path.stat().st_size > 30) == (interval_bytes == 1)
    for path in (segment.index_path, segment.time_index_path):
        sound = path.read_bytes()
        for bit in range(8 * len(sound)):
            flip(path, bit // 8, bit % 8)
            findings = Examination(log, segment).run()
            assert (findings.index_is_damaged, findings.damages) == (True, []), bit
            path.write_bytes(sound)
    assert not Examination(log, segment).run().index_is_damaged


@pytest.mark.parametrize("interval_bytes", [1, 10_000])
def test_a_time_index_without_a_checksum_is_compared_with_the_records(
    tmp_path: Path, interval_bytes: int
) -> None:
    segment, log = timed(tmp_path, interval_bytes)
    path = segment.time_index_path
    sound = path.read_bytes()[:-4]
    path.write_bytes(sound)
    assert not Examination(log, segment).run().index_is_damaged
    for bit in range(8 * len(sound)):
        flip(path, bit // 8, bit % 8)
        assert Examination(log, segment).run().index_is_damaged, bit
        path.write_bytes(sound)
    path.write_bytes(sound[:-12])
    assert Examination(log, segment).run().index_is_damaged


def timed(root: Path, interval_bytes: int) -> tuple[Segment, PartitionLog]:
    """A closed segment whose batches are of rising times, but for the last."""
    log = open_in(root, config=small_config(index_interval_bytes=interval_bytes))
    for timestamp_ms in (1000, 2000, 3000, 4000, 500):
        log.append_as_leader(batch("x", timestamp_ms=timestamp_ms), LeaderEpoch(3), now_ms=0)
    log.roll()
    log.flush()
    return log.files.segments[0], log


def test_what_lies_below_the_logs_start_is_no_damage(tmp_path: Path) -> None:
    log = filled(tmp_path / "a")
    segment = log.files.segments[0]
    third = [placed.header.next_offset for placed in segment.walk(0, 0)][2]
    log.advance_log_start(third - 1)  # Within a batch; the epochs below are forgotten.
    assert log.files.segments[0] is segment
    assert damages(log, segment) == []
    flip(segment.path, 70)
    assert damages(log, segment) == []


def test_the_segment_that_is_appended_to_is_looked_at_as_far_as_it_went(tmp_path: Path) -> None:
    other = filled(tmp_path / "b")
    log = filled(tmp_path / "a")
    active = log.files.active
    flip(active.path, 70)
    examination = Examination(log, active)
    log.append_as_leader(batch("more"), LeaderEpoch(3), now_ms=0)
    [damage] = examination.run().damages
    sound = other.read(damage.offset, 300, below=EVERYTHING)
    patch = patch_of(log, active, damage, sound)
    assert patch is not None
    mend(log, active, damage, patch)()
    assert damages(log, active) == []


@pytest.mark.parametrize("left", [0, 1])
def test_a_segment_that_ends_before_the_next_one_begins_has_a_hole(
    tmp_path: Path, left: int
) -> None:
    log = filled(tmp_path)
    first, second = log.files.segments[:2]
    offsets = [placed.header.base_offset for placed in first.walk(0, 0)]
    cut(log, first, offsets[left])
    [damage] = damages(log, first)
    assert damage.offset == offsets[left]
    assert damage.is_hole
    missing = f"offsets {offsets[left]} to {second.base_offset - 1} are missing"
    assert missing in damage.what
    assert damages(log, second) == []


def cut(log: PartitionLog, segment: Segment, offset: int) -> None:
    """Cut a closed segment before a batch, as nobody should."""
    placed = segment.position_of(offset)
    assert placed is not None
    os.truncate(segment.path, placed.position)
    segment.size_bytes = placed.position


def test_what_is_missing_below_the_logs_start_is_no_hole(tmp_path: Path) -> None:
    log = filled(tmp_path)
    first, second = log.files.segments[:2]
    *_, last = first.walk(0, 0)
    cut(log, first, last.header.base_offset)
    log.advance_log_start(second.base_offset - 1)
    [damage] = damages(log, first)
    assert damage.offset == second.base_offset - 1
    log.home.save_soon = lambda _: None  # It is still there.
    log.advance_log_start(second.base_offset)
    assert damages(log, first) == []


def test_segments_that_overlap_do_not_meet_either(tmp_path: Path) -> None:
    log = filled(tmp_path)
    first, second = log.files.segments[:2]
    with first.path.open("ab") as file:
        file.write(batch("again", base_offset=second.base_offset, leader_epoch=3))
    first.size_bytes = first.path.stat().st_size
    [damage] = damages(log, first)
    assert (damage.is_hole, damage.offset) == (True, second.base_offset - 1)
    assert log.files.segment_of(damage.offset) is first
