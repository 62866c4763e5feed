"""Whether a reader that seeks gets to where it asked to be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.records import (
    ACKS_ALL,
    NONE,
    Records,
    Runs,
    moves,
    partition_name,
    topic_of,
)
from penstock.chaos.checkers.showing import at_offset, show
from penstock.chaos.checkers.spans import Column, Mask
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_SESSION_NS: Final = 7_000_000_000
"""broker.session.timeout.ms of runs, and how seldom heartbeats may be: a broker that no controller
answers for so long serves nobody."""


class _Partition:
    """What is known of a partition's records: what was acknowledged by all, and what was given."""

    def __init__(self, history: History, number: int, stamps: Column) -> None:
        records = history.derived(Records.of)
        acknowledged = records.acknowledged
        certain = (acknowledged.partition == number) & (
            records.weight[acknowledged.operation] == ACKS_ALL
        )
        self.acknowledged: Final[Runs] = acknowledged.where(certain)
        self.ended: Final = records.ended[self.acknowledged.operation]
        self.stamps: Final = stamps[self.acknowledged.operation]
        self.given: Final[Runs] = records.given.where(records.given.partition == number)
        own = records.attempted.where(records.attempted.partition == number)
        self.is_transactional: Final = bool(np.any(records.transaction[own.operation] != NONE))

    def before(self, t: int) -> Mask:
        """Which appends were acknowledged before then."""
        return self.ended < t


class SeekHonoured:
    """A seek is not honoured where it asked for an offset and got another one; where it asked for
    the earliest and a record below was given to, or acknowledged for, anybody; where it asked for
    the latest and a record was acknowledged before at or above what it got (looked at in partitions
    without transactions; while there is a fault, and a session after it, the record has to be
    acknowledged longer than a session before: for so long a leader that is cut off may not know
    that there is another one); where it asked for a timestamp and a record below what it got was
    acknowledged before and is not older, or the record at what it got is older and was acknowledged
    before; or where the reader's next poll of the partition begins elsewhere. An anomaly is a seek.

    ``expiring`` names topics with retention, of which the earliest record is another as time goes
    by. Timestamps are judged of the appends that tell theirs (``timestamp``, in milliseconds).
    """

    name = "seek-honoured"

    def __init__(self, *, expiring: frozenset[str] = frozenset()) -> None:
        self._expiring: Final = expiring

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        records = history.derived(Records.of)
        stamps: Column | None = None
        partitions: dict[str, _Partition] = {}
        moved = history.derived(moves)
        for one in history.of("seek"):
            asked, answer = one.invoked.value, one.completed
            name = partition_name(asked["topic"], asked["partition"])
            if answer is None or answer.type is not Type.OK or asked["topic"] in records.unstable:
                continue
            if stamps is None:
                stamps = _stamps(history)
            if name not in partitions:
                number = records.partitions.find(name)
                partitions[name] = _Partition(history, number, stamps)
            findings.looked_at += 1
            since = one.invoked.t - (_SESSION_NS if _is_shaken(one, evidence) else 0)
            for offset, what in self._wrong(one, name, partitions[name], since):
                appends = (
                    history.operations[place]
                    for place in _at(partitions[name].acknowledged, offset)
                )
                touches = at_offset(name, offset)
                findings.add(
                    f"{name}: {one.invoked.p} {what}", *show(one, *appends, touches=touches)
                )
            reader = asked.get("member") or one.invoked.p
            later = moved[reader, name]
            self._next_poll(
                history, findings, one, name, later[bisect_right(later, one.invoked.t) :]
            )
        return findings.verdict("no seek was answered")

    @staticmethod
    def _next_poll(
        history: History, findings: Findings, one: Operation, name: str, later: list[int]
    ) -> None:
        """Whether the poll that follows begins where the seek has led, unless it was moved
        again.
        """
        assert one.completed is not None
        records = history.derived(Records.of)
        visits, got = records.visits, int(one.completed.value["offset"])
        begun = records.begun[visits.operation]
        its = np.flatnonzero(
            (visits.partition == records.partitions.find(name))
            & (begun > one.completed.t)
            & (begun < (later[0] if later else history.end_t + 1))
        )
        reader = one.invoked.value.get("member") or one.invoked.p
        for visit in its.tolist():
            if records.readers[int(visits.reading[visit])] != reader:
                continue
            asked = int(visits.asked[visit])
            if asked not in {NONE, got}:
                poll = history.operations[int(visits.operation[visit])]
                what = f"got to {got} by a seek, but its next poll began at {asked}"
                findings.add(f"{name}: {reader} {what}", *show(one, poll))
            return

    def _wrong(
        self, one: Operation, name: str, known: _Partition, since: int
    ) -> Iterator[tuple[int, str]]:
        """What is wrong with a seek, and the offset that shows it. What was acknowledged before
        ``since`` is known to every leader.
        """
        assert one.completed is not None
        asked, got = one.invoked.value, int(one.completed.value["offset"])
        before = known.before(one.invoked.t)
        runs = known.acknowledged
        ends = runs.offset + runs.count
        if "offset" in asked:
            if got != asked["offset"]:
                yield got, f"sought offset {asked['offset']} and got {got}"
        elif asked.get("where") == "earliest":
            if topic_of(name) not in self._expiring:
                lowest = int(min(runs.offset.min(initial=got), known.given.offset.min(initial=got)))
                if lowest < got:
                    yield lowest, f"sought the earliest and got {got}, but {lowest} is there"
        elif asked.get("where") == "latest":
            last = int(ends[known.before(since)].max(initial=0)) - 1
            if last >= got and not known.is_transactional:
                yield last, f"sought the latest and got {got}, but {last} was acknowledged before"
        elif "timestamp" in asked:
            yield from _wrong_time(int(asked["timestamp"]), got, known, before)


def _is_shaken(one: Operation, evidence: Evidence) -> bool:
    """Whether there may be a leader that does not know that there is another one."""
    return any(
        fault.began_t <= one.invoked.t <= fault.healed_t + _SESSION_NS for fault in evidence.faults
    )


def _wrong_time(
    timestamp: int, got: int, known: _Partition, before: Mask
) -> Iterator[tuple[int, str]]:
    runs, stamps = known.acknowledged, known.stamps
    passed = (runs.offset < got) & before & (stamps >= timestamp)
    if passed.any():
        offset = int(runs.offset[passed].min())
        stamp = int(stamps[passed][np.argmin(runs.offset[passed])])
        yield offset, f"sought {timestamp} ms and got {got}, but {offset} is of {stamp} ms"
    # What came only then may be of any time: nothing as late was there, and the end was the answer.
    here = (runs.offset <= got) & (runs.offset + runs.count > got)
    at = np.flatnonzero(here & before & (stamps != NONE))
    for run in at.tolist()[:1]:
        if stamps[run] < timestamp:
            yield got, f"sought {timestamp} ms and got {got}, which is of {stamps[run]} ms"


def _stamps(history: History) -> Column:
    """By the place of an append the timestamp of its records; NONE where it tells none."""
    found = np.full(len(history.operations), NONE, np.int64)
    if not any("timestamp" in one.invoked.value for one in history.of("seek")):
        return found
    for place, one in enumerate(history.operations):
        if one.invoked.f == "append":
            found[place] = one.invoked.value.get("timestamp", NONE)
    return found


def _at(runs: Runs, offset: int) -> list[int]:
    """The operation that acknowledged what is there."""
    here = np.flatnonzero((runs.offset <= offset) & (runs.offset + runs.count > offset))
    places: list[int] = runs.operation[here].tolist()
    return places[:1]
