"""A protobuf message with fields of every kind, made without a compiler."""

from __future__ import annotations

from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_F = descriptor_pb2.FieldDescriptorProto


@cache
def order_file() -> descriptor_pb2.FileDescriptorProto:
    """The file ``penstock_tests_order.proto``."""
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock_tests_order.proto",
        package="shop",
        syntax="proto3",
        dependency=[
            f"google/protobuf/{name}.proto" for name in ("timestamp", "duration", "wrappers")
        ],
    )
    line = file.message_type.add(name="Line")
    _add(line, "sku", _F.TYPE_STRING)
    _add(line, "price", _F.TYPE_DOUBLE)
    state = file.enum_type.add(name="State")
    for number, name in enumerate(("UNKNOWN", "PAID")):
        state.value.add(name=name, number=number)
    order = file.message_type.add(name="Order")
    order.oneof_decl.add(name="_note")
    entry = order.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    _add(entry, "key", _F.TYPE_STRING)
    _add(entry, "value", _F.TYPE_INT32)
    _add(order, "id", _F.TYPE_UINT32)
    _add(order, "big", _F.TYPE_UINT64)
    note = _add(order, "note", _F.TYPE_STRING)
    note.proto3_optional, note.oneof_index = True, 0
    _add(order, "state", _F.TYPE_ENUM, ".shop.State")
    _add(order, "tags", _F.TYPE_STRING, many=True)
    _add(order, "counts", _F.TYPE_MESSAGE, ".shop.Order.CountsEntry", many=True)
    _add(order, "lines", _F.TYPE_MESSAGE, ".shop.Line", many=True)
    _add(order, "placed", _F.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    _add(order, "took", _F.TYPE_MESSAGE, ".google.protobuf.Duration")
    _add(order, "weight", _F.TYPE_MESSAGE, ".google.protobuf.DoubleValue")
    _add(order, "first", _F.TYPE_MESSAGE, ".shop.Line")
    _add(order, "card", _F.TYPE_BYTES)
    return file


@cache
def order_class() -> type[Message]:
    """The class of ``shop.Order``, as generated code would have it."""
    from google.protobuf import duration_pb2, timestamp_pb2, wrappers_pb2

    pool = descriptor_pool.DescriptorPool()
    for needed in (timestamp_pb2, duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(needed.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(order_file().SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def _add(
    to: descriptor_pb2.DescriptorProto,
    name: str,
    kind: _F.Type.ValueType,
    type_name: str = "",
    *,
    many: bool = False,
) -> descriptor_pb2.FieldDescriptorProto:
    label = _F.LABEL_REPEATED if many else _F.LABEL_OPTIONAL
    number = len(to.field) + 1
    field = to.field.add(name=name, number=number, type=kind, label=label)
    if type_name:
        field.type_name = type_name
    return field
