"""The aborted transactions of a log, found in its segments' indexes, made anew if need be.

To make one anew is to read all of its segment. Only where that has an abort mark it must be
known as well which transactions were open when the segment began: by the newest producer snapshot
before it, and the headers that follow that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.transactions import EndedTransaction, OpenTransactions
from penstock.broker.storage.checkpoints import newest_snapshot, write_atomically
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.index import IndexDamagedError
from penstock.broker.storage.log_files import LogFiles
from penstock.broker.storage.producers import LogProducers
from penstock.broker.storage.segment import Segment
from penstock.broker.storage.transaction_index import TransactionIndex
from penstock.broker.storage.walking import ChangedError, Source, batches_between, walk_file
from penstock.wire.batch import OFFSET_MAX
from penstock.wire.errors import CorruptRecordError, StorageError
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import BatchHeader, verify_batch

_log = structlog.get_logger()


class Rebuild:
    """Makes a segment's transaction index anew. ``run`` in any thread, then ``index`` on the log's.

    ``sources`` are the log's segments up to this one, as they were when it was begun.
    """

    def __init__(
        self, disk: Disk, directory: Path, sources: list[Source], epochs: EpochHistory
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._sources = sources
        self._epochs = epochs
        self._place = 0, sources[-1].base_offset  # Up to there it was read.
        self._marked: list[tuple[BatchHeader, bool]] = []  # And whether it aborts.
        self._writing: set[int] = set()  # The producers that have written since their last mark.
        self._aborts = False
        self._before: OpenTransactions | None = None  # What was open where the segment begins.

    def run(self) -> None:
        """Read what there was when it was begun. Raises nothing: ``index`` tries again."""
        with contextlib.suppress(OSError, CorruptRecordError, ChangedError):
            self._read(self._sources[-1].size_bytes)

    def index(self, size_bytes: int) -> TransactionIndex:
        """The index when the segment has so many bytes; what is new is read here and now.

        Raises CorruptRecordError, or ChangedError when a segment before it is another by now or
        missing, or OSError.
        """
        self._read(size_bytes)
        index = TransactionIndex()
        if self._before is None:
            return index
        transactions = self._before.copy()
        for header, aborts in self._marked:
            ended = transactions.note(header, header.base_offset)
            if ended is not None and aborts:
                index.append(ended)
        return index

    def _read(self, size_bytes: int) -> None:
        self._scan(size_bytes)
        if self._aborts and self._before is None:
            self._before = self._open_before()

    def _scan(self, size_bytes: int) -> None:
        source = self._sources[-1]
        try:
            fd = self._disk.open(source.path, os.O_RDONLY)
        except FileNotFoundError:
            raise ChangedError from None
        try:
            for header, position in walk_file(self._disk, fd, self._place, size_bytes):
                self._note(header, fd, position)
                self._place = position + header.size_bytes, header.next_offset
        except CorruptRecordError as error:
            raise CorruptRecordError(f"{error.message} (segment {source.path})") from None
        finally:
            os.close(fd)

    def _note(self, header: BatchHeader, fd: int, position: int) -> None:
        batch = self._disk.read_at(fd, header.size_bytes, position)
        verify_batch(batch)  # What is made of a header that is not as it was is believed later.
        producer_id = header.producer_id
        if producer_id < 0:
            return
        if header.is_control:
            aborts = marker_type(batch) is MarkerType.ABORT
            self._aborts |= aborts
            self._marked.append((header, aborts))
            self._writing.discard(producer_id)
        elif header.is_transactional and producer_id not in self._writing:
            self._marked.append((header, False))
            self._writing.add(producer_id)

    def _open_before(self) -> OpenTransactions:
        end = self._sources[-1].base_offset
        begin = self._sources[0].base_offset
        transactions = OpenTransactions()
        found = newest_snapshot(self._directory, end, self._epochs)
        if found is not None and found[1] >= begin:
            transactions, begin = found[0].transactions, found[1]
        sources = [source for source in self._sources if source.base_offset < end]
        later = [at for at, source in enumerate(sources) if source.base_offset <= begin]
        if begin < end:
            for header, _ in batches_between(self._disk, sources[later[-1] :], begin, end):
                transactions.note(header, header.base_offset)
        return transactions


def begin_rebuild(
    disk: Disk, segments: Sequence[Segment], segment: Segment, epochs: EpochHistory
) -> Rebuild:
    """What makes the index of one of a log's segments anew."""
    sources = sources_of(one for one in segments if one.base_offset <= segment.base_offset)
    return Rebuild(disk, segment.directory, sources, EpochHistory(epochs.entries))


def sources_of(segments: Iterable[Segment]) -> list[Source]:
    """The segments as they are now."""
    return [Source(one.path, one.base_offset, one.size_bytes) for one in segments]


class AbortedTransactions:
    """What of a log was aborted. Used on the log's thread."""

    __slots__ = ("_epochs", "_files", "_found", "_home", "_name", "_producers")

    def __init__(
        self,
        home: DataDirectory,
        files: LogFiles,
        epochs: EpochHistory,
        producers: LogProducers,
        *,
        name: str,
    ) -> None:
        self._home = home
        self._files = files
        self._epochs = epochs
        self._producers = producers
        self._name = name
        # By other threads, for who looks next; another one after a cut.
        self._found: dict[Segment, TransactionIndex | Rebuild] = {}

    def note(self, transactions: Sequence[EndedTransaction]) -> None:
        """These were aborted by marks that have just been appended, in this order."""
        for transaction in transactions:
            index = self._files.segment_of(transaction.last_offset).transactions
            if index is not None:  # Otherwise it is made anew when it is asked for.
                index.append(transaction)

    def find(self, offset: int, below: int) -> list[EndedTransaction]:
        """Those that have, or may have, records from ``offset`` to below ``below``, by their marks.

        Where an index is missing or wrong it is made anew, which reads all of its
        segment; see ``cold``. Raises CorruptRecordError where the log is damaged, StorageError.
        """
        found: list[EndedTransaction] = []
        for segment in self._segments_with_marks(offset):
            known = segment.transactions
            if known is not None and not len(known):  # Most are, and there may be thousands.
                continue
            transactions, is_complete = self._index(segment).aborted(offset, below)
            found += transactions
            if is_complete:
                break
        return found

    def cold(self, offset: int) -> Callable[[], None] | None:
        """None when ``find`` need not read files; else what does, once, in any thread."""
        found = self._found
        if found:
            self._drop_what_nobody_wants()
        missing = [
            one
            for one in self._segments_with_marks(offset)
            if one.transactions is None and one not in found
        ]
        if not missing:
            return None
        segments = list(self._files.segments)
        sources, epochs = sources_of(segments), EpochHistory(self._epochs.entries)
        disk = self._home.disk

        def run() -> None:
            for segment in missing:
                up_to = segments.index(segment) + 1
                found[segment] = _found_by_reading(disk, sources[:up_to], epochs)

        return run

    def _drop_what_nobody_wants(self) -> None:
        """What was found of segments that are known by now, or gone."""
        segments, found = self._files.segments, self._found
        for one in list(found):  # At once: another thread may be adding to it.
            if one not in segments or one.transactions is not None:
                del found[one]

    def cut(self) -> None:
        """The log was cut: what was begun before may have read what is gone."""
        self._found = {}

    def _segments_with_marks(self, offset: int) -> list[Segment]:
        """The segments that hold the offset and what follows, up to the last transaction's."""
        state = self._producers.state
        # A batch that is damaged may be a mark, for all that is known.
        last_offset = OFFSET_MAX if state.doubted else state.transactions.last_offset
        return self._files.segments_between(offset, last_offset) if offset <= last_offset else []

    def _index(self, segment: Segment) -> TransactionIndex:
        found = self._found.pop(segment, None)
        if segment.transactions is None and isinstance(found, TransactionIndex):
            segment.transactions = found
        index = segment.known_transactions()
        if index is None:
            rebuild = found if isinstance(found, Rebuild) else None
            index = segment.transactions = self._made_anew(segment, rebuild)
            _log.info("transaction_index_made_anew", segment=str(segment.path))
            if segment.index is None:  # Else a flush writes it, with the others.
                with contextlib.suppress(OSError):  # It stays in memory then.
                    write_atomically(
                        self._home.disk, segment.transaction_index_path, index.encode()
                    )
        return index

    def _made_anew(self, segment: Segment, rebuild: Rebuild | None) -> TransactionIndex:
        if rebuild is not None:
            with contextlib.suppress(ChangedError, CorruptRecordError, OSError):
                return rebuild.index(segment.size_bytes)
        doing = f"making {segment.transaction_index_path} anew"
        try:
            begun = begin_rebuild(self._home.disk, self._files.segments, segment, self._epochs)
            return begun.index(segment.size_bytes)
        except ChangedError:
            raise StorageError(
                f"{self._name}: {doing} failed: a segment before it is missing or has a gap; it "
                "is copied anew from its leader if another replica is in sync"
            ) from None
        except CorruptRecordError as error:
            raise CorruptRecordError(f"{self._name}: {doing} failed: {error.message}") from None
        except OSError as error:
            raise self._home.translate(error, doing) from error


def _found_by_reading(
    disk: Disk, sources: list[Source], epochs: EpochHistory
) -> TransactionIndex | Rebuild:
    """The index of the last of a log's segments from its file, or what makes it anew."""
    segment = sources[-1]
    with contextlib.suppress(IndexDamagedError):
        path = segment.path.with_suffix(".txnindex")
        return TransactionIndex.load(path, segment.base_offset)
    rebuild = Rebuild(disk, segment.path.parent, sources, epochs)
    rebuild.run()
    return rebuild
