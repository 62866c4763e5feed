"""Nodes as pods of a StatefulSet: rolled, killed, without their disk, and with another's.

The goal is that no write waits for more than a second through a rolling restart. The longest pause
is told, since it is the machine's too; what is asserted is that it is no more than several times
that, and that nothing is lost or doubled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.broker.datadir import read_meta
from tests.integration.operating.load import Load, make_topic, wait_in_sync
from tests.integration.operating.stateful_set import Pod, StatefulSet, lose, penstock
from tests.support import wait_until

MOST_MS = 5_000
"""Of a pause, on a machine that does something else as well."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[StatefulSet]:
    made = StatefulSet(tmp_path)
    try:
        made.start()
        make_topic(made.bootstrap)
        yield made
    finally:
        made.close()


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Say it where somebody who runs the test reads it."""
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


def test_a_rolling_restart_and_a_dead_host_lose_nothing(
    pods: StatefulSet, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(pods.bootstrap)
    load.wait_progress()
    load.pause_ms()
    lived = [pod.address for pod in pods.pods]
    pods.roll(pods.pre_stop)
    load.wait_progress()
    rolled_ms = load.pause_ms()
    assert rolled_ms < MOST_MS
    assert all(pod.killed_by_grace == 0 for pod in pods.pods)
    assert not {pod.address for pod in pods.pods} & set(lived)

    wait_in_sync(pods.bootstrap)
    load.pause_ms()
    pods.kill(pods.pods[1])
    load.wait_progress()
    pods.replace(pods.pods[1])
    load.wait_progress()
    killed_ms = load.pause_ms()

    # One that hangs is killed when its grace period is over.
    wait_in_sync(pods.bootstrap)
    pods.delete(pods.pods[2], lambda: None, grace_s=0.0)
    pods.replace(pods.pods[2])
    assert pods.pods[2].killed_by_grace == 1
    records = load.finish(pods.bootstrap)
    tell(
        capsys,
        f"{records} records; the longest write pause: {rolled_ms} ms in a rolling restart, "
        f"{killed_ms} ms for a pod that was killed",
    )


def with_own_hosts(copy: Path) -> list[str]:
    """What a command is put behind to have an /etc/hosts of its own. Skips where it cannot be."""
    shutil.copyfile("/etc/hosts", copy)
    script = f'mount --make-rprivate / && mount --bind "{copy}" /etc/hosts && exec "$@"'
    reasons = []
    # As root, or as nobody special in a user namespace of its own.
    for unshare in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        command = [*unshare, "sh", "-c", script, "sh"]
        try:
            tried = subprocess.run(
                [*command, "true"], capture_output=True, text=True, timeout=20, check=False
            )
        except FileNotFoundError:
            pytest.skip("there is no unshare(1) to have an /etc/hosts of its own by")
        if tried.returncode == 0:
            return command
        reasons.append(tried.stderr.strip())
    pytest.skip(f"no mount namespace of its own is allowed here: {'; '.join(reasons)}")


def test_pods_that_come_back_under_their_names_are_found_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Kubernetes: the names stay, and are of other addresses each time."""
    command = with_own_hosts(tmp_path / "hosts")
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.integration.operating.rolled_by_name", tmp_path],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["moved"]
    tell(capsys, f"by name: {told['records']} records; longest write pause {told['pause_ms']} ms")
    assert told["pause_ms"] < MOST_MS


def test_pods_that_are_deleted_at_once_leave_one_after_the_other(
    pods: StatefulSet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both may leave when they are asked to; the budget of Kubernetes keeps evictions alone."""
    load = Load(pods.bootstrap)
    load.wait_progress()
    wait_in_sync(pods.bootstrap)
    load.pause_ms()
    away_s: dict[int, tuple[float, float]] = {}

    def delete(pod: Pod) -> None:
        pods.delete(pod, lambda: pods.pre_stop(pod))
        left_s = time.monotonic()
        pods.replace(pod)
        away_s[pod.ordinal] = left_s, time.monotonic()

    with ThreadPoolExecutor() as pool:
        list(pool.map(delete, pods.pods[1:]))
    (_, first_back_s), (second_left_s, _) = sorted(away_s.values())
    assert second_left_s > first_back_s, "two pods were away at once"
    load.wait_progress()
    pause_ms = load.pause_ms()
    assert pause_ms < MOST_MS
    records = load.finish(pods.bootstrap)
    tell(capsys, f"{records} records; the longest write pause: {pause_ms} ms for two pods at once")


def test_the_founders_lost_disk_founds_no_second_cluster(pods: StatefulSet) -> None:
    """Step by step what docs/operating/kubernetes.md says of a lost disk."""
    pod = pods.pods[0]
    others = ",".join(one.address for one in pods.pods[1:])
    pods.delete(pod, lambda: wait_in_sync(others))
    lose(pod.disk)
    pods.schedule(pod)
    refused = pods.adopt(pod)
    assert refused.returncode == 1
    assert f"node 0 of cluster {pods.cluster_id} had a disk there" in refused.stderr
    assert not (pod.disk / "data").exists()

    removed = penstock("quorum", "remove", "0", bootstrap=others)
    assert removed.returncode == 0, removed.stderr
    record = pods.records / "node-0.json"
    assert f"`rm {record}`" in refused.stderr
    record.unlink()
    pods.schedule(pod)
    done = pods.adopt(pod)
    assert done.returncode == 0, done.stderr
    assert "may found" not in done.stdout
    assert not read_meta(pod.disk / "data").may_found
    pods.run(pod)
    wait_until(
        lambda: penstock("quorum", "add", f"0@{pod.controller}", bootstrap=others).returncode == 0,
        "it votes again",
        timeout_s=120,
    )
    pods.wait_ready(pod)
    wait_in_sync(pods.bootstrap)
    status = penstock("quorum", "status", "--output", "json", bootstrap=pods.bootstrap)
    assert status.returncode == 0, status.stdout + status.stderr


def test_a_pod_with_another_ones_disk_is_not_started(pods: StatefulSet) -> None:
    first, second, _ = pods.pods
    for pod in (first, second):
        pods.delete(pod, lambda: None)
    spare = first.disk.with_name("spare")
    first.disk.rename(spare)
    second.disk.rename(first.disk)
    spare.rename(second.disk)
    for pod, other in ((first, second), (second, first)):
        done = pods.adopt(pod)
        assert done.returncode == 1
        said = f"belongs to node {other.ordinal}, not to node {pod.ordinal}"
        assert said in " ".join(done.stderr.split())
        assert "mount the right disk" in done.stderr
