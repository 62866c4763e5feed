"""Transactions in the partitions that this broker leads: the marks that end them, what is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Final, NamedTuple

import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.producer_entry import ProducerEntry
from penstock.broker.core.producer_stage import check_marker
from penstock.broker.core.transactions import Marker, OpenTransaction
from penstock.broker.core.verification import Marked
from penstock.broker.replication.admitting import check_cluster
from penstock.broker.replication.answers import not_enough_replicas
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.purgatory import Call
from penstock.v1 import common_pb2, coordination_pb2, transactions_pb2
from penstock.wire.errors import (
    DiskFullError,
    InvalidRequestError,
    InvalidTxnStateError,
    PenstockError,
    RequestTimedOutError,
    TransactionTornError,
    UnknownServerError,
)
from penstock.wire.ids import TopicIdPartition, TopicPartition

_COMMIT_TIMEOUT_S: Final = 2.0
"""So long the marks of one partition may hold up the answer about those of others."""

_MAX_EPOCH: Final = 2**15 - 1
_NO_COORDINATOR: Final = -1  # In the mark of a hanging transaction.
_IDLE_PRODUCERS_TOLD: Final = 1_000

MarkListener = Callable[[str, int, int, Sequence[Marker], int], object]
"""Called with topic, partition, leader epoch, marks and log end once this broker has appended them
as the leader, before they are committed. Some of the marks may have been there. It must not raise.
"""

logger = structlog.get_logger()


class _Place(NamedTuple):
    """A partition as a request names it."""

    topic: str
    topic_id: bytes
    partition: int


class _Wanted(NamedTuple):
    """One mark of a request for one partition, and where its outcome goes.

    ``kept``: the partition is in the transaction after it.
    """

    marker: Marker
    outcome: common_pb2.Error
    kept: bool


class LedTransactions:
    """Ends transactions in what this broker leads, and tells what is open. Used on one event loop.

    ``locate`` gives the partition, or raises the typed refusal. ``on_mark`` is told of every mark
    that is in the log of a partition led here, and may append; it must not raise.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        locate: Callable[[str, bytes, int, int], Partition],
        wall_clock_ms: Callable[[], int],
        *,
        on_mark: Callable[[Marked], object],
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._locate = locate
        self._wall_clock_ms = wall_clock_ms
        self._on_mark = on_mark
        self._listeners: list[MarkListener] = []

    def add_mark_listener(self, listener: MarkListener) -> None:
        """Call ``listener`` whenever marks were appended."""
        self._listeners.append(listener)

    # --- Marks --------------------------------------------------------------------------------

    async def write_markers(
        self, request: coordination_pb2.WriteMarkersRequest
    ) -> coordination_pb2.WriteMarkersResponse:
        """``begin_markers``, and return what it ends with. Raises nothing."""
        answered: asyncio.Future[coordination_pb2.WriteMarkersResponse]
        answered = asyncio.get_running_loop().create_future()

        def answer(response: coordination_pb2.WriteMarkersResponse) -> None:
            if not answered.done():  # Else whoever waited has given up.
                answered.set_result(response)

        self.begin_markers(request, answer)
        return await answered

    def begin_markers(
        self,
        request: coordination_pb2.WriteMarkersRequest,
        on_end: Callable[[coordination_pb2.WriteMarkersResponse], object],
    ) -> None:
        """End transactions; ``on_end`` gets the answer when all marks are committed, or refused for
        a reason each. It may be called before this returns, and must not raise.

        The marks of a request for one partition are appended together, before this returns. One
        that is there already is not appended again, but answered only when it is committed as well.
        As with a producer's acks=all nothing is appended where too few replicas are in sync. One
        that contradicts the mark under its epoch is refused with TRANSACTION_TORN once that one is
        committed, when this partition's part has ended the other way for ever. After
        RequestTimedOutError, NotLeaderError and NotEnoughReplicasAfterAppendError a mark may be in
        the log: it is to be sent again in any case. Raises nothing.
        """
        response = coordination_pb2.WriteMarkersResponse()
        wanted: dict[_Place, list[_Wanted]] = {}
        for entry in request.markers:
            result = response.results.add()
            marker = Marker(
                entry.producer_id, entry.producer_epoch, entry.commit, entry.coordinator_epoch
            )
            kept = frozenset(entry.kept)
            for index, where in enumerate(entry.partitions):
                place = _Place(where.topic, where.topic_id, where.partition)
                one = _Wanted(marker, result.outcomes.add(), index in kept)
                wanted.setdefault(place, []).append(one)
        try:
            check_cluster(self._node_id, self._image, request.cluster_id)
        except PenstockError as error:
            for marks in wanted.values():
                _refuse(marks, error)
            on_end(response)
            return
        commits = [
            commit
            for place, marks in wanted.items()
            if (commit := self._append(place, list(_sound(marks)))) is not None
        ]
        _Commits(partial(on_end, response)).wait_for(commits)

    def _append(self, place: _Place, wanted: list[_Wanted]) -> _Commit | None:
        """Append what is to be marked in one partition; what is then to be waited for."""
        if not wanted:
            return None
        try:
            partition = self._locate(place.topic, place.topic_id, place.partition, -1)
            end_offset = self._mark(partition, list(_fitting(partition, wanted)))
        except PenstockError as error:
            _refuse(wanted, error)
            return None
        except Exception as error:
            # One broken partition must not keep the marks of all the others waiting.
            logger.exception("marks not written", topic=place.topic, partition=place.partition)
            failed = UnknownServerError(
                f"{place.topic}-{place.partition}: the broker failed; see its log ({error!r})"
            )
            _refuse(wanted, failed)
            return None
        return _Commit(partition, end_offset, wanted)

    def _mark(self, partition: Partition, wanted: list[_Wanted]) -> int:
        """Have the marks in the log, and what they let in behind them; where they end at most."""
        markers = [one.marker for one in wanted]
        replica = partition.replica
        if replica.under_min_isr:
            raise not_enough_replicas(
                partition.name, replica.isr, replica.min_isr, replica.replicas
            )
        # Where the producer goes on here, its next batch is on its way and nobody waits before.
        goes_on = all(one.kept for one in wanted)
        try:
            info = partition.append_markers(
                markers, wall_ms=self._wall_clock_ms(), may_wait=goes_on
            )
        except DiskFullError as error:
            raise DiskFullError(f"broker {self._node_id}: {error.message}") from error
        if info.size_bytes:
            topic, number = partition.name
            for listener in self._listeners:
                listener(topic, number, replica.leader_epoch, markers, info.last_offset + 1)
        end_offset = partition.log.log_end_offset
        known, key = partition.log.producers, partition.key
        for mark in [Marked.of(known, key, one.marker, kept=one.kept) for one in wanted]:
            self._on_mark(mark)
        return end_offset

    async def _wait_committed(self, partition: Partition, end_offset: int) -> None:
        if partition.replica.high_watermark >= end_offset:
            return
        try:
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                await partition.commit_waiters.add(end_offset)
        except TimeoutError:
            raise _too_late(partition) from None

    # --- What people ask ----------------------------------------------------------------------

    async def describe_producers(
        self, request: transactions_pb2.DescribeProducersRequest
    ) -> transactions_pb2.DescribeProducersResponse:
        """What the logs know of producers. Raises nothing. Others get their turn in between."""
        response = transactions_pb2.DescribeProducersResponse()
        for where in request.partitions:
            entry = response.partitions.add(partition=where)
            try:
                partition = self._locate(where.topic, where.topic_id, where.partition, -1)
            except PenstockError as error:
                entry.error.CopyFrom(error.to_proto())
            else:
                _describe(partition, entry)
                await asyncio.sleep(0)  # A log may know thousands.
        return response

    def look_at(self, request: transactions_pb2.AbortHangingRequest) -> OpenPlace | PenstockError:
        """The transaction that a request names, or why there is none."""
        where = request.partition
        try:
            partition = self._locate(where.topic, where.topic_id, where.partition, -1)
            found = _open_at(partition, request.producer_id, request.start_offset)
        except PenstockError as error:
            return error
        return OpenPlace(partition.name, partition.key, *found)

    async def abort_hanging(
        self,
        request: transactions_pb2.AbortHangingRequest,
        checked: OpenPlace | None = None,
    ) -> transactions_pb2.AbortHangingResponse:
        """End a transaction that no coordinator knows of with a mark of its own; when committed.

        ``checked`` is the one of which it was found out that it hangs: no other one is ended. None
        where a person wants it ended whatever coordinators know.
        """
        where = request.partition
        try:
            if checked is not None and (now := self.look_at(request)) != checked:
                raise (
                    now
                    if isinstance(now, PenstockError)
                    else InvalidTxnStateError(
                        f"{checked.name}: the transaction that hung has ended, and another one is "
                        "open; nothing was done"
                    )
                )
            partition = self._locate(where.topic, where.topic_id, where.partition, -1)
            found = _open_at(partition, request.producer_id, request.start_offset)
            epoch = found.producer_epoch + 1
            if epoch > _MAX_EPOCH:
                raise InvalidTxnStateError(
                    f"{partition.name}: the transaction has the last epoch there is, and a mark "
                    "needs a later one; nothing was done"
                )
            marker = Marker(found.producer_id, epoch, False, _NO_COORDINATOR)
            end_offset = self._mark(partition, [_Wanted(marker, common_pb2.Error(), kept=False)])
            logger.warning(
                "hanging transaction aborted",
                partition=str(partition.name),
                producer_id=found.producer_id,
                producer_epoch=found.producer_epoch,
                start_offset=found.first_offset,
                forced=checked is None,
                next_step="look after what was lost: a transaction hangs only where records of "
                "__transaction_state or of the partition are gone",
            )
            await self._wait_committed(partition, end_offset)
        except PenstockError as error:
            return transactions_pb2.AbortHangingResponse(error=error.to_proto())
        return transactions_pb2.AbortHangingResponse()


class OpenPlace(NamedTuple):
    """A transaction that is open in a log that is led here."""

    name: TopicPartition
    key: TopicIdPartition
    producer_id: int
    producer_epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Commit:
    """Marks that are answered once the log is committed up to an offset."""

    partition: Partition
    end_offset: int
    wanted: list[_Wanted]


class _Commits:
    """Waits until the marks of one request are committed, then calls ``on_end`` once.

    No task is made, for the request or for a partition, and one timer serves all of them.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self._left: dict[_Commit, Call] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait_for(self, commits: list[_Commit]) -> None:
        """Begin to wait. With nothing to wait for it ends at once."""
        for commit in commits:
            partition = commit.partition
            if partition.replica.high_watermark < commit.end_offset:
                ended = partial(self._ended, commit)
                self._left[commit] = partition.commit_waiters.call(commit.end_offset, ended)
        if not self._left:
            self._on_end()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_COMMIT_TIMEOUT_S, self._overdue)

    def _ended(self, commit: _Commit, error: BaseException | None) -> None:
        if isinstance(error, PenstockError):
            _refuse(commit.wanted, error)
        elif error is not None:
            failed = f"{commit.partition.name}: the broker failed ({error!r})"
            _refuse(commit.wanted, UnknownServerError(failed))
        del self._left[commit]
        if not self._left:
            if self._timer is not None:
                self._timer.cancel()
            self._on_end()

    def _overdue(self) -> None:
        for commit, call in self._left.items():
            call.cancel()
            _refuse(commit.wanted, _too_late(commit.partition))
        self._left.clear()
        self._on_end()


def _too_late(partition: Partition) -> PenstockError:
    return RequestTimedOutError(
        f"{partition.name}: the marks are in the log, but were not committed within "
        f"{_COMMIT_TIMEOUT_S:g} s; send them again"
    )


def _sound(wanted: list[_Wanted]) -> Iterator[_Wanted]:
    """The marks that can be written; the others are refused."""
    for one in wanted:
        marker = one.marker
        if marker.producer_id >= 0 and 0 <= marker.producer_epoch <= _MAX_EPOCH:
            yield one
            continue
        error = InvalidRequestError(
            f"producer {marker.producer_id} with epoch {marker.producer_epoch} can't have a mark; "
            f"ids begin at 0, and epochs are at most {_MAX_EPOCH}"
        )
        _refuse([one], error)


def _fitting(partition: Partition, wanted: list[_Wanted]) -> Iterator[_Wanted]:
    """The marks that the log does not contradict; the others are refused.

    Their coordinator takes them for done. So it is not TRANSACTION_TORN where the producer has gone
    on since without its coordinator's knowledge: what is open then nobody would end.
    """
    for one in wanted:
        try:
            check_marker(one.marker, partition.log.producers.entry(one.marker.producer_id))
        except TransactionTornError as error:
            message = f"{partition.name}: {error.message}"
            begun = None if one.kept else _open_of(partition, one.marker.producer_id)
            if begun is None:
                _refuse([one], TransactionTornError(message))
            else:
                _refuse([one], _begun_behind(message, begun))
        else:
            yield one


def _begun_behind(message: str, begun: OpenTransaction) -> InvalidTxnStateError:
    return InvalidTxnStateError(
        f"{message}. The producer has another one open at offset {begun.first_offset}, and its "
        "coordinator does not say that it goes on here; next: end that one with `penstock "
        "transactions abort --force` and its place, and find out what was lost"
    )


def _refuse(wanted: list[_Wanted], error: PenstockError) -> None:
    for one in wanted:
        one.outcome.CopyFrom(error.to_proto())


def _open_of(partition: Partition, producer_id: int) -> OpenTransaction | None:
    """What a producer has open."""
    opened = partition.log.open_transactions()
    return next((one for one in opened if one.producer_id == producer_id), None)


def _open_at(partition: Partition, producer_id: int, start_offset: int) -> OpenTransaction:
    """The transaction that begins there. Raises InvalidTxnStateError when none is open."""
    found = _open_of(partition, producer_id)
    if found is not None and found.first_offset == start_offset:
        return found
    started = (
        "it has none open"
        if found is None
        else f"its open one begins at offset {found.first_offset}"
    )
    raise InvalidTxnStateError(
        f"{partition.name}: no transaction of producer {producer_id} that begins at offset "
        f"{start_offset} is open: {started}; nothing was done, see DescribeProducers"
    )


def _describe(partition: Partition, entry: transactions_pb2.PartitionProducers) -> None:
    log = partition.log
    entry.last_stable_offset = log.last_stable_offset(partition.replica.high_watermark)
    started = {one.producer_id: one.first_offset for one in log.open_transactions()}
    idle: list[tuple[int, ProducerEntry]] = []
    told: list[tuple[int, ProducerEntry]] = []
    for producer_id, producer in log.producers.entries():
        (told if producer_id in started else idle).append((producer_id, producer))
    told += nlargest(_IDLE_PRODUCERS_TOLD, idle, key=lambda item: item[1].last_seen_ms)
    for producer_id, producer in sorted(told, key=lambda item: item[0]):
        entry.producers.append(_described(producer_id, producer, started.get(producer_id, -1)))


def _described(
    producer_id: int, producer: ProducerEntry, start_offset: int
) -> transactions_pb2.ProducerDescription:
    last = producer.batches[-1] if producer.batches else None
    return transactions_pb2.ProducerDescription(
        producer_id=producer_id,
        producer_epoch=producer.producer_epoch,
        last_sequence=-1 if last is None else last.last_sequence,
        last_timestamp_ms=-1 if last is None else last.timestamp_ms,
        transaction_start_offset=start_offset,
    )
