"""Whether what readers were given was written, and what failed was not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.records import FAIL, Records, Runs
from penstock.chaos.checkers.showing import of_number, show, span
from penstock.chaos.checkers.spans import Column, Cover, off_line
from penstock.chaos.history import History, Operation
from penstock.chaos.verdict import Findings, Verdict

_NEVER: Final = "was never written"
_EARLY: Final = "was given before its append was invoked"


def _poll_of(history: History, given: Runs, run: int) -> Operation:
    return history.operations[int(given.operation[run])]


class Phantom:
    """A phantom is a record that a reader was given and that no producer of the run had tried to
    write into this partition: its append was never invoked, or only after the poll was answered. An
    anomaly is a run of such records in one poll.
    """

    name = "phantom"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        given, attempted = records.given, records.attempted
        findings.looked_at = int(given.count.sum())
        start, begins = records.numbers(given), records.numbers(attempted)
        end = start + given.count
        tried = Cover(begins, begins + attempted.count)
        unknown = tried.count(start, end) < given.count
        for run in np.flatnonzero(unknown).tolist():
            for lower, upper in tried.gaps(int(start[run]), int(end[run])):
                self._add(history, findings, run, place=lower, count=upper - lower, what=_NEVER)
        for run in self._early(records, start, begins).tolist():
            if not unknown[run]:
                place, count = int(start[run]), int(given.count[run])
                self._add(history, findings, run, place=place, count=count, what=_EARLY)
        return findings.verdict("no record was read")

    @staticmethod
    def _early(records: Records, start: Column, begins: Column) -> Column:
        """The runs whose last record was given before its append began.

        A producer's numbers go up with time, so the last record of a run is the latest.
        """
        given, attempted = records.given, records.attempted
        order = np.argsort(begins, kind="stable")
        if not len(order) or not len(given):
            return np.zeros(0, np.int64)
        last = np.searchsorted(begins[order], start + given.count - 1, "right") - 1
        append = attempted.operation[order][np.maximum(last, 0)]
        early = records.begun[append] > records.ended[given.operation]
        return np.flatnonzero(early & (last >= 0))

    @staticmethod
    def _add(
        history: History, findings: Findings, run: int, *, place: int, count: int, what: str
    ) -> None:
        records = history.derived(Records.of)
        given = records.given
        lane, number = off_line(place)
        partition, producer = records.lane_names(lane)
        offset = int(given.offset[run]) + number - int(given.first[run])
        poll = _poll_of(history, given, run)
        findings.add(
            f"{partition}: {producer}'s {span(number, number + count)}, read by "
            f"{poll.invoked.p} at offset {span(offset, offset + count)}, {what}",
            *show(poll, touches=of_number(partition, producer, number)),
        )


class ErrorHonesty:
    """A dishonest error is an append that was answered with ``fail`` (none of it is there, ever)
    and of which a reader was given a record, before or after. An anomaly is a run of such records
    of one append.
    """

    name = "error-honesty"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        attempted, given = records.attempted, records.given
        failed = attempted.where(records.outcome[attempted.operation] == FAIL)
        # Without failures nothing was dishonest, where anything was read at all.
        findings.looked_at = int(failed.count.sum()) + int(len(given) > 0)
        numbers = records.numbers(given)
        seen = Cover(numbers, numbers + given.count)
        start = records.numbers(failed)
        for run in np.flatnonzero(seen.count(start, start + failed.count) > 0).tolist():
            append = history.operations[int(failed.operation[run])]
            base = int(start[run])
            for lower, upper in seen.parts(base, base + int(failed.count[run])):
                lane, number = off_line(lower)
                partition, producer = records.lane_names(lane)
                touches = of_number(partition, producer, number)
                findings.add(
                    f"{partition}: {producer}'s {span(number, number + upper - lower)} failed "
                    f"and was given to a reader all the same",
                    *show(append, *_readers(history, lower, numbers), touches=touches),
                )
        return findings.verdict("no record was read", failed_records=int(failed.count.sum()))


def _readers(history: History, place: int, numbers: Column) -> Iterator[Operation]:
    """The first poll that gave the record."""
    given = history.derived(Records.of).given
    for run in np.flatnonzero((numbers <= place) & (place < numbers + given.count)).tolist()[:1]:
        yield _poll_of(history, given, run)
