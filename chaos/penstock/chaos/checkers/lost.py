"""Whether what was acknowledged is there in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, with_fate
from penstock.chaos.checkers.final_reads import FinalReads, Missing, missing_of
from penstock.chaos.checkers.records import ACKS_ALL, NONE, OK, Records, Runs
from penstock.chaos.checkers.showing import at_offset, of_number, show, span
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

_NO_APPEND: Final = "no append was acknowledged by all"


def _promised(history: History) -> Runs:
    """What was acknowledged by all in-sync replicas, and is in no transaction that may be gone."""
    records = history.derived(Records.of)
    runs = records.acknowledged
    transaction = records.transaction[runs.operation]
    stays = (transaction == NONE) | with_fate(history, Fate.COMMITTED)[transaction]
    return runs.where((records.weight[runs.operation] == ACKS_ALL) & stays)


def _missing(history: History) -> list[Missing]:
    return missing_of(history, history.derived(_promised))


def _look(history: History, findings: Findings, promised: Runs) -> None:
    """Count what is judged, and doubt where it was not read to its end."""
    records, reads = history.derived(Records.of), history.derived(FinalReads)
    findings.looked_at = int(promised.count.sum())
    for number in np.unique(promised.partition).tolist():
        complaint = reads.complaint(number, records.partitions.names[number])
        if complaint:
            findings.doubt(complaint)


def _survivors(
    history: History, promised: Runs, missing: Iterable[Missing]
) -> Mapping[int, tuple[int, int]]:
    """By partition the lowest and the highest offset of what was promised and is there."""
    gone: dict[tuple[int, int], list[Missing]] = {}
    for one in missing:
        gone.setdefault((one.operation, one.partition), []).append(one)
    found: dict[int, tuple[int, int]] = {}

    def survives(partition: int, start: int, end: int) -> None:
        low, high = found.get(partition, (start, end))
        found[partition] = (min(low, start), max(high, end))

    broken = np.isin(promised.operation, [operation for operation, _ in gone])
    whole = promised.where(~broken)
    for partition in np.unique(whole.partition).tolist():
        its = whole.where(whole.partition == partition)
        survives(partition, int(its.offset.min()), int((its.offset + its.count).max()))
    rest = promised.where(broken)
    for run in range(len(rest)):
        partition, at = int(rest.partition[run]), int(rest.offset[run])
        end = at + int(rest.count[run])
        for one in sorted(gone[int(rest.operation[run]), partition], key=lambda one: one.offset):
            if at < min(one.offset, end):
                survives(partition, at, min(one.offset, end))
            at = max(at, one.offset + one.count)
        if at < end:
            survives(partition, at, end)
    return found


def _place(one: Missing, survivors: Mapping[int, tuple[int, int]]) -> str:
    """Where it was among what was acknowledged in its partition."""
    low, high = survivors.get(one.partition, (NONE, NONE))
    if low == NONE:
        return "all"
    if one.offset < low:
        return "prefix"
    return "end" if one.offset >= high else "middle"


_AT: Final = {
    "all": "nothing that was acknowledged is left of it",
    "prefix": "at the beginning of what was acknowledged",
    "middle": "in the middle of what was acknowledged",
    "end": "at the end of what was acknowledged",
}
_WHY: Final = {
    "start": "the log begins after it",
    "end": "the log ends before it",
    "within": "another record is at its offset",
}


def _report(history: History, findings: Findings, one: Missing, what: str) -> None:
    records, reads = history.derived(Records.of), history.derived(FinalReads)
    partition = records.partitions.names[one.partition]
    producer = records.producers.names[one.producer]
    numbers = span(one.first, one.first + one.count)
    shown = list(
        show(history.operations[one.operation], touches=of_number(partition, producer, one.first))
    )
    if one.where == "within":
        # The final poll that passed over it, with what it was given there.
        visits = records.visits
        over = visits.final & (visits.partition == one.partition) & (visits.asked <= one.offset)
        for place in np.flatnonzero(over & (visits.after > one.offset)).tolist()[:1]:
            poll = history.operations[int(visits.operation[place])]
            shown += show(poll, touches=at_offset(partition, one.offset))
    findings.add(
        f"{partition}: {producer}'s {numbers}, acknowledged at offset "
        f"{span(one.offset, one.offset + one.count)}, {what}; the final reads went up to "
        f"{(reads.span(one.partition) or (0, 0))[1]}",
        *shown,
    )


class LostWrite:
    """A lost write is a record that was acknowledged with acks=all (in a transaction: whose commit
    was answered ok as well) and whose offset, after healing, holds another record, or lies above
    the end of the log or below its start. An anomaly is a run of such records of one append. It is
    told by its place among the acknowledged records of its partition: ``prefix`` where all that is
    left has higher offsets, ``end`` where all that is left has lower ones, ``middle`` otherwise,
    ``all`` where nothing is left.

    ``expiring`` names topics with retention: of them, what lies below the log's start is a figure.
    """

    name = "lost-write"

    def __init__(self, *, expiring: frozenset[str] = frozenset()) -> None:
        self._expiring: Final = expiring

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        promised, missing = history.derived(_promised), history.derived(_missing)
        _look(history, findings, promised)
        survivors = _survivors(history, promised, missing) if missing else {}
        lost: Counter[str] = Counter()
        expired = 0
        for one in missing:
            topic = history.derived(Records.of).partitions.names[one.partition].rpartition("-")[0]
            if not one.gone:
                continue
            if one.where == "start" and topic in self._expiring:
                expired += one.count
                continue
            place = _place(one, survivors)
            lost[place] += one.count
            _report(history, findings, one, f"is lost ({place}): {_WHY[one.where]}, {_AT[place]}")
        return findings.verdict(_NO_APPEND, lost_records=dict(lost), expired_records=expired)


class UnseenWrite:
    """An unseen write is a record that was acknowledged with acks=all (in a transaction: whose
    commit was answered ok as well) and that no final read was given, though one passed over its
    offset and was given nothing there: the log is longer than that, and the record is not in it, or
    is withheld. An anomaly is a run of such records of one append.
    """

    name = "unseen-write"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        _look(history, findings, history.derived(_promised))
        unseen = [one for one in history.derived(_missing) if not one.gone]
        for one in unseen:
            _report(history, findings, one, "was passed over: nothing was given at its offset")
        return findings.verdict(_NO_APPEND, unseen_records=sum(one.count for one in unseen))


class AcksLevels:
    """What fewer acknowledgements than all promise: an append with acks=1 is acknowledged by the
    leader alone and may be lost when it fails; in a run without any fault nothing fails, and there
    a record that was acknowledged with acks=1 and is not in the final reads (as LostWrite and
    UnseenWrite define it) should be there: an anomaly is a run of such records of one append. An
    append with acks=0 promises nothing, ever. How much of both is gone is told as a figure.
    """

    name = "acks-levels"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records = history.derived(Records.of)
        weight = records.weight
        acknowledged, attempted = records.acknowledged, records.attempted
        plain = records.transaction[acknowledged.operation] == NONE
        leader_alone = acknowledged.where((weight[acknowledged.operation] == 1) & plain)
        _look(history, findings, leader_alone)
        missing = missing_of(history, leader_alone)
        if not evidence.faults:
            for one in missing:
                what = "with acks=1 and without any fault, is not there any more"
                _report(history, findings, one, what)
        sent = attempted.where(
            (weight[attempted.operation] == 0) & (records.outcome[attempted.operation] == OK)
        )
        findings.looked_at += int(sent.count.sum())
        start = records.numbers(sent)
        arrived = history.derived(FinalReads).numbers.count(start, start + sent.count)
        return findings.verdict(
            "no append with acks=1 or acks=0 succeeded",
            acks_1={
                "acknowledged": int(leader_alone.count.sum()),
                "gone": sum(one.count for one in missing),
            },
            acks_0={"sent": int(sent.count.sum()), "not there": int((sent.count - arrived).sum())},
        )
