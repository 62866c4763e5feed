from __future__ import annotations

import io
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.avro_types import (
    mender,
    parse,
    spark_type,
    unmender,
)

ADDRESS = {
    "type": "record", "name": "Address", "namespace": "shop",
    "fields": [{"name": "city", "type": "string"}, {"name": "id", "type": {"type": "string",
     "logicalType": "uuid"}}],
}  # fmt: skip


def record(*kinds: Any) -> dict[str, Any]:
    fields = [{"name": f"f{at}", "type": kind} for at, kind in enumerate(kinds)]
    return {"type": "record", "name": "R", "fields": fields}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ("long", "bigint"),
        ('"long"', "bigint"),
        ('["null", "int"]', "int"),
        (["null"], "void"),
        (["int", "null", "long"], "bigint"),
        (["float", "double"], "double"),
        ({"type": "int", "logicalType": "date"}, "date"),
        ({"type": "int", "logicalType": "time-millis"}, "int"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp_ntz"),
        ({"type": "long", "logicalType": "unheard-of"}, "bigint"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "decimal(9,2)"),
        ({"type": "fixed", "name": "F", "size": 4}, "binary"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "string"),
        ({"type": "array", "items": ["null", "string"]}, "array<string>"),
        ({"type": "map", "values": "double"}, "map<string,double>"),
        (record({"type": "string"}, ["null", "boolean"]), "struct<f0:string,f1:boolean>"),
        # The second mentions what the first defined.
        (
            record(ADDRESS, ["null", "shop.Address"]),
            "struct<f0:struct<city:string,id:string>,f1:struct<city:string,id:string>>",
        ),
    ],
)
def test_schemas_have_the_types_of_sparks_own_avro(schema: Any, kind: str) -> None:
    assert spark_type(parse(schema)).simpleString() == kind


def test_a_type_that_holds_itself_is_refused() -> None:
    with pytest.raises(ConverterError, match="R holds itself"):
        spark_type(parse(record(["null", "R"])))


def test_a_union_of_several_types_is_refused() -> None:
    with pytest.raises(ConverterError, match="a union of int, string is no type"):
        spark_type(parse(["int", "string"]))


@pytest.mark.parametrize("schema", ["{", {"type": "nonsense"}, {"type": "record"}, "[1]"])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(ConverterError, match="Avro schema"):
        parse(schema)


def test_values_go_to_arrow_and_back() -> None:
    schema = parse(
        record(
            ADDRESS,
            {"type": "map", "values": ["null", "shop.Address"]},
            {"type": "array", "items": {"type": "map", "values": "int"}},
            ["null", {"type": "int", "logicalType": "time-millis"}],
            {"type": "long", "logicalType": "time-micros"},
            {"type": "long", "logicalType": "timestamp-micros"},
        )
    )
    one = {"city": "Ulm", "id": "12345678-1234-5678-1234-567812345678"}
    value = {
        "f0": one,
        "f1": [("a", one), ("b", None)],
        "f2": [[("x", 1)], []],
        "f3": 3_723_004,
        "f4": 86_399_999_999,
        "f5": 0,
    }
    unmend, mend = unmender(schema), mender(schema)
    assert unmend is not None
    assert mend is not None
    target = io.BytesIO()
    fastavro.schemaless_writer(target, schema, unmend(value))
    target.seek(0)
    read = mend(fastavro.schemaless_reader(target, schema, schema))
    kind = to_arrow_type(spark_type(schema), timezone="UTC")
    (found,) = pa.array([read], kind).to_pylist()
    assert {**found, "f5": found["f5"].timestamp()} == value


def test_plain_values_need_nothing() -> None:
    schema = parse(record("int", ["null", "string"], {"type": "array", "items": "long"}))
    assert mender(schema) is None
    assert unmender(schema) is None
