"""The client's types, from a user's side: what must check does, what must not does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_what_users_write_checks_under_mypy_strict() -> None:
    # Every line that must not check carries an ignore, and an unused ignore is an error.
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--warn-unused-ignores",
            "--config-file",
            str(HERE.parent.parent / "pyproject.toml"),
            str(HERE / "client_usage.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=HERE.parent.parent,
    )
    assert result.returncode == 0, result.stdout + result.stderr
