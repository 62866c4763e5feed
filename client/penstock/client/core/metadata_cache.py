"""What a client knows of the cluster: brokers, topics and who leads which partition.

Facts arrive from several brokers, in any order, some of them behind. What is newer is decided
by the metadata index (per topic) and by the leader epoch (per partition), never by arrival.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.v1 import common_pb2, metadata_pb2
from penstock.wire.errors import (
    ErrorCode,
    LeaderHint,
    PenstockError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition

UNKNOWN_ANSWERS = 3
"""So many answers..."""
UNKNOWN_GRACE_MS = 300.0
"""...over so long a time must agree that a topic does not exist: it may just have been made
through another broker."""


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a broker is."""

    node_id: int
    host: str
    port: int
    fenced: bool = False

    def __str__(self) -> str:
        return f"broker {self.node_id} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PartitionLeader:
    """Who leads a partition; node id -1 stands for nobody."""

    node_id: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic. ``index`` is the metadata index that the facts are true for."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: tuple[PartitionLeader, ...]
    index: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A topic that brokers say they do not know, or refuse to describe.

    ``sure`` is decided by the answers alone: time that passes between two of them proves nothing,
    and whoever asks for the verdict twice must hear the same.
    """

    since_ms: float
    answers: int
    error: PenstockError
    index: int  # The newest metadata index that it was said for.
    sure: bool


class MetadataCache:
    """One owner changes it; any thread may read (values are replaced whole)."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.brokers: dict[int, Broker] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.missing: dict[str, Missing] = {}
        self.updates = 0  # Grows with every change.
        self._brokers_index = -1  # The metadata index that ``brokers`` are true for.

    def __contains__(self, topic: str) -> bool:
        return topic in self.topics

    def partition_count(self, topic: str) -> int:
        """How many partitions the topic has; 0 when it is not known."""
        info = self.topics.get(topic)
        return len(info.partitions) if info is not None else 0

    def leader(self, partition: TopicPartition) -> PartitionLeader | None:
        """The partition's leader, or None when the partition is not known."""
        info = self.topics.get(partition.topic)
        if info is None or not 0 <= partition.partition < len(info.partitions):
            return None
        return info.partitions[partition.partition]

    def topic_id(self, topic: str) -> bytes:
        """The topic's id, or empty."""
        info = self.topics.get(topic)
        return info.topic_id if info is not None else b""

    def available(self, topic: str) -> list[int]:
        """The partitions that have a leader."""
        info = self.topics.get(topic)
        if info is None:
            return []
        return [number for number, led in enumerate(info.partitions) if led.node_id >= 0]

    def _apply_brokers(self, brokers: Iterable[metadata_pb2.BrokerDescription], index: int) -> None:
        """Take over where all brokers are, unless the answerer is behind.

        Those not named are gone, but for such as lead something: a leader hint may be newer.
        """
        named = [Broker(entry.node_id, entry.host, entry.port, entry.fenced) for entry in brokers]
        if not named or index < self._brokers_index:
            return
        self._brokers_index = index
        leading = {led.node_id for info in self.topics.values() for led in info.partitions}
        kept = {number: known for number, known in self.brokers.items() if number in leading}
        self.brokers = {**kept, **{broker.node_id: broker for broker in named}}

    def replace_brokers(self, brokers: Iterable[metadata_pb2.BrokerDescription]) -> None:
        """Take over where all brokers are; those not named are gone."""
        self.brokers = {
            entry.node_id: Broker(entry.node_id, entry.host, entry.port, entry.fenced)
            for entry in brokers
        }

    def matching(self, pattern: str) -> list[str]:
        """The known topics whose whole names match, but the cluster's own."""
        return [
            name
            for name, info in self.topics.items()
            if not info.internal and re.fullmatch(pattern, name)
        ]

    def apply(self, response: metadata_pb2.DescribeTopicsResponse, now_ms: float) -> None:
        """Take over a description of topics."""
        self.cluster_id = response.cluster_id or self.cluster_id
        topics = dict(self.topics)
        missing = dict(self.missing)
        for description in response.topics:
            if description.HasField("error"):
                self._apply_missing(topics, missing, description, response.metadata_index, now_ms)
            else:
                self._apply_found(topics, missing, description, response.metadata_index)
        self.topics = topics
        self.missing = missing
        self._apply_brokers(response.brokers, response.metadata_index)
        self.updates += 1

    def _apply_found(
        self,
        topics: dict[str, TopicInfo],
        missing: dict[str, Missing],
        description: metadata_pb2.TopicDescription,
        index: int,
    ) -> None:
        denied = missing.get(description.name)
        if denied is not None and denied.sure and index < denied.index:
            return  # The answerer has not heard yet that the topic was deleted.
        missing.pop(description.name, None)
        known = topics.get(description.name)
        topics[description.name] = _merge(known, description, index)

    def _apply_missing(
        self,
        topics: dict[str, TopicInfo],
        missing: dict[str, Missing],
        description: metadata_pb2.TopicDescription,
        index: int,
        now_ms: float,
    ) -> None:
        known = topics.get(description.name)
        if known is not None and index < known.index:
            return  # The answerer is behind.
        error = error_from_proto(description.error)
        if error.retriable and not isinstance(error, UnknownTopicOrPartitionError):
            return
        before = missing.get(description.name)
        since_ms = before.since_ms if before else now_ms
        answers = before.answers + 1 if before else 1
        agreed = answers >= UNKNOWN_ANSWERS and now_ms - since_ms >= UNKNOWN_GRACE_MS
        found = Missing(
            since_ms=since_ms,
            answers=answers,
            error=error,
            index=max(index, before.index if before else -1),
            sure=agreed or error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
        missing[description.name] = found
        if found.sure:
            topics.pop(description.name, None)

    def apply_hint(
        self, partition: TopicPartition, hint: LeaderHint, topic_id: bytes = b""
    ) -> bool:
        """Take over what a "not leader" answer knew; whether it was news.

        ``topic_id`` is what the question was about, if that is known: leader epochs of a topic that
        was deleted mean nothing for one made anew under its name.
        """
        info = self.topics.get(partition.topic)
        if info is None or hint.node_id < 0 or partition.partition >= len(info.partitions):
            return False
        if topic_id and topic_id != info.topic_id:
            return False
        known = info.partitions[partition.partition]
        if hint.leader_epoch <= known.leader_epoch:
            return False
        leaders = list(info.partitions)
        leaders[partition.partition] = PartitionLeader(hint.node_id, hint.leader_epoch)
        self.topics = {**self.topics, partition.topic: replace(info, partitions=tuple(leaders))}
        self.updates += 1
        if hint.host:
            broker = Broker(hint.node_id, hint.host, hint.port)
            self.brokers = {**self.brokers, hint.node_id: broker}
        return True

    def verdict(self, topic: str) -> PenstockError | None:
        """Why the topic cannot be used, once that is sure; None while there is hope.

        A topic with a verdict is not in ``topics``. It stands until brokers describe the topic, or
        ``forget``.
        """
        missing = self.missing.get(topic)
        return missing.error if missing is not None and missing.sure else None

    def forget(self, topic: str) -> None:
        """Drop a topic, and what was said against it, so that it is asked for anew."""
        self.topics = {name: info for name, info in self.topics.items() if name != topic}
        self.missing = {name: info for name, info in self.missing.items() if name != topic}

    def to_proto(self, partition: TopicPartition) -> common_pb2.TopicPartition:
        """The partition as requests name it."""
        return common_pb2.TopicPartition(
            topic=partition.topic,
            partition=partition.partition,
            topic_id=self.topic_id(partition.topic),
        )

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        for name, info in self.topics.items():
            assert info.name == name
            assert all(led.node_id >= -1 for led in info.partitions)
            assert self.verdict(name) is None


def _merge(
    known: TopicInfo | None, description: metadata_pb2.TopicDescription, index: int
) -> TopicInfo:
    """The newer of what is known and what was said, partition by partition."""
    said = TopicInfo(
        name=description.name,
        topic_id=description.topic_id,
        internal=description.internal,
        partitions=tuple(
            PartitionLeader(entry.leader, entry.leader_epoch) for entry in description.partitions
        ),
        index=index,
    )
    if known is None:
        return said
    if known.topic_id != said.topic_id:
        return said if index >= known.index else known
    newer, older = (said, known) if index >= known.index else (known, said)
    leaders = list(newer.partitions)
    for number, led in enumerate(older.partitions[: len(leaders)]):
        if led.leader_epoch > leaders[number].leader_epoch:
            leaders[number] = led
    return replace(newer, partitions=tuple(leaders))
