"""All logs of a broker, over all its data directories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from penstock.broker.core.last_run import RunMark, epoch_to_report
from penstock.broker.core.ports import Log
from penstock.broker.storage.counting import FlushCounts, UncountedFlushes
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.log_start import Why
from penstock.broker.storage.managed_directory import ManagedDirectory
from penstock.broker.storage.settings import FlushPolicy, LogSettings, TopicLogConfig
from penstock.wire.errors import DataDirectoryError, PenstockError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

_log = structlog.get_logger()


def _ignore_damage(_log: PartitionLog, _offset: int) -> None:
    return None


def _ignore_failed_log(_key: TopicIdPartition, _error: StorageError) -> None:
    return None


def _ignore_deletion(_why: Why, _size_bytes: int) -> None:
    return None


def _ignore_failure(_path: Path, _error: StorageError) -> None:
    return None


class LogManager:
    """The logs of one broker. Everything is called on the event loop's thread.

    But ``open`` and ``close``, which block, may run in another while nothing else is called.

    ``on_durable(log)``: durable_offset of the log has advanced (with flush.policy commit only; with
    the others it is log_end_offset at all times), or its durable_start_offset has.
    ``on_directory_failed(path, error)``: every log in the directory raises StorageError from now
    on, until the process starts anew. It is called in the thread that finds out, also while
    ``open`` or ``close`` runs. ``failed`` names directories that are known not to be usable, and
    why. ``on_damage(log, offset)``: a read came upon a batch that is not sound, in the segment of
    that offset. ``on_log_failed(key, error)``: somebody removed files of this log, which raises
    StorageError from now on; in the thread that finds out.
    ``on_segment_deleted(why, size_bytes)``: retention or a new log start took one.
    ``flush_counts(path)``: what hears of the flushes of a directory.
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
        on_damage: Callable[[PartitionLog, int], None] = _ignore_damage,
        on_log_failed: Callable[[TopicIdPartition, StorageError], None] = _ignore_failed_log,
        on_segment_deleted: Callable[[Why, int], None] = _ignore_deletion,
        flush_counts: Callable[[Path], FlushCounts] = lambda _: UncountedFlushes(),
        failed: Mapping[Path, str] | None = None,
    ) -> None:
        self._on_directory_failed = on_directory_failed
        self._on_log_failed = on_log_failed
        self._failed_before = dict(failed or {})
        # For good: no log counts for more than what is on the disk.
        self._settings = settings
        self._waits_for_disk = settings.flush_policy is FlushPolicy.COMMIT
        self._directories = [
            ManagedDirectory(
                DataDirectory(path, settings, clock_ms, disk=disk, on_failed=self._failed),
                cluster_id,
                on_durable,
                on_damage,
                self._log_failed,
            )
            for path in directories
        ]
        for directory in self._directories:
            directory.home.segment_deleted = on_segment_deleted
            directory.home.flush_counts = flush_counts(directory.path)
        self._broker_epoch = -1
        self._previous_broker_epoch = -1
        self._is_doubted = False  # For good: what is missing is not found by registering anew.

    def _failed(self, path: Path, error: StorageError) -> None:
        _log.error("data_directory_failed", directory=str(path), reason=error.message)
        # A disk that failed may have lost what it said it had.
        self._take_marks_away()
        self._on_directory_failed(path, error)

    def _log_failed(self, key: TopicIdPartition, error: StorageError) -> None:
        # It had acknowledged what is gone: it did not stay shut all through this run.
        self.doubt_run()
        self._on_log_failed(key, error)

    def doubt_run(self) -> None:
        """A disk was found to have lost what it had confirmed: the next start is to say so.

        Nothing that this run leaves proves any more that all it acknowledged is here, whatever
        stop follows. Every directory is told, since the disk may forget that as well.
        """
        self._is_doubted = True
        self._take_marks_away()

    def _take_marks_away(self) -> None:
        for directory in self._directories:
            directory.doubt_run()

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open every partition in the directories, recovering them after a crash. Blocks.

        A directory that can't be used takes down its partitions only. Raises DataDirectoryError
        when none can, or when one belongs to another cluster.
        """
        for directory in self._directories:
            reason = self._failed_before.get(directory.path)
            if reason is not None:
                directory.home.fail(OSError(reason), "opening it")
                continue
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
        self._refuse_duplicates()
        self._previous_broker_epoch = epoch_to_report(
            [directory.as_found() for directory in self._directories if not directory.was_empty]
        )
        self._broker_epoch = self._previous_broker_epoch  # Which counts until there is another.

    def _refuse_duplicates(self) -> None:
        holders: dict[TopicIdPartition, ManagedDirectory] = {}
        for directory in self._directories:
            for key in (*directory.logs, *directory.unopened):
                other = holders.setdefault(key, directory)
                if other is not directory:
                    directory.refuse_duplicate(key, other.path)
                    other.refuse_duplicate(key, directory.path)

    def previous_broker_epoch(self) -> int:
        """The broker epoch of the last run if all that it acknowledged is here, else -1."""
        return self._previous_broker_epoch

    def record_broker_epoch(self, broker_epoch: int) -> None:
        """The epoch of this run, which a clean stop leaves for the next one. Writes to the disks.

        With flush.policy commit a crash leaves it as well, if every directory could be opened with
        all that is in it: what was found there was flushed then.
        """
        self._broker_epoch = broker_epoch
        whole = not any(
            directory.home.failure or directory.has_unopened for directory in self._directories
        )
        durable = whole and self._waits_for_disk and not self._is_doubted
        run = self._run() if durable else None
        for directory in self._directories:
            directory.mark_durable_run(run)

    def _run(self) -> RunMark:
        opened = [directory for directory in self._directories if directory.directory_id]
        return RunMark(self._broker_epoch, frozenset(one.directory_id for one in opened))

    def close(self) -> None:
        """Flush and close everything, and leave the mark of a clean stop. Blocks.

        No stop is clean while a directory has failed: the next start may be without it, and must
        not be taken for one that lost nothing. Nor is that of a run that is doubted. on_durable is
        not called any more.
        """
        stop = None if self.failed_directories or self._is_doubted else self._run()
        for directory in self._directories:
            directory.close(stop)

    # --- logs ------------------------------------------------------------------------------------

    def _holding(self, key: TopicIdPartition) -> ManagedDirectory | None:
        for directory in self._directories:
            if key in directory.logs or key in directory.unopened:
                return directory
        return None

    @property
    def failed_directories(self) -> list[Path]:
        """The directories that have failed."""
        return [directory.path for directory in self._directories if directory.home.failure]

    @property
    def homes(self) -> list[DataDirectory]:
        """What the logs of each directory share."""
        return [directory.home for directory in self._directories]

    def held_in(self, path: Path) -> list[TopicIdPartition]:
        """The partitions known to be in the data directory ``path``."""
        return [
            key
            for directory in self._directories
            if directory.path == path
            for key in (*directory.logs, *directory.unopened)
        ]

    def logs(self) -> list[PartitionLog]:
        """Every open log of the directories that have not failed."""
        return [
            log
            for directory in self._directories
            if directory.home.failure is None
            for log in directory.logs.values()
            if not log.is_closed
        ]

    def unopened(self) -> dict[TopicIdPartition, PenstockError]:
        """The partitions found on working disks that could not be opened, and why.

        What there was no room for, ``get_or_create`` tries again.
        """
        return {
            key: error
            for directory in self._directories
            if directory.home.failure is None
            for key, (_, error) in directory.unopened.items()
        }

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        """The log of a partition, if it is here and open."""
        for directory in self._directories:
            log = directory.logs.get(key)
            if log is not None and not log.is_closed:
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
        is_new: bool = False,
    ) -> PartitionLog:
        """The log of a partition, made anew where none is; ``configs`` are the topic's from now on.

        The log of an ``internal`` topic may use what others leave free (``min_free_bytes``).

        A new one goes where the fewest are. Raises StorageError when the log is damaged, its
        directory has failed or all have, or while a stray of it is kept, or records that may be its
        and of which that can't be told: those are its records, and an empty log in their place
        could pass for them. So could one made while a directory that
        may have it is away: unless the replica ``is_new``, given to this broker since it started,
        every directory must say that it has it not. DiskFullError.
        """
        key = TopicIdPartition(TopicId(topic_id), partition)
        config = TopicLogConfig.of(configs, self._settings)
        holder = self._holding(key)
        if holder is not None:
            holder.home.check()
        if holder is not None and key in holder.logs:
            log = holder.logs[key]
            if log.is_closed:
                raise StorageError(
                    f"files of {log.directory} were removed while this broker ran; restart it"
                )
            log.config = config
            log.internal = internal
            holder.resume(log)
            return log
        for directory in self._directories:
            directory.refuse_stray(TopicPartition(topic, partition), key)
            directory.refuse_unclear(TopicPartition(topic, partition), key)
        if holder is None and not is_new:
            self._refuse_unlisted(TopicPartition(topic, partition))
        usable = [directory for directory in self._directories if directory.home.failure is None]
        made = next((directory for directory in usable if directory.has_made(key)), None)
        fewest = min(usable, key=lambda directory: len(directory.logs), default=None)
        chosen = holder or made or fewest
        if chosen is None:
            raise StorageError("every data directory of this broker has failed")
        log = chosen.create(TopicPartition(topic, partition), key, config)
        log.internal = internal
        return log

    async def make_ahead(
        self, wanted: Mapping[TopicIdPartition, TopicPartition], *, is_new: bool
    ) -> None:
        """Have ``get_or_create`` find the directories of those that are not here yet made, and on
        the disk, so that it need not wait for that.

        Raises nothing: what can't be made ahead is made then, or refused.
        """
        usable = [directory for directory in self._directories if directory.home.failure is None]
        counts = {directory: len(directory.logs) for directory in usable}
        plans: dict[ManagedDirectory, dict[TopicIdPartition, TopicPartition]] = {}
        for key, partition in wanted.items():
            if not usable or not self._may_make(partition, key, is_new=is_new):
                continue
            chosen = min(usable, key=lambda directory: counts[directory])
            counts[chosen] += 1
            plans.setdefault(chosen, {})[key] = partition
        await asyncio.gather(*(chosen.make_ahead(plan) for chosen, plan in plans.items()))

    def _may_make(self, partition: TopicPartition, key: TopicIdPartition, *, is_new: bool) -> bool:
        if self._holding(key) is not None:
            return False
        try:
            for directory in self._directories:
                directory.refuse_stray(partition, key)
                directory.refuse_unclear(partition, key)
            if not is_new:
                self._refuse_unlisted(partition)
        except StorageError:
            return False
        return not any(directory.has_made(key) for directory in self._directories)

    def _refuse_unlisted(self, partition: TopicPartition) -> None:
        for directory in self._directories:
            if not directory.is_listed and directory.home.failure is not None:
                raise StorageError(
                    f"the log of {partition} may be in {directory.path}, so no empty one is made "
                    f"in its place; {directory.home.failure.message}"
                )

    def update_configs(self, topic_id: bytes, configs: Mapping[str, str]) -> None:
        """The topic's configs have changed; they hold for the next append."""
        config = TopicLogConfig.of(configs, self._settings)
        for log in self.logs():
            if log.key.topic_id == topic_id:
                log.config = config

    def set_min_free_bytes(self, min_free_bytes: int) -> None:
        """What producers must leave free from now on."""
        for directory in self._directories:
            home = directory.home
            home.settings = replace(home.settings, min_free_bytes=min_free_bytes)
            home.room.reserve_changed(min_free_bytes)

    def delete(self, key: TopicIdPartition) -> None:
        """Let go of a partition and its files for good; nothing happens when it is not here.

        The log raises StorageError from now on. The files are removed in the background. In a
        directory that has failed all stays as it is, for the next start to judge: StorageError.
        """
        holder = self._holding(key)
        if holder is not None:
            holder.home.check()
            holder.delete(key)

    def set_aside(self, key: TopicIdPartition) -> None:
        """Let go of a partition, as ``delete`` does, but keep its files, durably, as a stray.

        They lie in ``TOPIC-NUMBER.TOPICID.stray`` from now on, which no start looks into; renamed
        to ``TOPIC-NUMBER`` while the broker is stopped they are the partition again.
        """
        holder = self._holding(key)
        if holder is not None:
            holder.home.check()
            holder.set_aside(key)

    def keep_damaged(self, key: TopicIdPartition) -> Path:
        """Let go of a partition whose log does not open, so that another log can take its place.

        Its files are kept, durably, for people to look at: in ``TOPIC-NUMBER.TOPICID.damaged``,
        which is returned. Raises as ``delete``, and when it is not here.
        """
        holder = self._holding(key)
        if holder is None:
            raise StorageError(f"no data directory holds the log of {key}")
        holder.home.check()
        return holder.keep_damaged(key)

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
