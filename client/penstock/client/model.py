"""The values that clients hand out: records, positions and what a send was answered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.wire.ids import TopicPartition

Header = tuple[str, bytes | None]
"""One record header: its key and its bytes. Keys may repeat."""


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is.

    ``offset`` is -1 when it is not known: with ``acks=0``, or when the broker only knows that
    it has the record already. ``timestamp_ms`` is the record's time: the producer's, or the
    broker's where the topic uses LogAppendTime.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition."""
        return TopicPartition(self.topic, self.partition)


class ConsumerRecord(NamedTuple):
    """A record as a consumer sees it.

    ``key`` and ``value`` are what the consumer's deserialisers made of them (``bytes | None``
    without one). ``leader_epoch`` is the epoch of the leader that appended it. ``topic_id`` tells
    its topic from others that had, or will have, the name.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: Any
    value: Any
    headers: tuple[Header, ...]
    leader_epoch: int
    topic_id: bytes = b""

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition."""
        return TopicPartition(self.topic, self.partition)

    @property
    def position_after(self) -> OffsetAndMetadata:
        """What to commit once the record is processed: the next offset, in this very topic."""
        return OffsetAndMetadata(self.offset + 1, self.leader_epoch, topic_id=self.topic_id)


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """A committed position: the next offset to be consumed, and the application's own words.

    ``topic_id`` is the topic that the offset is one of, if it is known: a commit of it is refused
    when another topic has the name. It does not count when two are compared.
    """

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Who a consumer is in its group at a moment, for ``Producer.send_offsets_to_transaction``.

    ``member_id`` is empty and ``member_epoch`` -1 while it is no member, as where partitions were
    assigned by hand: such positions are taken as long as the group has no members.
    """

    group_id: str
    member_id: str = ""
    member_epoch: int = -1


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What a group of commits has committed last: the epoch number (-1: nothing yet), the handles
    of the attempts that won, and the metadata that its engine gave along.
    """

    epoch_number: int
    winners: tuple[str, ...] = ()
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class ConsumerMetrics:
    """How far behind a consumer is: ``records_lag`` by partition, of those that are known.

    A lag counts the offsets from the next record to be handed out to the end of what can be read,
    as the partition's leader said with its last answer: one that is not asked, since it is paused
    or enough is prefetched, may have more by now. Offsets that no record has (compacted, or
    markers) count as well.
    """

    records_lag: Mapping[TopicPartition, int]

    @property
    def records_lag_max(self) -> int | None:
        """The largest lag of a partition; None while none is known."""
        return max(self.records_lag.values(), default=None)


@dataclass(frozen=True, slots=True)
class OffsetAndTimestamp:
    """An offset found by time. ``offset`` is -1 when no record is that late."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class RebalanceListener(Protocol):
    """Hears of partitions that come and go. Called inside ``poll`` or iteration.

    For ``Consumer`` the methods are plain; for ``AsyncConsumer`` they may be plain or
    coroutines. Calling the consumer's own methods (``commit``, ``seek``, ``position``) is fine;
    ``poll`` and ``close`` are not.
    """

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> Any:
        """The partitions are about to be given back; they are still this member's own.

        The place to commit what was processed.
        """

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> Any:
        """The partitions are new to this member; nothing of them has been handed out yet."""

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> Any:
        """The partitions are gone already (the group gave this member up): do not commit."""
