"""Reassignments as a broker forwards and lists them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import admin_pb2, cluster_pb2, common_pb2
from penstock.wire.errors import ErrorCode, NotControllerError, RequestTimedOutError
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.unit.broker.test_services import FakeControllers, image_with, servicer_of

ORDERS = TopicId(b"orders".ljust(16, b"_"))


def moving_image() -> MetadataImage:
    image = image_with("orders", "bills", brokers=6)
    record = cluster_pb2.PartitionRecord(
        topic_id=ORDERS,
        partition=0,
        replicas=[1, 2, 3, 4],
        isr=[1, 2, 3],
        leader=1,
        adding_replicas=[4],
        removing_replicas=[3],
        target_replicas=[4, 1, 2],
        partition_epoch=1,
    )
    assert image.apply(cluster_pb2.MetadataDelta(index=2, partitions=[record])) is not None
    return image


def ends(key: TopicIdPartition) -> Mapping[int, int] | None:
    return {1: 100, 2: 100, 3: 90, 4: -1} if key == TopicIdPartition(ORDERS, 0) else None


def named(topic: str, partition: int = 0) -> common_pb2.TopicPartition:
    return common_pb2.TopicPartition(topic=topic, partition=partition)


async def test_what_moves_is_listed_with_the_progress_of_each_replica() -> None:
    servicer = servicer_of(moving_image(), FakeControllers(), ends)
    for wanted in ([], [named("orders"), named("bills")]):
        request = admin_pb2.ListReassignmentsRequest(partitions=wanted)
        [entry] = (await servicer.ListReassignments(request, None)).reassignments
        assert (entry.partition.topic, entry.partition.partition) == ("orders", 0)
        assert list(entry.replicas) == [4, 1, 2]
        assert (list(entry.adding_replicas), list(entry.removing_replicas)) == ([4], [3])
        assert entry.leader == 1
        progress = [(r.node_id, r.in_sync, r.log_end_offset, r.lag) for r in entry.progress]
        assert progress == [
            (1, True, 100, 0),
            (2, True, 100, 0),
            (3, True, 90, 10),
            (4, False, -1, -1),
        ]


async def test_a_broker_that_does_not_lead_lists_without_offsets() -> None:
    servicer = servicer_of(moving_image(), FakeControllers(), lambda _: None)
    answer = await servicer.ListReassignments(admin_pb2.ListReassignmentsRequest(), None)
    [entry] = answer.reassignments
    assert {(r.log_end_offset, r.lag) for r in entry.progress} == {(-1, -1)}


async def test_listing_what_is_not_there_is_refused() -> None:
    servicer = servicer_of(moving_image(), FakeControllers(), ends)
    request = admin_pb2.ListReassignmentsRequest(partitions=[named("orders", 9)])
    answer = await servicer.ListReassignments(request, None)
    assert answer.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_known_partitions_are_forwarded_and_each_has_its_answer() -> None:
    controllers = FakeControllers()
    outcome = controllers.result.alter_reassignments
    outcome.partitions.add().error.CopyFrom(NotControllerError("made up").to_proto())
    outcome.partitions.add()
    servicer = servicer_of(moving_image(), controllers, ends)
    request = admin_pb2.AlterReassignmentsRequest(validate_only=True)
    for topic in ("orders", "nothing", "bills"):
        request.reassignments.add(partition=named(topic), replicas=[4, 5, 6])
    answer = await servicer.AlterReassignments(request, None)
    assert [result.partition.topic for result in answer.results] == ["orders", "nothing", "bills"]
    codes = [result.error.code for result in answer.results]
    assert codes == [ErrorCode.NOT_CONTROLLER, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0]
    [command] = controllers.commands
    sent = command.alter_reassignments
    assert sent.validate_only
    assert [list(entry.replicas) for entry in sent.partitions] == [[4, 5, 6]] * 2


async def test_nothing_known_asks_no_controller() -> None:
    controllers = FakeControllers()
    request = admin_pb2.AlterReassignmentsRequest()
    request.reassignments.add(partition=named("nothing"), replicas=[4])
    answer = await servicer_of(moving_image(), controllers, ends).AlterReassignments(request, None)
    assert answer.results[0].error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert not controllers.commands


async def test_refusals_of_the_whole_are_passed_on() -> None:
    controllers = FakeControllers()
    request = admin_pb2.AlterReassignmentsRequest()
    request.reassignments.add(partition=named("orders"), replicas=[4])
    servicer = servicer_of(moving_image(), controllers, ends)
    controllers.result.error.CopyFrom(NotControllerError("made up").to_proto())
    refused = await servicer.AlterReassignments(request, None)
    assert refused.error.code == ErrorCode.NOT_CONTROLLER
    controllers.failure = RequestTimedOutError("nobody answers")
    lost = await servicer.AlterReassignments(request, None)
    assert lost.error.code == ErrorCode.REQUEST_TIMED_OUT
