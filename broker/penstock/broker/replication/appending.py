"""What producers append: checked, written, and answered for once it is where ``acks`` asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.broker.core.ports import AppendInfo
from penstock.broker.replication.answers import not_enough_replicas
from penstock.broker.replication.partition import Partition
from penstock.v1 import common_pb2
from penstock.wire.batch import Buffer
from penstock.wire.errors import (
    DiskFullError,
    InvalidRequiredAcksError,
    PenstockError,
    RequestTimedOutError,
)

OnAppended = Callable[[AppendInfo | BaseException], object]
"""Is given what became of an append, once: where it is, or the error. It must not raise."""

_ACKS: Final = (common_pb2.ACKS_NONE, common_pb2.ACKS_LEADER, common_pb2.ACKS_ALL)


class Target(NamedTuple):
    """The partition that a producer means."""

    topic: str
    topic_id: bytes
    partition: int
    current_leader_epoch: int = -1


class Appends:
    """Appends to what this broker leads. Used on one event loop.

    ``locate`` gives the partition, or raises the typed refusal.
    """

    def __init__(
        self,
        node_id: int,
        locate: Callable[[str, bytes, int, int], Partition],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._locate = locate
        self._wall_clock_ms = wall_clock_ms

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
            partition = self._locate(*target)
            info = self._write(partition, records, acks)
        except Exception as error:
            on_end(error)
            return
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

    async def append(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
    ) -> AppendInfo:
        """``begin``, and return what it ends with, or raise it.

        The append itself happens before the first suspension.
        """
        future: asyncio.Future[AppendInfo] = asyncio.get_running_loop().create_future()

        def ended(outcome: AppendInfo | BaseException) -> None:
            if future.done():
                return  # Whoever waited has given up.
            if isinstance(outcome, AppendInfo):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        self.begin(target, records, acks, timeout_ms, ended)
        return await future

    def _write(
        self, partition: Partition, records: Buffer, acks: common_pb2.Acks.ValueType
    ) -> AppendInfo:
        replica = partition.replica
        if acks == common_pb2.ACKS_ALL and replica.under_min_isr:
            raise not_enough_replicas(
                partition.name, replica.isr, replica.min_isr, replica.replicas
            )
        try:
            return partition.append_as_leader(records, wall_ms=self._wall_clock_ms())
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
