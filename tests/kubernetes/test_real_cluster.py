"""A real Kubernetes: what restarts, deletions and evictions of pods do to those who write."""

from __future__ import annotations

import sys

import pytest

from tests.kubernetes.installed import Installed, Load
from tests.support import wait_until

MOST_MS = 15_000
"""Of a pause. Much more than is promised: hosts of tests do other things as well."""

pytestmark = pytest.mark.timeout(3600)


def test_topics_of_the_overlay_are_made(installed: Installed) -> None:
    installed.within("wait", "--for=condition=Complete", "job/penstock-topics", "--timeout=110s")
    assert "orders" in {topic["name"] for topic in installed.penstock("topics", "list")}


def test_nothing_is_lost_and_writes_go_on(
    installed: Installed, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    def roll() -> None:
        installed.within("rollout", "restart", "statefulset/penstock")
        installed.wait_rolled()
        wait_until(installed.is_in_sync, "all replicas are in sync")

    steps = {
        "a rolling restart": roll,
        "a pod deleted": lambda: installed.replace("penstock-1"),
        "a pod deleted by force": lambda: installed.replace(
            "penstock-2", "--grace-period=0", "--force"
        ),
        "a pod evicted": lambda: installed.wait_replaced(
            "penstock-0", installed.evict("penstock-0")
        ),
    }
    pauses = {name: load.pause_ms(step) for name, step in steps.items()}
    told = load.finish()
    with capsys.disabled():
        sys.stdout.write(f"\n{installed.version}: {told}; the longest write pauses, ms: {pauses}\n")
    assert told["acknowledged"]
    assert (told["lost"], told["doubled"], told["failed"]) == (0, 0, [])
    assert max(pauses.values()) < MOST_MS


def test_one_node_at_a_time_is_evicted(installed: Installed) -> None:
    wait_until(lambda: all(installed.is_ready(f"penstock-{n}") for n in range(3)), "all are ready")
    installed.evict("penstock-0")
    with pytest.raises(AssertionError, match="disruption budget"):
        installed.evict("penstock-1")
