"""All logs of a broker, over all its data directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from penstock.broker.core.ports import Log
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.local_state import CleanStop
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.managed_directory import ManagedDirectory
from penstock.broker.storage.settings import LogSettings, TopicLogConfig
from penstock.wire.errors import DataDirectoryError, PenstockError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

_log = structlog.get_logger()


def _ignore_failure(_path: Path, _error: StorageError) -> None:
    return None


class LogManager:
    """The logs of one broker. Everything is called on the event loop's thread.

    But ``open`` and ``close``, which block, may run in another while nothing else is called.

    ``on_durable(log)``: durable_offset of the log has advanced (with flush.policy commit only; with
    the others it is log_end_offset at all times). ``on_directory_failed(path, error)``: every log
    in the directory raises StorageError from now on, until the process starts anew.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        settings: LogSettings,
        on_durable: Callable[[PartitionLog], None],
        clock_ms: Callable[[], int],
        *,
        cluster_id: str = "",
        on_directory_failed: Callable[[Path, StorageError], None] = _ignore_failure,
        disk: Disk | None = None,
    ) -> None:
        self._on_directory_failed = on_directory_failed
        self._directories = [
            ManagedDirectory(
                DataDirectory(path, settings, clock_ms, disk=disk, on_failed=self._failed),
                cluster_id,
                on_durable,
            )
            for path in directories
        ]
        self._broker_epoch = -1
        self._previous_broker_epoch = -1

    def _failed(self, path: Path, error: StorageError) -> None:
        _log.error("data_directory_failed", directory=str(path), reason=error.message)
        self._on_directory_failed(path, error)

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open every partition in the directories, recovering them after a crash. Blocks.

        A directory that can't be used takes down its partitions only. Raises DataDirectoryError
        when none can, or when one belongs to another cluster.
        """
        for directory in self._directories:
            try:
                directory.open()
            except StorageError:
                continue  # Reported by then.
        if all(directory.home.failure for directory in self._directories):
            reasons = "; ".join(
                directory.home.failure.message
                for directory in self._directories
                if directory.home.failure
            )
            raise DataDirectoryError(f"no data directory can be used: {reasons}")
        self._previous_broker_epoch = self._clean_epoch()

    def _clean_epoch(self) -> int:
        """The broker epoch that every directory was cleanly left in, else -1.

        All that were there then must be here now, with everything that was in them: a partition
        that is gone would be made anew, empty, and must not pass for one that lost nothing.
        """
        used = [directory for directory in self._directories if not directory.was_empty]
        stops = {directory.clean_stop for directory in used}
        stop = stops.pop() if len(stops) == 1 else None
        if stop is None or stop.directories != {directory.directory_id for directory in used}:
            return -1
        if any(directory.home.failure or directory.unopened for directory in used):
            return -1
        return stop.broker_epoch

    def previous_broker_epoch(self) -> int:
        """The broker epoch of the last run if that ended cleanly and nothing was lost, else -1."""
        return self._previous_broker_epoch

    def record_broker_epoch(self, broker_epoch: int) -> None:
        """The epoch of this run, which a clean stop leaves for the next one."""
        self._broker_epoch = broker_epoch

    def close(self) -> None:
        """Flush and close everything, and leave the marker of a clean stop. Blocks.

        on_durable is not called any more.
        """
        opened = [directory for directory in self._directories if directory.directory_id]
        ids = frozenset(directory.directory_id for directory in opened)
        for directory in self._directories:
            directory.close(CleanStop(self._broker_epoch, ids))

    # --- logs ------------------------------------------------------------------------------------

    def _holding(self, key: TopicIdPartition) -> ManagedDirectory | None:
        for directory in self._directories:
            if key in directory.logs or key in directory.unopened:
                return directory
        return None

    def logs(self) -> list[PartitionLog]:
        """Every open log."""
        return [log for directory in self._directories for log in directory.logs.values()]

    def unopened(self) -> dict[TopicIdPartition, PenstockError]:
        """The partitions found on disk that could not be opened, and why.

        What there was no room for, ``get_or_create`` tries again.
        """
        return {
            key: error
            for directory in self._directories
            for key, (_, error) in directory.unopened.items()
        }

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        """The log of a partition, if it is here and open."""
        for directory in self._directories:
            log = directory.logs.get(key)
            if log is not None:
                return log
        return None

    def get_or_create(
        self,
        topic: str,
        partition: int,
        topic_id: bytes,
        configs: Mapping[str, str],
        *,
        internal: bool = False,
    ) -> PartitionLog:
        """The log of a partition, made anew where none is; ``configs`` are the topic's from now on.

        The log of an ``internal`` topic may use what others leave free (``min_free_bytes``).

        A new one goes where the fewest are. Raises StorageError when the log is damaged, its
        directory has failed or all have, or while a stray of it is kept: that one has its records,
        and an empty one in its place could pass for it. DiskFullError.
        """
        key = TopicIdPartition(TopicId(topic_id), partition)
        config = TopicLogConfig.of(configs)
        holder = self._holding(key)
        if holder is not None and key in holder.logs:
            log = holder.logs[key]
            log.config = config
            log.internal = internal
            return log
        for directory in self._directories:
            directory.refuse_stray(TopicPartition(topic, partition), key)
        usable = [directory for directory in self._directories if directory.home.failure is None]
        chosen = holder or min(usable, key=lambda directory: len(directory.logs), default=None)
        if chosen is None:
            raise StorageError("every data directory of this broker has failed")
        log = chosen.create(TopicPartition(topic, partition), key, config)
        log.internal = internal
        return log

    def update_configs(self, topic_id: bytes, configs: Mapping[str, str]) -> None:
        """The topic's configs have changed; they hold for the next append."""
        config = TopicLogConfig.of(configs)
        for log in self.logs():
            if log.key.topic_id == topic_id:
                log.config = config

    def set_min_free_bytes(self, min_free_bytes: int) -> None:
        """What producers must leave free from now on."""
        for directory in self._directories:
            home = directory.home
            home.settings = replace(home.settings, min_free_bytes=min_free_bytes)

    def delete(self, key: TopicIdPartition) -> None:
        """Let go of a partition and its files for good; nothing happens when it is not here.

        The log raises StorageError from now on. The files are removed in the background.
        """
        holder = self._holding(key)
        if holder is not None:
            holder.delete(key)

    def set_aside(self, key: TopicIdPartition) -> None:
        """Let go of a partition, as ``delete`` does, but keep its files, durably, as a stray.

        They lie in ``TOPIC-NUMBER.TOPICID.stray`` from now on, which no start looks into; renamed
        to ``TOPIC-NUMBER`` while the broker is stopped they are the partition again.
        """
        holder = self._holding(key)
        if holder is not None:
            holder.set_aside(key)

    # --- flushing and saving ---------------------------------------------------------------------

    def flush_soon(self, log: Log) -> None:
        """Flush what the log, one of ours, holds now as flush.policy says; on_durable tells when.

        Logs ask by themselves whenever they changed: it is never wrong to ask, nor to leave it.
        """
        assert isinstance(log, PartitionLog)
        log.home.request_flush(log)

    def checkpoint_high_watermark(self, key: TopicIdPartition, high_watermark: int) -> None:
        """Have the high watermark saved within a few seconds, and at a clean stop."""
        holder = self._holding(key)
        if holder is not None:
            holder.checkpoint_high_watermark(key, high_watermark)

    def high_watermark(self, key: TopicIdPartition) -> int:
        """The high watermark last saved, inside of what the log holds; 0 for an unknown log."""
        holder = self._holding(key)
        return holder.high_watermark(key) if holder is not None and key in holder.logs else 0
