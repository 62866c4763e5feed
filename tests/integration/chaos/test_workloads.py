"""Each workload against real nodes that are killed and paused; and with a bug in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chaos.commands import chaos, write_schedule

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("workload", "faults", "proven"),
    [
        ("group", ("kill", "node 2"), ("group-exclusive", "zombie-commit")),
        ("offsets", ("kill", "node 2"), ("seek-honoured", "committed-forward")),
        ("process", ("pause", "node 2"), ("processed-once", "transaction-offsets")),
        ("transfer", ("kill", "node 1"), ("transfer-total", "torn-transaction")),
    ],
)
def test_a_workload_is_true_under_faults(
    tmp_path: Path, workload: str, faults: tuple[str, str], proven: tuple[str, str]
) -> None:
    run = tmp_path / "run"
    schedule = write_schedule(tmp_path / "faults.json", [(4000, 2500, *faults)])
    done = chaos(
        *("run", "--workload", workload, "--duration", "12", "--seed", "7", "--rate", "300"),
        # The machine may be so busy that a node is late: how late is not what this is about.
        *("--recovery", "120", "--schedule", schedule, "--out", run, "--output", "json"),
    )
    assert done.status == 0, done.stderr
    assert done.json["valid"] == "true"
    assert done.json["figures"]["faults"] == {"planned": 1, "held": 1, "failed": 0}
    for checker in proven:
        assert done.verdict_of(checker)["looked_at"] > 0
