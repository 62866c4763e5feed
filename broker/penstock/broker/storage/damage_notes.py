"""What is known to be damaged of a log, kept beside its segments until it is mended.

A damaged replica is out of the in-sync set because its broker says so, and a broker that starts
says nothing of what it does not know. Without the note it could be in sync, and lead, from its
start until a read or the scrubber comes upon the damage again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from crc32c import crc32c

from penstock.broker.storage.checkpoints import CheckpointDamagedError, write_atomically
from penstock.broker.storage.disk import remove_if_there
from penstock.broker.storage.log import PartitionLog
from penstock.wire.ids import TopicId

NOTE_FILE: Final = "damage-checkpoint"
_VERSION: Final = "0"


def encode_note(topic_id: TopicId, base_offsets: Collection[int]) -> bytes:
    """Text, as the leader epochs': version, topic id, count, a segment a line; and a checksum."""
    lines = [_VERSION, topic_id.hex(), str(len(base_offsets)), *map(str, sorted(base_offsets))]
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + f"crc32c {crc32c(body):08x}\n".encode()


def read_note(directory: Path, topic_id: TopicId) -> tuple[int, ...]:
    """The base offsets of the segments noted as damaged; none where there is no note.

    Nor where it is another topic's, whose directory had the name before. Raises
    CheckpointDamagedError.
    """
    path = directory / NOTE_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None
    body, marker, checksum = data.rpartition(b"crc32c ")
    try:
        if not marker or int(checksum, 16) != crc32c(body):
            raise CheckpointDamagedError(f"{path} fails its checksum")
        version, owner, count, *lines = body.decode().splitlines()
        if version != _VERSION or int(count) != len(lines):
            raise CheckpointDamagedError(f"{path} has version {version} and {len(lines)} lines")
        return tuple(map(int, lines)) if owner == topic_id.hex() else ()
    except ValueError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None


def noted_damage(log: PartitionLog) -> tuple[int, ...]:
    """An offset in each segment of a log just opened that was damaged before, and not mended.

    Where the note itself can't be read that is every segment: each is looked at.
    """
    try:
        return read_note(log.directory, log.key.topic_id)
    except CheckpointDamagedError:
        return tuple(segment.base_offset for segment in log.files.segments)


def noting(log: PartitionLog, base_offsets: Collection[int]) -> Callable[[], None]:
    """What notes durably that these segments are damaged, and no others, in any thread.

    It raises OSError. One at a time for each log.
    """
    directory, disk = log.directory, log.home.disk
    path = directory / NOTE_FILE
    note = encode_note(log.key.topic_id, base_offsets) if base_offsets else None

    def keep() -> None:
        if note is None:
            # A power cut may bring the name back: then all of it is looked at again, and sound.
            remove_if_there(disk, path)
            return
        write_atomically(disk, path, note)
        disk.sync_directory(directory)

    return keep
