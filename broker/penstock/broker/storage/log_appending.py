"""Writes what was checked to the end of a log, and what goes with it."""

from __future__ import annotations

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage import appends
from penstock.broker.storage.aborted import AbortedTransactions
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.log_files import LogFiles
from penstock.broker.storage.log_flushing import LogFlushing
from penstock.broker.storage.producers import LogProducers, states_at
from penstock.broker.storage.settings import TopicLogConfig
from penstock.wire.errors import CorruptRecordError


class LogAppending:
    """The end of one log. On the log's thread."""

    __slots__ = ("_aborted", "_epochs", "_files", "_flushing", "_home", "_name", "_producers")

    def __init__(
        self,
        home: DataDirectory,
        files: LogFiles,
        epochs: EpochHistory,
        *,
        flushing: LogFlushing,
        producers: LogProducers,
        aborted: AbortedTransactions,
        name: str,
    ) -> None:
        self._home = home
        self._files = files
        self._epochs = epochs
        self._flushing = flushing
        self._producers = producers
        self._aborted = aborted
        self._name = name

    def write(
        self, checked: appends.Checked, end: int, config: TopicLogConfig, reserve_bytes: int
    ) -> int:
        """Put batches behind ``end``, where the log ends; their size.

        Their epochs are assigned, and what they change of producers and transactions is known then.
        Raises DiskFullError or StorageError; all is as before after that.
        """
        batches, doing = checked.batches, f"appending to {self._name}"
        assert batches[0].header.base_offset == end
        size = sum(batch.size_bytes for batch in batches)
        if self._flushing.failed:
            raise self._home.room.error("the last flush found no space", doing)
        self._home.room.check(size, reserve_bytes, doing)
        rolls: list[int] = []
        try:
            limits = appends.limits_of(config, self._home.settings, reserve_bytes)
            self._files.append(batches, limits, config.index_interval_bytes, rolls.append)
        except OSError as error:
            self._undo(end, config)
            if end in rolls:  # The segment before stays closed: nothing was in the new one.
                self._flushing.write_later(self._producers.snapshot(end))
            raise self._home.translate(error, doing) from error
        self._home.room.used(size, reserve_bytes)
        if batches[-1].header.leader_epoch != self._epochs.last_epoch:
            for batch in batches:
                self.assign(batch.header.leader_epoch, batch.header.base_offset)
        # Not before all of it is there: an append that is taken back may take back what it rolled.
        for offset, state in states_at(rolls, self._producers.state, batches, checked.seen_ms):
            self._flushing.write_later(self._producers.snapshot(offset, state))
        ended = self._producers.commit(end, batches[-1].header.next_offset, checked.producers)
        if checked.aborts:
            self._aborted.note([one for one in ended if one.last_offset in checked.aborts])
        return size

    def _undo(self, end: int, config: TopicLogConfig) -> None:
        """Of an append over two segments the first part may be there: take it back."""
        try:
            self._files.take_back(end, config.index_interval_bytes)
        except (OSError, CorruptRecordError) as error:
            raise self._home.fail(error, f"taking back an append to {self._name}") from error

    def assign(self, leader_epoch: int, offset: int) -> None:
        """The leader epoch begins at the offset, unless that is known."""
        if self._epochs.assign(leader_epoch, offset):
            self._flushing.epochs_changed()
