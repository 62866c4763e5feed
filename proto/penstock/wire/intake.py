"""How plain records get into batches that are open already, at the least cost.

A producer has this beside its accumulator. The accumulator opens a batch here when it begins one
and closes it here before it looks at what is in it; in between records that need nothing but to be
added are (``Intake.take``), and everything else is declined, for the accumulator to do. The
compiled codec has the same names; what is in this module is what serves without it, and declines
every record: the way around is the complete one.

A record is a *claim* on a *receipt*: the receipt is its batch's and says one day what became of it,
the claim says which of the batch's records it is.

Claims, batches and topics may be used from any thread. With the compiled codec this rests on
Python's global lock: what is done about one record is one call that lets no other thread run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from penstock.wire.batch import Buffer
from penstock.wire.reference import RecordsBody, Strings

_new = tuple.__new__

R = TypeVar("R")  # A kind of Receipt.
C = TypeVar("C", bound="Claim[Any]")


class Receipt:
    """What became of a batch.

    ``place_type`` is a NamedTuple of topic, partition, offset and timestamp in milliseconds.
    ``is_settled`` is set last, once, when nothing else changes any more; a receipt that is settled
    without an error says where the records are.
    """

    __slots__ = (
        "base_offset",
        "error",
        "is_settled",
        "log_append_time_ms",
        "partition",
        "place_type",
        "topic",
    )

    def __init__(self, topic: str, partition: int, place_type: type[tuple[Any, ...]]) -> None:
        self.topic = topic
        self.partition = partition
        self.place_type = place_type
        self.is_settled = False
        self.error: BaseException | None = None
        self.base_offset = -1  # Stays so where it is not known.
        self.log_append_time_ms = -1  # Stays so where records have their own times.

    def place(self, index: int, timestamp_ms: int) -> Any:
        """Where record ``index`` is, given its own time. The receipt is settled, with no error."""
        offset = self.base_offset
        if offset >= 0:
            offset += index
        if self.log_append_time_ms >= 0:
            timestamp_ms = self.log_append_time_ms
        # The type's own constructor costs twice as much.
        return _new(self.place_type, (self.topic, self.partition, offset, timestamp_ms))


class Claim(Generic[R]):
    """Record ``index`` of the batch whose receipt this is, and the time that it was given.

    ``whole`` is for whoever makes more of a claim, once (``complete``): most stay what they are.
    """

    __slots__ = ("__weakref__", "index", "receipt", "timestamp_ms", "whole")

    def __init__(self, receipt: R, index: int, timestamp_ms: int) -> None:
        self.receipt = receipt
        self.index = index
        self.timestamp_ms = timestamp_ms
        self.whole: Any = None

    def place(self) -> Any:
        """Where the record is; None unless the receipt is settled without an error."""
        receipt: Any = self.receipt
        if receipt.is_settled and receipt.error is None:
            return receipt.place(self.index, self.timestamp_ms)
        return None

    def complete(self, whole: object) -> None:
        """Set ``whole``."""
        self.whole = whole


class Stuck:
    """Where a topic's records without a key go, until so many bytes went there."""

    __slots__ = ("left_bytes", "partition")

    def __init__(self, partition: int, left_bytes: int) -> None:
        self.partition = partition
        self.left_bytes = left_bytes


class Places(Generic[R]):
    """Where each of many records is: which receipt of ``receipts`` is its, and at which index.

    A receipt may be there more than once. For one thread at a time.
    """

    __slots__ = ("_codes", "receipts")

    def __init__(self) -> None:
        self.receipts: list[R] = []
        self._codes = array("q")

    def __len__(self) -> int:
        return len(self._codes)

    def place(self, number: int) -> tuple[int, int]:
        """The receipt's number, and the index, of a record. Raises IndexError."""
        if not 0 <= number < len(self._codes):
            raise IndexError(f"there is no record {number} of {len(self._codes)}")
        code = self._codes[number]
        return code >> 32, code & 0xFFFFFFFF

    def add(self, receipt: R, index: int) -> None:
        """Add the place of one record."""
        if not self.receipts or self.receipts[-1] is not receipt:
            self.receipts.append(receipt)
        self._codes.append((len(self.receipts) - 1) << 32 | index)


def first_odd(data: Sequence[object], max_bytes: int) -> int:
    """The number of the first that is neither None nor exactly bytes, or longer; else how many."""
    for number, one in enumerate(data):
        if one is not None and (type(one) is not bytes or len(one) > max_bytes):
            return number
    return len(data)


class Intake(Generic[R, C]):
    """The open batches of one producer, and how much of its memory is taken.

    ``kind`` is what ``take`` makes; ``hashes_keys`` says that records go where their keys hash to,
    and to the stuck partition without one. A limit in bytes is one of a whole batch, header
    included.
    """

    __slots__ = ("__weakref__", "buffer_memory_bytes", "used_bytes")

    def __init__(
        self,
        kind: type[C],
        *,
        buffer_memory_bytes: int,
        max_record_bytes: int,
        hashes_keys: bool,
    ) -> None:
        if not issubclass(kind, Claim):
            raise TypeError(f"{kind!r} is no kind of Claim")
        self.buffer_memory_bytes = buffer_memory_bytes
        self.used_bytes = 0

    def charge(self, size_bytes: int) -> None:
        """So many bytes more of the memory are taken; less, where the number is negative."""
        self.used_bytes += size_bytes

    def open(
        self,
        topic: str,
        partition: int,
        *,
        partition_count: int,
        body: RecordsBody,
        receipt: R,
        limit_bytes: int,
    ) -> None:
        """Records may be added to ``body`` while the batch stays within its limit."""

    def stick(self, topic: str, stuck: Stuck) -> None:
        """Where the topic's records without a key go. What goes there is counted down in it."""

    def close(self, topic: str, partition: int) -> None:
        """Nothing more is added to the partition's batch."""

    def clear(self) -> None:
        """Nothing more is added to any batch."""

    def take(self, topic: object, value: object, key: object, partition: object) -> C | None:
        """Add a record made now; None, and nothing done, where there is more to it than that."""
        return None

    def take_many(
        self,
        topic: object,
        values: list[Any] | Strings,
        keys: list[Any] | Strings | None,
        times: int | Buffer,
        *,
        partition: object,
        before: int,
        places: Places[R],
        partitions: Buffer | None = None,
        headers: Strings | None = None,
    ) -> int:
        """Add values; the number of those that are added by now, all or up to one that there is
        more to.

        Those added before are as many as ``places`` has more than ``before``. ``keys``, ``times``
        in milliseconds if they are not the same for all (int64), and ``partitions`` (int32, -1 for
        none; they count without ``partition``) and ``headers`` (of ``join_headers``) are as many as
        the values. Of what is in columns no
        object is made.
        """
        return len(places) - before
