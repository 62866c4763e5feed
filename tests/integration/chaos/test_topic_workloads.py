"""Runs of the workloads about topics and metadata against real nodes, one of which is struck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chaos.commands import chaos, write_schedule

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("workload", "judged"),
    [
        ("churn", ("topic-ids", "deleted-records")),
        ("compacted", ("compacted-last", "compacted-past")),
        ("register", ("linearizable",)),
        ("retention", ("lost-write", "unseen-write", "skipped-poll", "watermarks-forward")),
    ],
)
def test_a_run_with_a_kill_and_a_pause_is_true(
    tmp_path: Path, workload: str, judged: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    faults = write_schedule(
        tmp_path / "faults.json",
        [(2000, 2000, "kill", "the active controller"), (7000, 2500, "pause", "node 2")],
    )
    done = chaos(
        *("run", "--workload", workload, "--duration", "12", "--seed", "7", "--rate", "500"),
        *("--schedule", faults, "--out", run, "--output", "json"),
    )
    assert done.status == 0, (done.stdout, done.stderr)
    assert done.json["valid"] == "true"
    for checker in judged:
        assert done.verdict_of(checker)["looked_at"] > 0
