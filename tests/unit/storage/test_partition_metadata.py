"""Whose log a directory holds, as its partition.metadata says."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.storage.checkpoints import (
    METADATA_FILE,
    CheckpointDamagedError,
    PartitionMetadata,
    encode_metadata,
    read_metadata,
)
from penstock.wire.ids import TopicId

METADATA = PartitionMetadata(TopicId(b"0123456789abcdef"), "c1")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(encode_metadata(METADATA))
    assert read_metadata(tmp_path) == METADATA


def test_what_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    text = "version: 0\ntopic_id: 30313233-3435-3637-3839-616263646566\ncluster_id: c1\n"
    (tmp_path / METADATA_FILE).write_text(text)
    assert read_metadata(tmp_path) == METADATA


def test_no_bit_that_flips_makes_it_the_log_of_another(tmp_path: Path) -> None:
    path = tmp_path / METADATA_FILE
    sound = encode_metadata(METADATA)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_metadata(tmp_path)
        except CheckpointDamagedError:
            continue
        assert found == METADATA, bit


@pytest.mark.parametrize("size", [0, 10, 60])
def test_a_file_cut_short_is_damaged(tmp_path: Path, size: int) -> None:
    (tmp_path / METADATA_FILE).write_bytes(encode_metadata(METADATA)[:size])
    with pytest.raises(CheckpointDamagedError):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("sound", "changed", "reason"),
    [
        (b"-3435-", b"-34x5-", "has the topic id '30313233-34x5-"),
        (b"topic_id", b"topic_ie", "does not have the lines"),
        (b"cluster_id: c1\n", b"", "does not have the lines"),
        (b"version: 0", b"version: 8", "has the unknown version '8'"),
        (b"version", b"\xffersion", "does not have the lines"),
    ],
)
def test_without_its_checksum_it_is_refused_in_words(
    tmp_path: Path, sound: bytes, changed: bytes, reason: str
) -> None:
    text = encode_metadata(METADATA).rpartition(b"crc32c")[0]
    (tmp_path / METADATA_FILE).write_bytes(text.replace(sound, changed))
    with pytest.raises(CheckpointDamagedError) as told:
        read_metadata(tmp_path)
    message = str(told.value)
    assert str(tmp_path / METADATA_FILE) in message
    assert reason in message
