"""A batch that may still grow is not sent behind what its broker has yet to take."""

from __future__ import annotations

import pytest

from penstock.client.core.backoff import Backoff
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.send_events import (
    Answered,
    IdentityGiven,
    PartitionAnswer,
    RoomFreed,
    SendRequest,
    StreamBroken,
    Woken,
)
from penstock.client.core.sender import Sender, SenderSettings
from penstock.client.core.sequencer import Identity, Sequencer
from penstock.v1 import metadata_pb2
from penstock.wire.compression import Compression
from penstock.wire.errors import NetworkError
from penstock.wire.ids import TopicPartition
from tests.unit.client.receipts import Names, accumulator_of_names, append

REQUEST_BYTES = 1_000
LARGEST_BYTES = 600
PARTITIONS = 10  # The even ones are led by node 1, the others by node 2.


class Producer:
    """A sender with its accumulator; what it has sent to each node and had no answer to."""

    def __init__(self, *, memory: int = 100_000) -> None:
        self.metadata = MetadataCache()
        self.metadata.apply(_topic(), 0)
        self.accumulator = accumulator_of_names(
            batch_size=100,
            max_batch=LARGEST_BYTES,
            memory=memory,
            linger_ms=0,
            timeout_ms=60_000,
        )
        self.sender: Sender[Names] = Sender(
            settings=SenderSettings(
                max_request_bytes=REQUEST_BYTES,
                max_in_flight=5,
                request_timeout_ms=1_000,
                delivery_timeout_ms=60_000,
                retries=10,
            ),
            accumulator=self.accumulator,
            sequencer=Sequencer(idempotent=True, max_in_flight=5, compression=Compression.NONE),
            metadata=self.metadata,
            backoff=Backoff(50, 200, lambda: 0.5),
            leader_backoff=Backoff(20, 200, lambda: 0.5),
        )
        self.now_ms = 0.0
        self.sent: dict[int, list[SendRequest[Names]]] = {1: [], 2: []}
        self.names = 0
        self.feed(Woken())
        self.feed(IdentityGiven(Identity(7, 0)))

    def feed(self, event: object) -> None:
        for effect in self.sender.handle(event, self.now_ms):  # type: ignore[arg-type]
            if isinstance(effect, SendRequest):
                self.sent[effect.node_id].append(effect)
        self.sender.validate()

    def send(self, partition: int, size_bytes: int) -> bool:
        """Whether there was room for the record."""
        self.names += 1
        where = TopicPartition("t", partition)
        taken = append(self.accumulator, where, b"x" * size_bytes, self.names, self.now_ms)
        self.feed(Woken())
        return taken is not None

    def fill(self, node_id: int) -> None:
        """Have a request's worth under way to the node."""
        partition = 0 if node_id == 1 else 1
        while sum(self.under_way(node_id)) < REQUEST_BYTES:
            self.send(partition, LARGEST_BYTES - 100)

    def under_way(self, node_id: int) -> list[int]:
        """The size of each request to the node."""
        return [sum(e.batch.size_bytes for e in request.entries) for request in self.sent[node_id]]

    def answer(self, node_id: int) -> None:
        request = self.sent[node_id].pop(0)
        answers = [PartitionAnswer(None, base_offset=0) for _ in request.entries]
        self.feed(Answered(node_id, request.correlation_id, tuple(answers)))


def _topic() -> metadata_pb2.DescribeTopicsResponse:
    response = metadata_pb2.DescribeTopicsResponse(cluster_id="c", metadata_index=1)
    topic = response.topics.add(name="t", topic_id=b"1" * 16)
    for number in range(PARTITIONS):
        topic.partitions.add(partition=number, leader=1 + number % 2, leader_epoch=0)
    return response


def test_at_a_low_rate_everything_goes_at_once() -> None:
    producer = Producer()
    for count in range(1, 6):
        producer.send(0, 10)
        assert len(producer.sent[1]) == count


def test_behind_a_requests_worth_a_batch_grows_until_an_answer_comes() -> None:
    producer = Producer()
    producer.fill(1)
    before = len(producer.sent[1])
    for _ in range(5):
        producer.send(2, 50)
    assert len(producer.sent[1]) == before
    producer.send(3, 50)
    assert len(producer.sent[2]) == 1, "the other broker has nothing to take"
    producer.answer(1)
    assert len(producer.sent[1]) == before, "one answered, one sent"
    [entry] = producer.sent[1][-1].entries
    assert entry.batch.record_count == 5


def test_what_can_grow_no_more_goes_all_the_same() -> None:
    producer = Producer()
    producer.fill(1)
    before = len(producer.sent[1])
    while len(producer.sent[1]) == before:
        assert producer.accumulator.records_waiting < 20
        producer.send(2, 50)
    [entry] = producer.sent[1][-1].entries
    assert LARGEST_BYTES - 100 < entry.batch.size_bytes <= LARGEST_BYTES


@pytest.mark.parametrize("ended", ["flush", "full memory", "broken"])
def test_it_waits_for_nothing_that_does_not_come(ended: str) -> None:
    producer = Producer(memory=3_000)
    producer.fill(1)
    before = len(producer.sent[1])
    producer.send(2, 50)
    assert len(producer.sent[1]) == before
    if ended == "flush":
        producer.sender.hurry = 1
        producer.feed(Woken())
    elif ended == "full memory":
        while producer.send(3, LARGEST_BYTES - 100):
            pass
    else:
        producer.sent[1].clear()
        producer.feed(StreamBroken(1, NetworkError("gone")))
        producer.now_ms = 500.0
        producer.feed(RoomFreed())
    sent = {entry.batch.partition for request in producer.sent[1] for entry in request.entries}
    assert TopicPartition("t", 2) in sent


def test_a_partition_with_little_traffic_waits_for_one_answer_however_much_others_send() -> None:
    """What those have more of can't grow any more, so requests of it never cease."""
    producer = Producer()
    for _ in range(10):
        for partition in (0, 4, 6, 8):
            producer.send(partition, LARGEST_BYTES - 100)
    assert sum(producer.under_way(1)) > 2 * REQUEST_BYTES
    for _ in range(15):
        producer.now_ms += 1
        producer.send(2, 50)
        producer.now_ms += 1
        producer.answer(1)
        last = [entry.batch.partition.partition for entry in producer.sent[1][-1].entries]
        assert 2 in last
        assert set(last) != {2}, "it goes with what goes anyway"
        assert len(producer.sent[1]) == 5


@pytest.mark.parametrize("turn", range(3))
def test_what_is_small_enough_goes_behind_what_is_too_large_for_the_request(turn: int) -> None:
    producer = Producer()
    for _ in range(5):
        producer.send(0, 10)  # No more requests may be under way to the broker.
    for partition, size_bytes in ((2, 500), (4, 500), (6, 50)):
        producer.send(partition, size_bytes)
    for _ in range(turn):
        producer.feed(Woken())  # Another partition comes first.
    producer.answer(1)
    assert len(producer.sent[1]) == 5
    sent = {entry.batch.partition.partition for entry in producer.sent[1][-1].entries}
    assert 6 in sent
    assert len(sent) == 2
