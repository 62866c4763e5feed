"""Whether topics that come and go stay apart from one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.records import partition_name
from penstock.chaos.checkers.showing import at_offset, show
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_TELL_IDS: Final = ("create", "delete", "add-partitions", "reassign")


def _ended(one: Operation) -> int:
    assert one.completed is not None
    return one.completed.t


def _id_of(one: Operation) -> Any:
    answer = one.completed.value if one.completed is not None else None
    return answer.get("topic_id") if isinstance(answer, dict) else None


def _done(history: History, f: str) -> Mapping[str, list[Operation]]:
    """By topic what was answered ok."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for one in history.of(f):
        if one.type is Type.OK:
            found[one.invoked.value["topic"]].append(one)
    return found


class TopicIds:
    """A topic id comes back where two creations were answered with it, or where an operation that
    was invoked after the deletion of that topic was answered ok is answered with it. A topic is
    created twice where a creation was answered ok before another one of the same name was invoked,
    that one was answered ok as well, and no deletion of it was invoked between the first one's
    invocation and the second one's answer. An anomaly is an operation.
    """

    name = "topic-ids"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        created: dict[Any, Operation] = {}
        deleted: dict[Any, Operation] = {}
        for one in sorted(history.of(*_TELL_IDS), key=_completed):
            topic_id, asked = _id_of(one), one.invoked.value
            if one.type is not Type.OK or topic_id is None:
                continue
            findings.looked_at += 1
            gone = deleted.get(topic_id)
            if gone is not None and _ended(gone) < one.invoked.t:
                what = f"{one.invoked.f} told topic id {topic_id}, which was deleted"
                findings.add(f"topic {asked['topic']}: {what}", *show(gone, one))
            elif one.invoked.f == "create" and created.setdefault(topic_id, one) is not one:
                what = f"was created with topic id {topic_id}, which had been given away"
                findings.add(f"topic {asked['topic']}: it {what}", *show(created[topic_id], one))
            if one.invoked.f == "delete":
                deleted.setdefault(topic_id, one)
        for first, second in _created_twice(history):
            what = "it was created twice without having been deleted"
            findings.add(f"topic {first.invoked.value['topic']}: {what}", *show(first, second))
        return findings.verdict("no operation told a topic's id")


def _completed(one: Operation) -> int:
    return one.completed.t if one.completed is not None else one.invoked.t


def _created_twice(history: History) -> Iterator[tuple[Operation, Operation]]:
    deletions: dict[str, list[int]] = defaultdict(list)
    for one in history.of("delete"):
        if one.type is not Type.FAIL:
            deletions[one.invoked.value["topic"]].append(one.invoked.t)
    for topic, creations in _done(history, "create").items():
        for first, second in pairwise(creations):
            between = any(first.invoked.t < t < _ended(second) for t in deletions[topic])
            if _ended(first) < second.invoked.t and not between:
                yield first, second


class DeletedRecords:
    """A deleted record comes back where a reader is given a record whose append was answered ok
    before a deletion of its topic was invoked, by a poll that was invoked after the deletion was
    answered ok and a later creation of the same name was as well, and the reader has nothing left
    from before: that poll's partition is one that it polled only, or to which it seeked, after that
    creation. An anomaly is a record.
    """

    name = "deleted-records"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        births = _rebirths(history)
        appended: dict[tuple[str, str], list[tuple[int, int, Operation]]] = defaultdict(list)
        for one in history.of("append") if births else ():
            asked = one.invoked.value
            if asked["topic"] in births and one.type is Type.OK:
                key = (partition_name(asked["topic"], asked["partition"]), asked["producer"])
                appended[key].append((asked["first"], asked["first"] + asked["count"], one))
        fresh_since: dict[tuple[str, str], int] = {}
        for one in history.of("poll", "seek") if births else ():
            asked = one.invoked.value
            if asked["topic"] not in births or one.type is not Type.OK:
                continue
            reader = asked.get("member") or one.invoked.p
            if one.invoked.f == "seek":
                name = partition_name(asked["topic"], asked["partition"])
                fresh_since[reader, name] = one.invoked.t
                continue
            for run in (one.value or {}).get("runs") or ():
                name = partition_name(asked["topic"], run[0])
                since = fresh_since.setdefault((reader, name), one.invoked.t)
                its = appended[name, run[2]]
                self._judge(findings, one, run, since, births=births, appended=its)
        return findings.verdict("no poll was given a record of a topic that came again")

    @staticmethod
    def _judge(
        findings: Findings,
        poll: Operation,
        run: list[Any],
        since: int,
        *,
        births: Mapping[str, list[tuple[Operation, Operation]]],
        appended: list[tuple[int, int, Operation]],
    ) -> None:
        topic = poll.invoked.value["topic"]
        before = [pair for pair in births[topic] if _ended(pair[1]) < since]
        if not before:
            return
        deletion, creation = before[-1]
        findings.looked_at += run[4]
        for start, end, append in appended:
            first, last = max(start, run[3]), min(end, run[3] + run[4])
            if first < last and _ended(append) < deletion.invoked.t:
                name = partition_name(topic, run[0])
                for number in range(first, last):
                    findings.add(
                        f"{name}: {run[2]}'s {number}, deleted with its topic, is back at offset "
                        f"{run[1] + number - run[3]}",
                        *show(append, deletion, creation),
                        *show(poll, touches=at_offset(name, run[1] + number - run[3])),
                    )


def _rebirths(history: History) -> Mapping[str, list[tuple[Operation, Operation]]]:
    """By topic each deletion that was answered ok, with the first creation that followed it."""
    creations = _done(history, "create")
    found: dict[str, list[tuple[Operation, Operation]]] = defaultdict(list)
    for topic, deletions in _done(history, "delete").items():
        for deletion in deletions:
            later = [one for one in creations.get(topic, ()) if one.invoked.t > _ended(deletion)]
            if later:
                found[topic].append((deletion, later[0]))
    return found
