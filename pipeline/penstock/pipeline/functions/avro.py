"""Avro by fastavro: Spark's own functions for it come in a jar, this one by pip."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fastavro
from pyspark.sql import Column

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.avro_types import (
    Schema,
    mender,
    parse,
    spark_type,
    unmender,
)
from penstock.pipeline.functions.binary import LookupFailure, decoded, encoded
from penstock.pipeline.functions.framing import check_framing, frame, split_frame

SchemaOf = Callable[[int], Schema | None]
"""Looks a schema up by its id; None where nobody knows it. It must pickle."""


def from_avro(
    column: Column | str,
    schema: Schema,
    *,
    writer_schema: Schema | None = None,
    framing: str = "plain",
    schema_of: SchemaOf | None = None,
    mode: str = "FAILFAST",
) -> Column:
    """Connect's AvroConverter, reading: a column of Avro's bytes as the type of ``schema``.

    One datum each, without a file's header. ``schema`` is the reader's, and says the column's
    type; data that were written by another one are resolved from ``writer_schema``. With
    framing="confluent" each has Confluent's header, and ``schema_of`` finds the writer's schema
    by the id in it: it is called once an id in each Python process of Spark, and what it raises
    fails the query.

    Corrupt data, and data of an id that ``schema_of`` answers with None, is an error of the query
    (FAILFAST), or NULL (PERMISSIVE); so is a datum that its schema does not use up. NULL stays
    NULL. Raises ConverterError for schemas that have no type in Spark.
    """
    confluent = check_framing(framing)
    if schema_of is not None and not confluent:
        raise ConverterError("schema_of needs framing='confluent': plain data name no schema")
    if schema_of is not None and writer_schema is not None:
        raise ConverterError("writer_schema and schema_of contradict each other; leave one out")
    reader = parse(schema)
    writer = None if writer_schema is None else _text(parse(writer_schema))
    decoder = AvroDecoder(_text(reader), writer, confluent, schema_of)
    return decoded(column, decoder, spark_type(reader), mode)


def to_avro(column: Column | str, schema: Schema, *, schema_id: int | None = None) -> Column:
    """Connect's AvroConverter, writing: a column as Avro's bytes by ``schema``, a datum each.

    With Confluent's header where ``schema_id`` is given. NULL stays NULL, which as a value is a
    tombstone. A value that does not fit the schema is an error of the query.
    """
    parsed = parse(schema)
    spark_type(parsed)
    header = b"" if schema_id is None else frame(schema_id)
    return encoded(column, _AvroEncoder(_text(parsed), header))


def _text(parsed: Any) -> str:
    """For the journey: what fastavro parsed holds its own marks."""
    return json.dumps(parsed)


@dataclass(frozen=True, slots=True)
class AvroDecoder:
    """Reads what the arguments of ``from_avro`` say; schemas are JSON."""

    schema: str
    writer_schema: str | None
    confluent: bool
    schema_of: SchemaOf | None

    def reader(self) -> Callable[[bytes], Any]:
        """As ``Decoder`` says."""
        wanted = parse(self.schema)
        mend = mender(wanted)
        fixed = _resolution(wanted if self.writer_schema is None else self.writer_schema, wanted)
        known: dict[int, _Resolution | None] = {}

        def look_up(schema_id: int) -> _Resolution:
            if self.schema_of is None:
                return fixed
            if schema_id not in known:
                try:
                    found = self.schema_of(schema_id)
                    known[schema_id] = None if found is None else _resolution(found, wanted)
                except Exception as error:
                    raise LookupFailure(
                        f"schema {schema_id} cannot be looked up: {type(error).__name__}: {error}"
                    ) from error
            if (resolution := known[schema_id]) is None:
                raise ConverterError(f"nobody knows schema {schema_id}")
            return resolution

        def read(data: bytes) -> Any:
            writer, reader = fixed
            if self.confluent:
                schema_id, data = split_frame(data)
                writer, reader = look_up(schema_id)
            source = io.BytesIO(data)
            value = fastavro.schemaless_reader(source, writer, reader)
            if source.tell() != len(data):
                raise ConverterError(f"{len(data) - source.tell()} bytes are left over")
            return mend(value) if mend and value is not None else value

        return read


_Resolution = tuple[Any, Any]
"""The schema that wrote, and the one to read by; None where it is the same."""


def _resolution(writer: Any, wanted: Any) -> _Resolution:
    # Fastavro compares them too, but for each datum, which takes long where they are two objects.
    parsed = parse(writer)
    return parsed, None if parsed == wanted else wanted


@dataclass(frozen=True, slots=True)
class _AvroEncoder:
    schema: str
    header: bytes

    def writer(self) -> Callable[[Any], bytes]:
        parsed = parse(self.schema)
        unmend = unmender(parsed)

        def write(value: Any) -> bytes:
            target = io.BytesIO()
            target.write(self.header)
            fastavro.schemaless_writer(target, parsed, unmend(value) if unmend else value)
            return target.getvalue()

        return write
