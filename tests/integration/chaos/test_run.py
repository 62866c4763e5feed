"""Whole runs against real nodes: judged, interrupted, with a bug in the nodes, judged again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.chaos.commands import chaos, finish, start, write_schedule
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def nodes_of(runner: int) -> list[psutil.Process]:
    """The node processes that a command has started."""
    return [
        child
        for child in psutil.Process(runner).children(recursive=True)
        if "penstock.cli.child" in cmdline(child)
    ]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_with_kills_is_true_and_can_be_judged_and_reported_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = write_schedule(
        tmp_path / "faults.json",
        [(2000, 2000, "kill", "a leader"), (7000, 1500, "kill", "the active controller")],
    )
    done = chaos(
        *("run", "--duration", "11", "--seed", "7", "--rate", "2000"),
        *("--schedule", faults, "--out", run, "--output", "json"),
    )
    assert done.status == 0, done.stderr
    assert done.json["valid"] == "true"
    assert done.json["figures"]["faults"] == {"planned": 2, "held": 2, "failed": 0}
    assert done.verdict_of("lost-write")["looked_at"] > 1000
    held = lines_of(run / "faults.jsonl")
    assert [one["fault"]["kind"] for one in held] == ["kill", "kill"]
    assert all(len(one["held"]["struck"]) == 1 for one in held)
    assert {path.name for path in run.iterdir()} >= {
        *("plan.json", "schedule.json", "history.jsonl", "faults.jsonl", "verdict.json"),
        *("report.html", "evidence", "node-1.log", "node-2.log", "node-3.log"),
    }
    assert not (run / "cluster").exists()
    assert len(lines_of(run / "evidence" / "replicas.jsonl")) == 6 * 3
    for name in ("watermarks.jsonl", "samples.jsonl"):
        assert {one["node"] for one in lines_of(run / "evidence" / name)} == {1, 2, 3}
    again = chaos("check", run, "--output", "json")
    assert (again.status, again.json["verdicts"]) == (0, done.json["verdicts"])
    alone = chaos("check", run / "history.jsonl", "--output", "json")
    assert alone.verdict_of("lost-write") == done.verdict_of("lost-write")
    (run / "report.html").unlink()
    assert chaos("report", run).stdout.strip() == str(run / "report.html")
    assert "every promise was kept" in (run / "report.html").read_text()


def test_ctrl_c_in_the_middle_of_a_fault_heals_judges_and_reports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = write_schedule(tmp_path / "faults.json", [(6000, 3_600_000, "pause", "node 2")])
    with start(
        *("run", "--duration", "3600", "--rate", "1000", "--schedule", faults),
        *("--out", run, "--output", "json"),
    ) as process:
        try:
            wait_until(
                lambda: any(map(is_stopped, nodes_of(process.pid))),
                "a node is paused",
                timeout_s=120,
            )
            nodes = nodes_of(process.pid)
            process.send_signal(signal.SIGINT)
            done = finish(process)
        finally:
            process.kill()
    assert done.status == 130, done.stderr
    assert done.json["valid"] == "true"
    assert done.verdict_of("recovery")["valid"] == "true"
    (held,) = lines_of(run / "faults.jsonl")
    assert held["held"]["struck"] == [2]
    assert held["error"] == ""
    assert held["healed_t"] > held["held_t"]
    assert (run / "report.html").exists()
    assert not any(node.is_running() for node in nodes)


def test_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    for arguments, what in (
        (("--workload", "knit"), "there is no workload 'knit'"),
        (("--nemesis", "kill,flood"), "there is no nemesis 'flood'"),
        (("--bug", "gremlin"), "there is no known bug 'gremlin'"),
        (("--set", "partitions=many"), "partitions='many' is no whole number"),
        (("--set", "colour=red"), "no option 'colour'"),
    ):
        done = chaos("run", "--out", tmp_path / "run", *arguments)
        assert done.status == 2, done.stderr
        assert what in done.stderr
        assert "next: " in done.stderr
        assert not (tmp_path / "run").exists()


def test_what_there_is_is_listed() -> None:
    done = chaos("list", "--output", "json")
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = {one["kind"] for one in entries}
    assert kinds == {"workload", "nemesis", "checker", "bug", "bug of sim"}
    assert all(one["summary"] for one in entries)


def test_a_bug_in_the_nodes_is_found_and_told_record_by_record(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # While a follower stands still nothing is acknowledged: producers lose patience and retry.
    faults = write_schedule(tmp_path / "faults.json", [(2000, 4000, "pause", "node 2")])
    done = chaos(
        *("run", "--bug", "retries-are-appended-again", "--duration", "9", "--rate", "2000"),
        *("--seed", "7", "--schedule", faults, "--out", run, "--output", "json"),
    )
    assert done.status == 1, done.stderr
    assert done.json["valid"] == "false"
    found = done.verdict_of("duplicate")
    assert found["valid"] == "false"
    assert "is there twice" in found["anomalies"][0]
    assert (run / "cluster").exists()  # Kept, to be looked into.
    page = (run / "report.html").read_text()
    assert "a promise was broken" in page
    assert found["anomalies"][0].partition(" ")[0] in page
    assert "--bug retries-are-appended-again" in page
