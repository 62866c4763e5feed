"""`penstock chaos run --backend`: what cannot be is said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.chaos.backends import containers
from penstock.chaos.run_plan import RunPlan, read_plan
from penstock.cli.app import app
from tests.unit.chaos.fake_engine import FakeEngine


def chaos_run(directory: Path, *arguments: str) -> Any:
    words = ["chaos", "run", "--out", str(directory / "run"), "--nemesis", "kill", *arguments]
    return CliRunner().invoke(app, words)


def sets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--backend-set", text)]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--backend", "local", *sets("image=x")], "backend local has no option 'image'"),
        (["--backend", "docker", *sets("colour=red")], "take of image"),
        (["--backend", "docker", *sets("image")], "KEY=VALUE is wanted"),
        (["--backend", "docker"], "no container engine answers"),
        (["--backend", "kubernetes"], "where do clients begin?"),
        (["--backend", "kubernetes", *sets("bootstrap=b:1")], "run it in a pod"),
        (["--backend", "kubernetes", *sets("bootstrap=b:1", "api=b")], "is no address of an API"),
        (["--backend", "kubernetes", *sets("bootstrap=b:1", "first-id=x")], "is no number"),
        (
            [
                *("--backend", "kubernetes", "--bug", "retries-are-appended-again"),
                *sets("bootstrap=b:1"),
            ],
            "the nodes run already, without a bug",
        ),
        (
            [
                *("--backend", "kubernetes"),
                *sets("bootstrap=b:1", "api=http://127.0.0.1:9"),
            ],
            "127.0.0.1:9 does not answer",
        ),
    ],
)
def test_what_cannot_be_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], what: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    done = chaos_run(tmp_path, *arguments)
    assert done.exit_code in (2, 3)
    # Lines of usage are wrapped in a frame.
    assert what in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_a_network_that_cannot_be_broken_is_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine()
    engine.probe_says = "No such file or directory: 'iptables'"
    monkeypatch.setattr(containers, "DockerEngine", lambda: engine)
    done = chaos_run(tmp_path, "--backend", "docker", "--nemesis", "lossy")
    assert done.exit_code == 2
    assert "cannot be broken here: No such file or directory: 'iptables'" in done.output
    assert (engine.specs, engine.closed) == ({}, True)
    assert not (tmp_path / "run").exists()


def test_options_of_a_backend_are_part_of_the_plan(tmp_path: Path) -> None:
    plan = RunPlan(
        *("append", "kill", 3, 10.0, 7, 100.0, 5.0),
        backend="docker",
        backend_options={"image": "penstock:1"},
    )
    assert plan.command().endswith("--backend docker --backend-set image=penstock:1")
    plan.write(tmp_path)
    assert read_plan(tmp_path) == plan
