"""A real Prometheus with our rules over a real cluster: a killed node makes its alert fire."""

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
from typing import Any

import pytest
import yaml

from penstock.client import AdminClient, Producer
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


def configuration(cluster: WatchedCluster, directory: Path) -> Path:
    """Ours, with this cluster's addresses, and in a greater hurry."""
    rules = (MONITORING / "prometheus/alerts.yml").read_text(encoding="utf-8")
    (directory / "alerts.yml").write_text(re.sub(r"\bfor: \S+", "for: 2s", rules))
    config = yaml.safe_load((MONITORING / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["alerting"]
    job = next(one for one in config["scrape_configs"] if one["job_name"] == "penstock")
    for target in job["static_configs"]:
        node_id = int(target["labels"]["node"])
        target["targets"] = [f"127.0.0.1:{cluster.metrics_ports[node_id]}"]
    config["scrape_configs"] = [job]
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
        with Producer(running.bootstrap) as producer:
            for number in range(30):
                producer.send("orders", b"x", partition=number % 3)
        yield running


@pytest.mark.timeout(300)
def test_prometheus_scrapes_a_cluster_and_tells_of_a_node_that_is_killed(
    cluster: WatchedCluster, tmp_path: Path
) -> None:
    with prometheus(configuration(cluster, tmp_path)) as watching:
        wait_until(lambda: watching.values("sum(up)") == [3], "all nodes are scraped")
        wait_until(
            lambda: watching.values("sum(penstock_active_controller)") == [1],
            "there is one active controller",
        )
        # What the dashboards ask can be asked, and some of it has an answer.
        answered = 0
        for query in dashboards():
            answered += bool(watching.values(query))
        assert answered > 40
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
    """Every query of every dashboard, for all clusters, nodes, topics and groups."""
    for path in sorted((MONITORING / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "1m")
                yield re.sub(r"\$\w+", ".*", expr)
