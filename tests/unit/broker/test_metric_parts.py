"""The parts of a node's metrics: bounded labels, histograms, the process."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily

from penstock.broker.core.group_progress import Lag
from penstock.broker.core.metadata_image import ImageChange, Topic
from penstock.broker.durations import Durations, SharedDurations
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.process_metrics import ProcessMetrics, count_connections
from penstock.broker.topic_labels import OTHER, TopicLabels, largest
from penstock.broker.traffic_metrics import TrafficMetrics
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.figures import Elections, figures_of
from penstock.raft_meta.quorum import Leadership, QuorumStatus, Role
from penstock.v1 import cluster_pb2
from tests.support import eventually


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"penstock_{name}", labels)


@pytest.mark.parametrize("kind", [Durations, SharedDurations])
def test_a_duration_is_in_each_bucket_from_its_own_on(kind: type[Durations]) -> None:
    durations = kind()
    for seconds in (0.0001, 0.001, 0.3, 99.0):
        durations.observe(seconds)
    family = HistogramMetricFamily("took_seconds", "Of this test", labels=["who"])
    durations.add_to(family, ("me",))
    buckets = {
        sample.labels["le"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }
    # A bound belongs to its bucket, as Prometheus has it: 0.001 is at most 0.001.
    assert (buckets["0.0005"], buckets["0.001"], buckets["0.25"], buckets["0.5"]) == (1, 2, 2, 3)
    assert buckets["10.0"] == 3
    assert buckets["+Inf"] == 4
    sums = {sample.name: sample.value for sample in family.samples}
    assert sums["took_seconds_count"] == 4
    assert sums["took_seconds_sum"] == pytest.approx(99.3011)


def test_only_so_many_topics_have_a_name_and_keep_it() -> None:
    labels = TopicLabels(2)
    shown = [labels.label(topic) for topic in ("a", "b", "c", "a")]
    assert shown == ["a", "b", OTHER, "a"]
    labels.forget("a")
    assert [labels.label(topic) for topic in ("d", "c", "b")] == ["d", OTHER, "b"]


def test_a_topic_that_is_gone_takes_no_place_for_long() -> None:
    labels = TopicLabels(2)
    for topic in ("gone", "here"):
        labels.label(topic)
    labels.keep({"here"}.__contains__)
    assert [labels.label(topic) for topic in ("new", "here", "more")] == ["new", "here", OTHER]


def test_the_largest_are_named_and_the_others_summed() -> None:
    lags = {("g", "a"): 5, ("g", "b"): 50, ("h", "a"): 500}
    assert largest(lags, 3, float) == (lags, [])
    assert largest(lags, 1, float) == ({("h", "a"): 500}, [50, 5])


def removed(name: str) -> ImageChange:
    topic = Topic(cluster_pb2.TopicRecord(name=name))
    return ImageChange(1, False, (), (), (topic,), ())


def test_topics_beyond_the_limit_are_counted_as_one_and_deleted_ones_go() -> None:
    registry = CollectorRegistry()
    traffic = TrafficMetrics(registry, TopicLabels(1))
    for topic in ("a", "b", "c"):
        traffic.produced(topic, 100, 2)
    traffic.fetched("b", 7)
    assert value(registry, "topic_produced_bytes_total", topic="a") == 100
    assert value(registry, "topic_produced_bytes_total", topic=OTHER) == 200
    assert value(registry, "topic_produced_records_total", topic=OTHER) == 4
    assert value(registry, "topic_fetched_bytes_total", topic=OTHER) == 7
    assert value(registry, "produced_bytes_total") == 300
    traffic.on_metadata(removed("a"))
    assert value(registry, "topic_produced_bytes_total", topic="a") is None
    assert value(registry, "produced_bytes_total") == 300
    traffic.produced("d", 1, 1)
    traffic.produced("c", 1, 1)
    assert value(registry, "topic_produced_bytes_total", topic="d") == 1
    assert value(registry, "topic_produced_bytes_total", topic=OTHER) == 201


def test_a_fetch_that_is_answered_after_its_topic_was_deleted_does_not_bring_it_back() -> None:
    registry = CollectorRegistry()
    traffic = TrafficMetrics(registry, TopicLabels(1))
    there = {"a", "b"}
    traffic.watch(there.__contains__)
    for topic in ("a", "b"):
        traffic.fetched(topic, 100)
    for topic in ("a", "b"):
        there.discard(topic)
        traffic.on_metadata(removed(topic))
        traffic.fetched(topic, 7)
    assert value(registry, "topic_fetched_bytes_total", topic="a") is None
    assert value(registry, "topic_fetched_bytes_total", topic=OTHER) == 100
    assert value(registry, "fetched_bytes_total") == 214
    there.add("c")
    traffic.fetched("c", 1)
    assert value(registry, "topic_fetched_bytes_total", topic="c") == 1, "its name has room"


def test_calls_of_one_method_are_counted_whichever_port_they_came_to() -> None:
    registry = CollectorRegistry()
    traffic = TrafficMetrics(registry, TopicLabels(1))
    for observe in (traffic.unary("Log.Fetch"), traffic.unary("Log.Fetch")):
        observe(0.001)
    assert value(registry, "request_seconds_count", method="Log.Fetch") == 2


def test_group_lags_beyond_the_limit_are_summed() -> None:
    metrics = BrokerMetrics(most_labels=2)
    show = metrics.coordinators.group_lags
    lags = {"a": Lag(1, 70), "b": Lag(20, 0), "c": Lag(300, 10), "d": Lag(4, 90)}
    show({("g", topic): lag for topic, lag in lags.items()})
    registry = metrics.registry
    assert value(registry, "group_lag_records", group="g", topic="c") == 300
    assert value(registry, "group_stalled_seconds", group="g", topic="c") == 10
    assert value(registry, "group_lag_records", group="g", topic="a") is None
    assert value(registry, "group_lag_records", group=OTHER, topic=OTHER) == 5
    assert value(registry, "group_stalled_seconds", group=OTHER, topic=OTHER) == 90
    show({("g", "a"): lags["a"]})
    assert value(registry, "group_lag_records", group="g", topic="a") == 1
    for name in ("group_lag_records", "group_stalled_seconds"):
        assert value(registry, name, group=OTHER, topic=OTHER) is None


def test_states_are_shown_at_zero_too_once_there_are_coordinators() -> None:
    metrics = BrokerMetrics()
    assert value(metrics.registry, "groups", state="stable") is None
    metrics.coordinators.watch(
        SimpleNamespace(count_states=lambda: ({"stable": 3}, 7)),
        SimpleNamespace(count_states=lambda: ({"ongoing": 2}, 61.5)),
    )
    assert value(metrics.registry, "groups", state="stable") == 3
    assert value(metrics.registry, "groups", state="empty") == 0
    assert value(metrics.registry, "group_members") == 7
    assert value(metrics.registry, "transactions", state="ongoing") == 2
    assert value(metrics.registry, "oldest_transaction_seconds") == 61.5


def test_elections_are_counted_once_each() -> None:
    elections = Elections()
    for term, leader in ((1, -1), (1, 2), (1, 2), (2, -1), (2, 2), (3, 1)):
        elections.on_leadership(Leadership(term, leader, leading=False))
    assert elections.count == 3


def status(**values: object) -> QuorumStatus:
    known = {"match_index": {1: 9, 2: 7, 3: 9}, **values}
    return QuorumStatus(1, Role.LEADER, 4, 1, 8, 8, 9, **known)  # type: ignore[arg-type]  # As said.


def test_the_active_controller_alone_shows_the_cluster() -> None:
    metrics = BrokerMetrics()
    assert value(metrics.registry, "active_controller") is None, "there is no controller here"
    active = figures_of(status(), ClusterState(), 5, is_active=True, changed_index=7)
    metrics.quorum.watch(lambda: active)
    assert value(metrics.registry, "active_controller") == 1
    assert value(metrics.registry, "offline_partitions") == 0
    assert value(metrics.registry, "controller_elections_total") == 5
    assert value(metrics.registry, "raft_lag_entries", voter="2") == 2
    assert value(metrics.registry, "raft_lag_entries", voter="1") is None
    assert value(metrics.registry, "cluster_brokers", state="fenced") == 0
    assert value(metrics.registry, "cluster_metadata_index") == 7
    other = figures_of(status(match_index={}), ClusterState(), 5, is_active=False)
    metrics.quorum.watch(lambda: other)
    assert value(metrics.registry, "active_controller") == 0
    assert value(metrics.registry, "offline_partitions") is None
    assert value(metrics.registry, "raft_commit_index") == 8


def test_connections_are_counted_by_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert count_connections({"broker": port}) == {"broker": 0}
        with (
            socket.create_connection(("127.0.0.1", port)) as one,
            socket.create_connection(("127.0.0.1", port)),
            listener.accept()[0],
            listener.accept()[0],
        ):
            # The client's ends have another local port, and are not counted.
            assert count_connections({"broker": port}) == {"broker": 2}
            assert one.getsockname()[1] != port
    assert count_connections({}) == {}


async def test_a_loop_that_stands_still_shows() -> None:
    registry = CollectorRegistry()
    process = ProcessMetrics(registry)
    process.start()
    try:
        time.sleep(0.6)  # noqa: ASYNC251 - this blocks the loop, which is what is to show.

        def late() -> float:
            total = value(registry, "event_loop_delay_seconds_count") or 0
            prompt = value(registry, "event_loop_delay_seconds_bucket", le="0.25") or 0
            return total - prompt

        await eventually(lambda: late() >= 1)
        before = value(registry, "gc_pause_seconds_count") or 0
        gc.collect()
        assert (value(registry, "gc_pause_seconds_count") or 0) > before
    finally:
        process.stop()
    shown = value(registry, "event_loop_delay_seconds_count")
    await asyncio.sleep(0.3)  # So long nothing is looked at any more.
    assert value(registry, "event_loop_delay_seconds_count") == shown


def test_the_process_says_what_it_is_and_uses() -> None:
    metrics = BrokerMetrics()
    metrics.process.about(3, "abc", {"controller", "broker"}, "zone-a")
    shown = generate_latest(metrics.registry).decode()
    assert (
        'penstock_node_info{cluster="abc",node="3",rack="zone-a",roles="broker,controller"} 1'
        in shown
    )
    assert 'penstock_build_info{codec="' in shown
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert f"\n{name} " in shown
