"""Registers that do several things at a time, and topics that come back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chaos.checkers.churn import DeletedRecords, TopicIds
from penstock.chaos.checkers.linearizing import NEVER, Step, search
from penstock.chaos.checkers.registers import LinearizableRegister
from penstock.chaos.verdict import Valid
from tests.unit.chaos.histories import (
    FAIL,
    FAULTY,
    INFO,
    Script,
    is_false,
    is_true,
    is_unknown,
    without_last,
)


class Registers(Script):
    def write(self, value: Any, version: int | None = None, *, p: str = "w", **more: Any) -> None:
        self.do(p, "write", {"register": "x", "value": value}, {"version": version}, **more)

    def read(
        self, value: Any, version: int | None = None, *, p: str = "r", final: bool = False
    ) -> None:
        answer = {"value": value, "version": version}
        self.do(p, "read", {"register": "x"}, answer, final=final)

    def cas(self, expected: Any, value: Any, *, p: str = "c", **more: Any) -> None:
        self.do(p, "cas", {"register": "x", "expected": expected, "value": value}, {}, **more)


def test_what_a_register_does_one_at_a_time_passes() -> None:
    script = Registers()
    script.read(None)
    script.write(1)
    script.read(1)
    script.write(2, type_=INFO)
    script.read(1)
    script.read(2)
    script.cas(2, 3)
    script.write(4, type_=FAIL)
    script.read(3)
    script.invoke("a", "write", {"register": "x", "value": 5})
    script.invoke("b", "write", {"register": "x", "value": 6})
    script.read(6)
    script.read(5)
    script.complete("b", "write")
    script.complete("a", "write")
    script.read(5, final=True)
    assert is_true(LinearizableRegister(), script).looked_at == 12
    is_unknown(LinearizableRegister(), without_last(script, 2), "no final read of register x")


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        ([1, 2], [1]),  # Stale.
        ([1], [2]),  # From nowhere.
        ([1, 2], [2, 1]),  # Back in time.
    ],
)
def test_a_register_without_an_order(writes: list[int], reads: list[int]) -> None:
    script = Registers()
    for value in writes:
        script.write(value)
    for value in reads:
        script.read(value)
    says = f"cannot have read {reads[-1]} by r next"
    is_false(LinearizableRegister(), script, says)


def test_what_failed_was_not_done() -> None:
    script = Registers()
    script.write(1)
    script.write(2, type_=FAIL)
    script.read(2)
    is_false(LinearizableRegister(), script, "the longest that was found leaves 1 and cannot have")
    twice = Registers()
    twice.write(1)
    twice.cas(1, 2)
    twice.cas(1, 3)
    is_false(LinearizableRegister(), twice, "leaves 2 and cannot have cas 3 by c next")


def test_a_search_that_takes_too_long_is_given_up() -> None:
    script = Registers()
    for number in range(12):
        script.invoke(f"w{number}", "write", {"register": "x", "value": number})
    for number in range(12):
        script.complete(f"w{number}", "write")
    script.read(99)
    is_unknown(LinearizableRegister(budget=1000), script, "no order was found, nor that there is")
    is_unknown(LinearizableRegister(), Registers(), "no operation on a register succeeded")


def versioned() -> Registers:
    script = Registers()
    script.read("old", 3)
    script.write(1, 5)
    script.write(2, type_=INFO)
    script.read(1, 5)
    script.read(2, 6)
    script.write(3, 9)
    script.read(3, 9, final=True)
    return script


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (lambda script: script.read(4, 9), "version 9 is 3 and also 4"),
        (lambda script: script.write(4, 9, p="v"), "version 9 is 3 and also 4"),
        (lambda script: script.read(2, 6), "read has version 6 after 9 was seen"),
        (lambda script: script.read(7, 10), "7 of version 10 was read, and nobody wrote it"),
    ],
)
def test_versions_tell_the_order(then, says) -> None:
    checker = LinearizableRegister(initial="old")
    is_true(checker, versioned())
    script = versioned()
    then(script)
    verdict = checker.check(script.history, FAULTY)
    assert verdict.valid is Valid.FALSE
    assert says in verdict.anomalies[0].what


def test_versions_tell_of_writes_that_were_read_too_early() -> None:
    script = Registers()
    script.read(1, 5)
    script.write(1, 5)
    checker = LinearizableRegister()
    is_false(checker, script, "write has version 5 after 5 was seen", "was read before its write")
    script = versioned()
    is_false(LinearizableRegister(initial="new"), script, '"old" of version 3 was read, and nobody')


def executed(seed: int, *, count: int = 14, processes: int = 3) -> list[Step]:
    """What a register did one at a time, seen by several at a time."""
    random = Random(seed)
    value, t, steps, free = None, 0, [], [0] * processes
    for number in range(count):
        who = random.randrange(processes)
        done = t = max(t, free[who]) + random.randint(1, 4)
        begun, ended = max(free[who] + 1, done - random.randint(0, 6)), done + random.randint(0, 6)
        free[who] = ended + 1
        if random.random() < 0.5:
            is_known = random.random() < 0.8
            if is_known or random.random() < 0.5:
                value = number
            steps.append(Step(begun, ended if is_known else NEVER, True, False, written=number))
        else:
            steps.append(Step(begun, ended, False, True, expected=value))
    return steps


def brute(steps: list[Step], value: Any = None) -> bool:
    """Tries everything."""
    if all(step.ended == NEVER for step in steps):
        return True
    first_end = min(step.ended for step in steps)
    return any(
        step.begun <= first_end
        and step.fits(value)
        and brute(steps[:place] + steps[place + 1 :], step.written if step.writes else value)
        for place, step in enumerate(steps)
    )


@given(seed=st.integers(0, 2**32))
def test_what_was_executed_has_an_order(seed: int) -> None:
    assert search(executed(seed, count=40), None, 200_000).linearizable


@given(seed=st.integers(0, 2**32), place=st.integers(0, 6), value=st.integers(0, 6))
def test_the_search_finds_what_trying_everything_finds(seed: int, place: int, value: int) -> None:
    steps = executed(seed, count=7)
    step = steps[place]
    if step.expects:
        steps[place] = Step(step.begun, step.ended, False, True, expected=value)
    assert search(steps, None, 200_000).linearizable == brute(steps)


# --- churn


def churned() -> Script:
    script = Script()
    script.do("admin", "create", {"topic": "orders"}, {"topic_id": "A"})
    script.append("p", 0, 4, 0)
    script.poll("r", {0: 0}, [(0, 0, "p", 0, 4)], {0: 4})
    script.do("admin", "add-partitions", {"topic": "orders"}, {"topic_id": "A"})
    script.do("admin", "delete", {"topic": "orders"}, {"topic_id": "A"})
    script.do("admin", "create", {"topic": "orders"}, {"topic_id": "B"})
    script.append("p", 4, 4, 0)
    script.poll("s", {0: 0}, [(0, 0, "p", 4, 4)], {0: 4})
    return script


def test_topics_that_stay_apart_pass() -> None:
    assert is_true(TopicIds(), churned()).looked_at == 4
    assert is_true(DeletedRecords(), churned()).looked_at == 4
    is_unknown(TopicIds(), Script(), "no operation told a topic's id")
    is_unknown(DeletedRecords(), Script(), "no poll was given a record of a topic that came again")


def test_a_topic_id_never_comes_back() -> None:
    script = churned()
    script.do("admin", "reassign", {"topic": "orders"}, {"topic_id": "A"})
    is_false(TopicIds(), script, "reassign told topic id A, which was deleted")
    script = churned()
    script.do("admin", "create", {"topic": "others"}, {"topic_id": "B"})
    is_false(TopicIds(), script, "topic others: it was created with topic id B, which had been")


def test_a_topic_is_created_once() -> None:
    script = churned()
    script.do("admin", "create", {"topic": "orders"}, {"topic_id": "C"})
    is_false(TopicIds(), script, "topic orders: it was created twice without having been deleted")
    script = churned()
    script.do("admin", "delete", {"topic": "orders"}, type_=INFO)
    script.do("admin", "create", {"topic": "orders"}, {"topic_id": "C"})
    is_true(TopicIds(), script)


@pytest.mark.parametrize("how", ["new reader", "seek", "buffered", "meanwhile"])
def test_deleted_records_do_not_come_back(how: str) -> None:
    script = churned()
    reader = "t" if how == "new reader" else "r"
    if how == "seek":
        script.seek("r", 0)
    if how == "meanwhile":
        script.do("admin", "delete", {"topic": "orders"}, {"topic_id": "B"})
        reader = "t"
        script.poll(reader, {0: 0}, [(0, 0, "p", 4, 4)], {0: 4})
    else:
        script.poll(reader, {0: 0}, [(0, 1, "p", 2, 2)], {0: 3})
    if how in {"buffered", "meanwhile"}:
        is_true(DeletedRecords(), script)
    else:
        says = ("p's 2, deleted with its topic, is back at offset 1", "p's 3, deleted with")
        is_false(DeletedRecords(), script, *says)
