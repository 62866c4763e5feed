"""A partition that nobody can lead shows at the active controller, and an unclean election too."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.client import AdminClient, Producer, TopicPartition
from tests.integration.operating.watched import WatchedCluster, watched_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


def offline(cluster: WatchedCluster) -> float:
    return cluster.total("penstock_offline_partitions")


@pytest.mark.timeout(240)
def test_an_offline_partition_shows_until_it_is_led_again(tmp_path: Path) -> None:
    with watched_cluster(tmp_path) as cluster:
        place = TopicPartition("lost", 0)
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic(
                "lost", configs={"min.insync.replicas": "1"}, replica_assignments=[[1, 2]]
            )
            with Producer(cluster.bootstrap) as producer:
                producer.send("lost", b"on both").result(60)
                cluster.nodes[2].kill()
                # Acknowledged once the other is out of the in-sync set.
                producer.send("lost", b"on the first alone").result(60)
        assert offline(cluster) == 0
        wait_until(
            lambda: cluster.total("penstock_under_replicated_partitions") >= 1, "a replica lacks"
        )
        cluster.nodes[1].kill()
        cluster.nodes[2].start()
        cluster.wait_ready()
        wait_until(lambda: offline(cluster) == 1, "nobody may lead it")
        assert cluster.total("penstock_unclean_leader_elections_total") == 0
        with AdminClient(cluster.nodes[2].address) as admin:
            assert admin.elect_leaders([place], unclean=True) == {place: 2}
        wait_until(lambda: offline(cluster) == 0, "it is led again")
        wait_until(
            lambda: cluster.value(2, "penstock_unclean_leader_elections_total") == 1,
            "the election was unclean",
        )
