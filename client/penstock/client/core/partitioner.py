"""Which partition a record goes to.

Keys hash with murmur2 exactly as Java clients do, so that a key lands on the same partition
whichever client wrote it. Records without a key stick to one partition until a batch's worth of
bytes went there, then move to another at random (KIP-794's uniform sticky partitioning): full
batches, evenly spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Literal, Protocol

from penstock.wire.codec import Stuck

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
REMEMBERED_BYTES: Final = 128
"""Longer keys are hashed each time: the cache holds its keys, and shall not hold gigabytes."""


class Partitioner(Protocol):
    """A custom partitioner. Called from whichever thread sends."""

    def __call__(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
        /,
    ) -> int:
        """The partition, from 0 to ``partition_count`` - 1.

        ``available`` are the partitions that have a leader now.
        """
        ...


def murmur2(key: bytes) -> int:
    """MurmurHash2, 32 bits, unsigned, with Kafka's seed."""
    return _remembered(key) if len(key) <= REMEMBERED_BYTES else _murmur2(key)


def _murmur2(key: bytes) -> int:
    length = len(key)
    h = _SEED ^ length
    whole = length & ~3
    for position in range(0, whole, 4):
        k = int.from_bytes(key[position : position + 4], "little")
        k = (k * _M) & _MASK
        k ^= k >> 24
        k = (k * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    if length != whole:
        h ^= int.from_bytes(key[whole:], "little")
        h = (h * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


_remembered: Final = lru_cache(maxsize=8_192)(_murmur2)


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Where Java clients put the key."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


class Chooser:
    """Chooses partitions for one producer. Not thread-safe: the producer's lock guards it.

    ``pick(n)`` is chance: a number from 0 to n - 1. ``stick_bytes`` is asked how many bytes without
    a key go to one partition before another is chosen.
    """

    def __init__(
        self,
        strategy: Literal["default", "round_robin"] | Partitioner,
        *,
        stick_bytes: Callable[[], int],
        pick: Callable[[int], int],
    ) -> None:
        self._strategy = strategy
        self._stick_bytes = stick_bytes
        self._pick = pick
        self.stuck: dict[str, Stuck] = {}  # By topic. The intake counts down in it as well.
        self._next: dict[str, int] = {}

    def choose(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        size_bytes: int,
        partition_count: int,
        available: Callable[[], Sequence[int]],
    ) -> int:
        """The partition of a record of ``size_bytes`` that names none."""
        if self._strategy == "round_robin":
            return self._round_robin(topic, partition_count, available())
        if self._strategy != "default":
            return self._strategy(topic, key, value, partition_count, available())
        if key is not None:
            return partition_for_key(key, partition_count)
        return self._sticky(topic, size_bytes, partition_count, available)

    def _round_robin(self, topic: str, partition_count: int, available: Sequence[int]) -> int:
        places = available or range(partition_count)
        turn = self._next.get(topic, -1) + 1
        self._next[topic] = turn
        return places[turn % len(places)]

    def _sticky(
        self,
        topic: str,
        size_bytes: int,
        partition_count: int,
        available: Callable[[], Sequence[int]],
    ) -> int:
        stuck = self.stuck.get(topic)
        if stuck is None or stuck.left_bytes <= 0 or stuck.partition >= partition_count:
            former = -1 if stuck is None else stuck.partition
            places = [place for place in available() if place != former] or available()
            places = places or range(partition_count)
            stuck = Stuck(places[self._pick(len(places))], self._stick_bytes())
            self.stuck[topic] = stuck
        stuck.left_bytes -= size_bytes
        return stuck.partition
