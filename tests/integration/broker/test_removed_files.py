"""Somebody removes the directory of one partition under a running node: only that one suffers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.client import AdminClient, Producer
from penstock.client.descriptions import PartitionDescription
from tests.integration.cluster import running_cluster
from tests.integration.raw import read_all
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0


def test_a_removed_partition_directory_takes_down_its_replica_until_the_restart(
    tmp_path: Path,
) -> None:
    with (
        running_cluster(tmp_path, settings={"leader.imbalance.enable": False}) as cluster,
        AdminClient(cluster.bootstrap) as admin,
        Producer(cluster.bootstrap, acks="all") as producer,
    ):
        admin.create_topic(
            "t", replica_assignments=[[1, 2, 3], [1, 2, 3]], configs={"segment.bytes": "4096"}
        )
        values: list[bytes] = []

        def produce() -> None:
            values.append(b"value %d " % len(values) + b"x" * 1500)
            for partition in (0, 1):
                producer.send("t", values[-1], partition=partition).result(TIMEOUT_S)

        def partitions() -> tuple[PartitionDescription, ...]:
            return admin.describe_topics(["t"])[0].partitions

        def is_offline() -> bool:
            produce()  # Whoever begins a segment there finds out, and others lead.
            return 1 in partitions()[0].offline

        for _ in range(4):
            produce()
        node = cluster.nodes[1]
        shutil.rmtree(node.partition_directory("t", 0))
        wait_until(is_offline, "it is offline", TIMEOUT_S)
        wait_until(lambda: set(partitions()[0].isr) == {2, 3}, "others are in sync", TIMEOUT_S)
        assert partitions()[0].leader in {2, 3}
        assert (partitions()[1].leader, partitions()[1].offline) == (1, ())
        said = node.log.read_text()
        assert said.count("partition_files_removed") == 1
        assert "data_directory_failed" not in said
        assert "Traceback" not in said
        node.stop()
        cluster.start()
        wait_until(
            lambda: all(set(one.isr) == {1, 2, 3} for one in partitions()),
            "every replica is in sync",
            TIMEOUT_S,
        )
        produce()
        for partition in (0, 1):
            assert [record.value for record in read_all(cluster, "t", partition)] == values
        copies = [
            [
                path.read_bytes()
                for path in sorted(cluster.nodes[n].partition_directory("t", 0).glob("*.log"))
            ]
            for n in (1, 2)
        ]
        assert b"".join(copies[0]) == b"".join(copies[1]), "it is copied anew"
