"""A real Prometheus with our rules over a real cluster: what dashboards show, and alerts fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

from penstock.client import (
    AdminClient,
    Consumer,
    Producer,
    RecordTooLargeError,
    TopicAlreadyExistsError,
    TopicPartition,
)
from penstock.pipeline.progress import Gauges
from tests.integration.operating.watched import WatchedCluster, watched_cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        PROGRAM is None, reason="prometheus is missing: it is in Debian's package prometheus"
    ),
]

MONITORING = Path(__file__).resolve().parents[3] / "deploy/monitoring"
DOWN_S = 90.0
SHOWN_S = 60.0


class Prometheus:
    """One that runs, asked by its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._base}{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    @property
    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def values(self, query: str) -> list[float]:
        found = self.ask("/api/v1/query", query=query)["result"]
        return [float(one["value"][1]) for one in found]

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        return {
            alert["labels"]["alertname"]: alert
            for alert in self.ask("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }


def configuration(cluster: WatchedCluster, driver_port: int, directory: Path) -> Path:
    """Ours, with the addresses of this cluster and this driver, and in a greater hurry."""
    rules = (MONITORING / "prometheus/alerts.yml").read_text(encoding="utf-8")
    (directory / "alerts.yml").write_text(re.sub(r"\bfor: \S+", "for: 2s", rules))
    config = yaml.safe_load((MONITORING / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["alerting"]
    job = next(one for one in config["scrape_configs"] if one["job_name"] == "penstock")
    for target in job["static_configs"]:
        node_id = int(target["labels"]["node"])
        target["targets"] = [f"127.0.0.1:{cluster.metrics_ports[node_id]}"]
    pipelines = next(one for one in config["scrape_configs"] if one is not job)
    pipelines["static_configs"][0]["targets"] = [f"127.0.0.1:{driver_port}"]
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def prometheus(config: Path) -> Iterator[Prometheus]:
    assert PROGRAM is not None
    (port,) = free_ports(1)
    with (config.parent / "prometheus.log").open("wb") as output:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={config}",
                f"--storage.tsdb.path={config.parent / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    running = Prometheus(port)
    try:
        wait_until(lambda: running.is_ready, "Prometheus is ready")
        yield running
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCluster]:
    with watched_cluster(tmp_path_factory.mktemp("nodes")) as running:
        with AdminClient(running.bootstrap) as admin:
            admin.create_topic("orders", 3, 3, {"min.insync.replicas": "2"})
            admin.create_topic("small", 1, 3, {"max.message.bytes": "500"})
        yield running


@pytest.fixture
def driver_port() -> Iterator[int]:
    """Where a driver of Spark shows one query."""
    registry = CollectorRegistry()
    progress = SimpleNamespace(
        inputRowsPerSecond=2.5,
        processedRowsPerSecond=10.0,
        batchId=7,
        batchDuration=500,
        numInputRows=5,
    )
    Gauges(registry).show("enrich", progress, {TopicPartition("orders", 0): 3})
    (port,) = free_ports(1)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield port
    server.shutdown()
    thread.join()
    server.server_close()


def use(cluster: WatchedCluster) -> None:
    """A little of all that dashboards show."""
    servers = cluster.bootstrap
    with Producer(servers) as producer:
        for number in range(30):
            producer.send("orders", b"x", partition=number % 3)
        with pytest.raises(RecordTooLargeError):
            producer.send("small", b"x" * 1_000).result(60)
    with Producer(servers, transactional_id="till-1") as producer, producer.transaction():
        producer.send("orders", b"sold")
    with Consumer(
        servers, group_id="billing", topics=["orders"], auto_offset_reset="earliest"
    ) as consumer:
        assert next(iter(consumer))
        consumer.commit()
    with AdminClient(servers) as admin, pytest.raises(TopicAlreadyExistsError):
        admin.create_topic("orders", 3, 3)


@pytest.mark.timeout(300)
def test_prometheus_scrapes_a_cluster_and_tells_of_a_node_that_is_killed(
    cluster: WatchedCluster, driver_port: int, tmp_path: Path
) -> None:
    with prometheus(configuration(cluster, driver_port, tmp_path)) as watching:
        wait_until(lambda: watching.values("sum(up)") == [4], "all nodes are scraped")
        wait_until(
            lambda: watching.values("sum(penstock_active_controller)") == [1],
            "there is one active controller",
        )

        def unanswered() -> list[str]:
            use(cluster)
            return [query for query in dashboards() if not watching.values(query)]

        wait_until(lambda: unanswered() == [], "there is something in every picture", SHOWN_S)
        # Commands that changed nothing came last, and no broker lacks anything of the metadata.
        behind = next(query for query in dashboards() if "penstock_metadata_index" in query)
        wait_until(lambda: watching.values(behind) == [0, 0, 0], "brokers have all the metadata")
        assert "PenstockNodeDown" not in watching.firing()
        cluster.nodes[3].kill()
        wait_until(lambda: "PenstockNodeDown" in watching.firing(), "the alert fires", DOWN_S)
        alert = watching.firing()["PenstockNodeDown"]
        assert alert["labels"]["node"] == "3"
        assert alert["labels"]["severity"] == "critical"
        assert alert["annotations"]["summary"] == "Node 3 is down"
        wait_until(
            lambda: "PenstockUnderReplicated" in watching.firing(), "replicas are missed", DOWN_S
        )
        # The cluster's own word, which needs no target.
        wait_until(lambda: "PenstockBrokerMissing" in watching.firing(), "it is missed", DOWN_S)
        assert "PenstockNotWatched" not in watching.firing()
        fired = {"PenstockNodeDown", "PenstockUnderReplicated", "PenstockBrokerMissing"}
        cluster.nodes[3].start()
        cluster.wait_ready()
        wait_until(
            lambda: not fired & watching.firing().keys(),
            "all is well again",
            DOWN_S,
        )


def dashboards() -> Iterator[str]:
    """Every query of every dashboard, for all clusters, nodes, topics and groups, in a hurry."""
    for path in sorted((MONITORING / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "1m").replace(":1m]", ":1s]")
                yield re.sub(r"\$\w+", ".*", expr)
