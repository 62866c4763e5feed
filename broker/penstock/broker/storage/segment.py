"""One segment of a log: ``BASE.log`` with its indexes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.batches import (
    BrokenChainError,
    check_each,
    goes_on_behind,
    next_header,
    verify_run,
)
from penstock.broker.storage.checkpoints import write_atomically
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Buffer, SharedFile, remove_if_there
from penstock.broker.storage.index import (
    FileIndex,
    IndexDamagedError,
    MemoryIndex,
    OffsetEntry,
    TimeEntry,
)
from penstock.broker.storage.placing import Placed, Read, SegmentDamagedError, file_name
from penstock.broker.storage.segment_file import SegmentFile
from penstock.broker.storage.transaction_index import TransactionIndex
from penstock.wire.errors import CorruptRecordError, PenstockError
from penstock.wire.records import HEADER_BYTES, BatchHeader, parse_header, verify_batch

_MENDED_INTERVAL_BYTES: Final = 4096
_WALK_BYTES: Final = 8 * 1024  # A walk over headers reads so much at once.
_LARGE_BYTES: Final = 16 * 1024  # Of a batch; several times the usual index.interval.bytes.
_AT_ONCE_BYTES: Final = 256 * 1024  # A search reads no more to make an index anew.
_AGAIN_BYTES: Final = 1024 * 1024  # What is written again is read in pieces of about this size.
_PREPARING: Final = threading.Lock()  # One at a time: it is the processor that they share.
_ANY_OFFSET: Final = 2**63 - 1
NO_TIME: Final = TimeEntry(-1, 0)


class Segment(SegmentFile):
    """A file of batches, from offset ``base_offset`` on. Used on one thread.

    ``index`` is in memory while the segment is appended to, and until its files are written.
    ``transactions`` is, too, and later when somebody has asked for it; None while it is only in its
    file, or must be made anew (penstock.broker.storage.aborted).
    """

    __slots__ = (
        "_prepared",
        "_times_are_checked",
        "first_timestamp_ms",
        "index",
        "is_doubtful",
        "learned_time",
        "max_timestamp",
        "transactions",
        "was_made_anew",
    )

    def __init__(
        self,
        home: DataDirectory,
        directory: Path,
        name: str,
        base_offset: int,
        *,
        size_bytes: int,
        index: MemoryIndex | None = None,
    ) -> None:
        super().__init__(home, directory, name, base_offset, size_bytes=size_bytes)
        self._prepared: Segment | None = None  # Has the index that another thread made anew.
        self._times_are_checked = False  # The time index in its file, by its checksum.
        self.index = index
        self.is_doubtful = False  # A damaged batch hides its time from the index made anew.
        self.max_timestamp: TimeEntry | None = None  # None for "not known yet" or "empty".
        self.first_timestamp_ms: int | None = None
        self.was_made_anew = False  # The index: of a closed segment, and by this process.
        # What another thread found for the largest timestamp, when there were so many bytes.
        self.learned_time: tuple[int, TimeEntry] | None = None
        self.transactions: TransactionIndex | None = None

    @classmethod
    def create(cls, home: DataDirectory, directory: Path, name: str, base_offset: int) -> Segment:
        """A new, empty segment. Raises OSError; FileExistsError when there is one."""
        segment = cls(home, directory, name, base_offset, size_bytes=0, index=MemoryIndex())
        segment._make()
        segment.transactions = TransactionIndex()
        return segment

    @property
    def index_path(self) -> Path:
        """The offset index file."""
        return self.directory / file_name(self.base_offset, "index")

    @property
    def time_index_path(self) -> Path:
        """The time index file."""
        return self.directory / file_name(self.base_offset, "timeindex")

    @property
    def transaction_index_path(self) -> Path:
        """The file of the aborted transactions."""
        return self.directory / file_name(self.base_offset, "txnindex")

    @property
    def file_index(self) -> FileIndex:
        """The index as it is in its files."""
        return FileIndex(self.index_path, self.time_index_path)

    @property
    def file(self) -> SharedFile:
        """The open log file. Raises StorageError when it can't be opened."""
        file = super().file
        if self.index is None:
            self._home.used(self)
        return file

    def close_file(self) -> None:
        """Close the descriptor once nobody uses it; it is opened anew when it is needed."""
        self._home.forget(self)
        if self.index is None:  # It is on the disk, or can be made anew again.
            self.transactions = None
        super().close_file()

    def paths(self) -> list[Path]:
        """Every file of the segment."""
        return [self.path, self.index_path, self.time_index_path, self.transaction_index_path]

    # --- appending -------------------------------------------------------------------------------

    def overwrite(self, data: Buffer, position: int) -> None:
        """Write what was read at ``position`` where it was. Raises OSError; nothing has changed."""
        super().overwrite(data, position)
        self._prepared = None  # It is of what was there before.

    def write_again(self, first: Placed, epochs: EpochHistory) -> None:
        """Read the batches from ``first`` on, check them, and write them where they are.

        Raises OSError, StorageError, or CorruptRecordError for what is not as it was written.
        """
        position, offset = first.position, first.header.base_offset
        while position < self.size_bytes:
            run = self.read(
                position, offset, _AGAIN_BYTES, below=_ANY_OFFSET, min_one=True, epochs=epochs
            )
            self.overwrite(run.data, position)
            position, offset = run.next_position, run.next_offset

    def note(self, header: BatchHeader, position: int, interval_bytes: int) -> None:
        """Bring index and timestamps up to date with a batch that was appended."""
        index = self.index
        assert index is not None, "only an active segment is appended to"
        relative = header.base_offset - self.base_offset
        if self.first_timestamp_ms is None:
            self.first_timestamp_ms = header.max_timestamp_ms
        self._note_time(header, relative)
        if position - index.last_indexed_position >= interval_bytes:
            index.add_offset(relative, position)
            if self.max_timestamp is not None:
                index.add_time(*self.max_timestamp)

    def _note_time(self, header: BatchHeader, relative_offset: int) -> None:
        """Batches without records have a time to be rolled by, but there is nothing to find."""
        known = self.max_timestamp
        if header.record_count and (known is None or header.max_timestamp_ms > known.timestamp_ms):
            self.max_timestamp = TimeEntry(header.max_timestamp_ms, relative_offset)

    def complete_index(self) -> MemoryIndex:
        """The index with its last time entry, as it is written when the segment is closed."""
        assert self.index is not None
        if self.max_timestamp is not None:
            self.index.add_time(*self.max_timestamp)
        return self.index

    def known_transactions(self) -> TransactionIndex | None:
        """The index of aborted transactions; None when it must be made anew."""
        if self.transactions is None:
            with contextlib.suppress(IndexDamagedError):
                path = self.transaction_index_path
                self.transactions = TransactionIndex.load(path, self.base_offset)
        return self.transactions

    def forget_transactions(self) -> None:
        """The index of aborted transactions is wrong, or may become so. Raises OSError."""
        self.transactions = None
        remove_if_there(self._home.disk, self.transaction_index_path)

    # --- finding and reading ---------------------------------------------------------------------

    def walk(self, position: int, offset: int, end: int | None = None) -> Iterator[Placed]:
        """The batches from ``position`` on, whose first must have base offset ``offset``.

        Reads headers only. Raises CorruptRecordError where a header can't be, or ends beyond
        ``end`` (a position; the segment's end by default).
        """
        end = self.size_bytes if end is None else end
        chunk, chunk_at = b"", position
        while position < end:
            if position - chunk_at + HEADER_BYTES > len(chunk):
                chunk, chunk_at = self.read_at(min(_WALK_BYTES, end - position), position), position
            try:
                header = next_header(chunk, position - chunk_at, offset, end - position)
            except CorruptRecordError as error:
                raise self.damaged(position, error.message) from None
            yield Placed(header, position)
            position += header.size_bytes
            offset = header.next_offset

    def position_of(self, offset: int) -> Placed | None:
        """The batch that holds ``offset``; None when the segment ends before it.

        Raises CorruptRecordError.
        """
        return next(self.walk_from_offset(offset), None)

    def walk_from_offset(self, offset: int) -> Iterator[Placed]:
        """The batches from the one that holds ``offset`` on."""
        return (
            placed
            for placed in self._walk_from(offset - self.base_offset)
            if placed.header.next_offset > offset
        )

    def _walk_from(self, relative_offset: int) -> Iterator[Placed]:
        """Walk from the index entry at or before the offset."""
        entry = self._floor_entry(relative_offset)
        return self.walk(entry.position, self.base_offset + entry.relative_offset)

    def _floor_entry(self, relative_offset: int) -> OffsetEntry:
        """The index entry at or before the offset. A damaged index is made anew first."""
        if self.index is not None:
            return self.index.floor_offset(relative_offset)
        try:
            entry = self.file_index.floor_offset(relative_offset)
            self._check_entry(entry)
        except IndexDamagedError:
            return self.mend_index().floor_offset(relative_offset)
        return entry

    def _check_entry(self, entry: OffsetEntry) -> None:
        if entry.position == 0 == entry.relative_offset:
            return
        try:
            header = parse_header(self.read_at(HEADER_BYTES, entry.position))
        except CorruptRecordError as error:
            raise IndexDamagedError(error.message) from None
        if header.base_offset != self.base_offset + entry.relative_offset:
            raise IndexDamagedError(f"{self.index_path} names a batch that is not there")

    def end_offset(self) -> int:
        """The offset after its last batch. Reads from the last index entry on.

        Raises CorruptRecordError where a header there is damaged.
        """
        end = self.base_offset
        if self.size_bytes:
            for placed in self._walk_from(_ANY_OFFSET):
                end = placed.header.next_offset
        return end

    def rebuild_index(self, interval_bytes: int = _MENDED_INTERVAL_BYTES) -> MemoryIndex:
        """Make the index anew from the log, in memory, and see which batches are sound.

        Raises CorruptRecordError where it can't be told where batches begin.
        """
        index = self.index = MemoryIndex()
        self.max_timestamp = self.first_timestamp_ms = None
        self.is_doubtful = False
        try:
            for placed, is_sound in check_each(self.read_at, self.size_bytes, self.base_offset):
                self.note(placed.header, placed.position, interval_bytes)
                self.is_doubtful |= not is_sound
        except BrokenChainError as error:
            raise self.damaged(error.position, error.message) from None
        return index

    def indexing(self, offset: int, size: int) -> Callable[[], None] | None:
        """None when the batch that holds ``offset`` can be found; else what makes that quick, and
        brings ``size`` bytes from there into memory. To be called once, in any thread.
        """
        if self.index is not None or self._prepared is not None:
            return None
        try:
            self._check_entry(self.file_index.floor_offset(offset - self.base_offset))
        except IndexDamagedError:
            return self.preparation(offset, size)
        return None

    def preparation(self, offset: int = 0, size: int = 0) -> Callable[[], None]:
        """What reads all of a closed segment, so that ``mend_index`` need not. To be called once,
        in any thread; see ``indexing``.
        """
        file = self.file.acquire()
        twin = Segment(
            self._home, self.directory, self.name, self.base_offset, size_bytes=self.size_bytes
        )
        twin._file = file

        def prepare() -> None:
            try:
                twin.index = self.prepare(twin)
                placed = twin.position_of(offset) if size else None
                if placed is not None:
                    self._home.disk.read_at(file.fd, size, placed.position)
            except (PenstockError, OSError):
                return  # The read proper will say so.
            finally:
                file.release()

        return prepare

    def prepare(self, twin: Segment) -> MemoryIndex | None:
        """Read all of the segment for ``mend_index``, in any thread, unless that was done.

        ``twin`` is of the same file, and that thread's. Raises PenstockError or OSError.
        """
        with _PREPARING:
            ready = self._prepared
            if ready is None:
                twin.rebuild_index()
                ready = self._prepared = twin
            return ready.index

    def mend_index(self) -> MemoryIndex:
        """Make a closed segment's index anew, in its files as well.

        Not in files as long as it is doubtful: they are believed later. A damaged one of aborted
        transactions goes, to be made anew when it is asked for. Raises CorruptRecordError where the
        log itself is damaged.
        """
        prepared, self._prepared = self._prepared, None
        self.was_made_anew = True
        if prepared is not None and prepared.size_bytes == self.size_bytes:
            index = self.index = prepared.complete_index()
            self.max_timestamp = prepared.max_timestamp
            self.first_timestamp_ms = prepared.first_timestamp_ms
            self.is_doubtful = prepared.is_doubtful
        else:
            index = self.rebuild_index()
            self.complete_index()
        if self.is_doubtful:
            return index
        try:
            if self.known_transactions() is None:
                self.forget_transactions()
            self.save_index()
        except OSError:
            return index  # It stays in memory then.
        self.index = None
        return index

    def _mend_index_if_quick(self) -> MemoryIndex:
        """As ``mend_index``, where little must be read for it; else SegmentDamagedError is raised.

        Repairs is told of that, and has it done in a thread.
        """
        if self._prepared is None and self.size_bytes > _AT_ONCE_BYTES:
            what = f"{self.name}: the index of {self.path} is damaged and made anew now; ask again"
            raise SegmentDamagedError(what, self.base_offset)
        return self.mend_index()

    def save_index(self) -> None:
        """Write the index files. Raises OSError."""
        assert self.index is not None
        write_atomically(self._home.disk, self.index_path, self.index.encode_offsets())
        write_atomically(self._home.disk, self.time_index_path, self.index.encode_times())
        if self.transactions is not None:
            data = self.transactions.encode()
            write_atomically(self._home.disk, self.transaction_index_path, data)

    def read(
        self,
        position: int,
        offset: int,
        max_bytes: int,
        *,
        below: int,
        min_one: bool,
        epochs: EpochHistory,
    ) -> Read:
        """Whole, verified batches from ``position``, where the batch of base ``offset`` begins.

        See Log.read. Raises CorruptRecordError when the first batch is damaged; a damaged one
        further on ends the answer before it.
        """
        room = self.size_bytes - position
        data = self.read_at(self._worth_reading(position, max_bytes), position)
        try:
            header = next_header(data, 0, offset, room)
        except CorruptRecordError as error:
            raise self.damaged(position, error.message) from None
        if header.size_bytes > max_bytes and not min_one:
            return Read(b"", offset, position)
        if header.size_bytes > len(data):
            self._check_end(header, position)
            data = self.read_at(header.size_bytes, position)
        run = verify_run(data, offset, below=below, epochs=epochs)
        if run.damage is not None and run.size_bytes == 0:
            raise self.damaged(position, run.damage.what)
        if run.size_bytes != len(data):
            # Of much a look at it, instead of a copy; but no little of it is to keep all of it.
            is_most = run.size_bytes > max(_LARGE_BYTES, len(data) // 2)
            found = memoryview(data) if is_most else data
            return Read(found[: run.size_bytes], run.next_offset, position + run.size_bytes)
        return Read(data, run.next_offset, position + run.size_bytes)

    def _worth_reading(self, position: int, max_bytes: int) -> int:
        """How many bytes to read for up to ``max_bytes`` of whole batches.

        None of a large batch that would be cut off again, where an index in memory tells: it would
        be read for nothing, and all before it copied once more.
        """
        size = min(max(max_bytes, HEADER_BYTES), self.size_bytes - position)
        if self.index is None or position + size == self.size_bytes:
            return size
        end = self.index.floor_position(position + size)
        # Of what is behind a batch that is indexed, the index knows nothing for a while.
        large = position + size - end > _LARGE_BYTES
        return end - position if large and end > position else size

    def _check_end(self, header: BatchHeader, position: int) -> None:
        """Raise SegmentDamagedError where a batch would go on behind one that the index knows."""
        index = self.index if self.index is not None else self.file_index
        try:
            entry = index.next_offset(header.base_offset - self.base_offset)
            if entry is None or not position < entry.position < position + header.size_bytes:
                return
            self._check_entry(entry)
        except IndexDamagedError:
            return  # It can't tell; whoever searches in it has it made anew.
        raise self.damaged(position, goes_on_behind(header, position, entry.position))

    # --- time ------------------------------------------------------------------------------------

    def largest_timestamp(self, *, quickly: bool = False) -> TimeEntry | None:
        """The segment's largest timestamp and the first batch that has it; None when empty.

        NO_TIME when there are batches, but none has a record. ``quickly``: raise
        SegmentDamagedError rather than read much for an index that must be made anew.
        """
        if self.max_timestamp is None and self.size_bytes:
            if self.index is not None:
                return NO_TIME
            if self.learned_time is not None and self.learned_time[0] == self.size_bytes:
                self.max_timestamp, self._times_are_checked = self.learned_time[1], True
                return self.max_timestamp
            try:
                self.max_timestamp = self.largest_in_file()
            except IndexDamagedError:
                _ = self._mend_index_if_quick() if quickly else self.mend_index()
                self.max_timestamp = self.max_timestamp or NO_TIME
        return self.max_timestamp

    def largest_in_file(self) -> TimeEntry:
        """The last entry of the time index. Retention deletes by it, so it must not be too small.

        Raises IndexDamagedError when that can't be ruled out.
        """
        last, is_sealed = self.file_index.check_times()
        if last is None:
            if not is_sealed:
                raise IndexDamagedError(f"{self.time_index_path} has no entry")
            return NO_TIME
        self._check_time(last, is_sealed=is_sealed)
        if not is_sealed:
            for header, position in self._walk_from_batch(last):
                if header.record_count and header.max_timestamp_ms > last.timestamp_ms:
                    what = f"{self.time_index_path} lacks the batch at byte {position}"
                    raise IndexDamagedError(what)
        self._times_are_checked = True
        return last

    def _check_time(self, entry: TimeEntry, *, is_sealed: bool) -> None:
        """Compare an entry with the batch that it names. Raises IndexDamagedError.

        Where it is that batch which is not what was written, an index made anew from its header
        would repeat what is wrong: an entry that is sealed holds then, and for another one
        CorruptRecordError is raised.
        """
        placed = self.position_of(self.base_offset + entry.relative_offset)
        if placed is not None:
            header = placed.header
            relative = header.base_offset - self.base_offset
            if header.record_count and entry == (header.max_timestamp_ms, relative):
                return
            try:
                verify_batch(self.read_at(header.size_bytes, placed.position))
            except CorruptRecordError as error:
                if is_sealed:
                    return
                raise self.damaged(placed.position, error.message) from None
        raise IndexDamagedError(f"{self.time_index_path} names a time that is not there")

    def load_index(self) -> MemoryIndex:
        """Take the index from its files into memory.

        Raises IndexDamagedError, or CorruptRecordError where the log itself is damaged.
        """
        largest = self.max_timestamp or self.largest_in_file()
        if self.index is None:  # Otherwise it was damaged, and has been made anew.
            self.index = self.file_index.load()
        self.max_timestamp = None if largest == NO_TIME else largest
        return self.index

    def walk_from_time(self, timestamp_ms: int) -> Iterator[Placed]:
        """The batches from one before which every record is earlier than ``timestamp_ms``."""
        entry = self._time_entry(lambda index: index.floor_time(timestamp_ms))
        return self._walk_from_batch(entry)

    def walk_from_largest_below(self, offset: int) -> Iterator[Placed]:
        """The batches from one before which none is later than it; it begins below ``offset``."""
        relative = offset - self.base_offset
        entry = self._time_entry(lambda index: index.last_time_below(relative))
        return self._walk_from_batch(entry)

    def _time_entry(
        self, find: Callable[[MemoryIndex | FileIndex], TimeEntry | None]
    ) -> TimeEntry | None:
        if self.index is not None:
            return find(self.index)
        try:
            if not self._times_are_checked:
                self.file_index.check_times()
                self._times_are_checked = True
            entry = find(self.file_index)
            if entry is not None:
                self._check_time(entry, is_sealed=False)  # Of the file as a whole it was known.
        except IndexDamagedError:
            return find(self._mend_index_if_quick())
        return entry

    def _walk_from_batch(self, entry: TimeEntry | None) -> Iterator[Placed]:
        relative = entry.relative_offset if entry is not None else 0
        return self.walk_from_offset(self.base_offset + relative)

    # --- cutting ---------------------------------------------------------------------------------

    def truncate(self, position: int, offset: int) -> None:
        """Cut the batches from ``position`` on; ``offset`` is the base offset of the first of them.

        Raises OSError, StorageError or CorruptRecordError.
        """
        self._home.disk.truncate(self.file.fd, position)
        self.size_bytes = position
        index = self.index
        assert index is not None, "make it active first"
        relative = offset - self.base_offset
        index.truncate(relative)
        self._refresh_timestamps(relative)
        if self.transactions is not None:
            self.transactions.truncate(offset)

    def activate(self, interval_bytes: int) -> None:
        """Take the indexes into memory, so that the segment can be appended to or cut.

        That of aborted transactions goes when it is damaged: nobody needs it as long as nobody asks
        for it. Raises OSError when its file stays.
        """
        self._prepared = None
        self.was_made_anew = False
        transactions = self.known_transactions()
        if transactions is None:
            self.forget_transactions()
        else:
            self.transactions = transactions.copy()  # As the one below.
        if self.index is not None:
            self.index = self.index.copy()  # A flush may be writing the old one.
            return
        try:
            self.load_index()
        except IndexDamagedError:
            self.rebuild_index(interval_bytes)
            return
        self._home.forget(self)

    def _refresh_timestamps(self, relative_end: int) -> None:
        """Find the largest timestamp again after a cut."""
        assert self.index is not None
        if self.size_bytes == 0:
            self.max_timestamp = self.first_timestamp_ms = None
            return
        # Whatever comes before an entry for offsets, the entries for times have the largest of it.
        self.max_timestamp = self.index.last_time_below(relative_end)
        last = self.index.floor_offset(relative_end)
        for header, _ in self.walk(last.position, self.base_offset + last.relative_offset):
            self._note_time(header, header.base_offset - self.base_offset)

    def roll_timestamp_ms(self) -> int | None:
        """The timestamp that the segment's age counts from: its first batch's (KIP-33)."""
        if self.first_timestamp_ms is None and self.size_bytes:
            header = next(self.walk(0, self.base_offset)).header
            self.first_timestamp_ms = header.max_timestamp_ms
        return self.first_timestamp_ms
