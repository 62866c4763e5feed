"""Keys that lose their last value, or get an old one back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chaos.checkers import Checker
from penstock.chaos.checkers.compacted import CompactedLast, CompactedPast
from tests.unit.chaos.histories import (
    FAIL,
    INFO,
    Script,
    is_false,
    is_true,
    is_unknown,
    without_last,
)

BOTH = (CompactedLast(), CompactedPast())


class Keys(Script):
    def put(self, key: str, number: int, offset: int | None, **more: Any) -> None:
        tombstone = more.pop("tombstone", False)
        asked = {"topic": "kv", "partition": 0, "key": key, "number": number}
        self.do("w", "put", {**asked, "tombstone": tombstone}, {"offset": offset}, **more)

    def scan(self, *entries: tuple[int, str, int], end: int, final: bool = False) -> None:
        asked = {"topic": "kv", "partition": 0}
        answer = {"entries": [list(entry) for entry in entries], "end": end}
        self.do("r", "scan", asked, answer, final=final)


def kept() -> Keys:
    """a has three values, b one and a tombstone, c one of which nobody knows."""
    script = Keys()
    script.put("a", 1, 0)
    script.put("b", 1, 1)
    script.put("a", 2, 2)
    script.scan((0, "a", 1), (1, "b", 1), (2, "a", 2), end=3)
    script.put("b", 2, 3, tombstone=True)
    script.put("c", 1, None, type_=INFO)
    script.put("c", 2, None, type_=FAIL)
    script.scan((1, "b", 1), (2, "a", 2), (3, "b", 2), (4, "c", 1), end=5)
    script.scan((0, "a", 1), (2, "a", 2), (4, "c", 1), end=5)
    script.put("a", 3, 5)
    script.scan((4, "c", 1), (5, "a", 3), end=6)
    script.scan((2, "a", 2), (4, "c", 1), (5, "a", 3), end=6, final=True)
    return script


@pytest.mark.parametrize("checker", BOTH, ids=lambda one: one.name)
def test_compaction_that_keeps_the_last_passes(checker: Checker) -> None:
    is_true(checker, kept())
    is_unknown(checker, Script(), "no scan was answered")


@pytest.mark.parametrize("checker", BOTH, ids=lambda one: one.name)
def test_nothing_is_certain_without_the_end(checker: Checker) -> None:
    is_unknown(checker, without_last(kept(), 2), "there is no final scan of kv-0")
    script = kept()
    script.put("a", 4, 6)
    is_unknown(checker, script, "the final scans of kv-0 end at 6, and 6 was put")


def test_the_last_value_is_kept() -> None:
    script = kept()
    script.scan((4, "c", 1), end=6)
    is_false(CompactedLast(), script, "kv-0: key a is gone, which was put at 5")
    script = kept()
    script.scan((2, "a", 2), (4, "c", 1), end=6)
    is_false(CompactedLast(), script, "the last of key a is at 2, but 5 was put after it")
    script = kept()
    script.scan((1, "b", 1), (5, "a", 3), end=6)
    is_false(CompactedLast(), script, "the last of key b is at 1, but 3 was put after it")


def test_a_tombstone_on_its_way_may_delete() -> None:
    script = kept()
    script.put("a", 4, None, tombstone=True, type_=INFO)
    script.scan((4, "c", 1), end=7)
    is_true(CompactedLast(), script)


def test_what_is_above_the_end_of_a_scan_is_not_asked_of_it() -> None:
    script = kept()
    script.scan((2, "a", 2), (4, "c", 1), end=5)
    is_true(CompactedLast(), script)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([(1, "b", 1), (4, "c", 1), (5, "a", 3)], ["key b is back at 1, where an earlier scan"]),
        ([(2, "a", 2), (4, "c", 1)], ["the last of key a is at 2 again, after 5 was found"]),
        ([(4, "c", 2), (5, "a", 3)], ["number 2 of key c at 4 was never put"]),
        (
            [(4, "d", 1), (5, "a", 3)],
            ["number 1 of key d at 4 was never put", "key d is back at 4"],
        ),
        ([(3, "a", 2), (4, "c", 1), (5, "a", 3)], ["number 2 of key a at 3 was put at 2"]),
        ([(5, "a", 3), (4, "c", 1)], ["number 1 of key c at 4 was told after 5"]),
    ],
)
def test_nothing_old_or_unheard_of_comes(entries, says) -> None:
    script = kept()
    script.scan(*entries, end=6)
    verdict = is_false(CompactedPast(), script, *says)
    assert verdict.anomalies[0].records
