"""The cleaner leaves a damaged log alone, until it was mended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.storage.damage import Damage, mend
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from tests.unit.storage.cleaning import Broker, close_segment, compacted, names_in, put, shown


@pytest.mark.parametrize("where", ["a record's length", "a value", "the leader epoch"])
async def test_damage_is_reported_and_never_copied(tmp_path: Path, where: str) -> None:
    """With a checksum of its own the copy would pass for sound."""
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    path = log.files.segments[0].path
    data = bytearray(path.read_bytes())
    end = 12 + int.from_bytes(data[8:12])
    at = {"a record's length": 70, "a value": end - 2, "the leader epoch": 15}[where]
    data[at] ^= 1
    path.write_bytes(data)
    broker = Broker(log)
    with capture_logs() as logs:
        await broker.cleaner.clean_one()
        assert not await broker.cleaner.clean_one()
    [line] = [line for line in logs if line["event"] == "log_not_cleanable"]
    assert str(path) in line["reason"]
    assert path.read_bytes() == data
    assert log.home.failure is None
    assert names_in(log) == [f"{0:020d}.log", f"{2:020d}.log"]


@pytest.mark.parametrize("position", [3, 70])
async def test_damage_is_told_and_the_other_logs_are_cleaned(tmp_path: Path, position: int) -> None:
    logs = []
    for name in ("damaged", "sound"):
        (tmp_path / name).mkdir()
        log = compacted(tmp_path / name)
        put(log, ("a", "0"))
        close_segment(log)
        put(log, ("a", "1"))
        put(log, ("a", "2"))
        close_segment(log)
        logs.append(log)
    damaged, sound = logs
    damaged.key = damaged.key._replace(partition=9)
    told: list[int] = []
    damaged.home.damage_found = lambda log, offset: told.append(
        log.files.segment_of(offset).base_offset
    )
    segment = damaged.files.segments[1]
    segment.overwrite(bytes([segment.read_at(1, position)[0] ^ 1]), position)
    broker = Broker(damaged, sound)
    while await broker.cleaner.clean_one():
        pass
    assert shown(sound) == {2: ("a", "2")}
    assert told == [1]


async def test_a_gap_that_the_cleaner_finds_is_told(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    [segment, _] = log.files.segments
    *_, last = segment.walk(0, 0)
    os.truncate(segment.path, last.position)
    segment.size_bytes = last.position
    told: list[int] = []
    log.home.damage_found = lambda _, offset: told.append(offset)
    await Broker(log).cleaner.clean_one()
    assert told == [0]


async def damaged_and_not_cleaned(tmp_path: Path) -> tuple[PartitionLog, Broker, Segment, bytes]:
    """A log that the cleaner has given up, and what its damaged segment was."""
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    [segment, _] = log.files.segments
    sound = segment.path.read_bytes()
    segment.overwrite(bytes([sound[70] ^ 1]), 70)
    broker = Broker(log)
    assert await broker.cleaner.clean_one()
    assert not await broker.cleaner.clean_one()
    return log, broker, segment, sound


async def test_what_was_mended_is_cleaned(tmp_path: Path) -> None:
    log, broker, segment, sound = await damaged_and_not_cleaned(tmp_path)
    mend(log, segment, Damage(0, 0, "a bit has flipped"), sound)()
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


async def test_what_was_copied_anew_is_cleaned(tmp_path: Path) -> None:
    log, broker, _, sound = await damaged_and_not_cleaned(tmp_path)
    log.truncate_fully_and_start_at(0)
    log.append_as_follower(sound)
    close_segment(log)
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


async def test_what_is_read_as_sound_later_is_cleaned_then(tmp_path: Path) -> None:
    log, broker, segment, sound = await damaged_and_not_cleaned(tmp_path)
    segment.overwrite(sound, 0)  # As if it had been the memory's fault.
    broker.clock.now_ms += 3_599_999
    assert not await broker.cleaner.clean_one()
    broker.clock.now_ms += 1
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}
