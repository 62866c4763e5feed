"""The dashboards: each query asks for what nodes and pipelines show; Grafana finds the files."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.unit.monitoring.known import check_query, known

ROOT = Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "deploy/monitoring/grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, whose own directory is where it looks for its parts."""
    monkeypatch.syspath_prepend(str(GRAFANA))
    spec = importlib.util.spec_from_file_location("make_dashboards", GRAFANA / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def name_of(path: Path) -> str:
    return path.stem


def test_the_files_are_what_the_program_makes(made: ModuleType) -> None:
    assert {path.stem for path in FILES} == {one.name for one in made.DASHBOARDS}
    assert {path.stem for path in FILES} == {
        "cluster", "broker", "topic", "group", "quorum", "pipeline",
    }  # fmt: skip
    for one in made.DASHBOARDS:
        text = (GRAFANA / "dashboards" / f"{one.name}.json").read_text(encoding="utf-8")
        assert text == made.as_json(one), f"run {GRAFANA.name}/make_dashboards.py"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_query_asks_for_metrics_and_labels_that_there_are(path: Path) -> None:
    queries = 0
    for panel in model(path)["panels"]:
        for target in panel["targets"]:
            queries += 1
            legend = target["legendFormat"]
            assert check_query(target["expr"], legend=legend) == [], panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")"), panel["title"]
    assert queries >= 5


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_chosen_from_is_there_and_used(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for variable in model(path)["templating"]["list"]:
        assert f"${variable['name']}" in text.replace("${datasource}", "$datasource")
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found is not None
            assert found[1] in known()
            assert found[2] in known()[found[1]] | {"cluster", "node"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_panels_do_not_lie_on_each_other(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in model(path)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_a_query_for_what_is_not_there_is_found() -> None:
    assert check_query("sum(penstock_no_such_thing)") == ["no metric penstock_no_such_thing"]
    wrong = 'penstock_groups{group="a"}'
    assert check_query(wrong) == ["penstock_groups has no label group"]
    assert check_query("sum by (topic) (penstock_groups)") != []
    assert check_query("penstock_groups", legend="{{topic}}") != []
    good = 'sum by (le, method) (rate(penstock_request_seconds_bucket{method="Log.Fetch"}[5m]))'
    assert check_query(good, legend="{{method}}") == []


def queries(path: Path, title: str) -> list[str]:
    """Those of one panel, of all clusters, nodes, topics and groups."""
    (panel,) = [one for one in model(path)["panels"] if one["title"] == title]
    return [
        re.sub(r"\$\w+", ".*", target["expr"].replace("$__rate_interval", "1m"))
        for target in panel["targets"]
    ]


def answers(query: str, series: dict[str, str], expected: dict[str, float], path: Path) -> None:
    """What a query answers ten minutes after these series began, a sample a minute."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing: it is in Debian's package prometheus")
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "10m", "exp_samples": samples}],
    }
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        [program, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_group_whose_coordinator_moved_is_one_curve(tmp_path: Path) -> None:
    (growth,) = queries(GRAFANA / "dashboards/group.json", "How fast the lag grows")
    lag = 'penstock_group_lag_records{{cluster="main", node="{}", group="billing", topic="orders"}}'
    answers(
        growth,
        {lag.format(1): "0+60x4 stale", lag.format(2): "_x5 300+60x9"},
        {'{cluster="main", group="billing", topic="orders"}': 1.0},
        tmp_path / "test.yml",
    )


def test_brokers_are_behind_with_what_the_active_controller_of_their_cluster_has_changed(
    tmp_path: Path,
) -> None:
    (behind,) = queries(
        GRAFANA / "dashboards/quorum.json", "Brokers behind with the metadata, in entries"
    )
    answers(
        behind,
        {
            'penstock_cluster_metadata_index{cluster="main", node="1"}': "48x10",
            'penstock_cluster_metadata_index{cluster="other", node="1"}': "900x10",
            'penstock_raft_commit_index{cluster="main", node="1"}': "109x10",
            'penstock_metadata_index{cluster="main", node="1"}': "48x10",
            'penstock_metadata_index{cluster="main", node="2"}': "45x10",
        },
        {'{cluster="main", node="1"}': 0.0, '{cluster="main", node="2"}': 3.0},
        tmp_path / "test.yml",
    )


def test_nobody_looks_for_a_metric_that_no_dashboard_and_no_alert_shows() -> None:
    """Those that have nothing to do on a picture aside, what is worth counting is worth seeing."""
    files = [*FILES, ROOT / "deploy/monitoring/prometheus/alerts.yml"]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    unseen = {
        name
        for name in known()
        if name.startswith("penstock_") and not name.endswith(("_bucket", "_count", "_sum"))
        if not re.search(rf"\b{name}(_bucket|_count)?\b", text)
    }
    assert unseen <= {
        "penstock_node_info",
        # What of them is not mended shows; these say how it came to that.
        "penstock_damaged_batches_total", "penstock_mended_batches_total",
        "penstock_damaged_logs_total", "penstock_copied_logs_total",
        "penstock_scrubber_damaged_segments_total", "penstock_scrubber_progress_ratio",
        "penstock_scrubber_round_start_timestamp_seconds",
        "penstock_retention_deleted_segments_total", "penstock_cleaner_cleans_total",
        "penstock_cleaner_failures_total", "penstock_cleaner_dirtiest_ratio",
        "penstock_cleaner_uncleanable_partitions",
        "penstock_cleaner_last_clean_timestamp_seconds",
        "penstock_replication_streams_total", "penstock_replication_refusals_total",
    }  # fmt: skip


def test_grafana_is_told_where_its_files_are() -> None:
    provisioning = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((provisioning / "dashboards/penstock.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"].endswith("/dashboards")
