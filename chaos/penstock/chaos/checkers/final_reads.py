"""What the final reads saw, which tell what is left after everything was healed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from penstock.chaos.checkers.places import merged
from penstock.chaos.checkers.records import NONE, Records, Runs, is_final, partition_name
from penstock.chaos.checkers.spans import Cover, off_line, on_line, point
from penstock.chaos.history import History, Type


class FinalReads:
    """By partition: from where to where it was read in the end, and what was there."""

    def __init__(self, history: History) -> None:
        records = history.derived(Records.of)
        visits = records.visits
        final = visits.final & (visits.asked != NONE) & (visits.after > visits.asked)
        partition = visits.partition[final]
        self._read: Final = Cover(
            on_line(partition, visits.asked[final]), on_line(partition, visits.after[final])
        )
        self.given: Final[Runs] = merged(records.given.where(visits.final[records.given.visit]))
        self.numbers: Final = _numbers(records, self.given)
        self.offsets: Final = Cover(self.given.start, self.given.end)
        self.ends: Final[dict[int, int]] = {}
        """Up to where readers were told that there was something."""
        for place in np.flatnonzero(visits.final & (visits.end != NONE)).tolist():
            number, end = int(visits.partition[place]), int(visits.end[place])
            self.ends[number] = max(end, self.ends.get(number, 0))
        self._earliest: Final = _earliest(history, records)
        # Asked for again for each record that is missing.
        self.span = cache(self._span)
        self.complaint = cache(self._complaint)

    def _span(self, partition: int) -> tuple[int, int] | None:
        """From where to where it was read; None where it was not."""
        parts = list(self._read.parts(point(partition, 0), point(partition + 1, 0)))
        if not parts:
            # One that is empty was read too, where a reader has seen that nothing is there.
            return (0, 0) if self.ends.get(partition) == 0 else None
        return off_line(parts[0][0])[1], off_line(parts[-1][1])[1]

    def unread(self, partition: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of these offsets no final read passed over."""
        for gap in self._read.gaps(point(partition, start), point(partition, end)):
            yield off_line(gap[0])[1], off_line(gap[1])[1]

    def begins_at(self, partition: int) -> int | None:
        """The offset of the first record that the log still had; None where nobody asked."""
        known = self._earliest.get(partition)
        found = self.span(partition)
        if known is None and found is not None and found[0] == 0:
            return 0
        return known

    def _complaint(self, partition: int, name: str) -> str:
        """Why what is missing of it may be there nevertheless; nothing where it was read whole."""
        found = self.span(partition)
        if found is None:
            return f"there is no final read of {name}"
        end = self.ends.get(partition)
        if end is None:
            return f"no final read of {name} was told where it ends"
        if found[1] < end:
            return f"the final reads of {name} stopped at {found[1]} of {end}"
        if self.begins_at(partition) is None:
            return f"the final reads of {name} began at {found[0]}, and nobody asked for its start"
        gap = next(self.unread(partition, *found), None)
        return f"the final reads of {name} left out offsets {gap[0]} to {gap[1] - 1}" if gap else ""


def _numbers(records: Records, given: Runs) -> Cover:
    start = records.numbers(given)
    return Cover(start, start + given.count)


def _earliest(history: History, records: Records) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in history.of("seek"):
        asked, answer = one.invoked.value, one.completed
        if not is_final(one) or asked.get("where") != "earliest":
            continue
        if answer is None or answer.type is not Type.OK:
            continue
        number = records.partitions.find(partition_name(asked["topic"], asked["partition"]))
        offset = int(answer.value["offset"])
        found[number] = min(offset, found.get(number, offset))
    return found


@dataclass(frozen=True, slots=True)
class Missing:
    """Records in a row that were acknowledged and are not in the final reads.

    ``gone``: something else is at their offsets, or the log does not reach to them. Otherwise a
    reader passed over their offsets and was given nothing.
    """

    partition: int
    producer: int
    first: int
    count: int
    offset: int
    operation: int
    gone: bool
    where: str
    """Below the log's start (``start``), at its end (``end``), or ``within``."""


def missing_of(history: History, promised: Runs) -> list[Missing]:
    """What of it the final reads should have seen and did not, in partitions that they read."""
    records, reads = history.derived(Records.of), history.derived(FinalReads)
    numbers = range(len(records.partitions.names))
    was_read = np.array([reads.span(number) is not None for number in numbers], np.bool_)
    promised = promised.where(was_read[promised.partition])
    start = records.numbers(promised)
    suspect = np.flatnonzero(reads.numbers.count(start, start + promised.count) < promised.count)
    found: list[Missing] = []
    for run in suspect.tolist():
        base = int(start[run])
        for lower, upper in reads.numbers.gaps(base, base + int(promised.count[run])):
            found += _missing(reads, promised, run, lower - base, upper - base)
    return found


def _missing(
    reads: FinalReads, promised: Runs, run: int, lower: int, upper: int
) -> Iterator[Missing]:
    """Of one run the records from ``lower`` up to ``upper``, by what became of their offsets."""
    partition, offset = int(promised.partition[run]), int(promised.offset[run])
    span = reads.span(partition)
    if span is None:
        return

    def piece(start: int, end: int, *, gone: bool, where: str) -> Missing:
        first = int(promised.first[run]) + start - offset
        identity = (partition, int(promised.producer[run]), first, end - start, start)
        return Missing(*identity, int(promised.operation[run]), gone, where)

    start, end = offset + lower, offset + upper
    if start < span[0] and reads.begins_at(partition) is not None:
        yield piece(start, min(end, span[0]), gone=True, where="start")
    if end > span[1] and not reads.complaint(partition, ""):
        yield piece(max(start, span[1]), end, gone=True, where="end")
    start, end = max(start, span[0]), min(end, span[1])
    if start >= end:
        return
    unread = list(reads.unread(partition, start, end))
    line = point(partition, 0)
    for a, b in reads.offsets.parts(line + start, line + end):
        yield piece(a - line, b - line, gone=True, where="within")
    for a, b in reads.offsets.gaps(line + start, line + end):
        if not any(c < b - line and a - line < d for c, d in unread):
            yield piece(a - line, b - line, gone=False, where="within")
