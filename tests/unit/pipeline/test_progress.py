from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import ConfigurationError, NetworkError, TopicPartition
from penstock.pipeline.progress import Gauges, ProgressListener, state_of

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
OURS = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream@1f"


def source(end: str | None, latest: str | None, description: str = OURS) -> Any:
    return SimpleNamespace(description=description, endOffset=end, latestOffset=latest)


def event(*sources: Any, **more: Any) -> Any:
    progress = {
        "id": "id-1", "name": None, "batchId": 7, "sources": list(sources), "numInputRows": 5,
        "inputRowsPerSecond": 2.5, "processedRowsPerSecond": 10.0, "batchDuration": 500, **more,
    }  # fmt: skip
    return SimpleNamespace(progress=SimpleNamespace(**progress))


class FakeAdmin:
    def __init__(self) -> None:
        self.commits: list[tuple[str, dict[TopicPartition, int]]] = []
        self.fails = False
        self.opened = 0
        self.closed = 0

    def __call__(self) -> FakeAdmin:
        self.opened += 1
        return self

    def close(self) -> None:
        self.closed += 1

    def alter_group_offsets(self, group: str, offsets: dict[TopicPartition, int]) -> None:
        if self.fails:
            raise NetworkError("no way there")
        self.commits.append((group, offsets))


def listener_for(admin: FakeAdmin, **more: Any) -> ProgressListener:
    connect: Any = admin
    return ProgressListener(connect, "team", None, **more)


def about(query: str, name: str | None = None) -> Any:
    return SimpleNamespace(id=query, name=name)


def test_lag_is_what_lay_behind() -> None:
    found = state_of([source('{"a":{"0":5,"1":9}}', '{"a":{"0":8,"1":9,"2":4}}')])
    assert found.done == {A0: 5, A1: 9}
    assert found.lag == {A0: 3, A1: 0}


def test_what_is_not_there_any_more_is_not_committed() -> None:
    end = '{"a":{"0":5,"id":"7"},"gone":{"0":9,"id":"8"}}'
    found = state_of([source(end, '{"a":{"0":8}}')])
    assert found.done == {A0: 5}


def test_what_two_sources_read_is_done_when_both_have_it() -> None:
    ahead, behind = '{"a":{"0":9,"1":3}}', '{"a":{"0":5,"1":7}}'
    for sources in ((ahead, behind), (behind, ahead)):
        found = state_of([source(end, '{"a":{"0":10,"1":10}}') for end in sources])
        assert found.done == {A0: 5, A1: 3}
        assert found.lag == {A0: 5, A1: 7}


@pytest.mark.parametrize(
    "other",
    [
        source('{"a":{"0":5}}', '{"a":{"0":8}}', "KafkaV2[Subscribe[a]]"),
        source('{"index": 5}', '{"index": 8}'),
        source(None, None),
        source("nonsense", ""),
    ],
)
def test_other_sources_are_left_out(other: Any) -> None:
    assert state_of([other]).done == {}
    assert state_of([other, source('{"a":{"1":5}}', None)]).done == {A1: 5}


def test_what_is_done_is_committed_once() -> None:
    admin = FakeAdmin()
    listener = listener_for(admin)
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    listener.onQueryProgress(event(source('{"a":{"0":6}}', None)))
    assert admin.commits == [("team-id-1", {A0: 5}), ("team-id-1", {A0: 6})]


def test_a_commit_that_failed_is_tried_with_the_next_batch() -> None:
    admin = FakeAdmin()
    listener = listener_for(admin)
    admin.fails = True
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    admin.fails = False
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    assert admin.commits == [("team-id-1", {A0: 5})]


def test_gauges() -> None:
    registry = CollectorRegistry()
    listener = ProgressListener(None, "spark", Gauges(registry))
    listener.onQueryProgress(event(source('{"a":{"0":5}}', '{"a":{"0":8}}')))
    listener.onQueryProgress(
        event(
            source('{"a":{"0":8}}', '{"a":{"0":8}}'), name="orders",
            inputRowsPerSecond=float("nan"), processedRowsPerSecond=None,
        )
    )  # fmt: skip

    def value(name: str, query: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_query_{name}", {"query": query, **labels})

    assert value("lag_offsets", "id-1", topic="a", partition="0") == 3
    assert value("lag_offsets", "orders", topic="a", partition="0") == 0
    assert value("input_rows_per_second", "id-1") == 2.5
    assert value("input_rows_per_second", "orders") == 0
    assert value("processed_rows_per_second", "id-1") == 10
    assert value("processed_rows_per_second", "orders") == 0
    assert value("batch_id", "id-1") == 7
    assert value("batch_seconds", "id-1") == 0.5
    assert value("rows_total", "id-1") == 5


def test_the_connection_is_there_while_queries_run() -> None:
    admin = FakeAdmin()
    listener = listener_for(admin)
    for query in ("id-1", "id-2"):
        listener.onQueryStarted(about(query))
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    listener.onQueryTerminated(about("id-1"))
    assert (admin.opened, admin.closed) == (1, 0)
    listener.onQueryTerminated(about("id-2"))
    assert (admin.opened, admin.closed) == (1, 1)
    # It starts again.
    listener.onQueryProgress(event(source('{"a":{"0":6}}', None)))
    assert (admin.opened, admin.closed) == (2, 1)
    assert admin.commits == [("team-id-1", {A0: 5}), ("team-id-1", {A0: 6})]


def test_closing_frees_everything_and_hears_no_more() -> None:
    admin, registry = FakeAdmin(), CollectorRegistry()
    detached: list[ProgressListener] = []
    connect: Any = admin
    listener = ProgressListener(connect, "team", Gauges(registry), detached.append)
    listener.onQueryProgress(event(source('{"a":{"0":5}}', '{"a":{"0":8}}')))
    listener.close()
    listener.close()
    listener.onQueryProgress(event(source('{"a":{"0":6}}', '{"a":{"0":8}}')))
    assert (admin.opened, admin.closed) == (1, 1)
    assert detached == [listener]
    assert admin.commits == [("team-id-1", {A0: 5})]
    assert list(registry.collect()) == []


def test_a_registry_shows_the_queries_of_one() -> None:
    registry = CollectorRegistry()
    first = Gauges(registry)
    with pytest.raises(ConfigurationError, match=r"next: close\(\) what watch\(\) gave before"):
        Gauges(registry)
    first.close()
    Gauges(registry)


def names(registry: CollectorRegistry) -> set[str]:
    """The queries that are shown."""
    return {
        sample.labels["query"]
        for figures in registry.collect()
        for sample in figures.samples
        if "query" in sample.labels
    }


def test_a_query_that_ended_is_not_shown_any_more() -> None:
    registry = CollectorRegistry()
    listener = ProgressListener(None, "spark", Gauges(registry))
    listener.onQueryStarted(about("id-1", "orders"))
    listener.onQueryStarted(about("id-2"))
    listener.onQueryStarted(about("id-3"))
    sources = source('{"a":{"0":5}}', '{"a":{"0":8}}')
    listener.onQueryProgress(event(sources, name="orders"))
    listener.onQueryProgress(event(sources, id="id-2"))
    listener.onQueryTerminated(about("id-1"))
    listener.onQueryTerminated(about("id-3"))  # It never had a batch.
    assert names(registry) == {"id-2"}
    listener.onQueryTerminated(about("id-2"))
    assert names(registry) == set()


def test_a_partition_that_is_gone_has_no_lag() -> None:
    registry = CollectorRegistry()
    listener = ProgressListener(None, "spark", Gauges(registry))
    listener.onQueryProgress(event(source('{"a":{"0":5,"1":5}}', '{"a":{"0":8,"1":8}}')))
    listener.onQueryProgress(event(source('{"a":{"0":5,"1":5}}', '{"a":{"1":8}}')))
    where = {"query": "id-1", "topic": "a"}
    lag = "penstock_query_lag_offsets"
    assert registry.get_sample_value(lag, {**where, "partition": "0"}) is None
    assert registry.get_sample_value(lag, {**where, "partition": "1"}) == 3
