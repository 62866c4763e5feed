"""The transaction coordinator of one broker: every id whose partition this broker leads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from penstock.broker.coordinator import refusals
from penstock.broker.coordinator.hosted import HostPorts, Place
from penstock.broker.coordinator.hosted_transactions import (
    HostedTransactions,
    TransactionContext,
)
from penstock.broker.coordinator.led_partitions import LedPartitions
from penstock.broker.coordinator.mark_streams import MarkStreams
from penstock.broker.coordinator.marking import MarkSender, WriteMarkers
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.transaction_attempts import attempt_of
from penstock.broker.core.transaction_events import (
    AbortTransaction,
    AddPartitions,
    BeginAttempt,
    CommitGroup,
    DescribeTransaction,
    EndTransaction,
    Event,
    InitProducerId,
    LastCommitted,
    ListTransactions,
    MarkDone,
    TransactionSettings,
)
from penstock.broker.core.transaction_marks import Owner
from penstock.broker.peers import Peers
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import coordination_pb2, transactions_pb2
from penstock.wire.errors import InvalidRequestError, PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.transactional_ids import (
    check_commit_group,
    check_transactional_id,
    coordinating_key,
    parse_attempt,
)

DEFAULT_WAIT_MS: Final = 30_000
"""A request waits so long for marks of a transaction before, where its sender sets no limit."""

_LEADER_WAIT_MS: Final = 1_000
"""A leader that asks is answered by then, that it ask again: it has others to ask for."""

_LISTED_AT_ONCE: Final = 1_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class ImageTopicIds:
    """KnownTopics of an image."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image

    def knows(self, topic_id: TopicId) -> bool:
        """Whether there is a topic of this id."""
        return self._image.topic_by_id(topic_id) is not None


class TransactionCoordinator:
    """Coordinates transactions; see proto/penstock/v1/transactions.proto for what each request is.

    Construct it before the replicas take their first metadata, call :meth:`on_metadata` after each
    change was applied to ``image``, and :meth:`stop` before the replicas stop. Used on one event
    loop. ``write_markers`` writes marks to what this broker leads, ``mark_streams`` has connections
    to leaders elsewhere; without it they are called. Requests raise PenstockError where this broker
    does not coordinate or serve, and answer other refusals in their response; no answer is given
    before what it tells is committed.
    """

    def __init__(
        self,
        node_id: int,
        replicas: ReplicaLog,
        image: MetadataImage,
        peers: Peers,
        *,
        ensure_topic: Callable[[], Awaitable[object]],
        take_producer_id: Callable[[], Awaitable[int]],
        write_markers: WriteMarkers,
        mark_streams: MarkStreams | None = None,
        settings: TransactionSettings | None = None,
        clock_ms: Callable[[], int] = _monotonic_ms,
        wall_clock_ms: Callable[[], int] = _wall_ms,
        on_ended: Callable[[bool], None] = lambda _commit: None,
    ) -> None:
        self._image = image
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._sender = MarkSender(
            node_id,
            image,
            peers,
            write_markers,
            clock_ms=clock_ms,
            on_done=self._marks_committed,
            streams=mark_streams,
        )
        ports = HostPorts(replicas, clock_ms, wall_clock_ms)
        context = TransactionContext(
            ImageTopicIds(image),
            settings or TransactionSettings(),
            take_producer_id,
            self._sender,
            on_ended,
        )

        def make(place: Place) -> HostedTransactions:
            return HostedTransactions(place, ports, context)

        self._led = LedPartitions(
            TRANSACTIONS_TOPIC, replicas, image, ensure_topic=ensure_topic, make=make
        )

    def count_states(self) -> tuple[Counter[str], float]:
        """Ids coordinated here by state, and for how many seconds the oldest transaction has been
        open; 0 where none is. On any thread.
        """
        states: Counter[str] = Counter()
        begun_ms: list[int] = []
        for hosted in self._led.hosted():
            of_one, oldest_ms = hosted.count_states()
            states.update(of_one)
            begun_ms += [oldest_ms] if oldest_ms else []
        now_ms = self._wall_clock_ms()
        return states, max(0, now_ms - min(begun_ms, default=now_ms)) / 1000

    async def stop(self) -> None:
        """Coordinate no more: everybody who waits is told."""
        self._led.stop()
        await self._sender.stop()

    # ------------------------------------------------------------------ what happens to it

    def on_metadata(self, change: ImageChange) -> None:
        """Act on what has just been applied to the image."""
        removed = frozenset(TopicId(topic.topic_id) for topic in change.removed_topics)
        if removed:
            for hosted in self._led.values():
                hosted.topics_removed(removed)
        self._sender.on_metadata(change)

    def _marks_committed(self, owner: Owner, marks: Sequence[MarkDone]) -> None:
        hosted = self._led.get(owner.partition)
        if hosted is not None:
            # Whoever sent them: a mark that is there is there, and its decision was committed.
            hosted.marks_committed(marks)

    # ------------------------------------------------------------------ producers

    async def init_producer_id(
        self, request: transactions_pb2.InitProducerIdRequest, wait_ms: int = DEFAULT_WAIT_MS
    ) -> transactions_pb2.InitProducerIdResponse:
        """Give a transactional id to a producer. Waits for marks of the transaction before."""
        check_transactional_id(request.transactional_id)
        hosted = await self._led.route(request.transactional_id)
        give_up_ms = self._clock_ms() + wait_ms
        answer: transactions_pb2.InitProducerIdResponse = await hosted.ask(
            lambda request_id: InitProducerId(request_id, request, give_up_ms)
        )
        return answer

    async def end_transaction(
        self, request: transactions_pb2.EndTransactionRequest, wait_ms: int = DEFAULT_WAIT_MS
    ) -> transactions_pb2.EndTransactionResponse:
        """Decide about a transaction; answered when that is durable, before its marks are there."""
        hosted = await self._route_id(request.transactional_id)
        give_up_ms = self._clock_ms() + wait_ms
        answer: transactions_pb2.EndTransactionResponse = await hosted.ask(
            lambda request_id: EndTransaction(request_id, request, give_up_ms)
        )
        return answer

    # ------------------------------------------------------------------ leaders

    async def add_partitions(
        self, request: coordination_pb2.AddPartitionsRequest
    ) -> coordination_pb2.AddPartitionsResponse:
        """Take partitions into transactions, each answered for itself. Raises nothing."""
        give_up_ms = self._clock_ms() + _LEADER_WAIT_MS
        results: list[Any] = [None] * len(request.entries)
        by_shard: dict[HostedTransactions, list[int]] = {}
        for index, entry in enumerate(request.entries):
            try:
                by_shard.setdefault(self._present(entry.transactional_id), []).append(index)
            except PenstockError as error:
                results[index] = error
        asked: list[tuple[int, asyncio.Future[Any]]] = []
        for hosted, indexes in by_shard.items():
            events = [_adding(request.entries[index], give_up_ms) for index in indexes]
            try:
                asked += zip(indexes, hosted.ask_all(events), strict=True)
            except PenstockError as error:
                for index in indexes:
                    results[index] = error
        for index, future in asked:
            try:
                results[index] = await future
            except PenstockError as error:
                results[index] = error
        return coordination_pb2.AddPartitionsResponse(
            results=[
                coordination_pb2.AddPartitionsResult(error=result.to_proto())
                if isinstance(result, PenstockError)
                else result
                for result in results
            ]
        )

    async def find_transactions(
        self, request: coordination_pb2.FindTransactionsRequest
    ) -> coordination_pb2.FindTransactionsResponse:
        """Which transactions that are open in logs will be ended from here. Raises nothing."""
        response = coordination_pb2.FindTransactionsResponse()
        indexes: dict[tuple[int, TopicIdPartition], list[int]] = {}
        places: dict[int, set[TopicIdPartition]] = {}
        for index, place in enumerate(request.places):
            where = TopicIdPartition(TopicId(place.partition.topic_id), place.partition.partition)
            indexes.setdefault((place.producer_id, where), []).append(index)
            places.setdefault(place.producer_id, set()).add(where)
        for number in request.coordinators:
            result = response.results.add()
            try:
                hosted = self._led.get(number)
                if hosted is None:
                    raise refusals.not_coordinator(self._image, TRANSACTIONS_TOPIC, number)
                for producer_id, where, name in await hosted.find(places):
                    for index in indexes[producer_id, where]:
                        result.transactions.add(place=index, transactional_id=name)
            except PenstockError as error:
                result.error.CopyFrom(error.to_proto())
        return response

    def _present(self, transactional_id: str) -> HostedTransactions:
        """The partition that keeps the id, as of the metadata that this broker has now.

        One that was deposed in them, and has yet to hear of it, must not take in a topic that is
        newer than its successor's first picture: that would take it for one that is gone.
        """
        hosted = self._led.locate(coordinating_key(transactional_id))
        record = self._image.partition(TRANSACTIONS_TOPIC, hosted.place.partition)
        if record is None or record.leader_epoch != hosted.place.leader_epoch:
            raise refusals.not_coordinator(self._image, TRANSACTIONS_TOPIC, hosted.place.partition)
        return hosted

    # ------------------------------------------------------------------ engines

    async def begin_attempt(
        self, request: transactions_pb2.BeginAttemptRequest, wait_ms: int = DEFAULT_WAIT_MS
    ) -> transactions_pb2.BeginAttemptResponse:
        """Open the transaction of a task attempt."""
        attempt_of(request)
        hosted = await self._led.route(request.group)
        give_up_ms = self._clock_ms() + wait_ms
        answer: transactions_pb2.BeginAttemptResponse = await hosted.ask(
            lambda request_id: BeginAttempt(request_id, request, give_up_ms)
        )
        return answer

    async def commit_group(
        self, request: transactions_pb2.CommitGroupRequest, wait_ms: int = DEFAULT_WAIT_MS
    ) -> transactions_pb2.CommitGroupResponse:
        """Decide about all attempts of a group. Waits for those of its last commit to end."""
        check_commit_group(request.group)
        hosted = await self._led.route(request.group)
        give_up_ms = self._clock_ms() + wait_ms
        answer: transactions_pb2.CommitGroupResponse = await hosted.ask(
            lambda request_id: CommitGroup(request_id, request, give_up_ms)
        )
        return answer

    async def last_committed(self, group: str) -> transactions_pb2.LastCommittedResponse:
        """What of a group was committed last."""
        check_commit_group(group)
        hosted = await self._led.route(group)
        answer: transactions_pb2.LastCommittedResponse = await hosted.ask(
            lambda request_id: LastCommitted(request_id, group)
        )
        return answer

    # ------------------------------------------------------------------ people

    async def list_transactions(
        self, request: transactions_pb2.ListTransactionsRequest
    ) -> transactions_pb2.ListTransactionsResponse:
        """The ids that this broker coordinates, a page of them.

        Each partition is asked for itself, and others get their turn in between.
        """
        first, after = _page_start(request.page_token)
        left = min(request.max_count, _LISTED_AT_ONCE) or _LISTED_AT_ONCE
        answer = transactions_pb2.ListTransactionsResponse()
        loaded = {hosted.place.partition: hosted for hosted in await self._led.all_loaded()}
        for number in sorted(number for number in loaded if number >= first):
            hosted = loaded[number]
            if not self._led.leads(hosted):
                continue
            if not left:
                answer.next_page_token = f"{number}:"
                break
            start = after if number == first else ""
            part = await hosted.ask(partial(_listing, request, start, left))
            answer.transactions.extend(part.transactions)
            left -= len(part.transactions)
            if part.next_page_token:
                answer.next_page_token = f"{number}:{part.next_page_token}"
                break
            await asyncio.sleep(0)
        return answer

    async def describe_transaction(
        self, transactional_id: str
    ) -> transactions_pb2.TransactionDescription:
        """One id whole."""
        hosted = await self._route_id(transactional_id)
        answer: transactions_pb2.TransactionDescription = await hosted.ask(
            lambda request_id: DescribeTransaction(request_id, transactional_id)
        )
        return answer

    async def abort_transaction(
        self, request: transactions_pb2.AbortTransactionRequest
    ) -> transactions_pb2.AbortTransactionResponse:
        """End the open transaction of an id from outside."""
        hosted = await self._route_id(request.transactional_id)
        give_up_ms = self._clock_ms() + DEFAULT_WAIT_MS
        answer: transactions_pb2.AbortTransactionResponse = await hosted.ask(
            lambda request_id: AbortTransaction(request_id, request, give_up_ms)
        )
        return answer

    async def _route_id(self, transactional_id: str) -> HostedTransactions:
        if parse_attempt(transactional_id) is None:
            check_transactional_id(transactional_id)
        return await self._led.route(coordinating_key(transactional_id))


def _page_start(token: str) -> tuple[int, str]:
    """The partition that a page begins in, and the id there that it begins after."""
    number, colon, after = token.partition(":")
    if not token:
        return 0, ""
    if not colon or not number.isdecimal():
        raise InvalidRequestError(
            f"page_token is {token!r}; it is the next_page_token of the answer before, or empty"
        )
    return int(number), after


def _listing(
    request: transactions_pb2.ListTransactionsRequest, after: str, limit: int, request_id: int
) -> ListTransactions:
    return ListTransactions(request_id, request, after, limit)


def _adding(entry: coordination_pb2.AddPartitionsEntry, give_up_ms: int) -> Callable[[int], Event]:
    return lambda request_id: AddPartitions(request_id, entry, give_up_ms)
