"""The alerts: each is tested by promtool, has a page, and asks for metrics that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.monitoring.known import check_query

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy/monitoring/prometheus/alerts.yml"
TESTS = RULES.with_name("alerts_test.yml")
INDEX = (ROOT / "docs/operating/alerts/README.md").read_text(encoding="utf-8")
SECTIONS = ["What it means", "What users feel", "How to look", "What to do"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def name_of(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


def promtool(*arguments: str) -> str:
    """What promtool says, which must be content."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: it is in Debian's package prometheus")
    done = subprocess.run(
        [found, *arguments],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_understands_the_rules_and_its_configuration() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES.name)
    promtool("check", "config", "prometheus.yml")


def test_the_rules_fire_where_they_must_and_nowhere_else() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS.name)


def test_each_alert_is_tested_where_it_fires() -> None:
    fired = {
        test["alertname"]
        for group in yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]
        for test in group["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert fired == {name_of(alert) for alert in alerts()}


@pytest.mark.parametrize("alert", alerts(), ids=name_of)
def test_an_alert_says_what_it_must(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"Penstock[A-Z]\w+", alert["alert"])
    assert "for" in alert
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert check_query(alert["expr"]) == []


@pytest.mark.parametrize("alert", alerts(), ids=name_of)
def test_an_alert_has_a_page_of_what_to_do(alert: dict[str, Any]) -> None:
    path = ROOT / alert["annotations"]["runbook_url"]
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {alert['alert']}\n")
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert found[: len(SECTIONS)] == SECTIONS
    assert all(len(part) > 60 for part in text.split("\n## ")[1:])
    row = f"| {alert['alert']} | {alert['labels']['severity']} | "
    assert any(line.startswith(row) and f"({path.name})" in line for line in INDEX.splitlines())


def test_there_is_no_page_without_an_alert() -> None:
    wanted = {ROOT / alert["annotations"]["runbook_url"] for alert in alerts()}
    assert set((ROOT / "docs/operating/alerts").glob("*.md")) == wanted | {
        ROOT / "docs/operating/alerts/README.md"
    }


def test_the_metrics_that_pages_name_are_there() -> None:
    for path in (ROOT / "docs/operating/alerts").glob("*.md"):
        for code in re.findall(r"`([^`\n]*penstock_[^`\n]*)`", path.read_text(encoding="utf-8")):
            assert check_query(code) == [], path.name


def test_kubernetes_pods_become_nodes_by_their_number() -> None:
    # Debian's promtool knows no discovery in Kubernetes, so this is looked at by hand.
    path = RULES.with_name("prometheus-kubernetes.yml")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "penstock"
    targets = {rule.get("target_label"): rule for rule in job["relabel_configs"]}
    assert {"cluster", "node"} <= set(targets)
    number = re.fullmatch(targets["node"]["regex"], "penstock-12")
    assert number is not None
    assert number[1] == "12"
