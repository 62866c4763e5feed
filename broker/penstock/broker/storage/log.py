"""One partition's log on disk: the Log port of penstock.broker.core.ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import AppendInfo, Buffer, EpochEnd, TimestampedOffset
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.transactions import EndedTransaction, Marker, OpenTransaction
from penstock.broker.storage import appends
from penstock.broker.storage.aborted import AbortedTransactions
from penstock.broker.storage.batches import from_offset
from penstock.broker.storage.checkpoints import remove_snapshots
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.flush import FlushTask
from penstock.broker.storage.log_appending import LogAppending
from penstock.broker.storage.log_files import LogFiles, index_writes
from penstock.broker.storage.log_flushing import LogFlushing
from penstock.broker.storage.log_start import LogStart
from penstock.broker.storage.lost_ranges import LostRange, telling
from penstock.broker.storage.producers import FoundProducers, LogProducers
from penstock.broker.storage.settings import FlushPolicy, TopicLogConfig
from penstock.broker.storage.timestamps import Span, cold_times, first_at_or_after, largest
from penstock.wire.errors import DiskFullError, OffsetOutOfRangeError, StorageError
from penstock.wire.ids import LeaderEpoch, TopicIdPartition, TopicPartition
from penstock.wire.records import BatchHeader


class PartitionLog:
    """A log in its directory. Used on one thread; see Log for what each method promises.

    Made by ``recovery.open_log``. After StorageError the data directory is to be given up; after
    DiskFullError the log is as it was before the call. Whatever appends, cuts or assigns an epoch
    asks the directory to flush; ``flush`` does it here and now.

    A log that is ``internal`` (the cluster's own) may use all of the disk; others leave
    ``min_free_bytes``, or half of it when they follow.
    """

    def __init__(
        self,
        home: DataDirectory,
        files: LogFiles,
        *,
        partition: TopicPartition,
        key: TopicIdPartition,
        config: TopicLogConfig,
        start: LogStart,
        end_offset: int,
        synced_offset: int,
        opened_clean: bool,
        dropped_records: bool,
        holes: Sequence[int],
        epochs: EpochHistory,
        epochs_saved: bool,
        producers: FoundProducers,
        cleaned_offset: int = 0,
    ) -> None:
        self.home = home
        self.partition = partition
        self.key = key
        self.config = config
        self.internal = False
        self.opened_clean = opened_clean  # The files were as a clean stop leaves them.
        self.holes = tuple(holes)  # An offset of each that was found when it was opened.
        self.noted_damage: tuple[int, ...] = ()  # Before it was opened, or found then.
        self.lost: Sequence[LostRange] = ()  # Damaged, and nobody can mend it now.
        self.dropped_records = dropped_records  # Behind a hole, or no crash explains what was cut.
        self.cleaned_offset = min(cleaned_offset, end_offset)  # Below it no key is there twice.
        self.rewrites = 0  # Counts cuts, and batches that were mended in their place.
        self._files = files
        self.start = start
        self._end = end_offset
        self._epochs = epochs
        name = str(partition)
        self._flushing = LogFlushing(
            home, files, epochs, name=name, synced_offset=synced_offset, epochs_saved=epochs_saved
        )
        self._producers = LogProducers(home, files, epochs, start, producers, name=name)
        self._aborted = AbortedTransactions(home, files, epochs, self._producers, name=name)
        self._appending = LogAppending(
            home,
            files,
            epochs,
            flushing=self._flushing,
            producers=self._producers,
            aborted=self._aborted,
            name=name,
        )
        self._as_opened = opened_clean  # Nothing has to be saved for the next start to be quick.
        self._closed: str | None = None
        self._durable_is_end = home.settings.flush_policy is not FlushPolicy.COMMIT

    def __repr__(self) -> str:
        return f"<PartitionLog {self.name} {self._start}..{self._end} in {self.directory}>"

    @property
    def name(self) -> str:
        """The partition as people name it."""
        return str(self.partition)

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._files.directory

    @property
    def is_closed(self) -> bool:
        """Whether it was closed: the broker stops, or the partition is here no more."""
        return self._closed is not None

    @property
    def size_bytes(self) -> int:
        """The size of all segments."""
        return self._files.size_bytes

    @property
    def _start(self) -> int:
        return self.start.offset

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self.start.offset

    @property
    def durable_start_offset(self) -> int:
        """What a crash can't take log_start_offset below."""
        return self.start.durable_offset

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get."""
        return self._end

    @property
    def durable_offset(self) -> int:
        """Everything below survives what the flush policy promises to survive."""
        # Below the log's start nothing is missed: a log may begin within its first batch.
        return self._end if self._durable_is_end else max(self.recovery_point, self._start)

    @property
    def recovery_point(self) -> int:
        """Everything below is on the disk and need not be checked after a crash."""
        return self._flushing.synced_offset

    @property
    def last_epoch(self) -> int:
        """The newest leader epoch known, -1 for none."""
        return self._epochs.last_epoch

    @property
    def files(self) -> LogFiles:
        """The segments; read only, for who keeps or cleans the log."""
        return self._files

    @property
    def epochs(self) -> EpochHistory:
        """The leader epochs; read only."""
        return self._epochs

    @property
    def producers(self) -> ProducerState:
        """The idempotent producers; read only."""
        return self._producers.state

    @property
    def known_producers(self) -> LogProducers:
        """The same, with what damage hides of it; for who mends that."""
        return self._producers

    def _check(self) -> None:
        if self._closed is not None:
            raise StorageError(f"{self.name}: {self._closed}")
        self.home.check()

    # --- appending -------------------------------------------------------------------------------

    def append_as_leader(
        self,
        records: Buffer,
        leader_epoch: LeaderEpoch,
        *,
        now_ms: int,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """Check and append a producer's batches; see Log."""
        self._check()
        appends.check_leader_epoch(self.name, leader_epoch, self._epochs)
        checked = appends.check_as_leader(
            records,
            name=self.name,
            base_offset=self._end,
            leader_epoch=leader_epoch,
            now_ms=now_ms,
            seen_ms=self._producers.expire(),
            config=self.config,
            producers=self._producers.state,
            keyed=self.config.compacts and not self.internal,
            internal=self.internal,
            verified=verified,
        )
        if isinstance(checked, AppendInfo):
            return checked
        log_append_time_ms = now_ms if self.config.log_append_time else -1
        reserve_bytes, at_hand = self._reserve_bytes(leading=True), appends.at_hand(checked.batches)
        return self._append(checked, log_append_time_ms, reserve_bytes, at_hand)

    def append_markers(
        self, markers: Sequence[Marker], leader_epoch: LeaderEpoch, *, now_ms: int
    ) -> AppendInfo:
        """Append the marks that are not here yet; see Log. They may use more room than records."""
        self._check()
        appends.check_leader_epoch(self.name, leader_epoch, self._epochs)
        checked = appends.marks_as_leader(
            markers,
            base_offset=self._end,
            leader_epoch=leader_epoch,
            now_ms=now_ms,
            seen_ms=self._producers.expire(),
            producers=self._producers.state,
        )
        if not checked.batches:
            return AppendInfo(-1, -1, -1, 0)
        reserve_bytes = self._reserve_bytes(leading=False)
        return self._append(checked, -1, reserve_bytes, appends.at_hand(checked.batches))

    def append_as_follower(self, records: Buffer) -> AppendInfo:
        """Append what the leader pushed, as it is; see Log."""
        self._check()
        begin = appends.beginning_of(records, start_offset=self._start, end_offset=self._end)
        checked = appends.check_as_follower(
            records,
            name=self.name,
            end_offset=begin,
            seen_ms=self._producers.expire(),
            epochs=self._epochs,
            producers=self._producers.state,
        )
        if not checked.batches:
            return AppendInfo(-1, -1, -1, 0)
        reserve_bytes = self._reserve_bytes(leading=False)
        if begin == self._end:
            return self._append(checked, -1, reserve_bytes)
        self._begin_cut(0)  # A crash in between may leave no segment at all.
        self._save_producers()  # What a flush was to write of them is given up by that.
        try:
            self._reset_files(begin)
            self._end = begin
            return self._append(checked, -1, reserve_bytes)
        except DiskFullError:
            self._reset_files(self._start)
            raise
        finally:
            self._end = max(self._end, self._start)  # Whatever failed, the log is empty then.

    def _reset_files(self, offset: int) -> None:
        with self.home.failing(f"beginning {self.name} at offset {offset}"):
            self._files.reset(offset)

    def _reserve_bytes(self, *, leading: bool) -> int:
        """What an append must leave free."""
        if self.internal:
            return 0
        reserve_bytes = self.home.settings.min_free_bytes
        return reserve_bytes if leading else reserve_bytes // 2

    @property
    def knows_no_producers(self) -> bool:
        """Whether it is empty and began by itself where it does, handed nothing over; see Log."""
        return self._end == self._start and self._producers.are_unknown

    @property
    def has_room(self) -> bool:
        """Whether there seems to be room for an append of what a leader sends.

        There is no use in any while a cut waits for what it needs.
        """
        if self.flush_failed or self._producers.are_being_read:
            return False
        return self.home.room.fits(0, self._reserve_bytes(leading=False))

    def _append(
        self,
        checked: appends.Checked,
        log_append_time_ms: int,
        reserve_bytes: int,
        at_hand: bytes = b"",
    ) -> AppendInfo:
        size = self._appending.write(checked, self._end, self.config, reserve_bytes)
        self._as_opened = False
        base_offset, self._end = self._end, checked.batches[-1].header.next_offset
        self.home.request_flush(self)
        return AppendInfo(base_offset, self._end - 1, log_append_time_ms, size, records=at_hand)

    def _save_producers(self) -> None:
        self._flushing.write_later(self._producers.snapshot(self._end))

    def assign_epoch(self, leader_epoch: LeaderEpoch) -> None:
        """Note that ``leader_epoch`` begins at log_end_offset; see Log.

        Raises FencedLeaderEpochError when the log has a newer one.
        """
        self._check()
        appends.check_leader_epoch(self.name, leader_epoch, self._epochs)
        self._appending.assign(leader_epoch, self._end)
        self.home.request_flush(self)

    # --- reading ---------------------------------------------------------------------------------

    def read(self, offset: int, max_bytes: int, *, below: int, min_one: bool = True) -> Buffer:
        """Whole, verified batches from the one that holds ``offset``; see Log."""
        self._check()
        self._check_range(offset)
        below = min(below, self._end)
        if offset >= below:
            return b""
        with telling(self, offset):
            return self._read(offset, max_bytes, below=below, min_one=min_one)

    def _read(self, offset: int, max_bytes: int, *, below: int, min_one: bool) -> Buffer:
        found = self._files.locate(offset)
        if found is None:
            last = self._files.segment_of(offset)
            raise last.damaged(last.size_bytes, f"offset {offset} is missing")
        segment, position, base_offset = found
        run = segment.read(
            position, base_offset, max_bytes, below=below, min_one=min_one, epochs=self._epochs
        )
        self._files.remember(run.next_offset, segment, run.next_position)
        return from_offset(run.data, offset) if base_offset < offset else run.data

    def cold_read(self, offset: int, max_bytes: int) -> Callable[[], None] | None:
        """None when ``read`` finds its data in memory; else what brings it there; see Log."""
        self._check()
        self._check_range(offset)
        if offset >= self._end:
            return None
        with telling(self, offset):
            return self._files.cold_read(offset, max_bytes)

    def _check_range(self, offset: int) -> None:
        if not self._start <= offset <= self._end:
            raise OffsetOutOfRangeError(
                f"{self.name} has offsets {self._start} to {self._end}, but {offset} was asked for"
            )

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        """Where a leader epoch ends; see Log."""
        return self._epochs.end_of_epoch(leader_epoch, self._end)

    def cold_times(self, *, below: int) -> Callable[[], None] | None:
        """None when searches by time know where to look; else what finds out; see Log."""
        self._check()
        return cold_times(self.home, self._files, below)

    def offset_for_timestamp(self, timestamp_ms: int, *, below: int) -> TimestampedOffset | None:
        """The first record at or after a time; see Log. Reads the batch it finds."""
        return self._search(lambda span: first_at_or_after(self._files, timestamp_ms, span), below)

    def max_timestamp(self, *, below: int) -> TimestampedOffset | None:
        """The record with the largest timestamp, the first of several; see Log."""
        return self._search(lambda span: largest(self._files, span), below)

    def _search(
        self, find: Callable[[Span], TimestampedOffset | None], below: int
    ) -> TimestampedOffset | None:
        self._check()
        with telling(self):
            return find(Span(self._start, min(below, self._end), self._end, self.holes))

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether that transaction is open at the log's end; see Log."""
        return self.producers.has_open_transaction(producer_id, producer_epoch)

    def open_transactions(self) -> list[OpenTransaction]:
        """The transactions that are open at the log's end, the oldest first; see Log."""
        return self.producers.open_transactions()

    def last_stable_offset(self, high_watermark: int) -> int:
        """Where the oldest transaction begins that is open as of the high watermark; see Log."""
        stable = self.producers.transactions.stable_offset(high_watermark)
        return min(max(stable, self._start), high_watermark)

    def aborted_transactions(self, offset: int, *, below: int) -> list[EndedTransaction]:
        """The aborted transactions that may have records in that range; see Log."""
        self._check()
        self._check_range(offset)
        return self._aborted.find(offset, min(below, self._end))

    def cold_aborted(self, offset: int) -> Callable[[], None] | None:
        """None when ``aborted_transactions`` need not read segments; else what does; see Log."""
        self._check()
        self._check_range(offset)
        return self._aborted.cold(offset)

    # --- old segments ----------------------------------------------------------------------------

    def roll(self) -> None:
        """Close the active segment, unless it is empty. Raises StorageError or DiskFullError."""
        self._check()
        if not self._files.active.size_bytes:
            return
        self.home.room.check(0, 0, f"closing a segment of {self.name}")
        try:
            self._files.roll(self._end)
        except OSError as error:
            raise self.home.translate(error, f"closing a segment of {self.name}") from error
        self._as_opened = False
        self._save_producers()
        self.home.request_flush(self)

    def cleaned_up_to(self, offset: int) -> None:
        """Below ``offset`` no key is there twice any more, as far as the cleaner may say."""
        self.cleaned_offset = min(max(self.cleaned_offset, offset), self._end)
        self.home.request_flush(self)

    def check_room(self, size_bytes: int, doing: str) -> None:
        """Raise DiskFullError unless so much can be written beside the log."""
        self.home.room.check(size_bytes, self._reserve_bytes(leading=False), doing)

    # --- cutting ---------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> None:
        """Cut everything at and after ``offset``; see Log.

        Batches are not split: the one that holds ``offset`` goes as a whole. Where much must be
        read first that is done in the background, and ``has_room`` is False meanwhile.
        """
        self._check()
        if offset >= self._end:
            # An epoch may have been assigned at the end, that the new leader knows nothing of.
            if self._epochs.truncate_from_end(offset):
                self._flushing.epochs_changed()
                self.home.request_flush(self)
            return
        if offset <= self._start:
            self.truncate_fully_and_start_at(offset)
            return
        placed = self._files.segment_of(offset).position_of(offset)
        end = placed.header.base_offset if placed is not None else offset
        producers = self._producers.before_cut(end)
        self._begin_cut(end)
        with self.home.failing(f"cutting {self.name} at offset {end}"):
            remove_snapshots(self.home.disk, self.directory, above=end)
            self._files.truncate(end, self.config.index_interval_bytes)
        self._end = end
        if end < self._start:
            self.start.restart(end)
        self._epochs.truncate_from_end(end)
        for damaged in self._producers.cut(end, producers):
            self.noted_damage += (damaged,)
            self.home.run_soon(partial(self.home.damage_found, self, damaged))
        self.home.request_flush(self)

    def note_committed(self, offset: int) -> None:
        """No cut goes below ``offset``, but after an unclean election; see Log."""
        self._producers.committed(offset)

    def producers_below(self, offset: int) -> bytes:
        """What a replica that begins there is to know; see Log."""
        return self._producers.state.handed_over(offset)

    def truncate_fully_and_start_at(self, offset: int, producers: bytes = b"") -> None:
        """Drop everything; the log then starts and ends at ``offset``; see Log."""
        self._check()
        if offset == self._start and not producers:
            producers = self.producers_below(offset)  # What was deleted, was so everywhere.
        state = ProducerState.begun_at(offset, producers, self.home.clock_ms())
        doing = f"dropping what {self.name} holds"
        keep = self._producers.keep(state, offset, doing)
        # Whatever a crash in between leaves is less than the log was, and no sign of damage.
        self._begin_cut(0)
        with self.home.failing(doing):
            remove_snapshots(self.home.disk, self.directory, above=-1)
            self._files.reset(offset)
            keep()
        self.start.restart(offset)
        self._end = self._flushing.synced_offset = offset
        self._epochs.clear()
        self._producers.begin(state)
        self.home.save_soon(self)
        self.home.request_flush(self)

    def _begin_cut(self, end: int) -> None:
        """From here on nothing at or after ``end`` counts as durable, whatever a crash finds.

        Raises DiskFullError when that can't be noted; nothing has changed then.
        """
        self.home.lower_recovery_point(self.key, end)
        self.rewrites += 1
        self._as_opened = False
        self.cleaned_offset = min(self.cleaned_offset, end)
        self._flushing.cut(end)
        self._aborted.cut()

    def headers(self, offset: int, end: int) -> Iterator[BatchHeader]:
        """The headers of the batches that hold offsets from ``offset`` to below ``end``."""
        return (placed.header for _, placed in self._files.walk(offset, end))

    def advance_log_start(self, offset: int) -> None:
        """Move log_start_offset up; see Log. Raises OffsetOutOfRangeError beyond log_end_offset.

        Whole segments below it are deleted once that is durable.
        """
        self._check()
        if offset <= self._start:
            return
        self._check_range(offset)
        self.start.offset = offset
        self._as_opened = False
        if self._epochs.truncate_from_start(offset):
            self._flushing.epochs_changed()
        self.home.save_soon(self)
        self.delete_old_segments()
        self.home.request_flush(self)

    def delete_old_segments(self) -> None:
        """Delete what lies below durable_start_offset, a few segments at a time.

        Raises StorageError, which fails the directory.
        """
        if self._closed is None and self.home.failure is None and self.start.delete_some():
            self.home.run_soon(self.delete_old_segments)

    # --- flushing --------------------------------------------------------------------------------

    @property
    def has_rolled(self) -> bool:
        """Whether a segment was closed that is not on the disk yet."""
        return self._closed is None and self._files.has_rolled

    @property
    def flush_failed(self) -> bool:
        """Whether the last flush found no room."""
        return self._flushing.failed

    @property
    def needs_flush(self) -> bool:
        """Whether something is not on the disk yet."""
        return self._closed is None and self._flushing.is_needed

    def begin_flush(self) -> FlushTask:
        """Everything to be done for what is in the log now to be on the disk.

        Run it in any thread, then hand it to ``finish_flush`` on this log's thread; always both.
        Raises DiskFullError when there is still no room for what a flush before found none for.
        """
        return self._flushing.begin(self)

    def finish_flush(self, task: FlushTask) -> bool:
        """Take over what a flush did; True when ``durable_offset`` advanced by it.

        A failed flush fails the data directory, but for want of room it is to be tried again
        later: ``has_room`` is False until one went well. Raises StorageError when old segments
        can't be deleted, which fails the directory as well.
        """
        synced = self.recovery_point
        if self._closed is not None or not self._flushing.finish(task):
            return False
        self.delete_old_segments()  # What had to stay as long as the next one could be lost.
        return self.recovery_point > synced and not self._durable_is_end

    def flush(self) -> None:
        """Put everything on the disk before returning. Raises StorageError or DiskFullError."""
        self._check()
        task = self.begin_flush()
        task.run()
        self.finish_flush(task)
        self.home.check()
        if task.error is not None:
            raise self.home.translate(task.error, f"flushing {self.name}")

    def give_up(self, why: str) -> None:
        """Raise StorageError from now on, with ``why``: files were removed. In any thread."""
        self._closed = why
        self.home.run_soon(self._files.close)

    def close(self, *, save: bool) -> None:
        """Close the files; with ``save`` flush and keep what makes the next start quick.

        Raises StorageError or DiskFullError when that failed; the files are closed all the same.
        """
        if self._closed is not None:
            return
        try:
            if save and not self._as_opened:
                active = self._files.active
                self._flushing.write_later(index_writes(active, active.complete_index()))
                self._save_producers()
                self.flush()
        finally:
            self._closed = "the log is closed; the broker is stopping or the partition moved away"
            self._files.close()
