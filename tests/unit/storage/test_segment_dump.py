from __future__ import annotations

import json
from pathlib import Path

from penstock.broker.core.transactions import Marker
from penstock.broker.storage.dump import dump_segment, verify_segment
from penstock.wire.ids import LeaderEpoch
from tests.unit.storage.storage_kit import PARTITION, batch, open_in, transactional


def written(root: Path) -> Path:
    log = open_in(root)
    log.append_as_leader(batch("a", "b", timestamp_ms=50), 3, now_ms=1)
    log.append_as_leader(batch("c", producer=(7, 1, 0)), 4, now_ms=1)
    log.close(save=True)
    return root_of(root)


def root_of(root: Path) -> Path:
    return root / str(PARTITION) / "00000000000000000000.log"


def test_every_batch_is_described(tmp_path: Path) -> None:
    first, second = dump_segment(written(tmp_path), verify=True)
    assert (first.position, first.base_offset, first.last_offset, first.record_count) == (
        0,
        0,
        1,
        2,
    )
    assert (first.leader_epoch, first.compression, first.timestamp_type) == (
        3,
        "none",
        "CreateTime",
    )
    assert (first.base_timestamp_ms, first.max_timestamp_ms) == (50, 51)
    assert second.position == first.size_bytes
    assert (second.producer_id, second.producer_epoch, second.base_sequence) == (7, 1, 0)
    assert first.error is None
    assert json.loads(json.dumps(second.to_json()))["base_offset"] == 2


def test_a_sound_segment_is_ok(tmp_path: Path) -> None:
    path = written(tmp_path)
    report = verify_segment(path)
    assert report.ok
    assert (report.batches, report.records) == (2, 3)
    assert (report.first_offset, report.next_offset) == (0, 3)
    assert report.sound_bytes == report.size_bytes == path.stat().st_size
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_flipped_bit_is_named_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    second = len(batch("a", "b"))
    data[second + 65] ^= 1
    path.write_bytes(data)
    report = verify_segment(path)
    assert not report.ok
    assert report.sound_bytes == second
    assert len(report.errors) == 1
    assert f"byte {second}: " in report.errors[0]
    assert "CRC-32C" in report.errors[0]
    assert [one.error for one in dump_segment(path)] == [None, None], "not without verify"


def test_a_torn_tail_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for torn, says in ((data[:-1], "the file ends"), (data + b"xy", "61 bytes")):
        path.write_bytes(torn)
        report = verify_segment(path)
        assert says in report.errors[0]
        assert report.next_offset == (2 if len(torn) < len(data) else 3)


def test_a_segment_that_does_not_begin_as_its_name_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000009.log"
    path.write_bytes(batch("a", base_offset=4))
    assert "offset 4, but 9 comes next" in verify_segment(path).errors[0]


def test_an_empty_segment_is_ok(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000.log"
    path.touch()
    report = verify_segment(path)
    assert report.ok
    assert (report.batches, report.first_offset, report.next_offset) == (0, -1, -1)


def test_marks_say_what_they_end_and_who_wrote_them(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(
        transactional("a", producer=(7, 0, 0)), LeaderEpoch(3), now_ms=1, verified=(7, 0)
    )
    markers = [Marker(7, 1, False, 12), Marker(8, 1, True, 13)]
    log.append_markers(markers, LeaderEpoch(3), now_ms=1)
    log.close(save=True)
    path = root_of(tmp_path)
    for verify in (False, True):
        data, abort, commit = dump_segment(path, verify=verify)
        assert (data.is_transactional, data.marker, data.coordinator_epoch) == (True, None, None)
        assert (abort.producer_id, abort.marker, abort.coordinator_epoch) == (7, "abort", 12)
        assert (commit.producer_id, commit.marker, commit.coordinator_epoch) == (8, "commit", 13)
        assert json.loads(json.dumps(abort.to_json()))["marker"] == "abort"


def test_a_mark_that_is_damaged_is_told_also_without_verify(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_markers([Marker(7, 1, False, 12)], LeaderEpoch(3), now_ms=1)
    log.close(save=True)
    path = root_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    [mark] = dump_segment(path)
    assert mark.marker is None
    assert mark.error is not None
