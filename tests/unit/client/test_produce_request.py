"""Requests are laid out by hand as Protocol Buffers lay them out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.produce_request import OutgoingBatch, OutgoingRequest
from penstock.v1 import common_pb2, log_pb2

INT32 = st.integers(-1, 2**31 - 1)
BATCHES = st.lists(
    st.tuples(st.text(max_size=200), INT32, st.binary(max_size=20), INT32, st.binary(max_size=300)),
    max_size=5,
)


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 2]), INT32, BATCHES)
def test_the_bytes_are_those_of_the_message(
    correlation_id: int,
    acks: common_pb2.Acks.ValueType,
    timeout_ms: int,
    batches: list[tuple[str, int, bytes, int, bytes]],
) -> None:
    message = log_pb2.ProduceRequest(
        correlation_id=correlation_id, acks=acks, timeout_ms=timeout_ms
    )
    outgoing = []
    for topic, number, topic_id, epoch, records in batches:
        partition = common_pb2.TopicPartition(topic=topic, partition=number, topic_id=topic_id)
        message.partitions.add(partition=partition, current_leader_epoch=epoch, records=records)
        outgoing.append(OutgoingBatch(partition, epoch, memoryview(records)))
    request = OutgoingRequest(correlation_id, acks, timeout_ms, tuple(outgoing))
    found = request.to_bytes()
    assert log_pb2.ProduceRequest.FromString(found) == message
    if all(batch[4] for batch in batches):  # An empty field may be left out, or not.
        assert found == message.SerializeToString(deterministic=True)
