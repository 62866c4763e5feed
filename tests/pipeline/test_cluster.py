"""The demo's queries by spark-submit on a cluster of the pip install, a worker of which dies."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyspark
import pytest

from penstock.cli.demo.access_log import SAMPLE, read_lines
from penstock.client import Producer
from penstock.pipeline.session import prepare_environment
from tests.integration.cluster import Cluster, environment_without_penstock, running_cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pipelines" / "access_log"
BIN = Path(pyspark.__path__[0]) / "bin"
LINES = 1_500
# Of an archive of classes, if there is one, only drivers hear by the environment.
ARCHIVE = os.environ.get("SPARK_SUBMIT_OPTS", "")
SMALL = f"-XX:TieredStopAtLevel=1 -XX:-UsePerfData {ARCHIVE}".rstrip()


class SparkCluster:
    """A master and workers on loopback, each in a process group of its own."""

    def __init__(self, directory: Path) -> None:
        prepare_environment()
        self.directory = directory
        (port,) = free_ports(1)
        self.master = f"spark://127.0.0.1:{port}"
        self.groups: list[subprocess.Popen[bytes]] = []
        self._start("Master", "--port", str(port), "--webui-port", "0")
        wait_until(lambda: "ALIVE" in self.log("Master"), "the master", 90)

    def start_worker(self, name: str) -> subprocess.Popen[bytes]:
        place = ["--work-dir", str(self.directory / name), "--webui-port", "0"]
        worker = self._start("Worker", "--cores", "1", "--memory", "700m", *place, self.master)
        said = "Registering worker"
        count = len(self.groups) - 1
        wait_until(lambda: self.log("Master").count(said) >= count, f"{name} to register", 90)
        return worker

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _start(self, role: str, *words: str) -> subprocess.Popen[bytes]:
        kind = f"org.apache.spark.deploy.{role.lower()}.{role}"
        started = self.run([BIN / "spark-class", kind, "--host", "127.0.0.1", *words], role)
        self.groups.append(started)
        return started

    def run(self, command: list[str | Path], log: str) -> subprocess.Popen[bytes]:
        environment = {
            **environment_without_penstock(),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": SMALL,
            "PYSPARK_PYTHON": sys.executable,
            "TMPDIR": str(self.directory),
        }
        with (self.directory / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                cwd=self.directory, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        for one in self.groups:
            kill(one)


def kill(one: subprocess.Popen[bytes]) -> None:
    """With all that it has started: a worker's executor too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    one.wait()


@pytest.fixture
def spark_cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    running = SparkCluster(tmp_path)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "nodes") as cluster:
        yield cluster


def submit(on: SparkCluster, nodes: Cluster) -> subprocess.Popen[bytes]:
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "600m",
        "spark.executor.memory": "500m",
        "spark.executor.extraJavaOptions": SMALL,
        "spark.driver.extraJavaOptions": SMALL,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    words = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    return on.run(
        [BIN / "spark-submit", "--master", on.master, *words, EXAMPLE / "queries.py",
         nodes.bootstrap, "--work", str(on.directory / "work"), "--once"],
        "submit",
    )  # fmt: skip


def run_to_its_end(submitted: subprocess.Popen[bytes], on: SparkCluster) -> None:
    try:
        assert submitted.wait(600) == 0, on.log("submit")[-4000:]
    finally:
        kill(submitted)


def test_a_killed_worker_changes_no_row(
    spark_cluster: SparkCluster, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    batch, demo, outputs, queries = map(
        importlib.import_module, ("batch", "demo", "outputs", "queries")
    )
    victim = spark_cluster.start_worker("worker-1")
    spark_cluster.start_worker("worker-2")
    queries.make_topics(nodes.bootstrap)
    lines = read_lines(SAMPLE)[:LINES]
    work = spark_cluster.directory / "work"
    with Producer(nodes.bootstrap) as producer:
        feed = demo.Feed(producer, queries.LINES)
        feed.send(lines)
        feed.sent()
        submitted = submit(spark_cluster, nodes)
        # A batch is planned and not yet done: its tasks run on the workers.
        planned = work / "checkpoints" / "parse" / "offsets" / "0"
        wait_until(lambda: planned.exists() or submitted.poll() is not None, "a batch", 400)
        kill(victim)
        run_to_its_end(submitted, spark_cluster)
        assert "Lost executor" in spark_cluster.log("submit")
        feed.send([demo.closing_line(lines[-1])])
        sent = feed.sent()
        run_to_its_end(submit(spark_cluster, nodes), spark_cluster)
    expected = batch.work_out(sent, timedelta(days=1))
    assert expected.sessions
    assert expected.minutes
    for one in outputs.compare(nodes.bootstrap, work / queries.MINUTES, expected):
        assert one.agrees, one
