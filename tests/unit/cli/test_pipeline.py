"""`penstock pipeline`: what it does and refuses before any Spark is started."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.pipeline import SparkMissingError
from penstock.pipeline.declarative import project
from penstock.pipeline.declarative.definitions import DefinitionError


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_project_is_for_the_cluster_that_the_command_is_given(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pipeline", "init", "shop", "-b", "one:1"])
    assert (result.exit_code, result.stderr) == (0, "")
    create = "penstock topics create -b one:1"
    assert f"next: {create} shop-in && {create} shop-out\n" in result.stdout
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> DefinitionError:
    """What the commands fail with, wherever they look for a project."""
    error = DefinitionError("the run failed: Flow 'Shout' has FAILED. BootstrapError: nobody there")
    error.detail = "Traceback\n  of many lines"

    def find(_start: Path) -> Path:
        raise error

    monkeypatch.setattr(project, "find_spec", find)
    return error


def test_a_failure_is_two_lines_and_the_rest_is_in_a_file(
    failing: DefinitionError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["pipeline", "run"])
    assert result.exit_code == 1
    error, step = result.stderr.splitlines()
    assert error == f"error: {failing}"
    (kept,) = tmp_path.glob("penstock-pipeline-*.log")
    assert kept.read_text() == "Traceback\n  of many lines\n"
    assert step.startswith("next: start the cluster, or correct its address")
    assert step.endswith(f"(all that Spark says: {kept})")


def test_where_no_file_can_be_written_the_failure_is_said_all_the_same(
    failing: DefinitionError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    result = CliRunner().invoke(app, ["pipeline", "validate"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == f"error: {failing}"
    assert "all that Spark says" not in result.stderr


def test_verbose_shows_all_of_it(
    failing: DefinitionError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["pipeline", "run", "--verbose"])
    assert result.stderr.splitlines()[:3] == [*failing.detail.splitlines(), f"error: {failing}"]
    assert list(tmp_path.glob("penstock-pipeline-*")) == []


def test_a_next_step_of_its_own_goes_before_the_general_one(
    failing: DefinitionError,
) -> None:
    failing.detail = ""
    failing.args = (f"{failing}; next: mend what this names, and try again",)
    general = CliRunner().invoke(app, ["pipeline", "run"]).stderr.splitlines()
    assert general[1].startswith("next: start the cluster")
    failing.args = ("it failed: BootstrapError: of a kind; next: renew the certificate",)
    assert CliRunner().invoke(app, ["pipeline", "run"]).stderr.splitlines() == [
        "error: it failed: BootstrapError: of a kind",
        "next: renew the certificate",
    ]
