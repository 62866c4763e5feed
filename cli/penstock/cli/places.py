"""How people name partitions, times and places in a log, on every command line alike."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import typer

from penstock.cli.errors import with_step
from penstock.wire.config_keys import MAX_INT32, MAX_INT64
from penstock.wire.errors import UnknownTopicOrPartitionError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import TopicDescription

TIME_HELP: Final = (
    "a time such as 2026-01-31T12:00:00+01:00 (UTC without its offset), or milliseconds since 1970"
)


def parse_time_ms(text: str, option: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time, or of the number itself."""
    if text.isascii() and text.isdecimal():
        if int(text) > MAX_INT64:
            raise typer.BadParameter(f"{text} is too large for a time", param_hint=option)
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not {TIME_HELP}", param_hint=option) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    ms = round(moment.timestamp() * 1000)
    if ms < 0:
        raise typer.BadParameter(f"{text!r} is before 1970", param_hint=option)
    return ms


def format_time_ms(timestamp_ms: int) -> str | None:
    """The time in UTC, as ``parse_time_ms`` takes it; None for one that is none."""
    if timestamp_ms < 0:
        return None
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)  # Beyond the year 9999: whoever wrote it knows what it means.
    return moment.isoformat(timespec="milliseconds")


def parse_partitions(text: str, option: str) -> tuple[str, tuple[int, ...] | None]:
    """``TOPIC`` or ``TOPIC:0,1``: the topic, and its partitions or None for all."""
    topic, colon, numbers = text.partition(":")
    if not colon and topic:
        return topic, None
    parts = numbers.split(",")
    if not topic or not all(part.isascii() and part.isdecimal() for part in parts):
        raise typer.BadParameter(
            f"{text!r} is not TOPIC, nor TOPIC:PARTITION,... such as orders:0,1", param_hint=option
        )
    if beyond := [part for part in parts if int(part) > MAX_INT32]:
        raise typer.BadParameter(f"no topic has a partition {beyond[0]}", param_hint=option)
    return topic, tuple(dict.fromkeys(int(part) for part in parts))


def log_ends(
    admin: AdminClient, partitions: Iterable[TopicPartition], topics: Iterable[TopicDescription]
) -> dict[TopicPartition, int]:
    """Where the logs end, of those partitions of ``topics`` that have a leader to be asked.

    Without the others nothing would be shown of a group just when a broker is down.
    """
    led = {
        TopicPartition(topic.name, entry.partition)
        for topic in topics
        for entry in topic.partitions
        if entry.leader >= 0
    }
    wanted = sorted(led.intersection(partitions))
    found = admin.list_offsets(dict.fromkeys(wanted, "latest")) if wanted else {}
    return {partition: entry.offset for partition, entry in found.items()}


def expand(
    admin: AdminClient, wanted: Iterable[tuple[str, tuple[int, ...] | None]]
) -> list[TopicPartition]:
    """The partitions, in order. Raises UnknownTopicOrPartitionError for one that is not there."""
    chosen = list(wanted)
    names = sorted({topic for topic, _ in chosen})
    counts = {topic.name: topic.partition_count for topic in admin.describe_topics(names)}
    found: set[TopicPartition] = set()
    for topic, numbers in chosen:
        for number in range(counts[topic]) if numbers is None else numbers:
            if number >= counts[topic]:
                raise with_step(
                    UnknownTopicOrPartitionError(
                        f"topic {topic!r} has no partition {number}; it has {counts[topic]}, "
                        f"from 0 to {counts[topic] - 1}"
                    ),
                    "name one of these, or the topic alone for all of them",
                )
            found.add(TopicPartition(topic, number))
    return sorted(found)
