"""What a consumer says of partitions that have no leader: once, and again when that changes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.wire.errors import LeaderNotAvailableError
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import SHOWN, some

PATIENCE_MS: Final = 2_000.0
"""An election leaves a partition without a leader for less: that is no news."""


def no_leader(partitions: Collection[TopicPartition]) -> LeaderNotAvailableError:
    """The error for partitions that have no leader, with what to do about it."""
    named = sorted(partitions)
    which = some([str(entry) for entry in named[:SHOWN]], len(named))
    subject = f"partition {which} has" if len(named) == 1 else f"partitions {which} have"
    topics = " ".join(dict.fromkeys(entry.topic for entry in named[:SHOWN]))
    return LeaderNotAvailableError(
        f"{subject} no leader, and cannot be read; next: start the brokers that hold "
        f"{'it' if len(named) == 1 else 'them'}: `penstock topics describe {topics}` lists them"
    )


class LeaderWatch:
    """Looked at by whoever waits for records. ``look`` is its only mutator; one thread."""

    def __init__(self) -> None:
        self._since_ms: dict[TopicPartition, float] = {}
        self._told: frozenset[TopicPartition] = frozenset()

    @property
    def has_told(self) -> bool:
        """Whether what lacks a leader was told, and lacks it still."""
        return bool(self._told)

    def look(self, leaderless: Collection[TopicPartition], now_ms: float) -> str:
        """What is to be said now that these have no leader; empty for nothing."""
        if not leaderless and not self._since_ms:
            return ""
        self._since_ms = {name: self._since_ms.get(name, now_ms) for name in leaderless}
        lasting = frozenset(
            name for name, since_ms in self._since_ms.items() if now_ms - since_ms >= PATIENCE_MS
        )
        if lasting == self._told:
            return ""
        self._told = lasting
        return no_leader(lasting).message if lasting else _ALL_LED

    def due_in_ms(self, now_ms: float) -> float:
        """How long until there is something to say if nothing changes; infinity for never."""
        return min(
            (
                max(0.0, since_ms + PATIENCE_MS - now_ms)
                for name, since_ms in self._since_ms.items()
                if name not in self._told
            ),
            default=float("inf"),
        )


_ALL_LED: Final = "every partition that is read has a leader again"
