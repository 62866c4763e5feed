"""The broker's picture of the cluster: deltas, snapshots, and what they report."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from penstock.broker.core import metadata_image
from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import cluster_pb2
from penstock.wire.errors import MetadataDivergedError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

A, B = TopicId(b"a" * 16), TopicId(b"b" * 16)


def topic(name: str, topic_id: TopicId) -> cluster_pb2.TopicRecord:
    return cluster_pb2.TopicRecord(name=name, topic_id=topic_id)


def partition(topic_id: TopicId, number: int, leader: int) -> cluster_pb2.PartitionRecord:
    return cluster_pb2.PartitionRecord(topic_id=topic_id, partition=number, leader=leader)


def delta(index: int, **fields: object) -> cluster_pb2.MetadataDelta:
    return cluster_pb2.MetadataDelta(index=index, **fields)  # type: ignore[arg-type]


def with_orders() -> MetadataImage:
    image = MetadataImage()
    image.apply(
        delta(
            5,
            snapshot=True,
            cluster_id="c",
            topics=[topic("orders", A)],
            partitions=[partition(A, 0, 1)],
            brokers=[cluster_pb2.BrokerRecord(node_id=1)],
        )
    )
    return image


def test_a_snapshot_fills_the_picture() -> None:
    image = with_orders()
    found = image.partition("orders", 0)
    assert found is not None
    assert found.leader == 1
    assert image.partition_by_id(TopicIdPartition(A, 0)) == found
    assert image.named(TopicIdPartition(A, 0)) == TopicPartition("orders", 0)
    assert image.partition("orders", 1) is None


def test_topics_that_come_and_go_can_be_asked_for_on_another_thread() -> None:
    """As by a scrape; the event loop's thread is interrupted at each step of a removal."""
    image = with_orders()
    met: list[str] = []

    def look(frame: FrameType, event: str, _arg: object) -> object:
        if frame.f_code.co_filename != metadata_image.__file__:
            return None
        sys.settrace(None)
        found = image.topic("orders")
        met.append("gone" if found is None else found.name)
        sys.settrace(look)  # type: ignore[arg-type]
        return look

    sys.settrace(look)  # type: ignore[arg-type]
    try:
        image.apply(delta(6, removed_topics=[A]))
    finally:
        sys.settrace(None)
    assert met[0] == "orders"
    assert met[-1] == "gone"


def test_what_brokers_can_not_serve_is_counted() -> None:
    def offline(index: int, *nodes: int, snapshot: bool = False) -> None:
        record = partition(A, 0, 1)
        record.offline_replicas.extend(nodes)
        image.apply(
            delta(index, snapshot=snapshot, topics=[topic("orders", A)], partitions=[record])
        )

    image = with_orders()
    offline(6, 1, 2)
    offline(7, 2)
    assert (image.offline_counts[1], image.offline_counts[2]) == (0, 1)
    offline(8, 2, snapshot=True)
    assert image.offline_counts[2] == 1
    image.apply(delta(9, removed_topics=[A]))
    assert image.offline_counts[2] == 0


def test_a_delta_changes_what_it_names() -> None:
    image = with_orders()
    change = image.apply(delta(6, partitions=[partition(A, 0, 2)]))
    assert change is not None
    assert [record.leader for record in change.partitions] == [2]
    found = image.partition("orders", 0)
    assert found is not None
    assert found.leader == 2


def test_what_is_known_already_is_ignored() -> None:
    image = with_orders()
    assert image.apply(delta(5, partitions=[partition(A, 0, 9)])) is None
    assert image.apply(delta(4, snapshot=True)) is None
    assert image.topic("orders") is not None


def test_a_snapshot_reports_what_it_no_longer_has() -> None:
    image = with_orders()
    change = image.apply(delta(9, snapshot=True, topics=[topic("bills", B)]))
    assert change is not None
    assert [gone.name for gone in change.removed_topics] == ["orders"]
    assert image.topic("orders") is None
    assert image.brokers == {}


def test_a_topic_made_anew_under_its_name_is_another_topic() -> None:
    image = with_orders()
    image.apply(delta(6, removed_topics=[A]))
    image.apply(delta(7, topics=[topic("orders", B)], partitions=[partition(B, 0, 3)]))
    found = image.topic("orders")
    assert found is not None
    assert found.topic_id == B
    assert image.topic_by_id(A) is None


def test_a_delta_may_replace_a_topic_under_one_name_at_once() -> None:
    image = with_orders()
    image.apply(delta(6, removed_topics=[A], topics=[topic("orders", B)]))
    found = image.topic("orders")
    assert found is not None
    assert found.topic_id == B


def test_deleted_topics_are_remembered_from_snapshots_and_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_image, "MAX_DELETED_TOPICS", 3)
    image = MetadataImage()
    ids = [TopicId(bytes([number]) * 16) for number in range(6)]
    image.apply(cluster_pb2.MetadataDelta(index=1, snapshot=True, deleted_topics=ids[:2]))
    image.apply(cluster_pb2.MetadataDelta(index=2, removed_topics=ids[2:3]))
    assert [image.was_deleted(topic_id) for topic_id in ids[:4]] == [True, True, True, False]
    image.apply(cluster_pb2.MetadataDelta(index=3, removed_topics=ids[3:4]))
    assert [image.was_deleted(topic_id) for topic_id in ids[:4]] == [False, True, True, True]
    image.apply(cluster_pb2.MetadataDelta(index=4, snapshot=True, deleted_topics=ids[4:]))
    assert [image.was_deleted(topic_id) for topic_id in ids] == [False] * 4 + [True] * 2


def as_of(epoch: int) -> MetadataImage:
    """Told up to index 10, the last of it a change of a partition."""
    image = MetadataImage()
    record = partition(A, 0, 1)
    record.partition_epoch = 4
    image.apply(delta(9, snapshot=True, controller_epoch=epoch, topics=[topic("orders", A)]))
    image.apply(delta(10, controller_epoch=epoch, after_index=9, partitions=[record]))
    return image


@pytest.mark.parametrize(
    ("index", "fields"),
    [
        (10, {}),
        (6, {"after_index": 5}),
        (10, {"snapshot": True}),
        (6, {"snapshot": True}),
        (12, {"after_index": 9}),
        (
            20,
            {"snapshot": True, "topics": [topic("orders", A)], "partitions": [partition(A, 0, 1)]},
        ),
    ],
    ids=["at it", "before it", "snapshot at it", "snapshot before", "between", "undone"],
)
def test_a_picture_of_a_history_that_was_given_up_is_not_built_upon(
    index: int, fields: dict[str, object]
) -> None:
    image = as_of(epoch=2)
    with pytest.raises(MetadataDivergedError, match=r"index 10, of controller epoch 2, .* next: "):
        image.apply(delta(index, controller_epoch=3, **fields))
    assert (image.index, image.controller_epoch) == (10, 2)
    assert image.partition("orders", 0) is not None


def test_a_controller_that_had_nothing_to_tell_is_contradicted_by_nobody() -> None:
    image = MetadataImage()
    assert image.apply(delta(0, snapshot=True)) is not None
    assert image.apply(delta(0, snapshot=True, controller_epoch=1)) is not None


def test_a_newer_controller_goes_on_with_the_history_of_the_one_before() -> None:
    image = as_of(epoch=2)
    record = partition(A, 0, 1)
    record.partition_epoch = 4
    assert image.apply(delta(12, controller_epoch=3, after_index=10)) is not None
    whole = {"topics": [topic("orders", A)], "partitions": [record]}
    assert image.apply(delta(20, controller_epoch=4, snapshot=True, **whole)) is not None
    assert image.apply(delta(21, controller_epoch=4, after_index=20)) is not None


def test_a_controller_that_was_given_up_and_runs_on_is_not_believed() -> None:
    image = as_of(epoch=2)
    for fields in ({"snapshot": True}, {"after_index": 10}, {"after_index": 30}):
        for index in (9, 10, 31):
            assert image.apply(delta(index, controller_epoch=1, **fields)) is None
    assert (image.index, image.controller_epoch) == (10, 2)
