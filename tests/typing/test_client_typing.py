"""The client's types, from a user's side: what must check does, what must not does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def check(*files: Path, beside: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``beside`` has modules that the files import as a program's own directory has."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--warn-unused-ignores",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            *map(str, files),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(beside or "")},
    )


def test_what_users_write_checks_under_mypy_strict() -> None:
    # Every line that must not check carries an ignore, and an unused ignore is an error.
    result = check(HERE / "client_usage.py")
    assert result.returncode == 0, result.stdout + result.stderr


PROGRAMS = [ROOT / "examples/pipelines" / name for name in ("access_log", "cloud_metrics")]
"""Examples of several modules each, which only their own program finds."""


def test_the_examples_check_under_mypy_strict() -> None:
    files = sorted((ROOT / "examples").rglob("*.py"))
    result = check(*[file for file in files if file.parent not in PROGRAMS])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_examples_of_several_modules_check_under_mypy_strict(program: Path) -> None:
    result = check(*sorted(program.glob("*.py")), beside=program)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_python_of_the_guide_checks_under_mypy_strict(tmp_path: Path) -> None:
    text = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    program = tmp_path / "guide.py"
    program.write_text("\n\n".join(blocks), encoding="utf-8")
    result = check(program)
    assert result.returncode == 0, result.stdout + result.stderr
