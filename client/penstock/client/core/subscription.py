"""What a consumer was asked to read, and what of it the application has had."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from penstock.client.model import ConsumerRecord
from penstock.wire.errors import InvalidRequestError
from penstock.wire.ids import TopicPartition


class Position(NamedTuple):
    """The next offset, and the leader epoch of the record before it (-1: unknown)."""

    offset: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics by name, or a pattern over names. Neither: nothing, or partitions by hand."""

    topics: tuple[str, ...] = ()
    pattern: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing is subscribed to."""
        return not self.topics and not self.pattern


def pattern_text(compiled: re.Pattern[str]) -> str:
    """The pattern's text, which is all that the coordinator gets and matches by.

    Raises InvalidRequestError for one whose text does not say all.
    """
    if not isinstance(compiled.pattern, str) or not compiled.pattern:
        raise InvalidRequestError(f"{compiled.pattern!r} is not a pattern over topics' names")
    flags = re.RegexFlag(compiled.flags & ~(re.UNICODE | re.ASCII))  # Names are ASCII anyhow.
    if flags:
        raise InvalidRequestError(
            f"the pattern {compiled.pattern!r} has flags ({flags!r}), and subscriptions know none: "
            "write it without, for example [Tt] for re.IGNORECASE"
        )
    return compiled.pattern


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Partitions that come and go, for the application to hear of before reading goes on.

    ``lost`` are gone already; ``revoked`` are still held, until given back. ``number`` tells one
    change from a later one.
    """

    number: int
    revoked: tuple[TopicPartition, ...] = ()
    assigned: tuple[TopicPartition, ...] = ()
    lost: tuple[TopicPartition, ...] = ()


class Handout:
    """Which records the application has, and which it is done with.

    A record is processed when the next one (iteration) or the next poll is asked for. Used by
    the application's thread; the engine's only calls the methods marked so, while the
    application waits in a call to it, and reads ``consumed`` by copying.
    """

    def __init__(self) -> None:
        self.consumed: dict[TopicPartition, Position] = {}
        self.topic_ids: dict[TopicPartition, bytes] = {}  # What the positions belong to.
        self.last_ids: dict[TopicPartition, bytes] = {}  # The same, of all that was ever read.
        self.renewed: set[TopicPartition] = set()  # Read in more than one topic of the name.
        self.interrupted = False  # The engine has something that goes before more records.
        self.taken_ms = float("-inf")  # When the application last took a record.
        self._handed: dict[TopicPartition, Position] = {}
        self._last: ConsumerRecord | None = None  # Handed out by iteration.
        self._kept: deque[ConsumerRecord] = deque()

    # --- the application's side -------------------------------------------------------------

    def next_record(self, now_ms: float) -> ConsumerRecord | None:
        """The next record; None when the engine must be asked first."""
        self.settle()
        if self.interrupted or not self._kept:
            return None
        record = self._last = self._kept[0]
        self._kept.popleft()
        self.taken_ms = now_ms
        return record

    def take(self, limit: int, now_ms: float) -> list[ConsumerRecord]:
        """Up to ``limit`` records, which count as handed out; none while interrupted."""
        kept = self._kept
        if self.interrupted or not kept:
            return []
        self.taken_ms = now_ms
        records = list(kept) if limit >= len(kept) else list(islice(kept, limit))
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            self._handed[partition] = Position(record.offset + 1, record.leader_epoch)
            kept.popleft()
        return records

    def settle(self) -> None:
        """What was handed out counts as processed now."""
        last = self._last
        if last is not None:
            self._last = None
            self.consumed[TopicPartition(last.topic, last.partition)] = Position(
                last.offset + 1, last.leader_epoch
            )
        if self._handed:
            self.consumed.update(self._handed)
            self._handed.clear()

    # --- the engine's side ------------------------------------------------------------------

    def keep(self, records: Iterable[ConsumerRecord]) -> None:
        """Keep records for the application, whose waiting for them may just be interrupted."""
        self._kept.extend(records)

    @property
    def has_kept(self) -> bool:
        """Whether there are records that the application has not had."""
        return bool(self._kept)

    def delivered(self) -> dict[TopicPartition, Position]:
        """The position after everything handed out, whether processed or not."""
        positions = dict(self.consumed)
        positions.update(self._handed)
        last = self._last
        if last is not None:
            partition = TopicPartition(last.topic, last.partition)
            positions[partition] = Position(last.offset + 1, last.leader_epoch)
        return positions

    def first_kept(self, partition: TopicPartition) -> int | None:
        """The offset of the first kept record of a partition."""
        for record in self._kept:
            if record.partition == partition.partition and record.topic == partition.topic:
                return record.offset
        return None

    def begin(self, partition: TopicPartition, position: Position, topic_id: bytes) -> None:
        """Reading begins, or goes on, at a position in the topic with this id.

        Nothing of the partition is kept or handed out: what was must have been dropped, in a call
        of the application. This may be called at any time.
        """
        self.consumed[partition] = position
        self.topic_ids[partition] = topic_id
        if topic_id:
            if self.last_ids.setdefault(partition, topic_id) != topic_id:
                self.renewed.add(partition)
            self.last_ids[partition] = topic_id

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget everything about these partitions."""
        gone = frozenset(partitions)
        if self._kept:
            kept = [
                record
                for record in self._kept
                if TopicPartition(record.topic, record.partition) not in gone
            ]
            self._kept = deque(kept)
        for partition in gone:
            self.consumed.pop(partition, None)
            self.topic_ids.pop(partition, None)
            self._handed.pop(partition, None)
        last = self._last
        if last is not None and TopicPartition(last.topic, last.partition) in gone:
            self._last = None
