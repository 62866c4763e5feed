"""A client's trace: what is taken for one, and whose lines have it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from penstock.raft_meta import tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


def test_the_trace_is_found_among_metadata() -> None:
    metadata = (("user-agent", "x"), ("traceparent", TRACEPARENT), ("other", b"\x00"))
    assert tracing.carried(metadata) == TRACEPARENT
    assert tracing.carried((("user-agent", "x"),)) == ""
    assert tracing.carried(None) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "rubbish",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        b"bytes",
    ],
)
def test_what_is_no_valid_trace_is_ignored(wrong: object) -> None:
    assert tracing.carried((("traceparent", wrong),)) == ""


def test_a_later_version_may_say_more() -> None:
    later = f"01-{TRACE}-{SPAN}-01-what-is-to-come"
    assert tracing.carried((("traceparent", later),)) == later


async def test_work_is_of_the_trace_while_its_call_lasts() -> None:
    assert tracing.outgoing() is None
    ended = asyncio.Event()

    async def outlives() -> tuple[str, str]:
        before = tracing.current()
        await ended.wait()
        return before, tracing.current()

    with tracing.working_for(TRACEPARENT):
        assert tracing.outgoing() == (("traceparent", TRACEPARENT),)
        assert tracing.log_fields() == {"trace_id": TRACE, "span_id": SPAN}
        task = asyncio.create_task(outlives())
        await asyncio.sleep(0)
    ended.set()
    # Such a task goes on for others: its lines are not this call's any more.
    assert await task == (TRACEPARENT, "")
    assert tracing.log_fields() == {}


_LOGS = f"""
import structlog
from penstock.broker.logs import configure_logs
from penstock.raft_meta import tracing
configure_logs("json", "info", node=7)
log = structlog.get_logger()
with tracing.working_for("{TRACEPARENT}"):
    log.info("of a call", partition="old-orders-12", directory="/d")
log.info("of none", topic="a-1", partition=3)
log.info("no partition", partition="three")
"""


def test_a_line_has_the_names_of_labels_and_the_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOGS], capture_output=True, timeout=60, check=True
    )
    first, second, third = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["node"], first["topic"], first["partition"]) == (7, "old-orders", 12)
    assert (first["trace_id"], first["span_id"]) == (TRACE, SPAN)
    assert (second["topic"], second["partition"]) == ("a-1", 3)
    assert "trace_id" not in second
    assert third["partition"] == "three"
