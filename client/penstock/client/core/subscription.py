"""What a consumer was asked to read, and what of it the application has had."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import NamedTuple

from penstock.client.model import ConsumerRecord
from penstock.wire.columns import Columns
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


class Run:
    """Records of one partition, one after the other: those of a batch.

    ``start`` is the first that the application has not had. ``size_bytes`` is what the batch was
    fetched as, and ``end`` the position after all of it: behind the last record there may be marks,
    and what was aborted or compacted away.
    """

    __slots__ = ("end", "partition", "records", "size_bytes", "start")

    def __init__(
        self,
        partition: TopicPartition,
        records: list[ConsumerRecord],
        size_bytes: int,
        end: Position,
    ) -> None:
        self.partition = partition
        self.records = records
        self.size_bytes = size_bytes
        self.end = end
        self.start = 0

    def next(self, limit: int) -> list[ConsumerRecord]:
        """Up to so many of those that the application has not had."""
        if not self.start and limit >= len(self.records):
            return self.records
        return self.records[self.start : self.start + limit]


Convert = Callable[[ConsumerRecord], ConsumerRecord]
"""Makes the application's record of one whose key and value are bytes; may raise."""


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """Records of one partition as columns, and the position after them."""

    partition: TopicPartition
    columns: Columns
    end: Position

    @property
    def first_offset(self) -> int:
        """That of the first record."""
        offset: int = memoryview(self.columns.offsets).cast("q")[0]
        return offset


@dataclass(frozen=True, slots=True)
class _Pass:
    """Iteration's way through a run: through ``records``, the first of which is at ``start``."""

    run: Run
    start: int
    records: list[ConsumerRecord]
    source: Iterator[ConsumerRecord]  # Over them.

    @property
    def had(self) -> int:
        """How many of them it had."""
        return len(self.records) - length_hint(self.source)


def _after(record: ConsumerRecord) -> Position:
    return Position(record.offset + 1, record.leader_epoch)


class Handout:
    """Which records the application has, and which it is done with.

    A record is processed when the next one (iteration) or the next poll is asked for. What is kept
    for the application are runs. Iteration goes through one of them, ``current``, and notes
    nothing: how far it is gone is found by asking ``current`` how much is left.

    Used by the application's thread; the engine's only calls the methods marked so, while the
    application waits in a call to it, and those marked as safe at any time.
    """

    def __init__(self, convert: Convert | None = None) -> None:
        self.topic_ids: dict[TopicPartition, bytes] = {}  # What the positions belong to.
        self.last_ids: dict[TopicPartition, bytes] = {}  # The same, of all that was ever read.
        self.renewed: set[TopicPartition] = set()  # Read in more than one topic of the name.
        self.interrupted = False  # The engine has something that goes before more records.
        self.current: Iterator[ConsumerRecord] = iter(())  # Nobody else may go through it.
        self._convert = convert
        self._consumed: dict[TopicPartition, Position] = {}
        self._handed: dict[TopicPartition, Position] = {}
        self._kept: deque[Run] = deque()
        self._columns: list[ColumnRun] = []  # Kept too; nothing else is then.
        self._held: dict[TopicPartition, list[Run]] = {}  # Kept, of paused partitions.
        self._pass: _Pass | None = None  # Through the first run that is kept, by ``current``.
        self._taken_ms = float("-inf")
        self._begun = 0  # Runs that iteration began.
        self._seen = (0, 0)  # How far iteration was when it was last looked at.

    # --- the application's side -------------------------------------------------------------

    def begin_run(self, now_ms: float, limit: int = 2**31) -> bool:
        """Whether ``current`` has records, up to ``limit``; if not, the engine must be asked first.

        The last record that was handed out before is processed now.
        """
        self.settle()
        if self.interrupted or not self._kept:
            return False
        self._taken_ms = now_ms
        self._begun += 1
        run = self._kept[0]
        records = run.next(limit)
        source = iter(records)
        self._pass = _Pass(run, run.start, records, source)
        self.current = source if self._convert is None else map(self._converted, source)
        return True

    def _converted(self, record: ConsumerRecord) -> ConsumerRecord:
        assert self._convert is not None
        try:
            return self._convert(record)
        except BaseException:
            # It was not handed out, and is next again; what is before it is processed.
            self._end_run(not_handed=1)
            self._settle_handed()
            raise

    def take(self, limit: int, now_ms: float) -> list[ConsumerRecord]:
        """Up to ``limit`` records, which count as handed out; none while interrupted.

        Raises what the first record's conversion raises. Where a later one's does, those before it
        are handed out.
        """
        taken = self._take(limit, now_ms)
        if len(taken) == 1:
            return taken[0][1]
        return [record for _, records in taken for record in records]

    def take_batches(self, limit: int, now_ms: float) -> dict[TopicPartition, list[ConsumerRecord]]:
        """What ``take`` takes, by partition."""
        batches: dict[TopicPartition, list[ConsumerRecord]] = {}
        for partition, records in self._take(limit, now_ms):
            if partition in batches:
                batches[partition] += records
            else:
                batches[partition] = records
        return batches

    def _take(
        self, limit: int, now_ms: float, *, as_fetched: bool = False
    ) -> list[tuple[TopicPartition, list[ConsumerRecord]]]:
        taken: list[tuple[TopicPartition, list[ConsumerRecord]]] = []
        self._end_run()
        if self.interrupted or not self._kept:
            return taken
        self._taken_ms = now_ms
        left = limit
        ends: list[tuple[Run, int]] = []
        for run in self._kept:
            if left <= 0:
                break
            wanted = records = run.next(left)
            if self._convert is not None and not as_fetched:
                records = self._convert_all(wanted, may_raise=not taken)
                if not records:
                    break
            count = len(records)
            ends.append((run, run.start + count))
            taken.append((run.partition, records))
            left -= count
            if count < len(wanted):
                break
        for run, end in ends:  # Last: an interrupt of a conversion leaves all to be handed out.
            self._handed_out(run, end)
        return taken

    def take_columns(self, limit: int, now_ms: float) -> list[ColumnRun | list[ConsumerRecord]]:
        """Up to ``limit`` records, as columns where they are kept so; none while interrupted.

        Records are as they were fetched, whatever the deserialisers.
        """
        if self.interrupted:
            return []
        if self._kept:
            return [records for _, records in self._take(limit, now_ms, as_fetched=True)]
        if self.column_rows > limit:
            return []  # Kept for a call that was interrupted; the engine fetches anew.
        self._taken_ms = now_ms
        taken = self._columns
        for run in taken:
            self._handed[run.partition] = run.end
        self._columns = []
        return [*taken]

    def _handed_out(self, run: Run, end: int) -> None:
        """All up to there were, of the first run that is kept."""
        run.start = end
        is_all = end == len(run.records)
        self._handed[run.partition] = run.end if is_all else _after(run.records[end - 1])
        if end == len(run.records) and self._kept[0] is run:
            self._kept.popleft()

    def _convert_all(
        self, records: list[ConsumerRecord], *, may_raise: bool
    ) -> list[ConsumerRecord]:
        """All of them, or those before the first that cannot be converted."""
        assert self._convert is not None
        converted: list[ConsumerRecord] = []
        try:
            for record in records:
                converted.append(self._convert(record))  # noqa: PERF401 - it may raise between.
        except Exception:
            if may_raise and not converted:
                raise
        return converted

    def settle(self) -> None:
        """What was handed out counts as processed now."""
        self._end_run()
        self._settle_handed()

    def _settle_handed(self) -> None:
        if self._handed:
            self._consumed.update(self._handed)
            self._handed.clear()

    def _end_run(self, not_handed: int = 0) -> None:
        """Iteration goes no further in its run; so many that it had were not handed out after all.

        What was handed out is not processed by that.
        """
        going = self._pass
        if going is not None:
            count = going.had - not_handed
            # In this order: what is processed is asked for at any time, and never goes back.
            if count > 1:
                self._consumed[going.run.partition] = _after(going.records[count - 2])
            if count:
                self._handed_out(going.run, going.start + count)
            self._forget_run()

    def _forget_run(self) -> None:
        self._pass = None
        self.current = iter(())

    # --- safe at any time -------------------------------------------------------------------

    def processed(self) -> dict[TopicPartition, Position]:
        """The position after everything that is processed."""
        going = self._pass  # First: what it is done with is in ``_consumed`` before it ends.
        positions = dict(self._consumed)
        # The last one is in the application's hands; all before it went through them.
        if going is not None and (count := going.had) > 1:
            positions[going.run.partition] = _after(going.records[count - 2])
        return positions

    def delivered(self) -> dict[TopicPartition, Position]:
        """The position after everything handed out, whether processed or not."""
        positions = dict(self._consumed)
        positions.update(self._handed)
        going = self._pass
        if going is not None and (count := going.had):
            positions[going.run.partition] = _after(going.records[count - 1])
        return positions

    def taken_ms(self, now_ms: float) -> float:
        """When the application last took a record.

        In the middle of a run it may be before that, but after this was last asked for.
        """
        going = self._pass
        seen = (self._begun, going.had if going is not None else 0)
        if seen != self._seen:
            self._seen = seen
            self._taken_ms = max(self._taken_ms, now_ms)
        return self._taken_ms

    def begin(self, partition: TopicPartition, position: Position, topic_id: bytes) -> None:
        """Reading begins, or goes on, at a position in the topic with this id.

        Nothing of the partition is kept or handed out: what was must have been dropped, in a call
        of the application.
        """
        self._consumed[partition] = position
        self.topic_ids[partition] = topic_id
        if topic_id:
            if self.last_ids.setdefault(partition, topic_id) != topic_id:
                self.renewed.add(partition)
            self.last_ids[partition] = topic_id

    # --- the engine's side ------------------------------------------------------------------

    def keep(self, runs: Iterable[Run]) -> None:
        """Keep records for the application, whose waiting for them may just be interrupted."""
        for run in runs:
            if run.records:
                self._kept.append(run)
            else:
                self._go_past(run.partition, run.end)

    def keep_columns(self, runs: Iterable[ColumnRun]) -> None:
        """The same for columns."""
        for run in runs:
            if run.columns.record_count:
                self._columns.append(run)
            else:
                self._go_past(run.partition, run.end)

    def _go_past(self, partition: TopicPartition, end: Position) -> None:
        """Nothing is to be handed out between what is kept of the partition, if any, and there."""
        kept = [*self._held.get(partition, ()), *self._kept]
        for run in reversed(kept):
            if run.partition == partition:
                run.end = end
                return
        # Whoever waits for the next record, for however long, is done with all before it.
        positions = self._handed if partition in self._handed else self._consumed
        positions[partition] = end

    def give_back_columns(self) -> list[ColumnRun]:
        """The columns that are kept, to be fetched anew: records are wanted after all."""
        columns, self._columns = self._columns, []
        return columns

    @property
    def column_rows(self) -> int:
        """How many records are kept as columns."""
        return sum(run.columns.record_count for run in self._columns)

    @property
    def has_kept(self) -> bool:
        """Whether there are records that the application has not had."""
        return bool(self._kept)

    def first_kept(self, partition: TopicPartition) -> int | None:
        """The offset of the first kept record of a partition."""
        going = self._pass
        for run in (*self._held.get(partition, ()), *self._kept):
            if run.partition == partition:
                had = going.had if going is not None and going.run is run else 0
                if run.start + had < len(run.records):
                    offset: int = run.records[run.start + had].offset
                    return offset
        return min(
            (run.first_offset for run in self._columns if run.partition == partition), default=None
        )

    def hold(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out nothing of these partitions until ``release``."""
        paused = frozenset(partitions)
        self._end_run()
        for run in self._kept:
            if run.partition in paused:
                self._held.setdefault(run.partition, []).append(run)
        self._kept = deque(run for run in self._kept if run.partition not in paused)

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out again what was held."""
        self._end_run()
        for partition in partitions:
            self._kept.extendleft(reversed(self._held.pop(partition, ())))

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget everything about these partitions."""
        gone = frozenset(partitions)
        if self._pass is not None and self._pass.run.partition in gone:
            self._forget_run()
        if self._kept:
            self._kept = deque(run for run in self._kept if run.partition not in gone)
        self._columns = [run for run in self._columns if run.partition not in gone]
        for partition in gone:
            self._held.pop(partition, None)
            self._consumed.pop(partition, None)
            self.topic_ids.pop(partition, None)
            self._handed.pop(partition, None)
