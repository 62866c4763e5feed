"""Many replicas are to begin anew at once: what they are handed over is made as it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.broker.replication.leader import MAX_IN_FLIGHT, MAX_PUSH_BYTES
from penstock.broker.replication.ports import Push
from penstock.v1 import replication_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.laden import REPLICATION_PUSH
from tests.unit.replication.test_catch_up import Leader, Link, key, settled
from tests.unit.replication.virtual_loop import run_virtually


class Hasty(Link):
    """A stream that takes every message without waiting."""

    async def write(self, message: Push) -> None:
        whole = REPLICATION_PUSH.whole(message)
        self.pushes.append((0, whole))
        self.unanswered.append(whole)
        self.answer()


class Snapshots:
    """What the logs of a leader hand over: as large as the test says, and noted when it is made."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.made: list[int] = []

    def of(self, number: int) -> Any:
        def producers_below(offset: int) -> bytes:
            assert offset == 1
            self.made.append(number)
            return bytes(self.sizes[number])

        return producers_below


async def leader_of(sizes: Sequence[int]) -> tuple[Leader, Snapshots]:
    """It deleted the beginning of each log."""
    leader, snapshots = Leader([[1]] * len(sizes), rate=0), Snapshots(sizes)
    for number in range(len(sizes)):
        await leader.fill(number, 1)
        log: Any = leader.logs.open[key(number)]
        log.advance_log_start(1)
        log.producers_below = snapshots.of(number)
    return leader, snapshots


def told(link: Link) -> list[list[replication_pb2.ReplicaPush]]:
    """The answers in each message."""
    return [list(message.pushes) for _, message in link.pushes]


def size_bytes(pushes: Sequence[replication_pb2.ReplicaPush]) -> int:
    return sum(len(push.producers) for push in pushes)


@pytest.mark.parametrize("size", [MAX_PUSH_BYTES // 4, MAX_PUSH_BYTES * 2 // 3, 2 * MAX_PUSH_BYTES])
def test_no_more_is_made_than_goes_into_the_messages_under_way(size: int) -> None:
    async def main() -> None:
        leader, snapshots = await leader_of([size] * 30)
        link = Link(leader, 2)
        link.held.update(range(30))
        link.state(dict.fromkeys(range(30), 0))
        await settled(lambda: len(link.unanswered) == MAX_IN_FLIGHT, 1)
        sent = sum(len(pushes) for pushes in told(link))
        assert sent < 30
        assert len(snapshots.made) - sent in (0, 1)  # One may not have fitted in.
        link.held.clear()
        link.answer()
        await settled(lambda: sum(len(pushes) for pushes in told(link)) == 30, 5)
        for pushes in told(link):
            assert size_bytes(pushes) <= MAX_PUSH_BYTES or len(pushes) == 1
            assert all(len(push.producers) == size for push in pushes)
            assert all(push.diverging_epoch.end_offset == 1 for push in pushes)
        assert snapshots.made == list(range(30))  # Each once, in the order they were stated in.
        await link.end()

    run_virtually(main())


def test_looking_through_many_producers_for_nothing_takes_room_too() -> None:
    async def main() -> None:
        leader, snapshots = await leader_of([0] * 100)
        link = Link(leader, 2)
        link.state(dict.fromkeys(range(100), 0))
        await settled(lambda: len(snapshots.made) == 100, 5)
        assert max(len(pushes) for pushes in told(link)) <= 8
        await link.end()

    run_virtually(main())


def test_others_have_their_turn_between_messages() -> None:
    async def main() -> None:
        leader, snapshots = await leader_of([MAX_PUSH_BYTES] * MAX_IN_FLIGHT)
        link = Hasty(leader, 2)
        link.held.update(range(MAX_IN_FLIGHT))
        link.state(dict.fromkeys(range(MAX_IN_FLIGHT), 0))
        made = [0]
        while made[-1] < MAX_IN_FLIGHT:
            await asyncio.sleep(0)  # a turn
            if len(snapshots.made) > made[-1]:
                made.append(len(snapshots.made))
        assert made == list(range(MAX_IN_FLIGHT + 1))  # Seen after each.
        await link.end()

    run_virtually(main())


def test_who_leads_no_more_when_it_is_told_hands_nothing_over() -> None:
    async def main() -> None:
        leader, snapshots = await leader_of([MAX_PUSH_BYTES] * 5)
        link = Link(leader, 2)
        link.held.update(range(5))
        link.state(dict.fromkeys(range(5), 0))
        await settled(lambda: len(link.unanswered) == MAX_IN_FLIGHT, 1)
        for record in leader.partitions[2:4]:
            record.leader_epoch += 1
            record.partition_epoch += 1
        leader.partitions[2].leader = 3
        leader.publish(partitions=leader.partitions[2:4])
        link.held.clear()
        link.answer()
        await settled(lambda: sum(len(pushes) for pushes in told(link)) == 5, 5)
        answers = {push.partition.partition: push for pushes in told(link) for push in pushes}
        for number in (2, 3):
            assert answers[number].error.code == ErrorCode.NOT_LEADER
            assert answers[number].leader_epoch == 0  # In the epoch that the follower stated.
            assert not answers[number].producers
            assert not answers[number].HasField("diverging_epoch")
        assert snapshots.made == [0, 1, 4]
        await link.end()

    run_virtually(main())


def test_only_what_was_stated_last_is_answered() -> None:
    async def main() -> None:
        leader, snapshots = await leader_of([MAX_PUSH_BYTES] * 4)
        link = Link(leader, 2)
        link.held.update(range(4))
        link.state(dict.fromkeys(range(4), 0))
        await settled(lambda: len(link.unanswered) == MAX_IN_FLIGHT, 1)
        for _ in range(10):
            link.state({2: 0})
        link.state({3: 1})  # It has begun anew by itself.
        link.held.clear()
        link.answer()
        await settled(lambda: leader.partitions[3].isr == [1, 2], 5)
        await link.end()
        numbers = [
            push.partition.partition
            for pushes in told(link)
            for push in pushes
            if push.HasField("diverging_epoch")
        ]
        assert numbers == snapshots.made == [0, 1, 2]

    run_virtually(main())
