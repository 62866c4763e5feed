"""What a log that does not open says that it had: all that was on the disk, not what was noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.tearing import last_end
from penstock.wire.records import RecordData, encode_batch
from tests.unit.storage.storage_kit import batch, open_in
from tests.unit.storage.test_durable_runs import KEY, Open, crash, open_logs, write
from tests.unit.storage.test_log_recovery import crash as crash_log
from tests.unit.storage.test_log_recovery import filled, newest_segment

__all__ = ["open_logs"]  # A fixture.


async def test_what_was_flushed_since_the_last_checkpoint_counts(
    open_logs: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    manager.checkpoint_high_watermark(KEY, 1)
    await write(manager)
    with monkeypatch.context() as patch:
        patch.setattr(LocalState, "write", lambda *_: None)  # It is seconds old, as it may be.
        await write(manager, "y", "z")
        assert log.durable_offset == 3
        crash(manager, tmp_path / "a")
    path = log.directory / "00000000000000000000.log"
    data = bytearray(path.read_bytes())
    data[16] ^= 1  # The magic of the first batch; the others lie whole behind it.
    path.write_bytes(data)
    error = open_logs(tmp_path / "a").unopened()[KEY]
    assert isinstance(error, DamagedLogError)
    assert error.end_offset == 3


def test_where_no_file_tells_it_is_what_was_noted(tmp_path: Path) -> None:
    crash_log(filled(tmp_path, "one", "two", "three", flush=True))
    newest_segment(tmp_path).unlink()
    with pytest.raises(DamagedLogError) as refusal:
        open_in(tmp_path, saved=SavedState(recovery_point=3))
    assert refusal.value.end_offset == 3


def test_a_segment_is_made_where_the_one_before_ends(tmp_path: Path) -> None:
    """So there were records up to there, though all of its own are garbage."""
    crash_log(filled(tmp_path, "x" * 700, "y" * 700, "z" * 700, flush=True))
    first, *_, last = sorted(newest_segment(tmp_path).parent.glob("*.log"))
    assert int(last.stem) == 2
    data = bytearray(first.read_bytes())
    data[16] ^= 1
    first.write_bytes(data)
    last.write_bytes(b"\1" * last.stat().st_size)
    with pytest.raises(DamagedLogError) as refusal:
        open_in(tmp_path, saved=SavedState(recovery_point=1))
    assert refusal.value.end_offset == 2


def test_the_last_end_is_found_behind_damage_and_before_a_torn_tail() -> None:
    batches = [batch("a", base_offset=5), batch("b", base_offset=6), batch("c", base_offset=7)]
    sound = b"".join(batches)
    assert last_end(sound, 5) == 8
    assert last_end(sound[:-1], 5) == 7
    assert last_end(b"\1" * 30 + batches[1] + b"\0" * 99, 5) == 7
    flipped = bytearray(sound)
    flipped[-1] ^= 1
    assert last_end(bytes(flipped), 5) == 7
    assert last_end(b"", 5) == last_end(b"\2" * 999, 5) == 5
    assert last_end(sound, 9) == 9


def test_what_a_record_holds_is_no_batch_of_the_log() -> None:
    inner = batch("inner", base_offset=9)
    outer = encode_batch([RecordData(1, None, inner)], base_offset=5)
    assert inner in outer
    assert last_end(outer, 5) == 6


def test_what_only_begins_as_a_batch_does_costs_the_search_nothing() -> None:
    """As long as it says that it goes on behind the end: it is not read."""
    false = (5).to_bytes(8) + (1 << 30).to_bytes(4) + bytes(4) + b"\2" + bytes(60)
    assert last_end(false * 3 + batch("b", base_offset=6), 5) == 7
