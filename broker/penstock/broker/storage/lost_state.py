"""What is said, and done, where somebody took away what a data directory had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from penstock.broker.storage.local_state import DIRECTORY_NAME
from penstock.broker.storage.log import PartitionLog
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicIdPartition

_WITHOUT_IT: Final = (
    "each log is read from its beginning and kept up to the first batch that is not sound, and "
    "this broker counts as one that may have lost records: its replicas lead and are in sync once "
    "they have what the others have"
)
_log = structlog.get_logger()


def tell_of_missing_state(directory: Path, partitions: int) -> None:
    """Partitions were found, and nothing that local state knew of them."""
    _log.error(
        "local_state_missing",
        path=str(directory / DIRECTORY_NAME),
        partitions=partitions,
        reason=f"high watermarks, log starts and recovery points are not known: {_WITHOUT_IT}",
        next_step="nothing, if you moved it away because it was damaged; else find out who did",
    )


def without_damaged_state(directory: Path) -> str:
    """The next step where local state can't be read."""
    path = directory / DIRECTORY_NAME
    return (
        f"move {path} away, keep it until all is well, and restart this broker: {_WITHOUT_IT}. "
        "Where no other replica is in sync, copy the logs first: see 'Damaged local state' in "
        "docs/operating/data-directory.md"
    )


def give_up(
    logs: Mapping[TopicIdPartition, PartitionLog],
    tell: Callable[[TopicIdPartition, StorageError], None],
    directory: Path,
    error: StorageError,
) -> None:
    """Give up the log in ``directory``, of which files were removed. In any thread."""
    for key, log in list(logs.items()):
        if log.directory == directory and not log.is_closed:
            log.give_up(error.message)
            _log.error("partition_files_removed", path=str(directory), reason=error.message)
            tell(key, error)
