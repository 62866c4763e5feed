"""Batches around and above every limit of a message: they reach followers and readers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.replication.fetch import MAX_FETCH_BYTES
from penstock.broker.replication.leader import CATCH_UP_PUSH_BYTES, MAX_PUSH_BYTES
from penstock.v1 import log_pb2, replication_pb2
from penstock.wire.names import MAX_NAME_CHARS
from penstock.wire.topic_config import MAX_PARTITIONS_PER_TOPIC, TOPIC_CONFIGS
from penstock.wire.transport import MAX_MESSAGE_BYTES
from tests.support import eventually
from tests.unit.replication.brokers import batch, running

LARGEST_BATCH = 32 * 1024 * 1024
GRPC_DEFAULT = 4 * 1024 * 1024
OVERHEAD = len(batch(bytes(1_000_000))) - 1_000_000


def value_of(batch_bytes: int) -> bytes:
    """What makes a batch of exactly so many bytes."""
    for size in range(batch_bytes - OVERHEAD - 3, batch_bytes - OVERHEAD + 9):
        if len(batch(bytes(size))) == batch_bytes:
            return bytes(size)
    raise AssertionError(f"no record makes a batch of {batch_bytes} bytes")


def test_no_topic_takes_a_larger_batch_than_these_tests_send() -> None:
    key = TOPIC_CONFIGS["max.message.bytes"]
    assert key.parse(str(LARGEST_BATCH)) == LARGEST_BATCH
    with pytest.raises(ValueError, match=str(LARGEST_BATCH)):
        key.parse(str(LARGEST_BATCH + 1))


@pytest.mark.parametrize("difference", [-1, 0, 1])
@pytest.mark.parametrize("limit", [CATCH_UP_PUSH_BYTES, MAX_PUSH_BYTES, GRPC_DEFAULT])
async def test_a_batch_at_a_limit_reaches_followers_in_sync_and_out_of_sync(
    limit: int, difference: int
) -> None:
    value = value_of(limit + difference)
    async with running() as brokers:
        brokers.create_topic()
        await brokers.kill(3)
        await brokers[1].append(value)  # 2 is in sync, 3 will catch up on it.
        await brokers[1].append(b"after")
        await brokers.restart(3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        await brokers[1].append(value)
        for node_id in (2, 3):
            assert brokers[node_id].log().values() == [value, b"after", value]


async def test_the_largest_batch_reaches_followers_and_a_reader_of_few_bytes() -> None:
    value = value_of(LARGEST_BATCH)
    async with running() as brokers:
        brokers.create_topic()
        await brokers.kill(3)
        await brokers[1].append(value)
        await brokers.restart(3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        for node_id in (2, 3):
            assert brokers[node_id].log().log_end_offset == 1
        read = await brokers[1].fetch(0, partition_max_bytes=1)
        assert len(read.records) == LARGEST_BATCH
        assert not read.HasField("error")


# --- What gRPC lets through ----------------------------------------------------------------------

LONGEST_NAME = "n" * MAX_NAME_CHARS
LONGEST_ERROR = "e" * 1000


def test_an_answer_to_a_fetch_is_let_through() -> None:
    # Whole batches of MAX_FETCH_BYTES from one partition, refusals of all the others.
    response: Any = log_pb2.FetchResponse()
    for number in range(MAX_PARTITIONS_PER_TOPIC):
        result = response.partitions.add(high_watermark=2**62, last_stable_offset=2**62)
        result.log_start_offset = 2**62
        result.error.message = LONGEST_ERROR
        result.partition.topic = LONGEST_NAME
        result.partition.topic_id = bytes(16)
        result.partition.partition = number
    assert response.ByteSize() + max(MAX_FETCH_BYTES, LARGEST_BATCH) < MAX_MESSAGE_BYTES


def test_a_push_with_as_many_answers_and_marks_as_there_may_be_is_let_through() -> None:
    message: Any = replication_pb2.ReplicationFetchResponse(sequence=2**62)
    for number in range(2 * 2000):  # The answers and the marks of one message.
        push = message.pushes.add(
            leader_epoch=2**31 - 1, high_watermark=2**62, log_start_offset=2**62, base_offset=2**62
        )
        push.partition.topic_id = bytes(16)
        push.partition.partition = number
        push.error.message = LONGEST_ERROR
    message.pushes.add(records=bytes(LARGEST_BATCH))
    assert message.ByteSize() < MAX_MESSAGE_BYTES


def test_a_request_with_the_largest_batch_is_let_through() -> None:
    request: Any = log_pb2.ProduceRequest(correlation_id=2**62, timeout_ms=2**31 - 1)
    entry = request.partitions.add(current_leader_epoch=2**31 - 1, records=bytes(LARGEST_BATCH))
    entry.partition.topic = LONGEST_NAME
    entry.partition.topic_id = bytes(16)
    assert request.ByteSize() < MAX_MESSAGE_BYTES
