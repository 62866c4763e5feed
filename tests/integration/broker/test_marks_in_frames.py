"""Marks between real nodes: by frames by default, by calls with nodes that have nothing else."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from penstock.cli.certificates import Authority
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import create_topic, leader_address
from tests.integration.transacting import Producer, committed, coordinator_of, describe, given
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BY_CALLS = 'replication.transport = "grpc"'


def go_in_frames(cluster: Cluster, node_id: int) -> list[int]:
    """The leaders that a node has brought marks in frames, in the order of the connections."""
    lines = cluster.nodes[node_id].log.read_text().splitlines()
    return [
        leader
        for line in lines
        for leader in cluster.nodes
        if "marks go in frames" in line and f"leader={leader} " in line
    ]


def transact(cluster: Cluster, producer: Producer, topic: str, number: int) -> None:
    """One transaction over three partitions, which all three nodes lead."""
    for partition in range(3):
        assert producer.send(topic, [b"%d" % number], partition) is None
    given(producer.end(commit=True))
    for partition in range(3):  # Behind the marks, which these see.
        expected = [b"%d" % one for one in range(number + 1)]
        assert committed(cluster, topic, partition) == expected


@pytest.mark.parametrize("secure", [False, True])
def test_nodes_that_learn_to_take_marks_in_frames_one_by_one(tmp_path: Path, secure: bool) -> None:
    cluster = Cluster(tmp_path, authority=Authority() if secure else None)
    try:
        for node_id in (1, 2, 3):
            with cluster.nodes[node_id].config.open("a") as file:
                file.write(f"{BY_CALLS}\n")
        cluster.start()
        cluster.wait_ready()
        create_topic(cluster, "orders", 3)
        producer = Producer(cluster, "writer")
        given(producer.init())
        transact(cluster, producer, "orders", 0)
        assert not any(go_in_frames(cluster, node_id) for node_id in cluster.nodes)
        for number, node_id in enumerate(cluster.nodes, 1):
            node = cluster.nodes[node_id]
            node.config.write_text(node.config.read_text().replace(BY_CALLS, ""))
            node.stop()
            node.start()
            cluster.wait_ready()
            transact(cluster, producer, "orders", number)
        number = len(cluster.nodes)

        def all_used() -> bool:
            nonlocal number
            number += 1
            transact(cluster, producer, "orders", number)
            others = set(cluster.nodes) - {coordinator_of(cluster, "writer")}
            found = go_in_frames(cluster, coordinator_of(cluster, "writer"))
            return others <= set(found)

        wait_until(all_used, "its coordinator has connections to both others", 60)
        assert describe(cluster, "writer").state
    finally:
        cluster.close()


def test_marks_outlive_the_connections_that_carry_them(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "orders", 3, configs={"min.insync.replicas": "2"})
        producer = Producer(cluster, "writer")
        given(producer.init())
        number = 0
        transact(cluster, producer, "orders", number)
        coordinator = coordinator_of(cluster, "writer")

        def both_used() -> bool:
            nonlocal number
            number += 1
            transact(cluster, producer, "orders", number)
            return len(go_in_frames(cluster, coordinator)) == 2

        wait_until(both_used, "its coordinator has connections to both others", 60)
        # The leader stands still with the marks of the next transaction in its sockets, and dies.
        [victim, *_] = [
            node
            for partition in range(3)
            for node in cluster.nodes.values()
            if node.address == leader_address(cluster, "orders", partition)
            and node.node_id != coordinator
        ]
        for partition in range(3):
            assert producer.send("orders", [b"%d" % (number + 1)], partition) is None
        victim.signal(signal.SIGSTOP)
        given(producer.end(commit=True))
        victim.kill()
        whole = [b"%d" % one for one in range(number + 2)]
        for partition in range(3):  # A new leader knows the high watermark a moment later.
            wait_until(
                lambda partition=partition: committed(cluster, "orders", partition) == whole,
                "the transaction is there",
            )
        victim.start()
        cluster.wait_ready()
        transact(cluster, producer, "orders", number + 2)
