"""Which transactions are open at a place of a log, and what became of those that ended. Pure.

A function of the log alone: a producer's first transactional batch begins its transaction, its next
control batch ends it, whatever their epochs; so every replica says the same, and so does whoever
reads the log again. Where the log's older part is gone, a transaction counts from the first batch
of it that is left, which for a reader is the same.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import BatchHeader

_HEAD: Final = struct.Struct(">qI")
_ENTRY: Final = struct.Struct(">qq")


class EndedTransaction(NamedTuple):
    """A transaction from its first record to the mark that ended it, as Kafka's AbortedTxn.

    ``last_stable_offset`` is where the oldest transaction began that was open after it, or the
    offset after the mark.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class OpenTransactions:
    """The producers' open transactions. ``note`` takes the batches of a log in their order."""

    __slots__ = ("_first_offsets", "last_offset")

    def __init__(self) -> None:
        self._first_offsets: dict[int, int] = {}  # By producer id; the oldest transaction first.
        self.last_offset = -1  # Of the last batch that was of a transaction, or ended one.

    def __len__(self) -> int:
        return len(self._first_offsets)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._first_offsets

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenTransactions):
            return NotImplemented
        return (self._first_offsets, self.last_offset) == (other._first_offsets, other.last_offset)

    __hash__ = None  # type: ignore[assignment]  # Mutable.

    def first_offset(self, producer_id: int) -> int | None:
        """Where the producer's open transaction began; None when it has none."""
        return self._first_offsets.get(producer_id)

    def note(self, header: BatchHeader, base_offset: int) -> EndedTransaction | None:
        """The batch is in the log at ``base_offset``; the transaction that it ends, if any.

        A mark without a transaction ends none: nothing was written that it could decide about.
        """
        producer_id = header.producer_id
        if producer_id < 0 or not (header.is_control or header.is_transactional):
            return None
        self.last_offset = last_offset = base_offset + header.last_offset_delta
        if not header.is_control:
            self._first_offsets.setdefault(producer_id, base_offset)
            return None
        first_offset = self._first_offsets.pop(producer_id, None)
        if first_offset is None:
            return None
        stable = next(iter(self._first_offsets.values()), last_offset + 1)
        return EndedTransaction(producer_id, first_offset, last_offset, stable)

    def copy(self) -> OpenTransactions:
        """One that changes on its own."""
        other = OpenTransactions()
        other._first_offsets = dict(self._first_offsets)
        other.last_offset = self.last_offset
        return other

    def encode(self) -> bytes:
        """What a producer snapshot keeps of them; empty where there never was a transaction."""
        if self.last_offset < 0:
            return b""
        entries = (_ENTRY.pack(*entry) for entry in self._first_offsets.items())
        return _HEAD.pack(self.last_offset, len(self)) + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes) -> OpenTransactions:
        """What ``encode`` made. Raises CorruptRecordError."""
        transactions = cls()
        if not data:
            return transactions
        try:
            transactions.last_offset, count = _HEAD.unpack_from(data)
            transactions._first_offsets = dict(_ENTRY.iter_unpack(data[_HEAD.size :]))
        except struct.error as error:
            raise CorruptRecordError(f"the open transactions are cut short: {error}") from None
        if len(transactions) != count:
            raise CorruptRecordError(
                f"{count} open transactions are said to be {len(transactions)}"
            )
        return transactions
