from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions import (
    cast,
    drop_headers,
    extract_field,
    extract_topic,
    filter_out,
    flatten,
    has_header_key,
    header,
    header_from,
    hoist_field,
    insert_field,
    insert_header,
    mask_field,
    only_where,
    record_is_tombstone,
    regex_router,
    replace_field,
    timestamp_converter,
    timestamp_router,
    topic_name_matches,
    value_to_key,
)

AT = datetime.datetime(2026, 3, 29, 2, 30, 7, 123_456, tzinfo=datetime.UTC)
SCHEMA = """
    key binary, value struct<id: bigint, card: string, at: struct<city: string, zip: int>>,
    topic string, timestamp timestamp, headers array<struct<key: string, value: binary>>
"""


@pytest.fixture
def records(spark: SparkSession) -> DataFrame:
    full = (b"k", (7, "1234", ("Ulm", 89073)), "orders-raw", AT, [("trace", b"t1"), ("a", b"1")])
    return spark.createDataFrame([full, (b"k", None, "orders", AT, None)], SCHEMA)


@pytest.fixture(params=["UTC", "Europe/Berlin"])
def zone(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[str]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", before)


def values(frame: DataFrame, column: str = "value") -> list[Any]:
    rows = frame.select(column).collect()
    return [row[0].asDict(recursive=True) if isinstance(row[0], Row) else row[0] for row in rows]


# --- fields ---------------------------------------------------------------------------------


def test_insert_field(records: DataFrame) -> None:
    found = values(
        records.transform(insert_field, "value", "from", sf.col("topic"))
        .transform(insert_field, "value", "at.country", "DE")
        .transform(insert_field, "value", "id", 8)
    )
    at = {"city": "Ulm", "zip": 89073, "country": "DE"}
    assert found == [{"id": 8, "card": "1234", "at": at, "from": "orders-raw"}, None]


def test_replace_field(records: DataFrame) -> None:
    swapped = records.transform(
        replace_field, "value", exclude=["at"], renames={"id": "card", "card": "id"}
    )
    assert values(swapped) == [{"card": 7, "id": "1234"}, None]
    assert values(records.transform(replace_field, "value", include=["id"])) == [{"id": 7}, None]
    with pytest.raises(TransformError, match="would have no field"):
        replace_field(records, "value", exclude=["id", "card", "at"])
    with pytest.raises(TransformError, match="a name twice"):
        replace_field(records, "value", renames={"id": "card"})
    with pytest.raises(TransformError, match="lies within"):
        replace_field(records, "value", exclude=["at.zip"])


def test_mask_field(records: DataFrame) -> None:
    masked = records.transform(mask_field, "value", "id", "card", "at.zip")
    assert values(masked) == [{"id": 0, "card": "", "at": {"city": "Ulm", "zip": 0}}, None]
    kinds = [frame.schema["value"].dataType.simpleString() for frame in (masked, records)]
    assert kinds[0] == kinds[1]
    own = records.transform(mask_field, "value", "card", replacement="***")
    assert values(own)[0]["card"] == "***"
    with pytest.raises(TransformError, match="pass replacement"):
        mask_field(records, "value", "at")


def test_every_plain_type_has_an_empty_value(spark: SparkSession) -> None:
    frame = spark.sql("""select struct(true as b, 1.5d as d, 1.50 as m, date'2026-01-01' as day,
        timestamp'2026-01-01' as t, array(1) as l, map('a', 1) as m2, X'00' as x) as value""")
    masked = frame.transform(mask_field, "value", *frame.schema["value"].dataType.fieldNames())
    epoch = masked.select(sf.unix_micros("value.t")).first()[0]
    (found,) = values(masked)
    assert epoch == 0
    assert {**found, "t": None} == {
        "b": False, "d": 0.0, "m": Decimal(0), "day": datetime.date(1970, 1, 1), "t": None,
        "l": [], "m2": {}, "x": b"",
    }  # fmt: skip


def test_cast(records: DataFrame) -> None:
    whole = records.transform(cast, "value", {"id": "string", "at.zip": "double"})
    assert values(whole)[0] == {"id": "7", "card": "1234", "at": {"city": "Ulm", "zip": 89073.0}}
    lenient = records.transform(cast, "value", {"at.city": "int"}, mode="PERMISSIVE")
    assert values(lenient)[0]["at"] == {"city": None, "zip": 89073}
    assert values(records.transform(cast, "key", "string"), "key") == ["k", "k"]
    with pytest.raises(Exception, match="CAST_INVALID_INPUT"):
        values(records.transform(cast, "value", {"at.city": "int"}))
    with pytest.raises(TransformError, match="mode='LAX' is none of"):
        cast(records, "value", {"id": "int"}, mode="LAX")


def test_flatten_hoist_extract_and_value_to_key(records: DataFrame) -> None:
    flat = records.transform(flatten, "value", delimiter="_")
    assert values(flat) == [{"id": 7, "card": "1234", "at_city": "Ulm", "at_zip": 89073}, None]
    assert values(records.transform(flatten, "value"))[0]["at.zip"] == 89073
    hoisted = records.transform(hoist_field, "key", "id")
    assert values(hoisted, "key")[0] == {"id": bytearray(b"k")}
    assert values(records.transform(extract_field, "value", "at.city")) == ["Ulm", None]
    keyed = records.transform(value_to_key, "id", "at.zip")
    assert values(keyed, "key")[0] == {"id": 7, "zip": 89073}


def test_flattened_fields_can_be_found_by_their_names(records: DataFrame) -> None:
    flat = records.transform(flatten, "value").transform(mask_field, "value", "at.zip")
    assert values(flat)[0]["at.zip"] == 0


def test_flatten_refuses_names_that_would_be_twice(spark: SparkSession) -> None:
    frame = spark.sql("select struct(1 as a_b, struct(2 as b) as a) as value")
    with pytest.raises(TransformError, match="a field twice"):
        flatten(frame, "value", delimiter="_")


def test_what_is_not_there_is_refused_by_name(records: DataFrame) -> None:
    with pytest.raises(TransformError, match="no column 'valu'; next: name one of key, value"):
        mask_field(records, "valu", "id")
    with pytest.raises(TransformError, match=r"'key' is binary and has no fields.*from_json"):
        mask_field(records, "key", "id")
    with pytest.raises(TransformError, match=r"has no field 'at\.street'; next: name one of id"):
        extract_field(records, "value", "at.street")
    with pytest.raises(TransformError, match="has no field 'nowhere'"):
        insert_field(records, "value", "nowhere.x", 1)


# --- times ----------------------------------------------------------------------------------


# The second, third and fourth lie in the hours that Berlin does not have, and has twice.
TIMES = [
    (0, "yyyy-MM-dd HH:mm:ss.SSSSSS", "1970-01-01 00:00:00.000000", 0),
    (1_774_751_407_123_456, "yyyy-MM-dd'T'HH:mm:ss.SSSX", "2026-03-29T02:30:07.123Z",
     1_774_751_407_123_000),
    (1_774_751_407_123_456, "yyyy-MM-dd HH:mm", "2026-03-29 02:30", 1_774_751_400_000_000),
    (1_792_891_800_000_000, "yyyyMMddHHmm", "202610250130", 1_792_891_800_000_000),
    (1_792_895_400_000_000, "yyyyMMddHHmm", "202610250230", 1_792_895_400_000_000),
    (-1, "yyyy M d H m s.SSS", "1969 12 31 23 59 59.999", -1_000),
    (253_402_300_799_999_999, "yyyy-MM-dd", "9999-12-31", 253_402_214_400_000_000),
    (0, "yy", "70", None),
]  # fmt: skip


def test_times_are_written_and_read_by_utc(spark: SparkSession, zone: str) -> None:
    frame = spark.range(1).select(
        *[
            sf.timestamp_micros(sf.lit(micros)).alias(f"t{at}")
            for at, (micros, *_) in enumerate(TIMES)
        ]
    )
    for at, (_, pattern, _, _) in enumerate(TIMES):
        frame = timestamp_converter(frame, f"t{at}", target="string", pattern=pattern)
    assert list(frame.first() or []) == [text for _, _, text, _ in TIMES]
    for at, (_, pattern, _, back) in enumerate(TIMES):
        if back is None:
            frame = frame.drop(f"t{at}")
        else:
            frame = timestamp_converter(
                frame, f"t{at}", target="unix", pattern=pattern, unit="microseconds"
            )
    assert list(frame.first() or []) == [back for *_, back in TIMES if back is not None]


UNITS = {
    "seconds": -1,
    "milliseconds": -877,
    "microseconds": -876_544,
    "nanoseconds": -876_544_000,
}


def test_numbers_are_rounded_downwards(spark: SparkSession) -> None:
    frame = spark.range(1).select(
        *[sf.timestamp_micros(sf.lit(-876_544)).alias(unit) for unit in UNITS]
    )
    for unit in UNITS:
        for target in ("unix", "timestamp", "unix"):
            frame = timestamp_converter(frame, unit, target=target, unit=unit)
    assert list(frame.first() or []) == list(UNITS.values())


def test_dates(spark: SparkSession, zone: str) -> None:
    frame = spark.sql("select struct(-1L as at) as value")
    dated = frame.transform(timestamp_converter, "value", "at", target="date")
    assert values(dated) == [{"at": datetime.date(1969, 12, 31)}]
    back = dated.transform(timestamp_converter, "value", "at", target="unix", unit="seconds")
    assert values(back) == [{"at": -86_400}]


@pytest.mark.parametrize("pattern", ["yyyy-MM-dd HH:mm", "yyyy-MM-dd HH:mmX"])
def test_text_that_is_no_time(spark: SparkSession, pattern: str) -> None:
    frame = spark.sql("select 'soon' as value")
    how = {"target": "timestamp", "pattern": pattern}
    lenient = frame.transform(timestamp_converter, "value", mode="PERMISSIVE", **how)
    assert values(lenient) == [None]
    with pytest.raises(Exception, match="CANNOT_PARSE_TIMESTAMP"):
        values(frame.transform(timestamp_converter, "value", **how))


def test_zones_in_the_text_count(spark: SparkSession, zone: str) -> None:
    frame = spark.sql("select '2026-07-01 12:00+02' as value")
    how = {"pattern": "yyyy-MM-dd HH:mmX", "unit": "seconds"}
    found = frame.transform(timestamp_converter, "value", target="unix", **how)
    assert values(found) == [1_782_900_000]


def test_what_is_no_form_of_time(records: DataFrame) -> None:
    for arguments, match in [
        ({"target": "string"}, "pattern"),
        ({"target": "epoch"}, "'epoch' is none of"),
        ({"target": "unix", "unit": "hours"}, "unit='hours'"),
    ]:
        with pytest.raises(TransformError, match=match):
            timestamp_converter(records, "timestamp", **arguments)
    with pytest.raises(TransformError, match="binary is no time"):
        timestamp_converter(records, "key", target="unix")


# --- topics ---------------------------------------------------------------------------------


def test_regex_router_wants_the_whole_name(spark: SparkSession) -> None:
    names = ["orders-raw", "orders-raw-2", "xorders-raw\n"]
    frame = spark.createDataFrame([(name,) for name in names], "topic string")
    routed = frame.transform(regex_router, "(ord.*)-raw", "clean.$1")
    assert values(routed, "topic") == ["clean.orders", *names[1:]]


def test_timestamp_router_goes_by_utc(records: DataFrame, zone: str) -> None:
    routed = records.transform(timestamp_router, timestamp_format="yyyy-MM-dd-HH")
    assert values(routed, "topic") == ["orders-raw-2026-03-29-02", "orders-2026-03-29-02"]
    own = records.transform(timestamp_router, topic_format="${timestamp}.$1.${topic}")
    assert values(own, "topic")[0] == "20260329.$1.orders-raw"


def test_extract_topic(records: DataFrame) -> None:
    assert values(records.transform(extract_topic, "value", "at.city"), "topic") == [
        "Ulm",
        "orders",
    ]


# --- headers --------------------------------------------------------------------------------


def headers_of(frame: DataFrame) -> list[Any]:
    rows = frame.select("headers").collect()
    return [[(each.key, each.value and bytes(each.value)) for each in row.headers] for row in rows]


def test_headers(records: DataFrame) -> None:
    more = records.transform(insert_header, "trace", "t2").transform(drop_headers, "a")
    assert headers_of(more) == [[("trace", b"t1"), ("trace", b"t2")], [("trace", b"t2")]]
    found = more.select(header("trace"), header("a"), has_header_key("a")).collect()
    assert [tuple(row) for row in found] == [(b"t2", None, False)] * 2
    assert values(records.select(has_header_key("a").alias("value"))) == [True, False]


def test_header_from(records: DataFrame) -> None:
    copied = records.transform(header_from, "value", ["id", "at"], ["order", "where"])
    made = [("order", b"7"), ("where", b'{"city":"Ulm","zip":89073}')]
    assert headers_of(copied) == [[("trace", b"t1"), ("a", b"1"), *made], []]
    moved = records.drop("headers").transform(header_from, "value", ["card"], operation="move")
    assert headers_of(moved) == [[("card", b"1234")], []]
    assert "card" not in values(moved)[0]


def test_headers_that_were_not_read_are_missed_by_name(records: DataFrame) -> None:
    with pytest.raises(TransformError, match="includeHeaders=true"):
        drop_headers(records.drop("headers"), "a")


# --- predicates -----------------------------------------------------------------------------


def test_filter_out(records: DataFrame) -> None:
    topics = {
        "topic-matches": (topic_name_matches("orders"), ["orders-raw"]),
        "not-tombstone": (~record_is_tombstone(), ["orders"]),
        "header": (has_header_key("trace"), ["orders"]),
        "unclear": (sf.col("value.id") > 5, ["orders"]),
    }
    for predicate, left in topics.values():
        assert values(records.transform(filter_out, predicate), "topic") == left


def test_a_transform_of_some_records_only(records: DataFrame) -> None:
    predicate = topic_name_matches(".*-raw")
    masked = records.transform(only_where, predicate, mask_field, "value", "card")
    assert [value and value["card"] for value in values(masked)] == ["", None]
    # The predicate is about the record as it came, whatever the transform makes of it.
    routed = records.transform(only_where, predicate, regex_router, ".*", "x")
    assert values(routed, "topic") == ["x", "orders"]
    assert routed.columns == records.columns
    with pytest.raises(TransformError, match="gives value another type"):
        only_where(records, predicate, insert_field, "value", "new", 1)
