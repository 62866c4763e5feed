"""Questions about partitions that their leaders answer: offsets by time, deletions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from penstock.client import admin_values
from penstock.client.cluster import Cluster, gather_all, now_ms
from penstock.client.core.leader_watch import no_leader
from penstock.client.descriptions import HangingTransaction, PartitionProducers
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.model import OffsetAndTimestamp
from penstock.v1 import (
    common_pb2,
    log_pb2,
    log_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import (
    ClientClosedError,
    CoordinatorNotAvailableError,
    PenstockError,
    RequestTimedOutError,
    UnknownServerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition

Q = TypeVar("Q")
A = TypeVar("A")
W = TypeVar("W")
Outcome = dict[TopicPartition, A | PenstockError]
TopicIds = Mapping[TopicPartition, bytes]
GiveUp = Callable[[TopicPartition, PenstockError], object]
"""Hears of each partition that has no answer, and why: refused for good, gone, or not in time. The
others are answered all the same. Without one the first such partition raises its reason."""

_ASKED_AT_ONCE: Final = 100
"""Partitions of one DescribeProducers: of each a leader may know thousands of producers. And
transactions of one CheckHanging, about which all coordinators are asked."""
_REQUESTS_AT_ONCE: Final = 4
"""To one leader, where it is asked about more."""


class HangingVerdicts(NamedTuple):
    """Of each transaction None where it hangs, or what its leader says of it.

    Of those where only time is wanting leaders are sure in ``sure_in_ms``; 0 where there are none.
    """

    verdicts: dict[HangingTransaction, PenstockError | None]
    sure_in_ms: int = 0


class _Asked(Generic[Q, A]):
    """Questions about partitions: ``open`` until each is among ``answers`` or given up."""

    def __init__(self, questions: Mapping[TopicPartition, Q], give_up: GiveUp | None) -> None:
        self.open = dict(questions)
        self.answers: dict[TopicPartition, A] = {}
        self._give_up = give_up
        self._refusals: dict[TopicPartition, PenstockError] = {}  # The last ones.

    def heard(self, partition: TopicPartition, answer: A | PenstockError) -> None:
        """A leader answered. Raises a refusal for good where nothing is given up."""
        if not isinstance(answer, PenstockError):
            self.answers[partition] = answer
            del self.open[partition]
        elif answer.retriable:
            # That the last time to ask again was too short tells less than what a leader has said.
            if partition not in self._refusals or not isinstance(answer, RequestTimedOutError):
                self._refusals[partition] = answer
        else:
            self.drop(answer, partition)

    def drop(self, error: PenstockError, *partitions: TopicPartition) -> None:
        """Give these up, or raise why."""
        for partition in partitions:
            if self._give_up is None or isinstance(error, ClientClosedError):
                raise error
            self._give_up(partition, error)
            del self.open[partition]

    def drop_late(self) -> None:
        """The time is over."""
        for partition in list(self.open):
            late = RequestTimedOutError(f"the leader of {partition} did not answer in time")
            self.drop(self._refusals.get(partition, late), partition)


class LeaderCalls:
    """Sends each partition's question to its leader and follows where it moves.

    Belongs to one event loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        keeper: MetadataKeeper,
        isolation_level: common_pb2.IsolationLevel.ValueType = (
            common_pb2.ISOLATION_LEVEL_READ_UNCOMMITTED
        ),
    ) -> None:
        self._isolation_level = isolation_level  # What bounds the offsets that are found.
        self._cluster = cluster
        self._keeper = keeper
        self._failures: dict[int, PenstockError] = {}  # Of the last call of each broker.

    def failure_of(self, partition: TopicPartition) -> PenstockError | None:
        """Why the partition's leader did not answer what it was asked last; None if it did."""
        leader = self._cluster.metadata.leader(partition)
        return self._failures.get(leader.node_id) if leader is not None else None

    async def list_offsets(
        self,
        times_ms: Mapping[TopicPartition, int],
        timeout_ms: float,
        topic_ids: TopicIds | None = None,
        on_answer: Callable[[TopicPartition, OffsetAndTimestamp], object] | None = None,
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Offsets by time: -1 the end, -2 the start, -3 the largest timestamp.

        With ``topic_ids`` those of these very topics: raises UnknownTopicIdError when another
        topic has the name now. ``on_answer`` hears of each partition as soon as its leader
        answered, whatever becomes of the others.
        """
        ids = topic_ids or {}

        async def ask(
            node_id: int, part: Mapping[TopicPartition, int], remaining_ms: float
        ) -> Outcome[OffsetAndTimestamp]:
            outcome = await self._list_offsets_at(node_id, part, remaining_ms, ids)
            for partition, answer in outcome.items():
                if on_answer is not None and not isinstance(answer, PenstockError):
                    on_answer(partition, answer)
            return outcome

        return await self._ask_leaders(times_ms, ask, timeout_ms, ids)

    async def delete_records(
        self, before_offsets: Mapping[TopicPartition, int], timeout_ms: float
    ) -> dict[TopicPartition, int]:
        """Delete what is before the offsets; the new log start offsets."""
        return await self._ask_leaders(before_offsets, self._delete_records_at, timeout_ms)

    async def describe_producers(
        self,
        partitions: Iterable[TopicPartition],
        timeout_ms: float,
        give_up: GiveUp | None = None,
    ) -> dict[TopicPartition, PartitionProducers]:
        """What the partitions' logs know of producers; without those given up, see GiveUp."""

        async def ask(
            node_id: int, part: Mapping[TopicPartition, None], remaining_ms: float
        ) -> Outcome[PartitionProducers]:
            describe = partial(self._describe_producers_at, node_id)
            outcome: Outcome[PartitionProducers] = {}
            for some, found in await _in_parts(list(part), describe, remaining_ms):
                if isinstance(found, PenstockError):
                    outcome |= dict.fromkeys(some, found)
                else:
                    outcome |= found
            return outcome

        return await self._ask_leaders(dict.fromkeys(partitions), ask, timeout_ms, give_up=give_up)

    async def check_hanging(
        self, transactions: Sequence[HangingTransaction], timeout_ms: float
    ) -> HangingVerdicts:
        """Which of them hang; see HangingVerdicts.

        Those whose leaders don't answer in time have the reason for that as their verdict.
        """
        questions: dict[TopicPartition, list[HangingTransaction]] = {}
        for one in transactions:
            questions.setdefault(one.partition, []).append(one)
        verdicts: dict[HangingTransaction, PenstockError | None] = {}
        sure_in_ms = 0

        async def ask(
            node_id: int,
            part: Mapping[TopicPartition, list[HangingTransaction]],
            remaining_ms: float,
        ) -> Outcome[None]:
            nonlocal sure_in_ms
            asked = [one for candidates in part.values() for one in candidates]
            outcome: Outcome[None] = dict.fromkeys(part)
            check = partial(self._check_hanging_at, node_id)
            for some, judged in await _in_parts(asked, check, remaining_ms):
                if isinstance(judged, PenstockError):
                    outcome |= {one.partition: judged for one in some}
                    continue
                sure_in_ms = max(sure_in_ms, judged.sure_in_ms)
                for one, error in judged.verdicts.items():
                    # What coordinators can't tell says nothing of who leads the partition.
                    of_coordinators = isinstance(error, CoordinatorNotAvailableError)
                    if error is not None and error.refresh_metadata and not of_coordinators:
                        outcome[one.partition] = error  # Another broker leads it.
                    else:
                        verdicts[one] = error
            return outcome

        def give_up(partition: TopicPartition, error: PenstockError) -> None:
            for one in questions[partition]:
                verdicts.setdefault(one, error)

        await self._ask_leaders(questions, ask, timeout_ms, give_up=give_up)
        return HangingVerdicts(verdicts, sure_in_ms)

    async def _check_hanging_at(
        self, node_id: int, asked: Sequence[HangingTransaction], remaining_ms: float
    ) -> HangingVerdicts:
        request = transactions_pb2.CheckHangingRequest(
            transactions=[
                transactions_pb2.AbortHangingRequest(
                    partition=self._cluster.metadata.to_proto(one.partition),
                    producer_id=one.producer_id,
                    start_offset=one.start_offset,
                )
                for one in asked
            ]
        )
        response = await self._call_transactions(node_id, "CheckHanging", request, remaining_ms)
        if len(response.results) != len(asked):
            raise UnknownServerError(
                f"broker {node_id} was asked about {len(asked)} transactions and answered for "
                f"{len(response.results)}"
            )
        errors = [error_from_proto(one) if one.code else None for one in response.results]
        return HangingVerdicts(dict(zip(asked, errors, strict=True)), response.sure_in_ms)

    async def abort_hanging(
        self,
        partition: TopicPartition,
        producer_id: int,
        start_offset: int,
        timeout_ms: float,
        *,
        force: bool,
    ) -> None:
        """End the transaction that begins there. Raises InvalidTxnStateError if none does."""

        async def ask(
            node_id: int, part: Mapping[TopicPartition, None], remaining_ms: float
        ) -> Outcome[None]:
            request = transactions_pb2.AbortHangingRequest(
                partition=self._cluster.metadata.to_proto(partition),
                producer_id=producer_id,
                start_offset=start_offset,
                force=force,
            )
            response = await self._call_transactions(node_id, "AbortHanging", request, remaining_ms)
            error = error_from_proto(response.error) if response.HasField("error") else None
            return dict.fromkeys(part, error)

        await self._ask_leaders({partition: None}, ask, timeout_ms)

    async def _ask_leaders(
        self,
        questions: Mapping[TopicPartition, Q],
        ask: Callable[[int, Mapping[TopicPartition, Q], float], Awaitable[Outcome[A]]],
        timeout_ms: float,
        topic_ids: TopicIds | None = None,
        give_up: GiveUp | None = None,
    ) -> dict[TopicPartition, A]:
        topic_ids = topic_ids or {}
        deadline = now_ms() + timeout_ms
        asked: _Asked[Q, A] = _Asked(questions, give_up)
        attempt = 0
        for topic in sorted({partition.topic for partition in questions}):
            try:
                await self._keeper.await_topic(topic, max(1.0, deadline - now_ms()))
            except PenstockError as error:
                asked.drop(error, *(one for one in questions if one.topic == topic))
        while self._drop_gone(asked, topic_ids):
            outcomes = await asyncio.gather(
                *(
                    self._ask_one(ask, node_id, part, deadline - now_ms())
                    for node_id, part in self._by_leader(asked.open).items()
                )
            )
            for outcome in outcomes:
                for partition, answer in outcome.items():
                    asked.heard(partition, answer)
                    if isinstance(answer, PenstockError) and answer.leader is not None:
                        topic_id = topic_ids.get(partition, b"")
                        self._cluster.metadata.apply_hint(partition, answer.leader, topic_id)
            if not self._drop_gone(asked, topic_ids):
                break
            remaining = deadline - now_ms()
            if remaining <= 0:
                asked.drop_late()
                break
            await self._pause(attempt, remaining)
            attempt += 1
        return {one: asked.answers[one] for one in questions if one in asked.answers}

    def _drop_gone(self, asked: _Asked[Q, A], topic_ids: TopicIds) -> bool:
        """Give up what nobody will ever lead; whether something is left."""
        for partition in list(asked.open):
            gone = self._why_gone(partition, topic_ids)
            if gone is not None:
                asked.drop(gone, partition)
        return bool(asked.open)

    async def _pause(self, attempt: int, remaining_ms: float) -> None:
        """Wait for news of the leaders."""
        pause_ms = self._cluster.backoff.delay_ms(attempt)
        await self._keeper.updated(min(remaining_ms, pause_ms))
        # A leader that answers "not yet" at once must not be asked in a busy loop.
        await asyncio.sleep(min(remaining_ms, pause_ms / 4) / 1000)

    def _why_gone(self, partition: TopicPartition, topic_ids: TopicIds) -> PenstockError | None:
        """Why nobody will ever lead the partition, as far as is known."""
        metadata = self._cluster.metadata
        verdict = metadata.verdict(partition.topic)
        if verdict is not None:
            return type(verdict)(verdict.message)
        count = metadata.partition_count(partition.topic)
        if count and not 0 <= partition.partition < count:
            return UnknownTopicOrPartitionError(
                f"topic {partition.topic!r} has no partition {partition.partition}; it has "
                f"0 to {count - 1}; next: name one of these"
            )
        if count and topic_ids.get(partition, b"") not in (b"", metadata.topic_id(partition.topic)):
            return UnknownTopicIdError(
                f"topic {partition.topic!r} was deleted and made anew while partition "
                f"{partition.partition} was asked about"
            )
        return None

    def _by_leader(
        self, questions: Mapping[TopicPartition, Q]
    ) -> dict[int, dict[TopicPartition, Q]]:
        by_node: dict[int, dict[TopicPartition, Q]] = {}
        for partition, question in questions.items():
            leader = self._cluster.metadata.leader(partition)
            by_node.setdefault(leader.node_id if leader else -1, {})[partition] = question
        return by_node

    async def _ask_one(
        self,
        ask: Callable[[int, Mapping[TopicPartition, Q], float], Awaitable[Outcome[A]]],
        node_id: int,
        part: Mapping[TopicPartition, Q],
        remaining_ms: float,
    ) -> Outcome[A]:
        if node_id < 0:
            return {entry: no_leader((entry,)) for entry in part}
        try:
            outcome = await ask(node_id, part, remaining_ms)
        except PenstockError as error:
            self._failures[node_id] = error
            self._keeper.request(avoid=node_id)
            return dict.fromkeys(part, error)
        self._failures.pop(node_id, None)
        return outcome

    async def _call_transactions(
        self, node_id: int, method: str, request: Any, remaining_ms: float
    ) -> Any:
        return await self._cluster.call(
            node_id,
            lambda channel: getattr(transactions_pb2_grpc.TransactionsStub(channel), method),
            request,
            timeout_ms=min(remaining_ms, self._cluster.config.request_timeout_ms),
            what=f"Transactions.{method}",
        )

    async def _describe_producers_at(
        self, node_id: int, partitions: Sequence[TopicPartition], remaining_ms: float
    ) -> Outcome[PartitionProducers]:
        request = transactions_pb2.DescribeProducersRequest(
            partitions=[self._cluster.metadata.to_proto(entry) for entry in partitions]
        )
        response = await self._call_transactions(
            node_id, "DescribeProducers", request, remaining_ms
        )
        return {
            admin_values.partition(entry.partition): error_from_proto(entry.error)
            if entry.HasField("error")
            else admin_values.partition_producers(entry)
            for entry in response.partitions
        }

    async def _call(self, node_id: int, method: str, request: Any, remaining_ms: float) -> Any:
        return await self._cluster.call(
            node_id,
            lambda channel: getattr(log_pb2_grpc.LogStub(channel), method),
            request,
            timeout_ms=min(remaining_ms, self._cluster.config.request_timeout_ms),
            what=f"Log.{method}",
        )

    def _proto(self, partition: TopicPartition, topic_ids: TopicIds) -> common_pb2.TopicPartition:
        proto = self._cluster.metadata.to_proto(partition)
        proto.topic_id = topic_ids.get(partition, proto.topic_id)
        return proto

    async def _list_offsets_at(
        self,
        node_id: int,
        times_ms: Mapping[TopicPartition, int],
        remaining_ms: float,
        topic_ids: TopicIds,
    ) -> Outcome[OffsetAndTimestamp]:
        request = log_pb2.ListOffsetsRequest(isolation_level=self._isolation_level)
        for partition, time_ms in times_ms.items():
            request.partitions.add(
                partition=self._proto(partition, topic_ids),
                timestamp_ms=time_ms,
                current_leader_epoch=-1,
            )
        response = await self._call(node_id, "ListOffsets", request, remaining_ms)
        return {
            TopicPartition(entry.partition.topic, entry.partition.partition): error_from_proto(
                entry.error
            )
            if entry.HasField("error")
            else OffsetAndTimestamp(entry.offset, entry.timestamp_ms, entry.leader_epoch)
            for entry in response.partitions
        }

    async def _delete_records_at(
        self, node_id: int, offsets: Mapping[TopicPartition, int], remaining_ms: float
    ) -> Outcome[int]:
        request = log_pb2.DeleteRecordsRequest(timeout_ms=max(1, int(remaining_ms)))
        for partition, offset in offsets.items():
            request.partitions.add(
                partition=self._cluster.metadata.to_proto(partition), before_offset=offset
            )
        response = await self._call(node_id, "DeleteRecords", request, remaining_ms)
        return {
            TopicPartition(entry.partition.topic, entry.partition.partition): error_from_proto(
                entry.error
            )
            if entry.HasField("error")
            else entry.low_watermark
            for entry in response.partitions
        }


async def _in_parts(
    wanted: Sequence[W],
    ask: Callable[[Sequence[W], float], Awaitable[A]],
    remaining_ms: float,
) -> list[tuple[Sequence[W], A | PenstockError]]:
    """Ask a leader about so many at a time, in some requests at once.

    Each part has its answer, or why it has none: one that fails takes nothing from the others.
    Raises PenstockError where none was answered.
    """
    deadline_ms = now_ms() + remaining_ms
    turn = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def ask_one(part: Sequence[W]) -> tuple[Sequence[W], A | PenstockError]:
        async with turn:
            try:
                return part, await ask(part, max(1.0, deadline_ms - now_ms()))
            except PenstockError as error:
                return part, error

    starts = range(0, len(wanted), _ASKED_AT_ONCE)
    answers = await gather_all([ask_one(wanted[at : at + _ASKED_AT_ONCE]) for at in starts])
    errors = [answer for _, answer in answers if isinstance(answer, PenstockError)]
    if errors and len(errors) == len(answers):
        raise errors[0]
    return answers
