"""Answers as they leave by the port for clients from outside: with what these can reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from penstock.broker.client_ports import SERVED_TO_CLIENTS
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.service.outside import ToldOutside
from penstock.v1 import cluster_pb2, common_pb2, groups_pb2, log_pb2, metadata_pb2
from penstock.wire.errors import LeaderHint, NotControllerError, NotLeaderError
from penstock.wire.laden import Laden

INSIDE = {1: ("b1.inside", 9092), 2: ("b2.inside", 9092), 3: ("b3.inside", 9092)}
OUTSIDE = {1: ("b1.outside", 9094), 2: ("b2.outside", 9095)}  # Broker 3 has none.


@pytest.fixture
def image() -> MetadataImage:
    made = MetadataImage()
    made.apply(
        cluster_pb2.MetadataDelta(
            index=1,
            snapshot=True,
            brokers=[
                cluster_pb2.BrokerRecord(
                    node_id=node,
                    host=host,
                    port=port,
                    external_host=OUTSIDE.get(node, ("", 0))[0],
                    external_port=OUTSIDE.get(node, ("", 0))[1],
                )
                for node, (host, port) in INSIDE.items()
            ],
        )
    )
    return made


@pytest.fixture
def tell(image: MetadataImage) -> ToldOutside:
    return ToldOutside(image)


def not_leader(node: int) -> common_pb2.Error:
    hint = LeaderHint(node, 7, *INSIDE.get(node, ("gone.inside", 9092)))
    return NotLeaderError("another leads", leader=hint).to_proto()


def where(error: common_pb2.Error) -> tuple[str, int]:
    return error.current_leader.host, error.current_leader.port


def test_brokers_are_where_they_can_be_reached_and_one_without_such_an_address_where_it_is(
    tell: ToldOutside,
) -> None:
    answer = metadata_pb2.DescribeClusterResponse(
        brokers=[
            metadata_pb2.BrokerDescription(node_id=node, host=host, port=port, rack="r")
            for node, (host, port) in INSIDE.items()
        ]
    )
    told = tell(answer)
    assert {one.node_id: (one.host, one.port) for one in told.brokers} == {**INSIDE, **OUTSIDE}
    assert {one.rack for one in told.brokers} == {"r"}


def test_what_others_get_too_is_left_as_it_is(tell: ToldOutside) -> None:
    answer = groups_pb2.GroupHeartbeatResponse(error=not_leader(1))
    assert where(tell(answer).error) == OUTSIDE[1]
    assert where(answer.error) == INSIDE[1]


def test_what_has_no_address_to_exchange_is_not_copied(tell: ToldOutside) -> None:
    for answer in (
        log_pb2.ProduceResponse(partitions=[log_pb2.ProducePartitionResult(base_offset=4)]),
        groups_pb2.GroupHeartbeatResponse(error=not_leader(3)),
    ):
        assert tell(answer) is answer


def test_a_leader_that_is_registered_no_longer_is_told_as_it_was(tell: ToldOutside) -> None:
    answer = groups_pb2.GroupHeartbeatResponse(error=not_leader(9))
    assert where(tell(answer).error) == ("gone.inside", 9092)


def test_where_a_controller_is_stays_though_a_broker_has_its_id(tell: ToldOutside) -> None:
    hint = LeaderHint(1, 7, "c1.inside", 10_092)
    error = NotControllerError("ask another", leader=hint).to_proto()
    assert where(tell(groups_pb2.GroupHeartbeatResponse(error=error)).error) == (
        "c1.inside",
        10_092,
    )


def test_records_stay_beside_the_answer_that_carries_them(tell: ToldOutside) -> None:
    entries = [log_pb2.FetchPartitionResult(), log_pb2.FetchPartitionResult(error=not_leader(2))]
    laden = Laden(log_pb2.FetchResponse(partitions=entries), [b"records", b""])
    told = tell(laden)
    assert where(told.message.partitions[1].error) == OUTSIDE[2]
    assert told.records == [b"records", b""]


# ---------------------------------------------------------------- every answer that there is

_NO_BROKERS = {
    "penstock.v1.QuorumVoter",  # A controller's.
    "penstock.v1.MemberDescription",  # A client's.
    "penstock.v1.DescribeNodeResponse",  # That of probes and metrics, which clients do not use.
}


def answers() -> Iterator[Descriptor]:
    pool = descriptor_pool.Default()
    for name in SERVED_TO_CLIENTS:
        for method in pool.FindServiceByName(name).methods:
            yield method.output_type


def messages_in(descriptor: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    yield descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from messages_in(field.message_type, seen)


def test_nothing_else_in_an_answer_to_clients_says_where_a_broker_is() -> None:
    """Whoever adds such a message has to have it exchanged too, or to say here why not."""
    seen: set[str] = set()
    told = {
        message.full_name
        for answer in answers()
        for message in messages_in(answer, seen)
        if any("host" in field.name or "address" in field.name for field in message.fields)
    }
    exchanged = {"penstock.v1.CurrentLeader", "penstock.v1.BrokerDescription"}
    assert exchanged <= told
    assert told - exchanged <= _NO_BROKERS, told


def fill(descriptor: Descriptor, message: object, depth: int = 0) -> int:
    """Put a leader and a broker wherever one can stand; how many places that were."""
    if descriptor.full_name in ("penstock.v1.CurrentLeader", "penstock.v1.BrokerDescription"):
        message.node_id, (message.host, message.port) = 2, INSIDE[2]  # type: ignore[attr-defined]
        return 1
    places = 0
    for field in descriptor.fields:
        if field.message_type is None or depth > 8:
            continue
        inner = GetMessageClass(field.message_type)()
        found = fill(field.message_type, inner, depth + 1)
        if not found:
            continue
        places += found
        value = getattr(message, field.name)
        if hasattr(value, "append"):
            value.append(inner)
        else:
            value.CopyFrom(inner)
    return places


@pytest.mark.parametrize("answer", list(answers()), ids=lambda one: one.name)
def test_no_answer_says_the_address_inside(tell: ToldOutside, answer: Descriptor) -> None:
    message = GetMessageClass(answer)()
    places = fill(answer, message)
    text = str(tell(message))
    assert text.count("b2.outside") == places
    assert "inside" not in text


def test_errors_are_among_what_was_just_tried() -> None:
    filled = [fill(answer, GetMessageClass(answer)()) for answer in answers()]
    assert sum(bool(places) for places in filled) > 30
