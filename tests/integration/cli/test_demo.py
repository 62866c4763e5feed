"""The README's first command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        while b"two members share" not in (line := process.stdout.readline()):
            assert line
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 128 + number
    assert errors == b"stopped; the nodes and their data are gone\n"
    assert list(tmp_path.iterdir()) == []
