"""Which columns a write has, and whether they make records. Pure: it looks at schemas only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.pipeline.errors import SchemaError
from penstock.wire.config_keys import suggest

_WHERE: Final = "the penstock sink"


def _is_bytes(kind: DataType) -> bool:
    return isinstance(kind, (StringType, BinaryType))


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    pair = kind.elementType
    return (
        pair.names == ["key", "value"]
        and isinstance(pair["key"].dataType, StringType)
        and _is_bytes(pair["value"].dataType)
    )


_KINDS: Final[dict[str, tuple[Callable[[DataType], bool], str]]] = {
    "value": (_is_bytes, "STRING or BINARY"),
    "key": (_is_bytes, "STRING or BINARY"),
    "topic": (lambda kind: isinstance(kind, StringType), "STRING"),
    "partition": (lambda kind: isinstance(kind, (IntegerType, ShortType, ByteType)), "INT"),
    "timestamp": (lambda kind: isinstance(kind, TimestampType), "TIMESTAMP"),
    "headers": (_is_headers, "ARRAY<STRUCT<key STRING, value BINARY>>"),
}


def check(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """The columns' names as records have them, in the order of the schema; case does not count.

    ``topic`` is the option. Raises SchemaError for columns that are none of a record's, that are
    there twice or of other types, and where the topic is said twice or nowhere.
    """
    names = tuple(str(name).lower() for name in schema.names)
    for given, name, field in zip(schema.names, names, schema.fields, strict=True):
        if name not in _KINDS:
            raise SchemaError(
                f"{_WHERE}: a record has no column {given!r}{suggest(name, list(_KINDS))}; next: "
                "put it into value, for example by to_json(struct(...)), or drop it. The columns "
                f"are {', '.join(_KINDS)}"
            )
        if names.count(name) > 1:
            raise SchemaError(
                f"{_WHERE}: there are several columns {name!r}; next: drop all but one"
            )
        fits, wanted = _KINDS[name]
        if not fits(field.dataType):
            raise SchemaError(
                f"{_WHERE}: column {name!r} is {field.dataType.simpleString()}, and {wanted} is "
                f"wanted; next: {_mend(name, field.dataType)}"
            )
    if "value" not in names:
        raise SchemaError(
            f"{_WHERE}: column 'value' is missing; the columns are {', '.join(schema.names)}; "
            "next: make it, for example by to_json(struct('*')).alias('value')"
        )
    if topic is None and "topic" not in names:
        raise SchemaError(
            f"{_WHERE}: nothing says the topic; next: set option topic, or add a column 'topic'"
        )
    if topic is not None and "topic" in names:
        raise SchemaError(
            f"{_WHERE}: both option topic={topic!r} and column 'topic' say where rows go; next: "
            "leave the option out, or drop the column: df.drop('topic')"
        )
    return names


def _mend(name: str, kind: DataType) -> str:
    if name in ("value", "key"):
        # Spark casts the former too, to text that nobody could parse, and makes JSON of them alone.
        if isinstance(kind, (StructType, ArrayType, MapType)):
            return f"write to_json({name})"
        return f"write CAST({name} AS STRING)"
    if name == "headers":
        return "make such an array, or drop the column"
    return f"cast it, or drop the column: df.drop({name!r})"
