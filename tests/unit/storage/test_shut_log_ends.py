"""What a log that does not open says that it had: all that was on the disk, not what was noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.tearing import last_end
from tests.unit.storage.storage_kit import batch
from tests.unit.storage.test_durable_runs import KEY, Open, crash, open_logs, write

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
