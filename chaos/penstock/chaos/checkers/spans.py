"""Spans of whole numbers, by the million: unions, overlaps and gaps, as columns.

A span is from its ``start`` up to and without its ``end``. Spans of several lines (partitions, or
producers) are kept on one by ``on_line``: no two lines touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

_BITS: Final = 40
_MOST: Final = (1 << _BITS) - 1


def on_line(line: Column, at: Column) -> Column:
    """Where these numbers (below 2^40) of these lines (below 2^23) are on the one line of all."""
    return (line << _BITS) + np.clip(at, 0, _MOST)


def point(line: int, at: int) -> int:
    """Where one number of a line is on the one line of all."""
    return (line << _BITS) + max(0, at)


def off_line(place: int) -> tuple[int, int]:
    """The line, and the number on it."""
    return place >> _BITS, place & _MOST


def starts_of(flags: Mask) -> Column:
    """The places at which a group begins."""
    return np.flatnonzero(flags).astype(np.int64)


class Cover:
    """A union of spans."""

    def __init__(self, start: Column, end: Column) -> None:
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order])
        begins = np.ones(len(start), np.bool_)
        begins[1:] = start[1:] > end[:-1]
        first = starts_of(begins)
        self.start: Final[Column] = start[first]
        self.end: Final[Column] = end[np.append(first[1:], len(start)) - 1] if len(start) else end
        self._before: Final[Column] = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(self.end - self.start)]
        )

    def __len__(self) -> int:
        """So many numbers are in it."""
        return int(self._before[-1])

    def below(self, places: Column) -> Column:
        """How many of it are below each of these."""
        if not len(self.start):
            return np.zeros(len(places), np.int64)
        at = np.searchsorted(self.start, places, "right") - 1
        inside = np.minimum(places, self.end[at]) - self.start[at]
        return np.where(at >= 0, self._before[at] + inside, 0)

    def count(self, start: Column, end: Column) -> Column:
        """How many of it are in each of these spans."""
        return self.below(end) - self.below(start)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of the span is in it."""
        at = int(np.searchsorted(self.end, start, "right"))
        while at < len(self.start) and self.start[at] < end:
            yield max(start, int(self.start[at])), min(end, int(self.end[at]))
            at += 1

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of the span is not in it."""
        for lower, upper in self.parts(start, end):
            if start < lower:
                yield start, lower
            start = upper
        if start < end:
            yield start, end


def overlaps(start: Column, end: Column) -> Iterator[tuple[int, int]]:
    """Of spans in the order of their starts: each one's place that begins before the end of one
    that comes before it, after that one's place (the one that reaches the furthest).
    """
    if not len(start):
        return
    reach = np.maximum.accumulate(end)
    furthest = np.ones(len(start), np.bool_)
    furthest[1:] = end[1:] > reach[:-1]
    holder = np.maximum.accumulate(np.where(furthest, np.arange(len(start)), 0))
    late = np.flatnonzero(start[1:] < reach[:-1]) + 1
    for at in late.tolist():
        yield int(holder[at - 1]), at
