"""What real nodes show of what really happens to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AdminClient, Consumer, Producer
from penstock.v1 import admin_pb2, cluster_pb2
from penstock.v1.admin_pb2_grpc import AdminStub
from tests.integration.operating.watched import WatchedCluster, watched_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTITIONS = 6
RECORDS = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCluster]:
    settings: dict[str, object] = {"log.format": "json", "replica.lag.time.max.ms": 2000}
    with watched_cluster(tmp_path_factory.mktemp("watched"), settings=settings) as running:
        with AdminClient(running.bootstrap) as admin:
            admin.create_topic("orders", PARTITIONS, 3, {"min.insync.replicas": "2"})
        with Producer(running.bootstrap, acks="all") as producer:
            for number in range(RECORDS):
                producer.send("orders", b"x" * 100, partition=number % PARTITIONS)
        with Consumer(
            running.bootstrap, group_id="billing", topics=["orders"], auto_offset_reset="earliest"
        ) as consumer:
            read = 0
            wait_for_records = iter(consumer)
            while read < RECORDS:
                next(wait_for_records)
                read += 1
            consumer.commit()
        yield running


def test_traffic_is_counted_where_it_goes(cluster: WatchedCluster) -> None:
    assert cluster.total("penstock_produced_records_total") == RECORDS
    assert cluster.total("penstock_topic_produced_records_total", topic="orders") == RECORDS
    produced = cluster.total("penstock_topic_produced_bytes_total", topic="orders")
    assert produced > RECORDS * 100
    # The consumer may have read some of it twice.
    assert cluster.total("penstock_topic_fetched_bytes_total", topic="orders") >= produced
    assert cluster.total("penstock_request_seconds_count", method="Log.Produce") >= 1
    assert cluster.total("penstock_request_seconds_count", method="Log.Fetch") >= 1
    assert cluster.total("penstock_request_seconds_count", method="Groups.CommitOffsets") >= 1


def test_replicas_and_leaders_add_up(cluster: WatchedCluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        names = [*(topic.name for topic in admin.list_topics()), "__consumer_offsets"]
        count = sum(len(topic.partitions) for topic in admin.describe_topics(sorted(set(names))))
    assert cluster.total("penstock_leader_partitions") == count
    assert cluster.total("penstock_replica_partitions") == 3 * count
    assert cluster.total("penstock_cluster_partitions") == count
    assert cluster.total("penstock_under_replicated_partitions") == 0
    assert cluster.total("penstock_under_min_isr_partitions") == 0
    assert cluster.total("penstock_log_size_bytes", topic="orders") > 3 * RECORDS * 100
    assert cluster.total("penstock_leader_elections_total") >= count
    assert cluster.total("penstock_unclean_leader_elections_total") == 0


def test_one_controller_is_active_and_all_agree(cluster: WatchedCluster) -> None:
    assert cluster.total("penstock_active_controller") == 1
    assert cluster.total("penstock_offline_partitions") == 0
    assert cluster.total("penstock_cluster_brokers", state="active") == 3
    for node_id in cluster.nodes:
        assert (cluster.value(node_id, "penstock_controller_elections_total") or 0) >= 1
        assert cluster.value(node_id, "penstock_broker_fenced") == 0
        assert (cluster.value(node_id, "penstock_raft_commit_index") or 0) > PARTITIONS
    wait_until(
        lambda: len({cluster.value(n, "penstock_metadata_index") for n in cluster.nodes}) == 1,
        "all brokers are at one index",
    )


def test_disks_and_connections_are_measured(cluster: WatchedCluster) -> None:
    node = cluster.nodes[1]
    logs, journal = str(node.directory / "logs"), str(node.directory / "raft")
    assert (cluster.value(1, "penstock_fsync_seconds_count", directory=logs) or 0) >= 1
    assert (cluster.value(1, "penstock_fsync_seconds_count", directory=journal) or 0) >= 1
    assert (cluster.value(1, "penstock_flush_wait_seconds_count", directory=logs) or 0) >= 1
    free = cluster.value(1, "penstock_log_directory_free_bytes", directory=logs)
    total = cluster.value(1, "penstock_log_directory_total_bytes", directory=logs)
    assert free is not None
    assert total is not None
    assert 0 < free < total
    assert (cluster.value(1, "penstock_connections", listener="controller") or 0) >= 2
    assert (cluster.value(1, "penstock_connections", listener="frames") or 0) >= 1
    assert (cluster.value(1, "penstock_event_loop_delay_seconds_count") or 0) >= 1


def test_groups_and_transactions_are_shown_by_state(cluster: WatchedCluster) -> None:
    assert cluster.total("penstock_groups", state="empty") == 1  # Its member has left.
    assert cluster.total("penstock_group_rebalances_total") >= 1
    with Producer(cluster.bootstrap, transactional_id="till-1") as producer:
        with producer.transaction():
            producer.send("orders", b"sold")
        producer.begin_transaction()
        producer.send("orders", b"not sold")
        producer.flush()
        assert cluster.total("penstock_transactions", state="ongoing") == 1
        wait_until(
            lambda: cluster.total("penstock_oldest_transaction_seconds") > 0, "it grows older"
        )
        producer.abort_transaction()
    assert cluster.total("penstock_transactions_ended_total", outcome="commit") == 1
    assert cluster.total("penstock_transactions_ended_total", outcome="abort") == 1
    assert cluster.total("penstock_transactions", state="ongoing") == 0


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def test_lines_name_partitions_as_metrics_do(cluster: WatchedCluster) -> None:
    lines = list(json_lines(cluster.nodes[2].log))
    assert {(line["node"], line["cluster"]) for line in lines} == {(2, cluster.cluster_id)}
    states = [line for line in lines if line["event"] == "replica state"]
    of_orders = {line["partition"] for line in states if line["topic"] == "orders"}
    assert of_orders == set(range(PARTITIONS))


def test_a_clients_trace_goes_on_to_the_node_that_carries_out_what_was_asked(
    cluster: WatchedCluster,
) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        controller = admin.describe_cluster().controller_id
    asked = next(node_id for node_id in cluster.nodes if node_id != controller)
    command = cluster_pb2.CreateTopicCommand(name="traced", partition_count=1, replication_factor=3)
    with cluster.channel(asked) as channel:
        stub: Any = AdminStub(channel)
        response = stub.CreateTopics(
            admin_pb2.CreateTopicsRequest(topics=[command], timeout_ms=10_000),
            metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),),
            timeout=30,
        )
    assert not response.results[0].HasField("error")
    traced = [line for line in json_lines(cluster.nodes[controller].log) if "trace_id" in line]
    assert [(line["trace_id"], line["span_id"], line["command"]) for line in traced] == [
        (TRACE, SPAN, "create_topic")
    ]


def test_a_killed_node_shows_in_the_others(cluster: WatchedCluster) -> None:
    with AdminClient(cluster.nodes[1].address) as admin:
        controller = admin.describe_cluster().controller_id
    victim = next(node_id for node_id in cluster.nodes if node_id != controller)
    cluster.nodes[victim].kill()
    left = [node_id for node_id in cluster.nodes if node_id != victim]
    with Producer(",".join(cluster.nodes[n].address for n in left), acks="all") as producer:
        for number in range(PARTITIONS):
            producer.send("orders", b"after", partition=number).result(60)
    wait_until(
        lambda: (
            cluster.total("penstock_under_replicated_partitions")
            == cluster.total("penstock_leader_partitions")
        ),
        "every partition lacks a replica",
    )
    # The others still have all that min.insync.replicas asks for, and nothing to spare.
    assert cluster.total("penstock_at_min_isr_partitions") >= PARTITIONS
    assert cluster.total("penstock_cluster_brokers", state="fenced") == 1
    lag = cluster.total("penstock_replica_lag_records", follower=str(victim))
    assert lag > 0
    cluster.nodes[victim].start()
    cluster.wait_ready()
    wait_until(lambda: cluster.total("penstock_under_replicated_partitions") == 0, "it is back")
    wait_until(
        lambda: cluster.total("penstock_replica_lag_records", follower=str(victim)) == 0,
        "it has everything",
    )
