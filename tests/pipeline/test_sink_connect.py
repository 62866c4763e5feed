"""The sink in the ``foreachBatch`` of a driver that is a client of Spark Connect."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.cluster import environment_without_penstock
from tests.pipeline.logs import repeated
from tests.pipeline.pipe import ROWS, Pipe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def run(pipe: Pipe, url: str, **more: Any) -> subprocess.CompletedProcess[str]:
    told = {
        "url": url,
        "source": str(pipe.source),
        "checkpoint": str(pipe.checkpoint),
        "options": pipe.options(),
        "crash_at": -1,
        **more,
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.pipeline.connect_job", json.dumps(told)],
        env=environment_without_penstock(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("name", ["orders", ""])
def test_a_batch_is_repeated(pipe: Pipe, connect_url: str, name: str) -> None:
    pipe.feed(2)
    failed = run(pipe, connect_url, name=name, crash_at=1)
    assert failed.returncode != 0
    assert "fails behind the write" in failed.stderr
    pipe.feed(1)
    done = run(pipe, connect_url, name=name)
    assert done.returncode == 0, done.stderr
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    # Without a name a repetition is a write like any other: Spark says nothing of the query there.
    assert len(repeated(found)) == (0 if name else ROWS)
