"""`penstock pipeline`: what it does and refuses before any Spark is started."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.pipeline import SparkMissingError


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_project_is_for_the_cluster_that_the_command_is_given(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pipeline", "init", "shop", "-b", "one:1"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        "next: penstock topics create shop-in && penstock topics create shop-out" in result.stdout
    )
    assert '"one:1"' in (tmp_path / "shop" / "spark-pipeline.yml").read_text()


def test_programs_get_the_files_that_were_written() -> None:
    words = ["pipeline", "init", "shop", "--language", "sql", "--output", "json"]
    files = json.loads(CliRunner().invoke(app, words).stdout)["files"]
    assert [Path(file).name for file in files] == [
        "spark-pipeline.yml",
        "spark-defaults.conf",
        "topics.py",
        "capitals.sql",
    ]
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert again.stderr.startswith("error: ")
    assert again.stderr.endswith("next: choose another name, or remove it\n")


@pytest.mark.parametrize("command", ["run", "validate", "graph"])
def test_outside_of_a_project_the_next_step_is_to_make_one(command: str) -> None:
    result = CliRunner().invoke(app, ["pipeline", command])
    assert result.exit_code == 1
    assert "no spark-pipeline.yml in " in result.stderr
    assert "penstock pipeline init NAME" in result.stderr


def test_without_spark_the_next_step_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise SparkMissingError("no pyspark; next: pip install 'penstock[pipeline]'")

    # The package has a function of this name, too, which hides the module.
    module = importlib.import_module("penstock.pipeline.session")
    monkeypatch.setattr(module, "require_spark", missing)
    result = CliRunner().invoke(app, ["pipeline", "run"])
    assert result.exit_code == 1
    assert result.stderr == "error: no pyspark\nnext: pip install 'penstock[pipeline]'\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--continuous", "--full-refresh-all"],
        ["--continuous", "--refresh", "a"],
        ["--full-refresh-all", "--full-refresh", "a"],
        ["--interval", "1 second"],
    ],
)
def test_options_that_contradict_each_other_are_refused(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["pipeline", "run", *words])
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr
