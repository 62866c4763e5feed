from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.broker.coordinator import hosted
from penstock.broker.core.group_codec import decode
from penstock.broker.core.group_events import GroupSettings
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    BrokerFencedError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ErrorCode,
    InvalidGroupIdError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    RecordTooLargeError,
    RequestTimedOutError,
    StorageError,
    error_from_proto,
)
from tests.support import eventually
from tests.unit.groups.coordinator_harness import (
    FakeMember,
    commit_request,
    topic_id_of,
    world,
)
from tests.unit.groups.group_harness import held

GROUP = "billing"


def owned(partitions: set[tuple[str, int]]) -> groups_pb2.OwnedPartitions:
    entry = groups_pb2.TopicPartitions(
        topic_id=topic_id_of("orders"), topic="orders", partitions=sorted(n for _, n in partitions)
    )
    return groups_pb2.OwnedPartitions(partitions=[entry] if partitions else [])


def code(response: groups_pb2.GroupHeartbeatResponse) -> ErrorCode:
    assert response.HasField("error")
    return error_from_proto(response.error).code


async def test_an_answer_is_given_only_when_it_is_committed() -> None:
    async with world() as w:
        w.replicas.hold_commits = True
        commit = asyncio.ensure_future(w.commit(GROUP, 5))
        await eventually(lambda: w.log_of(GROUP).end == 1)
        read = asyncio.ensure_future(w.committed(GROUP))
        other = await w.committed("another")  # Its partition has nothing uncommitted.
        for _ in range(10):
            await asyncio.sleep(0)
        assert not commit.done()
        assert not read.done(), "what is not committed must not be read"
        assert other == {}
        w.replicas.commit()
        assert not (await commit).HasField("error")
        assert await read == {("orders", 0): 5}


async def test_members_learn_only_of_committed_assignments() -> None:
    async with world() as w:
        a, b = FakeMember(w, GROUP, "a"), FakeMember(w, GROUP, "b")
        await a.join()
        assert len(held((await a.next()).assignment.partitions)) == 4
        w.replicas.hold_commits = True
        await b.join()
        await eventually(lambda: w.log_of(GROUP).end > w.log_of(GROUP).high_watermark)
        assert not a.has_news
        assert not b.has_news
        w.replicas.commit()
        assert len(held((await a.next()).assignment.partitions)) == 2
        assert (await b.next()).HasField("assignment")


async def test_an_assignment_is_pushed_at_once() -> None:
    async with world() as w:
        a, b = FakeMember(w, GROUP, "a"), FakeMember(w, GROUP, "b")
        await a.join()
        await a.next()
        await b.join()
        await b.next()
        push = await a.next()
        await a.send(push.member_epoch, owned=owned(held(push.assignment.partitions)))
        assert not (await a.next()).HasField("error")
        gain = await b.next()
        assert len(held(gain.assignment.partitions)) == 2


async def test_commits_that_come_together_are_written_together() -> None:
    async with world() as w:
        answers = await asyncio.gather(*(w.commit(GROUP, n, partition=n % 4) for n in range(200)))
        assert not any(answer.HasField("error") for answer in answers)
        assert w.replicas.append_count <= 3
        assert w.log_of(GROUP).end == 200


async def test_the_records_are_the_protocols() -> None:
    async with world() as w:
        await w.commit(GROUP, 7)
        (record,) = w.log_of(GROUP).records()
        replayed = decode(record.key, record.value)
        assert replayed.group_id == GROUP
        assert replayed.slot == ("orders", 0)
        assert replayed.value.offset == 7
        assert replayed.value.topic_id == topic_id_of("orders")
        assert 1_600_000_000_000 < replayed.value.commit_timestamp_ms <= record.timestamp_ms


async def test_a_new_coordinator_reads_what_the_old_one_wrote() -> None:
    async with world() as w:
        for n in range(4):
            await w.commit(GROUP, 10 + n, partition=n)
        a = FakeMember(w, "members", "a")
        await a.join()
        epoch = (await a.next()).member_epoch
        w.replicas.read_bytes = 1  # One batch at a time.
        for number in w.replicas.partitions:
            w.replicas.lead(number, 2)
        with pytest.raises(CoordinatorLoadInProgressError):
            await w.commit(GROUP, 1)
        await w.loaded()
        assert await w.committed(GROUP) == {("orders", n): 10 + n for n in range(4)}
        a.reconnect()
        await a.send(epoch)
        response = await a.next()
        assert (response.member_epoch, len(held(response.assignment.partitions))) == (epoch, 4)


async def test_nothing_is_served_before_the_log_read_is_committed() -> None:
    async with world() as w:
        await w.commit(GROUP, 5)
        log = w.log_of(GROUP)
        log.high_watermark = 0  # As a new leader, who does not know yet.
        number = next(n for n, p in w.replicas.partitions.items() if p is log)
        w.replicas.lead(number, 2)
        a = FakeMember(w, GROUP, "a")
        await eventually(lambda: log.waiting == 1)  # All is read.
        await a.join()
        assert code(await a.next()) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        with pytest.raises(CoordinatorLoadInProgressError, match="ask again"):
            await w.committed(GROUP)
        w.replicas.commit()
        await w.loaded()
        assert await w.committed(GROUP) == {("orders", 0): 5}


async def test_losing_the_leadership_sends_everybody_to_the_new_leader() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        await a.join()
        await a.next()
        w.replicas.hold_commits = True
        commit = asyncio.ensure_future(w.commit(GROUP, 1, member_id="a", epoch=1))
        await eventually(lambda: w.log_of(GROUP).end > w.log_of(GROUP).high_watermark)
        w.move_away(GROUP)
        with pytest.raises(NotCoordinatorError) as caught:
            await commit
        assert (caught.value.leader.node_id, caught.value.leader.host) == (2, "n2")
        farewell = await a.next()
        assert code(farewell) is ErrorCode.NOT_COORDINATOR
        assert farewell.error.current_leader.node_id == 2
        assert await a.over()
        with pytest.raises(NotCoordinatorError):
            await w.committed(GROUP)


async def test_what_was_not_committed_when_the_leadership_went_was_never_told() -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        w.replicas.hold_commits = True
        commit = asyncio.ensure_future(w.commit(GROUP, 2))
        log = w.log_of(GROUP)
        await eventually(lambda: log.end == 2)
        number = next(n for n, p in w.replicas.partitions.items() if p is log)
        w.replicas.resign(number)
        with pytest.raises(NotCoordinatorError):
            await commit
        log.cut(1)  # The next leader did not have it.
        w.replicas.lead(number, 2)
        await w.loaded()
        assert await w.committed(GROUP) == {("orders", 0): 1}


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (NotEnoughReplicasError("2 needed, in sync: 1"), CoordinatorNotAvailableError),
        (RecordTooLargeError("too large"), RecordTooLargeError),
    ],
)
async def test_a_write_refused_changes_nothing_and_the_next_one_works(refusal, told) -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        a = FakeMember(w, "members", "a")
        await a.join()
        epoch = (await a.next()).member_epoch
        w.replicas.refuse_with = refusal
        with pytest.raises(told) as caught:
            await w.commit(GROUP, 2)
        assert refusal.message in caught.value.message
        assert await w.committed(GROUP) == {("orders", 0): 1}
        await a.send(-1)
        assert code(await a.next()) is told.code
        await a.send(epoch)  # Still a member.
        assert not (await a.next()).HasField("error")
        w.replicas.refuse_with = None
        await w.commit(GROUP, 3)
        assert await w.committed(GROUP) == {("orders", 0): 3}
        assert [r.value is None for r in w.log_of("members").records()].count(True) == 0


@pytest.mark.parametrize(
    "failure",
    [
        NotEnoughReplicasAfterAppendError("shrunk"),
        RequestTimedOutError("slow"),
        NotLeaderError("lost and found"),
        StorageError("odd"),
    ],
)
async def test_a_write_of_unknown_outcome_is_resolved_by_the_log(failure) -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        w.replicas.fail_with, w.replicas.hold_commits = failure, True
        with pytest.raises((CoordinatorNotAvailableError, NotCoordinatorError)):
            await w.commit(GROUP, 2)
        w.replicas.fail_with, w.replicas.hold_commits = None, False
        with pytest.raises(CoordinatorLoadInProgressError):
            await w.committed(GROUP)
        w.replicas.commit()  # It was appended, and makes it after all.
        await w.loaded()
        assert await w.committed(GROUP) == {("orders", 0): 2}
        assert not (await w.commit(GROUP, 3)).HasField("error")


async def test_streams_survive_a_reload() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        await a.join()
        epoch = (await a.next()).member_epoch
        w.replicas.fail_with = RequestTimedOutError("slow")
        await a.send(epoch, client_id="renamed")
        assert code(await a.next()) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        w.replicas.fail_with = None
        w.replicas.commit()
        await w.loaded()
        await a.send(epoch)
        response = await a.next()
        assert len(held(response.assignment.partitions)) == 4


async def test_a_broker_that_may_not_serve_keeps_no_member_believing() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        await a.join()
        epoch = (await a.next()).member_epoch
        w.replicas.fenced = BrokerFencedError("no word from the controllers")
        await a.send(epoch)
        assert code(await a.next()) is ErrorCode.NOT_COORDINATOR
        with pytest.raises(NotCoordinatorError, match="no word"):
            await w.committed(GROUP)
        w.replicas.fenced = None
        await a.send(epoch)
        assert not (await a.next()).HasField("error")


async def test_silent_members_are_removed_by_the_clock_and_not_before() -> None:
    settings = GroupSettings(min_session_timeout_ms=50, assignment_interval_ms=0)
    async with world(settings=settings) as w:
        a, b = FakeMember(w, GROUP, "a"), FakeMember(w, GROUP, "b")
        await b.join(session_timeout_ms=60_000)
        epoch = (await b.next()).member_epoch
        started = asyncio.get_running_loop().time()
        await a.join(session_timeout_ms=2_000)
        await a.next()
        push = await b.next()
        await b.send(push.member_epoch, owned=owned(held(push.assignment.partitions)))
        await b.next()
        gained = await a.next()
        assert len(held(gained.assignment.partitions)) == 2
        farewell = await a.next()
        assert code(farewell) is ErrorCode.UNKNOWN_MEMBER_ID
        assert asyncio.get_running_loop().time() - started >= 1.95
        regained = await b.next()
        assert regained.member_epoch > epoch
        assert len(held(regained.assignment.partitions)) == 4


async def test_that_a_dead_member_was_removed_is_logged() -> None:
    settings = GroupSettings(min_session_timeout_ms=50, assignment_interval_ms=0)
    with capture_logs() as logs:
        async with world(settings=settings) as w:
            dead = FakeMember(w, GROUP, "dead")
            await dead.join(session_timeout_ms=50)
            await dead.next()
            w.coordinator.close_stream(dead.stream)
            await eventually(lambda: any(line["event"] == "member removed" for line in logs))
    (removed,) = [line for line in logs if line["event"] == "member removed"]
    assert (removed["group"], removed["member"]) == (GROUP, "dead")
    assert "not heard for 50 ms" in removed["reason"]


async def test_offsets_are_forgotten_in_the_log_when_their_time_has_come() -> None:
    settings = GroupSettings(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=10)
    async with world(settings=settings) as w:
        await w.commit(GROUP, 1)
        committed = len(w.log_of(GROUP).records())
        await w.commit("other", 2)
        w.wall_clock_ahead_ms = 50_000
        await w.commit("other", 3)
        w.wall_clock_ahead_ms = 61_000
        log = w.log_of(GROUP)
        await eventually(lambda: len(log.records()) > committed)
        assert log.records()[-1].value is None
        assert log.records()[-1].key == log.records()[committed - 1].key
        assert await w.committed(GROUP) == {}
        assert await w.committed("other") == {("orders", 0): 3}


async def test_a_broker_that_may_not_serve_forgets_nothing_and_looks_again_later() -> None:
    settings = GroupSettings(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=10)
    async with world(settings=settings) as w:
        await w.commit(GROUP, 1)
        w.replicas.fenced = NotLeaderError("no lease")
        checks = w.replicas.watermark_count
        w.wall_clock_ahead_ms = 61_000
        await eventually(lambda: w.replicas.watermark_count > checks + 3)
        assert all(record.value is not None for record in w.log_of(GROUP).records())
        w.replicas.fenced = None
        await eventually(lambda: w.log_of(GROUP).records()[-1].value is None)


async def test_a_removal_that_cannot_be_written_is_tried_until_it_can() -> None:
    settings = GroupSettings(min_session_timeout_ms=50, assignment_interval_ms=0, retry_ms=20)
    async with world(settings=settings) as w:
        a = FakeMember(w, GROUP, "a")
        await a.join(session_timeout_ms=1_000)
        await a.next()
        w.replicas.refuse_with = NotEnoughReplicasError("one in sync")
        await eventually(lambda: w.replicas.refusal_count >= 3)
        assert (await w.coordinator.describe_group(GROUP)).members
        w.replicas.refuse_with = None
        await eventually(lambda: w.log_of(GROUP).records()[-1].value is None)
        await a.send(1)
        assert code(await a.next()) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_broker_that_stood_still_reads_its_mail_before_it_calls_members_silent() -> None:
    async with world() as w:
        a, b = FakeMember(w, GROUP, "a"), FakeMember(w, GROUP, "b")
        await a.join()
        epoch = (await a.next()).member_epoch
        await b.join(session_timeout_ms=1_000)
        await b.next()
        push = await a.next()
        await a.send(push.member_epoch, owned=owned(held(push.assignment.partitions)))
        await a.next()
        await b.next()
        w.clock_ahead_ms = 120_000  # Far beyond everybody's session.
        await w.commit(GROUP, 1, member_id="a", epoch=epoch)  # Anything that looks at the clock.
        await a.send(push.member_epoch)
        assert not (await a.next()).HasField("error")
        assert len(held((await a.next()).assignment.partitions)) == 4
        assert code(await b.next()) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_topics_are_followed() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        subscription = groups_pb2.Subscription(topics=["orders"], topic_pattern="inv.*")
        await a.send(0, subscription=subscription)
        await a.next()
        w.make_topic("invoices", 2)
        assert len(held((await a.next()).assignment.partitions)) == 6
        w.make_topic("orders", 5)  # Grown by one.
        assert len(held((await a.next()).assignment.partitions)) == 7
        w.make_topic("orders", 5, leader=2)  # Only the leaders changed.
        await w.commit(GROUP, 3, member_id="a", epoch=3)
        w.delete_topic("orders")
        push = await a.next()
        assert {topic for topic, _ in held(push.assignment.partitions)} == {"invoices"}
        assert push.member_epoch == 4
        assert await w.committed(GROUP) == {}
        assert [r.value for r in w.log_of(GROUP).records() if b"orders" in r.key][-1] is None


async def test_the_offsets_topic_is_made_when_it_is_missing() -> None:
    async with world(offsets_topic=False) as w:
        with pytest.raises(CoordinatorLoadInProgressError):
            await w.commit(GROUP, 1)
        assert w.ensured == 1
        await w.loaded()
        await w.commit(GROUP, 1)
        assert w.ensured == 1


async def test_a_refusal_to_make_the_offsets_topic_reaches_the_member() -> None:
    async with world(offsets_topic=False) as w:

        async def refuse() -> None:
            raise CoordinatorNotAvailableError("needs 3 brokers, 1 is alive")

        w.coordinator._hosted._ensure_topic = refuse
        a = FakeMember(w, GROUP, "a")
        await a.join()
        response = await a.next()
        assert code(response) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert "needs 3 brokers" in response.error.message


async def test_group_ids_are_checked() -> None:
    async with world() as w:
        for group_id in ("", "x" * 256, "é" * 128):
            with pytest.raises(InvalidGroupIdError):
                await w.commit(group_id, 1)


async def test_listing_waits_for_what_is_still_being_read() -> None:
    async with world() as w:
        await w.commit("g1", 1)
        await w.commit("g2", 1)
        a = FakeMember(w, "g3", "a")
        await a.join()
        await a.next()
        for number in w.replicas.partitions:
            w.replicas.lead(number, 2)
        listing = await w.coordinator.list_groups()
        assert [(g.group_id, g.state, g.member_count) for g in listing.groups] == [
            ("g1", "empty", 0),
            ("g2", "empty", 0),
            ("g3", "stable", 1),
        ]


async def test_listing_does_not_wait_for_what_goes_elsewhere_before_it_is_read() -> None:
    async with world() as w:
        await w.commit("g1", 1)
        await w.commit(GROUP, 1)
        log = w.log_of(GROUP)
        assert w.log_of("g1") is not log
        log.high_watermark = 0  # As a new leader, who does not know yet.
        w.replicas.lead(next(n for n, p in w.replicas.partitions.items() if p is log), 2)
        await eventually(lambda: log.waiting == 1)
        listing = asyncio.ensure_future(w.coordinator.list_groups())
        await asyncio.sleep(0)  # It begins to wait.
        w.move_away(GROUP)
        assert [entry.group_id for entry in (await listing).groups] == ["g1"]


async def test_too_much_that_waits_to_be_written_is_not_added_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted, "_MAX_PENDING_RECORDS", 2)
    async with world() as w:
        w.replicas.hold_commits = True
        commits = [asyncio.ensure_future(w.commit(GROUP, 1))]
        await eventually(lambda: w.replicas.append_count == 1)
        commits += [asyncio.ensure_future(w.commit(GROUP, offset)) for offset in (2, 3, 4)]
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(CoordinatorNotAvailableError, match="3 records wait"):
            await w.commit(GROUP, 5)
        w.replicas.hold_commits = False
        w.replicas.commit()
        assert not any(answer.HasField("error") for answer in await asyncio.gather(*commits))
        assert await w.committed(GROUP) == {("orders", 0): 4}


async def test_a_bug_in_the_core_costs_a_reload_and_nothing_else(monkeypatch) -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        hosted = w.coordinator._hosted[
            next(n for n, p in w.replicas.partitions.items() if p is w.log_of(GROUP))
        ]

        def fail(_event: object, _now_ms: int) -> None:
            raise RuntimeError("bug")

        monkeypatch.setattr(hosted._shard, "handle", fail)
        with pytest.raises(Exception, match="starts anew"):
            await w.commit(GROUP, 2)
        await w.loaded()
        assert await w.committed(GROUP) == {("orders", 0): 1}


async def test_a_load_that_breaks_is_tried_again_and_said() -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        number = next(n for n, p in w.replicas.partitions.items() if p is w.log_of(GROUP))
        w.replicas.break_reads_with = [RuntimeError("bug"), ValueError("another")]
        with capture_logs() as said:
            w.replicas.lead(number, 2)
            await w.loaded()
        assert await w.committed(GROUP) == {("orders", 0): 1}
        failures = [entry for entry in said if entry["log_level"] == "error"]
        assert [entry["partition"] for entry in failures] == [f"__consumer_offsets-{number}"] * 2
        assert all(entry["exc_info"] for entry in failures)


async def test_a_load_that_breaks_ends_with_the_leadership() -> None:
    async with world() as w:
        await w.commit(GROUP, 1)
        number = next(n for n, p in w.replicas.partitions.items() if p is w.log_of(GROUP))
        w.replicas.break_reads_with = [RuntimeError("bug")] * 1000
        w.replicas.lead(number, 2)
        hosted = w.coordinator._hosted[number]
        await eventually(lambda: len(w.replicas.break_reads_with) < 999)
        w.replicas.partitions[number].leader_epoch = None
        await eventually(lambda: not hosted._tasks)


async def test_a_commit_whose_caller_went_away_is_still_in_order() -> None:
    async with world() as w:
        w.replicas.hold_commits = True
        gone = asyncio.ensure_future(w.coordinator.commit_offsets(commit_request(GROUP, 1)))
        await eventually(lambda: w.log_of(GROUP).end == 1)
        gone.cancel()
        later = asyncio.ensure_future(w.commit(GROUP, 2))
        await asyncio.sleep(0)
        w.replicas.hold_commits = False
        w.replicas.commit()
        assert not (await later).HasField("error")
        assert await w.committed(GROUP) == {("orders", 0): 2}


async def test_a_member_that_does_not_read_loses_its_stream_not_the_coordinator() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        await a.join()
        for _ in range(100):
            await a.send(1)
        assert await a.over()


async def test_stopping_tells_everybody() -> None:
    async with world() as w:
        a = FakeMember(w, GROUP, "a")
        await a.join()
        await a.next()
        w.replicas.hold_commits = True
        commit = asyncio.ensure_future(w.commit("other", 1))
        await eventually(lambda: w.log_of("other").end == 1)
        await w.coordinator.stop()
        assert code(await a.next()) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        with pytest.raises(CoordinatorNotAvailableError):
            await commit
        with pytest.raises(NotCoordinatorError):
            await w.commit(GROUP, 1)
