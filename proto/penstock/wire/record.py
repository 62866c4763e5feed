"""What a record is, written and read. Values, and what they can be made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.wire.batch import Buffer

Header = tuple[str, bytes | None]


class RecordLike(Protocol):
    """What can be encoded: a Record, a RecordData, or anything that has their fields."""

    @property
    def timestamp_ms(self) -> int:
        """When the record was made, in milliseconds since 1970; -1 for none."""
        ...

    @property
    def key(self) -> Buffer | None:
        """The key, or None."""
        ...

    @property
    def value(self) -> Buffer | None:
        """The value, or None (which a compacted topic takes for a deletion)."""
        ...

    @property
    def headers(self) -> Sequence[tuple[str, Buffer | None]]:
        """Names and values, in order; a name may come more than once."""
        ...


class RecordData(NamedTuple):
    """A record that has no offset yet."""

    timestamp_ms: int
    key: Buffer | None
    value: Buffer | None
    headers: tuple[Header, ...] = ()


class Record(NamedTuple):
    """A record as it was read; a value, like RecordData."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class Bounds(NamedTuple):
    """What a batch's header says of its records.

    Their offsets are ``base_offset`` and what each of them adds, ``last_delta`` at most; their
    timestamps are ``base_ms`` and ``scale`` times what each adds: a scale of 0 gives all the same.
    """

    record_count: int
    base_offset: int
    last_delta: int
    base_ms: int
    scale: int
