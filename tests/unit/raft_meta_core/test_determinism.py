"""The same log gives the same bytes: after a restart from a snapshot, and in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.v1 import cluster_pb2
from tests.unit.raft_meta_core import digest_histories
from tests.unit.raft_meta_core.digest_histories import Log, digests, outcomes, to_json
from tests.unit.raft_meta_core.histories import History, histories, play, versions
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id

HISTORIES = 60


@settings(max_examples=150, deadline=None)
@given(histories(), versions, st.sets(st.integers(0, 70)))
def test_a_controller_from_a_snapshot_goes_on_as_the_others(
    history: History, metadata_version: int, restarts: set[int]
) -> None:
    driver = Driver(metadata_version=metadata_version)
    play(history, driver)
    expected = outcomes(driver.log)
    assert expected[-1][0] == driver.state.snapshot()
    assert outcomes(driver.log, restarts) == expected
    assert outcomes(driver.log, range(len(driver.log))) == expected


@pytest.fixture(scope="module")
def logs() -> list[Log]:
    """Of many histories, and one of maps: they have no order, and every process its own."""
    collected = [_log_of_maps()]

    @settings(max_examples=HISTORIES, deadline=None, database=None, derandomize=True)
    @given(histories(), versions)
    def collect(history: History, metadata_version: int) -> None:
        driver = Driver(metadata_version=metadata_version)
        play(history, driver)
        collected.append(driver.log)

    collect()
    assert len(collected) > HISTORIES // 2
    return collected


def _log_of_maps() -> Log:
    driver = Driver(brokers=3)
    configs = {
        "segment.ms": "1",
        "retention.ms": "2",
        "retention.bytes": "3",
        "segment.bytes": "5000",
    }
    driver.create(partitions=3, replication_factor=3, **configs)
    for unknown in (False, True):
        wanted = {f"{key}.or.so" if unknown else key: "7000" for key in configs}
        driver.run(
            alter_topic_configs=cluster_pb2.AlterTopicConfigsCommand(topic="orders", set=wanted)
        )
    shared = {"log.min.free.bytes": "1", "broker.disconnect.grace.ms": "2", "no.such": "3", "x": ""}
    for count in (2, 4):
        driver.run(
            alter_cluster_configs=cluster_pb2.AlterClusterConfigsCommand(
                set=dict(list(shared.items())[:count])
            )
        )
    assert driver.state.topics[topic_id(1)].configs["segment.ms"] == "7000"
    assert len(driver.state.cluster_configs) == 2
    return driver.log


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "random"},
        {"PYTHONHASHSEED": "2", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
    ],
    ids=lambda environment: ",".join(environment.values()),
)
def test_every_process_comes_to_the_same_bytes(
    logs: list[Log], environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "logs.json"
    file.write_text(to_json(logs))
    done = subprocess.run(
        [sys.executable, digest_histories.__file__, str(file)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for log, expected, found in zip(logs, digests(logs), json.loads(done.stdout), strict=True):
        for (index, payload), here, there in zip(log, expected, found, strict=True):
            parts = ("state", "changes", "answer")
            differing = [n for n, a, b in zip(parts, here, there, strict=True) if a != b]
            assert not differing, (index, cluster_pb2.Command.FromString(payload))
