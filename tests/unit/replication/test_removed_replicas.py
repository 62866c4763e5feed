"""A replica that was moved away is heard of no more, whatever was on its way to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.broker.core.partition_events import (
    CopyAnew,
    IsrProposal,
    LogAdvanced,
    LogFailed,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    Role,
    RoleChanged,
    StatePosition,
    Tick,
)
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode, NewLeaderElectedError
from tests.support import eventually
from tests.unit.replication.brokers import KEY, Brokers, running
from tests.unit.replication.test_replica import joining, state


class Moves:
    """The first wish completes a move: who asked hands its replica over to broker 2.

    As where the metadata overtake the answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered = False
        ordinary = Brokers.alter_partition

        async def alter_partition(brokers: Brokers, command: Any) -> Any:
            if self.answered:
                return await ordinary(brokers, command)
            self.answered = True
            await asyncio.sleep(0)
            brokers.change(0, replicas=[2, 3], isr=[2, 3], leader=2)
            result = cluster_pb2.AlterPartitionResult()
            answer = result.partitions.add()
            answer.error.CopyFrom(NewLeaderElectedError("moved").to_proto())
            answer.partition.CopyFrom(brokers.partitions[0])
            return controller_pb2.AlterPartitionResponse(result=result)

        monkeypatch.setattr(Brokers, "alter_partition", alter_partition)


async def test_the_answer_to_its_last_wish_does_not_have_it_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = Moves(monkeypatch)
    async with running(3) as brokers:
        brokers.create_topic()
        brokers.change(0, isr=[1, 2])
        manager = brokers[1].manager
        await eventually(lambda: moves.answered and manager.hosted(KEY) is None)
        await eventually(lambda: manager._proposer._sending._task is None)  # It has the answer.
        assert [key for link in manager._links._links.values() for key in link.followed] == []


async def test_a_replica_that_was_removed_acts_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    async with running(3) as brokers:
        brokers.create_topic()
        gone = brokers[1].partition()
        brokers.change(0, isr=[1, 2])
        await eventually(lambda: moves.answered and brokers[1].manager.hosted(KEY) is None)
        news = PartitionState.from_record(brokers.partitions[0])
        assert news.partition_epoch > gone.replica.partition_epoch
        for event in (
            PartitionChanged(news, 1, 10**6),
            ProposalAnswered(IsrProposal(0, 0, ((1, 1),)), None, news, 10**6),
            LogAdvanced(10**6),
            Tick(10**9),
            CopyAnew(),
            LogFailed(),
        ):
            assert gone.replica.handle(event) == []


def test_an_answer_that_names_another_leader_deposes_at_once_and_says_no_more() -> None:
    replica, wish = joining()
    deposed = state(leader=2, epoch=6, version=12)
    refusal = ProposalAnswered(wish.proposal, ErrorCode.FENCED_LEADER_EPOCH, deposed, 0)
    assert replica.handle(refusal) == [RoleChanged(Role.OFFLINE, 1, 5)]
    assert replica.handle(refusal) == []
    # What comes before in the metadata may have moved the replica away and back.
    assert replica.handle(PartitionChanged(state(version=11, isr=(1, 2)), 2, 0)) == []
    assert replica.role is Role.OFFLINE
    assert replica.handle(PartitionChanged(deposed, 2, 0)) == [
        RoleChanged(Role.FOLLOWER, 2, 6),
        StatePosition(),
    ]
