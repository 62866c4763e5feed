"""What a broker has to say of its replicas: each reason for itself, and none of them for another.

That it comes out right in whatever order reports pass is for test_report_orders.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.core.replica_reports import ReplicaReports
from penstock.v1 import cluster_pb2
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicId, TopicIdPartition

NODE: Final = 2
KEY: Final = TopicIdPartition(TopicId(b"orders-id-16-by!"), 0)
DAMAGED: Final = CorruptRecordError("a batch is not sound")
SHUT: Final = DamagedLogError("a header is damaged", 3)


class Told(ReplicaReports):
    """With an image in which brokers 1 to 3 have the replica, and are in sync."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self._index = 0
        super().__init__(NODE, self.image)
        self.hear([cluster_pb2.TopicRecord(topic_id=KEY.topic_id, name="orders")])

    def hear(
        self,
        topics: Sequence[cluster_pb2.TopicRecord] = (),
        *,
        replicas: Sequence[int] = (1, 2, 3),
        isr: Sequence[int] = (1, 2, 3),
        offline: Sequence[int] = (),
    ) -> None:
        """The metadata are others."""
        self._index += 1
        record = cluster_pb2.PartitionRecord(
            topic_id=KEY.topic_id,
            replicas=replicas,
            isr=isr,
            leader=1,
            partition_epoch=self._index,
            offline_replicas=offline,
        )
        self.image.apply(
            cluster_pb2.MetadataDelta(index=self._index, topics=topics, partitions=[record])
        )
        self.compare(KEY)

    def says(self) -> cluster_pb2.ReplicaState.ValueType | None:
        """The state that is due, which the controllers then take, and which is heard of."""
        command = self.next_report(1)
        if command is None:
            return None
        self.answered(taken=True)
        [entry] = command.replicas
        is_online = entry.state == cluster_pb2.REPLICA_STATE_ONLINE
        self.hear(offline=() if is_online else (NODE,))
        return entry.state


@pytest.fixture
def reports() -> Told:
    return Told()


def test_a_copy_is_not_whole_because_what_was_damaged_in_it_is_sound(reports: Told) -> None:
    reports.set_offline(KEY, SHUT)
    assert reports.says() == cluster_pb2.REPLICA_STATE_OFFLINE
    reports.set_copying(KEY, SHUT)
    reports.set_damaged(KEY, DAMAGED)
    reports.set_sound(KEY)
    assert reports.is_damaged(KEY)
    assert reports.says() is None
    reports.set_copied(KEY)
    assert not reports.is_damaged(KEY)
    assert reports.says() == cluster_pb2.REPLICA_STATE_ONLINE


def test_nor_is_it_sound_because_it_is_whole(reports: Told) -> None:
    reports.set_copying(KEY, SHUT)
    reports.set_damaged(KEY, DAMAGED)
    assert reports.says() == cluster_pb2.REPLICA_STATE_DAMAGED
    reports.set_copied(KEY)
    assert reports.says() is None
    reports.set_sound(KEY)
    assert reports.says() == cluster_pb2.REPLICA_STATE_ONLINE


@pytest.mark.parametrize("what", ["offline", "damaged", "copying"])
def test_a_replica_that_comes_back_has_nothing_of_what_it_was(reports: Told, what: str) -> None:
    {
        "offline": reports.set_offline,
        "damaged": reports.set_damaged,
        "copying": reports.set_copying,
    }[what](KEY, SHUT)
    reports.hear(replicas=(1, 3), isr=(1, 3))
    reports.forget(KEY)
    reports.hear(isr=(1, 3))
    assert not reports.has_due
    assert not reports.is_damaged(KEY)
    assert reports.why_offline(KEY) is None


@pytest.mark.parametrize("what", ["offline", "damaged", "copying"])
def test_who_registers_anew_says_all_of_it_again(reports: Told, what: str) -> None:
    {
        "offline": reports.set_offline,
        "damaged": reports.set_damaged,
        "copying": reports.set_copying,
    }[what](KEY, SHUT)
    said = reports.says()
    assert said is not None
    reports.image.partition_by_id(KEY).ClearField("offline_replicas")  # type: ignore[union-attr]  # It is there.
    assert not reports.has_due
    reports.compare_all()
    assert reports.says() == said


@pytest.mark.parametrize("what", ["damaged", "copying"])
@pytest.mark.parametrize(("isr", "offline"), [((2,), ()), ((2, 3), (3,)), ((), ())])
def test_who_has_nobody_to_stand_in_says_so_once_there_is_one(
    reports: Told, what: str, isr: Sequence[int], offline: Sequence[int]
) -> None:
    """The controllers would take no note of it: what it has is all there is."""
    reports.hear(isr=isr, offline=offline)
    (reports.set_damaged if what == "damaged" else reports.set_copying)(KEY, DAMAGED)
    assert not reports.has_due
    reports.hear(isr=(2, 3))
    assert reports.says() == cluster_pb2.REPLICA_STATE_DAMAGED
