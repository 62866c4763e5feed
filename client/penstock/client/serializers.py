"""How keys and values become bytes and come back.

A serialiser is any callable from an object to ``bytes | None``; a deserialiser the reverse.
Named ones: ``bytes`` (the default), ``str`` (UTF-8) and ``json`` (UTF-8, compact). ``None``
passes every named one untouched: a null key, or a tombstone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

from penstock.client.model import ConsumerRecord
from penstock.wire.errors import ConfigurationError, PenstockError, SerializationError

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes | None], Any]
T = TypeVar("T")

SerializerName = Literal["bytes", "str", "json"]


def _bytes_serializer(data: Any) -> bytes | None:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"{type(data).__name__} is not bytes")


def _str_serializer(data: Any) -> bytes | None:
    if data is None:
        return None
    if isinstance(data, str):
        return data.encode()
    raise TypeError(f"{type(data).__name__} is not str")


def _json_serializer(data: Any) -> bytes | None:
    if data is None:
        return None
    # NaN and Infinity are no JSON: readers in other languages would refuse the record.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _bytes_deserializer(data: bytes | None) -> Any:
    return data


def _str_deserializer(data: bytes | None) -> Any:
    return None if data is None else data.decode()


def _json_deserializer(data: bytes | None) -> Any:
    return None if data is None else json.loads(data)


_SERIALIZERS: Final[Mapping[str, Serializer]] = {
    "bytes": _bytes_serializer,
    "str": _str_serializer,
    "json": _json_serializer,
}
_DESERIALIZERS: Final[Mapping[str, Deserializer]] = {
    "bytes": _bytes_deserializer,
    "str": _str_deserializer,
    "json": _json_deserializer,
}


def serializer(setting: str, choice: str | Serializer) -> Serializer:
    """The serialiser that a setting names. Raises ConfigurationError for an unknown name."""
    if callable(choice):
        return choice
    return _named(setting, choice, _SERIALIZERS)


def deserializer(setting: str, choice: str | Deserializer) -> Deserializer | None:
    """The deserialiser that a setting names; None where bytes are handed out as they are."""
    if callable(choice):
        return choice
    found = _named(setting, choice, _DESERIALIZERS)
    return None if found is _bytes_deserializer else found


def _named(setting: str, choice: str, known: Mapping[str, T]) -> T:
    try:
        return known[choice]
    except (KeyError, TypeError):
        names = ", ".join(repr(name) for name in known)
        raise ConfigurationError(
            f"{setting}={choice!r} is unknown; choose {names} or pass a callable"
        ) from None


def serialize(
    what: Literal["key", "value"], topic: str, use: Serializer, data: Any
) -> bytes | None:
    """The bytes of ``data``. Raises SerializationError naming the topic, the field and types."""
    try:
        result = use(data)
    except PenstockError:
        raise
    except Exception as error:
        raise SerializationError(
            f"cannot serialise the {what} of a record for topic {topic!r} "
            f"(a {type(data).__name__}): {error}; {_next_step(what, use)}"
        ) from error
    if result is not None and not isinstance(result, bytes):
        raise SerializationError(
            f"the {what}_serializer for topic {topic!r} returned {type(result).__name__}, "
            "not bytes or None"
        )
    return result


def _next_step(what: str, use: Serializer) -> str:
    setting = f"{what}_serializer"
    if use is _bytes_serializer:
        return f"pass bytes, or set {setting} to 'str', 'json' or a callable that returns bytes"
    if use is _str_serializer:
        return f"pass str, or set {setting} to 'bytes', 'json' or a callable that returns bytes"
    if use is _json_serializer:
        return f"pass what JSON can say, or set {setting} to a callable that returns bytes"
    return f"the {setting} is the application's own"


def deserialize(
    what: Literal["key", "value"], record: ConsumerRecord, use: Deserializer, data: bytes | None
) -> Any:
    """The object that ``data`` stands for. Raises SerializationError naming the record."""
    try:
        return use(data)
    except Exception as error:
        raise SerializationError(
            f"cannot deserialise the {what} of the record at {record.topic_partition}@"
            f"{record.offset}: {error}; seek past the record, or set {what}_deserializer='bytes' "
            "to look at it"
        ) from error
