"""What a coordinator asks of the replicas whose logs keep its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.broker.core.ports import AppendInfo
from penstock.broker.replication.appending import Target
from penstock.broker.replication.led_transactions import MarkListener
from penstock.v1 import common_pb2

LeadershipListener = Callable[[str, int, int, bool], None]
"""Called with topic, partition, leader epoch, and whether this broker leads now."""


class ReplicaLog(Protocol):
    """The partitions led here. ReplicaManager is one; tests have one in memory. One event loop."""

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        """Call ``listener`` at every change of what this broker leads."""
        ...

    def leader_epoch_of(self, topic: str, partition: int) -> int | None:
        """The leader epoch that this broker leads the partition in, or None."""
        ...

    def high_watermark(self, topic: str, partition: int) -> int:
        """The high watermark. Raises unless this broker leads the partition and may serve."""
        ...

    def log_start_offset(self, topic: str, partition: int) -> int:
        """The first offset of the log, or -1 when it is not here."""
        ...

    def log_end_offset(self, topic: str, partition: int) -> int:
        """The log's end. Raises unless this broker leads the partition and may serve."""
        ...

    def read_log(
        self, topic: str, partition: int, offset: int, max_bytes: int, *, to_end: bool
    ) -> bytes:
        """Whole batches from the one that holds ``offset``; empty at the end."""
        ...

    async def wait_high_watermark(self, topic: str, partition: int, offset: int) -> None:
        """Return once the high watermark is at ``offset`` or above, or raise NotLeaderError."""
        ...

    def add_mark_listener(self, listener: MarkListener) -> None:
        """Call ``listener`` whenever marks were appended to what this broker leads."""
        ...

    async def verify_transaction(
        self,
        target: Target,
        transactional_id: str,
        producer: tuple[int, int],
        timeout_ms: int,
    ) -> None:
        """Return once the producer's transaction may write to a partition led here.

        Raises what its coordinator refuses it with, and typed refusals.
        """
        ...

    async def append(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        records: bytes,
        *,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        current_leader_epoch: int = -1,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """Append; with ACKS_ALL return once it is committed. Raises typed refusals.

        Either all batches of ``records`` are appended or none is. ``verified``: the producer id and
        epoch that ``verify_transaction`` has returned for.
        """
        ...
