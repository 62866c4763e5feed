"""More transactions that may hang than one request is about, and leaders that take their time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.client import AsyncAdminClient, TopicPartition, aio_transaction_admin
from penstock.client.descriptions import HangingSearch
from penstock.v1 import transactions_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    InvalidTxnStateError,
    NotLeaderError,
    PenstockError,
)
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode

COUNT = 630
PARTITIONS = [TopicPartition("t", number) for number in range(COUNT)]
YOUNG = CoordinatorNotAvailableError("seen for 0 s")


class Leaders:
    """A transaction is open in each partition, of a producer with its number."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.described: list[int] = []
        self.checked: list[list[int]] = []
        self.verdicts: dict[int, PenstockError] = {}
        self.sure_in_ms: list[int] = []  # Of answers; of all after these 0.
        self.under_way = self.most_under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        cluster.on_leader_asked = self.answer

    async def answer(self, node: FakeNode, request: Any) -> Any:
        if isinstance(request, transactions_pb2.DescribeProducersRequest):
            return self.describe(node, request)
        self.checked.append([one.producer_id for one in request.transactions])
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await self.gate.wait()
        self.under_way -= 1
        return self.check(node, request)

    def describe(self, node: FakeNode, request: Any) -> Any:
        self.described.append(len(request.partitions))
        response = transactions_pb2.DescribeProducersResponse()
        for where in request.partitions:
            entry = response.partitions.add(partition=where)
            try:
                self.cluster.find(where, node)
            except PenstockError as error:
                entry.error.CopyFrom(error.to_proto())
                continue
            entry.producers.add(producer_id=where.partition, transaction_start_offset=7)
        return response

    def check(self, node: FakeNode, request: Any) -> Any:
        response = transactions_pb2.CheckHangingResponse()
        if self.sure_in_ms:
            response.sure_in_ms = self.sure_in_ms.pop(0)
        for one in request.transactions:
            assert one.start_offset == 7
            result = response.results.add()
            try:
                self.cluster.find(one.partition, node)
                verdict = YOUNG if response.sure_in_ms else self.verdicts.get(one.producer_id)
                if verdict is not None:
                    raise verdict
            except PenstockError as error:
                result.CopyFrom(error.to_proto())
        return response


@pytest.fixture
def leaders(cluster: FakeCluster) -> Leaders:
    cluster.add_topic("t", COUNT, leader=1)
    for number in range(0, COUNT, 9):
        cluster.move("t", number, 2)
    return Leaders(cluster)


async def search(cluster: FakeCluster) -> HangingSearch:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        return await admin.find_hanging(PARTITIONS, older_than_ms=0)


async def test_all_are_described_and_judged(cluster: FakeCluster, leaders: Leaders) -> None:
    leaders.verdicts = {
        number: InvalidTxnStateError("a coordinator has it") for number in range(0, COUNT, 7)
    }
    found = await search(cluster)
    assert [one.partition for one in found.hanging] == [
        where for where in PARTITIONS if where.partition % 7
    ]
    assert all(one.producer_id == one.partition.partition for one in found.hanging)
    assert not found.in_doubt
    sizes = [60, 70, 100, 100, 100, 100, 100]
    assert sorted(leaders.described) == sorted(map(len, leaders.checked)) == sizes
    assert sorted(number for part in leaders.checked for number in part) == list(range(COUNT))


async def test_a_leader_is_asked_about_some_at_a_time_and_at_once(
    cluster: FakeCluster, leaders: Leaders
) -> None:
    leaders.gate.clear()
    searching = asyncio.create_task(search(cluster))
    await eventually(lambda: leaders.under_way == 5)  # Four of the first, one of the second.
    leaders.gate.set()
    assert len((await searching).hanging) == COUNT
    assert leaders.most_under_way == 5


async def test_what_fails_is_asked_about_again_and_nothing_else(
    cluster: FakeCluster, leaders: Leaders
) -> None:
    moved = PARTITIONS[10]

    async def answer(node: FakeNode, request: Any) -> Any:
        if isinstance(request, transactions_pb2.CheckHangingRequest) and not leaders.checked:
            cluster.move("t", moved.partition, 2)  # Since the client has looked who leads.
        asked_of_many = len(leaders.checked)
        response = await leaders.answer(node, request)
        if asked_of_many == 1 and isinstance(response, transactions_pb2.CheckHangingResponse):
            del response.results[0]  # Half an answer is none.
            leaders.checked[1] *= 2
        return response

    cluster.on_leader_asked = answer
    found = await search(cluster)
    assert len(found.hanging) == COUNT
    assert found.in_doubt == ()
    times = [number for part in leaders.checked for number in part]
    again = set(leaders.checked[1]) | {moved.partition}
    assert {number for number in times if times.count(number) > 1} == again


async def test_leaders_get_the_time_that_they_need_and_are_not_asked_meanwhile(
    cluster: FakeCluster, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 5_000)
    monkeypatch.setattr(aio_transaction_admin, "_ASKED_EVERY_MS", 1)
    # They are not sure yet when the first limit is over.
    leaders.sure_in_ms = [5_200] * 7 + [100] * 7
    found = await search(cluster)
    assert len(found.hanging) == COUNT
    assert len(leaders.checked) == 21


async def test_what_nobody_answers_for_in_time_is_in_doubt(
    cluster: FakeCluster, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 5_000)
    leaders.verdicts = {3: NotLeaderError("it moves, and moves")}
    found = await search(cluster)
    assert len(found.hanging) == COUNT - 1
    [(one, why)] = found.in_doubt
    assert one.partition == PARTITIONS[3]
    assert "it moves" in why


async def test_a_refusal_is_told_of_a_leader_that_answers_no_more(
    cluster: FakeCluster, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 5_000)
    leaders.verdicts = {3: NotLeaderError("it moves, and moves")}

    async def answer(node: FakeNode, request: Any) -> Any:
        asked = [one.producer_id for one in getattr(request, "transactions", ())]
        if 3 in asked and any(3 in numbers for numbers in leaders.checked):
            await asyncio.Event().wait()
        return await leaders.answer(node, request)

    cluster.on_leader_asked = answer
    found = await search(cluster)
    reasons = {one.partition: why for one, why in found.in_doubt}
    assert "it moves" in reasons[PARTITIONS[3]]


async def test_what_has_no_leader_is_told_beside_what_hangs(
    cluster: FakeCluster, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 5_000)
    for number in (5, 200):
        cluster.topics["t"].partitions[number].leader = -1
    missing = TopicPartition("t", COUNT)
    gone = TopicPartition("gone", 0)
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        found = await admin.find_hanging([*PARTITIONS, missing, gone], older_than_ms=0)
    assert len(found.hanging) == COUNT - 2
    assert not found.in_doubt
    reasons = dict(found.not_searched)
    assert list(reasons) == [gone, PARTITIONS[5], PARTITIONS[200], missing]
    assert "partition t-5 has no leader" in reasons[PARTITIONS[5]]
    assert "has no partition 630" in reasons[missing]


async def test_a_broker_that_does_not_answer_takes_its_own_partitions_alone(
    cluster: FakeCluster, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 5_000)

    async def answer(node: FakeNode, request: Any) -> Any:
        if node.number == 2:
            await asyncio.Event().wait()
        return await leaders.answer(node, request)

    cluster.on_leader_asked = answer
    found = await search(cluster)
    its = [PARTITIONS[number] for number in range(0, COUNT, 9)]
    assert [where for where, _ in found.not_searched] == its
    assert len(found.hanging) == COUNT - len(its)
