"""Connect's transforms of headers: the column that the source has with ``includeHeaders``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructType

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions.columns import field, resolve, struct_type
from penstock.pipeline.functions.fields import replace_field

HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def insert_header(records: DataFrame, name: str, value: Any) -> DataFrame:
    """Connect's InsertHeader: one more header, a literal or a Column, as text in UTF-8.

    A header of the same name stays, as in Connect. Makes the column where there is none.
    """
    column = value if isinstance(value, Column) else sf.lit(value)
    return _with_headers(records, sf.array(_header(name, column.cast("string").cast("binary"))))


def drop_headers(records: DataFrame, *names: str) -> DataFrame:
    """Connect's DropHeaders: without all headers of these names."""
    headers = _headers(records)
    return records.withColumn(
        "headers", sf.filter(headers, lambda header: ~header["key"].isin(list(names)))
    )


def header_from(
    records: DataFrame,
    column: str,
    fields: Sequence[str],
    headers: Sequence[str] | None = None,
    *,
    operation: str = "copy",
) -> DataFrame:
    """Connect's HeaderFrom: "copy" or "move" fields of the key or value into headers.

    Under the names ``headers``, else the fields' own. Text is in UTF-8, bytes are as they are,
    structs, arrays and maps are JSON. A field that is NULL makes a header without a value.
    """
    names = tuple(fields if headers is None else headers)
    if len(names) != len(fields) or not fields:
        raise TransformError("header_from needs one header for each field; next: name as many")
    if operation not in ("copy", "move"):
        raise TransformError(f"operation='{operation}' is none of copy, move")
    of = struct_type(records, column)
    made = []
    for name, path in zip(names, fields, strict=True):
        way, kind = resolve(of, path, column)
        made.append(_header(name, _as_bytes(field(column, way), kind)))
    # A record without a value has no fields to make headers of.
    present = sf.col(column).isNotNull()
    headed = _with_headers(
        records, sf.when(present, sf.array(*made)).otherwise(sf.array().cast(HEADERS_TYPE))
    )
    return headed if operation == "copy" else replace_field(headed, column, exclude=fields)


def header(name: str) -> Column:
    """The value (BINARY) of the last header of this name; NULL without one."""
    of_name = sf.filter(sf.col("headers"), lambda header: header["key"] == sf.lit(name))
    return sf.try_element_at(of_name, sf.lit(-1))["value"]


def has_header_key(name: str) -> Column:
    """Connect's predicate HasHeaderKey: whether there is a header of this name."""
    found = sf.exists(sf.col("headers"), lambda header: header["key"] == sf.lit(name))
    return sf.coalesce(found, sf.lit(False))


def _headers(records: DataFrame) -> Column:
    if "headers" not in records.columns:
        raise TransformError(
            "these records have no column 'headers'; next: read them with the option "
            "includeHeaders=true"
        )
    return sf.coalesce(sf.col("headers"), sf.array().cast(HEADERS_TYPE))


def _with_headers(records: DataFrame, more: Column) -> DataFrame:
    if "headers" in records.columns:
        more = sf.concat(_headers(records), more)
    return records.withColumn("headers", more.cast(HEADERS_TYPE))


def _header(name: str, value: Column) -> Column:
    return sf.struct(sf.lit(name).alias("key"), value.alias("value"))


def _as_bytes(column: Column, kind: DataType) -> Column:
    if isinstance(kind, BinaryType):
        return column
    if isinstance(kind, (StructType, ArrayType, MapType)):
        return sf.to_json(column).cast("binary")
    return column.cast("string").cast("binary")
