"""The configs of a topic: one table of keys, types, defaults, bounds and meanings.

Keys are Kafka's. The controllers validate with it where a command is applied, brokers read
values in force from it, and clients use it to suggest the key that was meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.wire.errors import InvalidConfigError

_MAX_INT64: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key: ``parse`` takes the text to a value or raises ValueError saying what is allowed."""

    key: str
    default: str
    documentation: str
    parse: Callable[[str], object]


def _integer(low: int, high: int = _MAX_INT64) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number is wanted") from None
        if not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high} is wanted")
        return value

    return parse


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number from 0 to 1 is wanted") from None
    if not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1 is wanted")
    return value


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false is wanted")
    return text == "true"


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is wanted")
        return text

    return parse


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
        _one_of("producer"),
    ),
    ConfigKey(
        "delete.retention.ms",
        "86400000",
        "How long a compacted topic keeps tombstones, in milliseconds.",
        _integer(0),
    ),
    ConfigKey(
        "index.interval.bytes",
        "4096",
        "An index entry is written about every so many bytes.",
        _integer(0, 2**31 - 1),
    ),
    ConfigKey(
        "max.compaction.lag.ms",
        str(_MAX_INT64),
        "A record is compacted at the latest after so many milliseconds.",
        _integer(1),
    ),
    ConfigKey(
        "max.message.bytes",
        "1048588",
        "The largest record batch that the topic takes, in bytes.",
        _integer(61, 32 * 1024 * 1024),
    ),
    ConfigKey(
        "message.timestamp.type",
        "CreateTime",
        "Whether a record keeps its producer's time or takes the time of the append.",
        _one_of("CreateTime", "LogAppendTime"),
    ),
    ConfigKey(
        "min.cleanable.dirty.ratio",
        "0.5",
        "A log is compacted when this part of it is dirty.",
        _ratio,
    ),
    ConfigKey(
        "min.compaction.lag.ms",
        "0",
        "A record is not compacted before so many milliseconds.",
        _integer(0),
    ),
    ConfigKey(
        "min.insync.replicas",
        "",
        "acks=all needs so many in-sync replicas; at most the topic's replication factor. "
        "Default: 2, or 1 with fewer than 3 replicas.",
        _integer(1, 2**15 - 1),
    ),
    ConfigKey(
        "retention.bytes",
        "-1",
        "A partition larger than this loses its oldest segments; -1: no bound.",
        _integer(-1),
    ),
    ConfigKey(
        "retention.ms",
        "604800000",
        "Segments older than this are deleted, in milliseconds; -1: never.",
        _integer(-1),
    ),
    ConfigKey(
        "segment.bytes",
        "1073741824",
        "A segment is closed at this size.",
        _integer(4096, 2**31 - 1),
    ),
    ConfigKey(
        "segment.ms",
        "604800000",
        "A segment is closed at this age, in milliseconds.",
        _integer(1),
    ),
    ConfigKey(
        "unclean.leader.election.enable",
        "false",
        "Whether a replica that may lack acknowledged records may lead when no other lives.",
        _boolean,
    ),
)

TOPIC_CONFIGS: Final[Mapping[str, ConfigKey]] = {entry.key: entry for entry in _KEYS}


def suggest(word: str, known: list[str]) -> str:
    """A phrase that names the known word nearest to ``word``, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def validate_topic_configs(configs: Mapping[str, str]) -> None:
    """Refuse an unknown key or a value out of bounds with an InvalidConfigError that names it."""
    for key, text in configs.items():
        entry = TOPIC_CONFIGS.get(key)
        if entry is None:
            raise InvalidConfigError(
                f"unknown topic config {key!r}{suggest(key, list(TOPIC_CONFIGS))}"
            )
        try:
            entry.parse(text)
        except ValueError as error:
            raise InvalidConfigError(f"topic config {key}={text!r}: {error}") from None


def effective_min_isr(configs: Mapping[str, str], replication_factor: int) -> int:
    """``min.insync.replicas`` in force: as set, else 2, else 1 with fewer than 3 replicas."""
    text = configs.get("min.insync.replicas", "")
    if text:
        return int(text)
    return 2 if replication_factor >= 3 else 1


def config_value(configs: Mapping[str, str], key: str) -> str:
    """The text in force for ``key``: as set on the topic, else the default."""
    return configs.get(key, TOPIC_CONFIGS[key].default)


def integer_config(configs: Mapping[str, str], key: str) -> int:
    """The whole number in force for ``key``. Only for keys with a whole-number default."""
    return int(config_value(configs, key))
