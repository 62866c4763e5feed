"""What groups know of topics, and subscriptions resolved against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.broker.core.group_pattern import TopicPattern
from penstock.broker.core.group_values import Member
from penstock.wire.ids import TopicId, TopicIdPartition

_MAX_PATTERNS: Final = 1_000  # Remembered at a time.


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as groups see it."""

    name: str
    topic_id: TopicId
    partition_count: int


class TopicView(Protocol):
    """The topics that exist now. Whoever changes it tells the groups by TopicsChanged at once."""

    def find(self, name: str) -> TopicInfo | None:
        """The topic of this name."""
        ...

    def find_id(self, topic_id: TopicId) -> TopicInfo | None:
        """The topic of this id."""
        ...

    def racks(self, partition: TopicIdPartition) -> frozenset[str]:
        """The racks that have a replica of the partition."""
        ...

    def names(self) -> Iterator[str]:
        """The names that patterns are matched with: those of topics that are not internal."""
        ...


class Subscriptions:
    """Resolves what members subscribe to; remembers which topics each pattern matches."""

    def __init__(self, topics: TopicView) -> None:
        self._topics = topics
        self._matches: dict[str, frozenset[str]] = {}  # By pattern, of the topics that exist.

    def topics_changed(self) -> None:
        """Topics came or went: match anew when next asked."""
        self._matches.clear()

    def topics_of(self, member: Member) -> dict[TopicId, TopicInfo]:
        """The existing topics that a member subscribes to, by id."""
        names: Iterable[str] = member.topics
        if member.pattern:
            names = member.topics | self._matching(member.pattern)
        found = (self._topics.find(name) for name in names)
        return {info.topic_id: info for info in found if info is not None}

    def racks(self, partition: TopicIdPartition) -> frozenset[str]:
        """The racks that have a replica of the partition."""
        return self._topics.racks(partition)

    def concern(self, member: Member, names: frozenset[str]) -> bool:
        """Whether a member subscribes to any of the topics named, existing or not."""
        if not names.isdisjoint(member.topics):
            return True
        if not member.pattern:
            return False
        pattern = TopicPattern.parse(member.pattern)
        return any(pattern.matches(name) for name in names)

    def _matching(self, text: str) -> frozenset[str]:
        matches = self._matches.get(text)
        if matches is None:
            pattern = TopicPattern.parse(text)
            matches = frozenset(name for name in self._topics.names() if pattern.matches(name))
            if len(self._matches) >= _MAX_PATTERNS:
                self._matches.clear()
            self._matches[text] = matches
        return matches
