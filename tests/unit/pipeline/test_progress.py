from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import NetworkError, TopicPartition
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

    def alter_group_offsets(self, group: str, offsets: dict[TopicPartition, int]) -> None:
        if self.fails:
            raise NetworkError("no way there")
        self.commits.append((group, offsets))


def test_lag_is_what_lay_behind() -> None:
    found = state_of([source('{"a":{"0":5,"1":9}}', '{"a":{"0":8,"1":9,"2":4}}')])
    assert found.done == {A0: 5, A1: 9}
    assert found.lag == {A0: 3, A1: 0}


def test_what_is_not_there_any_more_is_not_committed() -> None:
    end = '{"a":{"0":5,"id":"7"},"gone":{"0":9,"id":"8"}}'
    found = state_of([source(end, '{"a":{"0":8}}')])
    assert found.done == {A0: 5}


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
    listener = ProgressListener(admin, "team", None)  # type: ignore[arg-type]
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    listener.onQueryProgress(event(source('{"a":{"0":5}}', None)))
    listener.onQueryProgress(event(source('{"a":{"0":6}}', None)))
    assert admin.commits == [("team-id-1", {A0: 5}), ("team-id-1", {A0: 6})]


def test_a_commit_that_failed_is_tried_with_the_next_batch() -> None:
    admin = FakeAdmin()
    listener = ProgressListener(admin, "team", None)  # type: ignore[arg-type]
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
