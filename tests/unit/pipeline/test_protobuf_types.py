from __future__ import annotations

import datetime
from decimal import Decimal

import pytest
from google.protobuf import (
    descriptor_pb2,
    duration_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import Message

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.protobuf import _load, _MessageKind
from penstock.pipeline.functions.protobuf_types import (
    from_message,
    into_message,
    spark_type,
)
from tests.unit.pipeline.messages import order_class


def test_messages_are_structs() -> None:
    assert spark_type(order_class().DESCRIPTOR).simpleString() == (
        "struct<id:bigint,big:decimal(20,0),note:string,state:string,tags:array<string>,"
        "counts:map<string,int>,lines:array<struct<sku:string,price:double>>,"
        "placed:timestamp,took:interval day to second,weight:double,first:struct<sku:string,"
        "price:double>,card:binary>"
    )


def test_fields_that_are_not_set_are_null_or_their_default() -> None:
    found = from_message(order_class()())
    assert found == {
        "id": 0, "big": Decimal(0), "note": None, "state": "UNKNOWN", "tags": [], "counts": [],
        "lines": [], "placed": None, "took": None, "weight": None, "first": None, "card": b"",
    }  # fmt: skip


def test_values_come_back() -> None:
    values = {
        "id": 4_294_967_295, "big": Decimal(2**64 - 1), "note": "", "state": "PAID",
        "tags": ["a", "b"], "counts": [("x", 1)], "lines": [{"sku": "s", "price": 1.5}],
        "placed": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=-1, microseconds=5), "weight": 0.0,
        "first": {"sku": "", "price": 0.0}, "card": b"\0\xff",
    }  # fmt: skip
    message = order_class()()
    into_message(values, message)
    read = order_class().FromString(message.SerializeToString())
    assert from_message(read) == values


def test_a_value_of_an_enum_that_is_not_known_keeps_its_number() -> None:
    message = order_class()()
    into_message({"state": "77"}, message)
    assert from_message(message)["state"] == "77"
    with pytest.raises(ConverterError, match="has no value 'LOST'"):
        into_message({"state": "LOST"}, message)


def test_what_does_not_fit_is_refused() -> None:
    message = order_class()()
    with pytest.raises(ConverterError, match="has no field 'nonsense'"):
        into_message({"nonsense": 1}, message)
    with pytest.raises(ConverterError, match="whole number"):
        into_message({"big": Decimal("1.5")}, message)


def test_a_message_that_holds_itself_is_refused() -> None:
    with pytest.raises(ConverterError, match=r"google\.protobuf\.\w+ holds itself"):
        spark_type(struct_pb2.Struct.DESCRIPTOR)


@pytest.mark.parametrize(
    "message", [timestamp_pb2.Timestamp, duration_pb2.Duration, wrappers_pb2.Int64Value]
)
def test_messages_travel_with_the_files_they_need(message: type[Message]) -> None:
    kind = _MessageKind.of(message, None)
    assert kind.load().DESCRIPTOR.full_name == message.DESCRIPTOR.full_name
    kind = _MessageKind.of(order_class(), None)
    names = [each.name for each in descriptor_pb2.FileDescriptorSet.FromString(kind.files).file]
    assert names[-1] == "penstock_tests_order.proto"
    assert "google/protobuf/timestamp.proto" in names


def test_a_set_without_the_message_is_refused() -> None:
    with pytest.raises(ConverterError, match=r"has no message shop\.Nothing"):
        _load("shop.Nothing", _MessageKind.of(order_class(), None).files)
    with pytest.raises(ConverterError, match="pass descriptor_set="):
        _MessageKind.of("shop.Order", None)
