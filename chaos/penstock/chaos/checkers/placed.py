"""Whether every record is at one place, every place has one record, and producers keep order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.places import Clash, Places, calm_places, places
from penstock.chaos.checkers.records import OK, Records, Runs
from penstock.chaos.checkers.showing import Shown, Touches, at_offset, of_number, show, span
from penstock.chaos.checkers.spans import Column, off_line, on_line, overlaps, point
from penstock.chaos.history import History, Operation
from penstock.chaos.verdict import Findings, Verdict

_NOTHING: Final = "no record was read"
_MOST_SOURCES: Final = 2


def _places(history: History, evidence: Evidence) -> Places:
    return history.derived(places if evidence.faults else calm_places)


class _Sources:
    """Finds the operations that said something of a record: its append, and polls."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._records = history.derived(Records.of)

    def at(self, partition: int, offset: int) -> Iterator[Shown]:
        """Those that say what is there, one of each answer."""
        records = self._records
        touches = at_offset(records.partitions.names[partition], offset)
        line = point(partition, offset)
        for runs in (records.acknowledged, records.given):
            here = runs.where(np.flatnonzero((runs.start <= line) & (runs.end > line)))
            _, one_each = np.unique(here.first - here.offset, return_index=True)
            yield from self._show(here.operation[np.sort(one_each)], touches)

    def of(self, run: Runs, place: int, number: int) -> Iterator[Shown]:
        """Those that say where the record is, and the append that was to bring it there.

        Nobody may know of that whether it did: then it is the one that tells what was asked for.
        """
        records = self._records
        partition, producer = int(run.partition[place]), int(run.producer[place])
        names = (records.partitions.names[partition], records.producers.names[producer])
        touches = of_number(*names, number)
        unanswered = records.attempted.where(records.outcome[records.attempted.operation] != OK)
        for runs in (unanswered, records.acknowledged, records.given):
            mask = (runs.partition == partition) & (runs.producer == producer)
            mask &= (runs.first <= number) & (runs.first + runs.count > number)
            here = runs.where(np.flatnonzero(mask))
            _, one_each = np.unique(here.offset - here.first, return_index=True)
            yield from self._show(here.operation[np.sort(one_each)], touches)

    def _show(self, operations: Column, touches: Touches) -> Iterator[Shown]:
        found: Iterable[Operation] = (
            self._history.operations[place] for place in operations.tolist()[:_MOST_SOURCES]
        )
        yield from show(*found, touches=touches)


class Duplicate:
    """A duplicate is a record (partition, producer, number) that readers were given at two offsets,
    or that one reader was given twice without moving its position (by a seek, or by its group's
    assignment) in between. An anomaly is a run of such records. Records of producers that wrote
    with fewer acknowledgements than all have no idempotence: their duplicates are figures.
    """

    name = "duplicate"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records, found = history.derived(Records.of), _places(history, evidence)
        findings.looked_at = int(found.given.count.sum())
        weak, sources = records.weak_lanes(), _Sources(history)
        doubled = weak_doubled = 0
        for clash, one, other in _moved(records, found):
            lane, number = off_line(clash.start)
            size = clash.end - clash.start
            if not (found.is_given(clash.one, one) and found.is_given(clash.other, other)):
                continue
            if weak[lane]:
                weak_doubled += size
                continue
            doubled += size
            partition, producer = records.lane_names(lane)
            findings.add(
                f"{partition}: {producer}'s {span(number, number + size)} is there twice, from "
                f"offset {one} and from offset {other}",
                *sources.of(found.known, clash.one, number),
            )
        doubled += self._given_twice(history, findings)
        return findings.verdict(
            _NOTHING, duplicate_records=doubled, duplicates_without_idempotence=weak_doubled
        )

    def _given_twice(self, history: History, findings: Findings) -> int:
        """To one reader, at one offset; the number of records."""
        records = history.derived(Records.of)
        given, visits = records.given, records.visits
        start = on_line(visits.reading[given.visit], given.offset)
        order = np.argsort(start, kind="stable")
        start, size = start[order], given.count[order]
        found = 0
        for one, other in overlaps(start, start + size):
            reading, offset = off_line(int(start[other]))
            twice = int(min(start[one] + size[one], start[other] + size[other]) - start[other])
            found += twice
            partition = records.partitions.names[int(given.partition[order[other]])]
            polls = (history.operations[int(given.operation[order[at]])] for at in (one, other))
            findings.add(
                f"{partition}: {records.readers[reading]} was given offset "
                f"{span(offset, offset + twice)} twice without moving back",
                *show(*polls, touches=at_offset(partition, offset)),
            )
        return found


def _moved(records: Records, found: Places) -> Iterator[tuple[Clash, int, int]]:
    """Records that are said to be at two offsets, with both (the lower run's first)."""
    known = found.known
    for clash in found.number_clashes():
        number = off_line(clash.start)[1]
        one, other = (
            int(known.offset[run] + number - known.first[run]) for run in (clash.one, clash.other)
        )
        yield clash, one, other


class InconsistentOffset:
    """An offset is inconsistent where two readers, or one twice, were given different records at
    it, or a record was acknowledged (with acks=all; without a fault also with acks=1) at an offset
    at which readers were given another one, or two appends were acknowledged at one offset, or
    where a record was acknowledged at one offset and given at another. An anomaly is a run of such
    offsets.
    """

    name = "inconsistent-offset"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records, found = history.derived(Records.of), _places(history, evidence)
        known, sources = found.known, _Sources(history)
        findings.looked_at = int(known.count.sum())

        def name(run: int, number: int) -> str:
            return f"{records.producers.names[int(known.producer[run])]}'s {number}"

        for clash in found.offset_clashes():
            partition, offset = off_line(clash.start)
            what = (
                name(run, int(known.first[run] + offset - known.offset[run]))
                for run in (clash.one, clash.other)
            )
            offsets = span(offset, offset + clash.end - clash.start)
            findings.add(
                f"{records.partitions.names[partition]}: at offset {offsets} there is "
                + ", and also ".join(what),
                *sources.at(partition, offset),
            )
        for clash, one, other in _moved(records, found):
            if found.is_given(clash.one, one) and found.is_given(clash.other, other):
                continue
            lane, number = off_line(clash.start)
            partition_name, producer = records.lane_names(lane)
            findings.add(
                f"{partition_name}: {producer}'s {span(number, number + clash.end - clash.start)} "
                f"is said to be from offset {one} and from offset {other}",
                *sources.of(known, clash.one, number),
            )
        return findings.verdict("no record was read or acknowledged")


class Reorder:
    """A reorder is a record that readers were given at a higher offset than one with a larger
    number of the same producer in the same partition (of a record that is there twice, the first
    counts). An anomaly is a run of such records. Producers that wrote with fewer acknowledgements
    than all have no idempotence and may be reordered by their retries: theirs are figures.
    """

    name = "reorder"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records, found = history.derived(Records.of), _places(history, evidence)
        given = found.given
        findings.looked_at = int(given.count.sum())
        lane = records.lane(given)
        order = np.lexsort((given.offset, lane))
        start = records.numbers(given)[order]
        reach = np.maximum.accumulate(start + given.count[order])
        late = np.flatnonzero(start[1:] < reach[:-1]) + 1
        weak, sources, weak_reordered = records.weak_lanes(), _Sources(history), 0
        for number in np.unique(lane[order][late]).tolist():
            runs = order[lane[order] == number]
            for run, first, count, after in _out_of_order(given, runs):
                if weak[number]:
                    weak_reordered += count
                    continue
                partition, producer = records.lane_names(number)
                findings.add(
                    f"{partition}: {producer}'s {span(first, first + count)} comes after its "
                    f"{after}",
                    *sources.of(given, run, first),
                    *sources.of(given, run, after),
                )
        return findings.verdict(_NOTHING, reordered_without_idempotence=weak_reordered)


def _out_of_order(given: Runs, runs: Column) -> Iterator[tuple[int, int, int, int]]:
    """Of one producer's runs by offset: the run, its first late number, how many, and the largest
    number that comes before them.
    """
    seen: set[int] = set()
    largest = -1
    for run in runs.tolist():
        first, count = int(given.first[run]), int(given.count[run])
        fresh = [number for number in range(first, first + count) if number not in seen]
        late = [number for number in fresh if number < largest]
        if late:
            yield run, late[0], len(late), largest
        seen.update(fresh)
        largest = max(largest, first + count - 1)
