"""Where which record is, as far as anybody was told: what readers and acknowledgements agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.chaos.checkers.records import Records, Runs
from penstock.chaos.checkers.spans import Column, Cover, Mask, overlaps, point, starts_of
from penstock.chaos.history import History


def merged(runs: Runs) -> Runs:
    """The same records in the longest runs, each said once, by partition and offset."""
    if not len(runs):
        return runs
    by_offset = runs.where(np.argsort(runs.start, kind="stable"))
    start, end = by_offset.start, by_offset.end
    alike = _alike_to_predecessor(by_offset)
    reach = np.maximum.accumulate(end)
    if np.any((start[1:] < reach[:-1]) & ~alike[1:]):
        # Two records at one place: what belongs together may not stand side by side.
        lines = (by_offset.first - by_offset.offset, by_offset.producer, by_offset.partition)
        by_offset = by_offset.where(np.lexsort((by_offset.offset, *lines)))
        start, end = by_offset.start, by_offset.end
        alike = _alike_to_predecessor(by_offset)
        reach = _reach_of_groups(end, ~alike)
    begins = ~alike
    begins[1:] |= start[1:] > reach[:-1]
    groups = starts_of(begins)
    pieces = by_offset.where(groups)
    longest = np.maximum.reduceat(end, groups) - pieces.start
    pieces = Runs(*_with_count(pieces, longest))
    return pieces.where(np.argsort(pieces.start, kind="stable"))


def _with_count(runs: Runs, count: Column) -> Iterator[Column]:
    for name in Runs.__slots__:
        yield count if name == "count" else getattr(runs, name)


def _alike_to_predecessor(runs: Runs) -> Mask:
    """Whether the one before is of the same producer, and would go on with the same numbers."""
    alike = np.zeros(len(runs), np.bool_)
    shift = runs.first - runs.offset
    alike[1:] = (
        (runs.partition[1:] == runs.partition[:-1])
        & (runs.producer[1:] == runs.producer[:-1])
        & (shift[1:] == shift[:-1])
    )
    return alike


def _reach_of_groups(end: Column, begins: Mask) -> Column:
    """The furthest end so far, of each group by itself."""
    group = np.cumsum(begins)
    # Ends are below 2^63 / 4: a rank keeps them apart by group, and in their order.
    order = np.unique(end)
    rank = np.searchsorted(order, end) + group * len(order)
    reach: Column = order[np.maximum.accumulate(rank) - group * len(order)]
    return reach


@dataclass(frozen=True, slots=True)
class Clash:
    """Two runs that cannot both be right, and the offsets, or numbers, that both have."""

    one: int
    other: int
    start: int
    end: int


class Places:
    """What is where, by offset and by number.

    ``given`` is what readers were given, ``known`` that and what was acknowledged for certain.
    """

    def __init__(self, records: Records, *, faulty: bool) -> None:
        self._records = records
        self.given = merged(records.given)
        certain = records.strong(records.acknowledged, faulty=faulty)
        self.known = merged(records.given.beside(certain))
        self._longest = int(self.given.count.max(initial=0))

    def offset_clashes(self) -> Iterator[Clash]:
        """Pairs of runs with other records at the same offsets."""
        return _clashes(self.known.start, self.known.count)

    def number_clashes(self) -> Iterator[Clash]:
        """Pairs of runs with the same records at other offsets."""
        numbers = self._records.numbers(self.known)
        order = np.argsort(numbers, kind="stable")
        for clash in _clashes(numbers[order], self.known.count[order]):
            one, other = sorted((int(order[clash.one]), int(order[clash.other])))
            yield Clash(one, other, clash.start, clash.end)

    def is_given(self, run: int, offset: int) -> bool:
        """Whether a reader was given this record of a known run there."""
        known, given = self.known, self.given
        partition, shift = known.partition[run], known.first[run] - known.offset[run]
        line = point(int(partition), offset)
        # What clashes overlaps: the run may be some places before.
        at = int(np.searchsorted(given.start, line, "right")) - 1
        while at >= 0 and given.start[at] + self._longest > line:
            if (
                given.end[at] > line
                and given.producer[at] == known.producer[run]
                and given.first[at] - given.offset[at] == shift
            ):
                return True
            at -= 1
        return False

    def cover(self) -> Cover:
        """The offsets of all known records."""
        return Cover(self.known.start, self.known.end)


def _clashes(start: Column, count: Column) -> Iterator[Clash]:
    end = start + count
    for one, other in overlaps(start, end):
        yield Clash(one, other, int(start[other]), int(min(end[one], end[other])))


def places(history: History) -> Places:
    """Of a history in which leaders may have failed."""
    return Places(history.derived(Records.of), faulty=True)


def calm_places(history: History) -> Places:
    """Of a history without a fault: what leaders alone acknowledged is to stay as well."""
    return Places(history.derived(Records.of), faulty=False)
