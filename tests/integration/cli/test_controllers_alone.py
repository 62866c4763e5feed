"""What tools find out of controllers that are no brokers, whose port they do not reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient
from penstock.wire.errors import BrokerIdNotRegisteredError, PenstockError
from tests.integration.cli.test_operating import Operator
from tests.integration.cluster import Cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

ALONE = (2, 3)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three controllers, of which the first alone is a broker too."""
    made = Cluster(tmp_path, settings={"offsets.topic.replication.factor": 1})
    for node_id in ALONE:
        with made.nodes[node_id].config.open("a") as file:
            file.write('node.roles = "controller"\n')
    try:
        for node in made.nodes.values():
            node.start()
        wait_until(lambda: made.serves(1), "the broker serves", 60)
        yield made
    finally:
        made.close()


def test_the_doctor_and_metrics_see_controllers_without_a_broker(cluster: Cluster) -> None:
    operator = Operator(cluster)
    nodes = {node["node_id"]: node for node in operator.json("doctor")["nodes"]}
    assert sorted(nodes) == [1, 2, 3]
    for node_id in ALONE:
        told = nodes[node_id]
        assert told["address"] == cluster.controller_addresses[node_id]
        assert told["node"]["roles"] == ["controller"]
        (directory,) = told["node"]["directories"]
        assert directory["path"] == str(cluster.nodes[node_id].directory / "raft")
        assert directory["fsync_us"] > 0
        assert told["node"]["open_descriptors"] > 0
        shown = operator.json("metrics", str(node_id), "--match", "^penstock_node_info")
        assert [sample["labels"]["node"] for sample in shown] == [str(node_id)]
    assert "controller 2" not in str(operator.findings())

    with AdminClient(cluster.nodes[1].address) as admin:
        with pytest.raises(BrokerIdNotRegisteredError) as refused:
            admin.describe_node(9)
        assert "the brokers are 1" in refused.value.message
        assert "the controllers are 1, 2, 3" in refused.value.message

    cluster.nodes[3].kill()
    lost = "critical: controller 3: it does not answer the leader"

    def is_told() -> bool:
        return any(lost in finding for finding in operator.findings())

    wait_until(is_told, "the doctor misses it", 60)
    with AdminClient(cluster.nodes[1].address) as admin, pytest.raises(PenstockError) as silent:
        admin.describe_node(3)
    assert "controller 3 does not answer at" in silent.value.message
