"""The README's first command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.cluster import environment_without_penstock

pytestmark = pytest.mark.integration


def test_the_demo_loses_and_doubles_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.demo"],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment_without_penstock(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing was lost, nothing was duplicated, and the counts agree" in result.stdout
    assert result.stderr == ""
