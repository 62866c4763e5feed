"""The demo's own judgement: it must see every line that was lost, doubled or changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.cli.demo.access_log import SAMPLE, count_with_awk, read_lines
from penstock.cli.demo.members import parse_read
from penstock.cli.demo.verdict import (
    Read,
    Sent,
    Verdict,
    count_lines,
    judge,
    standstill_seconds,
)
from penstock.wire.errors import ConfigurationError

LINES = [
    '1.1.1.1 - - [day +0] "GET /a HTTP/1.1" 200 5',
    '1.1.1.2 - - [day +0] "GET /b HTTP/1.1" 404 5',
    '1.1.1.1 - - [day +0] "GET /a HTTP/1.1" 200 5',
]


def sent(*numbers: int) -> list[Sent]:
    return [Sent(number, 0, 1.0, 2.0) for number in numbers]


def reads(*numbers: int) -> list[Read]:
    return [
        Read("member-1", number, 0, offset, LINES[number]) for offset, number in enumerate(numbers)
    ]


def verdict(sent_numbers: list[int], read_numbers: list[int]) -> Verdict:
    return judge(LINES, sent(*sent_numbers), reads(*read_numbers), count_lines(LINES))


def test_every_line_once_is_well() -> None:
    found = verdict([0, 1, 2], [2, 0, 1])
    assert found.ok
    assert (found.lost, found.duplicated, found.consumed) == (0, 0, 3)
    assert found.by_member == {"member-1": 3}


def test_a_lost_line_is_seen_though_another_has_the_same_text() -> None:
    found = verdict([0, 1, 2], [0, 1])
    assert not found.ok
    assert (found.lost, found.duplicated) == (1, 0)


def test_a_doubled_line_is_seen() -> None:
    found = verdict([0, 1, 2], [0, 1, 2, 2])
    assert not found.ok
    assert (found.lost, found.duplicated) == (0, 1)


def test_one_line_twice_does_not_make_up_for_another_lost() -> None:
    found = verdict([0, 1, 2], [0, 0, 1])
    assert not found.ok
    assert (found.lost, found.duplicated) == (1, 1)


def test_a_line_that_was_not_acknowledged_is_seen() -> None:
    assert not verdict([0, 1], [0, 1, 2]).ok


def test_a_changed_line_is_seen() -> None:
    changed = [*reads(0, 1), Read("member-1", 2, 0, 2, LINES[2].replace("200", "500"))]
    found = judge(LINES, sent(0, 1, 2), changed, count_lines(LINES))
    assert found.altered == 1
    assert not found.counts_agree
    assert not found.ok


def test_counts_that_differ_from_the_files_are_seen() -> None:
    found = judge(LINES, sent(0, 1, 2), reads(0, 1, 2), count_lines(LINES[:2]))
    assert not found.counts_agree
    assert not found.ok


def test_standstill_counts_only_what_was_sent_after_the_kill() -> None:
    acknowledged = [
        Sent(0, 0, 9.9, 10.1),  # Sent before the kill: its answer was on the way.
        Sent(1, 0, 10.5, 11.5),
        Sent(2, 0, 10.2, 11.4),
        Sent(3, 1, 10.1, 10.2),  # Another leader's partition.
    ]
    found = standstill_seconds(acknowledged, [0, 2], killed_at=10.0)
    assert found == {0: pytest.approx(1.4), 2: None}


def test_the_sample_counts_as_its_source_says(tmp_path: Path) -> None:
    lines = read_lines(SAMPLE)
    assert len(lines) == 10_000
    assert len({line.split(" ", 1)[0] for line in lines}) == 1_753
    counts, _ = count_with_awk(SAMPLE, tmp_path)
    assert counts == count_lines(lines)
    assert counts.statuses["200"] == 9_126
    assert counts.top_paths(1) == [("/favicon.ico", 807)]


def test_without_awk_python_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_awk, _ = count_with_awk(SAMPLE, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    without, by = count_with_awk(SAMPLE, tmp_path)
    assert without == with_awk
    assert "awk is not installed" in by


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the access log .*nowhere.gz"):
        read_lines(tmp_path / "nowhere.gz")


def test_a_members_line_is_read_back() -> None:
    line = (
        b'{"partition": 3, "offset": 9, "value": "text", "key": null, '
        b'"headers": [{"key": "line", "value": "41"}]}\n'
    )
    assert parse_read("member-2", line) == Read("member-2", 41, 3, 9, "text")
