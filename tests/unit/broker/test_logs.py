"""The node's log lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_LOGS = """
import structlog
from penstock.broker.logs import configure_logs
configure_logs("{format}", "info", node=1)
log = structlog.get_logger()
for _ in range(3):
    log.error("no room", reason="x" * 10_000)
try:
    raise ValueError
except ValueError:
    log.exception("failed")
print("still here", flush=True)
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_line_that_finds_no_room_stops_nothing(log_format: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", _LOGS.format(format=log_format)],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert done.stdout == b"still here\n"
