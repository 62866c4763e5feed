"""Protobuf by Google's own library: Spark's functions for it come in a jar, this one by pip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from pyspark.sql import Column

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.binary import decoded, encoded
from penstock.pipeline.functions.framing import (
    check_framing,
    frame,
    indexes,
    skip_indexes,
    split_frame,
)
from penstock.pipeline.functions.protobuf_types import from_message, into_message, spark_type


def from_protobuf(
    column: Column | str,
    message: type[Message] | str,
    *,
    descriptor_set: bytes | None = None,
    framing: str = "plain",
    mode: str = "FAILFAST",
) -> Column:
    """Confluent's ProtobufConverter, reading: a column of messages as structs.

    ``message`` is a generated class, or the full name of a message in ``descriptor_set``, which
    is what ``protoc --include_imports --descriptor_set_out`` writes. Spark's Python processes
    need not have the class. framing="confluent" skips Confluent's header and takes the message
    to be of this type.

    Corrupt data is an error of the query (FAILFAST), or NULL (PERMISSIVE). Fields that the
    message type does not know are passed over. NULL stays NULL. Raises ConverterError for
    messages that are not found, or have no type in Spark.
    """
    kind = _MessageKind.of(message, descriptor_set)
    decoder = _ProtobufDecoder(kind, check_framing(framing))
    return decoded(column, decoder, spark_type(kind.load().DESCRIPTOR), mode)


def to_protobuf(
    column: Column | str,
    message: type[Message] | str,
    *,
    descriptor_set: bytes | None = None,
    schema_id: int | None = None,
) -> Column:
    """Confluent's ProtobufConverter, writing: a column of structs as messages.

    Fields go by their names; those that are NULL are not set. With Confluent's header where
    ``schema_id`` is given. A NULL column stays NULL. A value that does not fit is an error of
    the query.
    """
    kind = _MessageKind.of(message, descriptor_set)
    header = b""
    if schema_id is not None:
        header = frame(schema_id) + indexes(_way_to(kind.load().DESCRIPTOR))
    return encoded(column, _ProtobufEncoder(kind, header))


@dataclass(frozen=True, slots=True)
class _MessageKind:
    """A message type that travels: the files that describe it, and its name."""

    name: str
    files: bytes

    @classmethod
    def of(cls, message: type[Message] | str, descriptor_set: bytes | None) -> _MessageKind:
        if isinstance(message, str):
            if descriptor_set is None:
                raise ConverterError(
                    f"the name {message} alone does not say what the message is; next: pass "
                    "descriptor_set= as protoc wrote it, or the generated class"
                )
            return cls(message, descriptor_set)
        found: dict[str, Any] = {}
        _collect(message.DESCRIPTOR.file, found)
        files = descriptor_pb2.FileDescriptorSet()
        for each in found.values():
            each.CopyToProto(files.file.add())
        return cls(message.DESCRIPTOR.full_name, files.SerializeToString())

    def load(self) -> type[Message]:
        return _load(self.name, self.files)


@lru_cache(maxsize=64)
def _load(name: str, files: bytes) -> type[Message]:
    # In a pool of their own: the process may know another version of the same message.
    pool = descriptor_pool.DescriptorPool()
    try:
        for each in descriptor_pb2.FileDescriptorSet.FromString(files).file:
            pool.AddSerializedFile(each.SerializeToString())
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except Exception as error:
        # The library says TypeError, KeyError, DecodeError, by version.
        raise ConverterError(
            f"the descriptor set has no message {name} that can be used: {error}; next: write it "
            "with protoc --include_imports"
        ) from error


def _collect(file: Any, found: dict[str, Any]) -> None:
    """The file and those it imports, each after what it needs."""
    if file.name not in found:
        for needed in file.dependencies:
            _collect(needed, found)
        found[file.name] = file


def _way_to(message: Any) -> list[int]:
    way = []
    at: Any = message
    while at is not None:
        around = at.containing_type
        beside = at.file.message_types_by_name if around is None else around.nested_types_by_name
        way.append(list(beside).index(at.name))
        at = around
    return way[::-1]


@dataclass(frozen=True, slots=True)
class _ProtobufDecoder:
    kind: _MessageKind
    confluent: bool

    def reader(self) -> Callable[[bytes], Any]:
        loaded = self.kind.load()

        def read(data: bytes) -> Any:
            if self.confluent:
                data = skip_indexes(split_frame(data)[1])
            return from_message(loaded.FromString(data))

        return read


@dataclass(frozen=True, slots=True)
class _ProtobufEncoder:
    kind: _MessageKind
    header: bytes

    def writer(self) -> Callable[[Any], bytes]:
        loaded = self.kind.load()

        def write(value: Any) -> bytes:
            message = loaded()
            into_message(value, message)
            return self.header + message.SerializeToString(deterministic=True)

        return write
