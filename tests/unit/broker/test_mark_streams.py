"""Marks that a coordinator sends over connections, and what happens when these are not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.broker.coordinator.mark_streams import TIMEOUT_MS, MarkStreams
from penstock.broker.coordinator.marking import MarkSender
from penstock.broker.core.metadata_image import ImageChange
from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_marks import Owner
from penstock.broker.core.transaction_values import Participant
from penstock.broker.replication.ports import StreamBrokenError
from penstock.v1 import common_pb2, coordination_pb2, replication_pb2
from penstock.wire.error_codes import ErrorCode
from penstock.wire.errors import NetworkError, PenstockError
from penstock.wire.ids import TopicId
from tests.support import eventually

_TOPIC = TopicId(bytes(15) + b"\x01")
_OWNER = Owner(0, 1)


def answer_to(
    request: coordination_pb2.WriteMarkersRequest, code: int = 0
) -> coordination_pb2.WriteMarkersResponse:
    response = coordination_pb2.WriteMarkersResponse()
    for marker in request.markers:
        result = response.results.add()
        for _ in marker.partitions:
            result.outcomes.add(code=code)
    return response


class Connection:
    """A connection to a leader: what it was sent, and answers when the test gives them."""

    def __init__(self, hello: replication_pb2.FollowerHello) -> None:
        self.hello = hello
        self.sent: list[coordination_pb2.MarkersRequest] = []
        self.takes = True
        self.handle: Callable[[coordination_pb2.MarkersAnswer], object] = lambda _: None
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.closed.set()

    async def read_all(self, handle: Callable[[coordination_pb2.MarkersAnswer], object]) -> None:
        self.handle = handle
        try:
            await asyncio.wait([self.end])  # Which leaves it as it is where this is cancelled.
        finally:
            await self.closed.wait()
        self.end.result()

    def write_now(self, message: coordination_pb2.MarkersRequest) -> bool:
        if self.end.done():
            raise self._broken()
        if self.takes:
            self.sent.append(message)
        return self.takes

    def cancel(self) -> None:
        if not self.end.done():
            self.end.set_exception(self._broken())
            self.end.exception()  # Whoever reads may be gone.

    def _broken(self) -> StreamBrokenError:
        return StreamBrokenError(grpc.StatusCode.UNAVAILABLE, "it broke")

    def answer(self, at: int = 0, code: int = 0) -> None:
        message = self.sent.pop(at)
        self.handle(
            coordination_pb2.MarkersAnswer(
                sequence=message.sequence, response=answer_to(message.request, code)
            )
        )


class World:
    """This broker, 1, and a leader, 2, with what opening a connection to it gives next."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.broker = SimpleNamespace(host="127.0.0.1", port=9092, broker_epoch=1)
        partition = SimpleNamespace(leader=2, leader_epoch=1)
        self.image: Any = SimpleNamespace(
            brokers={2: self.broker},
            cluster_id="c",
            topic_by_id=lambda _topic_id: object(),
            partition_by_id=lambda _key: partition,
        )
        self.leads = partition
        self.outcome: StreamBrokenError | None = None
        self.has_frames = True
        self.opened: list[Connection] = []
        self.attempts = 0
        self.attempted = 0  # Those that are over: what comes of them is taken note of at once.
        self.called: asyncio.Queue[coordination_pb2.WriteMarkersRequest] = asyncio.Queue()
        self.calls_work = True
        self.done: list[MarkDone] = []
        self.streams = MarkStreams(
            1, self.image, self.open, broker_epoch=lambda: 17, clock_ms=lambda: self.ms
        )
        self.sender = MarkSender(
            1,
            self.image,
            None,  # type: ignore[arg-type]
            self.write_here,
            clock_ms=lambda: self.ms,
            on_done=self.on_done,
            streams=self.streams,
        )
        self.sender._ask = self.call  # type: ignore[method-assign]

    async def open(
        self, _node_id: int, _host: str, _port: int, hello: replication_pb2.FollowerHello
    ) -> Connection | None:
        self.attempts += 1
        await asyncio.sleep(0)
        self.attempted += 1
        if self.outcome is not None:
            raise self.outcome
        if not self.has_frames:
            return None
        self.opened.append(Connection(hello))
        return self.opened[-1]

    async def write_here(self, request: Any) -> Any:
        return answer_to(request)

    async def call(self, _node_id: int, message: Any) -> Any:
        """In the place of the unary call."""
        self.called.put_nowait(message)
        if not self.calls_work:
            raise NetworkError("no way there")
        return answer_to(message)

    def on_done(self, _owner: Owner, marks: Sequence[MarkDone]) -> None:
        self.done += marks

    def send(self, *names: str, partition: int = 0) -> None:
        where = frozenset({Participant(_TOPIC, partition, "orders")})
        self.sender.send(_OWNER, [Mark(name, len(name), 1, True, where) for name in names])

    async def until_connected(self) -> Connection:
        """The first mark goes by a call, since nobody waits for a connection."""
        before = len(self.opened)
        self.send("first")
        await eventually(lambda: len(self.opened) > before and self.opened[-1].handle is not None)
        await eventually(lambda: "first" in self.names)
        self.done.clear()
        return self.opened[-1]

    @property
    def names(self) -> list[str]:
        return sorted(one.transactional_id for one in self.done)

    async def in_time(self, condition: Callable[[], bool]) -> None:
        """Wait, and let the rests pass that failures are followed by."""

        def holds() -> bool:
            self.ms += 100
            self.sender._wake()
            return condition()

        await eventually(holds)

    def change(self) -> None:
        self.sender.on_metadata(ImageChange(1, False, (), (), (), ()))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.sender.stop()


async def test_the_first_marks_do_not_wait_for_a_connection_and_the_next_ones_use_it(
    world: World,
) -> None:
    connection = await world.until_connected()
    assert world.called.qsize() == 1
    assert connection.hello == replication_pb2.FollowerHello(
        cluster_id="c", node_id=1, broker_epoch=17
    )
    world.send("a", "bb")
    world.send("ccc", partition=1)
    await eventually(lambda: len(connection.sent) == 1)
    [message] = connection.sent
    assert len(message.request.markers) == 3  # What is due at once is one message.
    assert not world.done
    connection.answer()
    assert world.names == ["a", "bb", "ccc"]
    assert world.called.qsize() == 1


async def test_marks_under_way_on_a_connection_that_breaks_are_sent_again_until_done(
    world: World,
) -> None:
    connection = await world.until_connected()
    world.calls_work = False
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    connection.cancel()
    while world.called.qsize() < 4:  # By calls now, which fail, each after a rest.
        world.ms += 2_000
        world.sender._wake()
        await asyncio.sleep(0)
        world.outcome = StreamBrokenError(grpc.StatusCode.UNAVAILABLE, "starting")
    assert not world.done
    world.calls_work = True
    world.ms += 2_000
    world.sender._wake()
    await eventually(lambda: world.names == ["a"])
    connection.answer()  # Too late: it is neither counted twice nor a fault.
    assert world.names == ["a"]


async def test_what_the_leader_refuses_is_not_done(world: World) -> None:
    connection = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    connection.answer(code=ErrorCode.NOT_LEADER)
    assert not world.done
    await world.in_time(lambda: bool(connection.sent))
    connection.answer()
    assert world.names == ["a"]


async def test_an_answer_that_is_about_something_else_settles_nothing(world: World) -> None:
    connection = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    [message] = connection.sent
    connection.handle(coordination_pb2.MarkersAnswer(sequence=message.sequence + 1))
    connection.handle(coordination_pb2.MarkersAnswer(sequence=message.sequence))
    connection.handle(  # That one was answered; a second answer is nobody's.
        coordination_pb2.MarkersAnswer(
            sequence=message.sequence, response=answer_to(message.request)
        )
    )
    assert not world.done
    await world.in_time(lambda: len(connection.sent) == 2)
    connection.answer(1)
    assert world.names == ["a"]


async def test_a_broker_that_registered_anew_is_reached_anew_at_once(world: World) -> None:
    old = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(old.sent))
    world.broker.broker_epoch = 2
    world.change()
    await eventually(old.end.done)
    await world.in_time(lambda: world.names == ["a"])
    await eventually(lambda: len(world.opened) == 2)
    world.send("bb")
    await eventually(lambda: bool(world.opened[1].sent))
    world.opened[1].answer()
    assert world.names == ["a", "bb"]


async def test_marks_for_a_new_leader_do_not_wait_for_the_answer_of_the_one_before(
    world: World,
) -> None:
    connection = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    world.leads.leader = 1
    change = ImageChange(1, False, (common_pb2.TopicPartition(),), (), (), ())  # type: ignore[arg-type]
    world.sender.on_metadata(change)
    await eventually(lambda: world.names == ["a"])


@pytest.mark.parametrize("refused", [True, False])
async def test_without_a_connection_marks_go_by_calls_and_it_is_looked_again_later(
    world: World, refused: bool
) -> None:
    world.has_frames = refused
    if refused:
        world.outcome = StreamBrokenError(grpc.StatusCode.FAILED_PRECONDITION, "not you")
    with capture_logs() as lines:
        for number in range(1, 4):
            world.send("x" * number)
            await eventually(lambda number=number: len(world.done) == number)  # type: ignore[misc]
        await eventually(lambda: world.attempted == 1)
        for number in range(2, 12):
            world.ms += 60_000
            world.done.clear()
            world.send("again")
            await eventually(lambda: world.names == ["again"])
            # The next rest begins with the end of the attempt, not with that of the call.
            await eventually(lambda number=number: world.attempted == number)  # type: ignore[misc]
        assert world.attempts == 11
        assert len([one for one in lines if one["event"] == "marks go by calls"]) == 1
    world.has_frames, world.outcome = True, None
    world.ms += 60_000
    await world.until_connected()


async def test_a_leader_that_ends_each_connection_at_once_is_asked_less_and_less_often(
    world: World,
) -> None:
    with capture_logs() as lines:
        for _ in range(300):
            world.ms += 1_000
            world.done.clear()
            world.send("a")
            await eventually(lambda: world.names == ["a"])
            for connection in world.opened:
                connection.cancel()
        assert 5 <= world.attempts <= 10
        events = [one["event"] for one in lines]
        assert events.count("marks go by calls") == 1
        assert "marks go in frames" not in events
        world.ms += 60_000
        connection = await world.until_connected()
        world.send("a")
        await eventually(lambda: bool(connection.sent))
        connection.answer()
        assert lines[-1]["event"] == "marks go in frames"
    connection.cancel()
    await eventually(lambda: world.streams._links[2]._task is None)
    world.ms += 2_000  # It has been of use: the next one need not wait for a minute.
    await world.until_connected()


async def test_the_end_of_connections_to_brokers_that_went_is_waited_for(world: World) -> None:
    connection = await world.until_connected()
    connection.closed.clear()
    del world.image.brokers[2]
    world.change()
    stopping = asyncio.create_task(world.streams.stop())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    connection.closed.set()
    await stopping


async def test_a_connection_that_is_full_is_passed_by(world: World) -> None:
    connection = await world.until_connected()
    connection.takes = False
    world.send("a")
    await eventually(lambda: world.names == ["a"])
    assert not connection.sent


async def test_a_leader_that_does_not_answer_loses_the_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TIMEOUT_MS == 30_000
    monkeypatch.setattr("penstock.broker.coordinator.mark_streams.TIMEOUT_MS", 10)
    connection = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    world.ms += 10
    await eventually(connection.end.done)
    await world.in_time(lambda: world.names == ["a"])


async def test_what_fails_here_while_an_answer_is_handled_loses_no_mark(world: World) -> None:
    connection = await world.until_connected()
    heard: list[Any] = []

    def fail(answer: coordination_pb2.WriteMarkersResponse | PenstockError) -> None:
        heard.append(answer)

    message = coordination_pb2.WriteMarkersRequest()
    assert world.streams.ask(2, message, fail)
    assert world.streams.ask(2, message, fail)
    connection.end.set_exception(RuntimeError("a fault of ours"))
    await eventually(lambda: len(heard) == 2)
    assert all(isinstance(one, NetworkError) for one in heard)


async def test_nobody_is_told_anything_once_the_sender_has_stopped(world: World) -> None:
    connection = await world.until_connected()
    world.send("a")
    await eventually(lambda: bool(connection.sent))
    await world.sender.stop()
    assert connection.end.done()
    connection.answer()
    assert not world.done
    assert not world.streams.ask(2, coordination_pb2.WriteMarkersRequest(), world.done.append)  # type: ignore[arg-type]
