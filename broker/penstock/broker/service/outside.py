"""What clients from outside are told of where brokers are: each one's external address.

Services answer everybody alike, and errors that name a leader are made where nobody knows who
asked. So the addresses are exchanged last, as an answer leaves by the port for clients from
outside, wherever in it they stand: places are found by their type. Kafka's brokers give addresses
by the name of the listener that a request came to (KIP-103); here there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import common_pb2, metadata_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.laden import Laden

_PLACES: Final = (common_pb2.CurrentLeader, metadata_pb2.BrokerDescription)
"""All messages to clients that say where a broker is."""


class ToldOutside:
    """Exchanges addresses in the answers of one broker. A broker without an external one keeps its
    other: clients from outside may not reach it, but learn which it is.
    """

    def __init__(self, image: MetadataImage) -> None:
        self._image = image

    def __call__(self, answer: Any) -> Any:
        """The answer as clients from outside get it. It is not changed: others may get it too."""
        if isinstance(answer, Laden):
            answer.message = self._told(answer.message)  # One client's alone; its records are not.
            return answer
        return self._told(answer)

    def _told(self, message: Message) -> Message:
        if all(self._address(place) is None for place in _places(message)):
            return message
        told = type(message)()
        told.CopyFrom(message)
        for place in _places(told):
            address = self._address(place)
            if address is not None:
                place.host, place.port = address
        return told

    def _address(self, place: Any) -> tuple[str, int] | None:
        """What is to stand there; None where it stays as it is."""
        record = self._image.brokers.get(place.node_id)
        if record is None or not record.external_host:
            return None
        return record.external_host, record.external_port


def _places(message: Any) -> Iterator[Any]:
    """All that says where a broker is, in this message and those in it."""
    if isinstance(message, _PLACES):
        yield message
        return
    if isinstance(message, common_pb2.Error) and message.code == ErrorCode.NOT_CONTROLLER:
        return  # It says where a controller is, which may have a broker's id.
    for name in _ways(message.DESCRIPTOR):
        value = getattr(message, name)
        if not isinstance(value, Message):
            for each in value:
                yield from _places(each)
        elif message.HasField(name):
            yield from _places(value)


@cache
def _ways(descriptor: Descriptor) -> tuple[str, ...]:
    """The fields of such a message in which there may be places."""
    return tuple(
        field.name
        for field in descriptor.fields
        if field.message_type is not None and _leads_to_places(field.message_type, frozenset())
    )


def _leads_to_places(descriptor: Descriptor, above: frozenset[str]) -> bool:
    if any(descriptor.full_name == place.DESCRIPTOR.full_name for place in _PLACES):
        return True
    return descriptor.full_name not in above and any(
        _leads_to_places(field.message_type, above | {descriptor.full_name})
        for field in descriptor.fields
        if field.message_type is not None
    )
