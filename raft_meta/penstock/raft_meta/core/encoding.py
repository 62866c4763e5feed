"""Many partitions as bytes, fast: what is the same in many of them is encoded once.

Protobuf's message objects cost 2.6 µs a partition to fill; a cluster has 100,000 partitions and
more, which differ in little but their number and epochs. The bytes are those of PartitionRecord:
fields may come in any order, so that the part that many share can be joined to the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.descriptor import FieldDescriptor

from penstock.raft_meta.core.model import Partition, Topic
from penstock.v1 import cluster_pb2

_FIELDS: Final = cluster_pb2.PartitionRecord.DESCRIPTOR.fields_by_name
_BYTES_TYPE: Final = 2
_MAX_SHAPES: Final = 20_000
"""Beyond it all are forgotten: there are few in a cluster at any time."""


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _tag(field: str, wire_type: int = 0) -> bytes:
    return _varint(_FIELDS[field].number << 3 | wire_type)


_VARINTS: Final = [_varint(number) for number in range(1 << 14)]
_TOPIC_ID: Final = _tag("topic_id", _BYTES_TYPE)
_PARTITION: Final = _tag("partition")
_LEADER_EPOCH: Final = _tag("leader_epoch")
_PARTITION_EPOCH: Final = _tag("partition_epoch")
_IN_DELTA: Final = _varint(
    cluster_pb2.MetadataDelta.DESCRIPTOR.fields_by_name["partitions"].number << 3 | _BYTES_TYPE
)


def _number(value: int) -> bytes:
    """A number that is not negative, as all of a partition but its leader are."""
    return _VARINTS[value] if value < len(_VARINTS) else _varint(value)


def nested(field: FieldDescriptor, encoded: bytes) -> bytes:
    """A message field as bytes, given the bytes of the message: to be joined to others'."""
    return _varint(field.number << 3 | _BYTES_TYPE) + _varint(len(encoded)) + encoded


class PartitionEncoder:
    """Encodes partitions as the field ``partitions`` of a MetadataDelta. Remembers shapes."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[object, ...], bytes] = {}

    def encode(self, topic: Topic, partitions: Iterable[tuple[int, Partition]]) -> bytes:
        """A topic's partitions with their numbers, to be joined to a serialized MetadataDelta."""
        topic_id = topic.topic_id
        head = _TOPIC_ID + _number(len(topic_id)) + topic_id + _PARTITION
        # The min.insync.replicas in force follows from what is set and the shape.
        configured = (topic.configs.get("min.insync.replicas", ""),)
        shapes, small, limit = self._shapes, _VARINTS, len(_VARINTS)
        encoded: list[bytes] = []
        for number, partition in partitions:
            leader_epoch, partition_epoch = partition[4:6]
            key = configured + partition[:4] + partition[6:]
            shape = shapes.get(key)
            if shape is None:
                shape = self._encode_shape(key, topic, partition)
            # _number, written out: three calls a partition would cost more than all else here.
            body = (
                head
                + (small[number] if number < limit else _varint(number))
                + _LEADER_EPOCH
                + (small[leader_epoch] if leader_epoch < limit else _varint(leader_epoch))
                + _PARTITION_EPOCH
                + (small[partition_epoch] if partition_epoch < limit else _varint(partition_epoch))
                + shape
            )
            encoded += (_IN_DELTA, _number(len(body)), body)
        return b"".join(encoded)

    def _encode_shape(self, key: tuple[object, ...], topic: Topic, partition: Partition) -> bytes:
        """All but topic, number and epochs: zeros and empty fields take no bytes."""
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        without_epochs = partition._replace(leader_epoch=0, partition_epoch=0)
        record = without_epochs.to_proto(topic, 0)
        record.ClearField("topic_id")
        shape = self._shapes[key] = record.SerializeToString()
        return shape
