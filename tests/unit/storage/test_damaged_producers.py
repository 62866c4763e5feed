"""A damaged batch hides what its producer wrote, until it is mended: no retry is appended twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.core.producer_state import Append, Duplicate
from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.damage import Examination, mend
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.producers import Replay
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import TopicLogConfig
from penstock.wire.errors import CorruptRecordError, OutOfOrderSequenceError
from penstock.wire.records import iter_batches, parse_header
from tests.unit.storage.cleaning import Broker, close_segment, compacted, put, shown
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    batch,
    open_in,
    read_all,
    small_config,
    values_of,
)
from tests.unit.storage.test_log_recovery import crash, newest_segment
from tests.unit.storage.test_repair import Kit

LARGE = small_config(segment_bytes=1 << 30)
CRC_AT, ID_SIGN_AT, ID_AT, EPOCH_AT, SEQUENCE_AT, PAYLOAD_AT = 17, 43, 47, 52, 56, 90
ONLY = "only" * 20


def flip(root: Path, number: int, at: int, bit: int = 8) -> None:
    """Flip a bit of a batch of the newest segment, ``at`` bytes behind where it begins."""
    path = newest_segment(root)
    data = bytearray(path.read_bytes())
    position = sum(view.nbytes for _, view in list(iter_batches(bytes(data)))[:number])
    data[position + at] ^= bit
    path.write_bytes(data)


def written(root: Path, *, config: TopicLogConfig = LARGE) -> PartitionLog:
    """Two producers write by turns, and 9 its first batch."""
    root.mkdir(exist_ok=True)
    log = open_in(root, config=config)
    for sequence in range(3):
        log.append_as_leader(batch(f"{sequence}", producer=(7, 0, sequence)), 1, now_ms=1)
    log.append_as_leader(batch(ONLY, producer=(9, 0, 0)), 1, now_ms=1)
    log.append_as_leader(batch("3", producer=(7, 0, 3)), 1, now_ms=1)
    log.flush()
    return log


RETRIES = {2: batch("2", producer=(7, 0, 2)), 3: batch(ONLY, producer=(9, 0, 0))}
NEXT = {2: batch("4", producer=(7, 0, 4)), 3: batch("next", producer=(9, 0, 1))}


def damaged(root: Path, number: int, at: int, *, config: TopicLogConfig = LARGE) -> PartitionLog:
    """The same after a crash, opened, with one batch damaged."""
    crash(written(root, config=config))
    flip(root, number, at, 128 if at == ID_SIGN_AT else 8)
    return open_in(root, config=config, saved=SavedState(recovery_point=5))


async def mended(root: Path, number: int, at: int) -> PartitionLog:
    leader, log = written(root / "leader"), damaged(root / "log", number, at)
    kit = Kit(log, leader)
    for offset in log.noted_damage:
        kit.found(log, offset)
    await kit.until_over()
    assert kit.controllers.reports[-1] == "sound"
    assert read_all(log) == read_all(leader)
    assert not log.known_producers.are_in_doubt
    return log


DAMAGE = [
    *((2, at) for at in (ID_SIGN_AT, ID_AT, EPOCH_AT, SEQUENCE_AT)),
    *((3, at) for at in (CRC_AT, ID_SIGN_AT, ID_AT, EPOCH_AT, SEQUENCE_AT, PAYLOAD_AT)),
]


@pytest.mark.parametrize(("number", "at"), DAMAGE)
async def test_a_mended_replica_knows_who_wrote_what_was_damaged(
    tmp_path: Path, number: int, at: int
) -> None:
    log = await mended(tmp_path, number, at)
    assert log.append_as_leader(RETRIES[number], 2, now_ms=1).duplicate
    log.append_as_leader(NEXT[number], 2, now_ms=1)
    assert log.log_end_offset == 6


async def test_what_is_appended_while_that_is_learnt_counts_as_well(tmp_path: Path) -> None:
    log = damaged(tmp_path, 3, EPOCH_AT)
    flip(tmp_path, 3, EPOCH_AT)
    replay = log.known_producers.learn(log.log_end_offset, None)
    replay.run()
    log.append_as_follower(batch("n", producer=(9, 0, 1), base_offset=5, leader_epoch=1))
    assert log.known_producers.learned(replay, log.log_end_offset)
    retry = parse_header(batch("n", producer=(9, 0, 1)))
    assert log.producers.check(retry) == Duplicate(5, 5)
    assert log.producers.check(parse_header(RETRIES[3])) == Duplicate(3, 3)


async def test_much_that_is_appended_meanwhile_is_read_in_the_thread_too(tmp_path: Path) -> None:
    log = damaged(tmp_path, 3, EPOCH_AT)
    flip(tmp_path, 3, EPOCH_AT)
    known = log.known_producers
    replay = known.learn(log.log_end_offset, None)
    replay.run()
    for sequence in range(1, 202):
        offset = log.log_end_offset
        log.append_as_follower(
            batch("x" * 1500, producer=(9, 0, sequence), base_offset=offset, leader_epoch=1)
        )
    assert not known.learned(replay, log.log_end_offset)
    assert known.are_in_doubt
    replay = known.learn(log.log_end_offset, replay)
    replay.run()
    assert known.learned(replay, log.log_end_offset)
    assert not known.are_in_doubt
    last = parse_header(batch("x" * 1500, producer=(9, 0, 201)))
    assert log.producers.check(last) == Duplicate(205, 205)


async def test_what_was_read_before_a_cut_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, run = asyncio.get_running_loop(), Replay.run
    cuts: list[Callable[[], None]] = []

    def run_and_cut(replay: Replay) -> None:
        run(replay)
        while cuts:
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(cuts.pop()), loop).result(10)

    monkeypatch.setattr(Replay, "run", run_and_cut)
    leader, log = written(tmp_path / "leader"), damaged(tmp_path / "log", 3, EPOCH_AT)
    cuts.append(lambda: log.truncate_to(4))
    kit = Kit(log, leader)
    kit.found(log, 3)
    await kit.until_over()
    assert not cuts
    assert log.producers.check(parse_header(RETRIES[3])) == Duplicate(3, 3)
    assert log.producers.check(parse_header(batch("3", producer=(7, 0, 3)))) == Append()


async def test_a_batch_that_is_damaged_again_meanwhile_is_mended_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replay.run
    flips = [lambda: flip(tmp_path / "log", 3, EPOCH_AT)]

    def flip_and_run(replay: Replay) -> None:
        while flips:
            flips.pop()()
        run(replay)

    monkeypatch.setattr(Replay, "run", flip_and_run)
    log = await mended(tmp_path, 3, PAYLOAD_AT)
    assert log.producers.check(parse_header(RETRIES[3])) == Duplicate(3, 3)


# --- as long as nobody can mend it ---------------------------------------------------------------


@pytest.mark.parametrize(("number", "at"), DAMAGE)
def test_a_damaged_batch_is_recognised_when_it_is_sent_again(
    tmp_path: Path, number: int, at: int
) -> None:
    log = damaged(tmp_path, number, at)
    assert log.noted_damage == (number,)
    info = log.append_as_leader(RETRIES[number], 2, now_ms=1)
    assert (info.duplicate, info.base_offset) == (True, number)


@pytest.mark.parametrize(
    ("number", "at"), [(2, ID_AT), (2, EPOCH_AT), (3, CRC_AT), (3, PAYLOAD_AT)]
)
def test_a_producer_goes_on_behind_its_damaged_batch(tmp_path: Path, number: int, at: int) -> None:
    log = damaged(tmp_path, number, at)
    log.append_as_leader(NEXT[number], 2, now_ms=1)
    info = log.append_as_leader(RETRIES[number], 2, now_ms=1)
    assert (info.duplicate, info.base_offset) == (True, number)


def test_what_a_damaged_header_says_refuses_nobody_and_takes_nothing_for_a_retry(
    tmp_path: Path,
) -> None:
    log = damaged(tmp_path, 3, ID_AT, config=LARGE)
    said = log.producers.doubted[0].header.producer_id
    assert said != 9
    log.append_as_leader(batch("another's", producer=(said, 0, 0)), 2, now_ms=1)
    with pytest.raises(OutOfOrderSequenceError):
        log.append_as_leader(batch("gap", producer=(said, 0, 2)), 2, now_ms=1)
    log.append_as_leader(batch("new", producer=(11, 0, 0)), 2, now_ms=1)
    assert log.log_end_offset == 7


def test_where_the_broker_stamped_the_batch_nobody_can_tell_and_it_is_refused_for_now(
    tmp_path: Path,
) -> None:
    config = small_config(segment_bytes=1 << 30, log_append_time=True)
    log = damaged(tmp_path, 3, PAYLOAD_AT, config=config)
    with pytest.raises(CorruptRecordError, match="may be the one at offset 3, which is damaged"):
        log.append_as_leader(RETRIES[3], 2, now_ms=1)
    log.append_as_leader(NEXT[3], 2, now_ms=1)
    with pytest.raises(OutOfOrderSequenceError):
        log.append_as_leader(RETRIES[3], 2, now_ms=1)
    assert log.log_end_offset == 6


def test_no_snapshot_is_taken_of_a_state_in_doubt(tmp_path: Path) -> None:
    log = damaged(tmp_path, 3, EPOCH_AT)
    log.append_as_leader(NEXT[2], 2, now_ms=1)
    log.roll()
    log.append_as_leader(batch("5", producer=(7, 0, 5)), 2, now_ms=1)
    log.close(save=True)
    assert not snapshots(log.directory)
    saved = SavedState(recovery_point=7, clean=True)
    log = open_in(tmp_path, config=LARGE, saved=saved)
    assert log.opened_clean
    assert log.noted_damage == (3,)
    assert log.append_as_leader(RETRIES[3], 2, now_ms=1).duplicate
    [damage] = Examination(log, log.files.segments[0]).run().damages
    sound = bytearray(log.files.segments[0].read_at(1 << 20, damage.position))
    sound[EPOCH_AT] ^= 8
    patch = bytes(next(view for _, view in iter_batches(bytes(sound))))
    mend(log, log.files.segments[0], damage, patch)()
    replay = log.known_producers.learn(log.log_end_offset, None)
    replay.run()
    assert log.known_producers.learned(replay, log.log_end_offset)
    log.append_as_leader(NEXT[3], 2, now_ms=1)
    log.close(save=True)
    assert [offset for offset, _ in snapshots(log.directory)] == [8]


def test_what_is_deleted_is_in_doubt_no_more(tmp_path: Path) -> None:
    log = damaged(tmp_path, 3, EPOCH_AT)
    assert log.known_producers.are_in_doubt
    log.advance_log_start(4)
    assert not log.known_producers.are_in_doubt
    assert log.append_as_leader(RETRIES[3], 2, now_ms=1).duplicate
    log.close(save=True)
    assert [offset for offset, _ in snapshots(log.directory)] == [5]


def test_a_cut_tells_of_damage_that_hides_what_producers_wrote(tmp_path: Path) -> None:
    log = written(tmp_path)
    told: list[int] = []
    log.home.damage_found = lambda _, offset: told.append(offset)
    flip(tmp_path, 3, EPOCH_AT)
    log.note_committed(log.log_end_offset)  # It is to read the log for a cut.
    log.truncate_to(4)
    assert told == [3]
    assert log.noted_damage == (3,)
    assert log.append_as_leader(RETRIES[3], 2, now_ms=1).duplicate
    log.append_as_leader(batch("3", producer=(7, 0, 3)), 2, now_ms=1)
    log.truncate_to(4)
    assert told == [3], "it is known by now"
    log.truncate_to(3)
    assert not log.known_producers.are_in_doubt


async def test_a_log_in_doubt_is_not_cleaned(tmp_path: Path) -> None:
    """A producer's last batch stays when it is cleaned, and nobody knows which one that is."""
    log = compacted(tmp_path)
    put(log, ("a", "1"), producer=(9, 0, 0))
    put(log, ("a", "2"))
    log.flush()
    crash(log)
    flip(tmp_path, 0, EPOCH_AT)
    log = open_in(tmp_path, config=log.config, saved=SavedState(recovery_point=2))
    flip(tmp_path, 0, EPOCH_AT)  # It is mended, but nobody has looked at it yet.
    close_segment(log)
    broker = Broker(log)
    assert not await broker.cleaner.clean_one()
    assert not broker.cleaner.uncleanable_count
    replay = log.known_producers.learn(log.log_end_offset, None)
    replay.run()
    assert log.known_producers.learned(replay, log.log_end_offset)
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}
    assert log.read(0, 1 << 20, below=EVERYTHING)
    last = parse_header(log.read(0, 1 << 20, below=EVERYTHING))
    assert (last.producer_id, last.producer_epoch) == (9, 0)
    assert values_of(log) == ["2"]
