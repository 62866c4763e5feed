"""A node whose local state (``.state``) is damaged says so, and what it says to do works."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.client import AdminClient, Producer
from tests.integration.cluster import Cluster, NodeProcess, running_cluster
from tests.integration.raw import read_all
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
VALUES = [f"value {number}".encode() for number in range(20)]


def make_and_fill(cluster: Cluster, replicas: list[int]) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", replica_assignments=[replicas])
    with Producer(cluster.bootstrap, acks="all") as producer:
        for value in VALUES:
            producer.send("t", value).result(TIMEOUT_S)


def damage(node: NodeProcess) -> Path:
    """Garbage in all pages of the node's local state but the first two; where that is."""
    state = node.directory / "logs" / ".state"
    data = (state / "data.mdb").read_bytes()
    (state / "data.mdb").write_bytes(data[:8192] + b"\0" * (len(data) - 8192))
    return state


def start_in_vain(node: NodeProcess) -> str:
    """What a node says that does not start."""
    before = node.log.stat().st_size
    node.start()
    assert node.process is not None
    assert node.process.wait(TIMEOUT_S) == 2
    return node.log.read_bytes()[before:].decode()


@pytest.mark.parametrize("replicas", [[1], [1, 2]])
def test_what_a_node_with_damaged_local_state_says_to_do_works(
    tmp_path: Path, replicas: list[int]
) -> None:
    with running_cluster(tmp_path / "cluster", 1 if replicas == [1] else 3) as cluster:
        make_and_fill(cluster, replicas)
        node = cluster.nodes[1]
        node.stop()
        state = damage(node)
        said = start_in_vain(node)
        assert f"; next: move {state} away" in said
        assert "never retrieved" not in said
        assert "Traceback" not in said
        state.rename(tmp_path / "away")
        cluster.start()
        assert "local_state_missing" in node.log.read_text()
        wait_until(
            lambda: set(cluster.topic("t").partitions[0].isr) == set(replicas),
            "every replica is in sync",
            TIMEOUT_S,
        )
        for other in replicas[1:]:
            cluster.nodes[other].stop()
        assert [record.value for record in read_all(cluster, "t")] == VALUES, "it has all of it"
