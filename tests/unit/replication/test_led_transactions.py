"""Transactions at the leaders: batches that wait for a coordinator, marks, and what is open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.broker.core.verification import Question
from penstock.broker.replication.appending import Target
from penstock.broker.replication.led_transactions import OpenPlace
from penstock.v1 import common_pb2, transactions_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    ErrorCode,
    InvalidRequestError,
    InvalidRequiredAcksError,
    InvalidTransactionalIdError,
    InvalidTxnStateError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
)
from penstock.wire.markers import MarkerType
from tests.support import eventually
from tests.unit.replication.brokers import (
    KEY,
    TOPIC,
    TOPIC_ID,
    batch,
    running,
)
from tests.unit.replication.transacting import (
    ALL,
    answer,
    asked,
    mark,
    markers,
    marks_of,
    open_transaction,
    part,
    produce,
)

# ---------------------------------------------------------------------- batches


async def test_the_first_batch_of_a_transaction_waits_for_its_coordinator() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        first = produce(brokers[1], part(b"a"))
        second = produce(brokers[1], part(b"b", sequence=1))
        assert await asked(brokers[1]) == [Question(KEY, "t", 7, 0)]
        # Who has no transaction goes on.
        assert (await brokers[1].append(b"free")).base_offset == 0
        assert not first.done()
        answer(brokers[1])
        assert [(await one).base_offset for one in (first, second)] == [1, 2]
        assert (await produce(brokers[1], part(b"c", sequence=2))).base_offset == 3
        assert not brokers[1].asked
        await eventually(lambda: brokers[2].log().log_end_offset == 4)


async def test_a_refusal_is_told_to_all_that_waited() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        waiting = [produce(brokers[1], part(b"a", sequence=at)) for at in range(3)]
        await asked(brokers[1])
        answer(brokers[1], ProducerFencedError("another producer has the id"))
        for one in waiting:
            with pytest.raises(ProducerFencedError):
                await one
        assert not brokers[1].log().batches


async def test_a_coordinator_is_asked_again_until_the_time_is_over() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        first = produce(brokers[1], part(b"a"), timeout_ms=60_000)
        await asked(brokers[1])
        answer(brokers[1], CoordinatorLoadInProgressError("it loads"))
        await asked(brokers[1])
        answer(brokers[1])
        assert (await first).base_offset == 0
        late = produce(brokers[1], part(b"a", producer_id=8), timeout_ms=50)
        with pytest.raises(RequestTimedOutError, match="nothing was appended"):
            await late
        assert brokers[1].log().log_end_offset == 1


async def test_what_waits_is_refused_when_the_leadership_ends() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        waiting = produce(brokers[1], part(b"a"))
        await asked(brokers[1])
        brokers.change(leader=2)
        with pytest.raises(NotLeaderError) as refused:
            await waiting
        assert refused.value.leader is not None
        assert refused.value.leader.node_id == 2
        brokers.change(leader=1)
        answer(brokers[1])  # That the first leadership was told.
        assert not brokers[1].log().batches
        again = produce(brokers[1], part(b"a"))
        await asked(brokers[1])
        answer(brokers[1])
        assert (await again).base_offset == 0


async def test_what_waits_is_refused_when_the_topic_goes_and_when_the_broker_stops() -> None:
    async with running(1) as brokers:
        brokers.create_topic(partitions=1)
        waiting = produce(brokers[1], part(b"a"))
        await asked(brokers[1])
        brokers.partitions.clear()
        brokers.publish(removed_topics=[TOPIC_ID])
        with pytest.raises(PenstockError, match="does not exist"):
            await waiting
        brokers.create_topic()
        waiting = produce(brokers[1], part(b"a"))
        await asked(brokers[1], 2)
        await brokers[1].stop()
        with pytest.raises(NotLeaderError, match="stops"):
            await waiting


async def test_a_request_that_no_transaction_can_have_is_refused() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        wrong: list[tuple[type[PenstockError], bytes, dict[str, Any]]] = [
            (InvalidRequiredAcksError, part(b"a"), {"acks": common_pb2.ACKS_LEADER}),
            (InvalidRequiredAcksError, part(b"a"), {"acks": common_pb2.ACKS_NONE}),
            (InvalidTransactionalIdError, part(b"a"), {"transactional_id": "x" * 513}),
            (InvalidTransactionalIdError, part(b"a"), {"transactional_id": "__attempt/1/2"}),
            (InvalidRequestError, part(b"a"), {"transactional_id": ""}),
            (InvalidRequestError, batch(b"a"), {}),
            (InvalidRequestError, part(b"a", is_transactional=False), {}),
            (InvalidRequestError, part(b"a", is_control=True), {}),
            (InvalidRequestError, part(b"a", producer_id=-1, epoch=-1, sequence=-1), {}),
            (InvalidRequestError, part(b"a") + batch(b"b"), {}),
            (InvalidRequestError, part(b"a") + part(b"b", producer_id=8), {}),
            (InvalidRequestError, part(b"a") + part(b"b", epoch=1), {}),
        ]
        for kind, records, more in wrong:
            with pytest.raises(kind):
                await produce(broker, records, **more)
        assert not broker.asked
        assert not broker.log().batches
        both = produce(broker, part(b"a") + part(b"b", sequence=1), transactional_id="x" * 512)
        await asked(broker)
        answer(broker)
        assert (await both).last_offset == 1


async def test_nobody_is_asked_where_too_few_are_in_sync() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        brokers.change(isr=[1])
        with pytest.raises(NotEnoughReplicasError):
            await produce(brokers[1], part(b"a"))
        assert not brokers[1].asked
        (outcome,) = await mark(brokers[1], (7, 1, True))
        assert outcome.code == ErrorCode.NOT_ENOUGH_REPLICAS
        assert not brokers[1].log().batches
        brokers.change(isr=[1, 2])


async def test_a_coordinator_of_groups_has_its_partition_verified_as_any_leader() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        manager = brokers[1].manager
        target = Target(TOPIC, TOPIC_ID, 0)

        def verify(producer_id: int = 7) -> asyncio.Task[None]:
            asking = manager.verify_transaction(target, "t", (producer_id, 0), 10_000)
            return asyncio.create_task(asking)

        batch_waits = produce(brokers[1], part(b"a"))
        verified = verify()
        await asked(brokers[1])
        assert len(brokers[1].asked) == 1  # Behind the batch, with the same question.
        answer(brokers[1])
        await verified
        await batch_waits
        await verify()  # Open in the log by now.
        fresh = verify(8)
        await asked(brokers[1])
        answer(brokers[1])
        await fresh
        records = part(b"b", producer_id=8, sequence=-1)
        info = await manager.append(
            TOPIC, TOPIC_ID, 0, records, acks=ALL, timeout_ms=10_000, verified=(8, 0)
        )
        assert info.base_offset == 1
        with pytest.raises(InvalidTxnStateError):
            await manager.append(
                TOPIC,
                TOPIC_ID,
                0,
                part(b"c", producer_id=9, sequence=-1),
                acks=ALL,
                timeout_ms=10_000,
                verified=(10, 0),
            )
        refused = verify(9)
        await asked(brokers[1])
        answer(brokers[1], ProducerFencedError("another has the id"))
        with pytest.raises(ProducerFencedError):
            await refused
        given_up = verify(11)
        await asked(brokers[1])
        given_up.cancel()
        answer(brokers[1])  # Nobody waits for it, and nothing happens.
        moved = verify(12)
        await asked(brokers[1])
        brokers.change(leader=2)
        with pytest.raises(NotLeaderError):
            await moved


# ---------------------------------------------------------------------- marks


async def test_marks_are_answered_when_they_are_committed() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        await open_transaction(brokers[1])
        await open_transaction(brokers[1], producer_id=8)
        fetching = asyncio.create_task(brokers[1].fetch(2))
        brokers[2].logs.hold = True
        marking = asyncio.create_task(mark(brokers[1], (7, 1, True), (8, 1, False)))
        await eventually(lambda: brokers[2].log().log_end_offset == 4)
        assert not marking.done()
        # One that is there already is no more committed for that.
        again = asyncio.create_task(mark(brokers[1], (7, 1, True)))
        brokers[2].logs.release()
        assert [outcome.code for outcome in await marking] == [0, 0]
        assert [outcome.code for outcome in await again] == [0]
        assert marks_of(brokers[1]) == [(7, 1, MarkerType.COMMIT), (8, 1, MarkerType.ABORT)]
        assert brokers[1].log().open_transactions() == []
        assert (await fetching).high_watermark == 4
        # The next batch of the transaction is one of another, and asked for.
        produce(brokers[1], part(b"b", sequence=1)).add_done_callback(lambda task: task.exception())
        await asked(brokers[1])


async def test_a_mark_that_is_not_committed_soon_is_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.replication.led_transactions._COMMIT_TIMEOUT_S", 0.05)
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        await open_transaction(brokers[1])
        brokers[2].logs.hold = True
        (outcome,) = await mark(brokers[1], (7, 1, True))
        assert outcome.code == ErrorCode.REQUEST_TIMED_OUT
        brokers[2].logs.release()
        monkeypatch.undo()
        (outcome,) = await mark(brokers[1], (7, 1, True))
        assert outcome.code == 0
        assert len(marks_of(brokers[1])) == 1


async def test_each_mark_is_refused_for_itself() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=2)
        broker = brokers[1]
        request = markers((7, 1, True), (-1, 1, True), (7, 40_000, True))
        here = request.markers[0].partitions[0]
        for other in (
            common_pb2.TopicPartition(topic=TOPIC, partition=1, topic_id=TOPIC_ID),
            common_pb2.TopicPartition(topic=TOPIC, partition=0, topic_id=b"another-id-16-by"),
            common_pb2.TopicPartition(topic="gone", partition=0, topic_id=TOPIC_ID),
        ):
            request.markers[0].partitions.append(other)
        response = await broker.manager.transactions.write_markers(request)
        outcomes = response.results[0].outcomes
        assert [one.code for one in outcomes] == [
            0,
            ErrorCode.NOT_LEADER,
            ErrorCode.UNKNOWN_TOPIC_ID,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        assert outcomes[1].current_leader.node_id == 2
        for result in response.results[1:]:
            assert [one.code for one in result.outcomes] == [ErrorCode.INVALID_REQUEST]
        assert marks_of(broker) == [(7, 1, MarkerType.COMMIT)]
        request.cluster_id = "elsewhere"
        response = await broker.manager.transactions.write_markers(request)
        assert {one.code for result in response.results for one in result.outcomes} == {
            ErrorCode.INCONSISTENT_CLUSTER_ID
        }
        assert here.partition == 0


async def test_a_mark_that_contradicts_the_log_is_refused_for_itself() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        await mark(brokers[1], (7, 1, False))
        torn, other = await mark(brokers[1], (7, 1, True), (8, 1, True))
        assert (torn.code, other.code) == (ErrorCode.TRANSACTION_TORN, 0)
        assert f"{TOPIC}-0" in torn.message
        assert "has the mark ABORT here, and its coordinator has decided COMMIT" in torn.message
        assert marks_of(brokers[1]) == [(7, 1, MarkerType.ABORT), (8, 1, MarkerType.COMMIT)]
        (again,) = await mark(brokers[1], (7, 1, False))
        assert again.code == 0


async def test_a_transaction_is_torn_only_once_the_mark_that_is_there_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.replication.led_transactions._COMMIT_TIMEOUT_S", 0.05)
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        await open_transaction(brokers[1])
        brokers[2].logs.hold = True
        await mark(brokers[1], (7, 1, False))
        # Who leads next may not have it: then the coordinator's own is to be written.
        (early,) = await mark(brokers[1], (7, 1, True))
        assert early.code == ErrorCode.REQUEST_TIMED_OUT
        brokers[2].logs.release()
        (torn,) = await mark(brokers[1], (7, 1, True))
        assert torn.code == ErrorCode.TRANSACTION_TORN
        brokers.change(isr=[1])
        (unsure,) = await mark(brokers[1], (7, 1, True))
        assert unsure.code == ErrorCode.NOT_ENOUGH_REPLICAS
        brokers.change(isr=[1, 2])


async def test_what_was_begun_behind_a_mark_that_contradicts_is_not_left_open() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1])
        await mark(brokers[1], (7, 1, False))
        start = await open_transaction(brokers[1], epoch=1)
        # Nobody would end it: its coordinator has not heard of it.
        (unknown,) = await mark(brokers[1], (7, 1, True))
        assert unknown.code == ErrorCode.INVALID_TXN_STATE
        assert f"open at offset {start}," in unknown.message
        # The coordinator says that it goes on here.
        request = markers((7, 1, True))
        request.markers[0].kept.append(0)
        response = await brokers[1].manager.transactions.write_markers(request)
        assert response.results[0].outcomes[0].code == ErrorCode.TRANSACTION_TORN
        # A person ends it, and the next mark comes after both.
        end = transactions_pb2.AbortHangingRequest(
            partition=common_pb2.TopicPartition(topic=TOPIC), producer_id=7, start_offset=start
        )
        await brokers[1].manager.transactions.abort_hanging(end)
        (over,) = await mark(brokers[1], (7, 1, True))
        assert over.code == 0
        assert [one[1:] for one in marks_of(brokers[1])] == [
            (1, MarkerType.ABORT),
            (2, MarkerType.ABORT),
        ]


async def test_whoever_listens_hears_of_marks_before_they_are_committed() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        heard: list[Any] = []
        brokers[1].manager.transactions.add_mark_listener(
            lambda *what: heard.append((*what, brokers[1].partition().replica.high_watermark))
        )
        await mark(brokers[1], (7, 1, True))
        await mark(brokers[1], (7, 1, True))  # It is there.
        ((topic, partition, epoch, marks, end_offset, high_watermark),) = heard
        assert (topic, partition, epoch, end_offset, high_watermark) == (TOPIC, 0, 0, 1, 0)
        assert [(one.producer_id, one.producer_epoch, one.commit) for one in marks] == [
            (7, 1, True)
        ]


# ---------------------------------------------------------------------- what people ask


async def test_what_is_open_is_told_and_can_be_ended_by_hand() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        broker = brokers[1]
        await broker.append(b"free")
        start = await open_transaction(broker, epoch=3)
        idle = part(b"i", producer_id=9, sequence=0, is_transactional=False)
        await produce(broker, idle, transactional_id="")
        where = common_pb2.TopicPartition(topic=TOPIC, topic_id=TOPIC_ID)
        ask = transactions_pb2.DescribeProducersRequest(
            partitions=[where, common_pb2.TopicPartition(topic="gone")]
        )
        told, gone = (await broker.manager.transactions.describe_producers(ask)).partitions
        assert gone.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert told.last_stable_offset == start
        assert [
            (one.producer_id, one.producer_epoch, one.last_sequence, one.transaction_start_offset)
            for one in told.producers
        ] == [(7, 3, 0, start), (9, 0, 0, -1)]

        async def abort(producer_id: int, offset: int) -> common_pb2.Error:
            request = transactions_pb2.AbortHangingRequest(
                partition=where, producer_id=producer_id, start_offset=offset
            )
            return (await broker.manager.transactions.abort_hanging(request)).error

        for producer_id, offset in ((7, start + 1), (9, start)):
            error = await abort(producer_id, offset)
            assert error.code == ErrorCode.INVALID_TXN_STATE
        assert not marks_of(broker)
        with capture_logs() as lines:
            assert (await abort(7, start)).code == 0
        assert [line["log_level"] for line in lines if "hanging" in line["event"]] == ["warning"]
        assert marks_of(broker) == [(7, 4, MarkerType.ABORT)]
        told, _ = (await broker.manager.transactions.describe_producers(ask)).partitions
        assert told.last_stable_offset == broker.log().log_end_offset


async def test_what_was_looked_at_is_ended_and_nothing_else() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        led = brokers[1].manager.transactions
        start = await open_transaction(brokers[1], epoch=3)
        request = transactions_pb2.AbortHangingRequest(
            partition=common_pb2.TopicPartition(topic=TOPIC), producer_id=7, start_offset=start
        )
        seen = led.look_at(request)
        assert isinstance(seen, OpenPlace)
        assert seen[2:] == (7, 3, start)
        for other in (seen._replace(producer_epoch=2), seen._replace(start_offset=start + 1)):
            answered = await led.abort_hanging(request, other)
            assert answered.error.code == ErrorCode.INVALID_TXN_STATE
        assert not marks_of(brokers[1])
        assert not (await led.abort_hanging(request, seen)).HasField("error")
        assert marks_of(brokers[1]) == [(7, 4, MarkerType.ABORT)]
        gone = led.look_at(request)
        assert isinstance(gone, InvalidTxnStateError)


async def test_no_transaction_is_ended_that_has_the_last_epoch() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        start = await open_transaction(brokers[1], epoch=2**15 - 1)
        request = transactions_pb2.AbortHangingRequest(
            partition=common_pb2.TopicPartition(topic=TOPIC), producer_id=7, start_offset=start
        )
        answered = await brokers[1].manager.transactions.abort_hanging(request)
        assert answered.error.code == ErrorCode.INVALID_TXN_STATE
        assert "last epoch" in answered.error.message


async def test_idle_producers_are_told_of_up_to_a_thousand() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await open_transaction(brokers[1], producer_id=0)
        for producer_id in range(1, 1_005):
            brokers[1].partition().append_as_leader(
                part(b"i", producer_id=producer_id, is_transactional=False), wall_ms=producer_id
            )
        where = common_pb2.TopicPartition(topic=TOPIC)
        request = transactions_pb2.DescribeProducersRequest(partitions=[where])
        (told,) = (await brokers[1].manager.transactions.describe_producers(request)).partitions
        ids = [one.producer_id for one in told.producers]
        assert len(ids) == 1_001
        assert ids[0] == 0
        assert ids == sorted(ids)
