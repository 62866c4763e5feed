"""A replica that began anew knows what producers of deleted records sent, also after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient
from penstock.wire.ids import TopicPartition
from penstock.wire.records import RecordData, encode_batch
from tests.integration.broker.test_damaged_logs import TIMEOUT_S, write
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import batch_of, produce_at
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = {"flush.policy": "os", "leader.imbalance.enable": False}
    with running_cluster(tmp_path, settings=settings) as made:
        yield made


@pytest.mark.timeout(300)
def test_a_kill_before_the_first_flush_has_no_retry_appended_again(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", replica_assignments=[[1, 2]])

    def is_led_by(node_id: int, asked: int) -> bool:
        found = cluster.topic("t", asked).partitions
        return bool(found) and found[0].leader == node_id

    def has_isr(*isr: int) -> bool:
        return set(cluster.topic("t", 1).partitions[0].isr) == set(isr)

    wait_until(lambda: is_led_by(1, 1), "it leads", TIMEOUT_S)
    address = cluster.nodes[1].address
    mine = encode_batch(
        [RecordData(int(time.time() * 1000), b"k", b"mine", ())],
        producer_id=777_000,
        producer_epoch=0,
        base_sequence=0,
    )
    write(address, "t", mine)
    write(address, "t", batch_of([b"other"]))
    with AdminClient(cluster.bootstrap) as admin:
        admin.delete_records({TopicPartition("t", 0): 1})
        admin.alter_partition_reassignments({TopicPartition("t", 0): [1, 3]})
    wait_until(lambda: has_isr(1, 3), "moved", TIMEOUT_S)
    cluster.nodes[3].kill()
    wait_until(lambda: has_isr(1), "out of sync", TIMEOUT_S)
    cluster.nodes[3].start()
    wait_until(lambda: has_isr(1, 3), "back in sync", TIMEOUT_S)
    cluster.nodes[1].kill()
    wait_until(lambda: is_led_by(3, 3), "3 leads", TIMEOUT_S)
    write(cluster.nodes[3].address, "t", mine)
    assert produce_at(cluster.nodes[3].address, "t", mine).base_offset == 0
