"""What the replication cores and shells ask of a partition's log.

The files of penstock.broker.storage implement it for real, the simulator in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.broker.core.producer_entry import ProducerEntry
from penstock.broker.core.transactions import (
    EndedTransaction,
    Marker,
    OpenTransaction,
    OpenTransactions,
)
from penstock.wire.errors import CorruptRecordError, ErrorCode, StorageError
from penstock.wire.ids import LeaderEpoch

Buffer = bytes | bytearray | memoryview


class OlderEpochError(CorruptRecordError, code=ErrorCode.CORRUPT_MESSAGE, retriable=True):
    """What a leader sends is of an older leader epoch than what the log has before it."""


class DamagedLogError(
    StorageError, code=ErrorCode.STORAGE_ERROR, retriable=True, refresh_metadata=True
):
    """A log can't be used: records that were on the disk are gone, or are not what was written.

    The disk works otherwise. All below ``end_offset`` was on it, and all below
    ``committed_offset`` is known to be committed: whoever has less can't stand in for it.
    """

    def __init__(self, message: str, end_offset: int, committed_offset: int = 0) -> None:
        super().__init__(message)
        self.end_offset = end_offset
        self.committed_offset = committed_offset


@dataclass(frozen=True, slots=True)
class AppendInfo:
    """What an append did. ``duplicate``: the batch was in the log already, at this offset.

    ``last_offset`` is that of the last record; offsets are -1 when nothing was appended.
    ``records``: what a leader appended, as it stands in the log, where that is at hand; else empty.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    size_bytes: int
    duplicate: bool = False
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """A leader epoch and the first offset after it; epoch and offset -1 when unknown."""

    leader_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TimestampedOffset:
    """A record found by time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class KnownProducers(Protocol):
    """What a log knows of those that wrote to it."""

    @property
    def transactions(self) -> OpenTransactions:
        """The transactions that are open at its end."""
        ...

    def entry(self, producer_id: int) -> ProducerEntry | None:
        """What is known of a producer."""
        ...

    def entries(self) -> Iterable[tuple[int, ProducerEntry]]:
        """Every producer id with what is known of it, in no particular order."""
        ...


class Log(Protocol):
    """One partition's log. All methods are called on one thread (the event loop's).

    Offsets: ``log_start_offset`` <= ``durable_offset`` <= ``log_end_offset``. Under
    ``flush.policy`` interval and os, durable_offset is log_end_offset: that is what these
    policies mean.
    """

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        ...

    @property
    def durable_start_offset(self) -> int:
        """No crash makes the log begin earlier than here; at most log_start_offset."""
        ...

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get."""
        ...

    @property
    def durable_offset(self) -> int:
        """Everything below survives what the flush policy promises to survive."""
        ...

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last batch ever appended (also by cache), -1 for none."""
        ...

    @property
    def knows_no_producers(self) -> bool:
        """Whether the log is empty and began above offset 0 by itself, handed nothing over.

        False once ``truncate_fully_and_start_at`` was called, whatever that was given.
        """
        ...

    @property
    def has_room(self) -> bool:
        """Whether there seems to be room on the disk for what a leader sends; no promise."""
        ...

    def append_as_leader(
        self,
        records: Buffer,
        leader_epoch: LeaderEpoch,
        *,
        now_ms: int,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """Check and append a producer's batches, giving them offsets and the leader epoch.

        Checks magic, length, CRC, counts, ``max.message.bytes`` and producer sequences of every
        batch before anything is written: either all batches are appended or none is. A
        transactional batch is appended only if its transaction, named by producer id and epoch, is
        open here, or is the ``verified`` one, which the coordinator says the partition is in. A
        producer whose transaction is open writes nothing outside of it. Only the cluster's own logs
        take transactional batches without a sequence. Raises CorruptRecordError,
        RecordTooLargeError, InvalidRecordError, OutOfOrderSequenceError, DuplicateSequenceError,
        InvalidProducerEpochError, InvalidTxnStateError, DiskFullError or StorageError.
        """
        ...

    def append_markers(
        self, markers: Sequence[Marker], leader_epoch: LeaderEpoch, *, now_ms: int
    ) -> AppendInfo:
        """Append the control batches that end transactions, all of them or none.

        A marker is left out when its producer's newest epoch here is its own or a newer one: it is
        here already. Offsets are -1 when nothing was to be appended. Raises DiskFullError,
        StorageError or FencedLeaderEpochError.
        """
        ...

    @property
    def producers(self) -> KnownProducers:
        """The producers, to look at."""
        ...

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether that transaction is open at the log's end."""
        ...

    def open_transactions(self) -> Sequence[OpenTransaction]:
        """The transactions that are open at the log's end, the oldest first."""
        ...

    def last_stable_offset(self, high_watermark: int) -> int:
        """The first offset of the oldest transaction that is open as of the high watermark.

        Where none is, the high watermark. One whose mark is not committed is open. Never goes back
        while the high watermark does not, nor below log_start_offset while that is not above the
        high watermark. ``note_committed`` has said what is committed.
        """
        ...

    def aborted_transactions(self, offset: int, *, below: int) -> Sequence[EndedTransaction]:
        """The aborted transactions that have, or may have, records in that range, by their marks.

        Raises OffsetOutOfRangeError outside log_start_offset..log_end_offset, CorruptRecordError
        or StorageError. May wait for the disk; see ``cold_aborted``.
        """
        ...

    def cold_aborted(self, offset: int) -> Callable[[], None] | None:
        """None when ``aborted_transactions`` knows what it needs; else what finds out.

        That must be called, once, in any thread. It is harmless whatever happens to the log
        meanwhile. Raises as ``aborted_transactions``.
        """
        ...

    def append_as_follower(self, records: Buffer) -> AppendInfo:
        """Append what the leader pushed, as it is. The first batch must start at log_end_offset.

        An empty log also takes one that begins before and holds log_end_offset: records were
        deleted up to within it, and batches are not split. log_start_offset stays where it was.

        Raises CorruptRecordError when a CRC or an offset does not fit; nothing is then written.
        """
        ...

    def read(self, offset: int, max_bytes: int, *, below: int, min_one: bool = True) -> Buffer:
        """Whole batches from the one that holds ``offset``, all of them below offset ``below``.

        At most ``max_bytes``, but the first batch whatever its size when ``min_one``. Empty when
        there is nothing. What comes may be a part of a larger buffer. Raises OffsetOutOfRangeError
        outside log_start_offset..log_end_offset and CorruptRecordError for a batch that fails its
        checksum.
        """
        ...

    def cold_read(self, offset: int, max_bytes: int) -> Callable[[], None] | None:
        """None when ``read`` finds what it wants in memory; else what brings it there.

        That must be called, once, in any thread; a ``read`` after it does not wait for the disk.
        It is harmless whatever happens to the log meanwhile. Raises as ``read``.
        """
        ...

    def truncate_to(self, offset: int) -> None:
        """Cut everything at and after ``offset``: batches, epochs and producer state.

        The cut is durable before anything that is appended later is. DiskFullError or
        RequestTimedOutError: nothing has changed, and it is to be tried again.
        """
        ...

    def note_committed(self, offset: int) -> None:
        """All below ``offset`` is committed, also marks of transactions.

        A cut below it is rare, and may be slow.
        """
        ...

    def truncate_fully_and_start_at(self, offset: int, producers: bytes = b"") -> None:
        """Drop everything; the log then starts and ends at ``offset``.

        ``producers`` is what ``producers_below`` says there in the leader's log. Without it, or
        when it is damaged, nobody's first sequence can be judged.
        """
        ...

    def producers_below(self, offset: int) -> bytes:
        """What producers wrote below ``offset``, for a replica that begins there; may be empty."""
        ...

    def advance_log_start(self, offset: int) -> None:
        """Move log_start_offset up to ``offset`` (never down); durable_start_offset follows."""
        ...

    def assign_epoch(self, leader_epoch: LeaderEpoch) -> None:
        """Note that ``leader_epoch`` begins at log_end_offset, when this log's node leads in it."""
        ...

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        """The largest known epoch not above ``leader_epoch``, and where it ends (KIP-101, KIP-279).

        For the newest epoch that is log_end_offset. EpochEnd(-1, -1) when none is that old.
        """
        ...

    def cold_times(self, *, below: int) -> Callable[[], None] | None:
        """None when searches by time below offset ``below`` know in which segments to look.

        Else what finds out. That is to be called, once, in any thread; a search after it does not
        wait for the files of segments that can't hold the answer. It is harmless whatever happens
        to the log meanwhile. Raises StorageError.
        """
        ...

    def offset_for_timestamp(self, timestamp_ms: int, *, below: int) -> TimestampedOffset | None:
        """The first record below offset ``below`` whose timestamp is at or after the one given."""
        ...

    def max_timestamp(self, *, below: int) -> TimestampedOffset | None:
        """The record with the largest timestamp below offset ``below``."""
        ...
