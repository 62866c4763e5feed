"""What leaders ask transaction coordinators, gathered: one request for all that is to be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog

from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.verification import Question
from penstock.broker.peers import Peers
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    PenstockError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)
from penstock.wire.transactional_ids import coordinating_key

_TIMEOUT_S: Final = 2.0
"""So long a coordinator may take; then it is asked again, which may be another one by then."""

_PATIENCE_S: Final = 0.005
_MAX_UNDER_WAY: Final = 8
"""What takes a coordinator longer (the marks of a transaction before are on their way) holds up
what comes after it for so long, unless so many requests are under way to it."""

_MAX_ENTRIES: Final = 1_000

AddPartitions = Callable[
    [coordination_pb2.AddPartitionsRequest], Awaitable[coordination_pb2.AddPartitionsResponse]
]
"""The coordinator of this broker. Raises PenstockError."""

OnAnswer = Callable[[PenstockError | None], None]

log = structlog.get_logger()


class _Transaction(NamedTuple):
    """What an entry of a request is about."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class _Asked(NamedTuple):
    """One partition that is to be taken into a transaction, and who waits for it."""

    partition: common_pb2.TopicPartition
    on_answer: OnAnswer


class CoordinatorQuestions:
    """Asks the coordinators of transactions on behalf of what this broker leads (AskCoordinator).

    Used on one event loop. What comes while a request is under way to a coordinator goes with the
    next one, which waits for the answer only for a short while; what comes for one transaction goes
    as one entry of it. The coordinator of this broker (``local``) is called directly.
    """

    def __init__(
        self, node_id: int, image: MetadataImage, peers: Peers, local: AddPartitions
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._peers = peers
        self._local = local
        self._couriers: dict[int, _Courier] = {}

    def ask(self, question: Question, on_answer: OnAnswer) -> None:
        """Have the partition taken into the transaction; see AskCoordinator.

        An answer that can't be had soon is a retriable refusal.
        """
        try:
            node_id = self._coordinator_of(question.transactional_id)
            name = self._image.named(question.partition)
            if name is None:
                raise UnknownTopicOrPartitionError(
                    f"partition {question.partition} does not exist (any more)"
                )
        except PenstockError as error:
            asyncio.get_running_loop().call_soon(on_answer, error)
            return
        courier = self._couriers.get(node_id)
        if courier is None:
            courier = self._couriers[node_id] = _Courier(self._send, node_id)
        partition = common_pb2.TopicPartition(
            topic=name.topic, partition=name.partition, topic_id=question.partition.topic_id
        )
        courier.add(_Transaction(*question[1:]), _Asked(partition, on_answer))

    async def stop(self) -> None:
        """Ask no more. Who waits for an answer gets none."""
        couriers, self._couriers = self._couriers, {}
        for courier in couriers.values():
            await courier.stop()

    def _coordinator_of(self, transactional_id: str) -> int:
        topic = self._image.topic(TRANSACTIONS_TOPIC)
        if topic is None or not topic.partitions:
            raise CoordinatorNotAvailableError(
                f"broker {self._node_id} knows no {TRANSACTIONS_TOPIC}: no transaction was begun, "
                "or the news of it is on its way"
            )
        number = partition_for_group(coordinating_key(transactional_id), len(topic.partitions))
        record = topic.partitions.get(number)
        if record is None or record.leader < 0:
            raise CoordinatorNotAvailableError(
                f"{TRANSACTIONS_TOPIC}-{number} has no leader now, so nobody coordinates "
                f"transactional id {transactional_id[:64]!r}"
            )
        return record.leader

    async def _send(
        self, node_id: int, request: coordination_pb2.AddPartitionsRequest
    ) -> coordination_pb2.AddPartitionsResponse:
        request.cluster_id = self._image.cluster_id
        if node_id == self._node_id:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._local(request)
        response: coordination_pb2.AddPartitionsResponse = await self._peers.ask(
            node_id, "AddPartitions", request, _TIMEOUT_S
        )
        return response


class _Courier:
    """Carries what one coordinator is asked."""

    def __init__(
        self,
        send: Callable[
            [int, coordination_pb2.AddPartitionsRequest],
            Awaitable[coordination_pb2.AddPartitionsResponse],
        ],
        node_id: int,
    ) -> None:
        self._send = send
        self._node_id = node_id
        self._gathered: dict[_Transaction, list[_Asked]] = {}
        self._task: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def add(self, transaction: _Transaction, asked: _Asked) -> None:
        """Ask with the next request."""
        self._gathered.setdefault(transaction, []).append(asked)
        if self._task is None:
            # As a task it begins when all that is to be asked in this turn of the loop is here.
            self._task = asyncio.create_task(self._run(), name=f"ask broker {self._node_id}")

    async def stop(self) -> None:
        """Ask no more."""
        tasks = [task for task in (self._task, *self._under_way) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while self._gathered:
            entries = list(self._gathered.items())[:_MAX_ENTRIES]
            for transaction, _ in entries:
                del self._gathered[transaction]
            request = asyncio.create_task(
                self._ask(entries), name=f"ask broker {self._node_id} of transactions"
            )
            self._under_way.add(request)
            request.add_done_callback(self._under_way.discard)
            await asyncio.wait([request], timeout=_PATIENCE_S)
            while len(self._under_way) >= _MAX_UNDER_WAY:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        self._task = None

    async def _ask(self, entries: list[tuple[_Transaction, list[_Asked]]]) -> None:
        request = coordination_pb2.AddPartitionsRequest(
            entries=[
                coordination_pb2.AddPartitionsEntry(
                    transactional_id=transaction.transactional_id,
                    producer_id=transaction.producer_id,
                    producer_epoch=transaction.producer_epoch,
                    partitions=[one.partition for one in asked],
                )
                for transaction, asked in entries
            ]
        )
        errors: list[PenstockError | None]
        try:
            response = await self._send(self._node_id, request)
            if len(response.results) != len(entries):
                raise UnknownServerError(
                    f"broker {self._node_id} was asked about {len(entries)} transactions and "
                    f"answered for {len(response.results)}"
                )
            errors = [
                error_from_proto(result.error) if result.HasField("error") else None
                for result in response.results
            ]
        except TimeoutError:
            late = CoordinatorNotAvailableError(
                f"the coordinator on broker {self._node_id} has not answered for {_TIMEOUT_S:g} s"
            )
            errors = [late] * len(entries)
        except PenstockError as error:
            errors = [error] * len(entries)
        except Exception as error:
            # Who waits must hear of it.
            log.exception("a coordinator was not asked", coordinator=self._node_id)
            failed = UnknownServerError(f"the coordinator was not asked: {error!r}")
            errors = [failed] * len(entries)
        for (_, asked), outcome in zip(entries, errors, strict=True):
            for one in asked:
                one.on_answer(outcome)
