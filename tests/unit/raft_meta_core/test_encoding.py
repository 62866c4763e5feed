"""What is encoded the fast way is what protobuf would have said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.raft_meta.core import encoding
from penstock.raft_meta.core.encoding import PartitionEncoder
from penstock.raft_meta.core.model import Partition, Topic
from penstock.v1 import cluster_pb2

int32 = st.integers(0, 2**31 - 1) | st.integers(0, 300)
nodes = st.lists(int32, max_size=5).map(tuple)
partitions = st.builds(
    Partition,
    replicas=nodes,
    isr=nodes,
    elr=nodes,
    leader=st.just(-1) | int32,
    leader_epoch=int32,
    partition_epoch=int32,
    adding=nodes,
    removing=nodes,
    recovering=st.booleans(),
    target=nodes,
    offline=nodes,
)
topics = st.builds(
    Topic,
    topic_id=st.binary(max_size=300),
    name=st.just("orders"),
    configs=st.just({}) | st.builds(lambda n: {"min.insync.replicas": str(n)}, st.integers(1, 5)),
    internal=st.just(False),
)
TOPIC = Topic(b"t" * 16, "orders", {}, internal=False)


def as_protobuf(topic: Topic, numbered: list[tuple[int, Partition]]) -> cluster_pb2.MetadataDelta:
    delta = cluster_pb2.MetadataDelta(index=7)
    delta.partitions.extend(partition.to_proto(topic, number) for number, partition in numbered)
    return delta


@given(st.lists(topics, min_size=1, max_size=3), st.lists(st.tuples(int32, partitions), max_size=9))
def test_any_partition_is_encoded_as_protobuf_reads_it(several, numbered):
    encoder = PartitionEncoder()
    for topic in several * 2:  # The second time from what is remembered.
        delta = cluster_pb2.MetadataDelta(index=7)
        delta.MergeFromString(encoder.encode(topic, numbered))
        assert delta == as_protobuf(topic, numbered)


def test_partitions_that_differ_in_epochs_alone_keep_their_own():
    base = Partition((1, 2), (1,), (), 1, 0, 0)
    numbered = [(n, base._replace(leader_epoch=n, partition_epoch=n * 200)) for n in range(300)]
    delta = cluster_pb2.MetadataDelta(index=7)
    delta.MergeFromString(PartitionEncoder().encode(TOPIC, numbered))
    assert delta == as_protobuf(TOPIC, numbered)


def test_shapes_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(encoding, "_MAX_SHAPES", 3)
    encoder = PartitionEncoder()
    numbered = [(n, Partition((n,), (n,), (), n, 0, 0)) for n in range(10)]
    delta = cluster_pb2.MetadataDelta(index=7)
    delta.MergeFromString(encoder.encode(TOPIC, numbered))
    assert delta == as_protobuf(TOPIC, numbered)
    assert len(encoder._shapes) <= 3
