"""What one query, or one micro-batch of it, reads: pure arithmetic over offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def split(
    wanted: Iterable[OffsetRange], min_partitions: int, max_size: int | None = None
) -> list[OffsetRange]:
    """At least so many ranges (if there are so many offsets), of about one size, in order.

    With ``max_size`` none has more offsets than that, and so there may be more of them.
    """
    left = [one for one in wanted if one.size > 0]
    counts = [-(-one.size // max_size) if max_size else 1 for one in left]
    if sum(counts) < min_partitions:
        counts = [max(both) for both in zip(counts, _shares(left, min_partitions), strict=True)]
    return [piece for one, count in zip(left, counts, strict=True) for piece in _cut(one, count)]


def _shares(left: Sequence[OffsetRange], pieces: int) -> list[int]:
    """Into how many pieces each range is cut, for so many in all: by its size, one at least."""
    counts = [0] * len(left)
    pieces_left, size_left = pieces, sum(one.size for one in left)
    # The small ones first: what rounding gives them, the large ones make up for.
    for done, index in enumerate(sorted(range(len(left)), key=lambda index: left[index].size)):
        size, after = left[index].size, len(left) - done - 1
        share = round(pieces_left * size / size_left) if after else pieces_left
        counts[index] = min(max(1, min(share, pieces_left - after)), size)
        pieces_left -= counts[index]
        size_left -= size
    return counts


def _cut(one: OffsetRange, count: int) -> Iterator[OffsetRange]:
    edges = [one.start + one.size * index // count for index in range(count + 1)]
    return (OffsetRange(one.partition, low, high) for low, high in itertools.pairwise(edges))


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
