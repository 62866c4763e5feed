"""The report's page: how the run went at a glance, then over time, then fault by fault and checker
by checker.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from penstock.chaos.availability import Window, longest_ms, windows, written_partitions
from penstock.chaos.checkers import Checker, Evidence
from penstock.chaos.fault_thread import FaultRecord
from penstock.chaos.history import History
from penstock.chaos.judging import Judgement
from penstock.chaos.report.series import Series, series_of
from penstock.chaos.report.style import STYLE
from penstock.chaos.report.svg import Frame, Line, Shade, bar_chart, line_chart, rows_chart
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.verdict import Anomaly, Valid, Verdict

REPORT_FILE: Final = "report.html"
_SHOWN_PARTITIONS: Final = 40
_SHOWN_RECORDS: Final = 12
_MEGABYTE: Final = 1e6
_OWN: Final[Mapping[str, str]] = {
    "recovery": "After everything was healed every node served and every partition had its leader.",
    "faults": "What was planned to be broken was broken.",
    "history": "The history that is judged is the one that the run wrote.",
}
_SAID: Final = {
    Valid.TRUE: "every promise was kept",
    Valid.FALSE: "a promise was broken",
    Valid.UNKNOWN: "not everything could be judged",
}


def write_report(
    directory: Path,
    *,
    plan: RunPlan,
    history: History,
    evidence: Evidence,
    faults: Sequence[FaultRecord],
    judgement: Judgement,
    checkers: Sequence[Checker],
) -> Path:
    """Write ``report.html`` into the directory of a run; where it is."""
    path = directory / REPORT_FILE
    text = render(
        plan=plan,
        history=history,
        evidence=evidence,
        faults=faults,
        judgement=judgement,
        meanings=definitions(checkers),
    )
    path.write_text(text, encoding="utf-8")
    return path


def definitions(checkers: Sequence[Checker]) -> dict[str, str]:
    """By name what each checker says of its anomaly."""
    found = {one.name: inspect.cleandoc(type(one).__doc__ or "") for one in checkers}
    # A page has no marks of code as the docstrings of Python have them.
    return {name: text.replace("``", "") for name, text in {**_OWN, **found}.items()}


def render(
    *,
    plan: RunPlan,
    history: History,
    evidence: Evidence,
    faults: Sequence[FaultRecord],
    judgement: Judgement,
    meanings: Mapping[str, str],
) -> str:
    """The whole page."""
    series = series_of(history)
    down = windows(history)
    frame = Frame(series.totals.seconds, [_shade(one) for one in faults if one.held is not None])
    sections = [
        _header(plan, series, down, faults, judgement),
        _throughput(frame, series),
        _latency(frame, series),
        _availability(frame, history, down),
        _faults(faults, down),
        _checkers(judgement, meanings),
        _processes(frame, evidence),
        _crashes(evidence),
    ]
    title = f"penstock chaos: {plan.workload} under {plan.nemesis or 'no faults'}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {judgement.valid.value}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}{_footer(plan)}</main></body></html>\n"
    )


# --- at a glance


def _header(
    plan: RunPlan,
    series: Series,
    down: Sequence[Window],
    faults: Sequence[FaultRecord],
    judgement: Judgement,
) -> str:
    totals = series.totals
    seconds = max(totals.seconds, 1e-9)
    recovery = judgement.figures.get("recovery_ms")
    injected = _injected(faults, judgement)
    tiles = [
        (f"{totals.written:,}", "records written"),
        (f"{totals.written / seconds:,.0f}/s", "on average"),
        (f"{totals.read + totals.read_in_the_end:,}", "records read"),
        (_ms(totals.latency_ms(50)), "p50 of an operation"),
        (_ms(totals.latency_ms(99)), "p99"),
        (_ms(totals.latency_ms(99.9)), "p99.9"),
        (f"{totals.failed:,} / {totals.ambiguous:,}", "failed / ambiguous"),
        (injected, "faults injected"),
        (_ms(longest_ms(down)), "longest unavailability"),
        (_ms(recovery), "recovery in the end"),
        (f"{judgement.anomalies:,}", "anomalies"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in tiles
    )
    bug = f", with the bug {plan.bug} put into it" if plan.bug else ""
    ended_s = judgement.figures.get("interrupted_after_s")
    ended = "" if ended_s is None else f"; ended by Ctrl-C after {ended_s:g} s, {injected} faults"
    valid = judgement.valid
    return (
        f'<header><div class="top"><span class="verdict {valid.value}">{valid.value}</span>'
        f"<div><h1>{escape(plan.workload)} under {escape(plan.nemesis or 'no faults')}</h1>"
        f'<p class="soft">{_SAID[valid]}: {plan.nodes} nodes, {plan.duration_s:g} s, '
        f"seed {plan.seed}{escape(bug)}{ended}</p></div></div>"
        f'<div class="tiles">{boxes}</div>'
        f"<pre>{escape(plan.command())}</pre></header>"
    )


def _injected(faults: Sequence[FaultRecord], judgement: Judgement) -> str:
    """So many of those that were planned: the others failed, or the run ended before them."""
    told = judgement.figures.get("faults")
    if told is not None:
        return f"{told['held']} of {told['planned']}"
    return f"{sum(one.held is not None for one in faults)} of {len(faults)}"


def _footer(plan: RunPlan) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return (
        f"<footer><p>{escape(versions)}. The same seed makes the same schedule of faults and the "
        "same operations; when answers come is the machine's.</p></footer>"
    )


# --- over time


def _shade(record: FaultRecord) -> Shade:
    start, held, end = (t / 1e9 for t in (record.began_t, record.held_t, record.healed_t))
    assert record.held is not None
    who = _who(record)
    return Shade(
        start,
        held,
        end,
        f"{record.fault.kind} {who}".strip(),
        f"{record.fault.nemesis}: {record.fault.kind} at {record.fault.target} ({who}), "
        f"{start:.1f} s to {end:.1f} s, held from {held:.1f} s on",
    )


def _who(record: FaultRecord) -> str:
    return ",".join(str(one) for one in (record.held or {}).get("struck", ()))


def _throughput(frame: Frame, series: Series) -> str:
    chart = line_chart(
        frame,
        series.seconds,
        [
            Line("acknowledged", "written", series.written),
            Line("read", "read", series.read),
        ],
    )
    errors = bar_chart(
        frame,
        series.seconds,
        [("failed", "failed", series.failed), ("ambiguous", "ambiguous", series.ambiguous)],
    )
    return (
        "<section><h2>Throughput</h2>"
        + _legend(
            ("written", "records a second, acknowledged"),
            ("read", "records a second, read"),
            ("fault", "a fault: begins, holds (dashed), is healed"),
        )
        + chart
        + "<h2>Operations that did not succeed</h2>"
        + _legend(("bad", "failed: certainly not done"), ("doubt", "ambiguous: nobody knows"))
        + errors
        + "</section>"
    )


def _latency(frame: Frame, series: Series) -> str:
    chart = line_chart(
        frame,
        series.seconds,
        [
            # The rarest first: where few operations make them equal, what is usual lies on top.
            Line("p99.9", "p999", series.p999_ms),
            Line("p99", "p99", series.p99_ms),
            Line("p50", "p50", series.p50_ms),
        ],
        logarithmic=True,
        unit=" ms",
        height=220,
    )
    return (
        "<section><h2>Latency</h2>"
        + _legend(("written", "p50"), ("p99", "p99"), ("p999", "p99.9"))
        + chart
        + "</section>"
    )


def _availability(frame: Frame, history: History, down: Sequence[Window]) -> str:
    names = written_partitions(history.events)
    by_partition: dict[str, list[Window]] = {name: [] for name in names}
    for window in down:
        by_partition.setdefault(window.partition, []).append(window)
    # Where not all fit, those that were away longest are shown.
    worst = sorted(names, key=lambda name: -longest_ms(by_partition[name]))[:_SHOWN_PARTITIONS]
    rows = [
        (
            name,
            [
                (
                    one.start_t / 1e9,
                    one.end_t / 1e9,
                    f"{name}: {one.lasted_ms:,.0f} ms from {one.start_t / 1e9:.2f} s on",
                )
                for one in by_partition[name]
            ],
        )
        for name in names
        if name in worst
    ]
    table = _table(
        ("Partition", "Windows", "Longest", "Together"),
        [
            (
                name,
                str(len(by_partition[name])),
                _ms(longest_ms(by_partition[name])),
                _ms(sum(one.lasted_ms for one in by_partition[name])),
            )
            for name in names
            if name in worst
        ],
        right=(1, 2, 3),
    )
    left_out = (
        f" The {len(worst)} worst of {len(names)} are shown." if len(worst) < len(names) else ""
    )
    return (
        "<section><h2>Availability</h2>"
        '<p class="soft small">A window of unavailability: writes to the partition were asked for, '
        f"and for half a second or more none of them succeeded.{left_out}</p>"
        + _legend(("up", "available"), ("bad", "unavailable"))
        + rows_chart(frame, rows)
        + table
        + "</section>"
    )


def _processes(frame: Frame, evidence: Evidence) -> str:
    if not evidence.samples:
        return ""
    seconds = sorted({round(one.t / 1e9) for one in evidence.samples})
    lines = []
    for number, node in enumerate(sorted({one.node for one in evidence.samples})):
        by_second = {
            round(one.t / 1e9): one.memory_bytes / _MEGABYTE
            for one in evidence.samples
            if one.node == node
        }
        values = [by_second.get(second) for second in seconds]
        lines.append((node, Line(f"node {node}", f"memory-{number % 5}", values)))
    colours = ("written", "read", "p99", "p999", "good")
    legend = _legend(*((colours[i % 5], f"node {node}") for i, (node, _) in enumerate(lines)))
    chart = line_chart(frame, seconds, [line for _, line in lines], unit=" MB", height=150)
    return f"<section><h2>Memory of the nodes</h2>{legend}{chart}</section>"


# --- fault by fault


def _faults(faults: Sequence[FaultRecord], down: Sequence[Window]) -> str:
    if not faults:
        return "<section><h2>Faults</h2><p>There were none.</p></section>"
    rows = []
    by_fault = _by_fault(faults, down)
    for record, found in zip(faults, by_fault, strict=True):
        rows.append(
            (
                f"{record.began_t / 1e9:.1f} s",
                record.fault.kind,
                record.fault.target,
                _who(record) or "-",
                f"{(record.healed_t - record.held_t) / 1e9:.1f} s",
                _ms(longest_ms(found)),
                str(len({one.partition for one in found})),
                record.error or "-",
            )
        )
    table = _table(
        ("At", "Fault", "At whom", "Nodes", "Held", "Longest window", "Partitions", "Trouble"),
        rows,
        right=(0, 4, 5, 6),
    )
    return (
        '<section><h2>Faults</h2><p class="soft small">The longest window of unavailability '
        "that fell mostly between the fault and the next one, and how many partitions had one.</p>"
        f"{table}</section>"
    )


def _by_fault(faults: Sequence[FaultRecord], down: Sequence[Window]) -> list[list[Window]]:
    """To each fault the windows of which most lies between its beginning and that of the next."""
    found: list[list[Window]] = [[] for _ in faults]
    begins = [record.began_t for record in faults]
    for window in down:
        shares = [
            min(window.end_t, end) - max(window.start_t, start)
            for start, end in zip(begins, [*begins[1:], window.end_t], strict=True)
        ]
        most = max(shares)
        if most > 0:
            found[shares.index(most)].append(window)
    return found


# --- checker by checker


def _checkers(judgement: Judgement, meanings: Mapping[str, str]) -> str:
    order = {Valid.FALSE: 0, Valid.UNKNOWN: 1, Valid.TRUE: 2}
    verdicts = sorted(judgement.verdicts, key=lambda one: (order[one.valid], one.checker))
    body = "".join(_checker(one, meanings.get(one.checker, "")) for one in verdicts)
    left_out = judgement.figures.get("not_judged") or {}
    body += "".join(
        f"<p class='soft small'>{escape(name)} did not judge: {escape(reason)}.</p>"
        for name, reason in left_out.items()
    )
    return f"<section><h2>Checkers</h2>{body}</section>"


def _checker(verdict: Verdict, meaning: str) -> str:
    if verdict.valid is Valid.FALSE:
        plural = "anomaly" if verdict.found == 1 else "anomalies"
        what = f"{verdict.found:,} {plural}; looked at {verdict.looked_at:,}"
    elif verdict.valid is Valid.UNKNOWN:
        what = verdict.reason
    else:
        what = f"looked at {verdict.looked_at:,}"
    is_open = " open" if verdict.valid is Valid.FALSE else ""
    figures = "".join(
        f"<p class='small soft'>{escape(str(name))}: {escape(str(value))}</p>"
        for name, value in verdict.figures.items()
    )
    anomalies = "".join(map(_anomaly, verdict.anomalies))
    more = verdict.found - len(verdict.anomalies)
    if more > 0:
        anomalies += f"<p class='soft small'>{more:,} more are not shown.</p>"
    return (
        f"<details{is_open}><summary><span class='mark {verdict.valid.value}'>"
        f"{verdict.valid.value}</span><span class='name'>{escape(verdict.checker)}</span>"
        f"<span class='what'>{escape(what)}</span></summary>"
        f"<div class='definition'>{escape(meaning)}</div>{figures}{anomalies}</details>"
    )


def _anomaly(anomaly: Anomaly) -> str:
    records = [
        json.dumps(dict(one), ensure_ascii=False, default=str)
        for one in anomaly.records[:_SHOWN_RECORDS]
    ]
    if len(anomaly.records) > _SHOWN_RECORDS:
        records.append(f"... and {len(anomaly.records) - _SHOWN_RECORDS} more")
    shown = f"<pre>{escape(chr(10).join(records))}</pre>" if records else ""
    return f"<div class='anomaly'>{escape(anomaly.what)}{shown}</div>"


def _crashes(evidence: Evidence) -> str:
    lines = [f"node {node}: {line}" for node, found in evidence.logs.items() for line in found]
    if not lines:
        return ""
    text = escape("\n".join(lines[:50]))
    return f"<section><h2>What the nodes' logs tell of crashes</h2><pre>{text}</pre></section>"


# --- small things


def _legend(*entries: tuple[str, str]) -> str:
    items = "".join(
        f'<span><i class="box" style="background:var(--{colour})"></i>{escape(name)}</span>'
        for colour, name in entries
    )
    return f'<div class="legend">{items}</div>'


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()
) -> str:
    def cells(tag: str, row: Sequence[Any]) -> str:
        return "".join(
            f"<{tag}{' class=n' if place in right else ''}>{escape(str(cell))}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"


def _ms(value: float | None) -> str:
    if not value:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
