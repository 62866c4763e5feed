"""What a consumer fetches, keeps and hands out, partition by partition.

A partition's life: it is assigned without a position, gets one (``PositionFound``), and is then
fetched from ahead of what the application took, within bounds of memory. A position belongs to one
topic id, which each fetch carries: in another topic of the same name it means nothing, and is given
up as soon as metadata name that one (``MadeAnew``). At most one fetch asks
for a partition at a time; an answer that a ``seek`` overtook is recognised by its generation
and dropped. The shell feeds events and carries out effects; records leave through ``take``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.core.backoff import Backoff
from penstock.client.core.fetch_events import (
    Added,
    CancelFetch,
    Effect,
    Event,
    FetchAnswered,
    Fetched,
    FetchFailed,
    MadeAnew,
    OutOfRange,
    PositionFailed,
    PositionFound,
    PositionLost,
    RefreshMetadata,
    Removed,
    SendFetch,
    Wanted,
)
from penstock.client.core.lane import Lane
from penstock.client.core.leader_watch import no_leader
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.subscription import ColumnRun, Run
from penstock.wire.codec import ColumnsBuilder
from penstock.wire.errors import (
    CorruptRecordError,
    NetworkError,
    OffsetOutOfRangeError,
    PenstockError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason

_MAX_FETCHES_PER_NODE: Final = 3
_SLOW_MARGIN_MS: Final = 1_000.0
_HELD_BACK_MS: Final = 1_000.0
"""Transactions are open for less all the time where somebody writes: that is no news."""
_AHEAD_RECORDS: Final = 10_000
"""No more than this is decoded ahead, however few bytes they were fetched as."""


@dataclass(slots=True)
class _Fetch:
    """An unanswered fetch: the generation of each partition when it was sent."""

    node_id: int
    sent_ms: float
    probed_ms: float
    generations: dict[TopicPartition, int]
    max_bytes: int  # Kept free for its answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class FetcherSettings:
    """What the fetcher needs of the consumer's configuration."""

    max_partition_bytes: int
    max_bytes: int
    prefetch_max_bytes: int
    max_wait_ms: float
    request_timeout_ms: float
    damage_patience_ms: float  # Damage is told when it is there for so long.


class Fetcher:
    """The state machine. ``handle`` and ``take`` are its only mutators; one thread."""

    def __init__(
        self, settings: FetcherSettings, metadata: MetadataCache, backoff: Backoff
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._backoff = backoff
        self._lanes: dict[TopicPartition, Lane] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._next_fetch_id = 0
        self._last_asked: dict[int, int] = {}  # The last fetch of each node.
        self._turn = 0
        self._seen_updates = 0
        self._wait_ms = float("inf")
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[..., None]] = {
            Added: self._added,
            Removed: self._removed,
            PositionFound: self._found,
            PositionLost: self._lost,
            PositionFailed: self._position_failed,
            FetchAnswered: self._answered,
            FetchFailed: self._failed,
        }

    # --- questions --------------------------------------------------------------------------

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """What is read."""
        return frozenset(self._lanes)

    def end_offset(self, partition: TopicPartition) -> int | None:
        """The end of what can be read, as the last answer said; None before there was one."""
        lane = self._lanes.get(partition)
        return None if lane is None or lane.end_offset < 0 else lane.end_offset

    @property
    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return frozenset(name for name, lane in self._lanes.items() if lane.paused)

    @property
    def buffered_bytes(self) -> int:
        """How much is fetched and not taken."""
        return sum(lane.buffered_bytes for lane in self._lanes.values())

    def cursor(self, partition: TopicPartition) -> int | None:
        """The next offset to be taken; None while there is no position."""
        lane = self._lanes[partition]
        return lane.cursor.offset if lane.position is not None else None

    def error(self, partition: TopicPartition) -> PenstockError | None:
        """Why the partition cannot be read."""
        return self._lanes[partition].error

    def trouble(self) -> PenstockError | None:
        """Why a partition is not fetched that should be, for messages."""
        leaderless = self.leaderless()
        for partition, lane in self._lanes.items():
            # Of a leader that is none any more, its last error says what was and not what is.
            if lane.last_error is None or lane.paused:
                continue
            if partition not in leaderless:
                return lane.last_error
        return no_leader(leaderless) if leaderless else None

    def leaderless(self) -> list[TopicPartition]:
        """The partitions that are to be read and have no leader."""
        leader_of = self._metadata.leader
        return [
            partition
            for partition, lane in self._lanes.items()
            if not lane.paused and (led := leader_of(partition)) is not None and led.node_id < 0
        ]

    def held_back(self, now_ms: float) -> PenstockError | None:
        """That reading stands behind a transaction that is open, and has for a while."""
        held = [
            (lane.end_held_ms, partition)
            for partition, lane in self._lanes.items()
            if lane.end_held_ms is not None
            and now_ms - lane.end_held_ms >= _HELD_BACK_MS
            and lane.is_at_end
            and not lane.paused
        ]
        if not held:
            return None
        since_ms, partition = min(held)
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        error = RequestTimedOutError(
            f"partition {partition}{more} has more than can be read: a transaction is open at "
            f"its last stable offset {self._lanes[partition].end_offset} and has been for "
            f"{(now_ms - since_ms) / 1000:.0f} s, as far as this consumer saw; next: `penstock "
            "transactions list --state ongoing` shows whose it is, which ends at its timeout at "
            "the latest; `penstock transactions hanging` finds one that nobody will end"
        )
        error.reason = StallReason.OPEN_TRANSACTION
        return error

    def unplaced(self) -> list[TopicPartition]:
        """The partitions that are to be read and have no position yet."""
        return [
            partition
            for partition, lane in self._lanes.items()
            if not lane.paused and lane.position is None
        ]

    def absence(self) -> PenstockError | None:
        """Why a partition is not there to be read, once brokers agree; it may be made yet."""
        for partition, lane in self._lanes.items():
            if lane.paused or self._metadata.leader(partition) is not None:
                continue
            verdict = self._metadata.verdict(partition.topic)
            if verdict is not None:
                return type(verdict)(verdict.message)
            count = self._metadata.partition_count(partition.topic)
            if count:
                return UnknownTopicOrPartitionError(
                    f"topic {partition.topic!r} has no partition {partition.partition}; it has 0 "
                    f"to {count - 1}; next: name one of these"
                )
        return None

    def next_deadline_ms(self) -> float:
        """When to wake the fetcher if nothing happens before; infinity for never."""
        deadline = self._wait_ms
        for fetch in self._fetches.values():
            deadline = min(deadline, fetch.probed_ms + self._slow_ms)
        return deadline

    # --- changes ----------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: float) -> list[Effect]:
        """Take one event and say what to do."""
        self._notice_new_topics()
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now_ms)
        self._watch_fetches(now_ms)
        self._fetch_more(now_ms)
        effects, self._effects = self._effects, []
        return effects

    def set_paused(self, partitions: Iterable[TopicPartition], *, paused: bool) -> None:
        """Hold back, or go on handing out."""
        for partition in partitions:
            self._lanes[partition].paused = paused

    def take(self, limit: int, now_ms: float, ahead_bytes: int = 0) -> list[Run]:
        """Runs of records, in order within each partition, in turns between them.

        They are ``limit`` records, if there are so many, and more as long as all were fetched as
        less than ``ahead_bytes`` and are less than ten thousand. Runs are of whole batches, so the
        last may go beyond either; one without records says how far reading has come. Raises a
        partition's error when its turn comes and no record was taken before. What a damaged batch
        has it want done comes out of the next ``handle``.
        """
        taken: list[Run] = []
        count = size_bytes = 0
        for partition in self._in_turn():
            lane = self._lanes[partition]
            try:
                while count < limit or (size_bytes < ahead_bytes and count < _AHEAD_RECORDS):
                    if (run := lane.decode_next(partition)) is None:
                        break
                    taken.append(run)
                    if not run.records:
                        break
                    count += len(run.records)
                    size_bytes += run.size_bytes
            except CorruptRecordError as error:
                self._damaged(partition, lane, error, now_ms)
            if not count:
                lane.complain()
        return taken

    def take_columns(self, limit: int, most_bytes: int, now_ms: float) -> list[ColumnRun]:
        """Up to ``limit`` records, of about ``most_bytes`` decompressed, as columns by partition.

        Raises as ``take``.
        """
        taken: list[ColumnRun] = []
        count = size_bytes = 0
        for partition in self._in_turn():
            lane = self._lanes[partition]
            columns = ColumnsBuilder()
            before, begun = count, lane.cursor
            try:
                while count < limit and size_bytes < most_bytes:
                    gained = lane.decode_into(columns, partition, limit - count)
                    count = before + columns.record_count
                    size_bytes += gained
                    if not gained:
                        break
            except CorruptRecordError as error:
                self._damaged(partition, lane, error, now_ms)
            if columns.record_count or lane.cursor != begun:
                taken.append(ColumnRun(partition, columns.build(), lane.cursor))
            if not count:
                lane.complain()
        return taken

    def _in_turn(self) -> list[TopicPartition]:
        order = [name for name, lane in self._lanes.items() if not lane.paused]
        self._turn += 1
        start = self._turn % len(order) if order else 0
        return order[start:] + order[:start]

    # --- events -----------------------------------------------------------------------------

    def _added(self, event: Added, now_ms: float) -> None:
        for partition in event.partitions:
            self._lanes.setdefault(partition, Lane())

    def _removed(self, event: Removed, now_ms: float) -> None:
        for partition in event.partitions:
            self._lanes.pop(partition, None)

    def _found(self, event: PositionFound, now_ms: float) -> None:
        lane = self._lanes.get(event.partition)
        if lane is not None:
            lane.clear()
            lane.position = lane.cursor = event.position
            lane.topic_id = event.topic_id
            self._check_topic(event.partition, lane)

    def _notice_new_topics(self) -> None:
        if self._seen_updates != self._metadata.updates:
            self._seen_updates = self._metadata.updates
            for partition, lane in self._lanes.items():
                self._check_topic(partition, lane)

    def _check_topic(self, partition: TopicPartition, lane: Lane) -> None:
        """Give the position up if it is one of another topic than has the name now."""
        topic_id = self._metadata.topic_id(partition.topic)
        if lane.position is None or topic_id in (b"", lane.topic_id):
            return
        if not lane.topic_id:
            lane.topic_id = topic_id
            return
        self._effects.append(MadeAnew(partition, lane.cursor.offset))
        lane.clear()
        lane.position = None
        lane.failed_epoch = -1  # One of the old topic's.

    def _lost(self, event: PositionLost, now_ms: float) -> None:
        lane = self._lanes.get(event.partition)
        if lane is not None:
            lane.clear()
            lane.position = None

    def _position_failed(self, event: PositionFailed, now_ms: float) -> None:
        lane = self._lanes.get(event.partition)
        if lane is not None:
            lane.error = event.error

    def _answered(self, event: FetchAnswered, now_ms: float) -> None:
        fetch = self._fetches.pop(event.fetch_id, None)
        if fetch is None:
            return
        for result in event.results:
            lane = self._lane_of(fetch, event.fetch_id, result.partition)
            if lane is not None:
                self._take_over(lane, result, fetch.node_id, now_ms)
        self._release(event.fetch_id)

    def _failed(self, event: FetchFailed, now_ms: float) -> None:
        fetch = self._fetches.pop(event.fetch_id, None)
        if fetch is None:
            return
        for partition in fetch.generations:
            lane = self._lane_of(fetch, event.fetch_id, partition)
            if lane is not None:
                self._retry_later(partition, lane, event.error, now_ms)
        self._release(event.fetch_id)
        self._effects.append(RefreshMetadata(avoid=fetch.node_id))

    def _lane_of(self, fetch: _Fetch, fetch_id: int, partition: TopicPartition) -> Lane | None:
        """The lane that a fetch was made for, if it still is what it was then."""
        lane = self._lanes.get(partition)
        if lane is None or lane.fetch_id != fetch_id:
            return None
        return lane if fetch.generations.get(partition) == lane.generation else None

    def _release(self, fetch_id: int) -> None:
        for lane in self._lanes.values():
            if lane.fetch_id == fetch_id:
                lane.fetch_id = -1

    def _take_over(self, lane: Lane, result: Fetched, node_id: int, now_ms: float) -> None:
        if result.error is not None:
            self._refused(lane, result, result.error, now_ms)
            return
        lane.attempts = 0
        lane.last_error = None
        lane.note_end(result.end_offset, result.high_watermark, now_ms)
        assert lane.position is not None
        if result.diverging_offset >= 0:
            why = OffsetOutOfRangeError(
                f"partition {result.partition}: the log was cut at offset "
                f"{result.diverging_offset}, before position {lane.position.offset}"
            )
            # What was fetched and not taken may lie before the cut: it is fetched anew.
            offset = min(result.diverging_offset, lane.cursor.offset)
            self._effects.append(OutOfRange(result.partition, lane.position.offset, offset, why))
            lane.drop_fetched()
            lane.position = None
            return
        lane.complaint = None
        lane.is_outside = False
        if result.records:
            try:
                lane.buffer(result.partition, result.records, result.records_crc, result.aborted)
            except CorruptRecordError as error:
                self._damaged(result.partition, lane, error, now_ms)

    def _refused(self, lane: Lane, result: Fetched, error: PenstockError, now_ms: float) -> None:
        assert lane.position is not None
        if isinstance(error, OffsetOutOfRangeError):
            # What was fetched before is good. When it is taken the position is asked for again.
            lane.is_outside = bool(lane.chunks)
            if not lane.is_outside:
                self._effects.append(OutOfRange(result.partition, lane.position.offset, -1, error))
                lane.position = None
        elif isinstance(error, CorruptRecordError):
            where = f"partition {result.partition}, offset {lane.position.offset}"
            found = CorruptRecordError(f"{where}: {error.message}", leader=error.leader)
            self._damaged(result.partition, lane, found, now_ms)
        elif error.retriable:
            self._retry_later(result.partition, lane, error, now_ms)
        else:
            lane.error = error

    def _damaged(
        self, partition: TopicPartition, lane: Lane, error: CorruptRecordError, now_ms: float
    ) -> None:
        """Ask for it again: another replica leads soon, or this one is mended."""
        patience_ms = self._settings.damage_patience_ms
        told = lane.note_damage(partition, error, now_ms=now_ms, patience_ms=patience_ms)
        self._retry_later(partition, lane, told, now_ms)
        self._effects.append(RefreshMetadata(avoid=-1))

    def _retry_later(
        self, partition: TopicPartition, lane: Lane, error: PenstockError, now_ms: float
    ) -> None:
        lane.last_error = error
        leader = self._metadata.leader(partition)
        lane.failed_epoch = leader.leader_epoch if leader is not None else -1
        lane.retry_at_ms = now_ms + self._backoff.delay_ms(lane.attempts)
        lane.attempts += 1
        news = error.leader is not None and self._metadata.apply_hint(partition, error.leader)
        if error.refresh_metadata and not news:
            self._effects.append(RefreshMetadata(avoid=-1))

    # --- fetching ---------------------------------------------------------------------------

    @property
    def _slow_ms(self) -> float:
        return self._settings.max_wait_ms + _SLOW_MARGIN_MS

    def _watch_fetches(self, now_ms: float) -> None:
        """Give up fetches whose broker leads nothing of them any more, or is silent too long."""
        for fetch_id, fetch in list(self._fetches.items()):
            elsewhere = all(
                name not in self._lanes or self._leads_not(name, fetch.node_id)
                for name in fetch.generations
            )
            silent_ms = now_ms - fetch.sent_ms
            too_long = self._settings.max_wait_ms + self._settings.request_timeout_ms
            if elsewhere or silent_ms >= too_long:
                del self._fetches[fetch_id]
                self._release(fetch_id)
                self._effects.append(CancelFetch(fetch_id))
            if silent_ms >= self._slow_ms and now_ms - fetch.probed_ms >= self._slow_ms:
                fetch.probed_ms = now_ms
                self._effects.append(RefreshMetadata(avoid=fetch.node_id))

    def _leads_not(self, partition: TopicPartition, node_id: int) -> bool:
        leader = self._metadata.leader(partition)
        return leader is not None and leader.node_id not in (node_id, -1)

    def _fetch_more(self, now_ms: float) -> None:
        self._wait_ms = float("inf")
        busy: dict[int, int] = defaultdict(int)
        for fetch in self._fetches.values():
            busy[fetch.node_id] += 1
        by_node: dict[int, list[tuple[TopicPartition, Lane, int]]] = defaultdict(list)
        need_news = False
        for partition, lane in self._lanes.items():
            if not self._may_fetch(lane):
                continue
            leader = self._metadata.leader(partition)
            epoch = leader.leader_epoch if leader is not None else -1
            if lane.retry_at_ms > now_ms and epoch <= lane.failed_epoch:
                self._wait_ms = min(self._wait_ms, lane.retry_at_ms)
                need_news |= isinstance(lane.last_error, NetworkError)
            elif leader is None or leader.node_id < 0:
                need_news = True
            elif busy[leader.node_id] < _MAX_FETCHES_PER_NODE:
                by_node[leader.node_id].append((partition, lane, epoch))
        self._share_room(by_node, now_ms)
        if need_news:
            self._effects.append(RefreshMetadata(avoid=-1))

    def _share_room(
        self, by_node: Mapping[int, list[tuple[TopicPartition, Lane, int]]], now_ms: float
    ) -> None:
        """Fetch as far as what is buffered and what answers may bring stays within the bound.

        Each fetch gets a share such that all that may be under way at once find room: one that
        waits for an idle broker's records must not keep another's from being asked for. Who
        was asked longest ago comes first when room is short.
        """
        if not by_node:
            return
        settings = self._settings
        nodes = set(by_node).union(fetch.node_id for fetch in self._fetches.values())
        share = settings.prefetch_max_bytes // (len(nodes) * _MAX_FETCHES_PER_NODE)
        share = max(share, min(settings.max_partition_bytes, settings.max_bytes))
        for node_id in sorted(by_node, key=lambda node_id: self._last_asked.get(node_id, 0)):
            lanes = by_node[node_id]
            most = min(settings.max_partition_bytes * len(lanes), settings.max_bytes, share)
            least = min(settings.max_partition_bytes, most)
            if self._make_room(least):
                self._send(node_id, lanes, max(least, min(most, self._room)), now_ms)

    @property
    def _room(self) -> int:
        reserved = sum(fetch.max_bytes for fetch in self._fetches.values())
        return self._settings.prefetch_max_bytes - self.buffered_bytes - reserved

    def _make_room(self, wanted_bytes: int) -> bool:
        """Whether there is this much room, if need be at the cost of paused partitions.

        What is buffered of them may never be taken, and others must not wait for that.
        """
        if self._room >= wanted_bytes:
            return True
        for lane in self._lanes.values():
            if lane.paused and lane.chunks and lane.error is None:
                lane.clear()
                lane.position = lane.cursor
        # However tight the bound, one partition's answer at a time must do.
        return self._room >= wanted_bytes or not (self._fetches or self.buffered_bytes)

    def _may_fetch(self, lane: Lane) -> bool:
        return (
            lane.position is not None
            and not lane.paused
            and lane.fetch_id < 0
            and lane.error is None
            and not (lane.is_outside and lane.chunks)
            and lane.buffered_bytes < self._settings.max_partition_bytes
        )

    def _send(
        self,
        node_id: int,
        lanes: list[tuple[TopicPartition, Lane, int]],
        max_bytes: int,
        now_ms: float,
    ) -> None:
        self._next_fetch_id += 1
        fetch_id = self._next_fetch_id
        # Whoever comes first in a fetch gets the bytes when there are too many: take turns.
        start = fetch_id % len(lanes)
        wanted = []
        generations = {}
        for partition, lane, epoch in lanes[start:] + lanes[:start]:
            assert lane.position is not None
            lane.fetch_id = fetch_id
            generations[partition] = lane.generation
            wanted.append(
                Wanted(
                    partition,
                    lane.position.offset,
                    epoch,
                    lane.position.leader_epoch,
                    lane.topic_id,
                )
            )
        self._last_asked[node_id] = fetch_id
        self._fetches[fetch_id] = _Fetch(node_id, now_ms, now_ms, generations, max_bytes)
        self._effects.append(SendFetch(fetch_id, node_id, tuple(wanted), max_bytes))

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        for lane in self._lanes.values():
            assert lane.buffered_bytes == sum(len(chunk.data) for chunk in lane.chunks)
            assert lane.fetch_id < 0 or lane.fetch_id in self._fetches
            if lane.position is not None:
                assert lane.cursor.offset <= lane.position.offset
            if lane.position is None:
                assert not lane.chunks
