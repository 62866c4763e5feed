"""How `penstock chaos` ends where nothing can be said: never with the 1 of a broken promise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.checkers import Evidence
from penstock.chaos.evidence import write_evidence
from penstock.chaos.judging import Judgement, write_judgement
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.verdict import Valid, Verdict
from penstock.cli.chaos import commands
from penstock.wire.errors import LeaderNotAvailableError
from tests.unit.chaos.test_registers import Registers
from tests.unit.cli.test_chaos import chaos


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The directory of a run of registers."""
    script = Registers()
    script.write(1)
    script.read(1, final=True)
    RunPlan("register", "", 3, 10, 7, 100, 5).write(tmp_path)
    script.history.write(tmp_path / "history.jsonl")
    write_evidence(Evidence(logs={1: []}), tmp_path / "evidence")
    write_judgement(Judgement([Verdict("recovery", Valid.TRUE, 1)]), tmp_path)
    return tmp_path


def test_a_run_that_was_is_judged_again(stored: Path) -> None:
    assert chaos("check", stored).exit_code == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("evidence/crashes.json", ""),
        ("evidence/crashes.json", "[]"),
        ("evidence/samples.jsonl", "{}\n"),
        ("evidence/replicas.jsonl", "{}\n"),
        ("evidence/watermarks.jsonl", "x\n"),
        ("faults.jsonl", "{}\n"),
    ],
)
@pytest.mark.parametrize("command", ["check", "report"])
def test_evidence_that_is_none_is_named(stored: Path, name: str, text: str, command: str) -> None:
    (stored / name).write_text(text, encoding="utf-8")
    done = chaos(command, stored)
    assert done.exit_code == 3
    assert f"error: {stored / name} is no evidence of a run (" in done.stderr
    assert "Error(" not in done.stderr
    (stored / name).unlink()
    assert chaos(command, stored).exit_code == 0


def test_a_history_without_its_run_is_judged_alone(stored: Path) -> None:
    (stored / "plan.json").unlink()
    done = chaos("check", stored)
    assert done.exit_code == 2
    assert f"next: `penstock chaos check {stored / 'history.jsonl'}`" in done.stderr
    assert chaos("check", stored / "history.jsonl").exit_code == 0


def test_a_history_that_cannot_be_read_is_named(stored: Path) -> None:
    (stored / "history.jsonl").unlink()
    (stored / "history.jsonl").mkdir()
    done = chaos("check", stored)
    assert done.exit_code == 3
    assert "history.jsonl cannot be read (Is a directory)" in done.stderr


def test_a_schedule_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = chaos("run", "--schedule", tmp_path / "nope.json", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "nope.json is no schedule of faults (No such file or directory)" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [("file", "it is no directory"), ("file/run", "cannot be made (Not a directory)")],
)
def test_a_directory_that_cannot_be_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "file").write_text("dear diary", encoding="utf-8")
    done = chaos("run", "--out", tmp_path / name)
    assert done.exit_code == 2
    assert what in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ValueError("the moon is full"), "the harness broke: ValueError: the moon is full"),
        (OSError(28, "No space left on device", "/here"), "/here: No space left on device"),
        (LeaderNotAvailableError("nobody answers"), "nobody answers"),
    ],
)
def test_whatever_is_raised_is_no_broken_promise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, what: str
) -> None:
    def carry_out(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "carry_out", carry_out)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = chaos("run", "--out", tmp_path / "run")
    assert done.exit_code == 3
    assert f"error: {what}" in done.stderr
    assert "Traceback" not in done.stderr
    kept = [path.read_text(encoding="utf-8") for path in tmp_path.glob("penstock-chaos-*.log")]
    assert len(kept) == isinstance(error, ValueError)
    assert all("in carry_out" in text for text in kept)


def test_what_the_harness_lacks_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an image of nodes, which has no need of it."""

    def carry_out(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'orjson'", name="orjson")

    monkeypatch.setattr(commands, "carry_out", carry_out)
    monkeypatch.setitem(sys.modules, "orjson", None)
    done = chaos("run", "--out", tmp_path / "run")
    assert done.exit_code == 3
    assert "error: the harness needs packages that are not installed: orjson" in done.stderr
    assert 'next: pip install "penstock[chaos]"' in done.stderr


def test_a_plan_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    done = chaos("run", "--nemesis", "lossy", "--out", out)
    assert done.exit_code == 2
    assert "lossy needs packets" in done.stderr
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    assert chaos("run", "--nemesis", "lossy", "--out", out).exit_code == 2
    assert list(out.iterdir()) == []
