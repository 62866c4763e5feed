from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline import SparkMissingError, session
from penstock.pipeline.session import require_spark, settings


def test_a_local_master_is_held_to_this_machine() -> None:
    values = settings(master="local[3,4]")
    assert values["spark.master"] == "local[3,4]"
    assert values["spark.driver.bindAddress"] == "127.0.0.1"
    assert values["spark.ui.enabled"] == "false"
    assert values["spark.sql.shuffle.partitions"] == "3"


def test_only_a_local_master_outlives_a_long_stall() -> None:
    """It would give up on the executor that it is itself, and end ten minutes later."""
    expiry = "spark.storage.blockManagerHeartbeatTimeoutMs"
    assert int(settings(master="local[2]")[expiry]) == 60 * 60 * 1000
    failures = "spark.executor.heartbeat.maxFailures"
    assert int(settings(master="local")[failures]) == 2**31 - 1
    assert settings(master="spark://host:7077").keys().isdisjoint({expiry, failures})


@pytest.mark.parametrize("master", ["spark://host:7077", "k8s://https://host", "yarn"])
def test_a_clusters_network_and_shuffles_are_its_own(master: str) -> None:
    values = settings(master=master)
    assert not any(key.startswith(("spark.driver", "spark.ui")) for key in values)
    assert "spark.sql.shuffle.partitions" not in values
    assert values["spark.sql.execution.arrow.maxBytesPerBatch"] == "2147483647"


@pytest.mark.parametrize("master", ["local", "local[*]", "local[*,4]", "local[2]"])
def test_every_form_of_a_local_master_is_known(master: str) -> None:
    assert int(settings(master=master)["spark.sql.shuffle.partitions"]) >= 1


def test_settings_of_ones_own_win() -> None:
    assert settings(more={"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"


class Builder:
    """Spark's builder, as far as sessions use it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def appName(self, _name: str) -> Builder:
        return Builder()

    def config(self, key: str, value: str) -> Builder:
        self.values[key] = value
        return self

    def getOrCreate(self) -> dict[str, str]:
        return self.values


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where Spark is configured; no Spark is started."""
    for name in ("MASTER", "SPARK_REMOTE", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "as before")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(sys.modules[settings.__module__], "prepare_environment", lambda _: None)
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", Builder())
    return tmp_path


def values_of(**given: Any) -> dict[str, str]:
    found: Any = session(**given)
    return dict(found)


def test_a_session_is_on_this_machine_where_nothing_is_configured(outside: Path) -> None:
    assert values_of() == settings()


def test_what_is_configured_wins_over_what_a_session_sets(outside: Path) -> None:
    (outside / "spark-defaults.conf").write_text(
        "spark.master spark://host:7077\nspark.sql.execution.arrow.maxRecordsPerBatch 50\n"
    )
    values = values_of()
    assert values["spark.master"] == "spark://host:7077"
    assert "spark.driver.host" not in values
    assert "spark.sql.execution.arrow.maxRecordsPerBatch" not in values
    assert values["spark.sql.execution.arrow.maxBytesPerBatch"] == "2147483647"


def test_what_is_passed_wins_over_what_is_configured(outside: Path) -> None:
    (outside / "spark-defaults.conf").write_text("spark.master spark://host:7077\n")
    assert values_of(master="local[3]")["spark.master"] == "local[3]"
    values = values_of(settings={"spark.master": "yarn", "spark.app.id": "7"})
    assert (values["spark.master"], values["spark.app.id"]) == ("yarn", "7")
    assert "spark.driver.host" not in values


def test_a_local_master_that_is_configured_is_held_to_this_machine(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER", "local[5]")
    values = values_of()
    assert values["spark.master"] == "local[5]"
    assert values["spark.driver.host"] == "127.0.0.1"
    assert values["spark.sql.shuffle.partitions"] == "5"


def test_a_connect_server_in_the_environment_is_no_master(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://host:15002")
    assert "spark.master" not in values_of()


def test_without_pyspark_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "pyspark" else object()
    )
    with pytest.raises(SparkMissingError, match=r"pyspark; next: pip install 'penstock\[pipeline"):
        require_spark()


def test_importing_pipelines_imports_no_spark() -> None:
    program = (
        "import sys, penstock.pipeline\n"
        "print(sorted({'pyspark', 'pandas', 'pyarrow', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
