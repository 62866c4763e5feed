"""The Sender against a broker, a network and a clock that do their worst.

What is checked holds for every schedule: the log has the records in the order of ``send``, none
twice; what was acknowledged is in it, at the offset that was said; every record gets exactly one
verdict; and a batch's bytes never change under one sequence number.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.client.core.backoff import Backoff
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.send_events import (
    Acknowledge,
    AcquireIdentity,
    Answered,
    Event,
    Fail,
    IdentityGiven,
    PartitionAnswer,
    RefreshMetadata,
    ResetStream,
    RoomFreed,
    SendRequest,
    StreamBroken,
    Woken,
)
from penstock.client.core.sender import Sender, SenderSettings
from penstock.client.core.sequencer import Identity, Sequencer
from penstock.v1 import metadata_pb2
from penstock.wire.compression import Compression
from penstock.wire.errors import (
    FencedLeaderEpochError,
    LeaderHint,
    NetworkError,
    NotEnoughReplicasError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PenstockError,
    RecordTooLargeError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import parse_header
from tests.unit.client.fake_broker import FakePartition
from tests.unit.client.receipts import Names, accumulator_of_names, append

NODES = (1, 2)
PARTITIONS = 2


class World:
    def __init__(self, seed: int, *, max_batch_bytes: int = 10**9, timeout_ms: float = 3_000):
        self.chance = random.Random(seed)
        self.now = 0.0
        self.max_batch_bytes = max_batch_bytes
        self.topic_number = 1
        self.logs = [FakePartition(leader=1) for _ in range(PARTITIONS)]
        self.deleted: list[list[FakePartition]] = []  # Topics of the same name, before.
        self.metadata = MetadataCache()
        self.accumulator = accumulator_of_names(
            batch_size=150,
            max_batch=300 if seed % 2 else 150,
            memory=100_000,
            linger_ms=5,
            timeout_ms=timeout_ms,
        )
        self.sender: Sender[Names] = Sender(
            settings=SenderSettings(
                max_request_bytes=400,
                max_in_flight=5,
                request_timeout_ms=1_000,
                delivery_timeout_ms=timeout_ms,
                retries=10**9,
            ),
            accumulator=self.accumulator,
            sequencer=Sequencer(idempotent=True, max_in_flight=5, compression=Compression.NONE),
            metadata=self.metadata,
            backoff=Backoff(50, 200, self.chance.random),
            leader_backoff=Backoff(20, 200, self.chance.random),
        )
        # Per node: requests on their way, and answers on their way back.
        self.requests: dict[int, deque[SendRequest[Names]]] = {node: deque() for node in NODES}
        self.answers: dict[int, deque[Answered]] = {node: deque() for node in NODES}
        # By correlation id, for which topic and with what bytes: the batches may be changed.
        self.sent: dict[int, tuple[bytes, list[bytes]]] = {}
        self.zombies: list[tuple[int, SendRequest[Names]]] = []
        self.refresh_due = False
        self.identity_due = False
        self.next_value = 0
        self.verdicts: dict[int, int | PenstockError] = {}
        self.bytes_of: dict[tuple[int, int, int, int, int], bytes] = {}
        self.refresh()

    # --- the client's side ------------------------------------------------------------------

    def send(self, partition: int) -> None:
        self.next_value += 1
        value = b"%d" % self.next_value
        where = TopicPartition("t", partition)
        assert append(self.accumulator, where, value, self.next_value, self.now)

    def feed(self, event: Event) -> None:
        for effect in self.sender.handle(event, self.now):
            self.carry_out(effect)
        self.sender.validate()
        self.check_identities()

    def check_identities(self) -> None:
        """A lane takes a new identity only when no answer under the old one is to come."""
        for lane in self.sender.sequencer.lanes.values():
            for batch in (*lane.in_flight, *lane.resend):
                assert Identity(batch.producer_id, batch.producer_epoch) == lane.identity

    def carry_out(self, effect: Any) -> None:
        match effect:
            case SendRequest():
                for entry in effect.entries:
                    self.check_bytes(entry.batch)
                topic_id = self.metadata.topic_id("t")
                data = [bytes(e.batch.encoded or b"") for e in effect.entries]
                self.sent[effect.correlation_id] = (topic_id, data)
                self.requests[effect.node_id].append(effect)
            case Acknowledge(batch, base_offset, _):
                for index, name in enumerate(batch.receipt.names):
                    offset = base_offset + index if base_offset >= 0 else -1
                    self.verdict(name, offset)
            case Fail(batch, error):
                for name in batch.receipt.names:
                    self.verdict(name, error)
            case RefreshMetadata():
                self.refresh_due = True
            case AcquireIdentity():
                self.identity_due = True
            case ResetStream(node_id):
                self.lose_stream(node_id)
            case RoomFreed():
                pass

    def verdict(self, value: int, what: int | PenstockError) -> None:
        assert value not in self.verdicts, "two verdicts for one record"
        self.verdicts[value] = what

    def check_bytes(self, batch: Any) -> None:
        header = parse_header(batch.encoded)
        key = (
            batch.partition.partition,
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.last_sequence,  # The first part of a split batch begins where it did.
        )
        assert self.bytes_of.setdefault(key, bytes(batch.encoded)) == batch.encoded

    # --- the world's side -------------------------------------------------------------------

    def refresh(self) -> None:
        self.refresh_due = False
        response = metadata_pb2.DescribeTopicsResponse(cluster_id="c", metadata_index=1)
        topic = response.topics.add(name="t", topic_id=self.topic_id)
        for number, log in enumerate(self.logs):
            topic.partitions.add(partition=number, leader=log.leader, leader_epoch=log.leader_epoch)
        self.metadata.apply(response, self.now)

    @property
    def topic_id(self) -> bytes:
        return self.topic_number.to_bytes(16, "big")

    def make_anew(self) -> None:
        """Delete the topic and make it anew."""
        self.topic_number += 1
        self.deleted.append(self.logs)
        self.logs = [FakePartition(leader=self.chance.choice(NODES)) for _ in range(PARTITIONS)]

    def lose_stream(self, node: int) -> None:
        """Answers are lost; each request is lost, or arrives later when nobody waits for it."""
        self.answers[node].clear()
        for request in self.requests[node]:
            if self.chance.random() < 0.5:
                self.zombies.append((node, request))
        self.requests[node].clear()

    def arrive(self, node: int, request: SendRequest[Names]) -> Answered:
        topic_id, batches = self.sent[request.correlation_id]
        if topic_id != self.topic_id:
            refused = PartitionAnswer(UnknownTopicIdError("it was deleted and made anew"))
            answers = (refused,) * len(batches)
        else:
            answers = tuple(
                self.append(node, entry, data)
                for entry, data in zip(request.entries, batches, strict=True)
            )
        return Answered(node, request.correlation_id, answers)

    def append(self, node: int, entry: Any, data: bytes) -> PartitionAnswer:
        log = self.logs[entry.batch.partition.partition]
        if log.leader != node:
            hint = LeaderHint(log.leader, log.leader_epoch, "h", 1)
            known = self.chance.random() < 0.5
            return PartitionAnswer(NotLeaderError("elsewhere", leader=hint if known else None))
        if entry.leader_epoch < log.leader_epoch:
            return PartitionAnswer(FencedLeaderEpochError("sent to the leader before"))
        if entry.leader_epoch > log.leader_epoch:
            return PartitionAnswer(UnknownLeaderEpochError("no such leader yet"))
        if self.chance.random() < 0.1:
            return PartitionAnswer(NotEnoughReplicasError("too few"))
        if len(data) > self.max_batch_bytes:
            return PartitionAnswer(RecordTooLargeError("too large"))
        try:
            return PartitionAnswer(None, log.append(data))
        except PenstockError as error:
            return PartitionAnswer(error)

    def step(self) -> None:
        choice = self.chance.random()
        node = self.chance.choice(NODES)
        if choice < 0.25:
            for _ in range(self.chance.randint(1, 6)):
                self.send(self.chance.randrange(PARTITIONS))
            self.feed(Woken())
        elif choice < 0.45 and self.requests[node]:
            self.answers[node].append(self.arrive(node, self.requests[node].popleft()))
        elif choice < 0.65 and self.answers[node]:
            self.feed(self.answers[node].popleft())
        elif choice < 0.70:
            self.lose_stream(node)
            self.feed(StreamBroken(node, NetworkError("broke")))
        elif choice < 0.75 and self.zombies:
            index = self.chance.randrange(len(self.zombies))
            zombie = self.zombies.pop(index)
            self.arrive(*zombie)
        elif choice < 0.78:
            log = self.chance.choice(self.logs)
            log.leader = self.chance.choice(NODES)
            log.leader_epoch += 1
        elif choice < 0.85 and self.refresh_due:
            self.refresh()
            self.feed(Woken())
        elif choice < 0.92:
            self.now += self.chance.choice((1, 10, 100, 400))
            self.feed(Woken())
        self.give_identity()

    def give_identity(self) -> None:
        if self.identity_due:
            self.identity_due = False
            self.feed(IdentityGiven(Identity(self.chance.randrange(10**9), 0)))

    def heal(self) -> None:
        """Let everything arrive, in order, until every record has its verdict."""
        for _ in range(5_000):
            if not self.sender.open_batches():
                break
            self.now += 10
            self.refresh()
            self.feed(Woken())
            self.give_identity()
            for node in NODES:
                while self.requests[node]:
                    self.answers[node].append(self.arrive(node, self.requests[node].popleft()))
                while self.answers[node]:
                    self.feed(self.answers[node].popleft())
        for zombie in self.zombies:
            self.arrive(*zombie)

    def check(self) -> None:
        assert set(self.verdicts) == set(range(1, self.next_value + 1))
        assert self.accumulator.used_bytes == 0
        places: dict[int, int] = {}
        for logs in zip(*self.deleted, self.logs, strict=True):
            everything: list[int] = []
            for log in logs:
                values = [int(record.value or b"") for record in log.records()]
                places.update({value: place for place, value in enumerate(values)})
                everything += values
            assert everything == sorted(set(everything)), "duplicated or reordered"
        for value, what in self.verdicts.items():
            if isinstance(what, int):
                assert value in places, "acknowledged and lost"
                assert what in (places[value], -1)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(20, 250))
def test_order_and_exactly_once_under_every_schedule(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.heal()
    world.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_the_same_while_topics_take_only_small_batches(seed: int) -> None:
    world = World(seed, max_batch_bytes=100)
    for _ in range(120):
        world.step()
    world.heal()
    world.check()
    assert all(isinstance(what, int | PenstockError) for what in world.verdicts.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_the_same_while_many_batches_time_out(seed: int) -> None:
    world = World(seed, timeout_ms=150)
    for _ in range(200):
        world.step()
    world.heal()
    world.check()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_the_same_while_the_topic_is_deleted_and_made_anew(seed: int) -> None:
    world = World(seed)
    for step in range(240):
        if step % 60 == 59:
            world.make_anew()
        world.step()
    world.heal()
    world.check()


def test_a_topic_made_anew_is_numbered_from_the_start_and_never_out_of_order() -> None:
    world = World(1)
    world.send(0)
    world.heal()
    world.make_anew()
    world.refresh()
    world.send(0)
    world.feed(Woken())
    world.now += 10
    world.feed(Woken())
    [request] = [*world.requests[1], *world.requests[2]]
    [entry] = request.entries
    assert parse_header(entry.batch.encoded).base_sequence == 0
    world.heal()
    world.check()
    assert world.verdicts == {1: 0, 2: 0}
    assert [len(logs[0].records()) for logs in (*world.deleted, world.logs)] == [1, 1]


def sent_and_unanswered() -> World:
    """1 and 2 are on their way to the topic that is made anew meanwhile; 3 waits."""
    world = World(2)
    world.give_identity()
    for _ in range(2):
        world.send(0)
        world.feed(Woken())
        world.give_identity()
        world.now += 10
        world.feed(Woken())
    assert [len(request.entries) for request in world.requests[1]] == [1, 1]
    world.send(0)
    return world


def test_what_was_refused_by_the_deleted_topic_goes_to_the_new_one_in_order() -> None:
    world = sent_and_unanswered()
    world.make_anew()
    world.heal()
    world.check()
    assert world.verdicts == {1: 0, 2: 1, 3: 2}


def test_what_the_deleted_topic_may_have_had_is_not_sent_to_the_new_one() -> None:
    world = sent_and_unanswered()
    for request in world.requests[1]:  # Their answers are lost.
        while isinstance(world.arrive(1, request).answers[0].error, NotEnoughReplicasError):
            pass
    world.requests[1].clear()
    world.make_anew()
    world.refresh()
    world.feed(StreamBroken(1, NetworkError("broke")))
    world.heal()
    world.check()
    for value in (1, 2):
        error = world.verdicts[value]
        assert isinstance(error, UnknownTopicIdError)
        assert "may have been written to the deleted topic" in error.message
    assert world.verdicts[3] == 0


def test_records_placed_among_other_partitions_than_the_new_topic_has_fail() -> None:
    world = sent_and_unanswered()
    world.make_anew()
    world.logs.append(FakePartition(leader=1))
    world.deleted[0].append(FakePartition(leader=1))
    world.refresh()
    world.heal()
    world.check()
    for error in world.verdicts.values():
        assert isinstance(error, UnknownTopicIdError)
        assert "has 3 partitions now" in error.message
    world.send(0)
    world.heal()
    assert world.verdicts[4] == 0


def test_the_simulation_reaches_what_it_is_about() -> None:
    """Retries, new epochs, timeouts and splits do happen in these schedules."""
    epochs: set[int] = set()
    failed = delivered = duplicates = 0
    for seed in range(50):
        world = World(seed, timeout_ms=400, max_batch_bytes=120)
        for _ in range(200):
            world.step()
        world.heal()
        world.check()
        epochs.update(key[2] for key in world.bytes_of)
        failed += sum(isinstance(what, PenstockError) for what in world.verdicts.values())
        delivered += sum(isinstance(what, int) for what in world.verdicts.values())
        duplicates += sum(what == -1 for what in world.verdicts.values())
    assert len(epochs) > 3
    assert failed > 50
    assert delivered > 1_000


def world_with_an_unread_stream(seed: int) -> World:
    """1 and 2 travel on a stream that the leader does not read; 1 was given up, and 2 is refused on
    the next stream because 1 never came.
    """
    world = World(seed, timeout_ms=1_000)
    world.give_identity()
    for at_ms in (0, 900):
        world.now = at_ms
        world.send(0)
        world.feed(Woken())
        world.give_identity()
        world.now += 10
        world.feed(Woken())
    unread = list(world.requests[1])
    world.requests[1].clear()
    world.now = 1_050
    world.feed(Woken())
    assert isinstance(world.verdicts[1], PenstockError)
    assert [len(request.entries) for request in unread] == [1, 1]
    while not world.requests[1]:
        world.now += 10
        world.refresh()
        world.feed(Woken())
    world.zombies = [(1, request) for request in unread]
    second = world.requests[1].popleft()
    while True:  # Until it is not refused for want of replicas.
        answer = world.arrive(1, second)
        if isinstance(answer.answers[0].error, OutOfOrderSequenceError):
            break
    world.feed(answer)
    return world


def test_what_an_unread_stream_may_hold_is_not_sent_under_a_new_epoch() -> None:
    world = world_with_an_unread_stream(1)
    for zombie in world.zombies:
        while isinstance(world.arrive(*zombie).answers[0].error, NotEnoughReplicasError):
            pass
    world.zombies.clear()
    world.send(0)
    world.heal()
    world.check()
    assert "may have been written" in str(world.verdicts[2])
    assert world.verdicts[3] == 2, "what was never sent before goes on"


def test_what_only_a_deposed_leader_may_hold_is_sent_under_a_new_epoch() -> None:
    world = World(1, timeout_ms=1_000)
    for at_ms in (0, 900):
        world.now = at_ms
        world.send(0)
        world.feed(Woken())
        world.give_identity()
        world.now += 10
        world.feed(Woken())
    world.zombies = [(1, request) for request in world.requests[1]]
    world.requests[1].clear()
    world.logs[0].leader, world.logs[0].leader_epoch = 2, 1
    world.now = 1_050
    world.feed(Woken())
    assert isinstance(world.verdicts[1], PenstockError)
    world.heal()
    world.check()
    assert world.verdicts[2] == 0


def test_the_checks_catch_a_broker_without_duplicate_detection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakePartition, "_known", lambda self, header: None)
    caught = 0
    for seed in range(30):
        world = World(seed)
        for _ in range(200):
            world.step()
        world.heal()
        try:
            world.check()
        except AssertionError:
            caught += 1
    assert caught > 10
