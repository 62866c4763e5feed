"""Batches and marks of transactions, as clients and coordinators send them to a broker."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from penstock.broker.core.ports import AppendInfo
from penstock.broker.core.verification import Question
from penstock.broker.replication.appending import Target
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.errors import (
    PenstockError,
)
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import BatchBuilder, iter_batches
from tests.support import eventually
from tests.unit.replication.brokers import (
    CLUSTER_ID,
    TOPIC,
    TOPIC_ID,
    BrokerProcess,
)

ALL = common_pb2.ACKS_ALL


def part(
    value: bytes, *, producer_id: int = 7, epoch: int = 0, sequence: int = 0, **more: Any
) -> bytes:
    """A batch of a transaction."""
    builder = BatchBuilder()
    builder.append(0, None, value)
    return builder.build(
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        **{"is_transactional": True, **more},
    )


def produce(
    broker: BrokerProcess, records: bytes, *, timeout_ms: int = 10_000, **more: Any
) -> asyncio.Future[Any]:
    """As from a client: begun when this returns."""
    transactional_id, acks = more.pop("transactional_id", "t"), more.pop("acks", ALL)
    target = Target(TOPIC, b"", more.pop("partition", 0))
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def ended(outcome: Any) -> None:
        if isinstance(outcome, AppendInfo):
            answered.set_result(outcome)
        else:
            answered.set_exception(outcome)

    if transactional_id:
        begin = partial(
            broker.manager.begin_transactional_append, transactional_id=transactional_id
        )
    else:
        begin = broker.manager.begin_append
    begin(target, records, acks, timeout_ms, ended, **more)
    return answered


async def asked(broker: BrokerProcess, count: int = 1) -> list[Question]:
    await eventually(lambda: len(broker.asked) >= count)
    return [question for question, _ in broker.asked]


def answer(broker: BrokerProcess, error: PenstockError | None = None) -> None:
    _, on_answer = broker.asked.pop(0)
    on_answer(error)


def markers(
    *entries: tuple[int, int, bool], partition: int = 0, kept: bool = False, **more: Any
) -> coordination_pb2.WriteMarkersRequest:
    """Marks by producer id, epoch, and whether they commit; ``kept``: the next one is here too."""
    where = {"topic": TOPIC, "partition": partition, "topic_id": TOPIC_ID, **more}
    return coordination_pb2.WriteMarkersRequest(
        cluster_id=CLUSTER_ID,
        markers=[
            coordination_pb2.TransactionMarker(
                producer_id=producer_id,
                producer_epoch=epoch,
                commit=commit,
                coordinator_epoch=5,
                partitions=[common_pb2.TopicPartition(**where)],
                kept=[0] if kept else [],
            )
            for producer_id, epoch, commit in entries
        ],
    )


async def mark(
    broker: BrokerProcess, *entries: tuple[int, int, bool], **more: Any
) -> list[common_pb2.Error]:
    """The outcome of each mark, which are all for one partition."""
    response = await broker.manager.transactions.write_markers(markers(*entries, **more))
    outcomes = []
    for result in response.results:
        (outcome,) = result.outcomes
        outcomes.append(outcome)
    return outcomes


def marks_of(broker: BrokerProcess) -> list[tuple[int, int, MarkerType]]:
    return [
        (header.producer_id, header.producer_epoch, marker_type(data))
        for stored in broker.log().batches
        for header, data in iter_batches(stored)
        if header.is_control
    ]


async def open_transaction(broker: BrokerProcess, producer_id: int = 7, epoch: int = 0) -> int:
    waiting = produce(broker, part(b"a", producer_id=producer_id, epoch=epoch))
    await asked(broker)
    answer(broker)
    offset: int = (await waiting).base_offset
    return offset
