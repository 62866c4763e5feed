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


_BROKEN_CONNECTION = """
import logging
from grpc._cython import cygrpc
from penstock.broker.logs import configure_logs
configure_logs("console", "info", node=1)
for raised in (cygrpc.ExecuteBatchError("no status"), KeyError("a fault")):
    try:
        raise raised
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("raised by a servicer method")
"""


def test_of_grpcs_tracebacks_those_of_broken_connections_are_left_out() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BROKEN_CONNECTION], capture_output=True, timeout=60, check=True
    )
    assert b"KeyError: 'a fault'" in done.stderr
    assert done.stderr.count(b"Traceback") == 1
