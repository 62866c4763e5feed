"""The report: what it shows of a run, and that it needs nothing from afar."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.chaos.checkers import Evidence, Sample
from penstock.chaos.checkers.registry import judge
from penstock.chaos.fault_thread import FaultRecord
from penstock.chaos.history import Event, History, Type
from penstock.chaos.judging import Judgement, read_judgement, write_judgement
from penstock.chaos.nemeses import Fault
from penstock.chaos.report.page import write_report
from penstock.chaos.report.series import nice_ticks, series_of
from penstock.chaos.report.svg import amount
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.verdict import Anomaly, Valid, Verdict

SECOND = 1_000_000_000
VOID = {"meta", "br", "i"}


class LostSomething:
    """A record is lost when it was acknowledged
    and <nobody> finds it. It has a ``mark`` of code.
    """

    name = "lost-something"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        records = [{"offset": number, "why": "<gone>"} for number in range(15)]
        return Verdict(
            self.name, Valid.FALSE, 40, 25, [Anomaly("record 3 of t-0 is gone & lost", records)]
        )


class Failing:
    """It breaks."""

    name = "failing"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        raise ZeroDivisionError("by zero")


class WellFormed(HTMLParser):
    """Complains about tags that are not closed as they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed in itself."""

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def append(p: str, start: float, end: float, type_: Type = Type.OK, count: int = 10) -> list[Event]:
    value = {"topic": "t", "partition": 0, "producer": p, "acks": "all", "first": 0, "count": count}
    done = {**value, "runs": [[0, count, 0]]} if type_ is Type.OK else None
    return [
        Event(int(start * SECOND), p, Type.INVOKE, "append", value),
        Event(int(end * SECOND), p, type_, "append", done, "X: <no>" if done is None else ""),
    ]


def poll(p: str, start: float, end: float, count: int, phase: str = "") -> list[Event]:
    value = {"topic": "t", "runs": [[0, 0, "a", 0, count]], "positions": {}, "ends": {}}
    return [
        Event(int(start * SECOND), p, Type.INVOKE, "poll", {}, "", phase),
        Event(int(end * SECOND), p, Type.OK, "poll", value, "", phase),
    ]


def history() -> History:
    operations = [
        append("a", 0.0, 0.01),
        append("a", 1.0, 1.02),
        append("a", 3.0, 5.5),
        append("b", 3.1, 3.2, Type.FAIL),
        append("b", 8.8, 8.9, Type.INFO),
        append("a", 9.0, 9.01),
        poll("r", 0.5, 1.1, 20),
        poll("r/final", 11.0, 11.1, 30, "final"),
    ]
    return History([event for one in operations for event in one])


def report(directory: Path) -> str:
    fault = Fault("kill", "kill", "a leader")
    faults = [
        FaultRecord(0, fault, 3 * SECOND, int(3.1 * SECOND), 6 * SECOND, {"struck": [2]}),
        FaultRecord(1, fault, 8 * SECOND, 8 * SECOND, 8 * SECOND, None, "nobody is 'a leader'"),
    ]
    samples = [Sample(t * SECOND, 1, 99, 50_000_000 + t, 10, 5) for t in range(9)]
    evidence = Evidence([], samples, [], {2: ["line 7: AssertionError <x>"]}, [])
    checkers = [LostSomething(), Failing()]
    own = Verdict("recovery", Valid.TRUE, 1)
    judgement = Judgement(
        [own, *judge(checkers, history(), evidence)],
        {
            "recovery_ms": 1234,
            "not_judged": {"leaks": "too short"},
            "interrupted_after_s": 9.5,
            "faults": {"planned": 14, "held": 1, "failed": 1},
        },
    )
    plan = RunPlan("append", "kill", 3, 10, 7, 100, 5, versions={"penstock": "1.2.3"})
    path = write_report(
        directory,
        plan=plan,
        history=history(),
        evidence=evidence,
        faults=faults,
        judgement=judgement,
        checkers=checkers,
    )
    return path.read_text(encoding="utf-8")


def words_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.partition("</style>")[2]).split())


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    page = report(tmp_path)
    parser = WellFormed()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "http" not in page
    assert "<script" not in page
    assert "<gone>" not in page
    assert "<nobody>" not in page


@pytest.mark.parametrize(
    "shown",
    [
        "append under kill",
        "a promise was broken: 3 nodes, 10 s, seed 7",
        "penstock chaos run --workload append --nemesis kill --nodes 3 --duration 10 --seed 7",
        "40 records written",
        "50 records read",
        "1 / 1 failed / ambiguous",
        "1 of 14 faults injected",
        "seed 7; ended by Ctrl-C after 9.5 s, 1 of 14 faults",
        "2.50 s longest unavailability",
        "1.23 s recovery in the end",
        "25 anomalies",
        "t-0 1 2.50 s 2.50 s",
        "3.0 s kill a leader 2 2.9 s 2.50 s 1 -",
        "nobody is &#x27;a leader&#x27;",
        "lost-something 25 anomalies; looked at 40",
        "A record is lost when it was acknowledged and &lt;nobody&gt; finds it.",
        "finds it. It has a mark of code.",
        "record 3 of t-0 is gone &amp; lost",
        "... and 3 more",
        "24 more are not shown.",
        "failing the checker broke: ZeroDivisionError: by zero",
        "node 2: line 7: AssertionError &lt;x&gt;",
        "leaks did not judge: too short.",
        "penstock 1.2.3",
    ],
)
def test_it_shows(tmp_path: Path, shown: str) -> None:
    assert shown in words_of(report(tmp_path))


def test_faults_are_shaded_behind_every_chart(tmp_path: Path) -> None:
    page = report(tmp_path)
    titles = re.findall(r'<rect class="fault"[^>]*><title>([^<]*)', page)
    assert titles == ["kill: kill at a leader (2), 3.0 s to 6.0 s, held from 3.1 s on"] * 5


def test_an_empty_history_makes_a_page_too(tmp_path: Path) -> None:
    plan = RunPlan("append", "", 3, 10, 7, 100, 5)
    path = write_report(
        tmp_path,
        plan=plan,
        history=History([]),
        evidence=Evidence(),
        faults=[],
        judgement=Judgement([]),
        checkers=[],
    )
    assert "not everything could be judged" in path.read_text(encoding="utf-8")


def test_figures_over_time_leave_final_reads_out() -> None:
    series = series_of(history())
    assert series.bucket_s == 0.25
    assert series.written[0] == 10 / 0.25
    assert sum(series.read) * 0.25 == 20
    assert (sum(series.failed), sum(series.ambiguous)) == (1, 1)
    assert [one for one in series.p50_ms if one] == pytest.approx([10, 20, 2500, 10])
    totals = series.totals
    assert (totals.written, totals.read, totals.read_in_the_end) == (40, 20, 30)
    assert totals.latency_ms(50) == pytest.approx(20)


@pytest.mark.parametrize("top", [0.0, 0.3, 1, 7, 99, 100, 101, 12_345, 9_999_999])
def test_ticks_are_few_and_reach_the_top(top: float) -> None:
    ticks = nice_ticks(top)
    assert ticks[-1] >= top
    assert 2 <= len(ticks) <= 7
    assert list(ticks) == sorted(ticks)


def test_amounts_are_short() -> None:
    assert [amount(one) for one in (0, 2.5, 999, 1500, 2e6, 3e9)] == [
        "0",
        "2.5",
        "999",
        "1.5k",
        "2M",
        "3G",
    ]


def test_a_judgement_can_be_kept_and_read_again(tmp_path: Path) -> None:
    kept = Judgement(judge([LostSomething(), Failing()], history(), Evidence()), {"a": 1})
    write_judgement(kept, tmp_path)
    written = (tmp_path / "verdict.json").read_text(encoding="utf-8")
    found = read_judgement(tmp_path)
    assert (found.valid, found.figures) == (kept.valid, kept.figures)
    assert found.verdicts[0].anomalies == kept.verdicts[0].anomalies
    write_judgement(found, tmp_path)
    assert (tmp_path / "verdict.json").read_text(encoding="utf-8") == written
    assert kept.valid is Valid.FALSE
    assert kept.anomalies == 25


def test_a_window_is_told_of_the_fault_that_it_mostly_fell_under(tmp_path: Path) -> None:
    # A write that was under way when the second fault began: its window begins before that does.
    operations = [append("a", 0.0, 0.01), append("a", 5.9, 9.9)]
    late = History([event for one in operations for event in one])
    fault = Fault("kill", "kill", "a leader")
    faults = [
        FaultRecord(number, fault, t * SECOND, t * SECOND, t * SECOND, {"struck": [node]})
        for number, (t, node) in enumerate(((1, 1), (6, 3)))
    ]
    path = write_report(
        tmp_path,
        plan=RunPlan("append", "kill", 3, 10, 7, 100, 5),
        history=late,
        evidence=Evidence(),
        faults=faults,
        judgement=Judgement([]),
        checkers=[],
    )
    words = words_of(path.read_text(encoding="utf-8"))
    assert "1.0 s kill a leader 1 0.0 s - 0 -" in words
    assert "6.0 s kill a leader 3 0.0 s 4.00 s 1 -" in words
