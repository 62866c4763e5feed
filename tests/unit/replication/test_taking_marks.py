"""Marks that come to leaders on framed connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode, aio

from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.frames import Kind, encode_header
from penstock.broker.replication.ports import MarkersStream, StreamBrokenError
from penstock.broker.replication.taking_marks import MAX_UNDER_WAY, CoordinatorStream
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import common_pb2, coordination_pb2, replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.error_codes import ErrorCode
from penstock.wire.markers import MarkerType
from tests.support import eventually
from tests.unit.replication.brokers import CLUSTER_ID, Brokers, running
from tests.unit.replication.transacting import markers, marks_of, open_transaction

HELLO = replication_pb2.FollowerHello(cluster_id=CLUSTER_ID, node_id=2, broker_epoch=99)


async def connected(brokers: Brokers, said: Any = HELLO) -> MarkersStream | None:
    connector = ReplicationConnector(NodeConnector(None))
    return await connector.open_markers(1, "127.0.0.1", brokers[1].port, said)


class Coordinator:
    """The other end: what it was answered, by sequence."""

    def __init__(self, stream: MarkersStream) -> None:
        self.stream = stream
        self.answers: dict[int, coordination_pb2.WriteMarkersResponse] = {}
        self.reading = asyncio.create_task(stream.read_all(self._heard))

    def _heard(self, answer: coordination_pb2.MarkersAnswer) -> None:
        assert answer.sequence not in self.answers
        self.answers[answer.sequence] = answer.response

    def ask(self, sequence: int, request: coordination_pb2.WriteMarkersRequest) -> None:
        message = coordination_pb2.MarkersRequest(sequence=sequence, request=request)
        assert self.stream.write_now(message)

    def code(self, sequence: int) -> int:
        [result] = self.answers[sequence].results
        [outcome] = result.outcomes
        return outcome.code


@asynccontextmanager
async def coordinating(brokers: Brokers) -> AsyncIterator[Coordinator]:
    stream = await connected(brokers)
    assert stream is not None
    coordinator = Coordinator(stream)
    try:
        yield coordinator
    finally:
        stream.cancel()
        await asyncio.gather(coordinator.reading, return_exceptions=True)


async def test_marks_are_answered_when_they_are_committed_and_not_before() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "1"})
        await open_transaction(brokers[1])
        async with coordinating(brokers) as coordinator:
            brokers[2].deaf = True
            await brokers[2].manager.stop()  # It is in sync for a while yet, and copies nothing.
            coordinator.ask(1, markers((7, 1, True)))
            await eventually(lambda: marks_of(brokers[1]) == [(7, 1, MarkerType.COMMIT)])
            coordinator.ask(2, markers((9, 1, True), partition=5))  # Which does not exist.
            await eventually(lambda: 2 in coordinator.answers)
            assert coordinator.code(2) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert list(coordinator.answers) == [2]
            brokers.change(isr=[1], replicas=[1])
            await eventually(lambda: 1 in coordinator.answers)
            assert coordinator.code(1) == 0


async def test_marks_that_are_not_committed_in_time_are_said_not_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.replication.led_transactions._COMMIT_TIMEOUT_S", 0.1)
    async with running(2) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        async with coordinating(brokers) as coordinator:
            await brokers[2].manager.stop()
            coordinator.ask(1, markers((7, 1, True), (9, 1, True)))
            await eventually(lambda: 1 in coordinator.answers)
            results = coordinator.answers[1].results
            codes = [outcome.code for result in results for outcome in result.outcomes]
            assert codes == [ErrorCode.REQUEST_TIMED_OUT] * 2


async def test_marks_that_wait_are_refused_when_the_leader_is_deposed() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        async with coordinating(brokers) as coordinator:
            await brokers[2].manager.stop()
            coordinator.ask(1, markers((7, 1, True)))
            await eventually(lambda: bool(marks_of(brokers[1])))
            brokers.change(leader=2)
            await eventually(lambda: 1 in coordinator.answers)
            assert coordinator.code(1) == ErrorCode.NOT_LEADER


async def test_marks_for_another_cluster_are_refused() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        async with coordinating(brokers) as coordinator:
            request = markers((7, 1, True))
            request.cluster_id = "other"
            coordinator.ask(1, request)
            await eventually(lambda: 1 in coordinator.answers)
            assert coordinator.code(1) == ErrorCode.INCONSISTENT_CLUSTER_ID
            assert not marks_of(brokers[1])


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"cluster_id": "other"}, StatusCode.FAILED_PRECONDITION, "is of cluster 'other'"),
        ({"cluster_id": ""}, StatusCode.UNAVAILABLE, "does not know its cluster yet"),
        ({"broker_epoch": 1}, StatusCode.FAILED_PRECONDITION, "has registered anew with 3"),
    ],
)
async def test_a_coordinator_is_let_in_as_a_follower_is(
    change: dict[str, Any], status: StatusCode, reason: str
) -> None:
    async with running(2) as brokers:
        said = replication_pb2.FollowerHello()
        said.CopyFrom(HELLO)
        for name, value in change.items():
            setattr(said, name, value)
        with pytest.raises(StreamBrokenError) as caught:
            await connected(brokers, said)
        assert caught.value.status is status
        assert reason in caught.value.reason


async def test_a_leader_that_does_not_say_that_it_takes_marks_is_brought_none() -> None:
    async with running(1) as brokers:
        brokers[1].located.marks_in_frames = False
        assert await connected(brokers) is None
        brokers[1].located.marks_in_frames = True
        connector = ReplicationConnector(NodeConnector(None), frames=False)
        assert await connector.open_markers(1, "127.0.0.1", brokers[1].port, HELLO) is None


async def test_a_stream_of_grpc_is_for_followers_alone() -> None:
    async with running(1) as brokers:
        stub: Any = ReplicationStub(aio.insecure_channel(f"127.0.0.1:{brokers[1].port}"))
        call = stub.Fetch()
        await call.write(replication_pb2.ReplicationFetchRequest(coordinator=HELLO))
        assert await call.code() is StatusCode.INVALID_ARGUMENT


async def test_a_coordinator_does_not_disturb_the_follower_of_its_node() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        async with coordinating(brokers):
            await brokers[1].append(b"b")
            assert brokers[1].served == ["frames"]  # The one stream that is of a follower.


async def test_a_later_connection_of_a_node_ends_the_one_before() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        async with coordinating(brokers) as first, coordinating(brokers) as second:
            await asyncio.wait([first.reading])
            second.ask(1, markers((7, 1, True)))
            await eventually(lambda: 1 in second.answers)


class Nonsense:
    """Bytes that are no message."""

    def SerializeToString(self) -> bytes:
        return b"\xff"


async def test_what_is_no_request_ends_the_connection() -> None:
    async with running(1) as brokers, coordinating(brokers) as coordinator:
        coordinator.stream.write_now(Nonsense())  # type: ignore[arg-type]
        await asyncio.wait([coordinator.reading])
        error = coordinator.reading.exception()
        assert isinstance(error, StreamBrokenError)
        assert error.status is StatusCode.INVALID_ARGUMENT
        assert brokers[1].refusals == ["malformed"]


# --- The stream by itself ------------------------------------------------------------------------


class Connection:
    """A connection that takes what it has room for."""

    def __init__(self) -> None:
        self.room = 100
        self.freed = asyncio.Event()
        self.sent: list[int] = []
        self.last = coordination_pb2.WriteMarkersResponse()
        self.handle: Callable[[coordination_pb2.MarkersRequest], object] | None = None

    async def read_all(self, handle: Callable[[coordination_pb2.MarkersRequest], object]) -> None:
        self.handle = handle
        await asyncio.Event().wait()

    def write_now(self, message: coordination_pb2.MarkersAnswer) -> bool:
        if self.room <= 0:
            return False
        self._send(message)
        self.room -= 1
        return True

    async def write(self, message: coordination_pb2.MarkersAnswer) -> None:
        self._send(message)
        await self.freed.wait()

    def _send(self, message: coordination_pb2.MarkersAnswer) -> None:
        encode_header(Kind.MESSAGE, message.ByteSize())
        self.sent.append(message.sequence)
        self.last = message.response


class Served:
    """A stream under way, with requests that the test answers."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.waiting: list[Callable[[coordination_pb2.WriteMarkersResponse], object]] = []
        stream = CoordinatorStream(self.connection, lambda _, end: self.waiting.append(end))
        self.running = asyncio.create_task(stream.run())

    def hear(self, sequence: int) -> None:
        assert self.connection.handle is not None
        self.connection.handle(coordination_pb2.MarkersRequest(sequence=sequence))

    def answer(self, at: int = 0, outcomes: Sequence[common_pb2.Error] | None = None) -> None:
        outcomes = outcomes or [common_pb2.Error()]
        results = [coordination_pb2.TransactionMarkerResult(outcomes=outcomes)]
        self.waiting.pop(at)(coordination_pb2.WriteMarkersResponse(results=results))


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    served = Served()
    await eventually(lambda: served.connection.handle is not None)
    try:
        yield served
    finally:
        served.running.cancel()
        await asyncio.wait([served.running])


async def test_answers_come_as_requests_end_and_none_of_a_connection_that_has() -> None:
    async with serving() as served:
        for sequence in (1, 2, 3):
            served.hear(sequence)
        served.answer(1)
        served.answer(0)
        assert served.connection.sent == [2, 1]
        served.running.cancel()
        await asyncio.wait([served.running])
        served.answer()
        assert served.connection.sent == [2, 1]


async def test_answers_wait_their_turn_where_the_connection_is_full() -> None:
    async with serving() as served:
        for sequence in (1, 2, 3, 4):
            served.hear(sequence)
        served.connection.room = 1
        for _ in range(3):
            served.answer()
        await eventually(lambda: served.connection.sent == [1, 2])
        served.connection.room = 1  # It would take the fourth now, before the third.
        served.answer()
        served.connection.freed.set()
        await eventually(lambda: served.connection.sent == [1, 2, 3, 4])


async def test_requests_under_way_are_bounded() -> None:
    async with serving() as served:
        for sequence in range(MAX_UNDER_WAY):
            served.hear(sequence)
        served.answer()
        served.hear(MAX_UNDER_WAY)
        with pytest.raises(StreamBrokenError) as caught:
            served.hear(MAX_UNDER_WAY + 1)
        assert caught.value.status is StatusCode.RESOURCE_EXHAUSTED


async def test_answers_that_nobody_takes_are_bounded_as_requests_are() -> None:
    async with serving() as served:
        served.connection.room = 0
        for sequence in range(MAX_UNDER_WAY):
            served.hear(sequence)
            served.answer()
        with pytest.raises(StreamBrokenError) as caught:
            served.hear(MAX_UNDER_WAY)
        assert caught.value.status is StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.cause == "crowded"


async def test_an_answer_that_was_taken_late_makes_room_for_a_request() -> None:
    async with serving() as served:
        served.connection.room = 0
        for sequence in range(MAX_UNDER_WAY):
            served.hear(sequence)
            served.answer()
        served.connection.freed.set()
        await eventually(lambda: served.connection.sent == list(range(MAX_UNDER_WAY)))
        served.hear(MAX_UNDER_WAY)


@pytest.mark.parametrize("room", [100, 0])
async def test_an_answer_that_is_too_large_for_a_frame_says_of_each_reason_only_the_first(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("penstock.broker.replication.frames.MAX_MESSAGE_BYTES", 2_000)
    torn, gone = ErrorCode.TRANSACTION_TORN, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    leader = common_pb2.CurrentLeader(host="h" * 50)
    outcomes = [
        common_pb2.Error(code=code, message=f"orders-{number}: no" if code else "")
        for number, code in enumerate([0, gone, torn, gone, 0] * 60)
    ]
    for outcome in outcomes:
        outcome.current_leader.CopyFrom(leader)
    async with serving() as served:
        served.connection.room = room
        served.connection.freed.set()
        for sequence in range(MAX_UNDER_WAY):
            served.hear(sequence)
        served.answer(0, outcomes)
        await eventually(lambda: served.connection.sent == [0])
        [result] = served.connection.last.results
        assert [one.code for one in result.outcomes] == [one.code for one in outcomes]
        assert {one.code: one.message for one in result.outcomes if one.message} == {
            gone: "orders-1: no (and 119 more, of which only the code had room in the answer)",
            torn: "orders-2: no (and 59 more, of which only the code had room in the answer)",
        }
        served.answer()  # The stream lives on.
        await eventually(lambda: served.connection.sent == [0, 1])
        served.hear(MAX_UNDER_WAY)
        assert not served.running.done()
