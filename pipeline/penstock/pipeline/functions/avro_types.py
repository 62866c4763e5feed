"""What an Avro schema is in Spark, and how values go between fastavro's forms and pyarrow's."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import fastavro
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipeline.errors import ConverterError

Schema = str | Mapping[str, Any] | list[Any]
Mend = Callable[[Any], Any]

_PLAIN: Final[dict[str, DataType]] = {
    "null": NullType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "fixed": BinaryType(),
    "string": StringType(),
    "enum": StringType(),
}
_LOGICAL: Final[dict[tuple[str, str], DataType]] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
}
_TIMES_PER_SECOND: Final = {"time-millis": 1_000, "time-micros": 1_000_000}


def parse(schema: Schema) -> Any:
    """The schema as fastavro wants it. Raises ConverterError for what is none.

    Text is JSON, or the name of a plain type.
    """
    given: Any = schema
    if isinstance(schema, str) and schema.strip()[:1] in ("{", "[", '"'):
        try:
            given = json.loads(schema)
        except ValueError as error:
            raise ConverterError(f"the Avro schema is no JSON: {error}") from error
    try:
        return fastavro.parse_schema(given)
    except Exception as error:
        # As with data: a schema can be wrong in more ways than fastavro has exceptions.
        raise ConverterError(
            f"this is no Avro schema: {type(error).__name__}: {error}; next: mend the schema"
        ) from error


def spark_type(parsed: Any) -> DataType:
    """The type of Spark's for it, as Spark's own Avro has it.

    Records are structs, enums text, fixed bytes, a union with null what else it holds; one of int
    and long is BIGINT, of float and double DOUBLE. Raises ConverterError for other unions and for
    types that hold themselves, which have none.
    """
    return _type_of(parsed, {}, ())


def mender(parsed: Any) -> Mend | None:
    """What makes of a value that fastavro read one that pyarrow takes; None where it is one."""
    return _mend_of(parsed, {}, reading=True)


def unmender(parsed: Any) -> Mend | None:
    """The way back: of a value from pyarrow one that fastavro writes."""
    return _mend_of(parsed, {}, reading=False)


def _type_of(schema: Any, named: dict[str, Any], around: tuple[str, ...]) -> DataType:
    if isinstance(schema, list):
        return _type_of_union(schema, named, around)
    kind, entry = _entry(schema, named)
    logical = str(entry.get("logicalType", ""))
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return DecimalType(int(entry["precision"]), int(entry.get("scale", 0)))
    if (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, logical]
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind == "array":
        return ArrayType(_type_of(entry["items"], named, around), _has_null(entry["items"]))
    if kind == "map":
        values = entry["values"]
        return MapType(StringType(), _type_of(values, named, around), _has_null(values))
    name = entry["name"]
    if name in around:
        raise ConverterError(
            f"the Avro type {name} holds itself, and a column cannot; next: read with a schema "
            "that leaves that field out"
        )
    return StructType(
        [
            StructField(each["name"], _type_of(each["type"], named, (*around, name)))
            for each in entry["fields"]
        ]
    )


def _type_of_union(schema: list[Any], named: dict[str, Any], around: tuple[str, ...]) -> DataType:
    members = [member for member in schema if _name(member) != "null"]
    if not members:
        return NullType()
    if len(members) == 1:
        return _type_of(members[0], named, around)
    names = {_name(member) for member in members}
    for wide, kind in (({"int", "long"}, LongType()), ({"float", "double"}, DoubleType())):
        if names == wide and all(isinstance(member, str) for member in members):
            return kind
    raise ConverterError(
        f"a union of {', '.join(sorted(names))} is no type of a column; next: read with a schema "
        "that has one of them, or null and one of them"
    )


def _mend_of(schema: Any, named: dict[str, Any], *, reading: bool) -> Mend | None:
    if isinstance(schema, list):
        members = [member for member in schema if _name(member) != "null"]
        mends = [_mend_of(member, named, reading=reading) for member in members]
        return _or_none(mends[0]) if len(mends) == 1 and mends[0] else None
    kind, entry = _entry(schema, named)
    if kind == "record":
        found = {
            each["name"]: mend
            for each in entry["fields"]
            if (mend := _mend_of(each["type"], named, reading=reading))
        }
        return partial(_mend_record, found) if found else None
    if kind == "array":
        inner = _mend_of(entry["items"], named, reading=reading)
        return partial(_mend_array, inner) if inner else None
    if kind == "map":
        inner = _mend_of(entry["values"], named, reading=reading)
        return partial(_mend_map if reading else _unmend_map, inner)
    if reading and (logical := entry.get("logicalType")) in _TIMES_PER_SECOND:
        return partial(_time_number, _TIMES_PER_SECOND[str(logical)])
    if reading and entry.get("logicalType") == "uuid":
        return _text_of_uuid
    return None


def _entry(schema: Any, named: dict[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The plain kind of a schema, and its attributes; named types are known from then on."""
    if isinstance(schema, str):
        if schema in named:
            return named[schema]["type"], named[schema]
        return schema, {}
    kind = schema["type"]
    if isinstance(kind, (dict, list)):
        return _entry(kind, named)
    if "name" in schema:
        named[schema["name"]] = schema
        kind = "record" if kind == "error" else kind
    elif kind in named:
        return _entry(kind, named)
    return kind, schema


def _name(schema: Any) -> str:
    if isinstance(schema, dict):
        return str(schema.get("name", schema["type"]))
    return str(schema)


def _has_null(schema: Any) -> bool:
    return isinstance(schema, list) and "null" in schema


def _or_none(mend: Mend) -> Mend:
    return partial(_mend_optional, mend)


def _mend_optional(mend: Mend, value: Any) -> Any:
    return None if value is None else mend(value)


def _mend_record(mends: Mapping[str, Mend], value: Any) -> Any:
    return {name: mends[name](each) if name in mends else each for name, each in value.items()}


def _mend_array(mend: Mend, value: Any) -> Any:
    return [mend(each) for each in value]


def _mend_map(mend: Mend | None, value: Any) -> Any:
    return [(key, mend(each) if mend else each) for key, each in value.items()]


def _unmend_map(mend: Mend | None, value: Any) -> Any:
    return {key: mend(each) if mend else each for key, each in dict(value).items()}


def _time_number(per_second: int, value: Any) -> Any:
    if not isinstance(value, datetime.time):
        return value
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * per_second + value.microsecond * per_second // 1_000_000


def _text_of_uuid(value: Any) -> Any:
    return str(value) if isinstance(value, uuid.UUID) else value
