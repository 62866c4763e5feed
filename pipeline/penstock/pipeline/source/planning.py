"""What one query, or one micro-batch of it, reads: pure arithmetic over offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.client import TopicPartition
from penstock.pipeline.source.offsets import Offsets


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets from ``start`` up to, and without, ``end`` of one partition."""

    partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets it has; records may be fewer."""
        return self.end - self.start


def ranges(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
) -> list[OffsetRange]:
    """What is between two positions, by partition; nothing where the end is not behind the start.

    A partition without a start is not read: ``step`` gives one to each partition before it is.
    """
    return [
        OffsetRange(partition, start[partition], end[partition])
        for partition in sorted(end)
        if partition in start and start[partition] < end[partition]
    ]


def split(wanted: Iterable[OffsetRange], min_partitions: int) -> list[OffsetRange]:
    """At least so many ranges (if there are so many offsets), of about one size, in order."""
    left = [one for one in wanted if one.size > 0]
    total = sum(one.size for one in left)
    if len(left) >= min_partitions:
        return left
    found: list[OffsetRange] = []
    # The small ones first: what rounding gives them, the large ones make up for.
    pieces_left, size_left = min_partitions, total
    pieces: dict[TopicPartition, int] = {}
    for index, one in enumerate(sorted(left, key=lambda one: one.size)):
        after = len(left) - index - 1
        share = round(pieces_left * one.size / size_left) if after else pieces_left
        count = min(max(1, min(share, pieces_left - after)), one.size)
        pieces[one.partition] = count
        pieces_left -= count
        size_left -= one.size
    for one in left:
        count = pieces[one.partition]
        edges = [one.start + one.size * index // count for index in range(count + 1)]
        found += [OffsetRange(one.partition, low, high) for low, high in itertools.pairwise(edges)]
    return found


def available(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> int:
    """How many offsets there are between the two."""
    return sum(one.size for one in ranges(start, end))


def limited(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    most: int,
    weights: Mapping[TopicPartition, float] | None = None,
) -> Offsets:
    """``end``, or before it so that there is no more than ``most`` to read.

    It is shared out in proportion to what each partition has, and none that has something is left
    without: one offset of each is read even where that is more than ``most``, lest a large
    partition starve the small ones. ``weights`` say what an offset of a partition counts (its
    bytes, say); without, each counts one.
    """
    wanted = ranges(start, end)
    weight = {one.partition: (weights or {}).get(one.partition, 1.0) for one in wanted}
    total = sum(one.size * weight[one.partition] for one in wanted)
    found = dict(end)
    if total <= most:
        return found
    # What the ones that are owed to everybody take is nobody's to share.
    rest = max(0.0, most - sum(weight.values()))
    shared = sum((one.size - 1) * weight[one.partition] for one in wanted)
    due, given = 0.0, 0
    for one in wanted:
        # What rounding leaves of one share goes to the next.
        due += (one.size - 1) * rest / shared if shared else 0.0
        share = min(int(due + 1e-6) - given, one.size - 1)
        given += share
        found[one.partition] = one.start + 1 + share
    return found


def step(
    start: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
) -> Offsets:
    """How far a query at ``start`` may read, where its partitions end at ``latest``.

    A partition that is new gets its place in ``earliest`` first, and is read from the next step on:
    so that the checkpoint says where it began, and a batch that is repeated begins there again.
    """
    return {
        partition: end if partition in start else earliest[partition]
        for partition, end in latest.items()
        if partition in start or partition in earliest
    }
