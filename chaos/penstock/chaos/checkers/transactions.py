"""Whether readers are given what is committed, all of it and nothing else, and transactions end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, transactions, with_fate
from penstock.chaos.checkers.members import by_group, offsets_of
from penstock.chaos.checkers.records import NONE, Records, Runs, is_final
from penstock.chaos.checkers.showing import Shown, of_number, show, span
from penstock.chaos.checkers.spans import Column, Cover, off_line, on_line
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_NOTHING: Final = "no read_committed reader was given a record of a transaction"


def _within(records: Records) -> Runs:
    """What was appended, or tried to be, within transactions."""
    attempted = records.attempted
    return attempted.where(records.transaction[attempted.operation] != NONE)


def _given_committed(history: History) -> Runs:
    """What read_committed readers were given."""
    records = history.derived(Records.of)
    return records.given.where(records.visits.committed[records.given.visit])


def _cover(records: Records, runs: Runs) -> Cover:
    start = records.numbers(runs)
    return Cover(start, start + runs.count)


def _transactional(history: History) -> int:
    """How many records of transactions read_committed readers were given."""
    records, given = history.derived(Records.of), history.derived(_given_committed)
    start = records.numbers(given)
    return int(_cover(records, _within(records)).count(start, start + given.count).sum())


def _proof(
    history: History, transaction: str, *polls: Operation, number: int, lane: int
) -> list[Shown]:
    """The polls, the append of the record, and how the transaction ended."""
    records = history.derived(Records.of)
    partition, producer = records.lane_names(lane)
    done = history.derived(transactions)[transaction]
    appends = [
        one
        for one in done.of("append")
        if one.invoked.value["first"]
        <= number
        < one.invoked.value["first"] + one.invoked.value["count"]
        and one.invoked.value["producer"] == producer
    ]
    ends = done.of("commit", "abort")
    return list(show(*polls, *appends[:1], *ends, touches=of_number(partition, producer, number)))


class AbortedRead:
    """An aborted read (Adya's G1a) is a record that a read_committed reader was given, of a
    transaction that is not committed and never will be: its commit was answered with ``fail``, or
    never invoked. An anomaly is a run of such records in one poll.
    """

    name = "aborted-read"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records, given = history.derived(Records.of), history.derived(_given_committed)
        findings.looked_at = history.derived(_transactional)
        within = _within(records)
        aborted = with_fate(history, Fate.ABORTED)[records.transaction[within.operation]]
        bad = within.where(aborted)
        cover, start = _cover(records, bad), records.numbers(given)
        begins = records.numbers(bad)
        order = np.argsort(begins, kind="stable")
        end = start + given.count
        for run in np.flatnonzero(cover.count(start, end) > 0).tolist():
            for lower, upper in cover.parts(int(start[run]), int(end[run])):
                at = order[int(np.searchsorted(begins[order], lower, "right")) - 1]
                name = records.transactions.names[int(records.transaction[int(bad.operation[at])])]
                self._add(history, findings, name, run, lower, upper)
        return findings.verdict(_NOTHING)

    @staticmethod
    def _add(history: History, findings: Findings, name: str, run: int, *places: int) -> None:
        records, given = history.derived(Records.of), history.derived(_given_committed)
        lane, number = off_line(places[0])
        partition, producer = records.lane_names(lane)
        poll = history.operations[int(given.operation[run])]
        findings.add(
            f"{partition}: {producer}'s {span(number, number + places[1] - places[0])} of "
            f"transaction {name}, which is not committed, was given to {poll.invoked.p}",
            *_proof(history, name, poll, number=number, lane=lane),
        )


class PrecommittedRead:
    """A precommitted read is a record of a transaction that a read_committed reader was given by a
    poll that was answered before the transaction's commit was invoked. An anomaly is a run of
    records in one poll of which the last is such a record.
    """

    name = "precommitted-read"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records, given = history.derived(Records.of), history.derived(_given_committed)
        findings.looked_at = history.derived(_transactional)
        attempted = records.attempted
        begins = records.numbers(attempted)
        order = np.argsort(begins, kind="stable")
        if len(order) and len(given):
            known = history.derived(transactions)
            commits = (known[name].commit for name in records.transactions.names)
            asked = [NONE if one is None else one.invoked.t for one in commits]
            last = records.numbers(given) + given.count - 1
            at = np.maximum(np.searchsorted(begins[order], last, "right") - 1, 0)
            # A producer's transactions follow one another: the last record is the latest's.
            within = records.transaction[attempted.operation[order][at]]
            early = np.array([*asked, NONE])[within] > records.ended[given.operation]
            for run in np.flatnonzero(early).tolist():
                lane, number = off_line(int(last[run]))
                name = records.transactions.names[int(within[run])]
                partition, producer = records.lane_names(lane)
                poll = history.operations[int(given.operation[run])]
                findings.add(
                    f"{partition}: {producer}'s {number} was given to {poll.invoked.p} before the "
                    f"commit of its transaction {name} was invoked",
                    *_proof(history, name, poll, number=number, lane=lane),
                )
        return findings.verdict(_NOTHING)


class TornTransaction:
    """A transaction is torn where read_committed readers were given one of its records, but were
    not given another one, which was acknowledged to it and over whose offset a final read_committed
    read has passed. (One whose records are all missing is not torn, but lost.) An anomaly is a
    transaction.
    """

    name = "torn-transaction"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        names, visits = records.transactions.names, records.visits
        fates = with_fate(history, Fate.COMMITTED, Fate.UNKNOWN)
        done = records.acknowledged
        mine = done.where(fates[records.transaction[done.operation]])
        number = records.transaction[mine.operation]
        start = records.numbers(mine)
        seen = _cover(records, history.derived(_given_committed)).count(start, start + mine.count)
        over = visits.final & visits.committed & (visits.asked != NONE)
        partition = visits.partition[over]
        passed = Cover(
            on_line(partition, visits.asked[over]), on_line(partition, visits.after[over])
        ).count(mine.start, mine.end)
        size = len(names)
        given = np.bincount(number, seen, size) > 0
        lacking = (seen < mine.count) & (passed == mine.count)
        torn = given & (np.bincount(number, lacking, size) > 0)
        findings.looked_at = int(np.count_nonzero(given))
        unread = np.unique(mine.partition[(seen < mine.count) & (passed < mine.count)])
        for place in unread.tolist():
            findings.doubt(
                f"no final read_committed read went over all of {records.partitions.names[place]}"
            )
        known = history.derived(transactions)
        for at in np.flatnonzero(torn).tolist():
            missing = mine.where((number == at) & lacking)
            where = ", ".join(
                f"{records.partitions.names[int(missing.partition[run])]} at offset "
                f"{missing.offset[run]}"
                for run in range(min(3, len(missing)))
            )
            fate = known[names[at]].fate
            findings.add(
                f"transaction {names[at]} ({fate}) was seen in part: what it wrote to {where} was "
                "passed over",
                *show(*known[names[at]].of("append", "commit")),
            )
        return findings.verdict("no transaction that may be committed was read")


class TransactionsEnd:
    """A transaction does not end where, after healing, read_committed readers are told of a lower
    end of a partition than read_uncommitted readers: its records withhold all that follows. Judged
    of the partitions that transactions wrote to. An anomaly is a partition.
    """

    name = "transactions-end"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        visits = records.visits
        for number in np.unique(_within(records).partition).tolist():
            name = records.partitions.names[number]
            told = [self._last(records, number, committed=committed) for committed in (True, False)]
            if NONE in told:
                which = "read_committed" if told[0] == NONE else "read_uncommitted"
                findings.doubt(f"no final {which} read was told the end of {name}")
                continue
            findings.looked_at += 1
            ends = [int(visits.end[visit]) for visit in told]
            if ends[0] < ends[1]:
                polls = (history.operations[int(visits.operation[visit])] for visit in told)
                findings.add(
                    f"{name}: in the end read_committed readers are told of {ends[0]} offsets, and "
                    f"read_uncommitted ones of {ends[1]}: a transaction has not ended",
                    *show(*polls),
                )
        return findings.verdict("no transaction wrote a record")

    @staticmethod
    def _last(records: Records, partition: int, *, committed: bool) -> int:
        """The last final visit that was told an end."""
        visits = records.visits
        its = visits.final & (visits.end != NONE) & (visits.partition == partition)
        found: Column = np.flatnonzero(its & (visits.committed == committed))
        return int(found[-1]) if len(found) else NONE


class TransactionOffsets:
    """Offsets of a transaction are not applied iff it is committed where a final read of a group's
    committed offsets is told, of a partition to which transactions have sent offsets, less than a
    committed transaction has sent, or an offset that transactions have sent, but none of them that
    is committed or may be (and no commit by itself). An anomaly is a group and a partition.
    """

    name = "transaction-offsets"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        known = history.derived(transactions)
        for group in by_group(history):
            sent = [one for one in group.commits if one.invoked.f == "send-offsets"]
            reads = [one for one in group.reads if is_final(one) and one.type is Type.OK]
            if sent and not reads:
                findings.doubt(f"no final read of what group {group.name} has committed")
                continue
            plain = [one for one in group.commits if one.invoked.f == "commit-offsets"]
            for partition in sorted({name for one in sent for name in offsets_of(one)}):
                by_fate: dict[Fate, dict[int, Operation]] = {fate: {} for fate in Fate}
                for one in sent:
                    fate = known[one.invoked.value["txn"]].fate
                    if partition in offsets_of(one):
                        by_fate[fate][offsets_of(one)[partition]] = one
                may = {offsets_of(one).get(partition) for one in plain}
                findings.looked_at += 1
                told = (reads[-1].value or {}).get("offsets") or {}
                what = _misapplied(told.get(partition), by_fate, may)
                if what is not None:
                    findings.add(
                        f"group {group.name}, {partition}: {what[0]}", *show(what[1], reads[-1])
                    )
        return findings.verdict("no transaction sent offsets")


def _misapplied(
    told: int | None, by_fate: Mapping[Fate, Mapping[int, Operation]], may: set[int | None]
) -> tuple[str, Operation] | None:
    committed, aborted = by_fate[Fate.COMMITTED], by_fate[Fate.ABORTED]
    highest = max(committed, default=NONE)
    if highest > (NONE if told is None else told):
        name = committed[highest].invoked.value["txn"]
        return f"transaction {name} is committed with {highest}, but {told} is read", committed[
            highest
        ]
    if told in aborted and told not in {*committed, *by_fate[Fate.UNKNOWN], *may}:
        assert told is not None
        name = aborted[told].invoked.value["txn"]
        return f"{told} is read, which transaction {name} sent, and is not committed", aborted[told]
    return None
