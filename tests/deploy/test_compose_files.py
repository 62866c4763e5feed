from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from penstock.wire.transport import parse_address
from tests.deploy.objects import ROOT

COMPOSE = ROOT / "deploy" / "compose"


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=COMPOSE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yaml").read_text())
    return dict(found["services"])


def nodes() -> dict[int, dict[str, Any]]:
    found = services()
    return {number: found[f"node-{number}"] for number in (1, 2, 3)}


def test_compose_takes_the_file() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("there is no docker-compose")
    run("docker-compose", "--profile", "monitoring", "--profile", "client", "config", "--quiet")


def test_prometheus_takes_its_settings_and_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool (Debian has it in prometheus)")
    run("promtool", "check", "config", "prometheus/prometheus.yml")
    run("promtool", "check", "rules", str(ROOT / "deploy" / "helm" / "penstock/files/alerts.yaml"))


def test_all_nodes_are_scraped() -> None:
    settings = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["static_configs"] == [
        {
            "targets": [f"node-{number}:9094"],
            "labels": {"cluster": "compose", "node": str(number)},
        }
        for number in nodes()
    ]


def test_dashboards_find_their_source() -> None:
    mounts = {text.split(":")[1]: text.split(":")[0] for text in services()["grafana"]["volumes"]}
    provisioning = COMPOSE / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/penstock.yml").read_text())[
        "providers"
    ]
    dashboards = COMPOSE / mounts[provider["options"]["path"]]
    assert list(dashboards.glob("*.json"))


def test_nodes_settings_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.broker.config import NodeConfig

    for key in list(os.environ):
        if key.startswith("PENSTOCK_"):
            monkeypatch.delenv(key)
    for number, node in nodes().items():
        port = f"9{number}92"
        environment = {
            key: str(text).replace(f"${{BROKER_{number}_PORT:-{port}}}", port)
            for key, text in node["environment"].items()
        }
        config = NodeConfig.load(None, environment)
        assert config.node_id == number
        assert config.advertised == (f"node-{number}", 9092)
        assert config.external == ("127.0.0.1", int(port))
        # The port of this machine leads to the one where clients are told of this machine.
        (opened,) = node["ports"]
        inside = parse_address(config.external_listen)[1]
        assert opened == f"127.0.0.1:${{BROKER_{number}_PORT:-{port}}}:{inside}"
        assert config.voters[number] == (f"node-{number}", 10092)
        assert config.metrics_listen == "0.0.0.0:9094"


def test_each_node_has_a_disk_of_its_own_and_few_rights() -> None:
    disks = [node["volumes"][0] for node in nodes().values()]
    assert len(set(disks)) == 3
    for node in nodes().values():
        assert node["volumes"][1] == "records:/var/lib/penstock-records"
        assert node["read_only"] is True
        assert node["cap_drop"] == ["ALL"]
        assert node["security_opt"] == ["no-new-privileges:true"]
        # It has longer to end than the five seconds of controlled.shutdown.timeout.ms.
        assert int(node["stop_grace_period"].removesuffix("s")) >= 30


def test_nodes_have_in_kubernetes_the_labels_that_alerts_go_by() -> None:
    """As Prometheus' own discovery gives them, in deploy/monitoring."""
    path = COMPOSE.parent / "monitoring/prometheus/prometheus-kubernetes.yml"
    (job, *_) = yaml.safe_load(path.read_text())["scrape_configs"]
    scrape = COMPOSE.parent / "kubernetes/components/monitoring/scrape.yaml"
    monitor = yaml.safe_load(scrape.read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    given = {one["targetLabel"]: one for one in endpoint["relabelings"]}
    wanted = {one["target_label"]: one for one in job["relabel_configs"] if "target_label" in one}
    for label in ("cluster", "node"):
        assert given[label]["sourceLabels"] == wanted[label]["source_labels"]
        for key in ("regex", "separator"):
            assert given[label].get(key) == wanted[label].get(key)
    ports = [one["regex"] for one in job["relabel_configs"] if one.get("action") == "keep"]
    assert endpoint["port"] in ports
    assert monitor["jobLabel"] == "app.kubernetes.io/name"
