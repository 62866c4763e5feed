"""The network between a leader and a follower is cut and healed; both processes live on."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient
from tests.integration import raw
from tests.integration.cluster import Cluster
from tests.integration.network import Cut, Network, owners
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration

LEADER, NEAR, FAR = 1, 2, 3
TOPIC = "orders"
TIMEOUT_S = 60.0


class Split(Cluster):
    """Three nodes, the first of which the others reach through a network of its own."""

    def __init__(self, directory: Path) -> None:
        settings = {"replica.lag.time.max.ms": 2_000, "leader.imbalance.enable": False}
        super().__init__(directory, settings=settings)
        node = self.nodes[LEADER]
        port = int(node.address.rpartition(":")[2])
        frames, self._metrics = free_ports(2)
        with node.config.open("a") as config:
            config.write(f'broker.advertised = "127.0.0.2:{port}"\n')
            config.write(f'replication.frames.listen = "127.0.0.1:{frames}"\n')
            config.write(f'metrics.listen = "127.0.0.1:{self._metrics}"\n')
        self.network = Network("127.0.0.2", (port, frames), owners(self))

    def metric(self, name: str) -> float:
        """A metric of the leader's, by its name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics") as page:
            found = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def contents(self, node_id: int) -> bytes:
        logs = sorted(self.nodes[node_id].partition_directory(TOPIC, 0).glob("*.log"))
        return b"".join(path.read_bytes() for path in logs)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Split]:
    made = Split(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()
        made.network.close()


@pytest.mark.parametrize("how", list(Cut))
def test_a_follower_that_is_cut_off_from_its_leader_leaves_and_comes_back(
    cluster: Split, how: Cut
) -> None:
    acknowledged: dict[int, bytes] = {}

    def commit(count: int) -> None:
        for _ in range(count):
            value = b"%d" % len(acknowledged)
            result = raw.produce_at(
                cluster.nodes[LEADER].address, TOPIC, raw.batch_of([value]), timeout_ms=30_000
            )
            assert not result.HasField("error"), result.error.message
            acknowledged[result.base_offset] = value

    def isr() -> set[int]:
        return set(cluster.topic(TOPIC, NEAR).partitions[0].isr)

    with AdminClient(cluster.bootstrap) as admin:

        def why() -> dict[int, str]:
            [topic] = admin.describe_topics([TOPIC], out_of_sync=True)
            told = topic.partitions[0].out_of_sync
            assert told is not None
            return {one.node_id: one.reason for one in told}

        configs = {"min.insync.replicas": "2"}
        admin.create_topic(TOPIC, configs=configs, replica_assignments=[[LEADER, NEAR, FAR]])
        commit(20)
        streams = 'penstock_replication_streams_total{transport="frames"}'
        left = 'penstock_isr_left_total{reason="stuck"}'
        assert (cluster.metric(streams), cluster.metric(left)) == (2, 0)

        cluster.network.cut(FAR, how)
        commit(20)  # The first waits until the one that is cut off is out.
        wait_until(lambda: isr() == {LEADER, NEAR}, "the metadata have it out", TIMEOUT_S)
        assert why() == {FAR: "stuck"}
        assert cluster.metric(left) >= 1
        assert f"left='{FAR} (stuck)'" in cluster.nodes[LEADER].log.read_text()
        fenced = {one.node_id: one.fenced for one in admin.describe_cluster().brokers}
        assert fenced == {LEADER: False, NEAR: False, FAR: False}, "the controllers hear them all"
        commit(20)

        cluster.network.heal(FAR)
        wait_until(lambda: isr() == {LEADER, NEAR, FAR}, "it is in sync again", TIMEOUT_S)
        assert why() == {}
        commit(20)

    assert cluster.topic(TOPIC, NEAR).partitions[0].leader == LEADER, "nobody else has led"
    assert cluster.metric(streams) >= 3, "it came back in frames"
    assert cluster.metric('penstock_replication_streams_total{transport="grpc"}') == 0
    records = raw.read_all(cluster, TOPIC, at_least=len(acknowledged))
    assert {record.offset: record.value for record in records} == acknowledged
    for follower in (NEAR, FAR):
        wait_until(
            lambda node_id=follower: cluster.contents(node_id) == cluster.contents(LEADER),
            f"node {follower} has the same bytes",
            TIMEOUT_S,
        )
    for node in cluster.nodes.values():
        assert "Traceback" not in node.log.read_text()
