"""Which positions a consumer commits, and when: by hand, now and then, and at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.cluster import now_ms
from penstock.client.config import ConsumerConfig
from penstock.client.core.subscription import Handout, Position
from penstock.client.model import OffsetAndMetadata
from penstock.client.offsets import GroupOffsets
from penstock.wire.errors import InvalidGroupIdError, PenstockError, UnknownTopicIdError
from penstock.wire.ids import TopicPartition

_LOG: Final = logging.getLogger("penstock.client")
_RENEW_MS: Final = 30_000.0
"""Positions of a group without members are forgotten so and so long after their last commit
(``offsets.retention.minutes``): those that stay are committed again this often."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """Positions with the topics that they belong to (empty: the one that has the name when they
    are sent), or why they cannot be committed.
    """

    positions: Mapping[TopicPartition, OffsetAndMetadata]
    refusal: UnknownTopicIdError | None = None


class Commits:
    """Belongs to one event loop, but for ``wanted``. ``offsets`` is None without a group."""

    def __init__(
        self, config: ConsumerConfig, handout: Handout, offsets: GroupOffsets | None
    ) -> None:
        self._config = config
        self._handout = handout
        self._offsets = offsets
        self._committed: dict[TopicPartition, tuple[int, int, bytes]] = {}
        self._committed_ms: dict[TopicPartition, float] = {}

    @property
    def offsets(self) -> GroupOffsets:
        """The group's positions. Raises InvalidGroupIdError without a group."""
        if self._offsets is None:
            raise InvalidGroupIdError("this consumer has no group_id, and so no committed offsets")
        return self._offsets

    def wanted(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None
    ) -> Commitment:
        """What a commit means: what was named, or the position after everything handed out.

        A number that says nothing of its topic is one of the topic that this consumer reads there,
        or read last: coordinators refuse it once another has the name. Where it read both, a number
        beyond what it had of the present one must be the old one's, and is refused here.
        """
        delivered = self._handout.delivered()
        if offsets is None:
            return Commitment(self._committable(delivered))
        named: dict[TopicPartition, OffsetAndMetadata] = {}
        refusal: UnknownTopicIdError | None = None
        for partition, given in offsets.items():
            entry = given if isinstance(given, OffsetAndMetadata) else OffsetAndMetadata(given)
            if not entry.topic_id:
                refusal = self._old_number(partition, entry, delivered.get(partition)) or refusal
                entry = replace(entry, topic_id=self._handout.last_ids.get(partition, b""))
            named[partition] = entry
        return Commitment(named, refusal)

    async def commit(
        self, wanted: Commitment, timeout_ms: float, *, leave_out_lost: bool = False
    ) -> None:
        """Commit and wait. Raises UnknownTopicIdError for positions of topics that are gone."""
        offsets = self.offsets
        if wanted.refusal is not None:
            raise wanted.refusal
        stored = await offsets.commit(wanted.positions, timeout_ms, leave_out_lost=leave_out_lost)
        for partition, entry in stored.items():
            self._committed[partition] = _identity(entry)
            self._committed_ms[partition] = now_ms()

    async def commit_processed(
        self,
        mine: Iterable[TopicPartition],
        timeout_ms: float | None = None,
        *,
        renew: bool = False,
    ) -> None:
        """Commit what is processed and not committed yet of ``mine``; a failure is only logged.

        With ``renew``, for who reads without being a member, also what was committed long ago.
        What was given back while the commit waited for its turn was committed by that.
        """
        processed = self._handout.processed()
        positions = self._committable(
            {
                partition: position
                for partition in mine
                if (position := processed.get(partition)) is not None
            }
        )
        oldest_ms = now_ms() - _RENEW_MS if renew else float("-inf")
        new = {
            partition: entry
            for partition, entry in positions.items()
            if self._committed.get(partition) != _identity(entry)
            or self._committed_ms.get(partition, oldest_ms) < oldest_ms
        }
        if not new:
            return
        try:
            await self.commit(
                Commitment(new),
                timeout_ms or self._config.request_timeout_ms,
                leave_out_lost=True,
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
            self._committed_ms.pop(partition, None)

    def _committable(
        self, positions: Mapping[TopicPartition, Position]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        ids = self._handout.topic_ids
        return {
            partition: OffsetAndMetadata(
                position.offset, position.leader_epoch, topic_id=ids.get(partition, b"")
            )
            for partition, position in positions.items()
        }

    def _old_number(
        self, partition: TopicPartition, entry: OffsetAndMetadata, position: Position | None
    ) -> UnknownTopicIdError | None:
        if partition not in self._handout.renewed:
            return None
        if position is not None and entry.offset <= position.offset:
            return None
        here = f"position {position.offset}" if position is not None else "position, now unknown,"
        return UnknownTopicIdError(
            f"partition {partition}: offset {entry.offset} was not committed. The topic was "
            "deleted and made anew while this consumer ran, and the offset is beyond its "
            f"{here} in the new one: it may be one of the old topic. Commit records' "
            "position_after, or an OffsetAndMetadata with the topic_id"
        )


def _identity(entry: OffsetAndMetadata) -> tuple[int, int, bytes]:
    return entry.offset, entry.leader_epoch, entry.topic_id
