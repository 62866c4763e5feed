from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.client import AdminClient, Consumer, Producer
from tests.integration.cluster import Cluster
from tests.pipeline.projects import SPARK_TIMEOUT_S, Project, environment
from tests.support import wait_until

# Each runs several commands.
pytestmark = pytest.mark.timeout(900)


def send(bootstrap: str, topic: str, *values: str) -> None:
    with Producer(bootstrap) as producer:
        for value in values:
            producer.send(topic, value=value.encode(), key=value[:1].encode())


def read(bootstrap: str, topic: str) -> list[tuple[bytes | None, str]]:
    """All records of a topic that are committed, in the order of their values."""
    with Consumer(
        bootstrap,
        topics=[topic],
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:
        found = []
        while batch := consumer.poll(2_000):
            found += [(record.key, (record.value or b"").decode()) for record in batch]
    return sorted(found, key=lambda one: one[1])


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
    assert read(bootstrap, f"{name}-out") == [(b"o", "ONE"), (b"t", "TWO")]

    with project.running() as process:
        send(bootstrap, f"{name}-in", "three")
        wait_until(
            lambda: len(read(bootstrap, f"{name}-out")) == 3, "it is written", SPARK_TIMEOUT_S
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(SPARK_TIMEOUT_S) == 0

    send(bootstrap, f"{name}-in", "four")
    project.ok("run")
    values = [value for _, value in read(bootstrap, f"{name}-out")]
    assert values == ["FOUR", "ONE", "THREE", "TWO"]


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
    sent = [f"line {number:04}" for number in range(500)]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(project.running("--interval", "0 seconds"))
        for number in range(0, 500, 50):
            send(bootstrap, "killed-in", *sent[number : number + 50])
        # In the midst of its batches: the context kills all of its processes.
        wait_until(lambda: bool(read(bootstrap, "killed-out")), "some is written", SPARK_TIMEOUT_S)
        assert process.poll() is None
    project.ok("run")
    assert [value for _, value in read(bootstrap, "killed-out")] == [one.upper() for one in sent]
