"""`penstock log dump`: what is in a segment, and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.wire.records import Record, encode_batch

NAME = "00000000000000000007.log"


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Two batches: offsets 7 and 8, then 9."""
    records = [Record(0, 1000 + i, b"k", b"v%d" % i, ()) for i in range(3)]
    path = tmp_path / NAME
    path.write_bytes(
        encode_batch(records[:2], base_offset=7, leader_epoch=3)
        + encode_batch(records[2:], base_offset=9, leader_epoch=4)
    )
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["log", "dump", *arguments])


def test_batches_are_listed(segment: Path) -> None:
    result = run(str(segment), "--output", "json")
    assert result.exit_code == 0, result.output
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert (first["base_offset"], first["last_offset"], first["leader_epoch"]) == (7, 8, 3)
    assert (second["base_offset"], second["record_count"], second["leader_epoch"]) == (9, 1, 4)
    assert second["position"] == first["size_bytes"]


def test_a_sound_segment_is_called_so(segment: Path) -> None:
    result = run(str(segment), "--verify")
    assert result.exit_code == 0, result.output
    assert "sound: 2 batches, 3 records, offsets 7 to 9" in result.stdout
    *_, verdict = run(str(segment), "--verify", "--output", "json").stdout.splitlines()
    assert json.loads(verdict)["ok"] is True


def test_a_flipped_bit_is_found_and_placed(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    first_size = int.from_bytes(data[8:12], "big") + 12
    data[-1] ^= 1
    segment.write_bytes(data)
    result = run(str(segment), "--verify")
    assert result.exit_code == 1
    assert f"DAMAGED after {first_size} bytes" in result.stdout
    assert f"error: {segment} is damaged at byte {first_size}: " in result.stderr


def test_a_torn_tail_is_found_without_verify(segment: Path) -> None:
    segment.write_bytes(segment.read_bytes()[:-5])
    result = run(str(segment))
    assert result.exit_code == 1
    assert "is damaged at byte" in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = run(str(tmp_path / NAME))
    assert result.exit_code == 1
    assert f"error: cannot read {tmp_path / NAME}: No such file or directory" in result.stderr
    assert "next: name a segment file, such as " in result.stderr


@pytest.mark.parametrize("name", ["node.toml", "00000000000000000000.index"])
def test_a_file_that_is_no_segment_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"data.dir = 'here'" * 10)
    result = run(str(tmp_path / name), "--verify")
    assert result.exit_code == 1
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first == f"error: {tmp_path / name} is not a segment file"
    assert second.startswith("next: name a segment file, such as ")


def test_a_segment_under_another_name_is_read(segment: Path) -> None:
    copy = segment.rename(segment.with_name("copy"))
    assert run(str(copy), "--verify").exit_code == 0


def test_a_damaged_segment_is_one_by_its_name(segment: Path) -> None:
    segment.write_bytes(b"junk" * 100)
    result = run(str(segment))
    assert "is damaged at byte 0" in result.stderr


def test_a_directory_names_the_segments_in_it(segment: Path) -> None:
    result = run(str(segment.parent))
    assert result.exit_code == 1
    assert f"error: cannot read {segment.parent}: Is a directory" in result.stderr
    assert f"next: name a segment file in it, such as {segment}" in result.stderr


def test_an_empty_segment_is_sound(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    result = run(str(tmp_path / NAME), "--verify")
    assert result.exit_code == 0
    assert "sound: 0 batches, 0 records, 0 bytes" in result.stdout
