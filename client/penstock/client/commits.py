"""Which positions a consumer commits, and when: by hand, now and then, and at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.client.config import ConsumerConfig
from penstock.client.core.subscription import Handout, Position
from penstock.client.model import OffsetAndMetadata
from penstock.client.offsets import GroupOffsets
from penstock.wire.errors import InvalidGroupIdError, PenstockError
from penstock.wire.ids import TopicPartition

_LOG: Final = logging.getLogger("penstock.client")


class Commits:
    """Belongs to one event loop, but for ``wanted``. ``offsets`` is None without a group."""

    def __init__(
        self, config: ConsumerConfig, handout: Handout, offsets: GroupOffsets | None
    ) -> None:
        self._config = config
        self._handout = handout
        self._offsets = offsets
        self._committed: dict[TopicPartition, Position] = {}

    @property
    def offsets(self) -> GroupOffsets:
        """The group's positions. Raises InvalidGroupIdError without a group."""
        if self._offsets is None:
            raise InvalidGroupIdError("this consumer has no group_id, and so no committed offsets")
        return self._offsets

    def wanted(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a commit means: what was named, or the position after everything handed out."""
        if offsets is None:
            return _committable(self._handout.delivered())
        return {
            partition: entry if isinstance(entry, OffsetAndMetadata) else OffsetAndMetadata(entry)
            for partition, entry in offsets.items()
        }

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float
    ) -> None:
        """Commit and wait."""
        await self.offsets.commit(offsets, timeout_ms)
        for partition, entry in offsets.items():
            self._committed[partition] = Position(entry.offset, entry.leader_epoch)

    async def commit_processed(
        self, mine: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> None:
        """Commit what is processed and not committed yet of ``mine``; a failure is only logged."""
        positions = {
            partition: position
            for partition in mine
            if (position := self._handout.consumed.get(partition)) is not None
            and self._committed.get(partition) != position
        }
        if not positions:
            return
        try:
            await self.commit(
                _committable(positions), timeout_ms or self._config.request_timeout_ms
            )
        except PenstockError as error:
            _LOG.warning(
                "group %s: automatic commit failed, records may come again: %s",
                self._config.group_id,
                error,
            )

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are no longer read."""
        for partition in partitions:
            self._committed.pop(partition, None)


def _committable(
    positions: Mapping[TopicPartition, Position],
) -> dict[TopicPartition, OffsetAndMetadata]:
    return {
        partition: OffsetAndMetadata(position.offset, position.leader_epoch)
        for partition, position in positions.items()
    }
