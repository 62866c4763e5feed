"""Whether what is open in a log hangs: coordinators that know of it, are away, or were replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.coordinator.hanging import HangingJudge, Judgement
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.transaction_describe import holders
from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.replication.led_transactions import OpenPlace
from penstock.broker.service.transactions import TransactionsServicer
from penstock.v1 import common_pb2, coordination_pb2, transactions_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    ErrorCode,
    InvalidTxnStateError,
    NetworkError,
    NotCoordinatorError,
    PenstockError,
)
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from tests.unit.groups.coordinator_harness import PARTITIONS, topic_id_of
from tests.unit.transactions.test_transaction_coordinator import ID as WRITER
from tests.unit.transactions.test_transaction_coordinator import world
from tests.unit.transactions.transaction_harness import ID, Driver, identity_of, participant

TOPIC = TopicId(b"orders-id-16-byt")
SESSION_MS = 6_000
PLACE = OpenPlace(TopicPartition("orders", 2), TopicIdPartition(TOPIC, 2), 7, 3, 40)
OTHER = PLACE._replace(producer_id=8)


class World:
    """Broker 1, which coordinates for partition 0 of three; broker 2 can't be reached."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.leaders = {0: 1, 1: 1, 2: 1}
        self.known: dict[int, list[tuple[int, str]]] = {}  # Place and id, by partition.
        self.errors: dict[int, PenstockError] = {}
        self.judge = HangingJudge(
            1,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.find,
            session_timeout_ms=SESSION_MS,
            clock_ms=lambda: self.now_ms,
        )

    cluster_id = "c"

    def topic(self, _name: str) -> Any:
        partitions = {
            number: SimpleNamespace(leader=leader) for number, leader in self.leaders.items()
        }
        return SimpleNamespace(partitions=partitions) if partitions else None

    async def ask(self, node_id: int, _method: str, _request: Any, _timeout_s: float) -> Any:
        raise NetworkError(f"broker {node_id} can't be reached")

    async def find(
        self, request: coordination_pb2.FindTransactionsRequest
    ) -> coordination_pb2.FindTransactionsResponse:
        response = coordination_pb2.FindTransactionsResponse()
        for number in request.coordinators:
            result = response.results.add()
            if number in self.errors:
                result.error.CopyFrom(self.errors[number].to_proto())
            for place, name in self.known.get(number, []):
                result.transactions.add(place=place, transactional_id=name)
        return response

    async def settle(self) -> None:
        """Long enough after the places were first looked at."""
        await self.judge.judge([PLACE, OTHER])
        self.now_ms += 3 * SESSION_MS


async def test_what_nobody_knows_hangs_when_it_was_looked_at_for_long_enough() -> None:
    w = World()
    begun_ms = w.now_ms
    for wait_ms in (0, SESSION_MS, 2 * SESSION_MS - 1):
        w.now_ms += wait_ms
        [verdict], sure_in_ms = await w.judge.judge([PLACE])
        assert isinstance(verdict, CoordinatorNotAvailableError)
        assert sure_in_ms == 3 * SESSION_MS - (w.now_ms - begun_ms)
        assert "ask again after 18 s" in verdict.message
    w.now_ms += 1
    assert await w.judge.judge([PLACE]) == ([None], 0)
    [other], _ = await w.judge.judge([PLACE._replace(start_offset=41)])
    assert isinstance(other, CoordinatorNotAvailableError), "another one, which is new here"


async def test_what_is_asked_about_again_is_remembered_among_any_number_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.coordinator.hanging._MAX_REMEMBERED", 10)
    w = World()
    for number in range(30):  # They come and go, as where somebody asks about all that is open.
        passing = [PLACE._replace(producer_id=100 + 8 * number + one) for one in range(8)]
        verdicts, _ = await w.judge.judge([PLACE, *passing])
        w.now_ms += SESSION_MS // 5
    assert verdicts[0] is None
    assert None not in verdicts[1:]
    assert len(w.judge._seen_ms) == 10
    # More at once than are remembered are all looked at, if it takes longer to be sure of them.
    many = [PLACE._replace(producer_id=1_000 + one) for one in range(25)]
    assert None not in (await w.judge.judge(many)).verdicts
    assert len(w.judge._seen_ms) == 10
    w.now_ms += 3 * SESSION_MS
    assert (await w.judge.judge(many)).verdicts.count(None) == 10


async def test_what_a_coordinator_knows_does_not_hang() -> None:
    w = World()
    await w.settle()
    w.known[2] = [(1, "billing")]
    (free, known), _ = await w.judge.judge([PLACE, OTHER])
    assert free is None
    assert isinstance(known, InvalidTxnStateError)
    assert "'billing' has this transaction of producer 8" in known.message


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda w: w.leaders.update({1: -1}), "__transaction_state-1 did not answer (it has no le"),
        (lambda w: w.leaders.update({1: 2}), "broker 2: NOT"),
        (lambda w: w.errors.update({1: NotCoordinatorError("not here")}), "(not here)"),
    ],
)
async def test_a_coordinator_that_does_not_answer_leaves_a_doubt(
    break_it: Callable[[World], object], why: str
) -> None:
    w = World()
    await w.settle()
    break_it(w)
    w.known[2] = [(1, "billing")]
    (doubtful, known), sure_in_ms = await w.judge.judge([PLACE, OTHER])
    assert not sure_in_ms, "time alone does not help"
    assert isinstance(doubtful, CoordinatorNotAvailableError)
    assert "__transaction_state-1 did not answer" in doubtful.message
    assert why.removeprefix("broker 2: NOT") in doubtful.message
    assert isinstance(known, InvalidTxnStateError), "what one knows is known"


async def test_an_answer_about_a_place_that_nobody_asked_for_leaves_a_doubt() -> None:
    w = World()
    await w.settle()
    w.known[1] = [(7, "billing")]
    (one, other), _ = await w.judge.judge([PLACE, OTHER])
    for doubtful in (one, other):
        assert isinstance(doubtful, CoordinatorNotAvailableError)
        assert "answered something else" in doubtful.message


# ---------------------------------------------------------------------- what a coordinator says


def found(d: Driver, producer_id: int, name: str) -> list[str]:
    one = participant(name)
    where = TopicIdPartition(one.topic_id, one.partition)
    ledger = d.shard.ledger
    return [who for *_, who in holders(ledger, list(ledger.ids), {producer_id: {where}})]


def test_a_partition_is_known_until_its_mark_is_there() -> None:
    d = Driver()
    identity = d.open("orders-0", "sales-0")
    pid = identity.producer_id
    assert found(d, pid, "orders-0") == found(d, pid, "sales-0") == [ID]
    assert not found(d, pid, "other-0")
    assert not found(d, pid + 1, "orders-0")
    d.end(identity, commit=True)
    assert found(d, pid, "orders-0") == found(d, pid, "sales-0") == [ID]
    d.mark_there(d.marks[0], "orders-0")
    assert not found(d, pid, "orders-0")
    assert found(d, pid, "sales-0") == [ID]
    d.mark_there(d.marks[0], "sales-0")
    assert not found(d, pid, "sales-0")


def test_a_partition_that_is_kept_is_known_though_its_mark_is_there() -> None:
    d = Driver()
    identity = d.open("orders-0", "sales-0")
    d.end(identity, commit=True, keep=("orders-0",))
    d.mark_there(d.marks[0], "orders-0")
    assert found(d, identity.producer_id, "orders-0") == [ID], "it may be open again"
    d.mark_there(d.marks[0], "sales-0")
    assert found(d, identity.producer_id, "orders-0") == [ID]
    assert not found(d, identity.producer_id, "sales-0")


def test_marks_at_the_end_of_epochs_are_known_by_the_producer_id_that_logs_know() -> None:
    d = Driver(TransactionSettings(last_epoch=1))
    identity = d.open("orders-0")
    d.end(identity, commit=True)
    assert found(d, identity.producer_id, "orders-0") == [ID]
    d.list()
    [listed] = d.answer(d.last_request).transactions
    assert listed.producer_id == identity.producer_id
    d.write_marks()
    d.list()
    [listed] = d.answer().transactions
    assert listed.producer_id != identity.producer_id


async def test_a_leader_finds_out_who_has_what_is_open() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((WRITER, identity, [0, 1]))

        async def found(producer_id: int, *partitions: int) -> list[tuple[str | None, list[int]]]:
            """Of each coordinator: its refusal, and the places that it knows of."""
            places = [
                coordination_pb2.OpenTransactionPlace(
                    producer_id=producer_id,
                    partition=common_pb2.TopicPartition(
                        topic="orders", partition=number, topic_id=topic_id_of("orders")
                    ),
                )
                for number in partitions
            ]
            request = coordination_pb2.FindTransactionsRequest(
                coordinators=range(PARTITIONS), places=places
            )
            response = await w.coordinator.find_transactions(request)
            return [
                (
                    ErrorCode(one.error.code).name if one.HasField("error") else None,
                    [entry.place for entry in one.transactions],
                )
                for one in response.results
            ]

        here = partition_for_group(WRITER, PARTITIONS)
        for asked, known in (((0, 1, 2), [0, 1]), ((2,), []), ((1, 1), [0, 1])):
            answers = await found(identity.producer_id, *asked)
            assert {refusal for refusal, _ in answers} == {None}
            assert sorted(answers.pop(here)[1]) == known
            assert not any(places for _, places in answers)
        assert (await found(identity.producer_id + 1, 0))[here] == (None, [])
        w.lead_again(WRITER, leader_epoch=9)
        assert (await found(identity.producer_id, 0))[here][0] == "COORDINATOR_LOAD_IN_PROGRESS"
        w.lead_again(WRITER, leader_epoch=10, leader=2)
        assert (await found(identity.producer_id, 0))[here][0] == "NOT_COORDINATOR"


# ---------------------------------------------------------------------- the service


class Led:
    """What the leader sees when it looks, and what it ended."""

    def __init__(self, *looks: OpenPlace | PenstockError) -> None:
        self.looks = list(looks)
        self.ended: list[OpenPlace | None] = []

    def look_at(self, _request: Any) -> OpenPlace | PenstockError:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    async def abort_hanging(
        self, _request: Any, checked: OpenPlace | None = None
    ) -> transactions_pb2.AbortHangingResponse:
        self.ended.append(checked)
        return transactions_pb2.AbortHangingResponse()


def servicer(led: Led, verdict: PenstockError | None) -> TransactionsServicer:
    async def judge(places: Any) -> Judgement:
        return Judgement([verdict] * len(places), 700)

    nobody: Any = None
    return TransactionsServicer(nobody, nobody, led, judge)  # type: ignore[arg-type]


REQUEST = transactions_pb2.AbortHangingRequest(producer_id=7, start_offset=40)
FORCED = transactions_pb2.AbortHangingRequest(producer_id=7, start_offset=40, force=True)


async def test_only_what_hangs_is_ended_unless_that_is_forced() -> None:
    led = Led(PLACE)
    known = servicer(led, InvalidTxnStateError("known"))
    answer = await known.AbortHanging(REQUEST, None)
    assert answer.error.code == ErrorCode.INVALID_TXN_STATE
    assert not led.ended
    await known.AbortHanging(FORCED, None)
    assert led.ended == [None]
    assert not (await servicer(led, None).AbortHanging(REQUEST, None)).HasField("error")
    assert led.ended == [None, PLACE]


async def test_what_ended_while_coordinators_were_asked_does_not_hang() -> None:
    gone = InvalidTxnStateError("it is not open")
    request = transactions_pb2.CheckHangingRequest(transactions=[REQUEST])
    for led, code, sure_in_ms in (
        (Led(PLACE), 0, 700),
        (Led(PLACE, gone), gone.code, 700),
        (Led(gone), gone.code, 0),
    ):
        response = await servicer(led, None).CheckHanging(request, None)
        assert [result.code for result in response.results] == [code]
        assert response.sure_in_ms == sure_in_ms
    led = Led(PLACE, gone)
    assert (await servicer(led, None).AbortHanging(REQUEST, None)).error.code == gone.code
    assert not led.ended


async def test_only_what_was_judged_is_ended() -> None:
    """Another one may be open there since, which a coordinator knows of."""
    led = Led(PLACE, PLACE._replace(producer_epoch=PLACE.producer_epoch + 1))
    await servicer(led, None).AbortHanging(REQUEST, None)
    assert led.ended == [PLACE], "so that the leader sees that it is another one"
