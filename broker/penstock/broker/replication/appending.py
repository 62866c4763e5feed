"""What producers append: checked, written, and answered for once it is where ``acks`` asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.broker.core.ports import AppendInfo
from penstock.broker.core.verification import Marked, Question, is_behind
from penstock.broker.replication.answers import not_enough_replicas
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.ports import AskCoordinator
from penstock.broker.replication.verifying import Verifying
from penstock.v1 import common_pb2
from penstock.wire.batch import TRANSACTIONAL, Buffer, iter_batches
from penstock.wire.errors import (
    DiskFullError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    NotLeaderError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.ids import TopicIdPartition
from penstock.wire.transactional_ids import check_writing_id

OnAppended = Callable[[AppendInfo | BaseException], object]
"""Is given what became of an append, once: where it is, or the error. It must not raise."""

_ACKS: Final = (common_pb2.ACKS_NONE, common_pb2.ACKS_LEADER, common_pb2.ACKS_ALL)


_ATTRIBUTES_AT: Final = 22
"""Where a batch says that it is of a transaction."""


class Target(NamedTuple):
    """The partition that a producer means."""

    topic: str
    topic_id: bytes
    partition: int
    current_leader_epoch: int = -1


class _Waiting(NamedTuple):
    """Who waits for a coordinator, and is called once.

    ``go``: the transaction may write, because the coordinator said so, itself or by a mark (True),
    or because it is open.
    """

    go: Callable[[bool], object]
    refuse: Callable[[PenstockError], object]


class Appends:
    """Appends to what this broker leads. Used on one event loop.

    ``locate`` gives the partition, or raises the typed refusal; ``find`` whatever is hosted.
    ``ask_coordinator`` has partitions taken into transactions.
    """

    def __init__(
        self,
        node_id: int,
        locate: Callable[[str, bytes, int, int], Partition],
        find: Callable[[TopicIdPartition], Partition | None],
        wall_clock_ms: Callable[[], int],
        *,
        clock_ms: Callable[[], int],
        ask_coordinator: AskCoordinator,
    ) -> None:
        self._node_id = node_id
        self._locate = locate
        self._find = find
        self._wall_clock_ms = wall_clock_ms
        self._verifying: Verifying[_Waiting] = Verifying(
            ask_coordinator,
            append=lambda waiting, verified: waiting.go(verified),
            refuse=lambda waiting, error: waiting.refuse(error),
            is_behind=self._is_behind,
            clock_ms=clock_ms,
        )

    def begin(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        on_end: OnAppended,
    ) -> None:
        """Append now, so calls append in their order; ``on_end`` learns of the acknowledgement.

        It may be called before this returns. With ACKS_LEADER the batch is durable here, with
        ACKS_ALL it is committed: durable on the whole in-sync set. After NotLeaderError,
        NotEnoughReplicasAfterAppendError and RequestTimedOutError the batch may be in the log.
        No task is made, and no turn of the event loop waited for: of a small record's time these
        were a tenth.
        """
        try:
            if acks not in _ACKS:
                raise InvalidRequiredAcksError(
                    f"acks={acks} is not known; send ACKS_NONE, ACKS_LEADER or ACKS_ALL"
                )
            # One byte of the first batch: all else that is wrong with it the log tells.
            if len(records) > _ATTRIBUTES_AT and records[_ATTRIBUTES_AT] & TRANSACTIONAL:
                raise InvalidRequestError(
                    "the batch is of a transaction, but the request has no transactional id; "
                    "nothing was appended: name the id of its InitProducerId"
                )
            partition = self._locate(*target)
            info = self._write(partition, records, acks)
        except Exception as error:
            on_end(error)
            return
        self._acknowledge(partition, info, acks, timeout_ms, on_end)

    def begin_transactional(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        on_end: OnAppended,
        *,
        transactional_id: str,
    ) -> None:
        """As ``begin`` with ACKS_ALL, for batches of one transaction.

        They are appended now where the transaction is open in the log, or a mark has said that the
        partition is in it. Else its coordinator is asked first, within the timeout, and what comes
        of that transaction meanwhile is appended behind it. Raises to ``on_end`` what the
        coordinator refuses them with too; InvalidRequiredAcksError, InvalidTransactionalIdError and
        InvalidRequestError for requests that no transaction can have.
        """
        kept = bytes(records)  # What it may be a part of is larger, and would not be counted.
        deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000

        def go(verified: bool) -> None:
            known = producer if verified else None
            self._begin_verified(target, kept, deadline_s, on_end, verified=known)

        waiting = _Waiting(go, on_end)
        try:
            if acks != common_pb2.ACKS_ALL:
                raise InvalidRequiredAcksError(
                    "what belongs to a transaction must be on the whole in-sync set before it is "
                    "answered: send ACKS_ALL"
                )
            partition = self._locate(*target)
            producer = _producer_of(records, partition)
            self._verify(
                partition, transactional_id, producer, timeout_ms, waiting, size_bytes=len(kept)
            )
        except Exception as error:
            on_end(error)

    async def append(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        *,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """``begin``, and return what it ends with, or raise it.

        The append itself happens before the first suspension. With ``verified`` (producer id and
        epoch), for which ``verify`` has returned, it is of that transaction, with ACKS_ALL.
        """
        future: asyncio.Future[AppendInfo] = asyncio.get_running_loop().create_future()

        def ended(outcome: AppendInfo | BaseException) -> None:
            if future.done():
                return  # Whoever waited has given up.
            if isinstance(outcome, AppendInfo):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        if verified is None:
            self.begin(target, records, acks, timeout_ms, ended)
        else:
            deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
            self._begin_verified(target, records, deadline_s, ended, verified=verified)
        return await future

    async def verify(
        self, target: Target, transactional_id: str, producer: tuple[int, int], timeout_ms: int
    ) -> None:
        """Return once the producer's transaction may write to a partition led here.

        Behind what waits of it already, as a batch. Raises what its coordinator refuses it with,
        and what ``begin_transactional`` does before it asks.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go(_verified: bool) -> None:
            if not future.done():
                future.set_result(None)

        def refuse(error: PenstockError) -> None:
            if not future.done():
                future.set_exception(error)

        partition = self._locate(*target)
        self._verify(partition, transactional_id, producer, timeout_ms, _Waiting(go, refuse))
        await future

    def marked(self, mark: Marked) -> None:
        """A mark is in the log of a partition led here: what it lets in is appended now."""
        self._verifying.marked(mark)

    def leadership_ended(self, key: TopicIdPartition, error: PenstockError) -> None:
        """What waits for a coordinator to write to the partition is refused."""
        self._verifying.leadership_ended(key, error)

    def stop(self) -> None:
        """What waits for coordinators is refused."""
        self._verifying.stop(
            NotLeaderError(f"broker {self._node_id} stops; nothing was appended, look for another")
        )

    def _verify(
        self,
        partition: Partition,
        transactional_id: str,
        producer: tuple[int, int],
        timeout_ms: int,
        waiting: _Waiting,
        *,
        size_bytes: int = 0,
    ) -> None:
        check_writing_id(transactional_id)
        if partition.replica.under_min_isr:
            raise _too_few(partition)  # What can't be appended is not asked for.
        self._verifying.take(
            Question(partition.key, transactional_id, *producer),
            waiting,
            is_open=partition.log.has_open_transaction(*producer),
            size_bytes=size_bytes,
            timeout_ms=timeout_ms,
        )

    def _is_behind(self, question: Question) -> bool:
        partition = self._find(question.partition)
        producer = question.producer_id, question.producer_epoch
        return partition is not None and is_behind(partition.log.producers, *producer)

    def _begin_verified(
        self,
        target: Target,
        records: Buffer,
        deadline_s: float,
        on_end: OnAppended,
        *,
        verified: tuple[int, int] | None,
    ) -> None:
        try:
            partition = self._locate(*target)
            info = self._write(partition, records, common_pb2.ACKS_ALL, verified=verified)
        except Exception as error:
            on_end(error)
            return
        left_s = max(deadline_s - asyncio.get_running_loop().time(), 0)
        self._acknowledge(partition, info, common_pb2.ACKS_ALL, round(left_s * 1000), on_end)

    def _acknowledge(
        self,
        partition: Partition,
        info: AppendInfo,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        on_end: OnAppended,
    ) -> None:
        """Have ``on_end`` called when what was appended is where ``acks`` asks."""
        end_offset = info.last_offset + 1
        if acks == common_pb2.ACKS_LEADER:
            passed, waiters = partition.log.durable_offset, partition.durable_waiters
        else:
            passed, waiters = partition.replica.high_watermark, partition.commit_waiters
        if acks == common_pb2.ACKS_NONE or passed >= end_offset:
            on_end(info)
            return

        def ended(error: BaseException | None) -> None:
            timer.cancel()
            on_end(info if error is None else error)

        def overdue() -> None:
            call.cancel()
            on_end(self._too_late(partition, end_offset, timeout_ms))

        call = waiters.call(end_offset, ended)
        timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, overdue)

    def _write(
        self,
        partition: Partition,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        if acks == common_pb2.ACKS_ALL and partition.replica.under_min_isr:
            raise _too_few(partition)
        try:
            return partition.append_as_leader(
                records, wall_ms=self._wall_clock_ms(), verified=verified
            )
        except DiskFullError as error:
            raise DiskFullError(f"broker {self._node_id}: {error.message}") from error

    def _too_late(self, partition: Partition, offset: int, timeout_ms: int) -> PenstockError:
        replica = partition.replica
        behind = sorted(
            node_id
            for node_id, follower in replica.followers().items()
            if node_id in replica.maximal_isr and follower.log_end_offset < offset
        )
        return RequestTimedOutError(
            f"{partition.name}: appended here, but not acknowledged by in-sync broker(s) "
            f"{', '.join(map(str, behind)) or self._node_id} within {timeout_ms} ms; it may yet "
            "be committed"
        )


def _too_few(partition: Partition) -> PenstockError:
    replica = partition.replica
    return not_enough_replicas(partition.name, replica.isr, replica.min_isr, replica.replicas)


def _producer_of(records: Buffer, partition: Partition) -> tuple[int, int]:
    """The producer id and epoch of batches that are all of one transaction.

    Raises InvalidRequestError where they are not, and CorruptRecordError.
    """
    producers = set()
    for header, _ in iter_batches(records):
        if not header.is_transactional or header.is_control or header.producer_id < 0:
            raise InvalidRequestError(
                f"{partition.name}: the request has a transactional id, but a batch that no "
                "producer writes in a transaction; nothing was appended: set attribute bit 4 and "
                "the producer id of its InitProducerId, or send it without transactional id"
            )
        producers.add((header.producer_id, header.producer_epoch))
    if len(producers) != 1:
        raise InvalidRequestError(
            f"{partition.name}: the request has batches of {len(producers)} producers; a request "
            "with a transactional id carries those of one; nothing was appended"
        )
    return producers.pop()
