"""How far groups are behind, and for how long they have stood still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.wire.ids import TopicPartition

Committed = Mapping[str, Mapping[TopicPartition, int]]
"""By group the position committed for each partition."""


class Lag(NamedTuple):
    """How a group stands in a topic."""

    records: int
    """Those that are not committed yet, of all partitions that have a position."""

    stalled_s: float
    """For how long the same position has been seen in a partition that has more; of the partition
    where that is longest. 0: in each one all is committed, or the position moved since the look
    before.
    """


class GroupProgress:
    """Compares what is committed with where the logs end, look by look.

    It remembers of each partition in which a group is behind since when it has seen this position:
    no more entries than there are committed positions. What it has not seen it does not guess: a
    coordinator that has just taken a group over begins to count anew. Not thread-safe.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, TopicPartition], tuple[int, float]] = {}

    def look(
        self, committed: Committed, ends: Mapping[TopicPartition, int], now_s: float
    ) -> dict[tuple[str, str], Lag]:
        """How each group stands in each topic, with ``now_s`` of a clock that never goes back.

        A topic of which one partition's end is not known is left out: a sum that lacks a part would
        look like progress. What is remembered of such a partition stays.
        """
        since: dict[tuple[str, TopicPartition], tuple[int, float]] = {}
        lags: dict[tuple[str, str], Lag] = {}
        unknown: set[tuple[str, str]] = set()
        for group_id, positions in committed.items():
            for partition, position in positions.items():
                key = (group_id, partition.topic)
                seen = self._since.get((group_id, partition))
                end = ends.get(partition)
                if end is None:
                    unknown.add(key)
                    if seen is not None:
                        since[group_id, partition] = seen
                    continue
                before = lags.get(key, Lag(0, 0.0))
                behind = max(0, end - position)
                stalled_s = 0.0
                if behind:
                    if seen is None or seen[0] != position:
                        seen = (position, now_s)
                    since[group_id, partition] = seen
                    stalled_s = now_s - seen[1]
                lags[key] = Lag(before.records + behind, max(before.stalled_s, stalled_s))
        self._since = since
        return {key: lag for key, lag in lags.items() if key not in unknown}
