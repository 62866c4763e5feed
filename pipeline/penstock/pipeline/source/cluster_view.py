"""What a query's planner knows of the cluster: topics, and where their logs begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Final

from penstock.client import (
    AdminClient,
    Consumer,
    TopicDescription,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from penstock.client.config import AdminConfig
from penstock.pipeline.errors import OptionError
from penstock.pipeline.source.arrow_reading import open_consumer
from penstock.pipeline.source.offsets import EARLIEST, LATEST, Offsets, describe
from penstock.pipeline.source_options import WHERE, Place, SourceOptions

_TOPICS_AGE_S: Final = 1.0
"""New topics and partitions are looked for so often, not with every question."""
_AGREE_S: Final = 10.0
_AGREE_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of the query's. ``timestamp_type`` is 0 for CreateTime and 1 for LogAppendTime."""

    topic_id: str
    partitions: tuple[TopicPartition, ...]
    timestamp_type: int


class ClusterView:
    """Connections of one planner; opened when first asked, and closed by ``close``."""

    def __init__(self, options: SourceOptions, *, clock: Callable[[], float] = monotonic) -> None:
        self._options = options
        self._clock = clock
        settings = options.clients.of(AdminConfig)
        self._admin = AdminClient(options.clients.bootstrap_servers, **settings)
        self._consumer: Consumer = open_consumer(options)
        self._topics: dict[str, Topic] = {}
        self._gone: set[TopicPartition] = set()
        self._asked_at = float("-inf")

    def close(self) -> None:
        """Free the connections."""
        self._consumer.close(0)
        self._admin.close()

    @property
    def known_ids(self) -> Mapping[str, str]:
        """The topics' ids as they were told last: before the offsets that were asked for since.

        So a topic that is made anew in between has another id than its offsets say, which is
        noticed. The other way round the offsets of the old one would be taken for the new one's.
        """
        return {name: topic.topic_id for name, topic in self._topics.items()}

    def topics(self, *, afresh: bool = False) -> Mapping[str, Topic]:
        """The topics that the query reads and that exist, as of a second ago at most."""
        if afresh or self._clock() - self._asked_at >= _TOPICS_AGE_S:
            self._topics = {found.name: self._topic(found) for found in self._look()}
            self._asked_at = self._clock()
        return self._topics

    def partitions(self, *, afresh: bool = False) -> tuple[TopicPartition, ...]:
        """Their partitions, in order."""
        topics = self.topics(afresh=afresh)
        return tuple(one for name in sorted(topics) for one in topics[name].partitions)

    def ends(self, known: Iterable[TopicPartition] = ()) -> tuple[Mapping[str, Topic], Offsets]:
        """The topics, and where what may be read of each of their partitions ends.

        A broker may hear late of what there is. So those that are ``known`` and not in its answer
        are asked for again, for up to ten seconds, before they are taken to be gone. Raises
        UnknownTopicOrPartitionError where brokers go on contradicting one another.
        """
        until = self._clock() + _AGREE_S
        while True:
            topics, partitions = self.topics(), self.partitions()
            is_late = self._clock() >= until
            if self._is_settled(set(known).difference(partitions), is_late):
                try:
                    return topics, self.latest(partitions)
                except UnknownTopicOrPartitionError:
                    # One connection knows of a topic that is made, grown or deleted, the other not.
                    if is_late:
                        raise
                    self._consumer.close(0)
                    self._consumer = open_consumer(self._options)
            self._asked_at = float("-inf")
            sleep(_AGREE_PAUSE_S)

    def agreed(
        self, known: Iterable[TopicPartition], topic_ids: Mapping[str, str]
    ) -> Mapping[str, Topic]:
        """The topics. Those that are ``known`` and not in a broker's answer, or have other ids
        there than in ``topic_ids``, are asked for again, as by ``ends``.
        """
        until = self._clock() + _AGREE_S
        wanted = frozenset(known)
        while True:
            topics = self.topics()
            there = {
                one
                for topic in topics.values()
                for one in topic.partitions
                if topic_ids.get(one.topic, topic.topic_id) == topic.topic_id
            }
            if self._is_settled(set(wanted - there), self._clock() >= until):
                return topics
            self._asked_at = float("-inf")
            sleep(_AGREE_PAUSE_S)

    def _is_settled(self, missing: set[TopicPartition], is_late: bool) -> bool:
        """Whether what an answer leaves out is asked for no more: it was so before, or for long."""
        if not (missing <= self._gone or is_late):
            return False
        self._gone = missing
        return True

    def earliest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Where the logs begin."""
        return self._consumer.beginning_offsets(tuple(partitions))

    def latest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Where what may be read ends: with read_committed before the oldest open transaction."""
        return self._consumer.end_offsets(tuple(partitions))

    def find(self, place: Place, side: str, known: Iterable[TopicPartition] = ()) -> Offsets:
        """The place in each partition, those that are ``known`` to be there among them. ``side`` is
        "starting" or "ending", for messages.

        Raises UnknownTopicOrPartitionError for a topic that does not exist, and for a known
        partition that is left out for as long as ``ends`` asks; OptionError for offsets or times
        that leave a partition out, or that no record has where one has to.
        """
        partitions = self._all_there(frozenset(known))
        if place.everywhere is not None:
            return self._at_place(place.everywhere, partitions)
        if place.timestamp_ms is not None:
            times = dict.fromkeys(partitions, place.timestamp_ms)
            return self._at_times(times, f"{side}Timestamp", place.has_to_match)
        if place.times_ms is not None:
            name = f"{side}OffsetsByTimestamp"
            _check_all_named(place.times_ms, partitions, name)
            return self._at_times(place.times_ms, name, place.has_to_match)
        wanted = place.offsets or {}
        hint = ". Write -2 for the earliest and -1 for the latest offset"
        _check_all_named(wanted, partitions, f"{side}Offsets", hint)
        found = {where: offset for where, offset in wanted.items() if offset >= 0}
        for mark in (EARLIEST, LATEST):
            there = [where for where, offset in wanted.items() if offset == mark]
            found |= self._at_place(mark, there)
        return found

    def _at_place(self, mark: int, partitions: Iterable[TopicPartition]) -> Offsets:
        return self.earliest(partitions) if mark == EARLIEST else self.latest(partitions)

    def _at_times(
        self, times_ms: Mapping[TopicPartition, int], name: str, has_to_match: bool
    ) -> Offsets:
        # The ends first: what is written between the two questions is late enough.
        found = self.latest(times_ms)
        entries = self._consumer.offsets_for_times(dict(times_ms))
        late = [one for one in found if entries.get(one) is None]
        if late and has_to_match:
            raise OptionError(
                f"{WHERE}: {name}: no record of {describe(late)} is of that time or later; write "
                "an earlier time, or startingOffsetsByTimestampStrategy=latest to begin at the end"
            )
        for partition, entry in entries.items():
            if entry is not None:
                found[partition] = min(entry.offset, found[partition])
        return found

    def _all_there(self, known: frozenset[TopicPartition]) -> tuple[TopicPartition, ...]:
        """The partitions, all of which exist. Raises UnknownTopicOrPartitionError."""
        names = self._names()
        topics = self.topics(afresh=True)
        if names is not None and (missing := sorted(set(names) - topics.keys())):
            self._admin.describe_topics(missing)  # It says more of those that do not exist.
            topics = self.topics(afresh=True)
        partitions = self.partitions()
        if not known.issubset(partitions):
            topics = self.agreed(known, {})
            partitions = tuple(one for name in sorted(topics) for one in topics[name].partitions)
            if left_out := known.difference(partitions):
                raise UnknownTopicOrPartitionError(
                    f"{describe(left_out)} went away while the query was planned; next: see "
                    "`penstock topics describe`, and start the query again"
                )
        gone = set(self._options.assigned or ()) - set(partitions)
        if gone:
            raise OptionError(
                f"{WHERE}: assign names partitions that do not exist: {describe(gone)}"
            )
        return partitions

    def _names(self) -> tuple[str, ...] | None:
        """The topics that the query names."""
        if self._options.assigned is not None:
            return tuple(sorted({one.topic for one in self._options.assigned}))
        return self._options.topics

    def _look(self) -> list[TopicDescription]:
        names = self._names()
        if names is None:
            pattern = re.compile(self._options.pattern or "")
            return [one for one in self._admin.list_topics() if pattern.fullmatch(one.name)]
        try:
            return self._admin.describe_topics(names)
        except UnknownTopicOrPartitionError:
            there = {one.name for one in self._admin.list_topics(include_internal=True)}
            return self._admin.describe_topics([name for name in names if name in there])

    def _topic(self, found: TopicDescription) -> Topic:
        assigned = self._options.assigned
        every = (TopicPartition(found.name, one.partition) for one in found.partitions)
        by_broker = found.configs.get("message.timestamp.type") == "LogAppendTime"
        return Topic(
            found.topic_id,
            tuple(sorted(one for one in every if assigned is None or one in assigned)),
            int(by_broker),
        )


def _check_all_named(
    named: Iterable[TopicPartition], partitions: Iterable[TopicPartition], name: str, hint: str = ""
) -> None:
    odd = set(partitions) ^ set(named)
    if odd:
        raise OptionError(
            f"{WHERE}: {name} is to name each partition that is read, and no other; see "
            f"{describe(odd)}{hint}"
        )
