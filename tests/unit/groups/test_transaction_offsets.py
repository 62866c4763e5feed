"""Offsets in transactions at a coordinator: asked for, written, marked, and read back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.transactions import Marker
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    DiskFullError,
    ErrorCode,
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTransactionalIdError,
    NotLeaderError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    UnknownMemberIdError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import iter_batches
from tests.support import eventually
from tests.unit.groups.coordinator_harness import (
    PARTITIONS,
    FakeMember,
    World,
    commit_request,
    world,
)

GROUP = "billing"
NUMBER = partition_for_group(GROUP, PARTITIONS)


def in_transaction(
    offset: int, *, producer_id: int = 7, epoch: int = 0, **fields: Any
) -> groups_pb2.CommitTransactionOffsetsRequest:
    return groups_pb2.CommitTransactionOffsetsRequest(
        commit=commit_request(GROUP, offset, **fields),
        transactional_id="t",
        producer_id=producer_id,
        producer_epoch=epoch,
    )


async def commit(w: World, offset: int, **fields: Any) -> None:
    answer = await w.coordinator.commit_transaction_offsets(in_transaction(offset, **fields))
    assert not answer.commit.HasField("error"), answer.commit.error.message
    assert not any(result.HasField("error") for result in answer.commit.results)


def mark(w: World, *, producer_id: int = 7, epoch: int = 1, commits: bool = True) -> None:
    w.replicas.mark(NUMBER, Marker(producer_id, epoch, commits, 0))


async def position(w: World) -> int | None:
    return (await w.committed(GROUP)).get(("orders", 0))


async def becomes(w: World, offset: int | None) -> None:
    where = TopicPartition("orders", 0)
    await eventually(lambda: w.coordinator.committed().get(GROUP, {}).get(where) == offset)


async def reload(w: World) -> None:
    w.replicas.lead(NUMBER, (w.log_of(GROUP).leader_epoch or 0) + 1)
    await w.loaded()


async def test_positions_are_the_groups_when_the_mark_is_committed() -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        await commit(w, 5)
        assert w.replicas.verified == [("t", 7, 0)]
        header, _ = list(iter_batches(w.log_of(GROUP).data))[-1]
        assert header.is_transactional
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 0, -1)
        assert await position(w) == 1
        w.replicas.hold_commits = True
        mark(w)
        await eventually(lambda: w.log_of(GROUP).waiting > 0)
        assert await position(w) == 1
        w.replicas.commit()
        await becomes(w, 5)
        await reload(w)
        assert await position(w) == 5


async def test_an_aborted_transaction_leaves_the_position_as_it_was() -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        await commit(w, 5)
        mark(w, commits=False)
        request = groups_pb2.FetchOffsetsRequest(group_id=GROUP, require_stable=True)
        while (answer := await w.coordinator.fetch_offsets(request)).HasField("error"):
            assert answer.error.code == ErrorCode.UNSTABLE_OFFSET_COMMIT
            await asyncio.sleep(0)
        assert [entry.offset for entry in answer.offsets] == [1]
        await reload(w)
        assert await position(w) == 1


async def test_what_is_pending_is_pending_after_a_reload_too() -> None:
    async with world() as w:
        await commit(w, 5)
        await reload(w)
        request = groups_pb2.FetchOffsetsRequest(group_id=GROUP, require_stable=True)
        answer = await w.coordinator.fetch_offsets(request)
        assert answer.error.code == ErrorCode.UNSTABLE_OFFSET_COMMIT
        mark(w)
        await becomes(w, 5)


async def test_a_mark_that_comes_while_the_state_is_read_is_not_missed() -> None:
    async with world() as w:
        await commit(w, 5)
        w.replicas.hold_commits = True
        await held_commit(w)  # So that the load waits for it.
        w.replicas.resign(NUMBER)
        await eventually(lambda: w.log_of(GROUP).waiting == 0)
        w.replicas.lead(NUMBER, 2)
        await eventually(lambda: w.log_of(GROUP).waiting == 1)
        mark(w)
        w.replicas.commit()
        await w.loaded()
        await becomes(w, 5)


async def held_commit(w: World) -> None:
    """Something is in the log that is not committed."""
    committing = asyncio.create_task(w.commit(GROUP, 3, partition=1))
    await eventually(lambda: w.log_of(GROUP).end > w.log_of(GROUP).high_watermark)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)


async def test_marks_count_in_the_order_of_the_log() -> None:
    async with world() as w:
        await commit(w, 5)
        await commit(w, 6, producer_id=8)
        w.replicas.hold_commits = True
        mark(w, producer_id=8)
        mark(w)
        w.replicas.commit()
        await becomes(w, 6)
        w.replicas.hold_commits = False
        await commit(w, 7, epoch=1)
        await w.commit(GROUP, 9)
        mark(w, epoch=2)
        await commit(w, 8, epoch=2, partition=1)
        assert await position(w) == 9
        await reload(w)
        assert await position(w) == 9


async def test_a_commit_that_a_mark_overtook_is_refused_and_counts_for_nothing() -> None:
    async with world() as w:
        await commit(w, 5)
        w.replicas.hold_commits = True
        blocked = asyncio.create_task(w.commit(GROUP, 1, partition=1))
        await eventually(lambda: w.log_of(GROUP).end == 2)
        late = asyncio.create_task(commit(w, 6))  # It waits behind that.
        other = asyncio.create_task(w.commit(GROUP, 2, partition=2))
        await eventually(lambda: len(w.replicas.verified) == 2)
        await asyncio.sleep(0)
        mark(w)
        w.replicas.hold_commits = False
        w.replicas.commit()
        await blocked
        with pytest.raises(InvalidProducerEpochError):
            await late
        # What was taken back with it can be tried again.
        with pytest.raises(CoordinatorNotAvailableError):
            await other
        await w.loaded()
        await becomes(w, 5)
        await w.commit(GROUP, 2, partition=2)
        await reload(w)
        assert await w.committed(GROUP) == {
            ("orders", 0): 5,
            ("orders", 1): 1,
            ("orders", 2): 2,
        }


async def test_others_do_not_hear_that_a_producer_is_fenced_behind_whose_write_they_wait() -> None:
    async with world() as w:
        member = FakeMember(w, GROUP, "m")
        await member.join()
        epoch = (await member.next()).member_epoch

        def positions(offset: int, producer_id: int) -> groups_pb2.CommitTransactionOffsetsRequest:
            request = in_transaction(offset, producer_id=producer_id, member_id="m")
            request.commit.member_epoch = epoch
            return request

        async def send(request: groups_pb2.CommitTransactionOffsetsRequest) -> None:
            answer = await w.coordinator.commit_transaction_offsets(request)
            assert not answer.commit.HasField("error"), answer.commit.error.message

        await send(positions(5, producer_id=7))
        w.replicas.hold_commits = True
        end = w.log_of(GROUP).end
        commit_of_member = w.commit(GROUP, 1, partition=1, member_id="m", epoch=epoch)
        blocked = asyncio.create_task(commit_of_member)
        await eventually(lambda: w.log_of(GROUP).end == end + 1)
        late = asyncio.create_task(send(positions(6, producer_id=7)))  # It waits behind that.
        await eventually(lambda: len(w.replicas.verified) == 2)
        await asyncio.sleep(0)
        # What tells of the group waits for what was written of it last.
        await member.send(epoch)
        asked = asyncio.create_task(w.committed(GROUP))
        nothing_to_write = positions(7, producer_id=8)
        nothing_to_write.commit.offsets[0].partition.topic = "nowhere"
        other = asyncio.create_task(send(nothing_to_write))
        await eventually(lambda: len(w.replicas.verified) == 3)
        await asyncio.sleep(0)
        mark(w)
        w.replicas.hold_commits = False
        w.replicas.commit()
        await blocked
        with pytest.raises(InvalidProducerEpochError):
            await late
        assert (await member.next()).error.code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        for waiting in (asked, other):
            with pytest.raises(CoordinatorNotAvailableError):
                await waiting


async def test_a_write_that_is_taken_back_after_a_mark_does_not_bring_the_past_back() -> None:
    async with world() as w:
        await commit(w, 5)
        w.replicas.hold_commits = True
        blocked = asyncio.create_task(w.commit(GROUP, 1, partition=1))
        await eventually(lambda: w.log_of(GROUP).end == 2)
        waiting = asyncio.create_task(w.commit(GROUP, 9))  # Newer than what is pending.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        mark(w)
        w.replicas.refuse_with = DiskFullError("no room")
        w.replicas.commit()
        await blocked
        with pytest.raises(CoordinatorNotAvailableError):
            await waiting
        w.replicas.refuse_with = None
        w.replicas.hold_commits = False
        w.replicas.commit()
        await w.loaded()
        await becomes(w, 5)


async def test_a_transaction_that_can_not_be_written_is_not_pending() -> None:
    async with world() as w:
        w.replicas.refuse_with = DiskFullError("no room")
        with pytest.raises(CoordinatorNotAvailableError):
            await commit(w, 5)
        w.replicas.refuse_with = None
        request = groups_pb2.FetchOffsetsRequest(group_id=GROUP, require_stable=True)
        assert not (await w.coordinator.fetch_offsets(request)).HasField("error")


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (ProducerFencedError("another has the id"), ProducerFencedError),
        (RequestTimedOutError("no answer"), CoordinatorNotAvailableError),
    ],
)
async def test_what_the_transactions_coordinator_says_is_told(
    refusal: PenstockError, told: type[PenstockError]
) -> None:
    async with world() as w:
        w.replicas.refuse_transactions_with = refusal
        with pytest.raises(told):
            await commit(w, 5)
        assert not w.log_of(GROUP).data


async def test_who_may_not_commit_has_no_partition_added() -> None:
    async with world() as w:
        answers = w.coordinator.commit_transaction_offsets
        with pytest.raises(UnknownMemberIdError):
            await answers(in_transaction(1, member_id="gone", epoch=3))
        wrong = in_transaction(1)
        wrong.transactional_id = ""
        with pytest.raises(InvalidTransactionalIdError):
            await answers(wrong)
        for fields in ({"producer_id": -1}, {"epoch": -1}, {"epoch": 2**15}):
            with pytest.raises(InvalidRequestError):
                await answers(in_transaction(1, **fields))
        nothing = in_transaction(1)
        del nothing.commit.offsets[:]
        assert not (await answers(nothing)).commit.HasField("error")
        assert not w.replicas.verified


async def test_a_leadership_that_ends_while_the_coordinator_is_asked_commits_nothing() -> None:
    async with world() as w:
        w.replicas.coordinator_answers.clear()
        asking = asyncio.create_task(commit(w, 5))
        await eventually(lambda: bool(w.replicas.verified))
        w.move_away(GROUP)
        w.replicas.refuse_transactions_with = NotLeaderError("elsewhere")
        w.replicas.coordinator_answers.set()
        with pytest.raises(PenstockError) as refused:
            await asking
        assert refused.value.code == ErrorCode.NOT_COORDINATOR
        assert not w.log_of(GROUP).data


async def test_marks_are_followed_though_the_state_is_loaded_anew_in_the_same_turn() -> None:
    async with world() as w:
        await commit(w, 5)
        hosted = w.coordinator._hosted[NUMBER]
        mark(w)
        # As when a write that was in flight fails before anything else gets its turn.
        hosted._reload(CoordinatorNotAvailableError("unknown"))
        await w.loaded()
        await becomes(w, 5)
        await commit(w, 6, epoch=1)
        mark(w, epoch=2)
        await becomes(w, 6)
