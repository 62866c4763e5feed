"""What a member of a group writes down of what its consumer says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.chaos.history import History, HistoryWriter, Type, read_history
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import ClientSpec, Plan, Surroundings, membership
from penstock.chaos.workloads.membership import Member, place
from penstock.client import (
    FencedMemberEpochError,
    InvalidRequestError,
    OffsetAndMetadata,
    PenstockError,
    TopicPartition,
)
from penstock.client.model import GroupMetadata

FENCED = FencedMemberEpochError("another has it by now")


class PaperConsumer:
    """Is in generation 3, and refuses what it is told to refuse."""

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        self.settings = settings
        self.refusals: dict[str, PenstockError] = {}
        self.offsets: dict[TopicPartition, int] = {}
        self.listener: Any = None
        self.committed: list[Mapping[TopicPartition, int]] = []
        self.on_poll: Callable[[], Awaitable[None]] | None = None

    def _check(self, call: str) -> None:
        if call in self.refusals:
            raise self.refusals[call]

    def subscribe(self, topics: Any, listener: Any) -> None:
        self.listener = listener

    async def poll_batch(self, timeout_ms: float) -> dict[TopicPartition, list[Any]]:
        self._check("poll")
        if self.on_poll is not None:
            await self.on_poll()
        return {}

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {one: OffsetAndMetadata(at) for one, at in self.offsets.items()}

    async def group_metadata(self) -> GroupMetadata:
        self._check("metadata")
        return GroupMetadata("g", "id", 3)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._check("commit")
        self.committed.append(offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        self._check("seek")
        self.offsets[partition] = offset

    async def close(self, timeout_ms: float | None = None) -> None:
        if self.listener is not None:
            await self.listener.on_partitions_revoked(list(self.offsets))


Play = Callable[[Member, PaperConsumer], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., History]:
    """Have a member, that has t-0 at 7 and t-1 at 9, play what is given; its history."""
    monkeypatch.setattr(membership, "AsyncConsumer", PaperConsumer)
    path = tmp_path / "history.jsonl"

    def perform(what: Play, *, crashes: bool = False) -> History:
        async def run() -> None:
            spec = ClientSpec("member-1", "member", 0)
            surroundings = Surroundings(
                "nowhere", Plan(7, 3, 1.0, 1.0), spec, Random(7), Recorder(writer, spec.process, 0)
            )
            member = Member(surroundings, group="g", topic="t", life=2, crashes=crashes)
            consumer: Any = member._consumer
            member.join()
            consumer.offsets = {place("t-0"): 7, place("t-1"): 9}
            await member.on_partitions_assigned(list(consumer.offsets))
            await member.poll()
            await what(member, consumer)

        writer = HistoryWriter(path)
        asyncio.run(run())
        writer.close()
        return read_history(path)

    return perform


def told(history: History, *kinds: str) -> list[tuple[str, Type, Any]]:
    return [(one.invoked.f, one.type, one.invoked.value) for one in history.of(*kinds)]


def test_a_member_says_who_it_is_and_in_which_generation(play) -> None:
    async def commit(member: Member, _: PaperConsumer) -> None:
        assert await member.commit()

    history = play(commit)
    (assigned,) = history.of("assigned")
    assert assigned.invoked.value == {
        "group": "g",
        "member": "member-1.2",
        "generation": 3,
        "partitions": ["t-0", "t-1"],
    }
    (poll,) = history.of("poll")
    assert (poll.value["generation"], poll.value["member"]) == (3, "member-1.2")
    assert poll.value["positions"] == {"t-0": 7, "t-1": 9}
    (committed,) = history.of("commit-offsets")
    assert committed.type is Type.OK
    assert committed.invoked.value["offsets"] == {"t-0": 7, "t-1": 9}
    assert committed.invoked.value["generation"] == 3
    # Each is told by a process that does one thing at a time.
    assert len({one.invoked.p for one in (assigned, poll, committed)}) == 3


@pytest.mark.parametrize(("call", "type_"), [("metadata", Type.FAIL), ("commit", Type.INFO)])
def test_a_commit_fails_for_certain_only_where_it_was_not_sent(play, call, type_) -> None:
    async def commit(member: Member, consumer: PaperConsumer) -> None:
        consumer.refusals = {call: FENCED}
        assert not await member.commit()

    ((_, found, asked),) = told(play(commit), "commit-offsets")
    assert found is type_
    assert ("generation" in asked) == (call == "commit")


def test_what_is_given_back_is_committed_before(play) -> None:
    async def give_back(member: Member, consumer: PaperConsumer) -> None:
        await member.on_partitions_revoked([place("t-1")])
        assert consumer.committed == [{place("t-1"): 9}]
        assert member.positions == {"t-0": 7}

    history = play(give_back)
    (revoked,) = history.of("revoked")
    (committed,) = history.of("commit-offsets")
    assert revoked.invoked.t <= committed.invoked.t
    assert committed.completed.t <= revoked.completed.t


def test_what_is_lost_is_not_committed(play) -> None:
    async def lose(member: Member, consumer: PaperConsumer) -> None:
        consumer.refusals = {"metadata": FENCED}
        await member.on_partitions_lost([place("t-0"), place("t-1")])
        assert not member.positions

    history = play(lose)
    ((_, _, asked),) = told(history, "lost")
    assert asked["generation"] is None
    assert not told(history, "commit-offsets")


def test_who_crashes_says_nothing_and_does_not_leave(play) -> None:
    async def crash(member: Member, consumer: PaperConsumer) -> None:
        assert consumer.settings["group_instance_id"] == member.name
        await member.vanish()

    assert not told(play(crash, crashes=True), "leave", "revoked", "commit-offsets")


def test_who_leaves_gives_all_back(play) -> None:
    async def leave(member: Member, consumer: PaperConsumer) -> None:
        assert "group_instance_id" not in consumer.settings
        await member.leave()
        await member.vanish()

    found = told(play(leave), "leave", "revoked", "commit-offsets")
    assert [(f, type_) for f, type_, _ in found] == [("leave", Type.OK), ("revoked", Type.OK)]


def test_who_did_it_in_vain_goes_back_to_where_the_poll_began(play) -> None:
    async def rewind(member: Member, consumer: PaperConsumer) -> None:
        consumer.offsets = {place("t-0"): 17, place("t-1"): 9}
        await member.poll()
        assert await member.rewind()
        assert member.positions == {"t-0": 7, "t-1": 9}
        consumer.refusals = {"seek": InvalidRequestError("not assigned")}
        assert not await member.rewind()

    seeks = told(play(rewind), "seek")
    assert [type_ for _, type_, _ in seeks] == [Type.OK, Type.OK, Type.INFO, Type.INFO]
    assert {asked["member"] for _, _, asked in seeks} == {"member-1.2"}


def test_who_knows_no_beginning_cannot_go_back(play) -> None:
    async def rewind(member: Member, _: PaperConsumer) -> None:
        assert not await member.rewind()  # Its only poll began nowhere.

    assert not told(play(rewind), "seek")


def test_it_goes_back_to_no_position_of_an_earlier_ownership(play) -> None:
    async def lose_and_get_again(member: Member, consumer: PaperConsumer) -> None:
        async def another_has_it_meanwhile() -> None:
            await member.on_partitions_lost([place("t-1")])
            await member.on_partitions_assigned([place("t-1")])
            consumer.offsets[place("t-1")] = 50  # What the other one has committed.

        consumer.on_poll = another_has_it_meanwhile
        await member.poll()
        consumer.offsets[place("t-0")] = 8
        assert not await member.rewind()
        assert consumer.offsets == {place("t-0"): 7, place("t-1"): 50}

    history = play(lose_and_get_again)
    assert [value["partition"] for _, _, value in told(history, "seek")] == [0]
