"""The broker's services over fakes of what they stand on."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from penstock.broker.coordinator.producer_ids import ProducerIds
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import AppendInfo
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.appending import OnAppended, Target
from penstock.broker.replication.led_transactions import LedTransactions
from penstock.broker.service.admin import AdminServicer
from penstock.broker.service.controller_facts import ControllerFacts
from penstock.broker.service.health import HealthServicer
from penstock.broker.service.log import LogServicer
from penstock.broker.service.producing import MAX_PENDING_REQUESTS, Producing
from penstock.broker.service.reassignments import ReplicaEnds
from penstock.broker.service.transactions import TransactionsServicer
from penstock.broker.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, InternalTopic
from penstock.v1 import (
    admin_pb2,
    cluster_pb2,
    common_pb2,
    controller_pb2,
    log_pb2,
    node_pb2,
    transactions_pb2,
)
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    ErrorCode,
    InvalidRequestError,
    NotEnoughReplicasError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicId
from penstock.wire.laden import PRODUCE_REQUEST, Laden
from tests.support import eventually


def image_with(*names: str, brokers: int = 3) -> MetadataImage:
    image = MetadataImage()
    topics = {name: TopicId(name.encode().ljust(16, b"_")[:16]) for name in names}
    image.apply(
        cluster_pb2.MetadataDelta(
            index=1,
            snapshot=True,
            controller_id=1,
            brokers=[
                cluster_pb2.BrokerRecord(node_id=node, host="h", port=node)
                for node in range(1, brokers + 1)
            ],
            topics=[cluster_pb2.TopicRecord(name=n, topic_id=i) for n, i in topics.items()],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id, partition=0, replicas=[1, 2, 3], isr=[1, 2, 3], leader=1
                )
                for topic_id in topics.values()
            ],
        )
    )
    return image


# -------------------------------------------------------------------------------- Log


class FakeLogs:
    """Appends at once, and acknowledges when the test lets it."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.gate = asyncio.Event()
        self.waiting: list[Callable[[], object]] = []
        self.error: Exception | None = None
        self.duplicates = False  # All of it is in the log already.
        self.deleted: list[str] = []
        self.transactional_ids: list[str] = []  # Of each append.

    async def delete_records(
        self, request: log_pb2.DeleteRecordsRequest
    ) -> log_pb2.DeleteRecordsResponse:
        self.deleted += [entry.partition.topic for entry in request.partitions]
        return log_pb2.DeleteRecordsResponse(
            partitions=[
                log_pb2.DeleteRecordsPartitionResult(partition=entry.partition)
                for entry in request.partitions
            ]
        )

    def begin_append(
        self,
        target: Target,
        records: bytes,
        acks: int,
        timeout_ms: int,
        on_end: OnAppended,
        *,
        transactional_id: str = "",
    ) -> None:
        self.transactional_ids.append(transactional_id)
        if self.error is not None:
            on_end(self.error)
            return
        self.appended.append(records)
        base = len(self.appended) - 1
        info = AppendInfo(base, base, -1, len(records), self.duplicates)
        if self.gate.is_set():
            on_end(info)
        else:
            self.waiting.append(lambda: on_end(info))

    begin_transactional_append = begin_append

    def acknowledge(self) -> None:
        self.gate.set()
        for end in self.waiting:
            end()
        self.waiting.clear()

    def log_start_offset(self, topic: str, partition: int) -> int:
        return 0


def log_servicer(logs: FakeLogs) -> LogServicer:
    image = image_with("orders")
    image.apply(
        cluster_pb2.MetadataDelta(
            index=2,
            topics=[cluster_pb2.TopicRecord(name="__x", topic_id=b"x" * 16, internal=True)],
        )
    )
    return LogServicer(logs, image, BrokerMetrics())  # type: ignore[arg-type]


def produce(
    number: int, acks: common_pb2.Acks.ValueType = common_pb2.ACKS_ALL
) -> log_pb2.ProduceRequest:
    return log_pb2.ProduceRequest(
        correlation_id=number,
        acks=acks,
        timeout_ms=1000,
        partitions=[
            log_pb2.ProducePartition(
                partition=common_pb2.TopicPartition(topic="orders"), records=b"%d" % number
            )
        ],
    )


async def produce_once(
    servicer: LogServicer, request: log_pb2.ProduceRequest
) -> log_pb2.ProduceResponse:
    answer = await servicer.ProduceOnce(log_pb2.ProduceOnceRequest(request=request), None)
    return answer.response


async def requests(
    *items: log_pb2.ProduceRequest,
) -> AsyncIterator[Laden[log_pb2.ProduceRequest]]:
    for item in items:
        yield PRODUCE_REQUEST.beside(item)


async def test_requests_of_a_stream_are_appended_in_order_before_any_is_acknowledged() -> None:
    logs = FakeLogs()
    servicer = log_servicer(logs)
    count = MAX_PENDING_REQUESTS - 1
    answers = servicer.Produce(requests(*(produce(i) for i in range(count))), None)
    first = asyncio.ensure_future(anext(answers))
    await eventually(lambda: len(logs.appended) >= count)
    assert logs.appended == [b"%d" % i for i in range(count)]
    assert not first.done()
    logs.acknowledge()
    got = [(await first).correlation_id] + [answer.correlation_id async for answer in answers]
    assert got == list(range(count))


async def test_a_stream_does_not_read_more_than_it_can_hold() -> None:
    logs = FakeLogs()
    servicer = log_servicer(logs)
    total = MAX_PENDING_REQUESTS * 2
    answers = servicer.Produce(requests(*(produce(i) for i in range(total))), None)
    first = asyncio.ensure_future(anext(answers))
    await eventually(lambda: len(logs.appended) >= MAX_PENDING_REQUESTS)
    for _ in range(100):
        await asyncio.sleep(0)  # Were there no bound, more would be appended now.
    assert len(logs.appended) == MAX_PENDING_REQUESTS
    logs.acknowledge()
    await first
    assert len([answer async for answer in answers]) == total - 1


async def test_a_client_that_does_not_read_its_answers_is_not_read_from() -> None:
    logs = FakeLogs()
    logs.gate.set()  # Every append is acknowledged at once.
    servicer = log_servicer(logs)
    total = MAX_PENDING_REQUESTS * 3
    answers = servicer.Produce(requests(*(produce(i) for i in range(total))), None)
    got = [await anext(answers)]  # Given to the writer, which stays with it.
    await eventually(lambda: len(logs.appended) >= MAX_PENDING_REQUESTS)
    for _ in range(100):
        await asyncio.sleep(0)  # Were there no bound, more would be appended now.
    assert len(logs.appended) == MAX_PENDING_REQUESTS
    got += [answer async for answer in answers]
    assert [answer.correlation_id for answer in got] == list(range(total))


async def test_requests_without_answers_do_not_use_a_stream_up() -> None:
    logs = FakeLogs()
    logs.gate.set()
    total = MAX_PENDING_REQUESTS * 2
    stream = requests(*(produce(i, common_pb2.ACKS_NONE) for i in range(total)))
    assert [answer async for answer in log_servicer(logs).Produce(stream, None)] == []
    assert len(logs.appended) == total


async def test_acks_none_is_appended_and_not_answered() -> None:
    logs = FakeLogs()
    logs.gate.set()
    servicer = log_servicer(logs)
    stream = requests(produce(1, common_pb2.ACKS_NONE), produce(2))
    got = [answer.correlation_id async for answer in servicer.Produce(stream, None)]
    assert got == [2]
    assert logs.appended == [b"1", b"2"]


class Watched(Laden[log_pb2.ProduceRequest]):
    """A request of which it can be seen whether it is still there."""

    __slots__ = ("__weakref__",)


async def test_an_idle_stream_keeps_none_of_the_records_that_it_brought() -> None:
    logs = FakeLogs()
    there: list[weakref.ref[Watched]] = []
    done = asyncio.Event()

    async def one() -> AsyncIterator[Laden[log_pb2.ProduceRequest]]:
        def made() -> Watched:
            request = Watched(produce(1), [b"1"])
            there.append(weakref.ref(request))
            return request

        yield made()
        await done.wait()

    answers = log_servicer(logs).Produce(one(), None)
    first = asyncio.ensure_future(anext(answers))
    await eventually(lambda: logs.appended == [b"1"])
    assert there[0]() is None
    logs.acknowledge()
    await first
    done.set()
    assert [answer async for answer in answers] == []


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (NotEnoughReplicasError("orders-0: in sync: 1"), ErrorCode.NOT_ENOUGH_REPLICAS),
        (RuntimeError("a bug"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
async def test_a_failing_partition_is_answered_and_the_stream_lives(
    failure: Exception, code: ErrorCode
) -> None:
    logs = FakeLogs()
    logs.gate.set()
    logs.error = failure
    servicer = log_servicer(logs)
    got = [answer async for answer in servicer.Produce(requests(produce(1), produce(2)), None)]
    assert [answer.partitions[0].error.code for answer in got] == [code, code]
    assert got[0].partitions[0].base_offset == -1


def test_a_second_outcome_of_a_partition_is_not_taken_for_that_of_another() -> None:
    ends: list[OnAppended] = []
    logs: Any = FakeLogs()
    logs.begin_append = lambda *arguments: ends.append(arguments[-1])
    request = produce(1)
    request.partitions.add().CopyFrom(request.partitions[0])
    answers: list[log_pb2.ProduceResponse] = []
    Producing(logs, BrokerMetrics(), lambda _: None).begin(
        PRODUCE_REQUEST.beside(request), answers.append
    )
    first, second = ends
    first(AppendInfo(5, 5, -1, 1))
    first(RequestTimedOutError("too late"))
    assert not answers, "of the second partition nothing is known yet"
    second(AppendInfo(6, 6, -1, 1))
    second(RequestTimedOutError("too late"))
    [answer] = answers
    assert [(entry.base_offset, entry.error.code) for entry in answer.partitions] == [
        (5, 0),
        (6, 0),
    ]


async def test_the_clusters_own_topics_are_written_by_nobody_else() -> None:
    logs = FakeLogs()
    servicer = log_servicer(logs)
    request = produce(1)
    request.partitions[0].partition.topic = "__x"
    answer = await produce_once(servicer, request)
    assert answer.partitions[0].error.code == ErrorCode.ACCESS_FORBIDDEN
    assert "AdminClient.alter_group_offsets" in answer.partitions[0].error.message
    assert not logs.appended
    deletion = log_pb2.DeleteRecordsRequest()
    for topic in ("orders", "__x", "orders"):
        deletion.partitions.add().partition.topic = topic
    deleted = await servicer.DeleteRecords(deletion, None)
    assert [result.error.code for result in deleted.partitions] == [
        0,
        ErrorCode.ACCESS_FORBIDDEN,
        0,
    ]
    assert logs.deleted == ["orders", "orders"]


async def test_what_a_request_says_is_of_a_transaction_is_appended_as_that() -> None:
    logs = FakeLogs()
    logs.gate.set()
    for transactional_id in ("", "t"):
        request = produce(1)
        request.transactional_id = transactional_id
        answer = await produce_once(log_servicer(logs), request)
        assert not answer.partitions[0].HasField("error")
    assert logs.transactional_ids == ["", "t"]


# ------------------------------------------------------------------------------ Admin


def led_nowhere(_: object) -> None:
    """What a broker that leads nothing knows of replicas."""


def servicer_of(
    image: MetadataImage, controllers: FakeControllers, replica_ends: ReplicaEnds
) -> AdminServicer:
    entry = admin_pb2.ConfigEntry(key="node.id", value="1", source="node file")
    return AdminServicer(
        1,
        image,
        controllers,
        replica_ends,
        lambda: [entry],
        node=FakeNode(),
        ask_controllers=ControllerFacts(controllers, reach_nobody),
    )


def reach_nobody(address: str, node_id: int) -> aio.Channel:
    raise AssertionError(f"node {node_id} at {address} is asked")


class FakeNode:
    """Tells of itself as scripted."""

    async def describe(self) -> node_pb2.DescribeNodeResponse:
        return node_pb2.DescribeNodeResponse(node_id=1, version="0.1")

    async def read_metrics(self) -> node_pb2.ReadMetricsResponse:
        return node_pb2.ReadMetricsResponse(node_id=1, text="penstock_probe 7.0\n")


class FakeControllers:
    """Applies nothing; answers as scripted."""

    def __init__(self) -> None:
        self.commands: list[cluster_pb2.Command] = []
        self.result = cluster_pb2.CommandResult(index=9)
        self.failure: Exception | None = None
        self.on_execute: Any = None
        self.supported = 2

    async def execute_admin(
        self, command: cluster_pb2.Command, timeout_ms: int
    ) -> cluster_pb2.CommandResult:
        self.commands.append(command)
        if self.on_execute is not None:
            self.on_execute(command)
        if self.failure is not None:
            raise self.failure
        return self.result

    async def wait_for_index(self, index: int, timeout_ms: int) -> None:
        return

    async def supported_by_controllers(self, timeout_ms: int) -> int:
        return self.supported

    async def describe_quorum(self, timeout_ms: int) -> controller_pb2.DescribeQuorumResponse:
        if self.failure is not None:
            raise self.failure
        return controller_pb2.DescribeQuorumResponse(leader_id=2)


async def test_a_topic_cannot_be_made_internal_from_outside() -> None:
    controllers = FakeControllers()
    wish = cluster_pb2.CreateTopicCommand(name="t", internal=True, topic_id=b"forged")
    request = admin_pb2.CreateTopicsRequest(topics=[wish])
    await servicer_of(image_with(), controllers, led_nowhere).CreateTopics(request, None)
    sent = controllers.commands[0].create_topic
    assert not sent.internal
    assert len(sent.topic_id) == 16


async def test_a_repeated_forwarding_that_finds_its_own_topic_succeeded() -> None:
    image, controllers = image_with(), FakeControllers()
    controllers.result.error.CopyFrom(TopicAlreadyExistsError().to_proto())

    def made_by_the_first_try(command: cluster_pb2.Command) -> None:
        record = cluster_pb2.TopicRecord(name="t", topic_id=command.create_topic.topic_id)
        image.apply(cluster_pb2.MetadataDelta(index=2, topics=[record]))

    controllers.on_execute = made_by_the_first_try
    request = admin_pb2.CreateTopicsRequest(topics=[cluster_pb2.CreateTopicCommand(name="t")])
    answer = await servicer_of(image, controllers, led_nowhere).CreateTopics(request, None)
    assert not answer.results[0].HasField("error")


async def test_a_topic_of_somebody_else_is_a_refusal() -> None:
    controllers = FakeControllers()
    controllers.result.error.CopyFrom(TopicAlreadyExistsError().to_proto())
    request = admin_pb2.CreateTopicsRequest(topics=[cluster_pb2.CreateTopicCommand(name="orders")])
    answer = await servicer_of(image_with("orders"), controllers, led_nowhere).CreateTopics(
        request, None
    )
    assert answer.results[0].error.code == ErrorCode.TOPIC_ALREADY_EXISTS


async def test_deleting_names_near_topics_and_spares_internal_ones() -> None:
    image = image_with("orders")
    image.apply(
        cluster_pb2.MetadataDelta(
            index=2,
            topics=[cluster_pb2.TopicRecord(name="__x", topic_id=b"x" * 16, internal=True)],
        )
    )
    controllers = FakeControllers()
    request = admin_pb2.DeleteTopicsRequest(names=["order", "__x", "orders"])
    answer = await servicer_of(image, controllers, led_nowhere).DeleteTopics(request, None)
    assert "did you mean 'orders'?" in answer.results[0].error.message
    assert answer.results[1].error.code == ErrorCode.ACCESS_FORBIDDEN
    assert "AdminClient.delete_groups" in answer.results[1].error.message
    assert not answer.results[2].HasField("error")
    assert len(controllers.commands) == 1


async def test_a_lost_controller_is_a_typed_error() -> None:
    controllers = FakeControllers()
    controllers.failure = RequestTimedOutError("no active controller")
    servicer = servicer_of(image_with("orders"), controllers, led_nowhere)
    request = admin_pb2.DeleteTopicsRequest(names=["orders"])
    answer = await servicer.DeleteTopics(request, None)
    assert answer.results[0].error.code == ErrorCode.REQUEST_TIMED_OUT
    quorum = await servicer.DescribeQuorum(admin_pb2.AdminDescribeQuorumRequest(), None)
    assert quorum.error.code == ErrorCode.REQUEST_TIMED_OUT


async def test_unregistering_a_broker_forwards_the_command_and_its_refusal() -> None:
    controllers = FakeControllers()
    servicer = servicer_of(image_with(), controllers, led_nowhere)
    request = admin_pb2.UnregisterBrokerRequest(node_id=3)
    assert not (await servicer.UnregisterBroker(request, None)).HasField("error")
    assert controllers.commands[0].unregister_broker.node_id == 3
    controllers.result.error.CopyFrom(TopicAlreadyExistsError("broker 3 lives").to_proto())
    refused = await servicer.UnregisterBroker(request, None)
    assert refused.error.message == "broker 3 lives"


async def test_configs_show_what_is_in_force_and_why() -> None:
    servicer = servicer_of(image_with("orders"), FakeControllers(), led_nowhere)
    request = admin_pb2.DescribeConfigsRequest(topics=["orders"])
    answer = await servicer.DescribeConfigs(request, None)
    entries = {entry.key: entry for entry in answer.topics[0].entries}
    assert entries["min.insync.replicas"].value == "2"
    assert entries["min.insync.replicas"].source == "default"


# ----------------------------------------------------------------------------- health


@pytest.mark.parametrize("serves", [True, False])
async def test_health_is_whether_the_broker_may_serve(serves: bool) -> None:
    answer = await HealthServicer(lambda: serves).Check(health_pb2.HealthCheckRequest(), None)
    assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serves


# ----------------------------------------------------------------------- Transactions


NOT_ASKED: Any = None  # The coordinator, in tests of what is not its.


def led_here(image: MetadataImage) -> LedTransactions:
    """What a broker that leads nothing tells of transactions."""

    def nothing(topic: str, _topic_id: bytes, _partition: int, _epoch: int) -> Any:
        raise UnknownTopicOrPartitionError(f"no {topic}")

    return LedTransactions(1, image, nothing, lambda: 0, on_mark=lambda mark: None)


async def test_what_is_asked_of_producers_is_answered_by_what_is_led() -> None:
    async def never() -> int:
        raise AssertionError

    servicer = TransactionsServicer(never, NOT_ASKED, led_here(image_with()), NOT_ASKED)
    where = common_pb2.TopicPartition(topic="orders")
    described = await servicer.DescribeProducers(
        transactions_pb2.DescribeProducersRequest(partitions=[where]), None
    )
    (entry,) = described.partitions
    assert entry.partition == where
    assert entry.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    async def abort(_code: object, details: str) -> None:
        raise InvalidRequestError(details)

    refusing: Any = SimpleNamespace(abort=abort)
    with pytest.raises(InvalidRequestError, match="1001 partitions are asked about; 1000 are all"):
        await servicer.DescribeProducers(
            transactions_pb2.DescribeProducersRequest(partitions=[where] * 1001), refusing
        )
    aborted = await servicer.AbortHanging(
        transactions_pb2.AbortHangingRequest(partition=where), None
    )
    assert aborted.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_producer_ids_come_from_blocks_and_never_twice() -> None:
    blocks = iter(range(0, 100, 2))

    async def allocate() -> cluster_pb2.AllocateProducerIdsResult:
        return cluster_pb2.AllocateProducerIdsResult(first_producer_id=next(blocks), count=2)

    servicer = TransactionsServicer(
        ProducerIds(allocate).take, NOT_ASKED, led_here(image_with()), NOT_ASKED
    )
    answers = await asyncio.gather(
        *(servicer.InitProducerId(transactions_pb2.InitProducerIdRequest(), None) for _ in range(7))
    )
    assert sorted(answer.producer_id for answer in answers) == list(range(7))


# ---------------------------------------------------------------------- internal topics


def internal_topic(
    image: MetadataImage, controllers: FakeControllers, name: str = OFFSETS_TOPIC
) -> InternalTopic:
    return InternalTopic(
        name,
        image,
        controllers,
        partition_count=4,
        replication_factor=3,
        replication_setting="some.replication.factor",
    )


async def test_an_internal_topic_waits_for_enough_brokers() -> None:
    controllers = FakeControllers()
    waits = r"needs 3 brokers .* 2 are alive.* set some\.replication\.factor lower"
    with pytest.raises(CoordinatorNotAvailableError, match=waits):
        await internal_topic(image_with(brokers=2), controllers).ensure()
    assert not controllers.commands


@pytest.mark.parametrize("name", [OFFSETS_TOPIC, TRANSACTIONS_TOPIC])
async def test_an_internal_topic_is_made_once_for_many_callers(name: str) -> None:
    image, controllers = image_with(), FakeControllers()

    def make(command: cluster_pb2.Command) -> None:
        wish = command.create_topic
        record = cluster_pb2.TopicRecord(name=wish.name, topic_id=wish.topic_id, internal=True)
        image.apply(cluster_pb2.MetadataDelta(index=2, topics=[record]))

    controllers.on_execute = make
    topic = internal_topic(image, controllers, name)
    found = await asyncio.gather(*(topic.ensure() for _ in range(5)))
    assert {one.name for one in found} == {name}
    assert len(controllers.commands) == 1
    assert controllers.commands[0].create_topic.configs["cleanup.policy"] == "compact"
