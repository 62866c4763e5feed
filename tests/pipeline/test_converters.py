from __future__ import annotations

import datetime
import io
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as sf

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions import (
    from_avro,
    from_csv,
    from_json,
    from_protobuf,
    to_avro,
    to_csv,
    to_json,
    to_protobuf,
)
from penstock.pipeline.functions.framing import frame, indexes
from tests.unit.pipeline.messages import order_class, order_file

ORDER = {
    "type": "record", "name": "Order", "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9,
                                   "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}}},
    ],
}  # fmt: skip
OLD = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
NEW = {
    "type": "record", "name": "Order", "fields": [
        {"name": "id", "type": "long"}, {"name": "note", "type": "string", "default": "none"}],
}  # fmt: skip
AT = datetime.datetime(2026, 3, 29, 2, 30, 7, 123_456, tzinfo=datetime.UTC)
VALUE = {
    "id": 7, "note": None, "total": Decimal("12.50"), "at": AT,
    "day": datetime.date(2026, 3, 29), "tags": {"a": 1}, "lines": [{"sku": "x"}],
}  # fmt: skip


def avro(schema: Any, value: Any) -> bytes:
    target = io.BytesIO()
    fastavro.schemaless_writer(target, schema, value)
    return target.getvalue()


def plain(value: Any) -> Any:
    return value.asDict(recursive=True) if isinstance(value, Row) else value


def read(spark: SparkSession, data: list[bytes | None], column: Any) -> list[Any]:
    frame = spark.createDataFrame([(one,) for one in data], "value binary")
    return [plain(row[0]) for row in frame.select(column).collect()]


# --- avro -----------------------------------------------------------------------------------


def test_avro_both_ways(spark: SparkSession) -> None:
    data = avro(ORDER, VALUE)
    frame = spark.createDataFrame([(data,), (None,)], "value binary")
    parsed = frame.select(from_avro("value", ORDER).alias("value"))
    rows = parsed.select("value", sf.unix_micros("value.at"), to_avro("value", ORDER)).collect()
    found = plain(rows[0][0])
    assert {**found, "at": rows[0][1]} == {**VALUE, "at": int(AT.timestamp() * 1_000_000)}
    assert bytes(rows[0][2]) == data
    assert tuple(rows[1]) == (None, None, None)


def test_avro_that_was_written_by_an_older_schema(spark: SparkSession) -> None:
    column = from_avro("value", NEW, writer_schema=OLD)
    assert read(spark, [avro(OLD, {"id": 5})], column) == [{"id": 5, "note": "none"}]


def look_up(schema_id: int) -> Any:
    if schema_id == 99:
        raise ConnectionError("the registry is away")
    return {1: OLD, 2: NEW}.get(schema_id)


def test_avro_with_confluents_header(spark: SparkSession) -> None:
    old, new = avro(OLD, {"id": 5}), avro(NEW, {"id": 6, "note": "n"})
    column = from_avro("value", NEW, framing="confluent", schema_of=look_up, mode="PERMISSIVE")
    data = [frame(1) + old, frame(2) + new, frame(3) + old, new, b""]
    assert read(spark, data, column) == [
        {"id": 5, "note": "none"}, {"id": 6, "note": "n"}, None, None, None,
    ]  # fmt: skip
    # What cannot be looked up now is not corrupt, and is not to be lost.
    with pytest.raises(Exception, match="the registry is away"):
        read(spark, [frame(99) + old], column)
    written = spark.sql("select named_struct('id', 6L, 'note', 'n') as value")
    row = written.select(to_avro("value", NEW, schema_id=2)).first()
    assert row is not None
    assert bytes(row[0]) == frame(2) + new


def test_corrupt_avro_is_null_or_an_error(spark: SparkSession) -> None:
    good = avro(ORDER, VALUE)
    # Torn, followed by more, empty, no such branch, a number of digits that the column lacks.
    wide = avro({**ORDER, "fields": [*ORDER["fields"][:2], {
        "name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 20,
                                  "scale": 2}}, *ORDER["fields"][3:]]},
        {**VALUE, "total": Decimal("123456789012.34")})  # fmt: skip
    data = [good[:-3], good + b"\0", b"", b"\x0e\x08", wide, good]
    found = read(spark, data, from_avro("value", ORDER, mode="PERMISSIVE"))
    assert found[:-1] == [None] * 5
    assert found[-1]["id"] == 7
    with pytest.raises(Exception, match=r"ConverterError: .* bytes are left over; next: mend"):
        read(spark, [good + b"\0"], from_avro("value", ORDER))


def test_what_avro_is_not_asked_for_together(spark: SparkSession) -> None:
    with pytest.raises(ConverterError, match="schema_of needs framing='confluent'"):
        from_avro("value", NEW, schema_of=look_up)
    with pytest.raises(ConverterError, match="contradict each other"):
        from_avro("value", NEW, framing="confluent", schema_of=look_up, writer_schema=OLD)
    with pytest.raises(Exception, match=r"ConverterError: a value does not fit its schema"):
        read(spark, [b"x"], to_avro("value", NEW))


# --- protobuf -------------------------------------------------------------------------------


def test_protobuf_both_ways(spark: SparkSession) -> None:
    order = order_class()
    message = order(
        id=4_294_967_295, big=2**64 - 1, tags=["a"], counts={"x": 1}, lines=[{"sku": "s"}],
        state=1,
    )  # fmt: skip
    message.placed.FromDatetime(AT)
    data = message.SerializeToString(deterministic=True)
    frame = spark.createDataFrame([(data,), (None,)], "value binary")
    parsed = frame.select(from_protobuf("value", order).alias("value"))
    rows = parsed.select(
        "value", sf.unix_micros("value.placed"), to_protobuf("value", order)
    ).collect()
    found = plain(rows[0][0])
    assert (found["id"], found["big"], found["state"]) == (
        4_294_967_295,
        Decimal(2**64 - 1),
        "PAID",
    )
    assert (found["note"], found["counts"], found["lines"]) == (
        None, {"x": 1}, [{"sku": "s", "price": 0.0}],
    )  # fmt: skip
    assert rows[0][1] == int(AT.timestamp() * 1_000_000)
    assert bytes(rows[0][2]) == data
    assert tuple(rows[1]) == (None, None, None)


def test_protobuf_by_a_descriptor_set_with_confluents_header(spark: SparkSession) -> None:
    from google.protobuf import descriptor_pb2, duration_pb2, timestamp_pb2, wrappers_pb2

    files = descriptor_pb2.FileDescriptorSet()
    for needed in (timestamp_pb2, duration_pb2, wrappers_pb2):
        needed.DESCRIPTOR.CopyToProto(files.file.add())
    files.file.append(order_file())
    how: dict[str, Any] = {"descriptor_set": files.SerializeToString()}
    data = frame(9) + indexes([1]) + order_class()(id=3, note="n").SerializeToString()
    column = from_protobuf("value", "shop.Order", framing="confluent", mode="PERMISSIVE", **how)
    source = spark.createDataFrame([(data,), (data[:-1],), (b"\0",)], "value binary")
    parsed = source.select(column.alias("value"))
    rows = parsed.select(
        "value.id", "value.note", to_protobuf("value", "shop.Order", schema_id=9, **how)
    ).collect()
    assert (rows[0][0], rows[0][1], bytes(rows[0][2])) == (3, "n", data)
    assert [tuple(row) for row in rows[1:]] == [(None, None, None)] * 2


def test_corrupt_protobuf_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"ConverterError: 1 bytes \(0a\.\.\.\) are not what"):
        read(spark, [b"\x0a"], from_protobuf("value", order_class()))


# --- json and csv ---------------------------------------------------------------------------


def test_json_both_ways(spark: SparkSession) -> None:
    data = [b'{"id":1,"name":null}', b'{"id":1', b'{"id":"x"}', b"[]", None]
    column = from_json("value", "id bigint, name string", mode="permissive")
    assert read(spark, data, column) == [{"id": 1, "name": None}, None, None, None, None]
    assert read(spark, data[:1], to_json(column)) == [b'{"id":1,"name":null}']
    with pytest.raises(Exception, match="MALFORMED_RECORD"):
        read(spark, data[:2], from_json("value", "id bigint"))


def test_json_in_an_envelope(spark: SparkSession) -> None:
    data = [b'{"schema":{"type":"struct"},"payload":{"id":1}}', b'{"payload":null}', b"{"]
    column = from_json("value", "id int", envelope=True, mode="PERMISSIVE")
    assert read(spark, data, column) == [{"id": 1}, None, None]


@pytest.mark.parametrize("data", [b"", b" \t", b"null", b"[]", b"7", b'{"id":1'])
def test_failfast_makes_null_of_nothing_but_null(spark: SparkSession, data: bytes) -> None:
    """NULL would be a tombstone in a compacted topic: it would delete what the key had."""
    for envelope in (False, True):
        with pytest.raises(Exception, match=r"from_json: .* is no JSON|MALFORMED_RECORD"):
            read(spark, [data], from_json("value", "id int", envelope=envelope))
    assert read(spark, [None], from_json("value", "id int")) == [None]


def test_an_envelope_without_a_payload_is_corrupt(spark: SparkSession) -> None:
    column = from_json("value", "id int", envelope=True)
    for data in (b'{"id":1}', b"{}"):
        with pytest.raises(Exception, match=r"from_json: .* has no field payload.*envelope=False"):
            read(spark, [data], column)
    data = [b'{"schema":null,"payload":null}', None, b'{"payload":{"id":1}}']
    assert read(spark, data, column) == [None, None, {"id": 1}]


def test_an_empty_line_of_csv_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"from_csv: .* is no line of CSV|MALFORMED_RECORD"):
        read(spark, [b""], from_csv("value", "id int, name string"))


def test_csv_both_ways(spark: SparkSession) -> None:
    data = [b'1;"a;b"', b"x;y", b"1", b"1;2;3", None]
    column = from_csv("value", "id int, name string", separator=";", mode="PERMISSIVE")
    assert read(spark, data, column) == [{"id": 1, "name": "a;b"}, None, None, None, None]
    assert read(spark, data[:1], to_csv(column, separator=";")) == [b'1;"a;b"']
    with pytest.raises(Exception, match="MALFORMED_RECORD"):
        read(spark, data[1:2], from_csv("value", "id int, name string", separator=";"))


def test_a_schema_that_is_no_struct_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConverterError, match="the fields of a struct"):
        from_json("value", "int")


def test_big_endian_numbers_as_connects_own_converters_write_them(spark: SparkSession) -> None:
    data = [n.to_bytes(8, "big", signed=True) for n in (7, -7, 2**63 - 1)]
    column = sf.conv(sf.hex("value"), 16, -10).cast("bigint")
    assert read(spark, [*data, None], column) == [7, -7, 2**63 - 1, None]
