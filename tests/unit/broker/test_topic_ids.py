"""Topics are made and deleted by the ids that clients send, so that requests may be repeated."""

from __future__ import annotations

from penstock.v1 import admin_pb2, cluster_pb2
from penstock.wire.errors import ErrorCode, UnknownTopicIdError
from tests.unit.broker.test_services import FakeControllers, image_with, led_nowhere, servicer_of


async def test_the_id_that_a_client_drew_is_the_topics() -> None:
    controllers = FakeControllers()
    wish = cluster_pb2.CreateTopicCommand(name="t", topic_id=b"i" * 16)
    request = admin_pb2.CreateTopicsRequest(topics=[wish])
    for _ in range(2):
        await servicer_of(image_with(), controllers, led_nowhere).CreateTopics(request, None)
    assert [sent.create_topic.topic_id for sent in controllers.commands] == [b"i" * 16] * 2


async def test_a_topic_is_deleted_by_the_id_that_was_meant() -> None:
    """Not the one that has the name by now."""
    image, controllers = image_with("orders"), FakeControllers()
    controllers.result.error.CopyFrom(UnknownTopicIdError("no topic has it").to_proto())
    request = admin_pb2.DeleteTopicsRequest(names=["orders"], topic_ids=[b"o" * 16])
    answer = await servicer_of(image, controllers, led_nowhere).DeleteTopics(request, None)
    [command] = controllers.commands
    assert (command.delete_topic.topic_id, command.delete_topic.name) == (b"o" * 16, "orders")
    assert answer.results[0].error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "not there any more" in answer.results[0].error.message


async def test_topics_with_ids_of_some_only_are_not_deleted() -> None:
    controllers = FakeControllers()
    request = admin_pb2.DeleteTopicsRequest(names=["a", "b"], topic_ids=[b"o" * 16])
    servicer = servicer_of(image_with("a", "b"), controllers, led_nowhere)
    answer = await servicer.DeleteTopics(request, None)
    assert [result.error.code for result in answer.results] == [ErrorCode.INVALID_REQUEST] * 2
    assert controllers.commands == []
