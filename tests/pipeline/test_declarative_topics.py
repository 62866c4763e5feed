from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from penstock.client import AdminClient, Producer
from tests.integration.cluster import Cluster
from tests.pipeline.logs import read, values
from tests.pipeline.projects import SPARK_TIMEOUT_S, Project, environment
from tests.support import wait_until

# Each runs several commands.
pytestmark = pytest.mark.timeout(900)

STOPPED_WITHIN_S = 20


def send(bootstrap: str, topic: str, *texts: str) -> None:
    with Producer(bootstrap) as producer:
        for text in texts:
            producer.send(topic, value=text.encode(), key=text[:1].encode())


def stopped_in_a_batch(group: int, checkpoints: Path) -> bool:
    """Stop the processes of ``group``; whether a batch is under way, else they go on.

    A batch has a file in ``offsets`` from its beginning on, and one in ``commits`` from its end on.
    They also go on where one does not stop: a thread in vfork(2) waits for a child that is stopped
    before its exec(2), and is itself never seen as stopped.
    """
    os.killpg(group, signal.SIGSTOP)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: all_stand_still(group), "all are stopped", STOPPED_WITHIN_S)
    if all_stand_still(group) and batches(checkpoints, "offsets") > batches(checkpoints, "commits"):
        return True
    os.killpg(group, signal.SIGCONT)
    return False


def all_stand_still(group: int) -> bool:
    """Whether every thread of these processes is stopped, or at its end."""
    states = []
    for process_id in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(process_id) == group:
                stats = [
                    path.read_text() for path in Path(f"/proc/{process_id}/task").glob("*/stat")
                ]
                # What is behind the command in parentheses begins with the state.
                states += [stat.rpartition(") ")[2][0] for stat in stats]
    return set(states) <= set("TZX")


def batches(checkpoints: Path, what: str) -> int:
    """How many batches have a file in ``offsets``, or in ``commits``."""
    return sum(1 for path in checkpoints.glob(f"{what}/*") if path.name.isdigit())


@pytest.mark.parametrize("language", ["python", "sql"])
def test_a_new_project_runs_against_a_cluster_once_and_for_good(
    language: str, tmp_path: Path, penstock_cluster: Cluster, connect_url: str
) -> None:
    name = f"shop-{language}"
    bootstrap = penstock_cluster.bootstrap
    with AdminClient(bootstrap) as admin:
        for topic in (f"{name}-in", f"{name}-out"):
            admin.create_topic(topic, partitions=2, replication_factor=3)
    words = ["init", name, "--language", language, "-b", bootstrap]
    subprocess.run(
        Project(tmp_path).command(*words), cwd=tmp_path, env=environment(tmp_path), check=True
    )
    project = Project(tmp_path / name, connect_url)
    send(bootstrap, f"{name}-in", "one", "two")
    project.ok("run")
    found = read(penstock_cluster, f"{name}-out")
    assert sorted((one.key, one.value) for one in found) == [(b"o", b"ONE"), (b"t", b"TWO")]

    with project.running() as process:
        send(bootstrap, f"{name}-in", "three")
        wait_until(
            lambda: len(read(penstock_cluster, f"{name}-out", settled=False)) == 3,
            "it is written",
            SPARK_TIMEOUT_S,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(SPARK_TIMEOUT_S) == 0

    send(bootstrap, f"{name}-in", "four")
    project.ok("run")
    assert values(penstock_cluster, f"{name}-out") == ["FOUR", "ONE", "THREE", "TWO"]


def test_a_continuous_run_that_was_killed_doubles_nothing(
    tmp_path: Path, penstock_cluster: Cluster
) -> None:
    bootstrap = penstock_cluster.bootstrap
    with AdminClient(bootstrap) as admin:
        for topic in ("killed-in", "killed-out"):
            admin.create_topic(topic, partitions=2, replication_factor=3)
    subprocess.run(
        Project(tmp_path).command("init", "killed", "-b", bootstrap),
        cwd=tmp_path,
        env=environment(tmp_path),
        check=True,
    )
    project = Project(tmp_path / "killed")
    with (project.directory / "spark-defaults.conf").open("a") as file:
        file.write(f"spark.driver.memory 600m\nspark.local.dir {tmp_path}\n")
    checkpoints = project.directory / "pipeline-storage" / "_checkpoints" / "shouts" / "shout" / "0"
    sent: list[str] = []

    def caught() -> bool:
        """Whether it is stopped in a batch that is not the first; there is always one to come."""
        more = [f"line {len(sent) + number:05}" for number in range(50)]
        send(bootstrap, "killed-in", *more)
        sent.extend(more)
        return batches(checkpoints, "commits") > 0 and stopped_in_a_batch(process.pid, checkpoints)

    # The context kills all of its processes.
    with project.running("--interval", "0 seconds") as process:
        wait_until(caught, "it is in the midst of a batch", SPARK_TIMEOUT_S)
        assert process.poll() is None
    assert batches(checkpoints, "offsets") == batches(checkpoints, "commits") + 1
    project.ok("run")
    assert values(penstock_cluster, "killed-out") == [one.upper() for one in sent]
