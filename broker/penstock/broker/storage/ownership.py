"""Whether a partition's directory still says whose log it holds, while the broker knows that."""

from __future__ import annotations

from penstock.broker.storage.checkpoints import (
    METADATA_FILE,
    CheckpointDamagedError,
    PartitionMetadata,
    encode_metadata,
    read_metadata,
    write_atomically,
)
from penstock.broker.storage.log import PartitionLog


def why_wrong(log: PartitionLog, cluster_id: str) -> str | None:
    """What is wrong with the file ``partition.metadata`` of a log; None when it is sound.

    Nothing is where the directory itself is not there. For any thread; the log may be closed
    meanwhile, and the directory be another's.
    """
    try:
        found = read_metadata(log.directory)
    except CheckpointDamagedError as error:
        return str(error) if log.directory.is_dir() else None
    if found == PartitionMetadata(log.key.topic_id, cluster_id):
        return None
    return f"{log.directory / METADATA_FILE} names another topic or cluster"


def write_anew(log: PartitionLog, cluster_id: str) -> None:
    """Write the file, durably. On the event loop, while the log is open. Raises what the disk's
    failure is to the data directory.
    """
    disk, directory = log.home.disk, log.directory
    metadata = encode_metadata(PartitionMetadata(log.key.topic_id, cluster_id))
    try:
        write_atomically(disk, directory / METADATA_FILE, metadata)
        disk.sync_directory(directory)
    except OSError as error:
        raise log.home.translate(error, f"writing {directory / METADATA_FILE}") from error
