"""What stays of a batch. Pure.

==============================================  =================================================
record                                          stays
==============================================  =================================================
at or after the end of what the map has seen    yes
before the log's start                          no
of a control batch or a transaction             yes
without a key                                   no: nobody could replace it
whose key has a later offset in the map         no
a tombstone (no value), the last of its key     until its batch's delete horizon (KIP-534), which
                                                is set by the first clean that comes past it
any other                                       yes
==============================================  =================================================

A batch that is left without records goes, but the last of a producer below the end of the clean
stays, empty: its sequence says what the producer must write next. A later one, which the clean does
not reach, says so as well, but need not be committed: when the tail is cut it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.storage.cleaner.offset_map import OffsetMap
from penstock.broker.storage.disk import Buffer
from penstock.wire.records import MAX_RECORDS_BYTES, BatchHeader
from penstock.wire.rewriting import Span, emptied, is_filler, read_spans, with_only
from penstock.wire.topic_config import MAX_MESSAGE_BYTES

_FOREVER: Final = 2**63 - 1


@dataclass(slots=True)
class Filter:
    """What a clean goes by; ``horizon_ms`` is the next time at which a tombstone may go.

    ``last_batches``: the base offset of the last batch below ``end_offset`` of each producer that
    is remembered; -1 for one of which it is not known, and all batches stay.
    """

    latest: OffsetMap
    log_start_offset: int
    end_offset: int
    last_batches: Mapping[int, int]
    now_ms: int
    delete_retention_ms: int
    horizon_ms: int = field(default=_FOREVER)

    def apply(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        """What is to stand in place of the batch: itself, another, or nothing (None).

        Raises CorruptRecordError when its records can't be read.
        """
        if header.base_offset >= self.end_offset or is_protected(header):
            return batch
        kept: Sequence[Span] = ()
        if header.record_count and header.last_offset >= self.log_start_offset:
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
        is_new = horizon_ms is None
        if horizon_ms is None:
            horizon_ms = min(self.now_ms + self.delete_retention_ms, _FOREVER)
        self.horizon_ms = min(self.horizon_ms, horizon_ms)
        return horizon_ms if is_new else None


def is_protected(header: BatchHeader) -> bool:
    """Whether a batch is left as it is, and replaces nothing: marks, and what they decide about.

    Whether a transaction's records count is known only with its mark, which no coordinator of
    this version writes.
    """
    return header.is_control or header.is_transactional
