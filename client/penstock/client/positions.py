"""Where reading begins: committed positions, the reset policy, seeks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import ConsumerConfig
from penstock.client.core.fetch_events import (
    OutOfRange,
    PositionFailed,
    PositionFound,
    PositionLost,
)
from penstock.client.core.member import Member
from penstock.client.core.subscription import Handout, Position
from penstock.client.fetch_loop import FetchLoop
from penstock.client.leader_calls import LeaderCalls
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

_LOG: Final = logging.getLogger("penstock.client")
_NOT_A_MEMBER_NOW: Final = (StaleMemberEpochError, UnknownMemberIdError, FencedMemberEpochError)
"""Heartbeats find these out as well, and mend them: by a newer epoch, or by joining anew."""
_PLACES: Final[Mapping[str, int]] = {"earliest": -2, "latest": -1}


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
        fetch: FetchLoop,
        leaders: LeaderCalls,
        handout: Handout,
        on_progress: Callable[[], object],
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._fetch = fetch
        self._leaders = leaders
        self._handout = handout
        self._on_progress = on_progress
        self._searches: dict[TopicPartition, int] = {}
        self._next_search = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def set(self, partition: TopicPartition, position: Position) -> None:
        """Read from here, whatever was being looked for."""
        self._searches.pop(partition, None)
        self._handout.begin(partition, position)
        self._fetch.handle(PositionFound(partition, position))
        self._tell()

    def find(
        self,
        partitions: Iterable[TopicPartition],
        *,
        offsets: GroupOffsets | None,
        member: Member | None,
        reset: str = "",
    ) -> None:
        """Look for positions: the group's committed ones, and by ``reset`` (or the configured
        policy) where there is none.
        """
        self._next_search += 1
        search = self._next_search
        wanted = tuple(partitions)
        for partition in wanted:
            self._searches[partition] = search
            self._handout.drop((partition,))
            self._fetch.handle(PositionLost(partition))
        task = asyncio.ensure_future(self._search(search, wanted, offsets, member, reset))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def out_of_range(self, effect: OutOfRange) -> None:
        """The log no longer has (or never had) the position."""
        policy = self._config.auto_offset_reset
        if effect.safe_offset >= 0:
            _LOG.warning(
                "%s; reading on from there (records after it were lost with their leader)",
                effect.error,
            )
            self.set(effect.partition, Position(effect.safe_offset))
        elif policy == "none":
            self._fetch.handle(PositionFailed(effect.partition, effect.error))
            self._tell()
        else:
            _LOG.warning(
                "partition %s: position %d is out of range, going on from the %s offset: %s",
                effect.partition,
                effect.offset,
                policy,
                effect.error,
            )
            self.find((effect.partition,), offsets=None, member=None, reset=policy)

    async def position(self, partition: TopicPartition) -> int:
        """The next offset to be taken, waiting while it is looked for."""
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
        offsets: GroupOffsets | None,
        member: Member | None,
        reset: str,
    ) -> None:
        attempt = 0
        open_ones = partitions
        while open_ones := self._still_wanted(search, open_ones):
            try:
                if offsets is not None:
                    open_ones = await self._from_group(search, open_ones, offsets, member)
                    offsets = None
                await self._from_logs(search, self._still_wanted(search, open_ones), reset)
                return
            except PenstockError as error:
                if not error.retriable and not isinstance(error, _NOT_A_MEMBER_NOW):
                    self._give_up(search, open_ones, error)
                    return
                _LOG.info("looking for positions again: %s", error.message)
                await asyncio.sleep(self._cluster.backoff.delay_ms(attempt) / 1000)
                attempt += 1

    async def _from_group(
        self,
        search: int,
        partitions: tuple[TopicPartition, ...],
        offsets: GroupOffsets,
        member: Member | None,
    ) -> tuple[TopicPartition, ...]:
        """Those that the group has no position for."""
        found = await offsets.fetch(partitions, self._config.request_timeout_ms, member)
        for partition, entry in found.items():
            self._found(search, partition, Position(entry.offset, entry.leader_epoch))
        return tuple(partition for partition in partitions if partition not in found)

    async def _from_logs(
        self, search: int, partitions: tuple[TopicPartition, ...], reset: str
    ) -> None:
        policy = reset or self._config.auto_offset_reset
        if policy == "none":
            for partition in partitions:
                group = self._config.group_id
                self._give_up(
                    search,
                    (partition,),
                    NoOffsetError(
                        f"partition {partition} has no committed offset in group {group!r} and "
                        "auto_offset_reset='none'; seek() to where reading shall begin"
                        if group is not None
                        else f"partition {partition} has no position and auto_offset_reset="
                        "'none'; seek() to where reading shall begin"
                    ),
                )
            return
        times = dict.fromkeys(partitions, _PLACES[policy])
        if not times:
            return
        found = await self._leaders.list_offsets(times, self._config.request_timeout_ms)
        for partition, entry in found.items():
            self._found(search, partition, Position(entry.offset))

    def _still_wanted(
        self, search: int, partitions: tuple[TopicPartition, ...]
    ) -> tuple[TopicPartition, ...]:
        owned = self._fetch.fetcher.partitions
        return tuple(
            partition
            for partition in partitions
            if self._searches.get(partition) == search and partition in owned
        )

    def _found(self, search: int, partition: TopicPartition, position: Position) -> None:
        if self._still_wanted(search, (partition,)):
            self.set(partition, position)

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
