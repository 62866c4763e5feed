"""The transaction coordinator over replicas in memory and leaders that a test lets write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.broker.coordinator.transaction_coordinator import TransactionCoordinator
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.core.transaction_values import KEPT_PAUSE_MS
from penstock.broker.peers import Peers
from penstock.broker.service.transactions import TransactionsServicer
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import cluster_pb2, common_pb2, coordination_pb2, transactions_pb2
from penstock.v1.coordination_pb2_grpc import (
    CoordinationServicer,
    add_CoordinationServicer_to_server,
)
from penstock.v1.transactions_pb2_grpc import (
    TransactionsStub,
    add_TransactionsServicer_to_server,
)
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ErrorCode,
    NotCoordinatorError,
    NotEnoughReplicasError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from tests.support import eventually
from tests.unit.groups.coordinator_harness import PARTITIONS, FakeReplicas, topic_id_of
from tests.unit.transactions.transaction_harness import A, B, Identity, code, identity_of

ID = "writer"


class FakeLeader(CoordinationServicer):
    """Writes marks, when a test lets it."""

    def __init__(self) -> None:
        self.requests: list[coordination_pb2.WriteMarkersRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse_with: PenstockError | None = None
        self.garbles = False

    async def write(
        self, request: coordination_pb2.WriteMarkersRequest
    ) -> coordination_pb2.WriteMarkersResponse:
        self.requests.append(request)
        await self.gate.wait()
        if self.garbles:
            return coordination_pb2.WriteMarkersResponse()
        error = common_pb2.Error() if self.refuse_with is None else self.refuse_with.to_proto()
        return coordination_pb2.WriteMarkersResponse(
            results=[
                coordination_pb2.TransactionMarkerResult(outcomes=[error] * len(mark.partitions))
                for mark in request.markers
            ]
        )

    async def WriteMarkers(self, request: Any, context: Any) -> Any:
        return await self.write(request)

    @property
    def marks(self) -> list[tuple[int, bool, list[int]]]:
        return [
            (mark.producer_epoch, mark.commit, [one.partition for one in mark.partitions])
            for request in self.requests
            for mark in request.markers
        ]


class World:
    """A coordinator on broker 1, which leads orders-0; broker 2 leads orders-1."""

    def __init__(self, address_of_2: str, **options: Any) -> None:
        self.image = MetadataImage()
        self.replicas = FakeReplicas(TRANSACTIONS_TOPIC)
        self.here, self.there = FakeLeader(), FakeLeader()
        self.next_id = 100
        self.no_ids: PenstockError | None = None
        self.ensured = 0
        self.opened = 0
        self.peers = Peers(self.image, self._open)
        self.coordinator = TransactionCoordinator(
            1,
            self.replicas,
            self.image,
            self.peers,
            ensure_topic=self._ensure,
            take_producer_id=self._take,
            write_markers=self.here.write,
            settings=options.pop("settings", None),
            clock_ms=lambda: time.monotonic_ns() // 1_000_000,
        )
        self._index = 0
        host, port = address_of_2.rsplit(":", 1)
        brokers = [
            cluster_pb2.BrokerRecord(node_id=1, host="n1", port=9),
            cluster_pb2.BrokerRecord(node_id=2, host=host, port=int(port)),
        ]
        self.change(brokers=brokers)
        if options.pop("topic", True):
            self.make_state_topic()
        self.make_topic("orders", [1, 2])
        assert not options

    async def _open(self, _node_id: int, host: str, port: int) -> aio.Channel:
        self.opened += 1
        return aio.insecure_channel(f"{host}:{port}", options=CHANNEL_OPTIONS)

    async def _ensure(self) -> None:
        self.ensured += 1
        if self.image.topic(TRANSACTIONS_TOPIC) is None:
            self.make_state_topic()

    async def _take(self) -> int:
        await asyncio.sleep(0)
        if self.no_ids is not None:
            raise self.no_ids
        self.next_id += 1
        return self.next_id

    def change(self, **parts: Any) -> None:
        self._index += 1
        delta = cluster_pb2.MetadataDelta(index=self._index, cluster_id="c", **parts)
        change = self.image.apply(delta)
        assert change is not None
        self.coordinator.on_metadata(change)

    def make_topic(self, name: str, leaders: list[int], leader_epoch: int = 1) -> None:
        self.change(
            topics=[cluster_pb2.TopicRecord(topic_id=topic_id_of(name), name=name)],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id_of(name),
                    partition=number,
                    leader=leader,
                    leader_epoch=leader_epoch,
                )
                for number, leader in enumerate(leaders)
            ],
        )

    def make_state_topic(self) -> None:
        self.make_topic(TRANSACTIONS_TOPIC, [1] * PARTITIONS)
        for number in range(PARTITIONS):
            self.replicas.lead(number, 1)

    def lead_again(self, name: str, leader_epoch: int, leader: int = 1) -> None:
        """The id's partition has another leader, or the same in another epoch."""
        number = partition_for_group(name, PARTITIONS)
        record = cluster_pb2.PartitionRecord(
            topic_id=topic_id_of(TRANSACTIONS_TOPIC),
            partition=number,
            leader=leader,
            leader_epoch=leader_epoch,
        )
        self.change(partitions=[record])
        if leader == 1:
            self.replicas.lead(number, leader_epoch)
        else:
            self.replicas.resign(number)

    async def loaded(self) -> None:
        await self.coordinator._led.all_loaded()

    # ------------------------------------------------------------------ requests

    async def init(self, instance: bytes = A, name: str = ID, timeout_ms: int = 60_000) -> Any:
        request = transactions_pb2.InitProducerIdRequest(
            transactional_id=name, transaction_timeout_ms=timeout_ms, instance_id=instance
        )
        return await self.coordinator.init_producer_id(request)

    async def add(self, *entries: tuple[str, Identity, list[int]]) -> list[ErrorCode | None]:
        request = coordination_pb2.AddPartitionsRequest(
            entries=[
                coordination_pb2.AddPartitionsEntry(
                    transactional_id=name,
                    producer_id=identity.producer_id,
                    producer_epoch=identity.epoch,
                    partitions=[
                        common_pb2.TopicPartition(
                            topic="orders", partition=number, topic_id=topic_id_of("orders")
                        )
                        for number in numbers
                    ],
                )
                for name, identity, numbers in entries
            ]
        )
        response = await self.coordinator.add_partitions(request)
        return [code(result) for result in response.results]

    async def end(
        self, identity: Identity, *, commit: bool, name: str = ID, keep: Sequence[int] = ()
    ) -> Any:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=name,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            commit=commit,
            keep=[common_pb2.TopicPartition(topic="orders", partition=one) for one in keep],
        )
        return await self.coordinator.end_transaction(request)

    async def state(self, name: str = ID) -> int:
        return int((await self.coordinator.describe_transaction(name)).state)


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    server = aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    made = World(f"127.0.0.1:{port}", **options)
    add_CoordinationServicer_to_server(made.there, server)
    await server.start()
    try:
        await made.loaded()
        yield made
    finally:
        await made.coordinator.stop()
        await made.peers.close()
        await server.stop(None)


async def test_marks_go_to_the_leader_here_and_to_the_one_elsewhere() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        assert await w.add((ID, identity, [0, 1])) == [None]
        after = identity_of(await w.end(identity, commit=True))
        assert after == Identity(identity.producer_id, identity.epoch + 1)
        await eventually(lambda: w.here.marks and w.there.marks)
        assert w.here.marks == [(after.epoch, True, [0])]
        assert w.there.marks == [(after.epoch, True, [1])]
        assert w.there.requests[0].cluster_id == "c"
        assert await w.add((ID, after, [0])) == [None], "it waits for both"


async def test_marks_say_which_of_their_partitions_are_kept() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0, 1]))
        answer = await w.end(identity, commit=True, keep=[1])
        assert answer.kept_ms == KEPT_PAUSE_MS
        await eventually(lambda: w.here.marks and w.there.marks)
        assert [list(mark.kept) for mark in w.here.requests[0].markers] == [[]]
        assert [list(mark.kept) for mark in w.there.requests[0].markers] == [[0]]


async def test_no_mark_leaves_before_the_decision_is_committed() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.replicas.hold_commits = True
        end = asyncio.ensure_future(w.end(identity, commit=True))
        await eventually(lambda: w.replicas.append_count == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not w.here.requests
        assert not end.done()
        w.replicas.hold_commits = False
        w.replicas.commit()
        identity_of(await end)
        await eventually(lambda: len(w.here.requests) == 1)


async def test_a_decision_that_was_not_written_is_taken_back() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.replicas.refuse_with = NotEnoughReplicasError("too few")
        with pytest.raises(CoordinatorNotAvailableError):
            await w.end(identity, commit=False)
        w.replicas.refuse_with = None
        assert not w.here.requests
        identity_of(await w.end(identity, commit=True))
        await eventually(lambda: w.here.marks)
        assert [commit for _, commit, _ in w.here.marks] == [True]


async def test_a_write_of_unknown_outcome_is_found_out_by_loading_anew() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.replicas.fail_with = RequestTimedOutError("who knows")
        with pytest.raises(PenstockError):
            await w.end(identity, commit=True)
        w.replicas.fail_with = None
        w.replicas.commit()
        await eventually(lambda: w.here.marks)
        identity_of(await w.end(identity, commit=True))
        assert code(await w.end(identity, commit=False)) is ErrorCode.INVALID_TXN_STATE


async def test_a_request_of_a_leader_is_one_write_and_each_entry_is_answered() -> None:
    async with world() as w:
        names = [f"n{number}" for number in range(40)]
        given = {name: identity_of(await w.init(name=name)) for name in names}
        before = w.replicas.append_count
        answers = await w.add(
            *((name, identity, [0]) for name, identity in given.items()),
            ("never", Identity(1, 0), [0]),
        )
        assert answers == [None] * 40 + [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
        assert w.replicas.append_count - before <= PARTITIONS, "one batch a partition"


async def test_an_entry_of_another_coordinator_is_refused_alone() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        far = next(
            f"far-{number}"
            for number in range(100)
            if partition_for_group(f"far-{number}", PARTITIONS)
            != partition_for_group(ID, PARTITIONS)
        )
        w.lead_again(far, 2, leader=2)
        answers = await w.add((far, Identity(1, 0), [0]), (ID, identity, [0]))
        assert answers == [ErrorCode.NOT_COORDINATOR, None]


async def test_one_that_is_deposed_by_its_own_metadata_lets_no_partition_in() -> None:
    # What deposed it may be older than the topic: its successor would take that for one that is
    # gone, and send it no mark.
    async with world() as w:
        identity = identity_of(await w.init())
        number = partition_for_group(ID, PARTITIONS)
        record = cluster_pb2.PartitionRecord(
            topic_id=topic_id_of(TRANSACTIONS_TOPIC), partition=number, leader=2, leader_epoch=2
        )
        w.change(partitions=[record])
        assert await w.add((ID, identity, [0])) == [ErrorCode.NOT_COORDINATOR]


async def test_a_later_leadership_sends_the_marks_of_the_one_before() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.here.gate.clear()
        identity_of(await w.end(identity, commit=True))
        await eventually(lambda: len(w.here.requests) == 1)
        w.lead_again(ID, 2)
        await w.loaded()
        w.here.gate.set()
        await eventually(lambda: len(w.here.requests) == 2)
        assert [r.markers[0].coordinator_epoch for r in w.here.requests] == [1, 2]
        await eventually(lambda: w.coordinator._sender.count == 0)
        assert await w.state() == transactions_pb2.TRANSACTION_STATE_EMPTY


async def test_marks_that_a_leader_refuses_are_sent_again_and_follow_the_leader() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [1]))
        w.there.refuse_with = NotEnoughReplicasError("too few")
        await w.end(identity, commit=True)
        await eventually(lambda: len(w.there.requests) >= 3)
        assert not w.here.requests
        w.make_topic("orders", [1, 1], leader_epoch=2)
        await eventually(lambda: w.here.requests)


async def test_a_leader_that_cannot_be_reached_is_tried_again() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [1]))
        record = w.image.brokers[2]
        w.change(brokers=[cluster_pb2.BrokerRecord(node_id=2, host="127.0.0.1", port=1)])
        await w.end(identity, commit=True)
        # Where that broker serves others is looked for again, too: it may have moved.
        await eventually(lambda: w.opened >= 2)
        assert not w.there.requests
        w.change(brokers=[record])
        await eventually(lambda: w.there.requests)


async def test_an_answer_that_is_not_about_the_marks_writes_none() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0, 1]))
        w.here.garbles = w.there.garbles = True
        await w.end(identity, commit=True)
        await eventually(lambda: len(w.here.requests) >= 2 and len(w.there.requests) >= 2)
        assert await w.state() == transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT
        w.here.garbles = w.there.garbles = False
        await eventually(lambda: w.coordinator._sender.count == 0)


async def test_marks_wait_for_a_leader_where_there_is_none() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.make_topic("orders", [-1, 2], leader_epoch=2)
        await w.end(identity, commit=True)
        await eventually(lambda: w.coordinator._sender.count == 1)
        assert not w.here.requests
        w.make_topic("orders", [1, 2], leader_epoch=3)
        await eventually(lambda: w.here.requests)


async def test_who_coordinates_no_more_sends_no_more() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.here.refuse_with = NotEnoughReplicasError("too few")
        await w.end(identity, commit=True)
        await eventually(lambda: w.here.requests)
        w.lead_again(ID, 2, leader=2)
        assert w.coordinator._sender.count == 0


async def test_a_deleted_topic_lets_its_transactions_end() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.here.refuse_with = NotEnoughReplicasError("too few")
        await w.end(identity, commit=True)
        await eventually(lambda: w.here.requests)
        w.change(removed_topics=[topic_id_of("orders")])
        assert await w.state() == transactions_pb2.TRANSACTION_STATE_EMPTY
        await eventually(lambda: w.coordinator._sender.count == 0)


async def test_a_timeout_is_acted_on_without_anybody_asking() -> None:
    async with world() as w:
        identity = identity_of(await w.init(timeout_ms=1_000))
        await w.add((ID, identity, [0]))
        await eventually(lambda: w.here.marks)
        assert w.here.marks == [(identity.epoch + 1, False, [0])]


async def test_without_producer_ids_who_asks_is_told() -> None:
    async with world() as w:
        w.no_ids = CoordinatorNotAvailableError("no controller")
        assert code(await w.init()) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        w.no_ids = None
        identity_of(await w.init())


async def test_the_topic_is_made_when_it_is_missing() -> None:
    async with world(topic=False) as w:
        assert await w.add((ID, Identity(1, 0), [0])) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
        assert not w.ensured, "leaders only ask about what was begun"
        with pytest.raises(CoordinatorLoadInProgressError):
            await w.init()
        await w.loaded()
        identity_of(await w.init())
        assert w.ensured == 1


async def test_who_asks_elsewhere_is_told_where_to() -> None:
    async with world() as w:
        w.lead_again(ID, 2, leader=2)
        with pytest.raises(NotCoordinatorError) as caught:
            await w.init()
        assert caught.value.leader is not None
        assert caught.value.leader.node_id == 2


async def test_stopping_tells_those_who_wait() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.here.gate.clear()
        taking_over = asyncio.ensure_future(w.init(B))
        await eventually(lambda: w.here.requests)
        await w.coordinator.stop()
        with pytest.raises(CoordinatorNotAvailableError):
            await taking_over


async def test_a_leader_that_went_away_leaves_nothing_behind() -> None:
    async with world() as w:
        identity = identity_of(await w.init())
        w.replicas.hold_commits = True
        gone = asyncio.ensure_future(w.add((ID, identity, [0])))
        await eventually(lambda: w.replicas.append_count == 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        w.replicas.hold_commits = False
        w.replicas.commit()
        hosted = w.coordinator._led[partition_for_group(ID, PARTITIONS)]
        await eventually(lambda: not hosted._requests)


# ---------------------------------------------------------------------- the service


@asynccontextmanager
async def served(w: World) -> AsyncIterator[Any]:
    server = aio.server(options=SERVER_OPTIONS)
    servicer = TransactionsServicer(w._take, w.coordinator, NOT_ASKED, NOT_ASKED)
    add_TransactionsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield TransactionsStub(channel)
    await server.stop(None)


NOT_ASKED: Any = None


async def test_every_refusal_is_a_typed_error_in_its_answer() -> None:
    async with world() as w, served(w) as stub:
        v1 = transactions_pb2
        bad = "x" * 600
        for method, request in (
            ("InitProducerId", v1.InitProducerIdRequest(transactional_id=bad)),
            ("EndTransaction", v1.EndTransactionRequest(transactional_id=bad)),
            ("AbortTransaction", v1.AbortTransactionRequest(transactional_id=bad)),
            ("BeginAttempt", v1.BeginAttemptRequest(group=bad)),
            ("CommitGroup", v1.CommitGroupRequest(group=bad)),
            ("LastCommitted", v1.LastCommittedRequest(group=bad)),
        ):
            answer = await getattr(stub, method)(request, timeout=5)
            assert code(answer) is ErrorCode.INVALID_TRANSACTIONAL_ID, method
        described = await stub.DescribeTransactions(
            v1.DescribeTransactionsRequest(transactional_ids=[bad, "unknown"])
        )
        codes = [one.error.code for one in described.transactions]
        assert codes == [
            ErrorCode.INVALID_TRANSACTIONAL_ID,
            ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
        ]


async def test_a_request_that_waits_is_answered_before_its_sender_gives_up() -> None:
    async with world() as w, served(w) as stub:
        identity = identity_of(await w.init())
        await w.add((ID, identity, [0]))
        w.here.gate.clear()
        request = transactions_pb2.InitProducerIdRequest(
            transactional_id=ID, transaction_timeout_ms=60_000, instance_id=B
        )
        answer = await stub.InitProducerId(request, timeout=1.0)
        assert code(answer) is ErrorCode.CONCURRENT_TRANSACTIONS


async def test_producers_without_an_id_are_served_from_the_same_ids() -> None:
    async with world() as w, served(w) as stub:
        given = identity_of(await w.init())
        answer = await stub.InitProducerId(transactions_pb2.InitProducerIdRequest())
        assert answer.producer_id == given.producer_id + 1


async def test_what_is_listed_is_whole_or_an_error() -> None:
    async with world() as w, served(w) as stub:
        for name in ("c", "a", "b"):
            await w.init(name=name)
        listed = await stub.ListTransactions(transactions_pb2.ListTransactionsRequest())
        assert {one.transactional_id for one in listed.transactions} == {"a", "b", "c"}
        assert not listed.next_page_token
        w.replicas.break_reads_with = [RuntimeError("bug")] * 10_000
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.broker.coordinator.led_partitions._LOAD_TIMEOUT_S", 0.05)
            w.lead_again("a", 2)
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.ListTransactions(transactions_pb2.ListTransactionsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_too_many_ids_at_once_are_refused() -> None:
    async with world(settings=TransactionSettings()) as w, served(w) as stub:
        request = transactions_pb2.DescribeTransactionsRequest(transactional_ids=["x"] * 1_001)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.DescribeTransactions(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
