"""Records at two places, places with two records, and records out of their order."""

from __future__ import annotations

import pytest

from penstock.chaos.checkers import Checker, Evidence
from penstock.chaos.checkers.placed import Duplicate, InconsistentOffset, Reorder
from penstock.chaos.checkers.written import ErrorHonesty, Phantom
from tests.unit.chaos.histories import FAIL, INFO, Script, is_false, is_true, is_unknown

CALM = Evidence()
ALL = (Duplicate(), InconsistentOffset(), Reorder(), Phantom(), ErrorHonesty())


def read() -> Script:
    """Two producers between each other, read by two readers, one of which seeks back."""
    script = Script()
    script.append("p", 0, 4, 0)
    script.append("q", 0, 4, 4)
    script.append("p", 4, 4, 8)
    script.append("p", 8, 4, None, type_=FAIL)
    script.append("p", 12, 4, None, type_=INFO)
    script.poll("r1", {0: 0}, [(0, 0, "p", 0, 2)], {0: 2})
    script.poll("r1", {0: 2}, [(0, 2, "p", 2, 2), (0, 4, "q", 0, 4)], {0: 8})
    script.seek("r1", 3)
    script.poll("r1", {0: 3}, [(0, 3, "p", 3, 1), (0, 4, "q", 0, 4)], {0: 8})
    script.poll("r2", {0: 0}, [(0, 0, "p", 0, 4), (0, 4, "q", 0, 4), (0, 8, "p", 4, 4)], {0: 12})
    script.poll("r2", {0: 12}, [(0, 12, "p", 12, 4)], {0: 16})
    return script


@pytest.mark.parametrize("checker", ALL, ids=lambda one: one.name)
def test_a_clean_history_passes(checker: Checker) -> None:
    is_true(checker, read())
    is_true(checker, read(), CALM)


@pytest.mark.parametrize("checker", ALL, ids=lambda one: one.name)
def test_nothing_is_said_of_nothing(checker: Checker) -> None:
    is_unknown(checker, Script(), "no record was read")


def test_a_record_at_two_offsets_is_a_duplicate() -> None:
    script = read()
    script.poll("r2", {0: 16}, [(0, 16, "q", 2, 2)], {0: 18})
    says = "orders-0: q's 2 to 3 is there twice, from offset 6 and from offset 16"
    assert is_false(Duplicate(), script, says).figures["duplicate_records"] == 2
    is_true(InconsistentOffset(), script)
    is_true(Reorder(), script)


def test_a_duplicate_is_shown_with_its_append_though_nobody_knows_of_it() -> None:
    script = read()
    script.poll("r2", {0: 16}, [(0, 16, "p", 12, 2)], {0: 18})
    says = "orders-0: p's 12 to 13 is there twice, from offset 12 and from offset 16"
    [anomaly] = is_false(Duplicate(), script, says).anomalies
    shown = [(one["f"], one["type"]) for one in anomaly.records]
    assert shown[:2] == [("append", "invoke"), ("append", "info")]
    assert anomaly.records[0]["value"]["first"] == 12
    assert len(shown) == 6


def test_events_that_prove_two_halves_of_an_anomaly_are_shown_once() -> None:
    script = Script()
    script.append("p", 0, 4, None, type_=INFO)
    script.poll("r", {0: 0}, [(0, 0, "p", 2, 2), (0, 2, "p", 0, 2)], {0: 4})
    [anomaly] = is_false(Reorder(), script, "p's 0 to 1 comes after its 3").anomalies
    appends = [one for one in anomaly.records if one["f"] == "append"]
    assert [one["type"] for one in appends] == ["invoke", "info"]


def test_a_record_given_twice_without_a_seek_is_a_duplicate() -> None:
    script = read()
    script.poll("r2", {0: 14}, [(0, 14, "p", 14, 2)], {0: 16})
    says = "orders-0: r2 was given offset 14 to 15 twice without moving back"
    is_false(Duplicate(), script, says)


def test_a_group_gives_again_what_it_assigns_anew() -> None:
    script = Script()
    script.append("p", 0, 4, 0)
    assigned = {"group": "g", "member": "m", "generation": 1, "partitions": ["orders-0"]}
    for _ in range(2):
        script.do("m/listener", "assigned", assigned)
        script.poll("m", {0: 0}, [(0, 0, "p", 0, 4)], {0: 4}, member="m", generation=1)
    is_true(Duplicate(), script)
    script.poll("m", {0: 0}, [(0, 0, "p", 0, 4)], {0: 4}, member="m", generation=1)
    is_false(Duplicate(), script, "m was given offset 0 to 3 twice")


def test_retries_without_idempotence_may_double_and_reorder() -> None:
    script = Script()
    script.append("p", 0, 2, None, acks="0")
    script.append("p", 2, 2, 2, acks="1")
    script.poll("r", {0: 0}, [(0, 0, "p", 2, 2), (0, 2, "p", 0, 2), (0, 4, "p", 0, 2)], {0: 6})
    assert is_true(Duplicate(), script).figures["duplicates_without_idempotence"] == 2
    assert is_true(Reorder(), script).figures["reordered_without_idempotence"] == 2


def test_an_offset_with_two_records_is_inconsistent() -> None:
    script = read()
    script.append("s", 0, 4, 18)
    script.poll("r3", {0: 16}, [(0, 16, "s", 9, 2)], {0: 18})
    script.poll("r4", {0: 17}, [(0, 17, "s", 7, 1)], {0: 18})
    is_false(InconsistentOffset(), script, "at offset 17 there is s's 10, and also s's 7")


def test_an_acknowledgement_of_another_offset_is_inconsistent() -> None:
    script = read()
    script.append("s", 0, 4, 20)
    script.poll("r3", {0: 16}, [(0, 16, "s", 0, 4)], {0: 20})
    says = "s's 0 to 3 is said to be from offset 16 and from offset 20"
    is_false(InconsistentOffset(), script, says)
    is_true(Duplicate(), script)


def test_two_acknowledgements_of_one_offset_are_inconsistent() -> None:
    script = read()
    script.append("s", 0, 4, 16)
    script.append("p", 16, 4, 18)
    is_false(InconsistentOffset(), script, "at offset 18 to 19 there is s's 2, and also p's 16")


def test_what_the_leader_alone_acknowledged_may_move_where_it_failed() -> None:
    script = read()
    script.append("s", 0, 4, 12, acks="1")
    is_true(InconsistentOffset(), script)
    says = ("at offset 12 to 15 there is p's 12, and also s's 0",)
    is_false(InconsistentOffset(), script, *says, evidence=CALM)


def test_a_producers_records_stand_in_their_order() -> None:
    script = Script()
    script.append("p", 0, 10, 0)
    runs = [(0, 0, "p", 0, 2), (0, 2, "p", 5, 2), (0, 4, "p", 2, 3), (0, 7, "p", 7, 3)]
    script.poll("r", {0: 0}, runs, {0: 10})
    says = "orders-0: p's 2 to 4 comes after its 6"
    is_false(Reorder(), script, says, evidence=Evidence(faults=[]))


def test_what_nobody_wrote_is_a_phantom() -> None:
    script = read()
    script.poll("r2", {0: 16}, [(0, 16, "p", 14, 4), (0, 20, "x", 0, 1)], {0: 21})
    is_false(
        Phantom(),
        script,
        "p's 16 to 17, read by r2 at offset 18 to 19, was never written",
        "x's 0, read by r2 at offset 20, was never written",
    )


def test_what_is_read_before_it_is_written_is_a_phantom() -> None:
    script = Script()
    script.append("p", 0, 4, 0)
    script.poll("r", {0: 0}, [(0, 0, "p", 0, 6)], {0: 6})
    script.append("p", 4, 4, 4)
    is_false(Phantom(), script, "p's 0 to 5, read by r at offset 0 to 5, was given before")


def test_what_failed_is_never_read() -> None:
    script = read()
    script.poll("r2", {0: 16}, [(0, 16, "p", 10, 2)], {0: 18})
    verdict = is_false(ErrorHonesty(), script, "p's 10 to 11 failed and was given to a reader")
    kinds = [(record["f"], record["type"]) for record in verdict.anomalies[0].records]
    assert kinds == [("append", "invoke"), ("append", "fail"), ("poll", "invoke"), ("poll", "ok")]


def test_deleted_topics_are_left_to_others() -> None:
    script = read()
    script.poll("r2", {0: 16}, [(0, 16, "x", 10, 2)], {0: 18})
    script.do("admin", "delete", {"topic": "orders"}, type_=INFO)
    is_unknown(Phantom(), script, "no record was read")
