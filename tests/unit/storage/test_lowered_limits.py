"""Limits of a topic that are lowered say nothing of what its logs already have."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.wire.errors import RecordTooLargeError
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    batch,
    open_in,
    read_all,
    records_of,
    small_config,
)


def test_a_batch_above_limits_that_were_lowered_later_is_read_and_copied(
    tmp_path: Path,
) -> None:
    (tmp_path / "leader").mkdir()
    (tmp_path / "follower").mkdir()
    leader = open_in(tmp_path / "leader", config=small_config(segment_bytes=10_000))
    for value in ("x" * 1500, "y"):
        leader.append_as_leader(batch(value), 1, now_ms=0)
    lowered = small_config(max_message_bytes=100, segment_bytes=200)
    leader.config = lowered
    follower = open_in(tmp_path / "follower", config=lowered)
    while follower.log_end_offset < 2:
        records = leader.read(follower.log_end_offset, 1, below=EVERYTHING)
        follower.append_as_follower(records)
    assert [record.value for record in records_of(read_all(follower))] == [b"x" * 1500, b"y"]
    with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes is 100"):
        leader.append_as_leader(batch("z" * 200), 1, now_ms=0)
