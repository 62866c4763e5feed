from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from penstock.chaos.backends import files
from penstock.chaos.errors import FaultError


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    directory = tmp_path / "node-1"
    for topic in ("orders-0", "orders-1", "payments-0"):
        partition = directory / "logs" / topic
        partition.mkdir(parents=True)
        (partition / "00000000000000000000.log").write_bytes(topic.encode() * 10)
        (partition / "00000000000000000000.index").write_bytes(b"index")
    (directory / "meta").write_bytes(b"meta")
    return directory


def test_segments_are_those_of_the_topic_with_records(node: Path) -> None:
    found = files.segments(node, "orders")
    assert [path.parent.name for path in found] == ["orders-0", "orders-1"]
    assert len(files.segments(node)) == 3
    assert {path.suffix for path in files.segments(node)} == {".log"}


def test_bits_are_flipped_where_it_says(node: Path) -> None:
    path = files.segments(node)[0]
    before = path.read_bytes()
    [at] = files.flip_bits(path, Random(1), first_byte=61)
    after = path.read_bytes()
    assert at >= 61
    assert [i for i in range(len(before)) if before[i] != after[i]] == [at]
    assert (before[at] ^ after[at]).bit_count() == 1
    path.write_bytes(before)
    assert files.flip_bits(path, Random(1), first_byte=61) == [at], "of the seed alone"
    with pytest.raises(FaultError, match="has no byte 80"):
        files.flip_bits(path, Random(1), first_byte=80)


def test_a_file_is_cut(node: Path) -> None:
    path = files.segments(node)[0]
    assert files.truncate(path, 30) == 50
    assert files.truncate(path, 30) == 0
    assert path.stat().st_size == 30


def test_a_snapshot_comes_back_as_it_was(node: Path, tmp_path: Path) -> None:
    before = contents(node)
    kept = tmp_path / "kept"
    files.snapshot(node, kept)
    files.wipe(node)
    (node / "new").write_bytes(b"new")
    for _ in range(2):
        files.restore(node, kept)
        assert contents(node) == before
    files.wipe(node)
    files.snapshot(node, kept)
    assert contents(kept) == {}, "a later snapshot replaces an earlier one"
    with pytest.raises(FaultError, match="there is no snapshot"):
        files.restore(node, tmp_path / "none")


def test_directories_are_swapped(node: Path, tmp_path: Path) -> None:
    other = tmp_path / "node-2"
    other.mkdir()
    (other / "meta").write_bytes(b"of the other")
    before = contents(node)
    files.swap(node, other)
    assert contents(node) == {"meta": b"of the other"}
    assert contents(other) == before
    files.swap(node, other)
    assert contents(node) == before


def test_a_directory_is_wiped_but_for_what_is_kept(node: Path, tmp_path: Path) -> None:
    files.wipe(node, keep=["meta"])
    assert contents(node) == {"meta": b"meta"}
    files.wipe(tmp_path / "none")
