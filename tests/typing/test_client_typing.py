"""The client's types, from a user's side: what must check does, what must not does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def check(*files: Path) -> subprocess.CompletedProcess[str]:
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
    )


def test_what_users_write_checks_under_mypy_strict() -> None:
    # Every line that must not check carries an ignore, and an unused ignore is an error.
    result = check(HERE / "client_usage.py")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_examples_check_under_mypy_strict() -> None:
    result = check(*sorted((ROOT / "examples").rglob("*.py")))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_python_of_the_guide_checks_under_mypy_strict(tmp_path: Path) -> None:
    text = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    program = tmp_path / "guide.py"
    program.write_text("\n\n".join(blocks), encoding="utf-8")
    result = check(program)
    assert result.returncode == 0, result.stdout + result.stderr
