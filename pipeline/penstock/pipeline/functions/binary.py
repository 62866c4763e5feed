"""Converters between bytes and columns as Arrow functions: what those of avro and protobuf share.

A batch of bytes becomes a batch of values; only what is corrupt is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import BinaryType, DataType

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.fields import is_lenient

_SHOWN_BYTES = 24


class Decoder(Protocol):
    """What reads one message: picklable; each Python process of Spark makes ready once."""

    def reader(self) -> Callable[[bytes], Any]:
        """What makes of bytes a value that pyarrow takes. Anything it raises says: corrupt.

        But LookupFailure: the bytes may be right, and cannot be read now.
        """


class Encoder(Protocol):
    """What writes one message: picklable."""

    def writer(self) -> Callable[[Any], bytes]:
        """What makes bytes of a value as pyarrow gives it."""


class LookupFailure(Exception):  # noqa: N818 - it only carries what went wrong to the top.
    """A schema could not be looked up; the cause says why."""


def decoded(column: Column | str, decoder: Decoder, kind: DataType, mode: str) -> Column:
    """A column of bytes as one of this type. NULL stays NULL; corrupt bytes go by the mode."""
    lenient = is_lenient(mode)
    arrow = to_arrow_type(kind, timezone="UTC")

    def decode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        read = decoder.reader()
        for batch in batches:
            yield decode_batch(read, batch, arrow, lenient=lenient)

    return sf.arrow_udf(decode, kind)(column)  # type: ignore[attr-defined, no-any-return]


def decode_batch(
    read: Callable[[bytes], Any], batch: pa.Array, kind: pa.DataType, *, lenient: bool
) -> pa.Array:
    """An array of bytes as one of this type; ``lenient`` says that what is corrupt is NULL."""
    values = [_read(read, data, lenient) for data in batch.to_pylist()]
    return _as_array(values, kind, lenient)


def encoded(column: Column | str, encoder: Encoder) -> Column:
    """A column as bytes; NULL stays NULL. What does not fit the schema is an error."""

    def encode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        write = encoder.writer()
        for batch in batches:
            values = [None if value is None else _write(write, value) for value in _plain(batch)]
            yield pa.array(values, pa.binary())

    return sf.arrow_udf(encode, BinaryType())(column)  # type: ignore[attr-defined, no-any-return]


def _read(read: Callable[[bytes], Any], data: bytes | None, lenient: bool) -> Any:
    if data is None:
        return None
    try:
        return read(data)
    except LookupFailure:
        raise
    except Exception as error:
        # Whatever a parser makes of corrupt bytes: they raise nearly everything.
        if lenient:
            return None
        raise ConverterError(
            f"{len(data)} bytes ({data[:_SHOWN_BYTES].hex()}...) are not what the schema says: "
            f"{type(error).__name__}: {error}; next: mend what writes them, or pass "
            "mode='PERMISSIVE' for NULL in their place"
        ) from error


def _as_array(values: list[Any], kind: pa.DataType, lenient: bool) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        if not lenient:
            raise ConverterError(f"a value does not fit its column: {error}") from error
    return pa.array([_fitting(value, kind) for value in values], kind)


def _fitting(value: Any, kind: pa.DataType) -> Any:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    return value


def _write(write: Callable[[Any], bytes], value: Any) -> bytes:
    try:
        return write(value)
    except Exception as error:
        raise ConverterError(
            f"a value does not fit its schema: {type(error).__name__}: {error}; next: cast the "
            "column to what the schema says"
        ) from error


def _plain(batch: pa.Array) -> list[Any]:
    found: list[Any] = batch.to_pylist()
    return found
