"""Drivers and brokers that are killed while the sink writes: nothing lost, nothing twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import Cluster
from tests.integration.transacting import coordinator_of
from tests.pipeline import failing
from tests.pipeline.crash_loop import Round, faults_of, workers_below
from tests.pipeline.pipe import Pipe
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SEED = 3
"""Of a round that kills a coordinator and its driver, with a write in foreachBatch."""


def test_a_driver_that_is_killed_at_the_commit(pipe: Pipe) -> None:
    pipe.feed(2)
    for moment in (failing.DRIVER_BEFORE_COMMIT, failing.DRIVER_AFTER_COMMIT):
        assert pipe.run_driver(pipe.failing(moment)) == -signal.SIGKILL
    assert len(pipe.failed) == 2
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    assert pipe.read() == pipe.wanted


@pytest.mark.usefixtures("small_batches")
def test_brokers_that_are_killed_at_every_step_of_a_batch(pipe: Pipe) -> None:
    schedule = [
        ("leader", failing.IN_WRITE),
        ("coordinator", failing.IN_WRITE),
        ("coordinator", failing.BEFORE_COMMIT),
        ("coordinator", failing.ANSWER_LOST),
        ("leader", failing.ANSWER_LOST),
        ("leader", failing.COMMITTED),
    ]
    pipe.feed(len(schedule) + 1)
    query_id = str(uuid.uuid4())
    pipe.begin_as(query_id)
    moments = json.dumps([moment for _, moment in schedule])
    options = pipe.options(marks=str(pipe.marks), schedule=moments)
    query = pipe.start(pipe.to_sink("penstock-failing", options))
    cluster = pipe.cluster
    try:
        for batch, (whom, _) in enumerate(schedule):
            wait_until(
                lambda batch=batch: (
                    failing.scheduled(pipe.marks, batch).exists() or not query.isActive
                ),
                f"batch {batch} comes to its moment",
                120.0,
            )
            assert query.isActive, query.exception()
            if whom == "leader":
                number = cluster.topic(pipe.topic).partitions[batch % 2].leader
            else:
                number = coordinator_of(cluster, f"spark-{query_id}-{pipe.topic}")
            process = cluster.nodes[number].process
            assert process is not None
            failing.order_death(pipe.marks, batch, process.pid)
            assert process.wait(120) == -signal.SIGKILL
            cluster.start()
        assert query.awaitTermination(180)
    finally:
        query.stop()
        cluster.start()
    assert str(query.id) == query_id
    assert pipe.read() == pipe.wanted


def test_a_round_of_random_kills(penstock_cluster: Cluster, tmp_path: Path) -> None:
    one = Round(penstock_cluster, tmp_path / "round", SEED, "exactly-once", batches=4, kills=2)
    faults = one.run()
    assert not faults, f"{one}: {faults}; again by: make pipeline-crashes ROUNDS=1 SEED={SEED}"


def test_a_worker_is_found_beside_one_that_has_ended() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "pyspark.daemon"]
    ended, running = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
    try:
        ended.kill()
        here = psutil.Process()
        wait_until(
            lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, "it has ended"
        )
        assert running.pid in {one.pid for one in workers_below(here)}
        assert ended.pid not in {one.pid for one in workers_below(here)}
    finally:
        for process in (ended, running):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("found", "killed", "exact", "faults"),
    [
        (["a", "b"], ["(ended -9)", "worker@1"], True, []),
        (["a", "b"], ["(ended -9)"], True, ["nobody was killed"]),
        (["a", "b"], [], True, ["nobody was killed"]),
        (["a", "a", "b"], ["driver@1"], True, ["which nothing may be"]),
        (["a", "a", "b"], ["driver@1"], False, []),
        (["a", "b"], ["driver@1"], False, ["which some have to be"]),
        (["a"], ["driver@1"], True, ["1 are lost: ['b']"]),
        (["a", "b", "c"], ["driver@1"], True, ["1 were never written: ['c']"]),
    ],
)
def test_what_is_wrong_with_a_round(
    found: list[str], killed: list[str], exact: bool, faults: list[str]
) -> None:
    assert faults_of(["a", "b"], found, killed, exact=exact) == faults
