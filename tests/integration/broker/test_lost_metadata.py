"""Metadata that is lost takes no records with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.cluster import NodeProcess, running_cluster
from tests.integration.raw import create_topic, produce, read_all
from tests.support import wait_until

pytestmark = pytest.mark.integration

VALUES = [b"first", b"second"]


def lose_metadata(node: NodeProcess) -> None:
    """Empty the controller's directory, and take away what refuses to start without it."""
    shutil.rmtree(node.directory / "raft")
    path = node.directory / "meta.json"
    meta = json.loads(path.read_text())
    meta["contains"].remove("raft")
    meta["may_found"] = True
    path.write_text(json.dumps(meta))


def test_records_outlive_the_metadata_and_come_back_with_it(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        node = cluster.nodes[1]
        create_topic(cluster, "precious", replication_factor=1)
        produce(cluster, "precious", VALUES)
        node.stop()
        [segment] = node.partition_directory("precious", 0).glob("*.log")
        data = segment.read_bytes()
        shutil.copytree(node.directory / "raft", tmp_path / "copy")
        lose_metadata(node)

        cluster.start()  # With an empty quorum.
        logs = node.directory / "logs"
        wait_until(lambda: any(logs.glob("precious-0.*.stray")), "the records are set aside")
        [stray] = logs.glob("precious-0.*.stray")
        assert (stray / segment.name).read_bytes() == data
        create_topic(cluster, "precious", replication_factor=1)
        assert read_all(cluster, "precious") == []
        node.stop()
        assert (stray / segment.name).read_bytes() == data

        shutil.rmtree(node.directory / "raft")
        (tmp_path / "copy").rename(node.directory / "raft")
        shutil.rmtree(segment.parent)  # Of the empty topic.
        stray.rename(segment.parent)
        cluster.start()
        assert [record.value for record in read_all(cluster, "precious", at_least=2)] == VALUES
