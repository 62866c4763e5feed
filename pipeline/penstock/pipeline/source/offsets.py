"""Offsets by partition as JSON, in the forms of Spark's Kafka connector.

::

    {"orders": {"0": 23, "1": 45}}      offsets, in options and in Spark's checkpoints
    {"orders": {"0": 1767323045000}}    times in ms since 1970, in ``startingOffsetsByTimestamp``
    {"orders": [0, 1]}                  partitions, in ``assign``

In options -1 stands for the latest offset and -2 for the earliest. In checkpoints a topic has its
id beside its partitions, ``{"orders": {"0": 23, "id": "0198..."}}``: offsets mean nothing in
another topic that was given its name. Those of earlier versions have none. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.client import TopicPartition

Offsets = dict[TopicPartition, int]
"""For each partition the next offset to be read."""

EARLIEST: Final = -2
LATEST: Final = -1
_MAX_INT64: Final = 2**63 - 1
_MAX_INT32: Final = 2**31 - 1
_ID: Final = "id"


def to_json(
    offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, str] | None = None
) -> dict[str, dict[str, int | str]]:
    """What goes into a checkpoint, with the ids of those topics of which they are known.

    Spark compares it as text, so equal offsets look alike.
    """
    found: dict[str, dict[str, int | str]] = {}
    for partition in sorted(offsets):
        found.setdefault(partition.topic, {})[str(partition.partition)] = offsets[partition]
    for topic, numbers in found.items():
        if topic_ids is not None and topic in topic_ids:
            numbers[_ID] = topic_ids[topic]
    return found


def from_json(found: Any) -> Offsets:
    """The offsets of ``to_json``. Raises ValueError saying what is wrong with it."""
    if isinstance(found, dict):
        found = {topic: _without_id(numbers) for topic, numbers in found.items()}
    return _offsets(found, least=0)


def ids_from_json(found: Mapping[str, Any]) -> dict[str, str]:
    """The topics' ids in ``to_json``, of those that have one there."""
    return {topic: numbers[_ID] for topic, numbers in found.items() if _ID in numbers}


def _without_id(numbers: Any) -> Any:
    if not isinstance(numbers, dict) or not isinstance(numbers.get(_ID), str):
        return numbers
    return {number: offset for number, offset in numbers.items() if number != _ID}


def parse_wanted(text: str) -> Offsets:
    """The offsets of an option, where -1 and -2 are places. Raises ValueError."""
    return _offsets(_object(text), least=EARLIEST)


def parse_times(text: str) -> dict[TopicPartition, int]:
    """The times of an option, in ms since 1970. Raises ValueError."""
    return _offsets(_object(text), least=0, what="time in ms since 1970")


def parse_partitions(text: str) -> tuple[TopicPartition, ...]:
    """The partitions of ``assign``, sorted. Raises ValueError."""
    found: set[TopicPartition] = set()
    for topic, numbers in _object(text).items():
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"topic {topic!r} wants a list of partitions, as in [0, 1]")
        found.update(TopicPartition(topic, _partition(topic, number)) for number in numbers)
    if not found:
        raise ValueError("no partition is named")
    return tuple(sorted(found))


def describe(partitions: Iterable[TopicPartition], most: int = 5) -> str:
    """Some of them, for a message."""
    named = sorted(partitions)
    shown = ", ".join(str(partition) for partition in named[:most])
    return shown if len(named) <= most else f"{shown} and {len(named) - most} more"


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repetition)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError('a JSON object by topic is wanted, as in {"orders": ...}')
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _offsets(found: Any, least: int, what: str = "offset") -> Offsets:
    if not isinstance(found, dict):
        raise ValueError('a JSON object by topic is wanted, as in {"orders": {"0": 23}}')
    offsets: Offsets = {}
    for topic, numbers in found.items():
        if not isinstance(numbers, dict):
            raise ValueError(f'topic {topic!r} wants each partition\'s {what}: {{"0": 23}}')
        for number, offset in numbers.items():
            partition = TopicPartition(topic, _partition(topic, number))
            if type(offset) is not int or not least <= offset <= _MAX_INT64:
                raise ValueError(f"partition {partition}: {offset!r} is no {what}")
            if partition in offsets:
                raise ValueError(f"partition {partition} stands there twice")
            offsets[partition] = offset
    return offsets


def _partition(topic: str, number: Any) -> int:
    if isinstance(number, str) and number.isascii() and number.isdecimal() and len(number) < 11:
        number = int(number)
    if type(number) is not int or not 0 <= number <= _MAX_INT32:
        raise ValueError(f"topic {topic!r}: {number!r} is no partition")
    return number
