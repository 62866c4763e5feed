"""Which leader epochs a recovery believes in: the checkpoint's, then those in the batches' headers.

A flush writes the checkpoint before the recovery point rises, so below that point it has all of
them, and it has a checksum. The epoch in a batch's header has none, as a leader sets it after the
producer made the checksum. Below the point it is compared, and only from there on believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.checkpoints import CheckpointDamagedError, read_epochs
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import BatchHeader

_log = structlog.get_logger()


class FoundEpochs:
    """The leader epochs of a log, from its checkpoint and the segments that a recovery reads."""

    __slots__ = ("_name", "_sure_below", "damaged", "history")

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        trusted: Iterable[Segment],
        read_from: int,
        recovery_point: int,
    ) -> None:
        """``trusted`` are asked where the checkpoint is damaged; after them comes ``read_from``.

        Raises CorruptRecordError when they do not make sense either, or StorageError.
        """
        self.damaged: tuple[int, ...] = ()  # The first batch of an epoch that did not write there.
        self._name = name
        self._sure_below = recovery_point  # The history has every epoch of the offsets below.
        checkpoint = _checkpoint(directory)
        if checkpoint is None:
            self._sure_below = 0
            checkpoint = _epochs_in(trusted)
        self.history = checkpoint
        # From the point on the checkpoint may still have what a cut has undone.
        self.history.truncate_from_end(max(self._sure_below, read_from))

    def take(self, segment: Segment, header: BatchHeader) -> None:
        """The next batch's header. Raises CorruptRecordError when its epoch can't be.

        Below the recovery point nothing is raised: there it is damage, as any that the scrubber
        finds. The batch stays, is refused when it is read, and is mended from another replica. One
        is enough for that, of the one segment that is read there.
        """
        if header.base_offset >= self._sure_below:
            _assign(self.history, header)
            return
        epoch = self.history.epoch_at(header.last_offset)
        # -1: it lies below the log's start, where epochs are not known any more.
        if epoch in (-1, header.leader_epoch) or self.damaged:
            return
        self.damaged = (header.base_offset,)
        _log.error(
            "log_has_a_damaged_batch",
            partition=self._name,
            segment=str(segment.path),
            offset=header.base_offset,
            reason=f"its header says leader epoch {header.leader_epoch}, but {epoch} wrote it",
            next_step="it is not served, and mended once another replica is in sync; look at the "
            "disk",
        )


def _checkpoint(directory: Path) -> EpochHistory | None:
    """None where it is damaged, or empty: where there are records there is an epoch."""
    with contextlib.suppress(CheckpointDamagedError, ValueError):
        entries = read_epochs(directory)
        if entries:
            return EpochHistory(entries)
    return None


def _epochs_in(segments: Iterable[Segment]) -> EpochHistory:
    history = EpochHistory()
    for segment in segments:
        for placed in segment.walk(0, segment.base_offset):
            _assign(history, placed.header)
        segment.close_file()
    return history


def _assign(history: EpochHistory, header: BatchHeader) -> None:
    try:
        history.assign(header.leader_epoch, header.base_offset)
    except ValueError as error:
        raise CorruptRecordError(str(error)) from None
