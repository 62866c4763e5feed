"""Small files that are written whole: epoch checkpoints, producer snapshots, partition metadata.

Each carries a CRC-32C or is written before anything depends on it, and takes its name only once it
is on the disk; so a reader finds the old one or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.broker.core.epoch_history import EpochEntry, EpochHistory
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.storage.disk import Disk
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicId

EPOCHS_FILE: Final = "leader-epoch-checkpoint"
METADATA_FILE: Final = "partition.metadata"
TEMPORARY_SUFFIX: Final = ".tmp"
_METADATA_FIELDS: Final = frozenset({"version", "topic_id", "cluster_id"})
_SNAPSHOT_NAME: Final = re.compile(r"(\d{20})\.snapshot")


class CheckpointDamagedError(Exception):
    """The file is not there or not what was written."""


def write_atomically(disk: Disk, path: Path, data: bytes) -> None:
    """Put ``data`` where ``path`` is, durably but for the name: sync the directory after.

    Raises OSError; the old file is then still there. Safe from any thread, for different paths.
    Nothing of an attempt that failed is used by the next one, so it may be tried again.
    """
    write_ahead(disk, path, data)()


def write_ahead(disk: Disk, path: Path, data: bytes, *, mark: str = "") -> Callable[[], None]:
    """The same in two steps: what is returned gives the file its name, and takes no room.

    With a ``mark`` of its own beside another writer of the same path, in any thread.
    """
    temporary = path.with_name(path.name + mark + TEMPORARY_SUFFIX)

    def undo() -> None:
        with contextlib.suppress(OSError):  # What is left of it would take room, and is no more.
            disk.remove(temporary)

    def name() -> None:
        try:
            disk.rename(temporary, path)
        except OSError:
            undo()
            raise

    try:
        write_durably(disk, temporary, data)
    except OSError:
        undo()
        raise
    return name


def write_durably(disk: Disk, path: Path, data: bytes) -> None:
    """Write a file's content and sync it, but not its name. Raises OSError."""
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        position = 0
        while position < len(data):
            position += disk.write_at(fd, [memoryview(data)[position:]], position)
        disk.sync_data(fd)
    finally:
        os.close(fd)


# --- leader epochs -------------------------------------------------------------------------------


def encode_epochs(entries: Iterable[EpochEntry]) -> bytes:
    """Text, as Kafka's: version, count, then epoch and start offset a line; and a checksum."""
    lines = [f"{entry.leader_epoch} {entry.start_offset}\n" for entry in entries]
    body = f"0\n{len(lines)}\n{''.join(lines)}".encode()
    return body + f"crc32c {crc32c(body):08x}\n".encode()


def read_epochs(directory: Path) -> list[EpochEntry]:
    """The entries of a log's checkpoint. Raises CheckpointDamagedError."""
    path = directory / EPOCHS_FILE
    try:
        data = path.read_bytes()
        body, marker, checksum = data.rpartition(b"crc32c ")
        if not marker or int(checksum, 16) != crc32c(body):
            raise CheckpointDamagedError(f"{path} fails its checksum")
        version, count, *lines = body.decode().splitlines()
        if version != "0" or int(count) != len(lines):
            raise CheckpointDamagedError(f"{path} has version {version} and {len(lines)} lines")
        return [EpochEntry(*map(int, line.split())) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None


# --- producer snapshots --------------------------------------------------------------------------


def snapshot_path(directory: Path, end_offset: int) -> Path:
    """Where the producer state at a log end of ``end_offset`` is kept."""
    return directory / f"{end_offset:020d}.snapshot"


def snapshots(directory: Path) -> list[tuple[int, Path]]:
    """The producer snapshots of a log with their offsets, newest first."""
    found = []
    for path in directory.iterdir():
        match = _SNAPSHOT_NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def remove_snapshots(disk: Disk, directory: Path, *, above: int) -> None:
    """Remove those of offsets above one. Raises OSError."""
    for offset, path in snapshots(directory):
        if offset > above:
            disk.remove(path)


def newest_snapshot(
    directory: Path, at_most: int, epochs: EpochHistory
) -> tuple[ProducerState, int] | None:
    """The newest sound snapshot of this log that was taken at or before offset ``at_most``.

    One that was taken of what was cut off since is passed over.
    """
    for offset, path in snapshots(directory):
        if offset > at_most:
            continue
        try:
            state, end_offset, leader_epoch = ProducerState.decode(path.read_bytes())
        except (OSError, CorruptRecordError):
            continue  # An older one and more of the log say the same.
        # -1 below the log's start, where nothing is cut: either now, or when it was taken.
        known = epochs.epoch_at(offset - 1)
        if end_offset == offset and (known == leader_epoch or -1 in (known, leader_epoch)):
            return state, end_offset
    return None


# --- partition metadata --------------------------------------------------------------------------


class PartitionMetadata(NamedTuple):
    """Whose log a directory holds."""

    topic_id: TopicId
    cluster_id: str


def encode_metadata(metadata: PartitionMetadata) -> bytes:
    """Text, as Kafka's, with the cluster's id as well."""
    topic_id = uuid.UUID(bytes=metadata.topic_id)
    text = f"version: 0\ntopic_id: {topic_id}\ncluster_id: {metadata.cluster_id}\n".encode()
    return text + f"crc32c: {crc32c(text):08x}\n".encode()


def read_metadata(directory: Path) -> PartitionMetadata:
    """Whose log it is; an earlier version wrote no checksum. Raises CheckpointDamagedError."""
    path = directory / METADATA_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointDamagedError(f"{path} can't be read: {error.strerror}") from None
    text, marker, checksum = data.rpartition(b"crc32c: ")
    if marker and checksum.strip() != b"%08x" % crc32c(text):
        raise CheckpointDamagedError(f"{path} fails its checksum")
    lines = (text if marker else data).decode(errors="replace").splitlines()
    fields = {key: value.strip() for key, _, value in (line.partition(": ") for line in lines)}
    if set(fields) != _METADATA_FIELDS:
        names = ", ".join(sorted(_METADATA_FIELDS))
        raise CheckpointDamagedError(f"{path} does not have the lines {names} and no others")
    if fields["version"] != "0":
        raise CheckpointDamagedError(f"{path} has the unknown version {fields['version']!r}")
    try:
        topic_id = TopicId(uuid.UUID(fields["topic_id"]).bytes)
    except ValueError:
        raise CheckpointDamagedError(
            f"{path} has the topic id {fields['topic_id']!r}, which is none"
        ) from None
    return PartitionMetadata(topic_id, fields["cluster_id"])


def put_metadata_right(directory: Path) -> str:
    """What a person can do about a damaged file of that name."""
    return (
        f"copy {METADATA_FILE} into {directory} from any other partition of the same topic, on any "
        "broker: it is the same in all of them"
    )
