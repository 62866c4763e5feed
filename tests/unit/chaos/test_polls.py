"""Readers that go back, jump, skip, or are not where they sought to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.chaos.checkers import Checker, Evidence
from penstock.chaos.checkers.polls import PollOrder, SkippedPoll
from penstock.chaos.checkers.seeks import SeekHonoured
from tests.unit.chaos.histories import (
    FAIL,
    INFO,
    KILL,
    MS,
    Script,
    is_false,
    is_true,
    is_unknown,
)

CALM = Evidence()
COMMITTED = {"isolation": "read_committed"}


def read() -> Script:
    """Ten records, a control record at 10, ten more; read in steps."""
    script = Script()
    script.append("p", 0, 10, 0, timestamp=1000)
    script.append("p", 10, 10, 11, timestamp=2000)
    script.poll("r", {0: 0}, [(0, 0, "p", 0, 4)], {0: 4})
    script.poll("r", {0: 4}, [], {0: 4})
    script.poll("r", {0: 4}, [(0, 4, "p", 4, 6), (0, 11, "p", 10, 4)], {0: 15})
    return script


@pytest.mark.parametrize("checker", [PollOrder(), SkippedPoll()])
def test_a_reader_goes_through_gaps_and_moves_by_seeking(checker: Checker) -> None:
    script = read()
    script.seek("r", 2)
    script.poll("r", {0: 2}, [(0, 2, "p", 2, 8)], {0: 10})
    script.do("r", "poll", {"topic": "orders", "positions": {"orders-0": 10}}, type_=FAIL)
    script.poll("r", {0: 10}, [], {0: 11})
    script.do("r", "poll", {"topic": "orders", "positions": {"orders-0": 11}}, type_=INFO)
    script.poll("r", {0: 15}, [(0, 15, "p", 14, 6)], {0: 21})
    is_true(checker, script)


@pytest.mark.parametrize(
    ("before", "runs", "after", "says"),
    [
        (14, [(0, 14, "p", 13, 1)], 15, "r went back from 15 to 14 without a seek"),
        (17, [(0, 17, "p", 16, 1)], 18, "r jumped from 15 to 17 without a seek"),
        (15, [], 11, "r went back from 15 to 11 within a poll"),
        (15, [(0, 14, "p", 13, 4)], 18, "r was given 14, below where it began"),
        (15, [(0, 15, "p", 14, 4)], 18, "r was given 18, above the position it left"),
        (15, [(0, 17, "p", 16, 1), (0, 15, "p", 14, 2)], 18, "r was given 15 after 17 in one poll"),
    ],
)
def test_positions_only_go_up(before, runs, after, says) -> None:
    script = read()
    script.poll("r", {0: before}, runs, {0: after})
    is_false(PollOrder(), script, says)


def test_what_is_there_is_not_passed_over() -> None:
    script = read()
    script.poll("r", {0: 15}, [(0, 17, "p", 16, 4)], {0: 21})
    is_false(SkippedPoll(), script, "went from 15 to 21 and was not given offset 15 to 16, which")
    is_true(PollOrder(), script)
    script = read()
    script.poll("r", {0: 15}, [], {0: 18})
    script.poll("other", {0: 18}, [(0, 18, "x", 3, 2)], {0: 20})
    script.poll("r", {0: 18}, [], {0: 20})
    says = ("not given offset 15 to 17", "not given offset 18 to 19")
    verdict = is_false(SkippedPoll(), script, *says)
    assert verdict.figures["skipped_records"] == 5


def test_what_the_leader_alone_acknowledged_may_be_gone_where_it_failed() -> None:
    script = Script()
    script.append("p", 0, 4, 0, acks="1")
    script.poll("r", {0: 0}, [(0, 0, "p", 0, 2)], {0: 4})
    is_true(SkippedPoll(), script)
    is_false(SkippedPoll(), script, "not given offset 2 to 3", evidence=CALM)


def test_retention_takes_what_is_before_the_first_record() -> None:
    script = read()
    script.poll("late", {0: 0}, [(0, 4, "p", 4, 1), (0, 6, "p", 6, 4)], {0: 11})
    verdict = is_false(SkippedPoll(expiring=frozenset({"orders"})), script, "offset 5, which")
    assert verdict.figures["skipped_records"] == 1
    is_false(SkippedPoll(), script, "not given offset 0 to 3", "not given offset 5")


def test_readers_of_what_is_committed_are_not_given_the_rest() -> None:
    script = Script()
    for name, type_ in (("t1", FAIL), ("t2", INFO)):
        script.append(name, 0, 2, 0 if name == "t1" else 3, txn=name)
        script.do(name, "commit", {"txn": name}, type_=type_)
    script.append("t3", 0, 2, 6, txn="t3")
    script.do("t3", "commit", {"txn": "t3"})
    script.poll("u", {0: 0}, [(0, 0, "t1", 0, 2), (0, 3, "t2", 0, 2), (0, 6, "t3", 0, 2)], {0: 9})
    script.poll("c", {0: 0}, [(0, 6, "t3", 0, 2)], {0: 9}, **COMMITTED)
    is_true(SkippedPoll(), script)
    script.poll("d", {0: 0}, [(0, 3, "t2", 0, 2)], {0: 9}, **COMMITTED)
    says = ("c went from 0 to 9 and was not given offset 3 to 4", "d went from 0 to 9 and was not")
    is_false(SkippedPoll(), script, *says)


def test_nothing_is_said_of_no_poll() -> None:
    is_unknown(PollOrder(), Script(), "no poll was answered")
    is_unknown(SkippedPoll(), Script(), "no poll moved a position")
    is_unknown(SeekHonoured(), read(), "no seek was answered")


def test_seeks_get_where_they_ask() -> None:
    script = read()
    script.seek("r", 3)
    script.seek("r", 0, where="earliest")
    script.seek("r", 22, where="latest")
    script.seek("r", 0, timestamp=999)
    script.seek("r", 0, timestamp=1000)
    script.seek("r", 11, timestamp=1001)
    script.seek("r", 21, timestamp=3000)
    assert is_true(SeekHonoured(), script).looked_at == 7


def test_a_record_that_came_later_may_be_of_any_time() -> None:
    script = read()
    script.seek("r", 21, timestamp=3000)  # There was none so late: it is the end.
    script.append("slow", 0, 5, 21, timestamp=2500)
    is_true(SeekHonoured(), script)
    script.seek("r", 21, timestamp=3000)
    is_false(SeekHonoured(), script, "sought 3000 ms and got 21, which is of 2500 ms")


@pytest.mark.parametrize(
    ("got", "where", "says"),
    [
        (4, {"offset": 3}, "sought offset 3 and got 4"),
        (5, {"where": "earliest"}, "sought the earliest and got 5, but 0 is there"),
        (20, {"where": "latest"}, "sought the latest and got 20, but 20 was acknowledged before"),
        (12, {"timestamp": 1500}, "sought 1500 ms and got 12, but 11 is of 2000 ms"),
        (9, {"timestamp": 1500}, "sought 1500 ms and got 9, which is of 1000 ms"),
    ],
)
def test_a_seek_that_gets_elsewhere_is_not_honoured(got, where, says) -> None:
    script = read()
    script.seek("r", got, **where)
    is_false(SeekHonoured(), script, says, evidence=CALM)


def test_a_leader_that_is_cut_off_may_know_an_end_of_a_session_ago() -> None:
    script = read()
    script.seek("r", 15, where="latest")
    held = replace(KILL, began_t=0, held_t=0, healed_t=script.t)
    says = "sought the latest and got 15, but 20 was acknowledged before"
    is_true(SeekHonoured(), script, evidence=Evidence(faults=[held]))
    # Not without a fault, nor of one that is to come, nor a session later.
    to_come = replace(held, began_t=script.t + MS, held_t=script.t + MS, healed_t=script.t + MS)
    is_false(SeekHonoured(), script, says, evidence=CALM)
    is_false(SeekHonoured(), script, says, evidence=Evidence(faults=[to_come]))
    script.t += 8_000 * MS
    script.seek("r", 15, where="latest")
    is_false(SeekHonoured(), script, says, evidence=Evidence(faults=[held]))


def test_the_earliest_moves_with_retention_and_the_latest_waits_for_transactions() -> None:
    script = read()
    script.seek("r", 5, where="earliest")
    is_true(SeekHonoured(expiring=frozenset({"orders"})), script)
    script = Script()
    script.append("t", 0, 2, 0, txn="t")
    script.seek("r", 0, where="latest")
    is_true(SeekHonoured(), script)


def test_the_poll_after_a_seek_begins_there() -> None:
    script = read()
    script.seek("r", 3)
    script.seek("r", 4)
    script.poll("other", {0: 0}, [], {0: 0})
    script.poll("r", {0: 3}, [(0, 3, "p", 3, 1)], {0: 4})
    is_false(SeekHonoured(), script, "r got to 4 by a seek, but its next poll began at 3")


def test_what_is_assigned_anew_within_a_poll_begins_where_the_group_was() -> None:
    def script(*, anew: bool) -> Script:
        script = read()
        asked = {"topic": "orders", "positions": {"orders-0": 4}, "member": "m"}
        script.invoke("m", "poll", asked)
        if anew:
            change = {"group": "g", "member": "m", "generation": 2, "partitions": ["orders-0"]}
            script.do("m/changes", "assigned", change, change)
        answer = {"runs": [["orders-0", 15, "p", 14, 6]], "positions": {"orders-0": 21}}
        script.complete("m", "poll", answer)
        return script

    says = ("m went from 4 to 21 and was not given offset 4", "was not given offset 11 to 14")
    is_false(SkippedPoll(), script(anew=False), *says)
    is_true(SkippedPoll(), script(anew=True))
    is_true(PollOrder(), script(anew=True))
