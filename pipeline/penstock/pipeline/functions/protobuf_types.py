"""What a protobuf message is in Spark, and how messages become values for pyarrow, and back."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.pipeline.errors import ConverterError

Field = Any
"""A field's description, of whichever of the library's implementations is there."""

_F: Final = FieldDescriptor
_PLAIN: Final[dict[int, DataType]] = {
    _F.CPPTYPE_BOOL: BooleanType(),
    _F.CPPTYPE_INT32: IntegerType(),
    _F.CPPTYPE_INT64: LongType(),
    _F.CPPTYPE_UINT32: LongType(),
    _F.CPPTYPE_UINT64: DecimalType(20, 0),
    _F.CPPTYPE_FLOAT: FloatType(),
    _F.CPPTYPE_DOUBLE: DoubleType(),
    _F.CPPTYPE_ENUM: StringType(),
    _F.CPPTYPE_STRING: StringType(),
}
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_DURATION: Final = "google.protobuf.Duration"
_WRAPPERS: Final = {
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Int32", "Int64", "UInt32", "UInt64", "Float", "Double", "String", "Bytes")
}


def spark_type(message: Any, around: tuple[str, ...] = ()) -> StructType:
    """The struct for a message: its fields by their names in the .proto file.

    uint32 is BIGINT and uint64 DECIMAL(20,0), so that each number fits; enums are text;
    Timestamp, Duration and the wrappers are what they stand for. Raises ConverterError for
    messages that hold themselves.
    """
    if message.full_name in around:
        raise ConverterError(
            f"the message {message.full_name} holds itself, and a column cannot; next: read with "
            "a message that leaves that field out"
        )
    inside = (*around, message.full_name)
    return StructType(
        [StructField(each.name, _field_type(each, inside)) for each in message.fields]
    )


def from_message(message: Message) -> dict[str, Any]:
    """Its fields as pyarrow takes them; what is not set is None, or its type's default."""
    return {each.name: _value_of(message, each) for each in message.DESCRIPTOR.fields}


def into_message(values: Mapping[str, Any], message: Message) -> None:
    """Set the message's fields from those of a struct. Raises ConverterError for unknown names."""
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        if name not in fields:
            raise ConverterError(f"{message.DESCRIPTOR.full_name} has no field '{name}'")
        if value is not None:
            _set(message, fields[name], value)


def is_repeated(each: Field) -> bool:
    """Whether it is a list or a map: libraries before 6.31 and after say it differently."""
    found = getattr(each, "is_repeated", None)
    return bool(each.label == _F.LABEL_REPEATED if found is None else found)


def _is_map(each: Field) -> bool:
    return each.message_type is not None and bool(each.message_type.GetOptions().map_entry)


def _field_type(each: Field, around: tuple[str, ...]) -> DataType:
    if _is_map(each):
        entry = each.message_type.fields_by_name
        keys = _single_type(entry["key"], around)
        return MapType(keys, _single_type(entry["value"], around), valueContainsNull=False)
    single = _single_type(each, around)
    return ArrayType(single, containsNull=False) if is_repeated(each) else single


def _single_type(each: Field, around: tuple[str, ...]) -> DataType:
    if each.type == _F.TYPE_BYTES:
        return BinaryType()
    if (message := each.message_type) is None:
        return _PLAIN[each.cpp_type]
    if message.full_name == _TIMESTAMP:
        return TimestampType()
    if message.full_name == _DURATION:
        return DayTimeIntervalType()
    if message.full_name in _WRAPPERS:
        return _single_type(message.fields_by_name["value"], around)
    return spark_type(message, around)


def _value_of(message: Message, each: Field) -> Any:
    if each.has_presence and not message.HasField(each.name):
        return None
    value = getattr(message, each.name)
    if _is_map(each):
        of = _reader_of(each.message_type.fields_by_name["value"])
        return [(key, of(value[key])) for key in value]
    of = _reader_of(each)
    return [of(one) for one in value] if is_repeated(each) else of(value)


def _reader_of(each: Field) -> Callable[[Any], Any]:
    """How a single value of this field becomes one for pyarrow."""
    if (message := each.message_type) is not None:
        if message.full_name == _TIMESTAMP:
            return _instant
        if message.full_name == _DURATION:
            return _span
        if message.full_name in _WRAPPERS:
            inner = _reader_of(message.fields_by_name["value"])
            return lambda wrapper: inner(wrapper.value)
        return from_message
    if each.cpp_type == _F.CPPTYPE_ENUM:
        names = {number: one.name for number, one in each.enum_type.values_by_number.items()}
        # A number that a newer schema has: its own text, as protobuf's JSON keeps it.
        return lambda number: names.get(number, str(number))
    return Decimal if each.cpp_type == _F.CPPTYPE_UINT64 else _same


def _set(message: Message, each: Field, value: Any) -> None:
    if _is_map(each):
        _set_map(message, each, value)
    elif is_repeated(each):
        target = getattr(message, each.name)
        for one in value:
            if each.message_type is None:
                target.append(_plain_value(each, one))
            else:
                _fill(target.add(), one)
    elif each.message_type is None:
        setattr(message, each.name, _plain_value(each, value))
    else:
        inner = getattr(message, each.name)
        inner.SetInParent()
        _fill(inner, value)


def _set_map(message: Message, each: Field, entries: Any) -> None:
    target = getattr(message, each.name)
    values = each.message_type.fields_by_name["value"]
    keys = each.message_type.fields_by_name["key"]
    for key, value in dict(entries).items():
        if values.message_type is None:
            target[_plain_value(keys, key)] = _plain_value(values, value)
        else:
            _fill(target[_plain_value(keys, key)], value)


def _fill(message: Message, value: Any) -> None:
    name = message.DESCRIPTOR.full_name
    if name == _TIMESTAMP:
        since = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        message.FromMicroseconds(since // datetime.timedelta(microseconds=1))  # type: ignore[attr-defined]
    elif name == _DURATION:
        message.FromTimedelta(value)  # type: ignore[attr-defined]
    elif name in _WRAPPERS:
        inner = message.DESCRIPTOR.fields_by_name["value"]
        message.value = _plain_value(inner, value)  # type: ignore[attr-defined]
    else:
        into_message(value, message)


def _plain_value(each: Field, value: Any) -> Any:
    if each.cpp_type == _F.CPPTYPE_ENUM and isinstance(value, str):
        if value in each.enum_type.values_by_name:
            return each.enum_type.values_by_name[value].number
        if not value.lstrip("-").isdigit():
            raise ConverterError(f"{each.enum_type.full_name} has no value '{value}'")
        return int(value)
    if isinstance(value, Decimal):
        if value != value.to_integral_value():
            raise ConverterError(f"{each.full_name} is a whole number, and {value} is none")
        return int(value)
    return value


def _instant(stamp: Any) -> datetime.datetime:
    found: datetime.datetime = stamp.ToDatetime(tzinfo=datetime.UTC)
    return found


def _span(duration: Any) -> datetime.timedelta:
    found: datetime.timedelta = duration.ToTimedelta()
    return found


def _same(value: Any) -> Any:
    return value
