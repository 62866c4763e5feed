"""The tools of the command against a cluster of `penstock dev`: bench."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.cli.dev_cluster import COMMAND, DevCluster
from tests.integration.cluster import environment_without_penstock

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    cluster = DevCluster(tmp_path_factory.mktemp("tools") / "data", 27_300)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


# --- penstock bench -------------------------------------------------------------------------------


def test_writing_is_measured_and_leaves_nothing(dev: DevCluster) -> None:
    figures = dev.json("bench", "produce", "--records", "3000", "--size", "50", "--linger-ms", "1")
    assert (figures["records"], figures["errors"]) == (3000, 0)
    assert figures["records_per_s"] > 0
    assert figures["mb_per_s"] == pytest.approx(figures["records_per_s"] * 50 / 1e6, rel=0.05)
    assert figures["cpu_s_per_million"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert dev.json("topics", "list") == []


@pytest.mark.parametrize("mode", ["iterate", "poll", "poll_batch"])
def test_reading_is_measured(dev: DevCluster, mode: str) -> None:
    figures = dev.json("bench", "consume", "--mode", mode, "--records", "2000", "--size", "30")
    assert (figures["records"], figures["mode"]) == (2000, mode)
    assert figures["mb_per_s"] == pytest.approx(figures["records_per_s"] * 30 / 1e6, rel=0.05)
    assert dev.json("topics", "list") == []


def test_a_topic_that_is_there_is_read_as_it_is(dev: DevCluster) -> None:
    dev.ok("topics", "create", "kept", "--partitions", "2")
    dev.ok("bench", "produce", "--topic", "kept", "--records", "100", "--size", "10")
    # One record to each partition warmed up.
    assert dev.json("bench", "consume", "--topic", "kept", "--mode", "poll")["records"] == 102
    dev.ok("topics", "delete", "kept")


def test_ctrl_c_prints_what_was_measured_so_far(dev: DevCluster) -> None:
    command = ("bench", "latency", "--records", "100000", "--rate", "100", "--output", "json")
    running = subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
    )
    assert running.stderr is not None
    # The first line of its progress.
    assert b" of 100,000 records" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    figures = json.loads(out)
    assert 100 <= figures["records"] < 100_000
    assert (figures["errors"], figures["unacknowledged"]) == (0, 0)
    assert figures["longest_gap_ms"] > 0
    assert dev.json("topics", "list") == []
