"""Which transactions are open at a place of a log, and what became of those that ended. Pure.

A function of the log alone: a producer's first transactional batch begins its transaction, its next
control batch ends it, whatever their epochs; so every replica says the same, and so does whoever
reads the log again. Where the log's older part is gone, a transaction counts from the first batch
of it that is left, which for a reader is the same.

A leader lets nothing in that begins a transaction while another one of its producer is open, so the
epoch of an open transaction is the newest that its producer has in the log (ProducerEntry).

For readers a transaction is open until its mark is committed: what is marked may still be cut, and
then it is open again. So the marks that are not known to be committed are remembered as well.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.wire.errors import CorruptRecordError
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader

_HEAD: Final = struct.Struct(">qII")  # The last offset, how many are open, and how many have ended.
_ENTRY: Final = struct.Struct(">qq")


class Marker(NamedTuple):
    """The end of a producer's transaction, to be written into a log.

    ``producer_epoch`` is the one after the transaction's, which the mark fences.
    ``coordinator_epoch`` is kept for people.
    """

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int

    @property
    def type(self) -> MarkerType:
        """What the mark says."""
        return MarkerType.COMMIT if self.commit else MarkerType.ABORT


class OpenTransaction(NamedTuple):
    """A transaction that is open at a log's end; ``first_offset`` is that of its first record."""

    producer_id: int
    producer_epoch: int
    first_offset: int


class EndedTransaction(NamedTuple):
    """A transaction from its first record to the mark that ended it, as Kafka's AbortedTxn.

    ``last_stable_offset`` is where the oldest transaction began that was open after it, or the
    offset after the mark.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TransactionsUndo(NamedTuple):
    """What some batches changed, as it was before them: the last offset, and of each producer where
    its open transaction began, or None.
    """

    last_offset: int
    first_offsets: tuple[tuple[int, int | None], ...]


class OpenTransactions:
    """The producers' open transactions. ``note`` takes the batches of a log in their order.

    Compared, and counted, by what is open at the log's end alone: how much is committed each
    replica hears at another time.
    """

    __slots__ = ("_ended", "_first_offsets", "last_offset")

    def __init__(self) -> None:
        # By producer id; the oldest transaction first. Of a plain dictionary it costs the more to
        # find the first entry the more were removed before it.
        self._first_offsets: OrderedDict[int, int] = OrderedDict()
        # Ended transactions whose marks are not known to be committed: first offset and mark's. Of
        # two the one that began later is left out if its mark comes first: it never is the oldest,
        # also when the other's mark is cut. So both offsets rise.
        self._ended: deque[tuple[int, int]] = deque()
        self.last_offset = -1  # Of the last batch that was of a transaction, or ended one.

    def __len__(self) -> int:
        return len(self._first_offsets)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._first_offsets

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenTransactions):
            return NotImplemented
        mine, others = dict(self._first_offsets), dict(other._first_offsets)
        return (mine, self.last_offset) == (others, other.last_offset)

    __hash__ = None  # type: ignore[assignment]  # Mutable.

    def first_offset(self, producer_id: int) -> int | None:
        """Where the producer's open transaction began; None when it has none."""
        return self._first_offsets.get(producer_id)

    def first_offsets(self) -> dict[int, int]:
        """Where each open transaction began, by producer id; the oldest comes first."""
        return dict(self._first_offsets)

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
        while self._ended and self._ended[-1][0] > first_offset:
            self._ended.pop()
        self._ended.append((first_offset, last_offset))
        stable = next(iter(self._first_offsets.values()), last_offset + 1)
        return EndedTransaction(producer_id, first_offset, last_offset, stable)

    def forget(self, producer_id: int) -> None:
        """The producer's transaction has ended, and nothing is left of it."""
        self._first_offsets.pop(producer_id, None)

    # --- readers ---------------------------------------------------------------------------------

    def committed(self, offset: int) -> None:
        """All below ``offset`` is committed, and marks that lie there are for good."""
        while self._ended and self._ended[0][1] < offset:
            self._ended.popleft()

    def stable_offset(self, high_watermark: int) -> int:
        """The last stable offset: where the oldest transaction began that is open as of the high
        watermark, or the high watermark.

        Exact unless more was said to be ``committed`` than that.
        """
        stable = next(iter(self._first_offsets.values()), high_watermark)
        for first_offset, mark_offset in self._ended:
            if mark_offset >= high_watermark:
                stable = min(stable, first_offset)
                break  # Those after it began later.
        return min(stable, high_watermark)

    def may_lose_mark_from(self, offset: int) -> bool:
        """Whether a mark from there on ended a transaction, and is not known to be committed."""
        return bool(self._ended) and self._ended[-1][1] >= offset

    # --- taking back -----------------------------------------------------------------------------

    def undo_of(self, producer_ids: Iterable[int]) -> TransactionsUndo:
        """What takes back what batches of these producers are about to change."""
        find = self._first_offsets.get
        return TransactionsUndo(self.last_offset, tuple([(one, find(one)) for one in producer_ids]))

    def take_back(self, undos: Iterable[TransactionsUndo]) -> None:
        """Be as before several changes, the newest first, which are all that came since."""
        reopened = False
        for last_offset, first_offsets in undos:
            self.last_offset = last_offset
            for producer_id, first_offset in first_offsets:
                self._first_offsets.pop(producer_id, None)
                if first_offset is not None:
                    self._first_offsets[producer_id] = first_offset
                    reopened = True
        while self._ended and self._ended[-1][1] > self.last_offset:
            self._ended.pop()
        if reopened:
            in_order = sorted(self._first_offsets.items(), key=lambda entry: entry[1])
            self._first_offsets = OrderedDict(in_order)

    def copy(self) -> OpenTransactions:
        """One that changes on its own."""
        other = OpenTransactions()
        other._first_offsets = self._first_offsets.copy()
        other._ended = self._ended.copy()
        other.last_offset = self.last_offset
        return other

    def encode(self) -> bytes:
        """What a producer snapshot keeps of them; empty where there never was a transaction."""
        if self.last_offset < 0:
            return b""
        parts = [_HEAD.pack(self.last_offset, len(self), len(self._ended))]
        parts += [_ENTRY.pack(*entry) for entry in (*self._first_offsets.items(), *self._ended)]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> OpenTransactions:
        """What ``encode`` made. Raises CorruptRecordError."""
        transactions = cls()
        if not data:
            return transactions
        try:
            transactions.last_offset, count, ended = _HEAD.unpack_from(data)
            entries = list(_ENTRY.iter_unpack(data[_HEAD.size :]))
        except struct.error as error:
            raise CorruptRecordError(f"the open transactions are cut short: {error}") from None
        transactions._first_offsets = OrderedDict(entries[:count])
        transactions._ended = deque(entries[count:])
        found = len(transactions), len(transactions._ended)
        if found != (count, ended):
            raise CorruptRecordError(
                f"{count} open transactions and {ended} that ended are said to be there, and found "
                f"are {found[0]} and {found[1]}"
            )
        return transactions
