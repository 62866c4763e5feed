"""The index of a segment's aborted transactions: ``BASE.txnindex``.

One entry of 34 bytes for each transaction whose abort mark lies in the segment, in the order of the
marks, as Kafka's AbortedTxn: version i16 (0), producer id, first offset, last offset (the mark's)
and last stable offset, i64 each. After the entries come their number (u32) and the CRC-32C (u32) of
all before it.

Every closed segment has the file, with no entries where nothing was aborted, so one that is missing
was lost, or is of an earlier version: it is made anew when it is asked for, as is one that fails
its checksum (penstock.broker.storage.aborted). The active segment's index lives in memory and is
written when the segment is closed, as the other indexes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.broker.core.transactions import EndedTransaction
from penstock.broker.storage.index import IndexDamagedError

ENTRY: Final = struct.Struct(">hqqqq")
_VERSION: Final = 0
_LAST_OFFSET: Final = struct.Struct(">q")
_LAST_OFFSET_AT: Final = 18
_COUNT: Final = struct.Struct(">I")
_CHECKSUM: Final = struct.Struct(">I")
_SEAL_BYTES: Final = _COUNT.size + _CHECKSUM.size


class Aborted(NamedTuple):
    """The transactions that a lookup found. ``is_complete``: no later segment has more of them."""

    transactions: Sequence[EndedTransaction]
    is_complete: bool


class TransactionIndex:
    """The aborted transactions of one segment, as bytes: 34 for each. Used on one thread."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._data = bytearray(data)

    def __len__(self) -> int:
        return len(self._data) // ENTRY.size

    def __iter__(self) -> Iterator[EndedTransaction]:
        return map(self._entry, range(len(self)))

    def _entry(self, at: int) -> EndedTransaction:
        _, *fields = ENTRY.unpack_from(self._data, at * ENTRY.size)
        return EndedTransaction(*fields)

    def append(self, transaction: EndedTransaction) -> None:
        """Add a transaction whose mark comes after those of all others."""
        assert transaction.last_offset > self._last_offset(len(self) - 1), "marks come in order"
        self._data += ENTRY.pack(_VERSION, *transaction)

    def _last_offset(self, at: int) -> int:
        """The mark's of entry number ``at``; -1 before the first."""
        if at < 0:
            return -1
        place = at * ENTRY.size + _LAST_OFFSET_AT
        return int(_LAST_OFFSET.unpack_from(self._data, place)[0])

    def _count_below(self, offset: int) -> int:
        """How many marks lie below the offset."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._last_offset(middle) < offset:
                low = middle + 1
            else:
                high = middle
        return low

    def aborted(self, fetch_offset: int, upper_bound: int) -> Aborted:
        """Those that have records from ``fetch_offset`` to below ``upper_bound``, or may have.

        Goes by where they begin and end, as in Kafka: what lies between may be of others. Once a
        mark was found after which all below ``upper_bound`` is decided, no later one matters.
        """
        found = []
        for at in range(self._count_below(fetch_offset), len(self)):
            transaction = self._entry(at)
            if transaction.first_offset < upper_bound:
                found.append(transaction)
            if transaction.last_stable_offset >= upper_bound:
                return Aborted(found, is_complete=True)
        return Aborted(found, is_complete=False)

    def truncate(self, offset: int) -> None:
        """Drop those whose marks lie at or after the offset."""
        del self._data[self._count_below(offset) * ENTRY.size :]

    def copy(self) -> TransactionIndex:
        """An index that changes on its own."""
        return TransactionIndex(self._data)

    def encode(self) -> bytes:
        """What BASE.txnindex holds."""
        sealed = bytes(self._data) + _COUNT.pack(len(self))
        return sealed + _CHECKSUM.pack(crc32c(sealed))

    @classmethod
    def decode(cls, data: bytes, base_offset: int) -> TransactionIndex:
        """The index of the segment at ``base_offset``.

        Raises IndexDamagedError when it fails its checksum or can't be that segment's.
        """
        size = len(data) - _SEAL_BYTES
        if size < 0 or data[-_CHECKSUM.size :] != _CHECKSUM.pack(
            crc32c(data[: size + _COUNT.size])
        ):
            raise IndexDamagedError("a transaction index is cut short or fails its checksum")
        if size != _COUNT.unpack_from(data, size)[0] * ENTRY.size:
            raise IndexDamagedError("a transaction index lacks entries, or has too many")
        last = base_offset - 1
        for version, _, first_offset, last_offset, stable in ENTRY.iter_unpack(data[:size]):
            whole = 0 <= first_offset < last_offset and 0 <= stable <= last_offset + 1
            if version != _VERSION or last_offset <= last or not whole:
                raise IndexDamagedError(f"a transaction index has a bad entry: {last_offset}")
            last = last_offset
        return cls(data[:size])

    @classmethod
    def load(cls, path: Path, base_offset: int) -> TransactionIndex:
        """The index in a file. Raises IndexDamagedError, also when there is none."""
        try:
            return cls.decode(path.read_bytes(), base_offset)
        except OSError as error:
            raise IndexDamagedError(str(error)) from None
        except IndexDamagedError as error:
            raise IndexDamagedError(f"{path}: {error}") from None


def joined(paths: Sequence[tuple[Path, int]]) -> TransactionIndex | None:
    """The index of one segment in place of several that follow each other.

    By their index files and base offsets; None when one of those is missing or damaged. Blocks.
    """
    index = TransactionIndex()
    try:
        for path, base_offset in paths:
            for transaction in TransactionIndex.load(path, base_offset):
                index.append(transaction)
    except IndexDamagedError:
        return None
    return index
