"""Whether each partition of a group is one member's, and nobody acts for another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence, HeldFault
from penstock.chaos.checkers.fates import Fate, transactions
from penstock.chaos.checkers.members import Group, Poll, by_group, offsets_of
from penstock.chaos.checkers.records import Records, is_final, topic_of
from penstock.chaos.checkers.showing import show
from penstock.chaos.checkers.spans import Cover
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_MS: Final = 1_000_000


class GroupExclusive:
    """A group is not exclusive where two of its members have the same partition in the same
    generation. A member has what it was assigned, also in generations before, and what was neither
    revoked from it nor lost; an assignment says so for its generation. A group without members and
    without committed offsets is forgotten, and its generations begin anew: assignments are compared
    from the first one on after which none can be, the last before a commit that may have been
    accepted. An anomaly is a generation, a partition and a second member.
    """

    name = "group-exclusive"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        for group in by_group(history):
            first: dict[tuple[int, str], tuple[str, Operation]] = {}
            kept_t = _kept_t(history, group)
            for generation, partition, member, operation in _claims(group):
                findings.looked_at += 1
                if operation.invoked.t < kept_t:
                    continue
                known, before = first.setdefault((generation, partition), (member, operation))
                if known != member:
                    findings.add(
                        f"group {group.name}: in generation {generation} both {known} and {member} "
                        f"have {partition}",
                        *show(before, operation),
                    )
        return findings.verdict("no member was assigned a partition")


def _kept_t(history: History, group: Group) -> int:
    """When the group was known last before it had offsets, which keep it from being forgotten."""
    fates = history.derived(transactions)
    aborted = {name for name, one in fates.items() if one.fate is Fate.ABORTED}
    commits = (
        one.invoked.t
        for one in group.commits
        if one.type is not Type.FAIL and one.invoked.value.get("txn") not in aborted
    )
    begun = min(commits, default=history.end_t + 1)
    members = (one.invoked.t for one in group.assignments if one.invoked.f == "assigned")
    return max((t for t in members if t < begun), default=0)


def _claims(group: Group) -> Iterator[tuple[int, str, str, Operation]]:
    """Generation, partition and member of each time that a member has got, or keeps, one."""
    has: dict[str, set[str]] = defaultdict(set)
    for one in group.assignments:
        asked, f = one.invoked.value, one.invoked.f
        member, its = asked["member"], has[asked["member"]]
        partitions = asked.get("partitions") or ()
        if f == "assigned":
            fresh = set(partitions) - its
            its |= fresh
            if asked.get("generation") is not None:
                yield from ((asked["generation"], part, member, one) for part in sorted(its))
        elif f == "revoked":
            its.difference_update(partitions)
        else:
            its.clear()


class GroupComplete:
    """A group is not complete where one of its partitions is left out: for ``limit_ms`` on end,
    with no fault held, no member's poll was about it, though members polled other partitions
    before, in and after that time. The partitions of a group are those that a member ever had, and
    those of the same topics that were written to. An anomaly is a partition and such a time. One
    that is never polled is left out from the group's first poll to its last. The time from the last
    poll of the load to the first of the final reads does not count: nobody is a member then.
    """

    name = "group-complete"

    def __init__(self, *, limit_ms: int = 30_000) -> None:
        self._limit_t: Final = limit_ms * _MS

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records = history.derived(Records.of)
        longest = 0
        for group in by_group(history):
            if not group.polls:
                continue
            excused = _excused(group.polls, evidence.faults)
            topics = {topic_of(name) for name in group.partitions} - records.unstable
            written = (name for name in records.partitions.names if topic_of(name) in topics)
            theirs = {name for name in group.partitions if topic_of(name) in topics}
            for partition in sorted(theirs.union(written)):
                its = [poll for poll in group.polls if partition in poll.partitions]
                findings.looked_at += len(its)
                if not its:
                    findings.doubt(f"group {group.name} never polled {partition}")
                for start, end in _left_out(group.polls, its, excused):
                    longest = max(longest, end - start)
                    if end - start >= self._limit_t:
                        self._add(findings, group, partition, start, end)
        return findings.verdict("no member polled", longest_left_out_ms=longest // _MS)

    @staticmethod
    def _add(findings: Findings, group: Group, partition: str, start: int, end: int) -> None:
        around = [one for one in group.assignments if one.invoked.t <= end][-2:]
        others = [poll.operation for poll in group.polls if start < poll.operation.invoked.t < end]
        findings.add(
            f"group {group.name}: nobody polled {partition} from {start / 1e9:.1f} s to "
            f"{end / 1e9:.1f} s",
            *show(*around, *others[:1]),
        )


def _answered(poll: Poll) -> int:
    assert poll.operation.completed is not None
    return poll.operation.completed.t


def _excused(polls: Sequence[Poll], faults: Sequence[HeldFault]) -> list[tuple[int, int]]:
    """In their order the times in which nobody need poll: faults, and between load and reads."""
    found = [(fault.began_t, fault.healed_t) for fault in faults]
    loads = [_answered(poll) for poll in polls if not is_final(poll.operation)]
    finals = [poll.operation.invoked.t for poll in polls if is_final(poll.operation)]
    if loads and finals:
        found.append((max(loads), min(finals)))
    return sorted(found)


def _left_out(
    polls: Sequence[Poll], its: Sequence[Poll], excused: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Times without an excuse in which the group polled, but not this partition."""
    column = partial(np.array, dtype=np.int64)
    attended = Cover(
        column([poll.operation.invoked.t for poll in its]),
        column([_answered(poll) for poll in its]),
    )
    times = sorted(map(_answered, polls))
    for start, end in attended.gaps(polls[0].operation.invoked.t, times[-1]):
        for free, until in _without(excused, start, end):
            if bisect_left(times, until) > bisect_right(times, free):
                yield free, until


def _without(excused: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """What of the time is not excused."""
    for began_t, over_t in excused:
        if over_t <= start:
            continue
        if began_t >= end:
            break
        if began_t > start:
            yield start, began_t
        start = over_t
    if start < end:
        yield start, end


class ZombieCommit:
    """A zombie commit is a commit of offsets (by itself, or sent to a transaction) that was
    accepted from a member in a generation older than one in which, before the commit was invoked,
    another member had acted on the partition: its poll was answered with records of it, or it was
    done with its assignment (looked at from where GroupExclusive does). An anomaly is a commit and
    one of its partitions.
    """

    name = "zombie-commit"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        for group in by_group(history):
            kept_t = _kept_t(history, group)
            acts = [act for act in _acts(group) if act[0] >= kept_t]
            at = 0
            # By partition the newest generation of each of its two newest members.
            newest: dict[str, dict[str, tuple[int, Operation]]] = defaultdict(dict)
            for commit in group.commits:
                asked = commit.invoked.value
                while at < len(acts) and acts[at][0] < commit.invoked.t:
                    _, generation, member, partitions, operation = acts[at]
                    for partition in partitions:
                        known = newest[partition].get(member)
                        if known is None or known[0] <= generation:
                            newest[partition][member] = (generation, operation)
                    at += 1
                if commit.type is not Type.OK or asked.get("generation") is None:
                    continue
                for partition in offsets_of(commit):
                    findings.looked_at += 1
                    self._judge(findings, group, commit, partition, newest[partition])
        return findings.verdict("no commit of a member was accepted")

    @staticmethod
    def _judge(
        findings: Findings,
        group: Group,
        commit: Operation,
        partition: str,
        newest: dict[str, tuple[int, Operation]],
    ) -> None:
        asked = commit.invoked.value
        later = [
            (generation, member, act)
            for member, (generation, act) in newest.items()
            if member != asked["member"] and generation > asked["generation"]
        ]
        if later:
            generation, member, act = max(later, key=lambda one: one[0])
            findings.add(
                f"group {group.name}: a commit of {partition} by {asked['member']} in generation "
                f"{asked['generation']} was accepted after {member} had acted on it in "
                f"generation {generation}",
                *show(act, commit),
            )


_Act = tuple[int, int, str, Sequence[str], Operation]


def _acts(group: Group) -> list[_Act]:
    """When it was over, the generation, the member, the partitions, and what it was."""
    found: list[_Act] = [
        (_answered(poll), poll.generation, poll.member, sorted(poll.given), poll.operation)
        for poll in group.polls
        if poll.generation is not None and poll.given
    ]
    for one in group.assignments:
        if one.invoked.f == "assigned" and one.completed is not None and one.type is Type.OK:
            asked = one.invoked.value
            if asked.get("generation") is None:
                continue
            partitions = asked.get("partitions") or ()
            found.append((one.completed.t, asked["generation"], asked["member"], partitions, one))
    return sorted(found, key=lambda act: act[0])
