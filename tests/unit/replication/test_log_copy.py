"""When a log that does not open makes way for its leader's: the decisions, event by event."""

from __future__ import annotations

import pytest

from penstock.broker.core.log_copy import CannotCopyError, LogCopy
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

KEY = TopicIdPartition(TopicId(b"copies-id-16-by!"), 0)
NODE = 2


class Metadata:
    """What broker 2 knows of a partition whose log does not open there."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self.record = cluster_pb2.PartitionRecord(
            topic_id=KEY.topic_id, partition=0, replicas=[1, NODE, 3], leader=1, leader_epoch=5
        )
        self.index = 0
        self.topics = [cluster_pb2.TopicRecord(topic_id=KEY.topic_id, name="copies")]
        self.show(isr=[1, 3], offline=[NODE])

    def show(self, *, isr: list[int], offline: list[int], leader: int = 1) -> None:
        record = self.record
        record.isr[:], record.offline_replicas[:] = isr, offline
        record.leader_epoch += record.leader != leader
        record.leader = leader
        record.partition_epoch += 1
        self.index += 1
        delta = cluster_pb2.MetadataDelta(index=self.index, topics=self.topics, partitions=[record])
        assert self.image.apply(delta) is not None
        self.topics = []

    def copy(self, end_offset: int = 10, committed_offset: int = 0) -> LogCopy:
        error = DamagedLogError("a header is damaged", end_offset, committed_offset)
        return LogCopy(NODE, self.image, KEY, error)


def read(copy: LogCopy, *, start: int = 0, ends: list[int]) -> list[int | None]:
    """Where it is read, if the leader's answers end at ``ends``, and then its log does."""
    asked = []
    copy.begin_reading()
    copy.read_from(start)
    for end in ends:
        asked.append(copy.next_offset())
        copy.was_read(end)
    asked.append(copy.next_offset())
    return asked


def test_it_is_copied_as_far_as_it_went_and_no_further() -> None:
    copy = Metadata().copy()
    assert copy.may_read()
    assert (copy.is_read, copy.may_begin()) == (False, False)
    assert read(copy, start=4, ends=[9, 12]) == [4, 9, None]
    assert copy.may_begin()
    copy.begun()
    assert [copy.is_over(end) for end in (-1, 0, 11, 12)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("isr", "offline", "leader"),
    [([1, NODE], [], 1), ([NODE], [NODE], -1), ([1, 3], [], 1), ([NODE], [], NODE)],
    ids=["in sync", "the last one", "not on record as offline", "leading"],
)
def test_it_is_not_dropped_while_the_controllers_may_count_on_it(
    isr: list[int], offline: list[int], leader: int
) -> None:
    metadata = Metadata()
    copy = metadata.copy()
    read(copy, ends=[10])
    assert copy.may_begin()
    metadata.show(isr=isr, offline=offline, leader=leader)
    assert not copy.may_begin()
    if isr == [NODE]:
        with pytest.raises(CannotCopyError, match="no other replica is in sync"):
            copy.may_read()
    else:
        assert not copy.may_read()


def test_what_another_leader_had_counts_for_nothing() -> None:
    metadata = Metadata()
    copy = metadata.copy()
    copy.begin_reading()
    copy.read_from(0)
    metadata.show(isr=[1, 3], offline=[NODE], leader=3)
    copy.was_read(10)
    assert (copy.next_offset(), copy.is_read, copy.may_begin()) == (None, False, False)
    metadata.show(isr=[1, 3], offline=[NODE], leader=1)
    assert not copy.may_begin(), "it leads in another epoch"


def test_who_leads_next_judges_how_far_the_copy_has_to_go() -> None:
    metadata = Metadata()
    copy = metadata.copy()
    read(copy, ends=[10])
    copy.begun()
    assert not copy.is_over(3)
    metadata.show(isr=[1, 3], offline=[NODE], leader=3)
    assert copy.is_over(3)
    assert not copy.is_copied(3)


def test_an_end_that_nobody_knows_to_be_committed_may_be_missing() -> None:
    copy = Metadata().copy(end_offset=10, committed_offset=7)
    read(copy, ends=[7])
    copy.leader_ends()
    assert copy.may_begin()
    assert copy.end_offset == 7


def test_a_leader_that_lacks_what_was_committed_is_none_to_copy() -> None:
    copy = Metadata().copy(end_offset=10, committed_offset=8)
    read(copy, ends=[7])
    with pytest.raises(CannotCopyError, match=r"ends at offset 7, but .* up to offset 8"):
        copy.leader_ends()
    assert not copy.may_begin()


def test_what_is_committed_is_read_above_the_end_that_was_found() -> None:
    copy = Metadata().copy(end_offset=4, committed_offset=8)
    assert read(copy, ends=[5, 8]) == [0, 5, None]
    assert copy.end_offset == 8


def test_a_copy_that_does_not_open_is_read_again() -> None:
    copy = Metadata().copy()
    read(copy, ends=[10])
    copy.shut_again(DamagedLogError("another bit has flipped", 3))
    assert not copy.may_begin()
    assert read(copy, ends=[3]) == [0, None]
    assert copy.may_begin()
