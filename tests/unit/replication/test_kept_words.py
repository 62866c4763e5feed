"""Marks that say that their partition is in the next transaction, and batches that wait for one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.broker.core.verification import Question
from penstock.broker.replication.appending import Target
from penstock.v1 import common_pb2
from penstock.wire.errors import (
    RequestTimedOutError,
)
from tests.support import eventually
from tests.unit.replication.brokers import (
    KEY,
    TOPIC,
    TOPIC_ID,
    running,
)
from tests.unit.replication.transacting import (
    answer,
    asked,
    mark,
    markers,
    marks_of,
    open_transaction,
    part,
    produce,
)


async def test_a_mark_can_let_the_next_transaction_in_without_a_question() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        await open_transaction(broker)
        (outcome,) = await mark(broker, (7, 1, True), kept=True)
        assert outcome.code == 0
        assert (await produce(broker, part(b"b", epoch=1))).base_offset == 2
        await broker.manager.verify_transaction(Target(TOPIC, TOPIC_ID, 0), "t", (7, 1), 1_000)
        # What comes late, and is there already, is about what is over.
        await mark(broker, (7, 1, True))
        await mark(broker, (7, 2, True), kept=True)
        await mark(broker, (7, 1, True), kept=True)
        assert (await produce(broker, part(b"c", epoch=2))).base_offset == 4
        await mark(broker, (7, 3, True))
        assert not broker.asked
        produce(broker, part(b"d", epoch=3)).add_done_callback(lambda task: task.exception())
        assert await asked(broker) == [Question(KEY, "t", 7, 3)]


async def test_a_mark_that_is_there_already_gives_its_word_to_a_leader_that_has_none() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        await mark(brokers[1], (7, 1, True), kept=True)
        await eventually(lambda: brokers[2].log().log_end_offset == 2)
        brokers.change(leader=2)
        waiting = produce(brokers[2], part(b"b", epoch=1))
        await asked(brokers[2])
        (outcome,) = await mark(brokers[2], (7, 1, True), kept=True)
        assert outcome.code == 0
        assert (await waiting).base_offset == 2
        assert len(marks_of(brokers[2])) == 1
        # The word that was given to the first leader was for its leadership.
        brokers.change(leader=1)
        await mark(brokers[1], (7, 2, True))
        produce(brokers[1], part(b"c", epoch=2)).add_done_callback(lambda task: task.exception())
        await asked(brokers[1])


async def test_a_word_ends_with_the_leader_epoch() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        await mark(brokers[1], (7, 1, True), kept=True)
        brokers.change(leader=2)
        brokers.change(leader=1)
        produce(brokers[1], part(b"b", epoch=1)).add_done_callback(lambda task: task.exception())
        await asked(brokers[1])


async def test_a_batch_that_overtakes_the_mark_is_appended_and_pushed_with_it() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        broker, follower = brokers[1], brokers[2]
        await open_transaction(broker)
        await eventually(lambda: follower.log().log_end_offset == 1)
        ends: list[int] = []
        append = follower.log().append_as_follower

        def noted(records: Any) -> Any:
            info = append(records)
            ends.append(follower.log().log_end_offset)
            return info

        follower.log().append_as_follower = noted  # type: ignore[method-assign]
        waiting = [
            produce(broker, part(value, epoch=1, sequence=at))
            for at, value in enumerate((b"b", b"c"))
        ]
        assert not broker.asked
        (outcome,) = await mark(broker, (7, 1, True), kept=True)
        assert outcome.code == 0
        assert [(await one).base_offset for one in waiting] == [2, 3]
        assert not broker.asked
        assert ends == [4]


async def test_a_mark_goes_to_followers_with_what_is_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RECORDS_LINGER_S", "MARKS_LINGER_S"):
        monkeypatch.setattr(f"penstock.broker.replication.leader.{name}", 3_600)
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        leader, follower = brokers[1], brokers[2].log()
        await open_transaction(leader)
        ends: list[int] = []
        append = follower.append_as_follower

        def noted(records: Any) -> Any:
            info = append(records)
            ends.append(follower.log_end_offset)
            return info

        follower.append_as_follower = noted  # type: ignore[method-assign]
        marking = asyncio.create_task(mark(leader, (7, 1, True), kept=True))
        await eventually(lambda: leader.log().log_end_offset == 2)
        await produce(leader, part(b"b", epoch=1))
        assert ends == [3]
        await marking
        # Of one that the producer does not go on after, somebody may wait.
        await mark(leader, (7, 2, True))
        assert ends == [3, 4]


async def test_a_mark_that_nothing_follows_goes_to_followers_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.replication.leader.MARKS_LINGER_S", 3_600)
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        await open_transaction(brokers[1])
        (outcome,) = await mark(brokers[1], (7, 1, True), kept=True)
        assert outcome.code == 0
        assert brokers[2].log().log_end_offset == 2


async def test_listeners_hear_where_the_mark_ends_and_not_what_it_let_in() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        waiting = produce(brokers[1], part(b"b", epoch=1))
        heard: list[Any] = []
        brokers[1].manager.add_mark_listener(lambda *what: heard.append(what[-1]))
        await mark(brokers[1], (7, 1, True), kept=True)
        assert heard == [2]
        await waiting


async def test_what_a_mark_before_is_missing_for_is_asked_for_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.core.verification.MARK_PATIENCE_MS", 50)
    async with running(1) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        waiting = produce(brokers[1], part(b"b", epoch=1))
        assert await asked(brokers[1]) == [Question(KEY, "t", 7, 1)]
        answer(brokers[1])  # Allowed; the log takes it behind the mark all the same.
        await mark(brokers[1], (7, 1, True))
        assert (await waiting).base_offset == 2
        late = produce(brokers[1], part(b"c", epoch=2), timeout_ms=2_000)
        await asked(brokers[1])
        answer(brokers[1])
        with pytest.raises(RequestTimedOutError, match="transactions hanging"):
            await late


async def test_the_kept_are_told_by_their_place_in_the_list() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=2)
        brokers.change(partition=1, leader=1)
        request = markers((7, 1, True))
        (entry,) = request.markers
        second = common_pb2.TopicPartition(topic=TOPIC, partition=1, topic_id=TOPIC_ID)
        entry.partitions.append(second)
        entry.kept[:] = [1, 9]
        response = await brokers[1].manager.transactions.write_markers(request)
        assert [one.code for one in response.results[0].outcomes] == [0, 0]
        await produce(brokers[1], part(b"a", epoch=1), partition=1)
        assert not brokers[1].asked
        produce(brokers[1], part(b"a", epoch=1)).add_done_callback(lambda task: task.exception())
        await asked(brokers[1])
