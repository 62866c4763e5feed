from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.configured import configured


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A directory with spark-defaults.conf."""
    directory = tmp_path / "conf"
    directory.mkdir()
    (directory / "spark-defaults.conf").write_text(
        "# Ours\n\nspark.master   spark://file:7077\nspark.ui.enabled=true\n"
    )
    return directory


def test_nothing_is_configured(tmp_path: Path) -> None:
    assert configured({"SPARK_HOME": str(tmp_path)}) == {}


@pytest.mark.parametrize("variable", ["SPARK_CONF_DIR", "SPARK_HOME"])
def test_the_file_is_found(conf: Path, variable: str) -> None:
    place = conf if variable == "SPARK_CONF_DIR" else conf.parent
    found = configured({variable: str(place), "MASTER": "spark://variable:7077"})
    assert found == {"spark.master": "spark://file:7077", "spark.ui.enabled": "true"}


def test_a_master_in_the_environment(tmp_path: Path) -> None:
    found = configured({"MASTER": "spark://variable:7077", "SPARK_CONF_DIR": str(tmp_path)})
    assert found == {"spark.master": "spark://variable:7077"}


@pytest.mark.parametrize(
    ("arguments", "master"),
    [
        ("--conf spark.master=yarn pyspark-shell", "yarn"),
        ("-c spark.master=yarn --master local[7] pyspark-shell", "local[7]"),
        ("--master=local[7] pyspark-shell", "local[7]"),
        ("--conf=spark.master=yarn --name 'a b' pyspark-shell", "yarn"),
        ("pyspark-shell", "spark://file:7077"),
    ],
)
def test_arguments_of_spark_submit_win(conf: Path, arguments: str, master: str) -> None:
    found = configured({"SPARK_CONF_DIR": str(conf), "PYSPARK_SUBMIT_ARGS": arguments})
    assert found == {"spark.master": master, "spark.ui.enabled": "true"}


def test_another_file_is_read_in_place_of_the_usual_one(conf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.conf"
    other.write_text("spark.app.id = 7\n")
    arguments = f"--properties-file {other} pyspark-shell"
    given = {"SPARK_CONF_DIR": str(conf), "PYSPARK_SUBMIT_ARGS": arguments}
    assert configured(given) == {"spark.app.id": "7"}
