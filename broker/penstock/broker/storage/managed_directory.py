"""One data directory under a LogManager: its logs, its local state, its flusher."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import lmdb
import structlog

from penstock.broker.core.last_run import FoundDirectory, RunMark
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.background import BackgroundJobs
from penstock.broker.storage.checkpoints import (
    METADATA_FILE,
    CheckpointDamagedError,
    PartitionMetadata,
    encode_metadata,
    put_metadata_right,
    read_metadata,
    write_atomically,
)
from penstock.broker.storage.damage_notes import noted_damage
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import is_disk_full, make_directories
from penstock.broker.storage.flusher import Flusher
from penstock.broker.storage.leftovers import (
    Content,
    Unclear,
    content_of,
    copy_anew,
    free_name,
    remove,
)
from penstock.broker.storage.local_state import LocalState, LocalStateDamagedError, PartitionState
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.lost_state import (
    give_up,
    tell_of_missing_state,
    without_damaged_state,
)
from penstock.broker.storage.making import NewDirectories
from penstock.broker.storage.recovery import SavedState, open_log
from penstock.broker.storage.saving import Saves, in_next_turn
from penstock.broker.storage.settings import TopicLogConfig
from penstock.wire.errors import DataDirectoryError, DiskFullError, PenstockError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

# ``topic-N``, or ``topic-N.TOPICID`` where another topic's log had that name already.
_PARTITION: Final = re.compile(r"(.+)-(\d+)(?:\.([0-9a-f]{32}))?")
_DELETED_SUFFIX: Final = "-delete"  # A topic's name may end so; a partition's does not.
_DELETED: Final = re.compile(r".+-\d+\.[0-9a-f]{32}(?:\.\d+)?-delete")
_STRAY_SUFFIX: Final = ".stray"  # No partition's name.
_STRAY: Final = re.compile(r".+-(\d+)\.([0-9a-f]{32})(?:\.\d+)?\.stray")
_DAMAGED_SUFFIX: Final = ".damaged"  # Nor is this, and no start looks at them.
_DEFAULTS: Final = TopicLogConfig.of({})
_log = structlog.get_logger()


class ManagedDirectory:
    """The partitions that are kept in one directory. Used on one thread."""

    def __init__(
        self,
        home: DataDirectory,
        cluster_id: str,
        on_durable: Callable[[PartitionLog], None],
        on_damage: Callable[[PartitionLog, int], None],
        on_log_failed: Callable[[TopicIdPartition, StorageError], None],
    ) -> None:
        self.home = home
        self.logs: dict[TopicIdPartition, PartitionLog] = {}
        self.unopened: dict[TopicIdPartition, tuple[Path, PenstockError]] = {}
        self._strays: dict[TopicIdPartition, Path] = {}
        self._unclear: dict[Path, Unclear] = {}
        self._cluster_id = cluster_id
        self._on_durable = on_durable
        self._flusher = Flusher(home, self._flushed)
        self._state: LocalState | None = None
        self._new = NewDirectories(home)
        self._high_watermarks: dict[TopicIdPartition, int] = {}
        self._saves = Saves(
            home,
            note=self._note,
            write=lambda: self._use_state().write(),
            run=self._flusher.run,
            on_durable=on_durable,
        )
        self._background = BackgroundJobs(f"delete in {home.path}")
        self._doubting = BackgroundJobs(f"doubt the run in {home.path}")  # Waits for no deletion.
        self._clean_stop: RunMark | None = None  # Of the run before, as is the next.
        self._durable_run: RunMark | None = None
        self._is_whole = False  # What that run left is here, as far as it can be told.
        self._left_shut: set[TopicIdPartition] = set()  # By the clean stop of that run.
        self.directory_id = b""  # Once it is open.
        self.was_empty = False
        self.is_listed = False  # Every partition in it is known, open or not.
        home.request_flush = self.request_flush
        home.lower_recovery_point = self._lower_recovery_point
        home.save_soon = self._saves.now
        home.run_soon = in_next_turn
        home.run_in_background = self._background.run
        home.damage_found = on_damage
        home.partition_lost = partial(give_up, self.logs, on_log_failed)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.home.path

    def _use_state(self) -> LocalState:
        assert self._state is not None, "the directory is open"
        return self._state

    # --- opening ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Open every partition found. Raises StorageError when the directory can't be used, and
        DataDirectoryError, having changed nothing, when it belongs to another cluster.

        A partition that can't be opened is in ``unopened`` with the reason.
        """
        try:
            make_directories(self.home.disk, self.path)
            self.home.note_identity()
            found = list(self._find())
            self._list(found)
            state = self._state = LocalState(
                self.path, self.home.settings.local_state_max_bytes, self.home.disk
            )
            self.was_empty = state.is_blank and not self.has_unopened
            if state.is_blank and found:
                tell_of_missing_state(self.path, len(found))
            self.directory_id = state.directory_id
            self._clean_stop, self._durable_run = state.clean_stop, state.durable_run
            self._is_whole = not self._unclear
            self._left_shut = state.left_shut
            self._find_strays()
            known = state.known()
            self._begin_run(state)
            self._note_missing(known.difference(key for _, _, key in found))
            for directory, partition, key in found:
                self._open_found(directory, partition, key, is_known=key in known)
            unclear = {one.partition.partition for one in self._unclear.values()}
            maybe_here = {key for key in known if key.partition in unclear}
            state.keep_only({*self.logs, *self.unopened, *maybe_here})
            self._save_all()
        except LocalStateDamagedError as error:
            raise self.home.fail(error, "opening it", without_damaged_state(self.path)) from error
        except (OSError, lmdb.Error) as error:
            raise self.home.fail(error, "opening it") from error

    def _begin_run(self, state: LocalState) -> None:
        """Where there is no room for that, what is here can be read and stays as it is."""
        try:
            state.begin_run()
        except (OSError, lmdb.Error) as error:
            if not is_disk_full(error):
                raise
            self.home.room.refused(str(error), "noting that the broker has started")
            self.home.room.wait_until(lambda: state.has_begun)

    def resume(self, log: PartitionLog) -> None:
        """Do what the start had to leave for want of room, once somebody uses the log."""
        if log.needs_flush:
            self.request_flush(log)
        if self._state is not None and not self._state.has_begun:
            self._saves.soon()

    def _list(self, found: Iterable[tuple[Path, TopicPartition, TopicIdPartition]]) -> None:
        """Know what is here, even if the directory fails before it is opened."""
        for directory, partition, key in found:
            self.unopened[key] = directory, StorageError(f"{partition} was not opened")
        self.is_listed = True

    def _find(self) -> Iterator[tuple[Path, TopicPartition, TopicIdPartition]]:
        """The partitions in the directory. What a crash left of deleted ones is removed."""
        for directory in sorted(self.path.iterdir()):
            match = _PARTITION.fullmatch(directory.name)
            if not directory.is_dir() or directory.name.startswith("."):
                continue
            if _DELETED.fullmatch(directory.name):
                self._background.run(partial(self.home.disk.remove_tree, directory))
                continue
            if match is None:
                continue  # Not ours: a lost+found, an operator's copy.
            partition = TopicPartition(match[1], int(match[2]))
            topic_id = TopicId(bytes.fromhex(match[3])) if match[3] else None
            try:
                metadata = read_metadata(directory)
            except CheckpointDamagedError as error:
                self._without_metadata(directory, Unclear(partition, topic_id, str(error)))
                continue
            if metadata.cluster_id != self._cluster_id:
                raise DataDirectoryError(
                    f"{directory} belongs to cluster {metadata.cluster_id!r}, not to "
                    f"{self._cluster_id!r}; next: move it away if it was put there. If its "
                    f"{METADATA_FILE} was changed, {put_metadata_right(directory)}"
                )
            yield directory, partition, TopicIdPartition(metadata.topic_id, partition.partition)

    def _find_strays(self) -> None:
        for directory in self.path.iterdir():
            match = _STRAY.fullmatch(directory.name)
            if match is not None:
                key = TopicIdPartition(TopicId(bytes.fromhex(match[2])), int(match[1]))
                self._strays[key] = directory
        if self._strays:
            _log.warning("strays_kept", directory=str(self.path), count=len(self._strays))

    def refuse_stray(self, partition: TopicPartition, key: TopicIdPartition) -> None:
        """Raise StorageError while a stray of the partition is kept here."""
        stray = self._strays.get(key)
        if stray is None:
            return
        if stray.exists():
            raise StorageError(
                f"the records of {partition} were set aside in {stray} when the metadata did not "
                f"name it: stop the broker and rename that to {self.path / str(partition)} to have "
                "them back, or remove it to have the partition copied anew from its leader"
            )
        del self._strays[key]

    def refuse_unclear(self, partition: TopicPartition, key: TopicIdPartition) -> None:
        """Raise StorageError while records that may be the partition's lie here unread."""
        for directory, unclear in list(self._unclear.items()):
            if not unclear.may_be(partition, key):
                continue
            if directory.exists():
                raise StorageError(
                    f"the records of {partition} may be those in {directory}, and it can't be "
                    f"told: {unclear.reason}; stop the broker and {put_metadata_right(directory)}. "
                    "Or move the directory away to have the partition copied anew from its leader"
                )
            del self._unclear[directory]

    @property
    def has_unopened(self) -> bool:
        """Whether there are records here that can't be served."""
        return bool(self.unopened or self._unclear)

    def _note_missing(self, missing: set[TopicIdPartition]) -> None:
        """What the last run left and somebody has taken away since.

        After a crash it may also have been deleted in the last seconds before it.
        """
        for key in missing:
            if self._clean_stop is not None:
                _log.error(
                    "partition_missing", directory=str(self.path), topic_partition_id=str(key)
                )
            self._is_whole = False

    def _open_found(
        self, directory: Path, partition: TopicPartition, key: TopicIdPartition, *, is_known: bool
    ) -> None:
        stopped = self._clean_stop is not None
        try:
            clean = stopped and is_known and key not in self._left_shut
            log = self._open_log(directory, partition, key, _DEFAULTS, clean=clean)
        except (StorageError, DiskFullError) as error:
            self.home.check()
            self.unopened[key] = directory, error
            return
        self.unopened.pop(key, None)
        # One that nothing is known of with records in it may be older than the run: put back.
        as_left = log.opened_clean if stopped else is_known or not log.log_end_offset
        self._is_whole = self._is_whole and as_left and not (log.dropped_records or log.holes)

    def as_found(self) -> FoundDirectory:
        """What the start found of the run before.

        A partition that was shut all through that run had no part in what it acknowledged.
        """
        whole = self._is_whole and self.home.failure is None
        whole = whole and not self._unclear and self._left_shut.issuperset(self.unopened)
        return FoundDirectory(self.directory_id, self._clean_stop, self._durable_run, whole)

    def mark_durable_run(self, run: RunMark | None) -> None:
        """Note durably that this run acknowledges only what is on the disk, or that it may not.

        Where that can't be written the mark of an earlier run stays, whose broker epoch is over.
        """
        if self._state is None:
            return  # It never opened, or is closed already.
        try:
            self._state.mark_durable_run(run)
        except (OSError, lmdb.Error) as error:
            self.home.translate(error, "noting the broker epoch")

    def doubt_run(self) -> None:
        """Take the mark of this run away in the background, if the disk still can."""
        state = self._state
        if state is None:
            return

        def forget() -> None:
            with contextlib.suppress(OSError, lmdb.Error):  # It is the disk that failed, maybe.
                state.mark_durable_run(None)

        self._doubting.run(forget)

    def _without_metadata(self, directory: Path, unclear: Unclear) -> None:
        """A crash while the partition was made leaves nothing in it; anything else is kept."""
        content = content_of(directory)
        if content is Content.LEFTOVER:
            remove(self.home.disk, directory)
            return
        if content is Content.FOREIGN:
            _log.warning(
                "directory_ignored",
                path=str(directory),
                reason="it is called as a partition's, and holds no file of a log",
                next_step=f"keep it elsewhere; a log of {unclear.partition} gets another name here",
            )
            return
        self._unclear[directory] = unclear
        _log.error(
            "partition_directory_unclear",
            path=str(directory),
            reason=unclear.reason,
            next_step=f"stop this broker, {put_metadata_right(directory)}, or move the directory "
            "away, and start; it makes no log of that name until then",
        )

    def _open_log(
        self,
        directory: Path,
        partition: TopicPartition,
        key: TopicIdPartition,
        config: TopicLogConfig,
        *,
        clean: bool,
    ) -> PartitionLog:
        try:
            saved = self._use_state().get(key)
        except StorageError as error:
            raise StorageError(f"{partition}: {error.message}; {copy_anew(directory)}") from None
        try:
            log = open_log(
                self.home,
                directory,
                partition=partition,
                key=key,
                config=config,
                saved=SavedState(clean=clean, **saved._asdict()),
            )
        except DamagedLogError as error:
            error.committed_offset = saved.high_watermark
            raise
        log.noted_damage += noted_damage(log)  # Beside what the opening came upon.
        # Never above the end: what is appended there will be other records, which nobody knows to
        # be committed when a crash finds the old value beside them.
        self._high_watermarks[key] = min(saved.high_watermark, log.log_end_offset)
        self.logs[key] = log
        self._note(key)
        return log

    def create(
        self, partition: TopicPartition, key: TopicIdPartition, config: TopicLogConfig
    ) -> PartitionLog:
        """Make a partition's directory and its empty log, or open one that there was no room for.

        Raises StorageError; DiskFullError, after which it may be tried again.
        """
        self.home.check()
        if key in self.unopened:
            directory, reason = self.unopened[key]
            if not isinstance(reason, DiskFullError):
                raise reason
            log = self._open_log(directory, partition, key, config, clean=False)
            del self.unopened[key]
            for offset in (*log.holes, *log.noted_damage):
                self.home.damage_found(log, offset)
            return log
        made = self._new.take(key)
        if made is not None:
            return self._open_log(made, partition, key, config, clean=True)
        directory = self._directory_for(partition, key)
        if directory.exists():
            raise StorageError(
                f"there is no place for the log of {partition}: {directory} is there already, and "
                "holds no log of it that could be opened; look what it has, and move it away"
            )
        try:
            self._use_state().forget(key)
            self.home.disk.make_directory(directory)
        except (OSError, lmdb.Error) as error:
            raise self.home.translate(error, f"making {directory}") from error
        try:
            metadata = encode_metadata(PartitionMetadata(key.topic_id, self._cluster_id))
            write_atomically(self.home.disk, directory / METADATA_FILE, metadata)
            self.home.disk.sync_directory(self.path)
            return self._open_log(directory, partition, key, config, clean=False)
        except OSError as error:
            self.home.disk.remove_tree(directory)
            raise self.home.translate(error, f"making {directory}") from error
        except DiskFullError:
            self.home.disk.remove_tree(directory)
            raise

    def _directory_for(self, partition: TopicPartition, key: TopicIdPartition) -> Path:
        """Where to make a partition.

        An earlier topic of this name may not be deleted yet; or it is, but a flush or a clean of it
        is under way, which writes files by their paths.
        """
        directory = self.path / str(partition)
        if directory.exists() or self._is_busy_in(directory):
            directory = self.path / f"{partition}.{key.topic_id.hex()}"
        return directory

    def has_made(self, key: TopicIdPartition) -> bool:
        """Whether ``create`` finds the partition's directory made ahead."""
        return key in self._new

    async def make_ahead(self, wanted: Mapping[TopicIdPartition, TopicPartition]) -> None:
        """Make the directories that ``create`` will ask for, so that it need not wait for the disk.

        Raises nothing: what can't be made ahead, ``create`` makes, and says why where it can't.
        """
        planned: dict[TopicIdPartition, tuple[Path, bytes]] = {}
        for key, partition in wanted.items():
            if not (key in self.unopened or key in self._new or self._use_state().knows(key)):
                metadata = encode_metadata(PartitionMetadata(key.topic_id, self._cluster_id))
                planned[key] = self._directory_for(partition, key), metadata
        if planned and self.home.failure is None:
            await self._new.make(planned)

    def _is_busy_in(self, directory: Path) -> bool:
        return directory in self.home.cleaning or self._flusher.is_busy_in(directory)

    # --- flushing and saving ---------------------------------------------------------------------

    def request_flush(self, log: PartitionLog) -> None:
        """Flush the log as its policy says; and save what changed of it before long."""
        self._flusher.request(log)
        self._changed_since(log.key)

    def _flushed(self, log: PartitionLog, advanced: bool) -> None:
        self._changed_since(log.key)
        if advanced:
            self._on_durable(log)

    def high_watermark(self, key: TopicIdPartition) -> int:
        """The high watermark last given, inside of what the log holds."""
        log = self.logs[key]
        known = self._high_watermarks.get(key, 0)
        return min(max(known, log.log_start_offset), log.log_end_offset)

    def checkpoint_high_watermark(self, key: TopicIdPartition, high_watermark: int) -> None:
        """Note a high watermark, to be saved before long."""
        if self._high_watermarks.get(key) != high_watermark:
            self._high_watermarks[key] = high_watermark
            self._changed_since(key)

    def _changed_since(self, key: TopicIdPartition) -> None:
        if self._state is None:
            return  # Closed: everything was saved.
        self._saves.changed[key] = None
        self._saves.soon()

    def _note(self, key: TopicIdPartition) -> PartitionLog | None:
        log = self.logs.get(key)
        if log is not None:
            self._use_state().put(
                key,
                PartitionState(
                    self._high_watermarks.get(key, 0),
                    log.log_start_offset,
                    log.recovery_point,
                    log.cleaned_offset,
                ),
            )
        return log

    def _save_all(self) -> None:
        """At the start. For want of room it is left to the first checkpoint."""
        for key in self.logs:
            self._note(key)
        starts = [log.start.saving() for log in self.logs.values()]
        try:
            self._use_state().write()
        except (OSError, lmdb.Error) as error:
            if not is_disk_full(error):
                raise
            self.home.room.refused(str(error), "saving local state")
            return
        for saved in starts:
            saved()

    def _lower_recovery_point(self, key: TopicIdPartition, offset: int) -> None:
        try:
            self._use_state().note_cut(key, offset)
        except (OSError, lmdb.Error) as error:
            doing = f"lowering the recovery point of {key}"
            raise self.home.translate(error, doing) from error
        self._high_watermarks[key] = min(self._high_watermarks.get(key, 0), offset)

    # --- deleting and closing --------------------------------------------------------------------

    def refuse_duplicate(self, key: TopicIdPartition, other: Path) -> None:
        """Keep a partition closed of which the directory ``other`` has a log as well.

        It was made there while this directory was away, or this one is an old copy. Which log has
        what was acknowledged only a person can tell.
        """
        log = self.logs.pop(key, None)
        directory = log.directory if log is not None else self.unopened[key][0]
        if log is not None:
            log.close(save=False)
        self.unopened[key] = (
            directory,
            StorageError(
                f"{directory.name} is in {self.path} and in {other} too: stop the broker and move "
                "the older of the two away, or both to have the partition copied anew from its "
                "leader"
            ),
        )

    def delete(self, key: TopicIdPartition) -> None:
        """Let go of a partition for good. Raises StorageError or DiskFullError."""
        doomed = self._take_away(key, _DELETED_SUFFIX)
        self._background.run(partial(self.home.disk.remove_tree, doomed))

    def set_aside(self, key: TopicIdPartition) -> None:
        """Let go of a partition, and keep its files where no start opens them. Raises
        StorageError or DiskFullError.
        """
        self._strays[key] = stray = self._take_away(key, _STRAY_SUFFIX)
        _log.warning("partition_set_aside", path=str(stray), topic_partition_id=str(key))

    def keep_damaged(self, key: TopicIdPartition) -> Path:
        """As ``set_aside``, where another log is to take its place; the directory they are in."""
        return self._take_away(key, _DAMAGED_SUFFIX)

    def _take_away(self, key: TopicIdPartition, suffix: str) -> Path:
        """Close a partition and give its directory another name, durably; that name."""
        log = self.logs.pop(key, None)
        if log is not None:
            log.close(save=False)
            directory = log.directory
        else:
            directory, _ = self.unopened.pop(key)
        self._high_watermarks.pop(key, None)
        self._saves.changed.pop(key, None)
        target = free_name(self.path, directory, key, suffix)
        try:
            self.home.disk.rename(directory, target)
        except OSError as error:
            if self.home.where_removed(error) == directory:
                return self._forget(key, target)  # Somebody else did it.
            failure = self.home.translate(error, f"renaming {directory} to {target.name}")
            self.unopened[key] = directory, failure  # It is still here.
            raise failure from error
        try:
            self.home.disk.sync_directory(self.path)
        except OSError as error:
            raise self.home.fail(error, f"renaming {directory} to {target.name}") from error
        return self._forget(key, target)

    def _forget(self, key: TopicIdPartition, target: Path) -> Path:
        self._use_state().remove([key])
        self._saves.soon()  # What is known and not there counts as lost after a crash.
        return target

    def close(self, stop: RunMark | None) -> None:
        """Flush and close everything, with the mark ``stop`` if all of it went well."""
        self._saves.stop()
        self._flusher.stop()
        clean = self._close_logs()
        self._background.wait()
        self._doubting.wait()
        self._new.close()
        if self._state is None:
            return  # It never opened, or is closed already.
        try:
            for key in self.logs:
                self._note(key)
            state, self._state = self._state, None
            state.close(stop if clean else None, self.unopened)
        except (OSError, lmdb.Error) as error:
            self.home.translate(error, "saving local state at the stop")

    def _close_logs(self) -> bool:
        """Close every log; whether the next start may open as they are all that were open."""
        saved = self.home.failure is None
        for log in self.logs.values():
            try:
                log.close(save=saved)
            except (StorageError, DiskFullError) as error:
                _log.error("log_not_closed", partition=log.name, reason=error.message)
                saved = False
        return saved and not self._unclear  # Whose records nobody knows to have been left out.
