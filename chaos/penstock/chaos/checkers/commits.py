"""Whether what a group committed stays, goes forward, and was worked on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, transactions
from penstock.chaos.checkers.members import Group, by_group, offsets_of, seeks_of
from penstock.chaos.checkers.places import calm_places, places
from penstock.chaos.checkers.polls import committed_places
from penstock.chaos.checkers.records import Records, is_final, partition_name, topic_of
from penstock.chaos.checkers.showing import show, span
from penstock.chaos.checkers.spans import Cover, off_line, point
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict


class CommittedForward:
    """A committed offset goes back where, of a group and a partition, a commit that was accepted,
    or what a reader of committed offsets was told, is below (or, of what was told, is no offset
    at all) what was committed by a commit that was accepted before it was invoked, without a reset
    in between: a seek of a member, or a commit by no member. A commit of which nobody knows whether
    it was accepted, or that was under way meanwhile, may have come in between as well. What
    transactions have committed is asked of final reads alone, since it may show only later. A
    committed offset is a phantom where a reader is told one that nobody committed: all commits of
    it failed, or were in transactions that are not committed, or are not there. An anomaly is a
    commit or a read, and one of its partitions.
    """

    name = "committed-forward"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        for group in by_group(history):
            _Floor(history, group, findings).judge()
        return findings.verdict("no commit was accepted, and no committed offset was read")


class _Floor:
    """By partition what the committed offset cannot be below, as time goes by."""

    def __init__(self, history: History, group: Group, findings: Findings) -> None:
        self._history: Final = history
        self._group: Final = group
        self._findings: Final = findings
        self._floor: Final[dict[str, tuple[int, Operation]]] = {}
        self._later: Final[dict[str, tuple[int, Operation]]] = {}
        """Of transactions: for final reads."""
        self._asked: Final[dict[str, set[int]]] = defaultdict(set)
        """What was committed, or may be."""
        self._expected: Final[dict[int, dict[str, tuple[int, Operation]]]] = {}
        self._open: Final[dict[str, Counter[int]]] = defaultdict(Counter)
        """What is under way, or may be for ever."""

    def judge(self) -> None:
        """Go through all events of the group by time."""
        for operation, begins in self._events():
            f = operation.invoked.f
            if f == "seek":
                self._reset(operation)
            elif begins:
                self._begin(operation)
            elif f == "commit-offsets":
                self._accepted(operation)
            elif f == "commit":
                self._committed(operation)
            else:
                self._read(operation)

    def _events(self) -> Iterator[tuple[Operation, bool]]:
        group, history = self._group, self._history
        fates = history.derived(transactions)
        its = [*group.commits, *group.reads]
        names = {one.invoked.value["txn"] for one in group.commits if "txn" in one.invoked.value}
        commits = (fates[name].commit for name in sorted(names))
        its += [one for one in commits if one is not None]
        seeks = history.derived(seeks_of)
        its += [one for member in sorted(group.members) for one in seeks.get(member, ())]
        events = [(one.invoked.t, one, True) for one in its]
        events += [
            (one.completed.t, one, False)
            for one in its
            if one.completed is not None and one.type is Type.OK and one.invoked.f != "seek"
        ]
        events.sort(key=lambda event: event[0])
        for _, one, begins in events:
            yield one, begins

    def _begin(self, operation: Operation) -> None:
        asked = operation.invoked.value
        known = dict(self._floor)
        if operation.invoked.f == "committed-offsets" and is_final(operation):
            for partition, (offset, commit) in self._later.items():
                if offset > known.get(partition, (-1,))[0]:
                    known[partition] = (offset, commit)
        self._expected[id(operation)] = known
        fates = self._history.derived(transactions)
        failed = operation.type is Type.FAIL
        if operation.invoked.f == "send-offsets":
            failed = failed or fates[asked["txn"]].fate is Fate.ABORTED
        if not failed:
            for partition, offset in offsets_of(operation).items():
                self._asked[partition].add(offset)
                self._open[partition][offset] += 1

    def _reset(self, seek: Operation) -> None:
        asked = seek.invoked.value
        partition = partition_name(asked["topic"], asked["partition"])
        self._floor.pop(partition, None)
        self._later.pop(partition, None)
        for known in self._expected.values():
            known.pop(partition, None)

    def _accepted(self, commit: Operation) -> None:
        known = self._expected.pop(id(commit), {})
        is_reset = not commit.invoked.value.get("member")
        for partition, offset in offsets_of(commit).items():
            self._findings.looked_at += 1
            self._open[partition][offset] -= 1
            floor, now = known.get(partition), self._floor.get(partition)
            went_back = floor is not None and offset < floor[0]
            if went_back and not is_reset and not self._excused(partition, offset):
                assert floor is not None
                what = f"a commit of {offset} was accepted after one of {floor[0]}"
                self._add(partition, what, floor[1], commit)
            # Of two that were under way together either may have been the last.
            together = now is not None and _ended(now[1]) > commit.invoked.t
            if now is None or is_reset or went_back or together or now[0] < offset:
                lower = min(offset, now[0]) if now and together else offset
                self._floor[partition] = (lower, commit)

    def _excused(self, partition: str, offset: int) -> bool:
        """Whether one that may have been accepted lately was as low."""
        return any(count > 0 and low <= offset for low, count in self._open[partition].items())

    def _committed(self, commit: Operation) -> None:
        name = commit.invoked.value["txn"]
        self._expected.pop(id(commit), None)
        for one in self._history.derived(transactions)[name].of("send-offsets"):
            for partition, offset in offsets_of(one).items():
                if one.invoked.value["group"] != self._group.name or one.type is Type.FAIL:
                    continue
                self._open[partition][offset] -= 1
                if one.type is Type.OK:
                    self._findings.looked_at += 1
                    if offset > self._later.get(partition, (-1,))[0]:
                        self._later[partition] = (offset, commit)

    def _read(self, read: Operation) -> None:
        if read.invoked.f != "committed-offsets":
            return
        assert read.completed is not None
        told = (read.completed.value or {}).get("offsets") or {}
        known = self._expected.pop(id(read), {})
        for partition, (offset, commit) in known.items():
            now = told.get(partition)
            if now is None or (now < offset and not self._open[partition][now]):
                what = f"{now} was read after {offset} was committed"
                self._add(partition, what, commit, read)
        for partition, offset in told.items():
            if offset is None or offset < 0:
                continue
            self._findings.looked_at += 1
            if offset not in self._asked[partition]:
                self._add(partition, f"{offset} was read, which was never committed", read)

    def _add(self, partition: str, what: str, *operations: Operation) -> None:
        self._findings.add(f"group {self._group.name}, {partition}: {what}", *show(*operations))


def _ended(one: Operation) -> int:
    assert one.completed is not None
    return one.completed.t


class GroupProcessed:
    """A record is not processed where the group's committed offset, as it was read last (or, where
    it was never read, as it was committed highest), is above it, and no member's poll was given it,
    though it is there: another poll was given it, or it was acknowledged (as SkippedPoll defines
    it). An anomaly is a run of such offsets. Where records are left above the committed offset when
    the run ends, nothing is said for certain.

    ``from_earliest`` off: the group begins where its members first polled.
    """

    name = "group-processed"

    def __init__(self, *, from_earliest: bool = True) -> None:
        self._from_earliest: Final = from_earliest

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records = history.derived(Records.of)
        everything = history.derived(places if evidence.faults else calm_places).cover()
        committed = committed_places(history, evidence)
        for group in by_group(history):
            members = np.array([reader in group.members for reader in records.readers], np.bool_)
            its = members[records.visits.reading] if len(members) else np.zeros(0, np.bool_)
            given = records.given.where(its[records.given.visit])
            seen = Cover(given.start, given.end)
            there = committed if bool(np.any(records.visits.committed[its])) else everything
            for partition, offset in sorted(_committed_last(history, group).items()):
                number = records.partitions.find(partition)
                if topic_of(partition) in records.unstable or number < 0:
                    continue
                here = np.flatnonzero(its & (records.visits.partition == number))
                asked = records.visits.asked[here]
                start = 0 if self._from_earliest else int(asked.min(initial=offset))
                base, top = (point(number, at) for at in (start, offset))
                findings.looked_at += int(there.count(np.array([base]), np.array([top]))[0])
                for lower, upper in there.parts(base, top):
                    for a, b in seen.gaps(lower, upper):
                        self._add(
                            history, findings, group, partition=partition, offset=offset, at=(a, b)
                        )
                end = point(number + 1, 0)
                left = int(there.count(np.array([top]), np.array([end]))[0])
                if left:
                    findings.doubt(
                        f"group {group.name} had not committed past the last {left} records of "
                        f"{partition} when the run ended"
                    )
        return findings.verdict("no group has committed past a record")

    @staticmethod
    def _add(
        history: History,
        findings: Findings,
        group: Group,
        *,
        partition: str,
        offset: int,
        at: tuple[int, int],
    ) -> None:
        a, b = at
        records = history.derived(Records.of)
        shown: list[Operation] = []
        for runs in (records.acknowledged, records.given):
            here = np.flatnonzero((runs.start <= a) & (runs.end > a))
            shown += [history.operations[place] for place in runs.operation[here].tolist()[:1]]
        past = [one for one in group.commits if offsets_of(one).get(partition, -1) > off_line(a)[1]]
        findings.add(
            f"group {group.name}, {partition}: offset {span(off_line(a)[1], off_line(b)[1])} was "
            f"given to no member, but {offset} is committed",
            *show(*shown, *past[:1]),
        )


def _committed_last(history: History, group: Group) -> Mapping[str, int]:
    """By partition what the group has committed in the end."""
    found: dict[str, int] = {}
    fates = history.derived(transactions)
    for one in group.commits:
        name = one.invoked.value.get("txn")
        if one.type is Type.OK and (name is None or fates[name].fate is Fate.COMMITTED):
            for partition, offset in offsets_of(one).items():
                found[partition] = max(offset, found.get(partition, offset))
    for one in group.reads:
        if one.type is Type.OK and is_final(one):
            told = (one.value or {}).get("offsets") or {}
            found |= {name: offset for name, offset in told.items() if offset is not None}
    return found
