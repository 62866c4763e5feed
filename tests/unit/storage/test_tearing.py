"""What is cut at the end of a log after a crash: torn by it, or whole once and lost since."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.storage import tearing
from penstock.broker.storage.disk import Buffer
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.tearing import SECTOR_BYTES
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, iter_batches
from tests.unit.storage.storage_kit import (
    PARTITION,
    PowerCutDisk,
    batch,
    open_in,
    small_config,
    values_of,
)

CONFIG = small_config(segment_bytes=1 << 20, max_message_bytes=1 << 20)
NAME = "00000000000000000000.log"


def noise(size: int, seed: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=size))


def filled(root: Path, *sizes: int) -> bytes:
    """A log that was flushed, of which local state knows nothing yet; its bytes."""
    log = open_in(root, config=CONFIG)
    for at, size in enumerate(sizes):
        log.append_as_leader(batch(noise(size, at)), 1, now_ms=1)
    log.flush()
    log.close(save=False)
    return (log.directory / NAME).read_bytes()


def found(root: Path, data: bytes, point: int = 0) -> PartitionLog:
    (root / str(PARTITION) / NAME).write_bytes(data)
    log = open_in(root, config=CONFIG, saved=SavedState(recovery_point=point))
    log.close(save=False)
    return log


@pytest.mark.parametrize("field", ["magic", "crc", "length up", "length down", "offset", "record"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_bit_that_flipped_in_a_flushed_batch_is_no_torn_write(
    tmp_path: Path, field: str, number: int
) -> None:
    data = bytearray(filled(tmp_path, 700, 900, 300))
    starts = [0]
    for _, view in iter_batches(bytes(data)):
        starts.append(starts[-1] + len(view))
    at, bit = {
        "magic": (16, 0x40),
        "crc": (18, 1),
        "length up": (9, 0x01),
        "length down": (11, 0x08),
        "offset": (3, 0x10),
        "record": (90, 4),
    }[field]
    data[starts[number] + at] ^= bit
    with capture_logs() as lines:
        log = found(tmp_path, bytes(data))
    assert log.log_end_offset == number
    [line] = [line for line in lines if line["event"] == "log_tail_cut"]
    assert (log.dropped_records, line["is_torn"]) == (True, False)


@pytest.mark.parametrize("search", ["next", "last"])
def test_the_search_for_a_batch_comes_to_an_end(
    monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    """A record may hold what looks like the beginnings of many batches, each up to its end."""
    header = bytearray(b"\1" * HEADER_BYTES)
    data = bytearray(b"\xff" * HEADER_BYTES)
    size = 1 << 20
    while len(data) + HEADER_BYTES < size:
        struct.pack_into(">qiib", header, 0, 1000, size - len(data) - 12, 0, 2)
        data += header
    data += bytes(size - len(data))
    checked: list[int] = []

    def verify(batch: Buffer) -> None:
        checked.append(len(batch))
        raise CorruptRecordError("not one")

    monkeypatch.setattr(tearing, "verify_batch", verify)
    if search == "next":
        assert tearing.was_whole(bytes(data), 0, 5), "it is not even a header"
        most = tearing.MAX_CHECKED_BYTES
    else:
        assert tearing.last_end(bytes(data), 5) == 5
        most = tearing.MAX_CHECKED_BYTES + size
    assert size < sum(checked) <= most


def test_a_whole_batch_of_an_older_epoch_was_not_torn_either(tmp_path: Path) -> None:
    data = filled(tmp_path, 700, 100)
    stale = batch("stale", base_offset=2, leader_epoch=0)
    log = found(tmp_path, data + stale)
    assert (log.log_end_offset, log.dropped_records) == (2, True)


def test_what_the_end_of_the_file_tore_was_not_flushed(tmp_path: Path) -> None:
    data = filled(tmp_path, 700, 900)
    first = next(view for _, view in iter_batches(data))
    for size in range(len(first) + 1, len(data)):
        log = found(tmp_path, data[:size])
        assert (log.log_end_offset, log.dropped_records) == (1, False), size


def test_a_sector_that_was_never_written_tears_what_is_around_it(tmp_path: Path) -> None:
    """Also where batches that are whole come after it: what is not flushed goes in any order."""
    data = filled(tmp_path, 700, 900, 2000, 300)
    first = len(next(view for _, view in iter_batches(data)))
    for start in range(0, len(data), SECTOR_BYTES):
        end = min(start + SECTOR_BYTES, len(data))
        if end <= first:
            continue
        begin = max(start, first)  # What was flushed before is in its sector for certain.
        torn = data[:begin] + bytes(end - begin) + data[end:]
        log = found(tmp_path, torn, point=1)
        assert not log.dropped_records, start
        assert log.log_end_offset < 4


def test_room_that_was_made_ahead_is_no_batch(tmp_path: Path) -> None:
    data = filled(tmp_path, 700, 900)
    log = found(tmp_path, data + bytes(10_000))
    assert (log.log_end_offset, log.dropped_records) == (2, False)


class Sectors(PowerCutDisk):
    PAGE = SECTOR_BYTES


@pytest.mark.parametrize("seed", range(60))
def test_no_power_cut_passes_for_lost_records(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    root = tmp_path / "root"
    root.mkdir()
    disk = Sectors()
    log = open_in(root, config=CONFIG, disk=disk)
    for at in range(chance.randint(0, 4)):
        log.append_as_leader(batch(noise(chance.randint(1, 2000), at)), 1, now_ms=1)
    log.flush()
    flushed = log.log_end_offset
    for at in range(chance.randint(1, 6)):
        log.append_as_leader(batch(noise(chance.randint(1, 4000), at)), 1, now_ms=1)
    everything = values_of(log)
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    disk.cut_power(log.directory, crashed / str(PARTITION), chance)
    log.close(save=False)
    again = open_in(
        crashed, config=CONFIG, saved=SavedState(recovery_point=chance.randint(0, flushed))
    )
    assert again.log_end_offset >= flushed
    assert values_of(again) == everything[: again.log_end_offset]
    assert not again.dropped_records
    again.close(save=False)


@pytest.mark.parametrize("offset", [1000, 2**24 - 1, 2**32 - 1])
def test_the_next_batch_is_found_whatever_its_offset_shares_with_the_one_before(
    offset: int,
) -> None:
    one = bytearray(batch(noise(700, 1), base_offset=offset))
    one[9] ^= 1  # Its length says that it goes on behind the end of the file.
    following = b"".join(batch(noise(700, at), base_offset=offset + at) for at in (1, 2))
    assert tearing.was_whole(bytes(one) + following, 0, offset)
    assert tearing.last_end(following, offset + 1) == offset + 3
    assert tearing.last_end(following, offset) == offset + 3
