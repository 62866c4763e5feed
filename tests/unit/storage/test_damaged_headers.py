"""No bit of a header below the recovery point has a start cut a log, or take it for longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.core.producer_state import Append, Duplicate
from penstock.broker.storage.producers import CutDelayedError
from penstock.broker.storage.recovery import SavedState
from penstock.wire.records import HEADER_BYTES, iter_batches, parse_header
from tests.unit.storage.storage_kit import batch, open_in, small_config
from tests.unit.storage.test_log_recovery import crash, filled, newest_segment


def all_that_a_header_may_become(data: bytes, position: int) -> Iterator[bytes]:
    """The file with each bit of the header of the batch at ``position`` flipped, one at a time."""
    for at in range(position, position + HEADER_BYTES):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            yield bytes(flipped)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("above", [0, 1])
@pytest.mark.parametrize("of", ["first", "last"])
def test_no_bit_of_a_header_below_the_recovery_point_makes_a_log_shorter_or_longer(
    tmp_path: Path, of: str, above: int, clean: bool
) -> None:
    """``above`` batches have come since: the last one below must not hide where they begin."""
    if clean and above:
        return  # A clean stop leaves nothing above.
    values = ["one" * 9, "two" * 9, "three" * 9]
    log = filled(tmp_path, *values[: 3 - above], flush=True)
    point = log.recovery_point
    for value in values[3 - above :]:
        log.append_as_leader(batch(value), 1, now_ms=1)
    log.close(save=clean)
    path = newest_segment(tmp_path)
    data = path.read_bytes()
    positions = [0, *accumulate(view.nbytes for _, view in iter_batches(data))]
    position = 0 if of == "first" else positions[point - 1]
    saved, shut = SavedState(recovery_point=point, clean=clean), 0
    for flipped in all_that_a_header_may_become(data, position):
        path.write_bytes(flipped)
        try:
            log = open_in(tmp_path, saved=saved)
        except DamagedLogError:
            shut += 1
        else:
            assert log.log_end_offset == 3
            crash(log)
        assert path.read_bytes() == flipped, "nothing was cut"
    assert shut >= 61


def all_that_its_producer_may_become(data: bytes, position: int) -> Iterator[bytes]:
    """The same of its producer's id and epoch, and of its first sequence."""
    for flipped in all_that_a_header_may_become(data, position):
        if flipped[position + 43 : position + 57] != data[position + 43 : position + 57]:
            yield flipped


def test_no_bit_of_a_header_changes_what_producers_are_known_to_have_written(
    tmp_path: Path,
) -> None:
    """Otherwise a leader would append again what is there already, or refuse what comes."""
    log = filled(tmp_path, "one", "two", "three", flush=True)
    crash(log)
    path = newest_segment(tmp_path)
    data = path.read_bytes()
    [first, *_] = [view.nbytes for _, view in iter_batches(data)]
    saved = SavedState(recovery_point=3)
    for flipped in all_that_its_producer_may_become(data, first):
        path.write_bytes(flipped)
        log = open_in(tmp_path, saved=saved)
        check = log.producers.check
        assert check(parse_header(batch("three", producer=(7, 0, 2)))) == Duplicate(2, 2)
        assert check(parse_header(batch("four", producer=(7, 0, 3)))) == Append()
        known = log.producers.entry(7)
        assert known is not None
        assert known.producer_epoch == 0
        assert log.noted_damage == (1,)
        crash(log)


@pytest.mark.parametrize("size_bytes", [500, 30_000])
def test_a_cut_does_not_believe_a_header_either(tmp_path: Path, size_bytes: int) -> None:
    """Neither what it reads at once nor what it has read elsewhere."""
    values = ["x" * size_bytes] * 12
    config = small_config(segment_bytes=1 << 20, max_message_bytes=1 << 20)
    log = open_in(tmp_path, config=config)
    jobs: list[Callable[[], None]] = []
    log.home.run_in_background = jobs.append
    for number, value in enumerate(values):
        log.append_as_leader(batch(value, producer=(7, 0, number)), 1, now_ms=1)
    log.flush()
    log.note_committed(12)  # It is to read the log for a cut.
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[52] ^= 8  # Of the producer epoch of the first batch.
    path.write_bytes(data)
    if size_bytes > 500:
        with pytest.raises(CutDelayedError):
            log.truncate_to(11)
        jobs.pop()()
    log.truncate_to(11)
    assert not jobs
    answer = log.producers.check(parse_header(batch(values[0], producer=(7, 0, 10))))
    assert answer == Duplicate(10, 10)
