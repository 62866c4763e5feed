"""What a consumer does on its event loop, for the sync and the asyncio front alike."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from penstock.client import serializers
from penstock.client.cluster import Cluster, now_ms
from penstock.client.commits import Commits
from penstock.client.config import ConsumerConfig
from penstock.client.coordinator import Coordinators
from penstock.client.core.fetch_events import Added, OutOfRange, Removed, Woken
from penstock.client.core.member import MemberState, Polled, Reconciled, Subscribed
from penstock.client.core.subscription import Handout, Position, Rebalance, Subscription
from penstock.client.fetch_loop import FetchLoop
from penstock.client.group_link import GroupLink
from penstock.client.leader_calls import LeaderCalls
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.model import ConsumerRecord, OffsetAndMetadata, OffsetAndTimestamp
from penstock.client.offsets import GroupOffsets
from penstock.client.positions import Positions
from penstock.wire.errors import (
    ClientClosedError,
    ConsumerStalledError,
    InvalidRequestError,
    PenstockError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import Record

_LOG: Final = logging.getLogger("penstock.client")
_STALL_MS: Final = 10_000.0
_LEAVE_MS: Final = 2_000.0
_LEAST_PAUSE_MS: Final = 10.0
"""Between automatic commits, however often they are asked for."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, or never."""

    at_ms: float

    @classmethod
    def after_ms(cls, timeout_ms: float | None) -> Self:
        """So long from now; None means never."""
        return cls(float("inf") if timeout_ms is None else now_ms() + timeout_ms)

    @classmethod
    def never(cls) -> Self:
        """No deadline."""
        return cls(float("inf"))

    @property
    def remaining_ms(self) -> float:
        """How long until then, at least 0."""
        return max(0.0, self.at_ms - now_ms())


class ConsumerEngine:
    """Everything but ``handout`` (see there), ``subscribe`` and the plain questions belongs to
    one event loop, and to one caller at a time.
    """

    def __init__(self, config: ConsumerConfig) -> None:
        self._config = config
        self.handout = Handout()
        self.closed = False
        self._cluster = Cluster(config)
        self._keeper = MetadataKeeper(self._cluster, self._on_metadata)
        self._coordinators = Coordinators(self._cluster)
        self._leaders = LeaderCalls(self._cluster, self._keeper)
        self._fetch = FetchLoop(
            self._cluster,
            self._keeper,
            config,
            on_progress=self._progress,
            on_out_of_range=self._on_out_of_range,
        )
        self._group: GroupLink | None = None
        self._offsets: GroupOffsets | None = None
        if config.group_id is not None:
            self._group = GroupLink(
                self._cluster,
                self._coordinators,
                config,
                alive_ms=lambda: now_ms() if self._polling else self.handout.taken_ms,
                on_change=self._on_group_change,
            )
            self._offsets = GroupOffsets(
                self._cluster, self._coordinators, config.group_id, self._group
            )
        self._commits = Commits(config, self.handout, self._offsets)
        self._positions = Positions(
            config,
            self._cluster,
            fetch=self._fetch,
            leaders=self._leaders,
            handout=self.handout,
            on_progress=self._progress,
        )
        self._key = serializers.deserializer("key_deserializer", config.key_deserializer)
        self._value = serializers.deserializer("value_deserializer", config.value_deserializer)
        self._subscription = Subscription()
        self._subscribed = Subscription()  # What is in force.
        self._by_hand = False
        self._topics_changed = False
        self._failure: PenstockError | None = None
        self._started = False
        self._polling = False
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._committer: asyncio.Task[None] | None = None
        self._stalled_ms = float("inf")

    # --- subscription -----------------------------------------------------------------------

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str]) -> None:
        """Note the wish; the next step carries it out."""
        if self._by_hand:
            raise InvalidRequestError(
                "this consumer was given partitions by assign(); unsubscribe() first"
            )
        if isinstance(topics, re.Pattern):
            self._subscription = Subscription(pattern=_pattern(topics))
        else:
            names = (topics,) if isinstance(topics, str) else tuple(topics)
            for name in names:
                if not isinstance(name, str) or not name:
                    raise InvalidRequestError(f"{name!r} is not a topic's name")
            self._subscription = Subscription(topics=tuple(dict.fromkeys(names)))
        self._failure = None

    async def unsubscribe(self) -> None:
        """Leave the group and give everything back."""
        await self._commit_at_end(Deadline.after_ms(self._config.default_api_timeout_ms))
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
        self._by_hand = bool(wanted)
        owned = self._fetch.fetcher.partitions
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

        A partition that appears later is read from its start, whatever the reset policy: what
        was written before we noticed it is new as well.
        """
        metadata = self._cluster.metadata
        pattern = self._subscribed.pattern
        topics = (
            [
                name
                for name, info in metadata.topics.items()
                if not info.internal and re.fullmatch(pattern, name)
            ]
            if pattern
            else list(self._subscribed.topics)
        )
        wanted = frozenset(
            TopicPartition(topic, number)
            for topic in topics
            for number in range(metadata.partition_count(topic))
        )
        owned = self._fetch.fetcher.partitions
        if first or pattern:
            self._drop(owned - wanted)
        self._add(wanted - owned, reset="" if first or pattern else "earliest")

    def _add(
        self, partitions: Iterable[TopicPartition], *, reset: str = "", from_group: bool = False
    ) -> None:
        added = tuple(sorted(partitions))
        if not added:
            return
        self._keeper.watch({entry.topic for entry in added})
        self._fetch.handle(Added(added))
        offsets = self._offsets if from_group else None
        member = self._group.member if self._group is not None and from_group else None
        self._positions.find(added, offsets=offsets, member=member, reset=reset)

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        gone = tuple(partitions)
        if gone:
            self._fetch.handle(Removed(gone))
            self.handout.drop(gone)
            self._commits.forget(gone)

    # --- reading ----------------------------------------------------------------------------

    async def step(self, deadline: Deadline, max_records: int | None) -> bool | Rebalance:
        """Whether ``handout`` has records by the deadline, or a Rebalance to carry out before.

        They are there when it is cancelled, too: reading has gone on behind them.
        Raises ClientClosedError as soon as the consumer is closed from elsewhere.
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
        try:
            while True:
                self._check_open()
                self._wake.clear()
                found = self._look(max_records or self._config.max_poll_records)
                if found is not None:
                    self._stalled_ms = float("inf")
                    return found
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

    def _look(self, limit: int) -> Literal[True] | Rebalance | None:
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
            raise self._failure
        if self._topics_changed:
            self._topics_changed = False
            self._read_whole_topics(first=False)
        if not self.handout.has_kept:
            self.handout.keep(self._fetch.take(limit, self._convert))
        return True if self.handout.has_kept else None

    async def _wait(self, deadline: Deadline) -> None:
        trouble = self._fetch.fetcher.trouble()
        if trouble is None and self._group is not None:
            trouble = self._group.trouble
        if trouble is None:
            self._stalled_ms = float("inf")
        elif self._stalled_ms == float("inf"):
            self._stalled_ms = now_ms()
        elif now_ms() - self._stalled_ms >= _STALL_MS:
            if not trouble.retriable:
                self._stalled_ms = float("inf")
                raise ConsumerStalledError(
                    f"no record for {_STALL_MS / 1000:.0f} s, and what is in the way will not go "
                    f"by itself: {trouble.message}"
                ) from trouble
            _LOG.warning("no record for %.0f s: %s", _STALL_MS / 1000, trouble)
            self._stalled_ms = now_ms()
        try:
            async with asyncio.timeout(min(deadline.remaining_ms, _STALL_MS) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass  # The caller looks at the deadline.

    def _convert(self, partition: TopicPartition, record: Record, epoch: int) -> ConsumerRecord:
        key, value = record.key, record.value
        if self._key is not None:
            key = serializers.deserialize("key", f"{partition}@{record.offset}", self._key, key)
        if self._value is not None:
            where = f"{partition}@{record.offset}"
            value = serializers.deserialize("value", where, self._value, value)
        return ConsumerRecord(
            partition.topic,
            partition.partition,
            record.offset,
            record.timestamp_ms,
            key,
            value,
            record.headers,
            epoch,
        )

    # --- rebalancing ------------------------------------------------------------------------

    async def give_back(self, change: Rebalance) -> None:
        """The application was told of ``revoked``: commit what is processed and stop reading."""
        if self._config.enable_auto_commit:
            await self._commits.commit_processed(self._mine.intersection(change.revoked))
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
        self._positions.set(partition, Position(offset))

    async def seek_to(
        self, partitions: Iterable[TopicPartition], place: Literal["earliest", "latest"]
    ) -> None:
        """Read on from the beginning or the end."""
        wanted = tuple(partitions) or tuple(sorted(self.assignment()))
        self._check_assigned(wanted)
        self._positions.find(wanted, offsets=None, member=None, reset=place)

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record to be handed out."""
        self._check_assigned((partition,))
        kept = self.handout.first_kept(partition)
        if kept is not None:
            return kept
        return await self._positions.position(partition)

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed positions."""
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
        self._fetch.pause(wanted)

    async def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand partitions out again."""
        wanted = tuple(partitions)
        self._check_assigned(wanted)
        self._fetch.resume(wanted)
        self._progress()

    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return self._fetch.fetcher.paused

    async def _offsets_at(
        self, partitions: tuple[TopicPartition, ...], place: int
    ) -> dict[TopicPartition, int]:
        times = dict.fromkeys(partitions, place)
        found = await self._leaders.list_offsets(times, self._config.default_api_timeout_ms)
        return {name: entry.offset for name, entry in found.items()}

    def _on_out_of_range(self, effect: OutOfRange) -> None:
        self._positions.out_of_range(effect)

    # --- commits ----------------------------------------------------------------------------

    def offsets_to_commit(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a commit means: what was named, or the position after everything handed out."""
        return self._commits.wanted(offsets)

    async def commit(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None
    ) -> None:
        """Commit and wait."""
        wanted = self._commits.wanted(offsets)
        await self._cluster.start()
        await self._commits.commit(wanted, self._config.default_api_timeout_ms)

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(max(self._config.auto_commit_interval_ms, _LEAST_PAUSE_MS) / 1000)
            await self._commits.commit_processed(self._mine)

    @property
    def _mine(self) -> frozenset[TopicPartition]:
        """What this consumer may commit by itself.

        What the group took from it is not, even before the application has heard of it: another
        member may be ahead of us there.
        """
        mine = self.assignment()
        if self._group is not None and not self._by_hand:
            mine &= self._group.member.owned
        return mine

    async def _commit_at_end(self, deadline: Deadline) -> None:
        if self._config.enable_auto_commit and self._group is not None:
            await self._commits.commit_processed(self._mine, max(1.0, deadline.remaining_ms))

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
                await self._commit_at_end(deadline)
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


def _pattern(compiled: re.Pattern[str]) -> str:
    """The pattern's text, which is all that the coordinator gets and matches by."""
    if not isinstance(compiled.pattern, str) or not compiled.pattern:
        raise InvalidRequestError(f"{compiled.pattern!r} is not a pattern over topics' names")
    flags = re.RegexFlag(compiled.flags & ~(re.UNICODE | re.ASCII))  # Names are ASCII anyhow.
    if flags:
        raise InvalidRequestError(
            f"the pattern {compiled.pattern!r} has flags ({flags!r}), and subscriptions know none: "
            "write it without, for example [Tt] for re.IGNORECASE"
        )
    return compiled.pattern
