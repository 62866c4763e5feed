"""What verdicts say, and what follows from several."""

from __future__ import annotations

import pytest

from penstock.chaos.verdict import SHOWN_ANOMALIES, Findings, Valid, compose


def test_nothing_that_was_looked_at_is_not_true() -> None:
    verdict = Findings("lost").verdict("no append succeeded")
    assert (verdict.valid, verdict.reason) == (Valid.UNKNOWN, "no append succeeded")


def test_what_was_looked_at_without_a_finding_is_true() -> None:
    findings = Findings("lost")
    findings.looked_at = 3
    assert findings.verdict("nothing").valid is Valid.TRUE


def test_a_doubt_makes_it_unknown_and_an_anomaly_false() -> None:
    findings = Findings("lost")
    findings.looked_at = 3
    findings.doubt("orders-0 was not read to its end")
    findings.doubt("orders-0 was not read to its end")
    verdict = findings.verdict("nothing")
    assert (verdict.valid, verdict.reason) == (Valid.UNKNOWN, "orders-0 was not read to its end")
    findings.add("record 7 of p1 is lost", {"p": "p1", "number": 7})
    verdict = findings.verdict("nothing", lost=1)
    assert (verdict.valid, verdict.found, verdict.reason) == (Valid.FALSE, 1, "")
    assert verdict.anomalies[0].records == ({"p": "p1", "number": 7},)
    assert verdict.figures == {"lost": 1}


def test_the_first_anomalies_are_kept_and_all_are_counted() -> None:
    findings = Findings("lost")
    for number in range(SHOWN_ANOMALIES + 5):
        findings.add(f"record {number} is lost")
    verdict = findings.verdict("nothing")
    assert verdict.found == SHOWN_ANOMALIES + 5
    assert [one.what for one in verdict.anomalies][-1] == f"record {SHOWN_ANOMALIES - 1} is lost"


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        ("", Valid.UNKNOWN),
        ("t", Valid.TRUE),
        ("tt", Valid.TRUE),
        ("tu", Valid.UNKNOWN),
        ("tuf", Valid.FALSE),
    ],
)
def test_a_run_is_as_good_as_its_worst_verdict(values: str, whole: Valid) -> None:
    verdicts = []
    for value in values:
        findings = Findings("c")
        findings.looked_at = 1
        if value == "f":
            findings.add("broken")
        if value == "u":
            findings.doubt("who knows")
        verdicts.append(findings.verdict("nothing"))
    assert compose(verdicts) is whole
