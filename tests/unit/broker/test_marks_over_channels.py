"""Marks and questions that are under way on a channel to a broker when that is closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import aio
from structlog.testing import capture_logs

from penstock.broker.coordinator.asking import CoordinatorQuestions
from penstock.broker.coordinator.marking import MarkSender
from penstock.broker.core.metadata_image import ImageChange
from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_marks import Owner
from penstock.broker.core.transaction_values import Participant
from penstock.broker.core.verification import Question
from penstock.broker.peers import Peers
from penstock.v1 import cluster_pb2, coordination_pb2
from penstock.v1.coordination_pb2_grpc import (
    CoordinationServicer,
    add_CoordinationServicer_to_server,
)
from penstock.wire.error_codes import ErrorCode
from penstock.wire.errors import NetworkError, PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually

_TOPIC = TopicId(bytes(15) + b"\x01")


class _Leader(CoordinationServicer):
    """A broker that answers what it is sent once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.heard = asyncio.Queue[Any]()

    async def WriteMarkers(
        self, request: coordination_pb2.WriteMarkersRequest, context: Any
    ) -> coordination_pb2.WriteMarkersResponse:
        self.heard.put_nowait(request)
        await self.may_answer.wait()
        response = coordination_pb2.WriteMarkersResponse()
        for marker in request.markers:
            result = response.results.add()
            for _ in marker.partitions:
                result.outcomes.add()
        return response

    async def AddPartitions(
        self, request: coordination_pb2.AddPartitionsRequest, context: Any
    ) -> coordination_pb2.AddPartitionsResponse:
        self.heard.put_nowait(request)
        await self.may_answer.wait()
        results = [coordination_pb2.AddPartitionsResult()] * len(request.entries)
        return coordination_pb2.AddPartitionsResponse(results=results)


class _World:
    """Two brokers: this one, and number 2 behind a port."""

    def __init__(self, port: int, leader: _Leader) -> None:
        self.leader = leader
        self.broker = SimpleNamespace(host="127.0.0.1", port=port, broker_epoch=1)
        partition = SimpleNamespace(leader=2, leader_epoch=1)
        topic = SimpleNamespace(partitions={0: partition})
        name = SimpleNamespace(topic="orders", partition=0)
        self.image: Any = SimpleNamespace(
            brokers={2: self.broker},
            cluster_id="c",
            topic=lambda _name: topic,
            topic_by_id=lambda _topic_id: topic,
            partition_by_id=lambda _key: partition,
            named=lambda _key: name,
        )
        self.peers = Peers(self.image, self._open)
        self.done: list[MarkDone] = []

    async def _open(self, _node_id: int, host: str, port: int) -> aio.Channel:
        return aio.insecure_channel(f"{host}:{port}")

    def on_done(self, _owner: Owner, marks: Sequence[MarkDone]) -> None:
        self.done += marks

    async def leads(self, request: Any) -> Any:
        leader = _Leader()
        leader.may_answer.set()
        return await leader.WriteMarkers(request, None)

    async def nobody(self, _request: Any) -> Any:
        raise AssertionError("this broker leads nothing")


@pytest.fixture
async def world() -> AsyncIterator[_World]:
    server = aio.server()
    leader = _Leader()
    add_CoordinationServicer_to_server(leader, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = _World(port, leader)
    yield made
    leader.may_answer.set()
    await made.peers.close()
    await server.stop(None)


def _mark(name: str, producer_id: int, partition: int) -> Mark:
    return Mark(name, producer_id, 1, True, frozenset({Participant(_TOPIC, partition, "orders")}))


async def test_marks_on_a_channel_that_is_closed_are_sent_again(world: _World) -> None:
    sender = MarkSender(
        1,
        world.image,
        world.peers,
        world.nobody,
        clock_ms=lambda: time.monotonic_ns() // 1_000_000,
        on_done=world.on_done,
    )
    owner = Owner(0, 1)
    sender.send(owner, [_mark("first", 1, 0)])
    async with asyncio.timeout(60):
        await world.leader.heard.get()
    world.broker.broker_epoch = 2  # It registered anew, and its old connection still stands.
    sender.send(owner, [_mark("second", 2, 1)])
    async with asyncio.timeout(60):
        await world.leader.heard.get()
    world.leader.may_answer.set()
    try:
        await eventually(lambda: len(world.done) == 2)
    finally:
        await sender.stop()
    assert sorted(one.transactional_id for one in world.done) == ["first", "second"]


async def test_a_torn_transaction_is_told_of_once_and_is_over_where_it_is_torn(
    world: _World,
) -> None:
    asked: list[list[int]] = []

    async def refuse(request: Any) -> Any:
        asked.append([one.producer_id for one in request.markers])
        response = coordination_pb2.WriteMarkersResponse()
        for marker in request.markers:
            result = response.results.add()
            for where in marker.partitions:
                code = {0: ErrorCode.TRANSACTION_TORN, 1: 0}.get(
                    where.partition, 0 if len(asked) > 1 else ErrorCode.REQUEST_TIMED_OUT
                )
                result.outcomes.add(code=code, message=f"orders-{where.partition}: refused")
        return response

    sender = MarkSender(
        2, world.image, world.peers, refuse, clock_ms=lambda: 1_000_000, on_done=world.on_done
    )
    whole = Mark(
        "torn", 1, 1, True, frozenset(Participant(_TOPIC, at, "orders") for at in range(3))
    )
    try:
        with capture_logs() as lines:
            sender.send(Owner(0, 1), [whole])
            await eventually(lambda: world.done)
            [done] = world.done
            assert {one.partition for one in done.partitions} == {0, 1}
            assert sender.count == 1, "the others still get theirs"
            [told] = [line for line in lines if line["log_level"] == "error"]
        assert (told["transactional_id"], told["decided"]) == ("torn", "commit")
        assert told["reasons"] == ["orders-0: refused"]
        assert [line["reason"] for line in lines if line["log_level"] == "warning"] == [
            "orders-2: refused"
        ]
    finally:
        await sender.stop()


async def test_a_mark_does_not_wait_for_a_leader_before_that_stands_still(world: _World) -> None:
    sender = MarkSender(
        1,
        world.image,
        world.peers,
        world.leads,
        clock_ms=lambda: time.monotonic_ns() // 1_000_000,
        on_done=world.on_done,
    )
    try:
        sender.send(Owner(0, 1), [_mark("moved", 1, 0)])
        async with asyncio.timeout(60):
            await world.leader.heard.get()
        world.image.partition_by_id(None).leader = 1
        sender.on_metadata(ImageChange(1, False, (cluster_pb2.PartitionRecord(),), (), (), ()))
        await eventually(lambda: len(world.done) == 1)
        assert not world.leader.may_answer.is_set()
    finally:
        await sender.stop()


async def test_questions_on_a_channel_that_is_closed_are_answered(world: _World) -> None:
    questions = CoordinatorQuestions(1, world.image, world.peers, world.nobody)
    answers: asyncio.Queue[PenstockError | None] = asyncio.Queue()
    try:
        questions.ask(Question(TopicIdPartition(_TOPIC, 0), "t", 1, 0), answers.put_nowait)
        async with asyncio.timeout(60):
            await world.leader.heard.get()
        await world.peers.forget(
            2, await world.peers.channel(2)
        )  # As when marks for the same broker were not answered.
        async with asyncio.timeout(60):
            answer = await answers.get()
        assert answer is not None
        assert answer.retriable
    finally:
        await questions.stop()


async def test_an_answer_that_is_late_takes_the_channel_from_nobody(world: _World) -> None:
    request = coordination_pb2.WriteMarkersRequest()
    channel = await world.peers.channel(2)
    waiting = asyncio.create_task(world.peers.ask(2, "WriteMarkers", request, 10.0))
    with pytest.raises(NetworkError, match="broker 2: "):
        await world.peers.ask(2, "WriteMarkers", request, 0.05)
    world.leader.may_answer.set()
    assert isinstance(await waiting, coordination_pb2.WriteMarkersResponse)
    assert await world.peers.channel(2) is channel
