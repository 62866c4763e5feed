"""The records of a batch as columns, in Arrow's layout: no Python object a record.

Each buffer is what Arrow's columnar format says it is (native byte order, without padding), so that
``pyarrow.Array.from_buffers`` takes it as it is. Source: the Arrow columnar format, "Physical
Memory Layout".
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.wire.batch import Buffer


class BytesColumn(NamedTuple):
    """Byte strings, some of which may be null: Arrow's variable-size binary layout.

    ``offsets`` are int32, one more than there are strings, from 0 on: string i is
    ``data[offsets[i]:offsets[i + 1]]``. ``validity`` has a bit for each, the lowest first, which
    is 0 where it is null; it is None where none is.
    """

    validity: Buffer | None
    null_count: int
    offsets: Buffer
    data: Buffer


class HeadersColumn(NamedTuple):
    """The headers of all records, one after the other: Arrow's list layout.

    ``offsets`` are int32, one more than there are records: those of record i are the names and
    values from ``offsets[i]`` to ``offsets[i + 1]``. No name is null, and all are UTF-8.
    """

    offsets: Buffer
    names: BytesColumn
    values: BytesColumn


class Columns(NamedTuple):
    """The records of one batch. ``offsets`` and ``timestamps_ms`` are int64.

    ``headers`` is None where no record has any.
    """

    record_count: int
    offsets: Buffer
    timestamps_ms: Buffer
    keys: BytesColumn
    values: BytesColumn
    headers: HeadersColumn | None
