"""Committed offsets that go back or come from nowhere, and records that nobody worked on."""

from __future__ import annotations

import pytest

from penstock.chaos.checkers.commits import CommittedForward, GroupProcessed
from tests.unit.chaos.histories import FAIL, INFO, OK, Script, is_false, is_true, is_unknown
from tests.unit.chaos.test_groups import GroupScript, moved


def test_what_goes_forward_passes() -> None:
    script = moved()
    script.committed(4, 0)
    script.committed(4, 1, final=True)
    # Each answers for both, or something is missing; the second partition is asked for below.
    is_false(CommittedForward(), script, "None was read after 4 was", "None was read after 4 was")
    is_true(CommittedForward(), moved())


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (lambda script: script.commit("b", 3, 3), "a commit of 3 was accepted after one of 4"),
        (lambda script: script.committed(3), "3 was read after 4 was committed"),
        (lambda script: script.committed(None), "None was read after 4 was committed"),
        (lambda script: script.committed(5), "5 was read, which was never committed"),
    ],
)
def test_what_goes_back_or_comes_from_nowhere(then, says) -> None:
    script = GroupScript()
    script.commit("a", 1, 3)
    script.commit("a", 1, 5, type_=FAIL)
    script.commit("a", 1, 4)
    is_true(CommittedForward(), script)
    then(script)
    is_false(CommittedForward(), script, says)


def test_a_reset_may_go_back() -> None:
    script = GroupScript()
    script.commit("a", 1, 4)
    script.seek("a", 2)
    script.commit("a", 1, 3)
    script.do("admin", "commit-offsets", {"group": "g", "offsets": {"orders-0": 0}})
    script.committed(0)
    is_true(CommittedForward(), script)


def test_what_nobody_knows_may_come_later() -> None:
    script = GroupScript()
    script.commit("a", 1, 3, type_=INFO)
    script.commit("a", 1, 5)
    script.committed(3)
    script.commit("b", 2, 4)
    script.committed(4)
    is_true(CommittedForward(), script)
    script.committed(2)
    is_false(CommittedForward(), script, "2 was read after", "2 was read, which was never")


def test_of_two_at_a_time_either_may_be_the_last() -> None:
    script = GroupScript()
    asked = {"group": "g", "member": "a", "generation": 1, "offsets": {"orders-0": 3}}
    script.invoke("a", "commit-offsets", asked)
    script.commit("b", 1, 5)
    script.complete("a", "commit-offsets")
    script.committed(3)
    is_true(CommittedForward(), script)


def test_what_transactions_commit_is_asked_for_in_the_end() -> None:
    def sent(commit, told: int) -> GroupScript:
        script = GroupScript()
        for name, offset in (("t1", 2), ("t2", 4)):
            asked = {"txn": name, "group": "g", "member": "a", "generation": 1}
            script.do("a", "send-offsets", {**asked, "offsets": {"orders-0": offset}})
            script.do("a", "commit", {"txn": name}, type_=commit if name == "t2" else OK)
        script.committed(2)
        script.committed(told, final=True)
        return script

    is_true(CommittedForward(), sent(OK, 4))
    is_false(CommittedForward(), sent(OK, 2), "2 was read after 4 was committed")
    is_true(CommittedForward(), sent(INFO, 2))
    is_true(CommittedForward(), sent(INFO, 4))
    is_false(CommittedForward(), sent(FAIL, 4), "4 was read, which was never committed")


def test_every_record_is_worked_on() -> None:
    script = moved()
    assert is_true(GroupProcessed(), script).looked_at == 8


def test_what_is_committed_past_and_given_to_nobody_is_not_processed() -> None:
    script = GroupScript()
    script.append("p", 0, 6, 0)
    script.given("a", 1, 0, 0, 2)
    script.given("a", 1, 0, 4, 2)
    script.poll("stranger", {0: 0}, [(0, 0, "p", 0, 6)], {0: 6})
    script.commit("a", 1, 6)
    says = "group g, orders-0: offset 2 to 3 was given to no member, but 6 is committed"
    is_false(GroupProcessed(), script, says)
    late = GroupScript()
    late.append("p", 0, 6, 0)
    late.given("a", 1, 0, 4, 2)
    late.commit("a", 1, 6)
    is_true(GroupProcessed(from_earliest=False), late)
    is_false(GroupProcessed(), late, "offset 0 to 3 was given to no member")


def test_what_is_left_to_do_is_not_judged() -> None:
    script = GroupScript()
    script.append("p", 0, 6, 0)
    script.given("a", 1, 0, 0, 6)
    script.commit("a", 1, 4)
    is_unknown(GroupProcessed(), script, "had not committed past the last 2 records of orders-0")
    is_unknown(GroupProcessed(), Script(), "no group has committed past a record")
    is_unknown(CommittedForward(), Script(), "no commit was accepted")
