"""What a consumer does on its event loop, for the sync and the asyncio front alike."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from penstock.client.cluster import Cluster, now_ms
from penstock.client.commits import Commitment, Commits
from penstock.client.config import ConsumerConfig
from penstock.client.coordinator import Coordinators
from penstock.client.core.fetch_events import (
    Added,
    MadeAnew,
    OutOfRange,
    PositionFound,
    Removed,
    Woken,
)
from penstock.client.core.member import MemberState, Polled, Reconciled, Subscribed
from penstock.client.core.subscription import (
    Handout,
    Position,
    Rebalance,
    Subscription,
    pattern_text,
)
from penstock.client.deadline import Deadline
from penstock.client.fetch_loop import MOST_ROWS, FetchLoop, isolation_of
from penstock.client.group_link import GroupLink
from penstock.client.leader_calls import LeaderCalls
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.model import (
    ConsumerMetrics,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
)
from penstock.client.offsets import GroupOffsets
from penstock.client.positions import Positions
from penstock.client.record_reader import record_reader
from penstock.client.stalls import StallWatch, Troubles
from penstock.wire.errors import (
    ClientClosedError,
    InvalidGroupIdError,
    InvalidRequestError,
    PenstockError,
)
from penstock.wire.ids import TopicPartition

_LOG: Final = logging.getLogger("penstock.client")
_LEAVE_MS: Final = 2_000.0
_LEAST_PAUSE_MS: Final = 10.0  # Between automatic commits, however often they are asked for.


class ConsumerEngine:
    """Everything but ``handout`` (see there), ``subscribe`` and the plain questions belongs to
    one event loop, and to one caller at a time.
    """

    def __init__(self, config: ConsumerConfig) -> None:
        self._config = config
        self.handout = Handout(record_reader(config))
        self.closed = False
        self._cluster = Cluster(config)
        self._keeper = MetadataKeeper(self._cluster, self._on_metadata)
        self._coordinators = Coordinators(self._cluster)
        self._leaders = LeaderCalls(self._cluster, self._keeper, isolation_of(config))
        self._fetch = FetchLoop(
            self._cluster,
            self._keeper,
            config,
            on_progress=self._progress,
            on_out_of_range=self._on_out_of_range,
            on_made_anew=self._on_made_anew,
        )
        self._group: GroupLink | None = None
        self._offsets: GroupOffsets | None = None
        if config.group_id is not None:
            self._group = GroupLink(
                self._cluster,
                self._coordinators,
                config,
                alive_ms=self._alive_ms,
                on_change=self._on_group_change,
            )
            self._offsets = GroupOffsets(
                self._cluster, self._coordinators, config.group_id, self._group
            )
        self._commits = Commits(config, self.handout, self._offsets)
        self._positions = Positions(
            config,
            self._cluster,
            keeper=self._keeper,
            fetch=self._fetch,
            leaders=self._leaders,
            handout=self.handout,
            offsets=self._offsets,
            member=self._group.member if self._group is not None else None,
            on_progress=self._progress,
        )
        self._troubles = Troubles(self._fetch.fetcher, self._group, self._positions)
        self._stall_watch = StallWatch(self._troubles, self._fetch.fetcher)
        self._subscription = Subscription()
        self._subscribed = Subscription()  # What is in force.
        self._by_hand = False
        self._topics_changed = False
        self._knows_topics = False  # Those that were there when it began.
        self._failure: PenstockError | None = None
        self._started = False
        self._polling = False
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._committer: asyncio.Task[None] | None = None

    # --- subscription -----------------------------------------------------------------------

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str]) -> None:
        """Note the wish; the next step carries it out."""
        if self._by_hand:
            raise InvalidRequestError(
                "this consumer was given partitions by assign(); unsubscribe() first"
            )
        if isinstance(topics, re.Pattern):
            self._subscription = Subscription(pattern=pattern_text(topics))
        else:
            names = (topics,) if isinstance(topics, str) else tuple(topics)
            for name in names:
                if not isinstance(name, str) or not name:
                    raise InvalidRequestError(f"{name!r} is not a topic's name")
            self._subscription = Subscription(topics=tuple(dict.fromkeys(names)))
        self._failure = None

    async def unsubscribe(self) -> None:
        """Leave the group and give everything back."""
        await self._commit_processed(self.assignment(), self._config.default_api_timeout_ms)
        if self._group is not None:
            await self._group.leave(_LEAVE_MS)
        self._drop(self._fetch.fetcher.partitions)
        self._subscription = self._subscribed = Subscription()
        self._by_hand = False
        self._failure = None

    async def assign(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Read exactly these partitions."""
        if not self._subscription.empty:
            raise InvalidRequestError(
                "this consumer subscribed to topics; unsubscribe() before assign()"
            )
        await self.start()
        wanted = frozenset(TopicPartition(*entry) for entry in partitions)
        await self._know_topics({entry.topic for entry in wanted})
        for entry in sorted(wanted):
            self._check_partition(entry)
        owned = self._fetch.fetcher.partitions
        await self._commit_processed(owned - wanted)
        self._by_hand = bool(wanted)
        self._drop(owned - wanted)
        self._add(wanted - owned, from_group=self._offsets is not None)

    def assignment(self) -> frozenset[TopicPartition]:
        """What is read."""
        return self._fetch.fetcher.partitions

    def subscription(self) -> tuple[str, ...]:
        """Topics subscribed to by name."""
        return self._subscription.topics

    def parting(self) -> Rebalance:
        """What a listener is to hear before the consumer closes."""
        if self._group is None or self._by_hand:
            return Rebalance(0)
        owned, lost = self.assignment(), self._group.member.lost
        held = owned - lost if self._group.member.in_group else frozenset()
        return Rebalance(0, revoked=tuple(sorted(held)), lost=tuple(sorted(owned & lost)))

    async def start(self) -> None:
        """Find a broker. Raises BootstrapError."""
        await self._cluster.start()
        self._started = True
        if self._committer is None and self._group is not None and self._config.enable_auto_commit:
            self._committer = asyncio.ensure_future(self._commit_now_and_then())

    async def _apply_subscription(self) -> None:
        wanted = self._subscription
        if wanted == self._subscribed and not self._may_rejoin:
            return
        if wanted.pattern and self._group is None:
            self._keeper.watch_every_topic()
            self._keeper.request()
        else:
            await self._know_topics(wanted.topics)
        self._subscribed = wanted
        if self._group is not None:
            self._group.handle(Subscribed(wanted))
        else:
            self._read_whole_topics(first=True)

    @property
    def _may_rejoin(self) -> bool:
        """Whether the application subscribed again after it heard that the group refused it."""
        return (
            self._failure is None
            and self._group is not None
            and self._group.member.state is MemberState.FAILED
        )

    async def _know_topics(self, topics: Iterable[str]) -> None:
        for topic in topics:
            await self._keeper.await_topic(topic, self._config.default_api_timeout_ms)

    def _read_whole_topics(self, *, first: bool) -> None:
        """Without a group: every partition of the topics, and those added later.

        What appears later is read from its start: all in it is new, noticed or not.
        """
        metadata = self._cluster.metadata
        pattern = self._subscribed.pattern
        topics = metadata.matching(pattern) if pattern else list(self._subscribed.topics)
        wanted = frozenset(
            TopicPartition(topic, number)
            for topic in topics
            for number in range(metadata.partition_count(topic))
        )
        owned = self._fetch.fetcher.partitions
        gone = owned - wanted
        # A topic that was deleted may be made anew, with fewer partitions perhaps.
        self._drop(gone if first or pattern else [name for name in gone if name.topic in metadata])
        self._add(wanted - owned, reset="" if first or not self._knows_topics else "earliest")
        self._knows_topics = not pattern or self._keeper.knows_every_topic

    def _add(
        self, partitions: Iterable[TopicPartition], *, reset: str = "", from_group: bool = False
    ) -> None:
        added = tuple(sorted(partitions))
        if not added:
            return
        self._keeper.watch({entry.topic for entry in added})
        self._fetch.handle(Added(added))
        self._positions.find(added, from_group=from_group, reset=reset)

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        gone = tuple(partitions)
        if gone:
            self._fetch.handle(Removed(gone))
            self.handout.drop(gone)
            self._commits.forget(gone)
            self._positions.forget(gone)

    # --- reading ----------------------------------------------------------------------------

    async def step(
        self, deadline: Deadline, max_records: int | None, *, columns: bool = False
    ) -> bool | Rebalance:
        """Whether ``handout`` has records by the deadline, or a Rebalance to carry out before.

        They are there when it is cancelled, too: reading has gone on behind them.
        Raises ClientClosedError as soon as the consumer is closed from elsewhere. When nothing is
        there to be read and a partition does not exist (any more), raises why: at the deadline, or
        after ``retry_backoff_max_ms``. The next step may find that it exists again.
        """
        await asyncio.sleep(0)  # Heartbeats must run even where records never end.
        self._check_open()
        if not self._is_ready:
            await self._unless_closed(self._get_ready())
        if self._subscription.empty and not self._by_hand:
            raise InvalidRequestError(
                "this consumer has nothing to read: subscribe() to topics or assign() partitions"
            )
        self._polling = True
        patience = Deadline.after_ms(self._config.retry_backoff_max_ms)
        try:
            while True:
                self._check_open()
                self._stall_watch.look_at_leaders()
                self._wake.clear()
                found = self._look(max_records, columns=columns)
                if found is not None:
                    self._stall_watch.end()
                    return found
                if min(deadline.remaining_ms, patience.remaining_ms) <= 0:
                    self._check_existence()
                if deadline.remaining_ms <= 0:
                    return False
                await self._wait(deadline)
        finally:
            self._polling = False

    @property
    def _is_ready(self) -> bool:
        return self._started and self._subscription == self._subscribed and not self._may_rejoin

    async def _get_ready(self) -> None:
        await self.start()
        await self._apply_subscription()

    async def _unless_closed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what may take long, but no longer than until the consumer is closed."""
        task = asyncio.ensure_future(work)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((task, closing), return_when=asyncio.FIRST_COMPLETED)
            self._check_open()
            await task
        finally:
            closing.cancel()
            task.cancel()

    def _check_open(self) -> None:
        if self.closed:
            raise ClientClosedError("the consumer was closed while records were waited for")

    def _check_existence(self) -> None:
        """Raise why a partition does not exist; in a group the assignment will say so."""
        if self._group is None or self._by_hand:
            error = self._fetch.fetcher.absence()
            if error is not None:
                raise error

    def _look(self, max_records: int | None, *, columns: bool) -> Literal[True] | Rebalance | None:
        self._positions.catch_up()
        if self._group is not None and not self._by_hand:
            self._group.handle(Polled())
            change = self._group.member.pending_rebalance
            self.handout.interrupted = change is not None
            if change is not None:
                self._drop(change.lost)
                return change
        else:
            self.handout.interrupted = False  # By what was before assign().
        if self._failure is not None:  # After the application heard what it lost by it.
            raise self._failure.with_traceback(None)  # It would grow with every poll.
        if self._topics_changed:
            self._topics_changed = False
            self._read_whole_topics(first=False)
        handout = self.handout
        limit = max_records or (MOST_ROWS if columns else self._config.max_poll_records)
        if not handout.has_kept:
            if not columns or handout.column_rows > limit:
                self._give_back_columns()
            if not columns:
                handout.keep(self._fetch.take(limit))
            elif not handout.column_rows:
                handout.keep_columns(self._fetch.take_columns(limit))
        return True if handout.has_kept or handout.column_rows else None

    def _give_back_columns(self) -> None:
        """What an interrupted ``fetch_arrow`` left is fetched anew."""
        for run in self.handout.give_back_columns():
            topic_id = self.handout.topic_ids.get(run.partition, b"")
            self._fetch.handle(PositionFound(run.partition, Position(run.first_offset), topic_id))

    def _alive_ms(self) -> float:
        now = now_ms()
        return now if self._polling else self.handout.taken_ms(now)

    async def trouble(self) -> PenstockError | None:
        """Why something that is to be read is not; None when nothing is in the way."""
        return self._troubles.any()

    async def _wait(self, deadline: Deadline) -> None:
        wait_ms = min(deadline.remaining_ms, self._stall_watch.look_ms())
        with suppress(TimeoutError):  # The caller looks at the deadline.
            async with asyncio.timeout(wait_ms / 1000):
                await self._wake.wait()

    # --- rebalancing ------------------------------------------------------------------------

    async def give_back(self, change: Rebalance) -> None:
        """The application was told of ``revoked``: commit what is processed and stop reading."""
        await self._commit_processed(change.revoked)
        self._drop(change.revoked)

    async def take_over(self, change: Rebalance) -> tuple[TopicPartition, ...]:
        """Begin with ``assigned`` and tell the coordinator; what was taken over.

        Nothing is when a newer assignment came meanwhile.
        """
        assert self._group is not None
        taken = change.assigned if self._group.member.is_current(change) else ()
        self._group.handle(Reconciled(change))
        self._add(taken, from_group=True)
        return taken

    def _on_group_change(self, error: PenstockError | None) -> None:
        if error is not None:
            self._failure = error
        self.handout.interrupted = True
        self._progress()

    # --- positions --------------------------------------------------------------------------

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from ``offset``."""
        if offset < 0:
            raise InvalidRequestError(f"offset {offset} is negative; use seek_to_end() and such")
        self._check_assigned((partition,))
        self._positions.seek(partition, offset)

    async def seek_to(
        self, partitions: Iterable[TopicPartition], place: Literal["earliest", "latest"]
    ) -> None:
        """Read on from the beginning or the end."""
        wanted = tuple(partitions) or tuple(sorted(self.assignment()))
        self._check_assigned(wanted)
        self._positions.catch_up()
        self._positions.find(wanted, reset=place)

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record to be handed out."""
        self._check_assigned((partition,))
        self._give_back_columns()
        return await self._positions.position(partition)

    async def current_lag(self, partition: TopicPartition) -> int | None:
        """How many offsets are between the position and the end that the broker last told."""
        self._check_assigned((partition,))
        return self._positions.lag(partition)

    async def metrics(self) -> ConsumerMetrics:
        """What is known of how far behind this consumer is."""
        lags = {name: self._positions.lag(name) for name in sorted(self.assignment())}
        return ConsumerMetrics({name: lag for name, lag in lags.items() if lag is not None})

    def _on_out_of_range(self, effect: OutOfRange) -> None:
        self._positions.on_out_of_range(effect)

    def _on_made_anew(self, effect: MadeAnew) -> None:
        self._positions.on_made_anew(effect)

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed positions."""
        self._positions.catch_up()  # What is found is of the present topics.
        wanted = tuple(partitions) or tuple(sorted(self.assignment()))
        found = await self._commits.offsets.fetch(wanted, self._config.default_api_timeout_ms)
        return {partition: found.get(partition) for partition in wanted}

    async def beginning_offsets(
        self, partitions: tuple[TopicPartition, ...]
    ) -> dict[TopicPartition, int]:
        """Log starts."""
        return await self._offsets_at(partitions, -2)

    async def end_offsets(
        self, partitions: tuple[TopicPartition, ...]
    ) -> dict[TopicPartition, int]:
        """Log ends."""
        return await self._offsets_at(partitions, -1)

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """First offsets at or after times."""
        for partition, time_ms in timestamps_ms.items():
            if time_ms < 0:
                raise InvalidRequestError(f"the time {time_ms} ms for {partition} is negative")
        self._positions.catch_up()
        found = await self._leaders.list_offsets(timestamps_ms, self._config.default_api_timeout_ms)
        return {name: entry if entry.offset >= 0 else None for name, entry in found.items()}

    async def partitions_for(self, topic: str) -> tuple[int, ...]:
        """The topic's partitions."""
        await self._know_topics((topic,))
        return tuple(range(self._cluster.metadata.partition_count(topic)))

    async def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hold partitions back."""
        wanted = tuple(partitions)
        self._check_assigned(wanted)
        self._give_back_columns()
        self._fetch.pause(wanted)
        self.handout.hold(wanted)

    async def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand partitions out again."""
        wanted = tuple(partitions)
        self._check_assigned(wanted)
        self._fetch.resume(wanted)
        self.handout.release(wanted)
        self._progress()

    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return self._fetch.fetcher.paused

    async def _offsets_at(
        self, partitions: tuple[TopicPartition, ...], place: int
    ) -> dict[TopicPartition, int]:
        self._positions.catch_up()
        times = dict.fromkeys(partitions, place)
        found = await self._leaders.list_offsets(times, self._config.default_api_timeout_ms)
        return {name: entry.offset for name, entry in found.items()}

    # --- commits ----------------------------------------------------------------------------

    async def group_metadata(self) -> GroupMetadata:
        """Who this consumer is in its group. Raises why it must not commit, if it must not."""
        if self._group is None:
            raise InvalidGroupIdError("this consumer has no group_id, and so is in no group")
        return self._group.metadata()

    def to_commit(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None
    ) -> Commitment:
        """What a commit means: what was named, or the position after everything handed out."""
        return self._commits.wanted(offsets)

    async def commit(self, wanted: Commitment) -> None:
        """Commit and wait."""
        await self._cluster.start()
        await self._commits.commit(wanted, self._config.default_api_timeout_ms)

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(max(self._config.auto_commit_interval_ms, _LEAST_PAUSE_MS) / 1000)
            await self._commits.commit_processed(self._mine, renew=self._by_hand)

    @property
    def _mine(self) -> frozenset[TopicPartition]:
        """What this consumer may commit by itself.

        What the group took from it is not, even before the application has heard of it: another
        member may be ahead of us there.
        """
        mine = self.assignment()
        if self._group is not None and not self._by_hand:
            mine &= self._group.member.owned
        return mine - self._positions.made_anew

    async def _commit_processed(
        self, partitions: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> None:
        if self._config.enable_auto_commit and self._group is not None:
            await self._commits.commit_processed(self._mine.intersection(partitions), timeout_ms)

    # --- the end ----------------------------------------------------------------------------

    async def close(self, deadline: Deadline) -> None:
        """Commit, leave, free everything."""
        if self.closed:
            return
        self.closed = True
        self._closing.set()
        self.handout.interrupted = True  # Who iterates elsewhere is to hear of it.
        self._progress()
        try:
            if self._committer is not None:
                self._committer.cancel()
                await asyncio.gather(self._committer, return_exceptions=True)
            if self._cluster.started:
                await self._commit_processed(self.assignment(), max(1.0, deadline.remaining_ms))
                if self._group is not None:
                    await self._group.leave(min(_LEAVE_MS, deadline.remaining_ms))
        finally:
            if self._group is not None:
                await self._group.close()
            await self._positions.close()
            await self._fetch.close()
            await self._keeper.close()
            await self._cluster.close()

    # --- inside -----------------------------------------------------------------------------

    def _progress(self) -> None:
        self._wake.set()

    def _on_metadata(self) -> None:
        if self._group is None and not self._by_hand and not self._subscribed.empty:
            self._topics_changed = True
        self._fetch.handle(Woken())
        self._progress()

    def _check_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            if partition not in self._fetch.fetcher.partitions:
                raise InvalidRequestError(
                    f"partition {partition} is not assigned to this consumer now"
                )

    def _check_partition(self, partition: TopicPartition) -> None:
        count = self._cluster.metadata.partition_count(partition.topic)
        if not 0 <= partition.partition < count:
            raise InvalidRequestError(
                f"topic {partition.topic!r} has no partition {partition.partition}; it has 0 to "
                f"{count - 1}"
            )
