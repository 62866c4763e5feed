"""Whatever is in the Raft log: every controller gets the same valid state, and brokers see it."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.core.metadata_image import MetadataImage
from penstock.raft_meta.core.cluster_state import Applied, ClusterState
from penstock.raft_meta.core.model import NO_LEADER, Partition
from penstock.raft_meta.core.versions import METADATA_VERSION, SoftwareTooOldError
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from tests.absurd import is_repeated
from tests.unit.raft_meta_core.histories import History, histories, play, records, versions
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, Driver, incarnation, topic_id


def seen_by_brokers(image: MetadataImage) -> tuple[Any, ...]:
    whole = cluster_pb2.MetadataDelta(
        controller_epoch=max(image.controller_epoch, 0),
        controller_id=image.controller_id,
        cluster_id=image.cluster_id,
        metadata_version=image.metadata_version,
        cluster_configs=cluster_pb2.ClusterConfigRecord(configs=image.cluster_configs),
        brokers=image.brokers.values(),
        topics=[topic.record for topic in image.topics()],
        partitions=[part for topic in image.topics() for part in topic.partitions.values()],
    )
    return records(whole)


class Checked(Driver):
    """A driver that checks every promise after every entry, with a controller restored anew."""

    def __init__(self, metadata_version: int = METADATA_VERSION) -> None:
        self.produced_ids: set[int] = set()
        super().__init__(metadata_version=metadata_version)

    def apply_bytes(self, payload: bytes) -> Applied:
        before = dict(self.state.all_partitions())
        claimed = self.state.controller_epoch
        old = self.state.metadata()
        frozen, old_snapshot = self.state.frozen(), self.state.snapshot()
        applied = super().apply_bytes(payload)
        assert frozen.snapshot() == old_snapshot, "what is frozen does not change"
        self.state.validate()
        snapshot = self.state.snapshot()
        if self.restored is not None:
            twin = self.restored.apply(self.index, payload)
            assert twin.result == applied.result
            assert twin.delta == applied.delta
            assert self.restored.snapshot() == snapshot
        assert ClusterState.restore(snapshot).snapshot() == snapshot
        assert seen_by_brokers(self.image) == records(self.state.metadata())
        check_min_isrs(old, self.state.metadata())
        if applied.delta is None:
            assert records(old) == records(self.state.metadata())
        if applied.result.HasField("error"):
            assert applied.delta is None
        assert self.state.controller_epoch >= claimed
        for key, now in self.state.all_partitions():
            if key in before:
                check_step(before[key], now, applied.result.HasField("alter_reassignments"))
        if applied.result.HasField("alter_partition") and self.state.metadata_version >= 4:
            command = cluster_pb2.Command.FromString(payload).alter_partition
            check_judged_once(command, applied.result.alter_partition)
        if applied.result.HasField("allocate_producer_ids"):
            block = applied.result.allocate_producer_ids
            ids = range(block.first_producer_id, block.first_producer_id + block.count)
            assert self.produced_ids.isdisjoint(ids)
            self.produced_ids.update(ids)
        return applied


def check_min_isrs(old: cluster_pb2.MetadataDelta, new: cluster_pb2.MetadataDelta) -> None:
    """Each is of one partition epoch: whatever brings another raises that."""
    before = {(record.topic_id, record.partition): record for record in old.partitions}
    for record in new.partitions:
        assert record.min_insync_replicas > 0
        known = before.get((record.topic_id, record.partition), record)
        same = known.min_insync_replicas == record.min_insync_replicas
        assert same or known.partition_epoch < record.partition_epoch


def check_judged_once(
    command: cluster_pb2.AlterPartitionCommand, result: cluster_pb2.AlterPartitionResult
) -> None:
    """What is not a matter of the partition epoch alone is judged once in each."""
    for entry, answer in zip(command.partitions, result.partitions, strict=True):
        if not answer.HasField("error"):
            changed = answer.partition.partition_epoch > entry.partition_epoch
            isr = {member.node_id for member in entry.new_isr}
            assert changed or isr == set(answer.partition.isr), "another sending may change it yet"
        elif answer.error.code == ErrorCode.INELIGIBLE_REPLICA:
            assert answer.partition.partition_epoch > entry.partition_epoch


def check_step(before: Partition, now: Partition, asked: bool) -> None:
    """``asked``: the command was one that moves partitions."""
    if not asked:
        assert now.replicas in (before.replicas, before.target), "moved by nobody's wish"
    assert (now == before) == (now.partition_epoch == before.partition_epoch)
    assert now.partition_epoch - before.partition_epoch in (0, 1)
    left = not set(before.replicas) <= set(now.replicas)
    assert now.leader_epoch - before.leader_epoch == (left or now.leader != before.leader)
    arrived = bool(before.target) and not now.target and now.replicas == before.target
    if arrived:
        assert set(before.adding) <= set(now.isr), "left before the others had come"
    elif left and now.target:
        assert set(before.replicas) - set(now.replicas) <= set(before.adding), "left for nothing"
    # Whoever has arrived may have come in sync with this very change.
    if now.leader not in (NO_LEADER, before.leader) and not now.recovering and not arrived:
        assert now.leader in (*before.isr, *before.elr), "it may lack what was acknowledged"


@settings(max_examples=120, deadline=None)
@given(histories(), versions)
def test_every_history_keeps_every_promise(history: History, metadata_version: int) -> None:
    driver = Checked(metadata_version)
    play(history, driver)
    again = ClusterState()
    for index, payload in driver.log:
        again.apply(index, payload)
    assert again.snapshot() == driver.state.snapshot()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_taken(payloads: list[bytes]) -> None:
    driver = Driver(brokers=2)
    for payload in payloads:
        driver.apply_bytes(payload)
        driver.state.validate()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_well_formed_commands_with_any_values_are_taken(data: st.DataObject) -> None:
    driver = Checked()
    driver.start(1)
    driver.create("topic-1", assignments=[[1]])
    command = data.draw(messages(cluster_pb2.Command))
    command.controller_epoch = driver.epoch
    command.sequence = driver.sequence + 1
    # The one thing that may end the process: a level that this software does not know.
    with contextlib.suppress(SoftwareTooOldError):
        driver.apply_bytes(command.SerializeToString())


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Any message of the kind: every field with small, huge, negative and near-valid values."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message = kind()
        fields = list(kind.DESCRIPTOR.fields)
        oneof = kind.DESCRIPTOR.oneofs_by_name.get("body")
        if oneof is not None:
            fields = [draw(st.sampled_from(list(oneof.fields)))]
        for field in fields:
            if draw(st.booleans()) and oneof is None:
                continue
            fill(draw, message, field)
        return message

    return build()


TEXTS = st.sampled_from(["", "topic-1", "other", CLUSTER, "retention.ms", "1", "-1", "1e9", "\0"])
BYTES = st.sampled_from([b"", topic_id(1), topic_id(2), bytes(16), b"x", incarnation(1001)])


def scalar(draw: st.DrawFn, field: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return draw(TEXTS)
    if field.type == field.TYPE_BYTES:
        return draw(BYTES)
    if field.type == field.TYPE_BOOL:
        return draw(st.booleans())
    bits = 63 if field.type == field.TYPE_INT64 else 31
    return draw(st.one_of(st.integers(-1, 4), st.sampled_from([2**bits - 1, -(2**bits)])))


def fill(draw: st.DrawFn, message: Any, field: Any) -> None:
    repeated = is_repeated(field)
    if field.message_type is None:
        if repeated:
            getattr(message, field.name).extend(
                scalar(draw, field) for _ in range(draw(st.integers(0, 3)))
            )
        else:
            setattr(message, field.name, scalar(draw, field))
    elif field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[draw(TEXTS)] = draw(TEXTS)
    else:
        kind = field.message_type._concrete_class
        if repeated:
            for _ in range(draw(st.integers(0, 2))):
                getattr(message, field.name).append(draw(messages(kind)))
        else:
            getattr(message, field.name).CopyFrom(draw(messages(kind)))
            getattr(message, field.name).SetInParent()
