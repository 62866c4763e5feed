from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.ports import free_ports
from tests.pipeline.projects import SPARK_TIMEOUT_S, Project, files_project
from tests.support import wait_until

# Each starts several commands, and some of them a Spark of their own.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def project(tmp_path: Path, connect_url: str) -> Project:
    return files_project(tmp_path / "project", connect_url)


def test_runs_of_either_kind_go_on_where_the_last_one_stopped(project: Project) -> None:
    project.write("1", "hi", "one", "two")
    out = project.ok("run")
    assert "Run is COMPLETED." in out
    assert "no output of the command" not in out
    assert project.written() == ["ONE", "TWO"]

    project.write("2", "three")
    project.ok("run", "--output", "json")
    assert project.written() == ["ONE", "THREE", "TWO"]

    with project.running("--interval", "100 milliseconds") as process:
        project.write("3", "four")
        wait_until(lambda: "FOUR" in project.written(), "it is written", SPARK_TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SPARK_TIMEOUT_S) == 0

    project.write("4", "five")
    project.ok("run")
    assert project.written() == ["FIVE", "FOUR", "ONE", "THREE", "TWO"]


def test_a_continuous_run_goes_on_from_the_last_full_refresh(project: Project) -> None:
    project.write("1", "one")
    project.ok("run")
    project.ok("run", "--full-refresh-all")
    with project.running() as process:
        project.write("2", "two")
        wait_until(lambda: "TWO" in project.written(), "it is written", SPARK_TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(SPARK_TIMEOUT_S) == 0
    checkpoints = project.directory / "storage" / "_checkpoints" / "out" / "upper"
    first, second = (
        sorted(path.name for path in (checkpoints / number / "offsets").glob("[0-9]*"))
        for number in ("0", "1")
    )
    assert (first, second) == (["0"], ["0", "1"])


def test_on_this_machine_a_signal_to_all_processes_ends_it_cleanly(
    tmp_path: Path, connect_url: str
) -> None:
    # As systemd stops a service: Spark's Java process gets the signal as well.
    project = files_project(tmp_path / "project")
    with project.running() as process:
        project.write("1", "one")
        wait_until(lambda: project.written() == ["ONE"], "it is written", SPARK_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(SPARK_TIMEOUT_S) == 0, (project.directory / "run.log").read_text()
    project.write("2", "two")
    replace(project, remote=connect_url).ok("run")
    assert project.written() == ["ONE", "TWO"]


def test_the_graph_shows_what_flows_where(project: Project) -> None:
    found = json.loads(project.ok("graph", "--format", "json"))
    source = f"text file:{project.directory}/in"
    source = (
        source
        if source in {edge["from"] for edge in found["edges"]}
        else source.replace("file:", "")
    )
    assert {(edge["from"], edge["to"]) for edge in found["edges"]} == {
        (source, "lines"),
        ("lines", "some"),
        ("some", "long_ones"),
        ("long_ones", "out"),
    }
    assert {one["name"]: one["kind"] for one in found["datasets"]} == {
        "lines": "view",
        "some": "view",
        "long_ones": "view",
        "out": "sink",
    }
    assert project.ok("graph", "--format", "dot").startswith("digraph pipeline {")


def test_a_valid_project_is_called_so_and_nothing_runs(project: Project) -> None:
    project.write("1", "one")
    assert "the project is valid" in project.ok("validate")
    assert not (project.directory / "out").exists()
    assert not (project.directory / "storage").exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("CREATE TEMPORARY VIEW long_ones AS SELECT * FROM STREAM nowhere;", "nowhere"),
        ("CREATE TEMPORARY VIEW long_ones AS SELEKT 1;", "SELEKT"),
    ],
)
def test_what_is_wrong_with_a_project_is_named(project: Project, text: str, complaint: str) -> None:
    (project.directory / "transformations" / "views.sql").write_text(text)
    done = project.call("validate")
    assert done.returncode == 1
    assert complaint in done.stderr
    error, step = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert step.startswith("next: ")
    assert "Traceback" not in done.stderr


def test_a_flow_that_no_broker_answers_is_tried_twice_and_told_in_lines(tmp_path: Path) -> None:
    # On this machine, so that what Spark itself writes is seen as well.
    project = files_project(tmp_path / "project")
    (port,) = free_ports(1)
    source = (
        f'spark.readStream.format("penstock").option("subscribe", "lines")'
        f'.option("penstock.bootstrap.servers", "127.0.0.1:{port}")'
        f'.option("penstock.bootstrap.timeout.ms", "1000").load()'
    )
    path = project.directory / "transformations" / "topics.py"
    written = path.read_text().replace("def upper()", "def Upper()")
    before = f'spark.readStream.format("text").load("{project.directory}/in")'
    assert before in written
    path.write_text(written.replace(before, f'{source}.selectExpr("CAST(value AS STRING)")'))
    done = project.call("run")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert not [line for line in said.splitlines() if line.startswith(("\tat ", "  File "))]
    assert done.stdout.count("has FAILED") == 2
    error, step = [line for line in done.stderr.splitlines() if line.startswith(("error", "next"))]
    assert error.startswith("error: the run failed: Flow 'Upper' has FAILED. BootstrapError: ")
    assert f"127.0.0.1:{port}: connection refused" in error
    assert step.startswith("next: start the cluster, or correct its address")
    (kept,) = project.directory.glob("penstock-pipeline-*.log")
    assert str(kept) in step
    assert "Traceback" in kept.read_text()


def test_a_server_that_is_not_there_is_named_without_its_token(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"sc://127.0.0.1:{port}"
    project = files_project(tmp_path / "project", f"{address}/;token=secret;use_ssl=true")
    done = project.call("validate")
    assert done.returncode == 1
    error, step = done.stderr.splitlines()
    assert error.startswith(f"error: no Spark Connect server answers at {address}: ")
    assert step.startswith("next: see that it runs")


def test_a_table_is_filled_by_triggered_runs_alone(project: Project) -> None:
    with (project.directory / "transformations" / "views.sql").open("a") as file:
        file.write("CREATE STREAMING TABLE kept AS SELECT * FROM STREAM lines;")
    done = project.call("run", "--continuous")
    assert done.returncode == 1
    assert "kept (table)" in done.stderr
    assert "without --continuous" in done.stderr
