from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.pipeline import SparkMissingError
from penstock.pipeline.session import require_spark, settings


def test_a_local_master_is_held_to_this_machine() -> None:
    values = settings(master="local[3,4]")
    assert values["spark.master"] == "local[3,4]"
    assert values["spark.driver.bindAddress"] == "127.0.0.1"
    assert values["spark.ui.enabled"] == "false"
    assert values["spark.sql.shuffle.partitions"] == "3"


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
