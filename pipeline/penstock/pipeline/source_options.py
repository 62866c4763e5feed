"""The options of the source, checked before a query starts. What docs/pipelines.md says of them
holds here; names are those of Spark's Kafka connector where it has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from penstock.client import PenstockError, TopicPartition
from penstock.client.config import AdminConfig, ConsumerConfig
from penstock.pipeline.option_map import ClientSettings, OptionMap
from penstock.pipeline.source.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    parse_partitions,
    parse_times,
    parse_wanted,
)
from penstock.wire.names import check_group_id, check_topic_name

T = TypeVar("T")

WHERE: Final = "the penstock source"
_SUBSCRIPTIONS: Final = ("subscribe", "subscribePattern", "assign")
_PLACES: Final = {"earliest": EARLIEST, "latest": LATEST}
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "groupIdPrefix",
)  # fmt: skip
_STRATEGY: Final = "startingOffsetsByTimestampStrategy"
_STRATEGIES: Final = ("latest", "error")
_LEVELS: Final = ("read_committed", "read_uncommitted")
_DEFAULT_ROWS: Final = 25_000
_DEFAULT_DELAY_MS: Final = 15 * 60_000
_NOT_HERE: Final = "the source settles this by itself; leave it out"
_OURS: Final = {
    "auto_offset_reset": "write startingOffsets and failOnDataLoss instead",
    "group_id": "write groupIdPrefix instead: each query has a group of its own",
    "max_poll_records": "write maxRecordsPerFetch instead",
    **dict.fromkeys(
        (
            "auto_commit_interval_ms", "enable_auto_commit", "group_assignor", "group_instance_id",
            "key_deserializer", "max_poll_interval_ms", "session_timeout_ms", "value_deserializer",
        ),
        _NOT_HERE,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a query begins or ends: just one of the four."""

    everywhere: int | None = None
    """EARLIEST or LATEST, of every partition."""
    offsets: Offsets | None = None
    """By partition, which may be EARLIEST or LATEST as well."""
    timestamp_ms: int | None = None
    """At the first record that is of this time or later; where none is, at the end."""
    times_ms: Mapping[TopicPartition, int] | None = None
    """The same by partition."""
    has_to_match: bool = False
    """Whether it is an error that a partition has no record of its time or later."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same place when it is looked for again later, retention apart."""
        if self.offsets is not None:
            return LATEST not in self.offsets.values()
        return self.everywhere == EARLIEST

    @property
    def named(self) -> Collection[TopicPartition] | None:
        """The partitions that it names, where it is by partition."""
        by_partition = self.offsets if self.times_ms is None else self.times_ms
        return None if by_partition is None else by_partition.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What one source reads, and how. Pickles; holds no connection."""

    clients: ClientSettings
    topics: tuple[str, ...] | None
    pattern: str | None
    assigned: tuple[TopicPartition, ...] | None
    starting: Place | None
    ending: Place | None
    max_offsets: int | None
    max_bytes: int | None
    min_offsets: int | None
    max_delay_ms: int
    min_partitions: int
    max_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    isolation_level: str
    group_id_prefix: str
    max_rows: int
    only_batch: tuple[str, ...]
    only_stream: tuple[str, ...]

    @classmethod
    def load(cls, given: Mapping[str, str | None]) -> SourceOptions:
        """The options, checked. Raises OptionError, which names the option and what is wanted."""
        options = OptionMap(given, where=WHERE)
        clients = options.client_settings(ConsumerConfig, AdminConfig, ours=_OURS)
        kind = options.just_one(*_SUBSCRIPTIONS)
        found = cls(
            clients=clients,
            topics=_topics(options) if kind == "subscribe" else None,
            pattern=_pattern(options) if kind == "subscribePattern" else None,
            assigned=_parsed(options, "assign", parse_partitions),
            starting=_starting(options),
            ending=_place(options, "ending"),
            max_offsets=options.whole_number("maxOffsetsPerTrigger", low=1),
            max_bytes=options.whole_number("maxBytesPerTrigger", low=1),
            min_offsets=options.whole_number("minOffsetsPerTrigger", low=1),
            max_delay_ms=options.span_ms("maxTriggerDelay", _DEFAULT_DELAY_MS) or 0,
            min_partitions=options.whole_number("minPartitions", 1, low=1, high=100_000) or 1,
            max_per_partition=options.whole_number("maxRecordsPerPartition", low=1),
            fail_on_data_loss=options.flag("failOnDataLoss", True),
            include_headers=options.flag("includeHeaders", False),
            isolation_level=_isolation(options, clients),
            group_id_prefix=options.text("groupIdPrefix", "spark") or "spark",
            max_rows=options.whole_number("maxRecordsPerFetch", _DEFAULT_ROWS, low=1, high=10**7)
            or _DEFAULT_ROWS,
            only_batch=tuple(name for name in _BATCH_ONLY if options.has(name)),
            only_stream=tuple(name for name in _STREAM_ONLY if options.has(name)),
        )
        options.finish()
        found._check(options)
        return found

    def for_batch(self) -> SourceOptions:
        """These, for a batch query. Raises OptionError where an option is for streams only."""
        options = OptionMap({}, where=WHERE)
        if self.only_stream:
            raise options.contradiction(
                f"{self.only_stream[0]} is for streams (readStream), and this is a batch query; "
                "leave it out"
            )
        if self.starting is not None and _has(self.starting, LATEST):
            raise options.contradiction(
                "startingOffsets: a batch query cannot begin at the latest offset, for there is "
                "nothing behind it; write earliest, offsets, or startingTimestamp"
            )
        if self.ending is not None and _has(self.ending, EARLIEST):
            raise options.contradiction(
                "endingOffsets: a batch query cannot end at the earliest offset, for there is "
                "nothing before it; write latest, offsets, or endingTimestamp"
            )
        return self

    def for_stream(self) -> SourceOptions:
        """These, for a stream. Raises OptionError where an option is for batch queries only."""
        if self.only_batch:
            raise OptionMap({}, where=WHERE).contradiction(
                f"{self.only_batch[0]} is for batch queries (spark.read), and a stream does not "
                "end; leave it out, or use trigger(availableNow=True)"
            )
        return self

    def _check(self, options: OptionMap) -> None:
        """Refuse what contradicts."""
        most = self.max_offsets
        if self.min_offsets is not None and most is not None and self.min_offsets > most:
            raise options.contradiction(
                f"minOffsetsPerTrigger={self.min_offsets} is above maxOffsetsPerTrigger={most}"
            )
        if "maxTriggerDelay" in self.only_stream and self.min_offsets is None:
            raise options.contradiction(
                "maxTriggerDelay bounds what minOffsetsPerTrigger waits for, which is not given"
            )
        try:
            check_group_id(f"{self.group_id_prefix}-{'0' * 36}")
        except PenstockError as error:
            raise options.refusal("groupIdPrefix", error.message) from None
        for side, place in (("starting", self.starting), ("ending", self.ending)):
            if place is None or (named := place.named) is None:
                continue
            name = f"{side}Offsets" if place.times_ms is None else f"{side}OffsetsByTimestamp"
            if self.assigned is not None:
                wanted = set(self.assigned)
                if named != wanted:
                    odd = min(wanted ^ set(named))
                    raise options.refusal(
                        name, f"it and assign name different partitions, such as {odd}"
                    )
            if self.topics is not None:
                other = {one.topic for one in named} ^ set(self.topics)
                if other:
                    raise options.refusal(
                        name, f"it and subscribe name different topics, such as {min(other)!r}"
                    )


def _has(place: Place, where: int) -> bool:
    return place.everywhere == where or where in (place.offsets or {}).values()


def _topics(options: OptionMap) -> tuple[str, ...]:
    names = {name.strip() for name in options.required("subscribe").split(",")}
    for name in sorted(names):
        try:
            check_topic_name(name)
        except PenstockError as error:
            raise options.refusal("subscribe", error.message) from None
    return tuple(sorted(names))


def _pattern(options: OptionMap) -> str:
    text = options.required("subscribePattern")
    try:
        re.compile(text)
    except re.error as error:
        raise options.refusal("subscribePattern", f"no regular expression: {error}") from None
    return text


def _parsed(options: OptionMap, name: str, parse: Callable[[str], T]) -> T | None:
    text = options.text(name)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise options.refusal(name, str(error)) from None


def _starting(options: OptionMap) -> Place | None:
    found = _place(options, "starting")
    is_by_time = found is not None and (found.timestamp_ms is not None or bool(found.times_ms))
    if options.has(_STRATEGY) and not is_by_time:
        raise options.contradiction(
            f"{_STRATEGY} says what is done where no record is of the time that startingTimestamp "
            "or startingOffsetsByTimestamp wants, and neither is given"
        )
    strict = options.choice(_STRATEGY, _STRATEGIES, _STRATEGIES[0]) == "error"
    return replace(found, has_to_match=True) if found is not None and strict else found


def _place(options: OptionMap, side: str) -> Place | None:
    """``side`` is starting or ending."""
    names = (f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp")
    given = [name for name in names if options.has(name)]
    if len(given) > 1:
        raise options.contradiction(f"{' and '.join(given)} contradict each other; leave one out")
    in_offsets, at_time, by_partition = names
    if (timestamp_ms := options.whole_number(at_time)) is not None:
        return Place(timestamp_ms=timestamp_ms)
    if (times_ms := _parsed(options, by_partition, parse_times)) is not None:
        return Place(times_ms=times_ms)
    text = options.text(in_offsets)
    if text is None:
        return None
    if text.lower() in _PLACES:
        return Place(everywhere=_PLACES[text.lower()])
    try:
        return Place(offsets=parse_wanted(text))
    except ValueError as error:
        why = f'earliest, latest or {{"topic": {{"0": offset}}}} is wanted: {error}'
        raise options.refusal(in_offsets, why) from None


def _isolation(options: OptionMap, clients: ClientSettings) -> str:
    """Under its short name, or as the client's setting."""
    setting: str | None = clients.settings.get("isolation_level")
    found = options.choice("isolation.level", _LEVELS, setting or _LEVELS[0])
    if setting not in (None, found):
        raise options.contradiction(
            f"isolation.level={found} and penstock.isolation.level={setting} contradict each "
            "other; leave one out"
        )
    return found
