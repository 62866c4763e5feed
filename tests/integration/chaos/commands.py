"""`penstock chaos` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.cluster import environment_without_penstock

COMMAND = [sys.executable, "-m", "penstock.cli", "chaos"]
RUN_S = 300.0


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What it printed for programs."""
        return json.loads(self.stdout)

    def verdict_of(self, checker: str) -> dict[str, Any]:
        """What one checker said."""
        found: dict[str, Any] = next(
            one for one in self.json["verdicts"] if one["checker"] == checker
        )
        return found


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Run a command of `penstock chaos`, and go on."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_without_penstock(),
    )


def finish(process: subprocess.Popen[str]) -> Finished:
    """How it ends."""
    stdout, stderr = process.communicate(timeout=RUN_S)
    return Finished(process.returncode, stdout, stderr)


def chaos(*arguments: str | Path) -> Finished:
    """Run a command of `penstock chaos` to its end."""
    return finish(start(*arguments))


def write_schedule(path: Path, faults: Sequence[tuple[int, int, str, str]]) -> Path:
    """A schedule of (at_ms, hold_ms, nemesis, target)."""
    entries = [
        {
            "at_ms": at_ms,
            "hold_ms": hold_ms,
            "fault": {"nemesis": name, "kind": name, "target": target, "parameters": {}},
        }
        for at_ms, hold_ms, name, target in faults
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path
