"""What leaders ask coordinators: who is asked, what goes together, and what failures become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from grpc import aio

from penstock.broker.coordinator.asking import CoordinatorQuestions
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.verification import Question
from penstock.broker.peers import Peers
from penstock.broker.service.coordination import CoordinationServicer
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import cluster_pb2, coordination_pb2
from penstock.v1.coordination_pb2_grpc import add_CoordinationServicer_to_server
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    ErrorCode,
    InconsistentClusterIdError,
    NetworkError,
    PenstockError,
    ProducerFencedError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.transport import SERVER_OPTIONS
from tests.support import eventually

TOPIC_ID = TopicId(b"orders-id-16-by!")
STATE_ID = TopicId(b"__transaction_st")
PARTITIONS = 2


def id_for(number: int, prefix: str = "id") -> str:
    """A transactional id that is kept in this partition of the transactions' topic."""
    return next(
        name
        for name in (f"{prefix}-{at}" for at in range(100))
        if partition_for_group(name, PARTITIONS) == number
    )


HERE, THERE = id_for(0), id_for(1)


def question(transactional_id: str = HERE, partition: int = 0, producer_id: int = 7) -> Question:
    return Question(TopicIdPartition(TOPIC_ID, partition), transactional_id, producer_id, 3)


class Coordinator:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.requests: list[coordination_pb2.AddPartitionsRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.refused: set[int] = set()  # Producer ids.

    async def add_partitions(
        self, request: coordination_pb2.AddPartitionsRequest
    ) -> coordination_pb2.AddPartitionsResponse:
        self.requests.append(request)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        response = coordination_pb2.AddPartitionsResponse()
        for entry in request.entries:
            result = response.results.add()
            if entry.producer_id in self.refused:
                result.error.CopyFrom(ProducerFencedError("fenced").to_proto())
        return response


class World:
    """Broker 1 asks, and coordinates partition 0; broker 2 is at a port, and coordinates 1."""

    def __init__(self, port: int) -> None:
        self.local, self.remote = Coordinator(), Coordinator()
        self.image = MetadataImage()
        self.index = 0
        self.change(
            topics=[
                cluster_pb2.TopicRecord(topic_id=TOPIC_ID, name="orders"),
                cluster_pb2.TopicRecord(topic_id=STATE_ID, name=TRANSACTIONS_TOPIC, internal=True),
            ],
            partitions=[
                *(cluster_pb2.PartitionRecord(topic_id=TOPIC_ID, partition=n) for n in range(8)),
                *(
                    cluster_pb2.PartitionRecord(topic_id=STATE_ID, partition=n, leader=n + 1)
                    for n in range(PARTITIONS)
                ),
            ],
            brokers=[cluster_pb2.BrokerRecord(node_id=2, host="127.0.0.1", port=port)],
        )
        self.opened = 0
        self.peers = Peers(self.image, self._open)
        self.questions = CoordinatorQuestions(1, self.image, self.peers, self.local.add_partitions)
        self.answers: list[tuple[Question, PenstockError | None]] = []

    async def _open(self, _node_id: int, host: str, port: int) -> aio.Channel:
        self.opened += 1
        return aio.insecure_channel(f"{host}:{port}")

    def change(self, **parts: Any) -> None:
        self.index += 1
        self.image.apply(cluster_pb2.MetadataDelta(index=self.index, cluster_id="c", **parts))

    def ask(self, *asked: Question) -> None:
        for one in asked:
            self.questions.ask(one, self._answered(one))

    def _answered(self, one: Question) -> Callable[[PenstockError | None], None]:
        return lambda error: self.answers.append((one, error))

    async def outcome(self, one: Question) -> PenstockError | None:
        self.ask(one)
        count = len(self.answers) + 1
        await eventually(lambda: len(self.answers) >= count)
        return self.answers[-1][1]


@asynccontextmanager
async def asking() -> AsyncIterator[World]:
    server: Any = aio.server(options=SERVER_OPTIONS)
    world = World(server.add_insecure_port("127.0.0.1:0"))

    async def no_marks(_: object) -> Any:
        raise AssertionError

    servicer = CoordinationServicer(2, world.image, world.remote.add_partitions, no_marks, no_marks)
    add_CoordinationServicer_to_server(servicer, server)
    await server.start()
    try:
        yield world
    finally:
        await world.questions.stop()
        await world.peers.close()
        await server.stop(0)


def entries(request: coordination_pb2.AddPartitionsRequest) -> list[tuple[str, int, list[int]]]:
    return [
        (entry.transactional_id, entry.producer_id, [one.partition for one in entry.partitions])
        for entry in request.entries
    ]


def under_way(world: World, count: int) -> bool:
    return len(world.local.requests) >= count


async def test_what_is_asked_at_once_goes_together_to_whom_it_concerns() -> None:
    async with asking() as world:
        world.ask(
            question(), question(partition=1), question(producer_id=8), question(THERE, partition=2)
        )
        assert world.answers == []  # Not before it returns.
        await eventually(lambda: len(world.answers) == 4)
        assert {error for _, error in world.answers} == {None}
        (local,) = world.local.requests
        assert entries(local) == [(HERE, 7, [0, 1]), (HERE, 8, [0])]
        (remote,) = world.remote.requests
        assert entries(remote) == [(THERE, 7, [2])]
        (where,) = remote.entries[0].partitions
        assert (where.topic, where.topic_id) == ("orders", TOPIC_ID)
        assert (remote.cluster_id, remote.entries[0].producer_epoch) == ("c", 3)


async def test_an_attempt_is_asked_for_where_its_group_is_kept() -> None:
    async with asking() as world:
        assert await world.outcome(question(f"__attempt/1/2/3/{THERE}")) is None
        assert not world.local.requests


async def test_what_comes_meanwhile_goes_with_the_next_request() -> None:
    async with asking() as world:
        world.local.gate.clear()
        world.ask(question())
        await eventually(lambda: len(world.local.requests) == 1)
        world.ask(question(producer_id=8), question(producer_id=9))
        await asyncio.sleep(0)
        assert len(world.local.requests) == 1
        world.local.gate.set()
        await eventually(lambda: len(world.answers) == 3)
        assert [len(request.entries) for request in world.local.requests] == [1, 2]
        assert await world.outcome(question(producer_id=10)) is None


async def test_an_answer_that_takes_long_holds_up_others_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.coordinator.asking._TIMEOUT_S", 60)
    monkeypatch.setattr("penstock.broker.coordinator.asking._PATIENCE_S", 0.001)
    async with asking() as world:
        world.local.gate.clear()
        for producer_id in range(12):
            world.ask(question(producer_id=producer_id))
            await eventually(partial(under_way, world, min(producer_id + 1, 8)))
        # What is under way is bounded all the same, however long that is by now.
        for _ in range(20):
            assert await world.outcome(question(THERE)) is None
        assert len(world.local.requests) == 8
        world.local.gate.set()
        await eventually(lambda: len(world.answers) == 32)
        assert len(world.local.requests) == 9


async def test_each_transaction_is_refused_for_itself() -> None:
    async with asking() as world:
        world.remote.refused = {8}
        world.ask(question(THERE), question(THERE, producer_id=8))
        await eventually(lambda: len(world.answers) == 2)
        outcomes = {one.producer_id: error for one, error in world.answers}
        assert outcomes[7] is None
        assert isinstance(outcomes[8], ProducerFencedError)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (CoordinatorNotAvailableError("not now"), CoordinatorNotAvailableError),
        (RuntimeError("broken"), UnknownServerError),
        (TimeoutError(), CoordinatorNotAvailableError),
    ],
)
async def test_a_failing_coordinator_is_a_typed_retriable_answer(
    failure: Exception, kind: type[PenstockError]
) -> None:
    async with asking() as world:
        world.local.error = failure
        error = await world.outcome(question())
        assert isinstance(error, kind)
        assert error.retriable
        world.local.error = None
        assert await world.outcome(question()) is None


async def test_a_coordinator_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.coordinator.asking._TIMEOUT_S", 0.05)
    async with asking() as world:
        world.local.gate.clear()
        world.remote.gate.clear()
        assert isinstance(await world.outcome(question()), CoordinatorNotAvailableError)
        error = await world.outcome(question(THERE))
        assert isinstance(error, NetworkError)
        world.remote.gate.set()
        assert await world.outcome(question(THERE)) is None
        assert world.opened == 1  # Its channel is as good as before.


async def test_a_broker_that_can_not_be_reached_is_reached_anew() -> None:
    async with asking() as world:
        (record,) = world.image.brokers.values()
        lost = cluster_pb2.BrokerRecord(node_id=2, host="127.0.0.1", port=1)
        world.change(brokers=[lost])
        error = await world.outcome(question(THERE))
        assert isinstance(error, NetworkError)
        assert error.retriable
        assert world.opened == 1
        assert isinstance(await world.outcome(question(THERE)), NetworkError)
        assert world.opened == 2  # It may serve brokers at another port by now.
        world.change(brokers=[record])
        assert await world.outcome(question(THERE)) is None
        assert world.opened == 3


async def test_nobody_is_asked_while_nobody_coordinates() -> None:
    async with asking() as world:
        world.change(
            partitions=[cluster_pb2.PartitionRecord(topic_id=STATE_ID, partition=0, leader=-1)]
        )
        assert isinstance(await world.outcome(question()), CoordinatorNotAvailableError)
        world.change(removed_topics=[STATE_ID])
        assert isinstance(await world.outcome(question(THERE)), CoordinatorNotAvailableError)


async def test_nobody_is_asked_for_a_partition_that_is_gone() -> None:
    async with asking() as world:
        world.change(removed_topics=[TOPIC_ID])
        assert isinstance(await world.outcome(question()), UnknownTopicOrPartitionError)
        assert not world.local.requests


async def test_another_cluster_is_told_so_for_every_entry() -> None:
    async with asking() as world:
        request = coordination_pb2.AddPartitionsRequest(
            cluster_id="other", entries=[coordination_pb2.AddPartitionsEntry()] * 2
        )
        nobody: Any = None
        servicer = CoordinationServicer(1, world.image, world.local.add_partitions, nobody, nobody)
        answer = await servicer.AddPartitions(request, None)
        assert [one.error.code for one in answer.results] == [
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            ErrorCode.INCONSISTENT_CLUSTER_ID,
        ]
        assert not world.local.requests
        assert not InconsistentClusterIdError.retriable


async def test_a_refusal_of_the_whole_request_is_that_of_every_entry() -> None:
    async with asking() as world:
        world.remote.error = CoordinatorNotAvailableError("it loads")
        world.ask(question(THERE), question(THERE, producer_id=8))
        await eventually(lambda: len(world.answers) == 2)
        assert {type(error) for _, error in world.answers} == {CoordinatorNotAvailableError}
