"""What stays of a batch. Pure.

==============================================  =================================================
record                                          stays
==============================================  =================================================
at or after the end of what the map has seen    yes
before the log's start                          no
of an aborted transaction                       no, nor does it replace any
without a key                                   no: nobody could replace it
whose key has a later offset in the map         no
a tombstone (no value), the last of its key     until its batch's delete horizon (KIP-534), which
                                                is set by the first clean that comes past it
any other                                       yes
==============================================  =================================================

A batch that is left without records goes, but the last of a producer below the end of the clean
stays, empty: its sequence says what the producer must write next. A later one, which the clean does
not reach, says so as well, but need not be committed: when the tail is cut it is gone.

A clean ends at the last stable offset at the latest, so each transaction that it comes upon is
decided. The mark that ends it stays as long as a batch of it does: without it the batches would
belong to the producer's next one. From the first clean on that leaves none of them it has a delete
horizon, as a tombstone has, and then it goes; but the last one of a producer that is remembered
stays, as its epoch fences what comes late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.core.transactions import EndedTransaction
from penstock.broker.storage.cleaner.offset_map import OffsetMap
from penstock.broker.storage.disk import Buffer
from penstock.wire.records import MAX_RECORDS_BYTES, BatchHeader
from penstock.wire.rewriting import Span, emptied, is_filler, read_spans, with_only
from penstock.wire.topic_config import MAX_MESSAGE_BYTES

_FOREVER: Final = 2**63 - 1


class AbortedRanges:
    """Which batches belong to aborted transactions, by where these begin and end."""

    __slots__ = ("_by_producer",)

    def __init__(self, transactions: Iterable[EndedTransaction]) -> None:
        self._by_producer: dict[int, list[EndedTransaction]] = {}  # They follow each other.
        for one in sorted(transactions, key=lambda one: one.last_offset):
            self._by_producer.setdefault(one.producer_id, []).append(one)

    def covers(self, header: BatchHeader) -> bool:
        """Whether the batch is of one."""
        if not header.is_transactional or header.is_control:
            return False
        mine = self._by_producer.get(header.producer_id, ())
        at = bisect_right(mine, header.base_offset, key=lambda one: one.last_offset)
        return at < len(mine) and mine[at].first_offset <= header.base_offset


@dataclass(slots=True)
class Filter:
    """What a clean goes by; ``horizon_ms`` is the next time at which a tombstone may go.

    ``last_batches``: the base offset of the last batch below ``end_offset`` of each producer that
    is remembered; -1 for one of which it is not known, and all batches stay. ``epochs``: the newest
    epoch of each of them. Batches are to be given to it in the log's order, from its first one on.
    """

    latest: OffsetMap
    aborted: AbortedRanges
    log_start_offset: int
    end_offset: int
    last_batches: Mapping[int, int]
    epochs: Mapping[int, int]
    now_ms: int
    delete_retention_ms: int
    horizon_ms: int = field(default=_FOREVER)
    _in_log: set[int] = field(default_factory=set)  # Producers whose transaction has a batch left.

    def apply(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        """What is to stand in place of the batch: itself, another, or nothing (None).

        Raises CorruptRecordError when its records can't be read.
        """
        if header.base_offset >= self.end_offset:
            return batch
        if header.is_control:
            return self._mark(header, batch)
        kept = self._records_of(header, batch)
        if kept is not None and header.is_transactional:
            self._in_log.add(header.producer_id)
        return kept

    def _records_of(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        kept: Sequence[Span] = ()
        is_read = header.record_count and header.last_offset >= self.log_start_offset
        if is_read and not self.aborted.covers(header):
            records = read_spans(batch, header, max_bytes=MAX_RECORDS_BYTES)
            kept = [span for span in records.spans if self._stays(span, header)]
            horizon_ms = self._new_horizon(header, kept)
            if kept and len(kept) == header.record_count and horizon_ms is None:
                return batch
            if kept:
                filtered = with_only(header, records, kept, delete_horizon_ms=horizon_ms)
                # Its producer may have compressed it better: then all of its records stay.
                return filtered if len(filtered) <= MAX_MESSAGE_BYTES else batch
        if is_filler(header) or header.base_offset < self.last_batches.get(
            header.producer_id, _FOREVER
        ):
            return None
        return batch if header.record_count == 0 else emptied(header)

    def _mark(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        producer_id = header.producer_id
        is_needed = producer_id in self._in_log
        self._in_log.discard(producer_id)
        is_last = header.producer_epoch >= self.epochs.get(producer_id, _FOREVER)
        if producer_id < 0 or is_needed or is_last:
            return batch
        horizon_ms = header.delete_horizon_ms
        if horizon_ms is not None and self.now_ms >= horizon_ms:
            return None
        if horizon_ms is not None:
            self.horizon_ms = min(self.horizon_ms, horizon_ms)
            return batch
        horizon_ms = self._horizon_from_now()
        records = read_spans(batch, header, max_bytes=MAX_RECORDS_BYTES)
        return with_only(header, records, records.spans, delete_horizon_ms=horizon_ms)

    def _stays(self, span: Span, header: BatchHeader) -> bool:
        if span.key is None or self.latest.get(span.key) > span.offset:
            return False
        horizon_ms = header.delete_horizon_ms
        return span.has_value or horizon_ms is None or self.now_ms < horizon_ms

    def _new_horizon(self, header: BatchHeader, kept: Sequence[Span]) -> int | None:
        """The horizon that the batch is to get; None when it has one, or needs none."""
        if all(span.has_value for span in kept):
            return None
        horizon_ms = header.delete_horizon_ms
        if horizon_ms is None:
            return self._horizon_from_now()
        self.horizon_ms = min(self.horizon_ms, horizon_ms)
        return None

    def _horizon_from_now(self) -> int:
        horizon_ms = min(self.now_ms + self.delete_retention_ms, _FOREVER)
        self.horizon_ms = min(self.horizon_ms, horizon_ms)
        return horizon_ms
