"""The small parts: waiters, deadlines, and how wishes are sent to the controllers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.core.partition_events import IsrProposal, ProposalAnswered
from penstock.broker.replication.deadlines import Deadlines
from penstock.broker.replication.fetch import next_offset_after
from penstock.broker.replication.isr import MAX_BATCH, IsrProposer
from penstock.broker.replication.purgatory import MIN_SWEEP, OffsetWaiters
from penstock.broker.replication.unanswered import SLOW_BYTES_PER_SECOND, Unanswered
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import (
    CorruptRecordError,
    ErrorCode,
    IneligibleReplicaError,
    NotControllerError,
)
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.records import RecordData, encode_batch
from tests.support import eventually

TOPIC_ID = TopicId(b"t" * 16)


# --- Waiters -------------------------------------------------------------------------------------


async def test_waiters_are_released_by_offset_and_not_before() -> None:
    waiters = OffsetWaiters()
    futures = {offset: waiters.add(offset) for offset in (5, 1, 3, 4)}
    futures[3].cancel()
    waiters.release(4)
    assert {offset for offset, future in futures.items() if future.done()} == {1, 3, 4}
    assert len(waiters) == 1
    waiters.fail(lambda: NotControllerError("over"))
    with pytest.raises(NotControllerError, match="over"):
        await futures[5]
    assert len(waiters) == 0


async def test_waiters_that_gave_up_are_forgotten_though_the_mark_rests() -> None:
    waiters = OffsetWaiters()
    lasting = [waiters.add(offset) for offset in (7, 3, 5)]
    for _ in range(10_000):
        waiters.add(9).cancel()
    assert len(waiters._heap) <= 2 * MIN_SWEEP
    assert len(waiters) == 3
    waiters.release(5)
    assert [future.done() for future in lasting] == [False, True, True]
    many = [waiters.add(offset) for offset in range(8, 8 + 4 * MIN_SWEEP)]
    assert len(waiters) == 1 + len(many)
    waiters.release(10)
    assert [future.done() for future in many[:4]] == [True, True, True, False]


async def test_who_is_called_learns_of_the_end_at_once_and_once() -> None:
    waiters = OffsetWaiters()
    ends: list[tuple[int, BaseException | None]] = []
    calls = {
        offset: waiters.call(offset, lambda error, at=offset: ends.append((at, error)))
        for offset in (5, 1, 3, 4)
    }
    calls[3].cancel()
    waiters.release(4)
    assert ends == [(1, None), (4, None)]
    over = NotControllerError("over")
    waiters.fail(lambda: over)
    waiters.release(9)
    assert ends == [(1, None), (4, None), (5, over)]
    for _ in range(10_000):
        waiters.call(9, lambda _: None).cancel()
    assert len(waiters._heap) <= 2 * MIN_SWEEP


# --- Deadlines -----------------------------------------------------------------------------------


async def test_deadlines_fire_once_each_and_again_only_when_armed_again() -> None:
    now = 0
    fired: list[str] = []
    deadlines = Deadlines(lambda: now, lambda partition: fired.append(partition.name))  # type: ignore[arg-type, func-returns-value]
    early: Any = SimpleNamespace(name="early", armed_ms=10)
    late: Any = SimpleNamespace(name="late", armed_ms=60_000)
    deadlines.arm(late)
    deadlines.arm(early)
    now = 10
    await eventually(lambda: fired == ["early"])
    assert early.armed_ms is None
    late.armed_ms = 20  # It moved earlier; the old entry counts no more.
    deadlines.arm(late)
    now = 60_000
    await eventually(lambda: fired == ["early", "late"])
    deadlines.stop()
    assert fired == ["early", "late"]


# --- What is not answered ------------------------------------------------------------------------


async def test_the_oldest_unanswered_message_is_told_of_when_it_is_overdue_and_not_before() -> None:
    now = 0
    overdue: list[tuple[int, int]] = []
    unanswered = Unanswered(lambda: now, 20, lambda *told: overdue.append(told))
    unanswered.sent(1)
    now = 15
    unanswered.sent(2)
    unanswered.answered(1)
    unanswered.answered(7)
    now = 34
    await asyncio.sleep(0.05)  # The loop's timer comes, but by the clock it is too early.
    assert not overdue
    assert len(unanswered) == 1
    now = 35
    await eventually(lambda: overdue == [(2, 20)])
    unanswered.clear()
    assert len(unanswered) == 0
    now = 99
    await asyncio.sleep(0.03)  # Time in which nothing must happen.
    assert overdue == [(2, 20)]


async def test_a_large_message_has_the_time_that_a_slow_link_takes_to_carry_it() -> None:
    now = 0
    overdue: list[tuple[int, int]] = []
    unanswered = Unanswered(lambda: now, 20, lambda *told: overdue.append(told))
    unanswered.sent(1, SLOW_BYTES_PER_SECOND // 16)
    now = 81
    await asyncio.sleep(0.1)  # The loop's timer comes, but by the clock it is too early.
    assert not overdue
    now = 82
    await eventually(lambda: overdue == [(1, 82)])
    unanswered.clear()


# --- Wishes --------------------------------------------------------------------------------------


class FakePartition:
    """A partition whose replica wants something."""

    def __init__(self, number: int) -> None:
        self.key = TopicIdPartition(TOPIC_ID, number)
        self.closed = False
        self.name = f"t-{number}"
        self.replica = SimpleNamespace(pending=IsrProposal(3, 7, ((1, 11), (2, 12))))
        self.events: list[ProposalAnswered] = []
        self.closed = False
        self.settles = True

    def handle(self, event: ProposalAnswered) -> None:
        self.events.append(event)
        if self.settles:
            self.replica.pending = None


class FakeControllers:
    def __init__(self) -> None:
        self.commands: list[cluster_pb2.AlterPartitionCommand] = []
        self.gate = asyncio.Event()
        self.failures: list[Exception] = []
        self.error = b""

    async def __call__(
        self, command: cluster_pb2.AlterPartitionCommand
    ) -> controller_pb2.AlterPartitionResponse:
        self.commands.append(command)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        response = controller_pb2.AlterPartitionResponse()
        for entry in command.partitions:
            result = response.result.partitions.add()
            result.partition.partition = entry.partition
            result.partition.partition_epoch = entry.partition_epoch + 1
            if entry.partition == 9:
                result.error.CopyFrom(IneligibleReplicaError("fenced").to_proto())
        return response


def proposer_for(controllers: FakeControllers) -> IsrProposer:
    return IsrProposer(1, lambda: 11, controllers, lambda: 99)


async def test_one_request_at_a_time_and_the_rest_goes_together() -> None:
    controllers = FakeControllers()
    proposer = proposer_for(controllers)
    partitions = [FakePartition(number) for number in range(5)]
    proposer.enqueue(partitions[0])  # type: ignore[arg-type]
    await eventually(lambda: len(controllers.commands) == 1)
    for partition in partitions[1:]:
        proposer.enqueue(partition)  # type: ignore[arg-type]
    partitions[4].replica.pending = None  # type: ignore[assignment] # Settled by the metadata.
    await asyncio.sleep(0)
    assert len(controllers.commands) == 1
    controllers.gate.set()
    await eventually(lambda: all(partition.replica.pending is None for partition in partitions))
    assert [[e.partition for e in c.partitions] for c in controllers.commands] == [[0], [1, 2, 3]]
    assert (controllers.commands[0].node_id, controllers.commands[0].broker_epoch) == (1, 11)
    entry = controllers.commands[1].partitions[0]
    assert (entry.leader_epoch, entry.partition_epoch) == (3, 7)
    assert [(m.node_id, m.broker_epoch) for m in entry.new_isr] == [(1, 11), (2, 12)]
    assert partitions[0].events[0].error is None
    assert not partitions[4].events
    await proposer.stop()


async def test_who_was_removed_meanwhile_holds_nobody_else_up() -> None:
    controllers = FakeControllers()
    controllers.gate.set()
    proposer = proposer_for(controllers)
    gone, here = FakePartition(0), FakePartition(1)
    gone.settles = False  # What was removed acts on no answer.
    for closed in (False, True):
        gone.closed = closed
        batch = [(one, IsrProposal(3, 7, ((1, 11), (2, 12)))) for one in (gone, here)]
        for one, proposal in batch:
            one.replica.pending = proposal
        settled = await proposer._send(batch)  # type: ignore[arg-type]
        assert settled is closed, "else all of them pause"


async def test_an_unknown_outcome_is_asked_for_again_until_it_is_known() -> None:
    controllers = FakeControllers()
    controllers.gate.set()
    controllers.failures = [NotControllerError("moved"), ValueError("a bug"), OSError("network")]
    proposer = proposer_for(controllers)
    partition = FakePartition(9)
    proposer.enqueue(partition)  # type: ignore[arg-type]
    await eventually(lambda: bool(partition.events))
    assert len(controllers.commands) == 4
    assert all(command == controllers.commands[0] for command in controllers.commands)
    [event] = partition.events
    assert event.error is ErrorCode.INELIGIBLE_REPLICA
    assert event.state is not None
    assert event.state.partition_epoch == 8
    await proposer.stop()


async def test_a_wish_given_up_is_not_sent_again() -> None:
    controllers = FakeControllers()
    controllers.failures = [NotControllerError("moved")]
    proposer = proposer_for(controllers)
    partition = FakePartition(1)
    proposer.enqueue(partition)  # type: ignore[arg-type]
    await eventually(lambda: len(controllers.commands) == 1)
    partition.replica.pending = None  # type: ignore[assignment]
    controllers.gate.set()
    other = FakePartition(2)
    proposer.enqueue(other)  # type: ignore[arg-type]
    await eventually(lambda: bool(other.events))
    assert [[e.partition for e in c.partitions] for c in controllers.commands] == [[1], [2]]
    assert not partition.events


async def test_a_request_is_bounded() -> None:
    controllers = FakeControllers()
    controllers.gate.set()
    proposer = proposer_for(controllers)
    partitions = [FakePartition(number + 10) for number in range(MAX_BATCH + 5)]
    for partition in partitions:
        proposer.enqueue(partition)  # type: ignore[arg-type]
    await eventually(lambda: all(partition.events for partition in partitions))
    assert [len(command.partitions) for command in controllers.commands] == [MAX_BATCH, 5]


# --- The end of what was read --------------------------------------------------------------------


def test_the_offset_after_the_last_batch() -> None:
    records = [RecordData(0, None, b"x")]
    first = encode_batch(records * 3, base_offset=5)
    second = encode_batch(records * 2, base_offset=8)
    assert next_offset_after(first) == 8
    assert next_offset_after(first + second) == 10


@pytest.mark.parametrize("garbage", [b"", b"x" * 30, b"\0" * 100])
def test_what_are_no_batches_is_corrupt(garbage: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        next_offset_after(garbage)
