"""Records that were acknowledged and are not there in the end."""

from __future__ import annotations

import pytest

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.lost import AcksLevels, LostWrite, UnseenWrite
from tests.unit.chaos.histories import FAIL, FAULTY, INFO, Script, is_false, is_true, is_unknown

CALM = Evidence()


def written() -> Script:
    """Thirty records of p, in three appends, and two of q in the midst of them."""
    script = Script()
    script.append("p", 0, 10, 0)
    script.append("q", 0, 2, 10)
    script.append("p", 10, 10, 12)
    script.append("p", 20, 10, 22)
    return script


WHOLE = ((0, 0, "p", 0, 10), (0, 10, "q", 0, 2), (0, 12, "p", 10, 20))


@pytest.mark.parametrize("checker", [LostWrite(), UnseenWrite()])
def test_what_is_there_is_not_missing(checker: LostWrite | UnseenWrite) -> None:
    script = written()
    script.append("p", 30, 5, None, type_=INFO)  # Came to pass after all.
    script.append("p", 35, 5, None, type_=FAIL)
    script.final(*WHOLE, (0, 32, "p", 30, 5), end=37)
    assert is_true(checker, script).looked_at == 32


@pytest.mark.parametrize(
    ("runs", "start", "end", "place", "numbers", "why"),
    [
        (WHOLE[1:], 10, 32, "prefix", "p's 0 to 9", "the log begins after it"),
        (WHOLE[:2], 0, 12, "end", "p's 10 to 19", "the log ends before it"),
        ((*WHOLE[:2], (0, 12, "r", 0, 20)), 0, 32, "end", "p's 10", "another record is at its"),
        ((WHOLE[0], (0, 10, "r", 0, 2), WHOLE[2]), 0, 32, "middle", "q's 0 to 1", "another"),
        (((0, 0, "r", 0, 4), (0, 4, "p", 4, 6), *WHOLE[1:]), 0, 32, "prefix", "p's 0 to 3", ""),
        (((0, 0, "p", 0, 4), (0, 4, "r", 0, 3), (0, 7, "p", 7, 3), *WHOLE[1:]), 0, 32, "middle",
         "p's 4 to 6, acknowledged at offset 4 to 6", ""),
        (((0, 0, "r", 0, 32),), 0, 32, "all", "p's 0 to 9", "nothing that was acknowledged is"),
    ],
)  # fmt: skip
def test_a_lost_write_is_told_by_its_place(*, runs, start, end, place, numbers, why) -> None:
    script = written()
    script.final(*runs, start=start, end=end)
    verdict = LostWrite().check(script.history, FAULTY)
    first = verdict.anomalies[0].what
    assert f"is lost ({place})" in first
    assert numbers in first
    assert why in first
    assert {"invoke", "ok"} <= {record["type"] for record in verdict.anomalies[0].records}
    assert set(verdict.figures["lost_records"]) == {place}
    is_true(UnseenWrite(), script)


def test_an_unseen_write_was_passed_over() -> None:
    script = written()
    script.final(WHOLE[0], WHOLE[2], end=32)
    is_false(UnseenWrite(), script, "q's 0 to 1, acknowledged at offset 10 to 11, was passed over")
    is_true(LostWrite(), script)


def test_retention_may_take_the_beginning_where_it_is_said() -> None:
    script = written()
    script.final(*WHOLE[1:], start=10, end=32)
    verdict = is_true(LostWrite(expiring=frozenset({"orders"})), script)
    assert verdict.figures["expired_records"] == 10
    is_false(LostWrite(expiring=frozenset({"others"})), script, "is lost (prefix)")


def test_only_committed_transactions_promise_their_records() -> None:
    script = Script()
    for name, commit in (("t1", "ok"), ("t2", "fail"), ("t3", "info"), ("t4", None)):
        script.do(name, "begin", {"txn": name, "transactional_id": "x"})
        script.append(name, 0, 1, int(name[1]) - 1, txn=name)
        if commit is not None:
            type_ = {"ok": script, "fail": FAIL, "info": INFO}[commit]
            asked = {"txn": name}
            if commit == "ok":
                script.do(name, "commit", asked)
            else:
                script.do(name, "commit", asked, type_=type_)
    script.final((0, 0, "t1", 0, 1), end=8)
    assert is_true(LostWrite(), script).looked_at == 1
    assert is_true(UnseenWrite(), script).looked_at == 1
    script = Script()
    script.append("t1", 0, 1, 0, txn="t1")
    script.do("t1", "commit", {"txn": "t1"})
    script.final(end=0)
    is_false(LostWrite(), script, "t1's 0, acknowledged at offset 0, is lost (all)")


@pytest.mark.parametrize("checker", [LostWrite(), UnseenWrite()])
def test_nothing_is_said_without_final_reads_to_the_end(checker: LostWrite | UnseenWrite) -> None:
    is_unknown(checker, Script(), "no append was acknowledged by all")
    is_unknown(checker, written(), "there is no final read of orders-0")
    short = written()
    short.seek("r", 0, final=True, where="earliest")
    short.poll("r", {0: 0}, WHOLE[:2], {0: 12}, {0: 32}, final=True)
    is_unknown(checker, short, "the final reads of orders-0 stopped at 12 of 32")
    late = written()
    late.poll("r", {0: 10}, WHOLE[1:], {0: 32}, final=True)
    is_unknown(checker, late, "began at 10, and nobody asked for its start")
    torn = written()
    torn.seek("r", 0, final=True, where="earliest")
    torn.poll("r", {0: 0}, WHOLE[:1], {0: 10}, {0: 32}, final=True)
    torn.poll("r", {0: 12}, WHOLE[2:], {0: 32}, final=True)
    is_unknown(checker, torn, "left out offsets 10 to 11")


def test_the_leaders_word_alone_holds_where_nothing_failed() -> None:
    script = Script()
    script.append("p", 0, 5, 0, acks="1")
    script.append("q", 0, 5, None, acks="0")
    script.final((0, 0, "p", 0, 3), (0, 3, "q", 0, 2), end=5)
    verdict = is_true(AcksLevels(), script)
    assert verdict.figures == {
        "acks_1": {"acknowledged": 5, "gone": 2},
        "acks_0": {"sent": 5, "not there": 3},
    }
    is_false(AcksLevels(), script, "p's 3 to 4, acknowledged at offset 3 to 4", evidence=CALM)
    is_unknown(LostWrite(), script, "no append was acknowledged by all")
    is_unknown(AcksLevels(), written(), "no append with acks=1 or acks=0 succeeded")
