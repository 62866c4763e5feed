"""Whether readers go through partitions step by step, and are where they asked to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, with_fate
from penstock.chaos.checkers.places import calm_places, merged, places
from penstock.chaos.checkers.records import NONE, Records, Runs, Visits, topic_of
from penstock.chaos.checkers.showing import at_offset, show, span
from penstock.chaos.checkers.spans import Column, Cover, Mask, off_line, on_line, point
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

_NOTHING: Final = "no poll was answered"


class PollOrder:
    """A non-monotonic poll is one that begins at another position than the reader's poll before it
    left in the partition, though the reader neither moved it by a seek nor was assigned the
    partition anew; or that leaves a position below the one it began at; or that gives a record
    below the position it began at, at or above the one it left, or not above the record before it.
    An anomaly is a poll and one of its partitions.
    """

    name = "poll-order"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        visits = records.visits
        findings.looked_at = len(visits)
        order = np.argsort(visits.reading, kind="stable")
        asked, after = visits.asked[order], visits.after[order]
        same = visits.reading[order][1:] == visits.reading[order][:-1]
        known = (asked[1:] != NONE) & (after[:-1] != NONE)
        for at in np.flatnonzero(same & known & (asked[1:] != after[:-1])).tolist():
            way = "jumped" if asked[at + 1] > after[at] else "went back"
            what = f"{way} from {after[at]} to {asked[at + 1]} without a seek"
            self._add(history, findings, what, int(order[at]), int(order[at + 1]))
        back = (visits.after != NONE) & (visits.after < visits.asked)
        for visit in np.flatnonzero(back).tolist():
            what = f"went back from {visits.asked[visit]} to {visits.after[visit]} within a poll"
            self._add(history, findings, what, visit)
        for visit, what in self._misplaced(records.given, visits):
            self._add(history, findings, what, visit)
        return findings.verdict(_NOTHING)

    @staticmethod
    def _misplaced(given: Runs, visits: Visits) -> Iterator[tuple[int, str]]:
        """Visits that gave records where they were not."""
        end = given.offset + given.count
        asked, after = visits.asked[given.visit], visits.after[given.visit]
        below = np.flatnonzero(given.offset < asked)
        above = np.flatnonzero((after != NONE) & (end > after))
        order = np.argsort(given.visit, kind="stable")
        visit = given.visit[order]
        inside = (visit[1:] == visit[:-1]) & (given.offset[order][1:] < end[order][:-1])
        for run in below.tolist():
            yield int(given.visit[run]), f"was given {given.offset[run]}, below where it began"
        for run in above.tolist():
            yield int(given.visit[run]), f"was given {end[run] - 1}, above the position it left"
        for at in np.flatnonzero(inside).tolist():
            run, before = int(order[at + 1]), int(order[at])
            what = f"was given {given.offset[run]} after {end[before] - 1} in one poll"
            yield int(given.visit[run]), what

    @staticmethod
    def _add(history: History, findings: Findings, what: str, *its: int) -> None:
        records = history.derived(Records.of)
        visits = records.visits
        partition = records.partitions.names[int(visits.partition[its[-1]])]
        reader = records.readers[int(visits.reading[its[-1]])]
        polls = (history.operations[int(visits.operation[visit])] for visit in its)
        findings.add(f"{partition}: {reader} {what}", *show(*polls))


def committed_places(history: History, evidence: Evidence) -> Cover:
    """The offsets of what is there for read_committed readers, as SkippedPoll defines it."""
    records = history.derived(Records.of)
    certain = records.strong(records.acknowledged, faulty=bool(evidence.faults))
    transaction = records.transaction[certain.operation]
    stays: Mask = (transaction == NONE) | with_fate(history, Fate.COMMITTED)[transaction]
    given = records.given.where(records.visits.committed[records.given.visit])
    known = merged(given.beside(certain.where(stays)))
    return Cover(known.start, known.end)


class SkippedPoll:
    """A skip is a record between the position that a poll began at and the one that it left in a
    partition that the poll did not give, though it is there: another poll was given it (for a
    read_committed reader: by read_committed), or it was acknowledged (with acks=all; without a
    fault also with acks=1; for a read_committed reader: in no transaction, or in one whose commit
    was answered ok). Offsets at which no such record is may be passed over: control records,
    aborted records and what was compacted are there. An anomaly is a run of such offsets.

    ``expiring`` names topics with retention: of them, what a poll passes over before the first
    record that it gives may have been deleted.
    """

    name = "skipped-poll"

    def __init__(self, *, expiring: frozenset[str] = frozenset()) -> None:
        self._expiring: Final = expiring

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records = history.derived(Records.of)
        visits, given = records.visits, records.given
        first, total = self._given(records)
        moved = (visits.asked != NONE) & (visits.after > visits.asked)
        expiring = np.array([topic_of(name) in self._expiring for name in records.partitions.names])
        may_expire = expiring[visits.partition] if len(expiring) else np.zeros(0, np.bool_)
        begin = np.where(may_expire, first, visits.asked)
        findings.looked_at = int(np.count_nonzero(moved))
        everything = history.derived(places if evidence.faults else calm_places).cover()
        skipped = 0
        for committed, cover in ((False, everything), (True, committed_places(history, evidence))):
            start = on_line(visits.partition, begin)
            end = on_line(visits.partition, visits.after)
            there = cover.count(start, np.maximum(start, end))
            lacking = np.flatnonzero(moved & (visits.committed == committed) & (there > total))
            for visit in lacking.tolist():
                gave = given.where(np.flatnonzero(given.visit == visit))
                seen = Cover(gave.start, gave.end)
                for lower, upper in cover.parts(int(start[visit]), int(end[visit])):
                    for a, b in seen.gaps(lower, upper):
                        skipped += b - a
                        self._add(history, findings, visit, off_line(a)[1], off_line(b)[1])
        return findings.verdict("no poll moved a position", skipped_records=skipped)

    @staticmethod
    def _given(records: Records) -> tuple[Column, Column]:
        """By visit the offset of the first record that it gave, and how many it gave."""
        visits, given = records.visits, records.given
        total = np.bincount(given.visit, given.count, len(visits)).astype(np.int64)
        first = visits.after.copy()
        np.minimum.at(first, given.visit, given.offset)
        return first, total

    @staticmethod
    def _add(history: History, findings: Findings, visit: int, start: int, end: int) -> None:
        records = history.derived(Records.of)
        visits = records.visits
        number = int(visits.partition[visit])
        partition = records.partitions.names[number]
        touches = at_offset(partition, start)
        line = point(number, start)
        shown = list(show(history.operations[int(visits.operation[visit])], touches=touches))
        for runs in (records.acknowledged, records.given):
            for run in np.flatnonzero((runs.start <= line) & (runs.end > line)).tolist()[:1]:
                shown += show(history.operations[int(runs.operation[run])], touches=touches)
        findings.add(
            f"{partition}: {records.readers[int(visits.reading[visit])]} went from "
            f"{visits.asked[visit]} to {visits.after[visit]} and was not given offset "
            f"{span(start, end)}, which is there",
            *shown,
        )
