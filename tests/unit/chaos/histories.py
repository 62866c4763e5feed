"""Writes small histories by hand for the tests of checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.chaos.checkers import Checker, Evidence, HeldFault
from penstock.chaos.history import FINAL, Event, History, Type
from penstock.chaos.verdict import Valid, Verdict

MS = 1_000_000
OK, FAIL, INFO = Type.OK, Type.FAIL, Type.INFO
KILL = HeldFault("kill", "kill", 1, 2, 3, [1])
FAULTY = Evidence(faults=[KILL])
Run = tuple[int, int, str, int, int]


class Script:
    """Operations one after the other, a millisecond each."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.t = 0

    def tick(self) -> int:
        self.t += MS
        return self.t

    def invoke(self, p: str, f: str, value: Any = None, *, final: bool = False) -> None:
        phase = FINAL if final else ""
        self.events.append(Event(self.tick(), p, Type.INVOKE, f, value, "", phase))

    def complete(
        self, p: str, f: str, value: Any = None, *, type_: Type = OK, final: bool = False
    ) -> None:
        phase = FINAL if final else ""
        error = "" if type_ is OK else "CODE: message"
        self.events.append(Event(self.tick(), p, type_, f, value, error, phase))

    def do(
        self,
        p: str,
        f: str,
        asked: Any = None,
        answer: Any = None,
        *,
        type_: Type = OK,
        final: bool = False,
    ) -> None:
        self.invoke(p, f, asked, final=final)
        self.complete(p, f, answer if type_ is OK else None, type_=type_, final=final)

    def append(
        self,
        producer: str,
        first: int,
        count: int,
        offset: int | None,
        *,
        type_: Type = OK,
        **more: Any,
    ) -> None:
        """To partition 0 of orders, by everybody, unless ``more`` says otherwise."""
        asked = {
            "topic": "orders",
            "partition": 0,
            "producer": producer,
            "acks": "all",
            "first": first,
            "count": count,
            **more,
        }
        runs = [] if offset is None else [[first, count, offset]]
        self.do(more.get("txn", producer), "append", asked, {**asked, "runs": runs}, type_=type_)

    def poll(
        self,
        reader: str,
        before: Mapping[int, int],
        runs: Sequence[Run],
        after: Mapping[int, int],
        ends: Mapping[int, int] | None = None,
        *,
        final: bool = False,
        **more: Any,
    ) -> None:
        """Of orders, whatever is there, unless ``more`` says otherwise."""
        topic = more.pop("topic", "orders")
        generation = more.pop("generation", None)

        def named(numbers: Mapping[int, int]) -> dict[str, int]:
            return {f"{topic}-{partition}": number for partition, number in numbers.items()}

        asked = {
            "topic": topic,
            "positions": named(before),
            "isolation": "read_uncommitted",
            **more,
        }
        answer = {
            "runs": [[f"{topic}-{run[0]}", *run[1:]] for run in runs],
            "positions": named(after),
            "ends": named(after if ends is None else ends),
        }
        if generation is not None:
            answer["generation"] = generation
        self.do(reader, "poll", asked, answer, final=final)

    def seek(
        self, reader: str, got: int, partition: int = 0, *, final: bool = False, **where: Any
    ) -> None:
        asked = {"topic": "orders", "partition": partition, **(where or {"offset": got})}
        self.do(reader, "seek", asked, {"offset": got}, final=final)

    def final(self, *runs: Run, end: int, start: int = 0, partition: int = 0, **more: Any) -> None:
        """A last reader reads a partition from ``start`` to ``end`` and is given this."""
        reader = more.pop("reader", f"final-{partition}-{self.t}")
        self.seek(reader, start, partition, final=True, where="earliest")
        self.poll(reader, {partition: start}, runs, {partition: end}, final=True, **more)

    @property
    def history(self) -> History:
        return History(self.events)


def judge(checker: Checker, script: Script, evidence: Evidence = FAULTY) -> Verdict:
    return checker.check(script.history, evidence)


def is_true(checker: Checker, script: Script, evidence: Evidence = FAULTY) -> Verdict:
    verdict = judge(checker, script, evidence)
    assert verdict.valid is Valid.TRUE, verdict
    assert verdict.looked_at > 0
    return verdict


def is_false(checker: Checker, script: Script, *says: str, evidence: Evidence = FAULTY) -> Verdict:
    """With so many anomalies, each of which says this, and shows events that prove it."""
    verdict = judge(checker, script, evidence)
    assert verdict.valid is Valid.FALSE, verdict
    whats = [one.what for one in verdict.anomalies]
    assert len(whats) == len(says), whats
    for what, part in zip(whats, says, strict=True):
        assert part in what, whats
    assert all(one.records for one in verdict.anomalies)
    return verdict


def is_unknown(checker: Checker, script: Script, says: str, evidence: Evidence = FAULTY) -> Verdict:
    verdict = judge(checker, script, evidence)
    assert verdict.valid is Valid.UNKNOWN, verdict
    assert says in verdict.reason, verdict.reason
    return verdict


def without_last(script: Script, events: int) -> Script:
    """As it would be had the run ended before."""
    shorter = Script()
    shorter.events = script.events[:-events]
    return shorter


def at(event: Event, t: int) -> Event:
    return replace(event, t=t)
