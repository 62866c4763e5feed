"""The node's log lines."""

from __future__ import annotations

import json
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


_OF_LIBRARIES = """
import asyncio, logging, structlog
from penstock.broker.logs import bind_in_json, configure_logs
configure_logs("{format}", "info", node=7)
structlog.get_logger().info("before")
bind_in_json(cluster="abc")
structlog.get_logger().info("after")
async def fails():
    raise ValueError("in a task")
async def main():
    asyncio.get_running_loop().create_task(fails())
    await asyncio.sleep(0)
asyncio.run(main())
logging.getLogger("grpc").warning("of %s", "two\\nlines")
"""


def lines_of(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _OF_LIBRARIES.format(format=log_format)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr.splitlines()


def test_in_json_each_line_is_an_object_that_says_of_which_node_and_cluster_it_is() -> None:
    before, after, of_asyncio, of_grpc = map(json.loads, lines_of("json"))
    assert (before["node"], "cluster" in before) == (7, False), "it was not known yet"
    assert (after["node"], after["cluster"]) == (7, "abc")
    for line in (of_asyncio, of_grpc):
        assert (line["node"], line["cluster"]) == (7, "abc")
        assert "timestamp" in line
    assert (of_asyncio["level"], of_asyncio["logger"]) == ("error", "asyncio")
    assert "ValueError: in a task" in of_asyncio["exception"]
    assert (of_grpc["level"], of_grpc["event"]) == ("warning", "of two\nlines")


def test_on_the_console_lines_of_libraries_are_as_ours() -> None:
    text = "\n".join(lines_of("console"))
    of_asyncio = text[text.index("[error") :]
    assert "[asyncio] node=7" in of_asyncio
    assert of_asyncio.count("ValueError: in a task") == 1
    assert "cluster=" not in text, "who reads it knows where it is"
