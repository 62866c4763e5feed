"""Software replaced node by node under load, and metadata.version raised by command in the end.

From the commit before this one, or from UPGRADE_FROM (``make upgrade UPGRADE_FROM=REV``): its
build, made as a user makes it, runs the nodes first. Each is stopped as its own image has it done:
by the deploy/docker/prestop.py of its revision. Pods are known by their addresses here: former
software may keep that of a name for 30 seconds.

That writes go on is a promise; how long they paused at most is told, and bounded generously.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.client import AdminClient
from penstock.raft_meta.core.versions import METADATA_VERSION
from tests.integration.operating.load import Load, make_topic, wait_in_sync
from tests.integration.operating.stateful_set import PRE_STOP, Pod, StatefulSet, penstock

ROOT = Path(__file__).resolve().parents[3]
BUILD_S = 300
MOST_MS = 10_000
"""Of a pause, on a machine that does something else as well, with nodes of two revisions."""
UPGRADE_FROM = os.environ.get("UPGRADE_FROM", "HEAD~1")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(BUILD_S + 500)]


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


class Former(NamedTuple):
    """The revision to come from."""

    software: Path
    pre_stop: Path
    """Of its image; there need not be any."""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Former:
    """Its build. Skips where its history is not there."""
    try:
        found = git("rev-parse", "--verify", "--quiet", f"{UPGRADE_FROM}^{{commit}}")
    except FileNotFoundError:
        pytest.skip("there is no git to get the former software by")
    if found.returncode:
        pytest.skip(f"git knows no {UPGRADE_FROM} here, as in a copy without history")
    source = tmp_path_factory.mktemp("former-source")
    with tarfile.open(
        fileobj=io.BytesIO(git("archive", found.stdout.decode().strip()).stdout)
    ) as tar:
        tar.extractall(source, filter="data")
    target = tmp_path_factory.mktemp("former")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-index", "--no-build-isolation", "--root-user-action", "ignore"),
            *("--target", str(target), str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Former(target, source / PRE_STOP.relative_to(ROOT))


def runs_from(pods: StatefulSet, pod: Pod) -> Path:
    """Where a process in the pod finds its broker."""
    done = subprocess.run(
        [sys.executable, "-c", "import penstock.broker as it; print(it.__file__)"],
        env=pods.environment(pod),
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


@pytest.fixture
def pods(tmp_path: Path, former: Former) -> Iterator[StatefulSet]:
    made = StatefulSet(tmp_path)
    for pod in made.pods:
        pod.software, pod.pre_stop = former
    try:
        made.start()
        assert all(runs_from(made, pod).is_relative_to(former.software) for pod in made.pods)
        make_topic(made.bootstrap)
        yield made
    finally:
        made.close()


def level(bootstrap: str) -> int:
    with AdminClient(bootstrap) as admin:
        return admin.describe_cluster().metadata_version


def test_software_is_replaced_node_by_node_under_load(
    pods: StatefulSet, former: Former, capsys: pytest.CaptureFixture[str]
) -> None:
    before = level(pods.bootstrap)
    assert before <= METADATA_VERSION
    load = Load(pods.bootstrap)
    load.wait_progress()
    load.pause_ms()

    stopped_by: list[Path] = []

    def pre_stop(pod: Pod) -> None:
        stopped_by.append(pod.pre_stop)
        if pod.pre_stop.exists():
            pods.pre_stop(pod)
        else:  # Its image had none, and whoever rolled it had to see to this.
            wait_in_sync(pods.bootstrap)

    # The first one goes forward, and back again: until the level is raised any of them may.
    trial = pods.pods[-1]
    for software, script in ((None, PRE_STOP), former):
        pods.delete(trial, lambda: pre_stop(trial))
        trial.software, trial.pre_stop = software, script
        pods.replace(trial)
        load.wait_progress()
    assert level(pods.bootstrap) == before

    def install(pod: Pod) -> None:
        pod.software, pod.pre_stop = None, PRE_STOP

    pods.roll(pre_stop, install)
    assert not any(runs_from(pods, pod).is_relative_to(former.software) for pod in pods.pods)
    assert stopped_by == [former.pre_stop, PRE_STOP, *[former.pre_stop] * len(pods.pods)]
    load.wait_progress()
    # Nothing but the command raises it.
    assert level(pods.bootstrap) == before
    raised = penstock("cluster", "upgrade", "--output", "json", bootstrap=pods.bootstrap)
    assert raised.returncode == 0, raised.stderr
    told = json.loads(raised.stdout)
    assert told == {"metadata_version": METADATA_VERSION, "before": before}
    load.wait_progress()
    pause_ms = load.pause_ms()
    records = load.finish(pods.bootstrap)
    assert level(pods.bootstrap) == METADATA_VERSION
    assert pause_ms < MOST_MS
    with capsys.disabled():
        sys.stdout.write(
            f"\n{records} records from {UPGRADE_FROM} on; metadata.version {before} -> "
            f"{METADATA_VERSION}; the longest write pause: {pause_ms} ms\n"
        )
