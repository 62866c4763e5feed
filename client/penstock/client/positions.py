"""Where reading begins: committed positions, the reset policy, seeks.

Every position is found for one topic id, and belongs to it: the group and the leaders are asked
about the same one. When another topic has the name meanwhile, the search begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client import offset_reset
from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import ConsumerConfig
from penstock.client.core.fetch_events import (
    MadeAnew,
    OutOfRange,
    PositionFailed,
    PositionFound,
    PositionLost,
)
from penstock.client.core.member import Member
from penstock.client.core.subscription import Handout, Position
from penstock.client.fetch_loop import FetchLoop
from penstock.client.leader_calls import LeaderCalls
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.model import OffsetAndTimestamp
from penstock.client.offsets import GroupOffsets
from penstock.wire.errors import (
    FencedMemberEpochError,
    NoOffsetError,
    PenstockError,
    RequestTimedOutError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason

_LOG: Final = logging.getLogger("penstock.client")
_NOT_A_MEMBER_NOW: Final = (StaleMemberEpochError, UnknownMemberIdError, FencedMemberEpochError)
"""Heartbeats find these out as well, and mend them: by a newer epoch, or by joining anew."""
_PLACES: Final[Mapping[str, int]] = {"earliest": -2, "latest": -1}


@dataclass(frozen=True, slots=True)
class _How:
    """How positions are looked for: see ``Positions.find``."""

    from_group: bool
    policy: str
    why: str


def _waiting(message: str) -> RequestTimedOutError:
    error = RequestTimedOutError(message)
    error.reason = StallReason.WAITING_FOR_POSITION
    return error


def _time_ms(policy: str) -> int:
    """What leaders are asked for: a time, or the number that stands for a place."""
    duration_ms = offset_reset.duration_ms(policy)
    if duration_ms is None:
        return _PLACES[policy]
    return max(0, int(time.time() * 1000) - duration_ms)


class Positions:
    """Finds positions in the background and tells the fetcher. Belongs to one event loop.

    Every search for a partition has a number; one that a later search or seek overtook changes
    nothing.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        *,
        keeper: MetadataKeeper,
        fetch: FetchLoop,
        leaders: LeaderCalls,
        handout: Handout,
        offsets: GroupOffsets | None,
        member: Member | None,
        on_progress: Callable[[], object],
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._keeper = keeper
        self._fetch = fetch
        self._leaders = leaders
        self._handout = handout
        self._offsets = offsets
        self._member = member
        self._on_progress = on_progress
        self._made_anew: set[TopicPartition] = set()
        self._out_of_range: dict[TopicPartition, OutOfRange] = {}
        self._told: dict[TopicPartition, bytes] = {}  # The topic that the application knows of.
        self._untold: set[TopicPartition] = set()  # Read in another one already.
        self._waiting = 0  # Calls that wait for a position.
        self._searches: dict[TopicPartition, int] = {}
        self._next_search = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # --- what happened, until the application waits in a call -------------------------------

    @property
    def made_anew(self) -> frozenset[TopicPartition]:
        """What is of topics that were made anew, and has not been given new positions yet."""
        return frozenset(self._made_anew)

    def on_made_anew(self, effect: MadeAnew) -> None:
        """A partition's topic is another one now: its position does not hold."""
        self._made_anew.add(effect.partition)
        self._interrupt()

    def on_out_of_range(self, effect: OutOfRange) -> None:
        """The log no longer has (or never had) the position."""
        self._out_of_range[effect.partition] = effect
        self._interrupt()

    def _interrupt(self) -> None:
        self._handout.interrupted = True
        if self._waiting:
            self.catch_up()
        self._on_progress()

    def catch_up(self) -> None:
        """Look for positions where the old ones do not hold, and forget what was read by those.

        Done while the application waits in a call: what it was handed out, and what is kept for
        it, is its own until then.
        """
        self._tell_application()
        for partition, effect in list(self._out_of_range.items()):
            # What was fetched before such a position is good, and the application's first.
            kept = self._handout.first_kept(partition)
            if kept is None or effect.safe_offset >= 0:
                del self._out_of_range[partition]
                self._reset(effect, kept)
        if self._made_anew:
            partitions = tuple(self._made_anew)
            self._made_anew.clear()
            self._begin_anew(partitions)

    def _tell_application(self) -> None:
        """It waits in a call: what was logged until now was said before whatever it does next."""
        while self._untold:
            partition = self._untold.pop()
            self._told[partition] = self._handout.last_ids[partition]

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are no longer read."""
        for partition in partitions:
            self._made_anew.discard(partition)
            self._out_of_range.pop(partition, None)

    # --- finding positions ------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from the offset that the application named.

        When the topic was made anew and the application has not been told, the number is one of the
        old topic: it is dropped with a warning, and what holds is what any other call would find.
        """
        told = self._told.get(partition, b"")
        now = self._cluster.metadata.topic_id(partition.topic)
        self.catch_up()
        if told and now and told != now:
            self._told[partition] = now
            _LOG.warning(
                "the seek to offset %d of partition %s is dropped: the topic was deleted and made "
                "anew, and the seek was asked for before this was said. Seek again if it was meant "
                "for the new one",
                offset,
                partition,
            )
        else:
            self._set(partition, Position(offset), now or told)

    def _set(self, partition: TopicPartition, position: Position, topic_id: bytes) -> None:
        """Read from here in the topic with this id, whatever was being looked for."""
        self._handout.drop((partition,))
        self._begin(partition, position, topic_id)

    def _begin(self, partition: TopicPartition, position: Position, topic_id: bytes) -> None:
        if topic_id and self._told.setdefault(partition, topic_id) != topic_id:
            self._untold.add(partition)
            _LOG.warning(
                "topic %s was deleted and made anew: partition %d of the new one is read from "
                "offset %d on",
                partition.topic,
                partition.partition,
                position.offset,
            )
        self._searches.pop(partition, None)
        self._out_of_range.pop(partition, None)
        self._handout.begin(partition, position, topic_id)
        self._fetch.handle(PositionFound(partition, position, topic_id))
        self._tell()

    def find(
        self,
        partitions: Iterable[TopicPartition],
        *,
        from_group: bool = False,
        reset: str = "",
        why: str = "",
    ) -> None:
        """Look for positions: the group's committed ones, if wanted, and by ``reset`` (or the
        configured policy) where there is none. ``why`` goes before what is raised when none can be
        had.
        """
        self._next_search += 1
        search = self._next_search
        wanted = tuple(partitions)
        for partition in wanted:
            self._searches[partition] = search
            self._out_of_range.pop(partition, None)
            self._handout.drop((partition,))
            self._fetch.handle(PositionLost(partition))
        how = _How(from_group, reset or self._config.auto_offset_reset, why)
        task = asyncio.ensure_future(self._search(search, wanted, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reset(self, effect: OutOfRange, kept: int | None) -> None:
        """``kept`` is the first offset that was fetched and not handed out, if there is one."""
        partition = effect.partition
        policy = self._config.auto_offset_reset
        if effect.safe_offset >= 0:
            offset = effect.safe_offset if kept is None else min(effect.safe_offset, kept)
            _LOG.warning(
                "%s; reading on from offset %d (records after the cut were lost with their leader)",
                effect.error,
                offset,
            )
            topic_id = self._handout.topic_ids.get(partition, b"")
            self._set(partition, Position(offset), topic_id)
        elif policy == "none":
            self._fetch.handle(PositionFailed(partition, effect.error))
            self._tell()
        else:
            _LOG.warning(
                "partition %s: position %d is out of range, going on by auto_offset_reset=%r: %s",
                partition,
                effect.offset,
                policy,
                effect.error,
            )
            self.find((partition,), reset=policy)

    def _begin_anew(self, partitions: Iterable[TopicPartition]) -> None:
        by_topic: dict[str, list[TopicPartition]] = {}
        for partition in sorted(partitions):
            by_topic.setdefault(partition.topic, []).append(partition)
        for topic, part in by_topic.items():
            numbers = ", ".join(str(partition.partition) for partition in part)
            _LOG.warning(
                "topic %s was deleted and made anew: the old positions in partitions %s do not "
                "hold, going on by %sauto_offset_reset=%r",
                topic,
                numbers,
                "" if self._offsets is None else "the group's positions in the new topic or ",
                self._config.auto_offset_reset,
            )
            topic_id = self._cluster.metadata.topic_id(topic)
            if topic_id:
                self._told.update(dict.fromkeys(part, topic_id))
            why = f"topic {topic!r} was deleted and made anew, and the old position does not hold: "
            self.find(part, from_group=True, why=why)

    async def position(self, partition: TopicPartition) -> int:
        """The next offset to be handed out, waiting while it is looked for."""
        self._waiting += 1
        try:
            self.catch_up()
            kept = self._handout.first_kept(partition)
            return kept if kept is not None else await self._cursor(partition)
        finally:
            self._tell_application()
            self._waiting -= 1

    async def _cursor(self, partition: TopicPartition) -> int:
        timeout_ms = self._config.default_api_timeout_ms
        deadline = now_ms() + timeout_ms
        while True:
            fetcher = self._fetch.fetcher
            if partition in fetcher.partitions:
                error = fetcher.error(partition)
                cursor = fetcher.cursor(partition)
                if cursor is not None:
                    return cursor
                if error is not None:
                    raise error
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - now_ms()) / 1000):
                    await self._changed.wait()
            except TimeoutError:
                raise RequestTimedOutError(
                    f"the position of partition {partition} was not found within "
                    f"default_api_timeout_ms={timeout_ms}"
                ) from None

    def lag(self, partition: TopicPartition) -> int | None:
        """How far the position is from the end that the broker last told, where both are known."""
        end = self._fetch.fetcher.end_offset(partition)
        position = self._handout.first_kept(partition)
        if position is None:
            position = self._fetch.fetcher.cursor(partition)
        return None if end is None or position is None else max(0, end - position)

    def trouble(self) -> PenstockError | None:
        """Why it is not known yet where something that is to be read begins; None if all is."""
        unplaced = sorted(self._fetch.fetcher.unplaced())
        if not unplaced:
            return None
        for partition in unplaced:
            failure = self._leaders.failure_of(partition)
            if failure is not None:
                return _waiting(
                    f"where reading partition {partition} begins was not found yet: its leader, "
                    f"{failure.message}; next: see `penstock cluster describe`, and start that "
                    "broker, or wait until another one leads"
                )
        return _waiting(
            f"where reading partition {unplaced[0]} begins was not found yet; next: give it "
            "more time, and see `penstock cluster describe`"
        )

    async def close(self) -> None:
        """Stop looking."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(
        self,
        search: int,
        partitions: tuple[TopicPartition, ...],
        how: _How,
    ) -> None:
        attempt = 0
        asked: dict[TopicPartition, bytes] = {}  # What the group has no position for.
        while open_ones := self._still_wanted(search, partitions):
            ids = self._topic_ids(open_ones)
            try:
                if not ids:
                    await self._keeper.updated(self._cluster.backoff.most_ms)
                    continue
                if how.from_group and self._offsets is not None:
                    unasked = {name: ids[name] for name in ids if asked.get(name) != ids[name]}
                    await self._from_group(search, unasked, self._offsets)
                    asked.update(unasked)
                left = self._still_wanted(search, tuple(ids))
                await self._from_logs(search, {name: ids[name] for name in left}, how)
            except PenstockError as error:
                if not error.retriable and not isinstance(error, _NOT_A_MEMBER_NOW):
                    self._give_up(search, open_ones, error)
                    return
                _LOG.info("looking for positions again: %s", error.message)
                await asyncio.sleep(self._cluster.backoff.delay_ms(attempt) / 1000)
                attempt += 1

    def _topic_ids(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bytes]:
        """The topic ids of those partitions that exist, as far as known."""
        metadata = self._cluster.metadata
        return {
            partition: metadata.topic_id(partition.topic)
            for partition in partitions
            if metadata.leader(partition) is not None
        }

    async def _from_group(
        self,
        search: int,
        topic_ids: Mapping[TopicPartition, bytes],
        offsets: GroupOffsets,
    ) -> None:
        timeout_ms = self._config.request_timeout_ms
        found = await offsets.fetch(topic_ids, timeout_ms, self._member, topic_ids)
        for partition, entry in found.items():
            position = Position(entry.offset, entry.leader_epoch)
            self._found(search, partition, position, topic_ids[partition])

    async def _from_logs(
        self, search: int, topic_ids: Mapping[TopicPartition, bytes], how: _How
    ) -> None:
        if how.policy == "none":
            for partition in topic_ids:
                group = self._config.group_id
                has_no = f"committed offset in group {group!r}" if group is not None else "position"
                error = NoOffsetError(
                    f"{how.why}partition {partition} has no {has_no} and auto_offset_reset='none'; "
                    "seek() to where reading shall begin"
                )
                self._give_up(search, (partition,), error)
            return
        if not topic_ids:
            return
        timeout_ms = self._config.request_timeout_ms
        too_old: list[TopicPartition] = []  # All that is in them is.

        def found(partition: TopicPartition, entry: OffsetAndTimestamp) -> None:
            if entry.offset < 0:
                too_old.append(partition)
            else:
                self._found(search, partition, Position(entry.offset), topic_ids[partition])

        # Each as it comes: a partition without a leader must not hold back the others.
        times = dict.fromkeys(topic_ids, _time_ms(how.policy))
        await self._leaders.list_offsets(times, timeout_ms, topic_ids, found)
        if too_old:
            latest = dict.fromkeys(too_old, _PLACES["latest"])
            ends = await self._leaders.list_offsets(latest, timeout_ms, topic_ids)
            # What was written between the two answers is not too old, and before the end.
            by_time = {partition: times[partition] for partition in too_old}
            again = await self._leaders.list_offsets(by_time, timeout_ms, topic_ids)
            for partition, entry in again.items():
                found(partition, entry if entry.offset >= 0 else ends[partition])

    def _still_wanted(
        self, search: int, partitions: tuple[TopicPartition, ...]
    ) -> tuple[TopicPartition, ...]:
        owned = self._fetch.fetcher.partitions
        return tuple(
            partition
            for partition in partitions
            if self._searches.get(partition) == search and partition in owned
        )

    def _found(
        self, search: int, partition: TopicPartition, position: Position, topic_id: bytes
    ) -> None:
        if self._still_wanted(search, (partition,)):
            self._begin(partition, position, topic_id)

    def _give_up(
        self, search: int, partitions: tuple[TopicPartition, ...], error: PenstockError
    ) -> None:
        for partition in self._still_wanted(search, partitions):
            del self._searches[partition]
            self._fetch.handle(PositionFailed(partition, error))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._on_progress()
