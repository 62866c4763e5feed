"""Logs in memory that hold real record batches."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import (
    AppendInfo,
    Buffer,
    DamagedLogError,
    EpochEnd,
    OlderEpochError,
    TimestampedOffset,
)
from penstock.broker.core.producer_stage import ProducerStage, staged_markers
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.transactions import EndedTransaction, Marker, OpenTransaction
from penstock.wire.errors import (
    CorruptRecordError,
    DiskFullError,
    OffsetOutOfRangeError,
    StorageError,
)
from penstock.wire.ids import TopicIdPartition, TopicPartition
from penstock.wire.markers import MarkerType, mark_of, marker_type
from penstock.wire.records import (
    decode_batch,
    iter_batches,
    offset_patch,
    parse_header,
    verify_batch,
)


class MemoryLog:
    """The Log port in memory. ``durable_offset`` moves by ``flush`` alone."""

    def __init__(self, key: TopicIdPartition) -> None:
        self.key = key
        self.batches: list[bytes] = []
        self.producers = ProducerState()
        self.aborted: list[EndedTransaction] = []
        self.epochs = EpochHistory()
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.durable_offset = 0
        self.durable_start_offset = 0
        self.committed_offset = 0  # As it was told.
        self.holds_start = False  # Its start does not become durable.
        self.broken = False
        self.knows_no_producers = False
        self.begun_with = b""  # What it was told of producers when it began anew.
        self.cold: list[Callable[[], None]] = []  # Jobs that reads are to wait for.
        self.damaged_at: set[int] = set()  # Reads from there are refused.
        self.full = False
        self.has_room = True  # What it says of itself.
        self.refusals = 0  # Appends for which there was no room.

    @property
    def last_epoch(self) -> int:
        return self.epochs.last_epoch

    def _check(self) -> None:
        if self.broken:
            raise StorageError("the disk is broken")

    def append_as_leader(
        self,
        records: Buffer,
        leader_epoch: int,
        *,
        now_ms: int,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        self._check()
        batches = []
        end = self.log_end_offset
        for _, batch in iter_batches(records):
            header = verify_batch(batch)
            if header.producer_id >= 0:
                ProducerStage(self.producers).check_transaction(header, verified)
            batches.append(offset_patch(header, end, leader_epoch) + bytes(batch[16:]))
            end += header.last_offset_delta + 1
        if not batches:
            raise CorruptRecordError("no batch")
        return self._append(batches)

    def append_markers(
        self, markers: Sequence[Marker], leader_epoch: int, *, now_ms: int
    ) -> AppendInfo:
        self._check()
        placed = staged_markers(
            ProducerStage(self.producers),
            markers,
            base_offset=self.log_end_offset,
            leader_epoch=leader_epoch,
            now_ms=now_ms,
            seen_ms=now_ms,
        )
        if not placed:
            return AppendInfo(-1, -1, -1, 0)
        return self._append([data for _, data in placed])

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        return self.producers.has_open_transaction(producer_id, producer_epoch)

    def open_transactions(self) -> list[OpenTransaction]:
        return self.producers.open_transactions()

    def last_stable_offset(self, high_watermark: int) -> int:
        stable = self.producers.transactions.stable_offset(high_watermark)
        return min(max(stable, self.log_start_offset), high_watermark)

    def aborted_transactions(self, offset: int, *, below: int) -> list[EndedTransaction]:
        return [
            one for one in self.aborted if one.last_offset >= offset and one.first_offset < below
        ]

    def cold_aborted(self, offset: int) -> Callable[[], None] | None:
        return None

    def append_as_follower(self, records: Buffer) -> AppendInfo:
        self._check()
        batches = [bytes(batch) for _, batch in iter_batches(records)]
        for batch in batches:
            verify_batch(batch)
        if parse_header(batches[0]).base_offset != self.log_end_offset:
            raise CorruptRecordError("the batch does not continue the log")
        before = self.epochs.epoch_at(self.log_end_offset - 1)
        if parse_header(batches[0]).leader_epoch < before:
            raise OlderEpochError(f"epoch {before} wrote before it")
        return self._append(batches)

    def _append(self, batches: list[bytes]) -> AppendInfo:
        if self.full:
            self.refusals += 1
            raise DiskFullError("no room")
        base = self.log_end_offset
        for batch in batches:
            header = parse_header(batch)
            self.epochs.assign(header.leader_epoch, header.base_offset)
            self._store(batch)
            self.log_end_offset = header.next_offset
        return AppendInfo(
            base,
            self.log_end_offset - 1,
            -1,
            sum(map(len, batches)),
            records=b"" if self.cold else b"".join(batches),
        )

    def _store(self, batch: bytes) -> None:
        self.batches.append(batch)
        header = parse_header(batch)
        ended = self.producers.record(header, header.base_offset, 0, mark_of(header, batch))
        if ended is not None and marker_type(batch) is MarkerType.ABORT:
            self.aborted.append(ended)

    def read(self, offset: int, max_bytes: int, *, below: int, min_one: bool = True) -> bytes:
        self._check()
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise OffsetOutOfRangeError(f"{offset} is outside")
        if offset in self.damaged_at:
            raise CorruptRecordError(f"{offset} is damaged")
        out: list[bytes] = []
        size = 0
        first = bisect_right(
            self.batches, offset, key=lambda batch: parse_header(batch).next_offset
        )
        for batch in islice(self.batches, first, None):
            header = parse_header(batch)
            if header.next_offset > below or (
                size + len(batch) > max_bytes and not (min_one and not out)
            ):
                break
            out.append(batch)
            size += len(batch)
        return b"".join(out)

    def cold_read(self, offset: int, max_bytes: int) -> Callable[[], None] | None:
        self._check()
        return self.cold.pop(0) if self.cold else None

    def truncate_to(self, offset: int) -> None:
        self._check()
        kept = [b for b in self.batches if parse_header(b).next_offset <= offset]
        self.batches, self.producers, self.aborted = [], ProducerState(), []
        for batch in kept:
            self._store(batch)
        end = parse_header(self.batches[-1]).next_offset if self.batches else self.log_start_offset
        self.log_end_offset = min(self.log_end_offset, max(end, self.log_start_offset))
        self.epochs.truncate_from_end(self.log_end_offset)
        self.durable_offset = min(self.durable_offset, self.log_end_offset)

    def note_committed(self, offset: int) -> None:
        self.committed_offset = offset
        self.producers.transactions.committed(offset)

    def producers_below(self, offset: int) -> bytes:
        return f"below {offset}".encode()

    def truncate_fully_and_start_at(self, offset: int, producers: bytes = b"") -> None:
        self._check()
        self.batches, self.producers, self.aborted = [], ProducerState(), []
        self.epochs.clear()
        self.begun_with = producers
        self.log_start_offset = self.log_end_offset = self.durable_offset = offset
        self.durable_start_offset = offset

    def advance_log_start(self, offset: int) -> None:
        self._check()
        self.log_start_offset = max(self.log_start_offset, offset)
        if not self.holds_start:
            self.durable_start_offset = self.log_start_offset
        self.epochs.truncate_from_start(self.log_start_offset)

    def assign_epoch(self, leader_epoch: int) -> None:
        self._check()
        self.epochs.assign(leader_epoch, self.log_end_offset)

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        return self.epochs.end_of_epoch(leader_epoch, self.log_end_offset)

    def _records(self, below: int) -> list[TimestampedOffset]:
        return [
            TimestampedOffset(record.offset, record.timestamp_ms, parse_header(batch).leader_epoch)
            for batch in self.batches
            for record in decode_batch(batch)
            if self.log_start_offset <= record.offset < below
        ]

    def cold_times(self, *, below: int) -> Callable[[], None] | None:
        return None

    def offset_for_timestamp(self, timestamp_ms: int, *, below: int) -> TimestampedOffset | None:
        return next((r for r in self._records(below) if r.timestamp_ms >= timestamp_ms), None)

    def max_timestamp(self, *, below: int) -> TimestampedOffset | None:
        return max(self._records(below), key=lambda r: r.timestamp_ms, default=None)

    def values(self) -> list[bytes]:
        """The values from the log's start to its end."""
        return [
            record.value or b""
            for batch in self.batches
            for record in decode_batch(batch)
            if record.offset >= self.log_start_offset
        ]


class MemoryLogs:
    """The LogStore port in memory: flushes one turn of the loop later, unless ``hold``."""

    def __init__(self) -> None:
        self.open: dict[TopicIdPartition, MemoryLog] = {}
        self.saved: dict[TopicIdPartition, int] = {}
        self.configs: dict[bytes, dict[str, str]] = {}
        self.deleted: list[TopicIdPartition] = []
        self.kept: list[TopicIdPartition] = []  # Damaged, in a place of their own.
        self.aside: dict[TopicIdPartition, MemoryLog] = {}
        self.hold = False
        self.away: set[TopicIdPartition] = set()  # On a disk that has failed.
        self.shut: dict[TopicIdPartition, DamagedLogError] = {}  # Those that do not open.
        self.made_new: dict[TopicIdPartition, bool] = {}  # What was said of each log not found.
        self.full = False  # No room for another log.
        self.refusals = 0
        self.flushes = 0
        self.on_durable: Callable[[MemoryLog], None] = lambda _: None

    def logs(self) -> Iterable[MemoryLog]:
        return self.open.values()

    def get_or_create(
        self,
        topic: str,
        partition: int,
        topic_id: bytes,
        configs: Mapping[str, str],
        *,
        internal: bool,
        is_new: bool,
    ) -> MemoryLog:
        key = TopicIdPartition(topic_id, partition)  # type: ignore[arg-type]
        if key in self.away and not is_new:
            raise StorageError("a disk that may have it has failed")
        if key in self.shut:
            raise self.shut[key]
        if key not in self.open:
            self.made_new[key] = is_new
        self.configs[topic_id] = dict(configs)
        if self.full and key not in self.open:
            self.refusals += 1
            raise DiskFullError("no room")
        return self.open.setdefault(key, MemoryLog(key))

    async def make_ahead(
        self, wanted: Mapping[TopicIdPartition, TopicPartition], *, is_new: bool
    ) -> None:
        return  # Memory takes no time.

    def delete(self, key: TopicIdPartition) -> None:
        self.deleted.append(key)
        self.open.pop(key, None)
        self.shut.pop(key, None)

    def keep_damaged(self, key: TopicIdPartition) -> Path:
        self.kept.append(key)
        self.open.pop(key, None)
        self.shut.pop(key, None)
        return Path("kept")

    def set_aside(self, key: TopicIdPartition) -> None:
        log = self.open.pop(key, None)
        if log is not None:
            self.aside[key] = log

    def update_configs(self, topic_id: bytes, configs: Mapping[str, str]) -> None:
        self.configs[topic_id] = dict(configs)

    def flush_soon(self, log: MemoryLog) -> None:
        if not self.hold:
            asyncio.get_running_loop().call_soon(self.flush, log)

    def flush(self, log: MemoryLog) -> None:
        if log.durable_offset < log.log_end_offset:
            self.flushes += 1
            log.durable_offset = log.log_end_offset
            self.on_durable(log)

    def release(self) -> None:
        """Flush what was held back."""
        self.hold = False
        for log in list(self.open.values()):
            self.flush(log)

    def high_watermark(self, key: TopicIdPartition) -> int:
        return self.saved.get(key, 0)

    def checkpoint_high_watermark(self, key: TopicIdPartition, high_watermark: int) -> None:
        self.saved[key] = high_watermark

    def doubt_run(self) -> None:
        return  # It is not asked what it lost.

    def crash(self) -> None:
        """Lose what was not flushed, and the last notes."""
        for log in self.open.values():
            log.truncate_to(log.durable_offset)
        self.saved = {key: value // 2 for key, value in self.saved.items()}
