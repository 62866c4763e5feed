"""The configs of a topic: one table of keys, types, defaults, bounds and meanings.

Keys are Kafka's. The controllers validate with it where a command is applied, brokers read
values in force from it, and clients use it to suggest the key that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.wire.config_keys import (
    MAX_INT64,
    MAX_SHOWN_CHARS,
    ConfigKey,
    boolean,
    integer,
    one_of,
    ratio,
    suggest,
)
from penstock.wire.errors import InvalidConfigError

MAX_PARTITIONS_PER_TOPIC: Final = 10_000

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""What max.message.bytes may be at most: no log has a larger batch, header included."""


def _cleanup_policy(text: str) -> frozenset[str]:
    policies = frozenset(part.strip() for part in text.split(","))
    if not policies <= {"delete", "compact"}:
        raise ValueError("delete, compact or compact,delete is wanted")
    return policies


_KEYS: Final = (
    ConfigKey(
        "cleanup.policy",
        "delete",
        "What old segments suffer: delete, compact, or compact,delete.",
        _cleanup_policy,
    ),
    ConfigKey(
        "compression.type",
        "producer",
        "The compression kept on disk; producer keeps what the producer chose.",
        one_of("producer"),
    ),
    ConfigKey(
        "delete.retention.ms",
        "86400000",
        "How long a compacted topic keeps tombstones, in milliseconds.",
        integer(0),
    ),
    ConfigKey(
        "index.interval.bytes",
        "4096",
        "An index entry is written about every so many bytes.",
        integer(0, 2**31 - 1),
    ),
    ConfigKey(
        "max.compaction.lag.ms",
        str(MAX_INT64),
        "A record is compacted at the latest after so many milliseconds.",
        integer(1),
    ),
    ConfigKey(
        "max.message.bytes",
        "1048588",
        "The largest record batch that the topic takes, in bytes; not above a segment.bytes that "
        "is set.",
        integer(61, MAX_MESSAGE_BYTES),
    ),
    ConfigKey(
        "message.timestamp.type",
        "CreateTime",
        "Whether a record keeps its producer's time or takes the time of the append.",
        one_of("CreateTime", "LogAppendTime"),
    ),
    ConfigKey(
        "min.cleanable.dirty.ratio",
        "0.5",
        "A log is compacted when this part of it is dirty.",
        ratio,
    ),
    ConfigKey(
        "min.compaction.lag.ms",
        "0",
        "A record is not compacted before so many milliseconds.",
        integer(0),
    ),
    ConfigKey(
        "min.insync.replicas",
        "",
        "acks=all needs so many in-sync replicas; at most the topic's replication factor. "
        "Default: 2, or 1 with fewer than 3 replicas.",
        integer(1, 2**15 - 1),
    ),
    ConfigKey(
        "preallocate",
        "",
        "Whether a segment gets all of its segment.bytes on the disk with its first record. "
        "Default: log.preallocate of each broker.",
        boolean,
    ),
    ConfigKey(
        "retention.bytes",
        "-1",
        "A partition larger than this loses its oldest segments; -1: no bound.",
        integer(-1),
    ),
    ConfigKey(
        "retention.ms",
        "604800000",
        "Segments older than this are deleted, in milliseconds; -1: never.",
        integer(-1),
    ),
    ConfigKey(
        "segment.bytes",
        "1073741824",
        "A segment is closed at this size. Unless set, log.segment.bytes of each broker holds.",
        integer(4096, 2**31 - 1),
    ),
    ConfigKey(
        "segment.ms",
        "604800000",
        "A segment is closed at this age, in milliseconds.",
        integer(1),
    ),
    ConfigKey(
        "unclean.leader.election.enable",
        "false",
        "Whether a replica that may lack acknowledged records may lead when no other lives.",
        boolean,
    ),
)

TOPIC_CONFIGS: Final[Mapping[str, ConfigKey]] = {entry.key: entry for entry in _KEYS}


def validate_topic_configs(configs: Mapping[str, str]) -> None:
    """Refuse an unknown key or a value out of bounds with an InvalidConfigError that names it.

    Of several the first in order is named: a map has another order in every process.
    """
    for key, text in sorted(configs.items()):
        entry = TOPIC_CONFIGS.get(key)
        if entry is None:
            shown = key[:MAX_SHOWN_CHARS]
            raise InvalidConfigError(
                f"unknown topic config {shown!r}{suggest(shown, list(TOPIC_CONFIGS))}"
            )
        try:
            entry.parse(text)
        except ValueError as error:
            raise InvalidConfigError(
                f"topic config {key}={text[:MAX_SHOWN_CHARS]!r}: {error}"
            ) from None


def effective_min_isr(configs: Mapping[str, str], replication_factor: int) -> int:
    """``min.insync.replicas`` in force: as set, else 2, else 1 with fewer than 3 replicas."""
    text = configs.get("min.insync.replicas", "")
    if text:
        return int(text)
    return 2 if replication_factor >= 3 else 1


def config_value(configs: Mapping[str, str], key: str) -> str:
    """The text in force for ``key``: as set on the topic, else the default."""
    return configs.get(key, TOPIC_CONFIGS[key].default)


def cleanup_policies(configs: Mapping[str, str]) -> frozenset[str]:
    """What old segments suffer: ``delete``, ``compact`` or both."""
    return _cleanup_policy(config_value(configs, "cleanup.policy"))


def integer_config(configs: Mapping[str, str], key: str) -> int:
    """The whole number in force for ``key``. Only for keys with a whole-number default."""
    return int(config_value(configs, key))
