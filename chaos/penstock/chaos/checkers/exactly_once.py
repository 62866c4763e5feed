"""Whether what transactions read is worked on once, and what they move is neither made nor lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, transactions
from penstock.chaos.checkers.polls import committed_places
from penstock.chaos.checkers.records import NONE, Records, partition_name
from penstock.chaos.checkers.showing import show, span
from penstock.chaos.checkers.spans import Column, Cover, off_line, on_line, overlaps, point
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict


class ProcessedOnce:
    """A record is not processed exactly once by a group where two committed transactions that have
    sent offsets of the group have both read from it (twice), or where, between the lowest and the
    highest offset that such transactions have read from in a partition, it is there for
    read_committed readers (as SkippedPoll defines it) and no transaction that is committed, or may
    be, has read from it (never). An anomaly is a run of such offsets.
    """

    name = "processed-once"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        there = committed_places(history, evidence)
        for group, its in _read_by_group(history).items():
            certain = [one for one in its if one.committed]
            start = np.array([one.start for one in certain], np.int64)
            end = np.array([one.end for one in certain], np.int64)
            findings.looked_at += int((end - start).sum())
            order = np.argsort(start, kind="stable")
            for one, other in overlaps(start[order], end[order]):
                first, second = certain[int(order[one])], certain[int(order[other])]
                self._twice(history, findings, group, first, second)
            self._never(history, findings, group, its, there)
        return findings.verdict("no committed transaction has read a record and sent its offset")

    @staticmethod
    def _twice(
        history: History, findings: Findings, group: str, first: _Read, second: _Read
    ) -> None:
        known = history.derived(transactions)
        partition, offset = off_line(second.start)
        size = min(first.end, second.end) - second.start
        name = history.derived(Records.of).partitions.names[partition]
        shown = (
            one for read in (first, second) for one in known[read.txn].of("read-from", "commit")
        )
        findings.add(
            f"group {group}, {name}: offset {span(offset, offset + size)} was processed twice, by "
            f"transaction {first.txn} and by {second.txn}",
            *show(*shown),
        )

    @staticmethod
    def _never(
        history: History, findings: Findings, group: str, its: Sequence[_Read], there: Cover
    ) -> None:
        names = history.derived(Records.of).partitions.names
        start = np.array([one.start for one in its], np.int64)
        seen = Cover(start, np.array([one.end for one in its], np.int64))
        by_partition: dict[int, list[_Read]] = defaultdict(list)
        for one in its:
            if one.committed:
                by_partition[off_line(one.start)[0]].append(one)
        for number, reads in by_partition.items():
            lowest, highest = min(one.start for one in reads), max(one.end for one in reads)
            for lower, upper in there.parts(lowest, highest):
                for a, b in seen.gaps(lower, upper):
                    after = min((one for one in reads if one.start >= b), key=lambda one: one.start)
                    done = history.derived(transactions)[after.txn]
                    offset = off_line(a)[1]
                    lacking = span(offset, offset + b - a)
                    findings.add(
                        f"group {group}, {names[number]}: offset {lacking} was never processed, "
                        f"but transaction {after.txn} went on behind it",
                        *show(*done.of("read-from", "send-offsets", "commit")),
                    )


@dataclass(frozen=True, slots=True)
class _Read:
    """What a transaction has read in a row."""

    start: int
    end: int
    txn: str
    committed: bool


def _read_by_group(history: History) -> Mapping[str, list[_Read]]:
    """Of transactions that are committed, or may be, by the group whose offsets they have sent."""
    records = history.derived(Records.of)
    found: dict[str, list[_Read]] = defaultdict(list)
    for one in history.derived(transactions).values():
        sent = one.of("send-offsets")
        if one.fate is Fate.ABORTED or not sent:
            continue
        for read in one.of("read-from"):
            asked = read.invoked.value
            for entry, offset, _, _, count in asked.get("runs") or ():
                name = partition_name(asked.get("topic", ""), entry)
                place = point(records.partitions.number(name), offset)
                committed = one.fate is Fate.COMMITTED
                run = _Read(place, place + count, one.name, committed)
                found[sent[0].invoked.value["group"]].append(run)
    return found


class TransferTotal:
    """A transfer takes an amount from one account and gives it to another by the two appends of its
    transaction, in this order (a transaction of several transfers has two appends for each), or
    moves amounts between several by as many appends. A read_committed reader has passed a transfer
    when its positions are above the offsets of them all and began at or below them; the total of a
    reader is all that it was given as gains, less all that it was given as losses, of the transfers
    that it has passed. It is 0 after each poll: money is neither made nor lost at any boundary of
    transactions. An anomaly is a reader and a transfer by which its total has changed. Readers that
    moved their positions are left out.
    """

    name = "transfer-total"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        records = history.derived(Records.of)
        legs = _legs(history)
        owner = np.array([leg.transfer for leg in legs], np.int64)
        amount = np.array([leg.amount for leg in legs], np.int64)
        place = np.array([leg.place for leg in legs], np.int64)
        count = int(owner.max(initial=-1)) + 1
        totals: dict[str, int] = {}
        moved = 0
        for reader, visits in _readers(records):
            spans = _way(records, visits)
            if spans is None:
                moved += 1
                continue
            passed = spans.count(place, place + 1)
            whole = np.bincount(owner, passed, count) == np.bincount(owner, minlength=count)
            its = records.given.where(np.isin(records.given.visit, visits))
            given = Cover(its.start, its.end).count(place, place + 1)
            change = np.bincount(owner, given * amount, count).astype(np.int64)
            findings.looked_at += int(np.count_nonzero(whole))
            totals[reader] = int(change[whole].sum())
            for number in np.flatnonzero(whole & (change != 0)).tolist():
                one = next(leg for leg in legs if leg.transfer == number)
                done = history.derived(transactions)[one.txn]
                findings.add(
                    f"{reader}'s total changes by {change[number]}: it was given a part of a "
                    f"transfer of transaction {one.txn} ({done.fate})",
                    *show(*done.of("transfer", "append", "commit", "abort")),
                )
        return findings.verdict(
            "no read_committed reader has passed a transfer",
            totals=totals,
            readers_that_moved=moved,
        )


@dataclass(frozen=True, slots=True)
class _Leg:
    """One of the records of a transfer: where it is, and what it is worth."""

    transfer: int
    txn: str
    place: int
    amount: int


def _legs(history: History) -> list[_Leg]:
    """Of the transfers whose appends were all acknowledged."""
    records = history.derived(Records.of)
    found: list[_Leg] = []
    number = 0
    for one in history.derived(transactions).values():
        transfers = one.of("transfer")
        places = [_place(records, append) for append in one.of("append")] if transfers else []
        for transfer in transfers:
            amounts = _amounts(transfer)
            its, places = places[: len(amounts)], places[len(amounts) :]
            if len(its) < len(amounts) or NONE in its:
                continue
            found += [
                _Leg(number, one.name, place, amount)
                for place, amount in zip(its, amounts, strict=True)
            ]
            number += 1
    return found


def _amounts(transfer: Operation) -> Sequence[int]:
    """What its appends are worth: two, or as many as it says."""
    asked = transfer.invoked.value
    worth = int(asked.get("amount", 0))
    amounts: Sequence[int] = asked.get("amounts") or (-worth, worth)
    return amounts


def _place(records: Records, append: Operation) -> int:
    """Where its record is; NONE where nobody knows."""
    asked, answer = append.invoked.value, append.completed
    runs = (answer.value or {}).get("runs") if answer and append.type is Type.OK else None
    number = records.partitions.find(partition_name(asked["topic"], asked["partition"]))
    if not runs or number == NONE:
        return NONE
    return point(number, runs[0][2])


def _readers(records: Records) -> Iterator[tuple[str, Column]]:
    """Read_committed readers, and their visits."""
    names = np.array(records.readers, np.object_)
    visits = records.visits
    own: dict[Any, list[int]] = defaultdict(list)
    for visit in np.flatnonzero(visits.committed & (visits.asked != NONE)).tolist():
        own[names[int(visits.reading[visit])]].append(visit)
    for reader, its in own.items():
        yield reader, np.array(its, np.int64)


def _way(records: Records, its: Column) -> Cover | None:
    """What a reader has passed; None where it moved."""
    visits = records.visits
    partition, reading = visits.partition[its], visits.reading[its]
    if len(np.unique(partition)) != len(np.unique(reading)):
        return None
    return Cover(on_line(partition, visits.asked[its]), on_line(partition, visits.after[its]))
