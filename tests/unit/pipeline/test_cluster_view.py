"""What a planner is told of the cluster by brokers that do not all know the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client import TopicPartition, UnknownTopicOrPartitionError
from penstock.pipeline.errors import DataLossError
from penstock.pipeline.source import batch_reader, cluster_view
from penstock.pipeline.source.cluster_view import ClusterView
from penstock.pipeline.source.stream_reader import StreamReader
from penstock.pipeline.source_options import SourceOptions

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


class Brokers:
    """Each answer has so many partitions as the next number says, and then as the last one."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)
        self.asked = 0
        self.topic_id = "id-a"
        self.on_offsets: Callable[[], object] = lambda: None

    def describe_topics(self, _names: Iterable[str]) -> list[Any]:
        self.asked += 1
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        partitions = [SimpleNamespace(partition=number) for number in range(count)]
        return [
            SimpleNamespace(name="a", topic_id=self.topic_id, partitions=partitions, configs={})
        ]

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self.on_offsets()
        return dict.fromkeys(partitions, 9)

    beginning_offsets = end_offsets

    def close(self, _timeout_ms: float = 0) -> None:
        """Nothing is open."""


def view(monkeypatch: pytest.MonkeyPatch, brokers: Brokers) -> ClusterView:
    monkeypatch.setattr(cluster_view, "AdminClient", lambda *_, **__: brokers)
    monkeypatch.setattr(cluster_view, "open_consumer", lambda _: brokers)
    monkeypatch.setattr(cluster_view, "sleep", lambda _: None)
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a"}
    seconds = itertools.count()
    return ClusterView(SourceOptions.load(given), clock=lambda: next(seconds) / 2)


def test_what_one_answer_leaves_out_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = view(monkeypatch, Brokers(1, 1, 2))
    assert found.ends([A0, A1])[1] == {A0: 9, A1: 9}


def test_what_stays_away_is_gone_and_not_asked_for_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(1)
    found = view(monkeypatch, brokers)
    assert found.ends([A0, A1])[1] == {A0: 9}
    asked = brokers.asked
    assert asked > 3
    assert found.ends([A0, A1])[1] == {A0: 9}
    assert brokers.asked <= asked + 1


def test_a_batch_of_an_earlier_run_is_asked_for_again_before_any_of_it_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a"}
    stream = StreamReader(SourceOptions.load({**given, "failOnDataLoss": "false"}))
    monkeypatch.setattr(stream, "_made", view(monkeypatch, Brokers(1, 1, 2)))
    start, end = ({"a": {"0": at, "1": at, "id": "id-a"}} for at in (3, 5))
    assert len(stream.partitions(start, end)) == 2


def test_an_old_answer_about_a_topics_id_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(1)
    found = view(monkeypatch, brokers)
    late = iter(["id-old", "id-old"])
    describe = brokers.describe_topics

    def behind(names: Iterable[str]) -> list[Any]:
        brokers.topic_id = next(late, "id-a")
        return describe(names)

    brokers.describe_topics = behind  # type: ignore[method-assign]
    assert found.agreed([A0], {"a": "id-a"})["a"].topic_id == "id-a"


@pytest.mark.parametrize("kind", ["stream", "batch"])
def test_offsets_of_a_topic_are_never_taken_for_those_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    brokers = Brokers(1)
    found = view(monkeypatch, brokers)

    def make_anew() -> None:
        brokers.topic_id = "id-new"

    # The topic is made anew when its offsets were asked for, and looked at again a second later.
    brokers.on_offsets = make_anew
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a"}
    if kind == "stream":
        stream = StreamReader(SourceOptions.load(given))
        monkeypatch.setattr(stream, "_made", found)
        assert stream.initialOffset() == {"a": {"0": 9, "id": "id-a"}}
        return
    brokers.end_offsets = lambda partitions: dict.fromkeys(partitions, 12)  # type: ignore[method-assign]
    monkeypatch.setattr(batch_reader, "ClusterView", lambda _: found)
    with pytest.raises(DataLossError, match="its topic was deleted and made anew"):
        batch_reader.BatchReader(SourceOptions.load(given)).partitions()


@pytest.mark.parametrize(
    ("later", "found"), [((1, 1, 2), True), ((1,), False)], ids=["for-a-while", "for-good"]
)
def test_a_batch_is_not_planned_by_a_broker_that_is_behind(
    monkeypatch: pytest.MonkeyPatch, later: tuple[int, ...], found: bool
) -> None:
    brokers = Brokers(2)

    def fall_behind() -> None:
        brokers.counts, brokers.on_offsets = list(later), lambda: None

    brokers.on_offsets = fall_behind  # When it is known where the batch begins.
    brokers.beginning_offsets = lambda partitions: (  # type: ignore[method-assign]
        dict.fromkeys(brokers.end_offsets(partitions), 3)
    )
    monkeypatch.setattr(batch_reader, "ClusterView", lambda _: view(monkeypatch, brokers))
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a"}
    reader = batch_reader.BatchReader(SourceOptions.load(given))
    if found:
        planned: list[Any] = list(reader.partitions())
        assert [(one.where, one.start, one.end) for one in planned] == [(A0, 3, 9), (A1, 3, 9)]
        return
    with pytest.raises(
        UnknownTopicOrPartitionError, match=r"a-1 went away while the query was planned"
    ):
        reader.partitions()


def test_a_batch_leaves_out_what_is_added_while_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(1, 2)
    brokers.beginning_offsets = lambda partitions: dict.fromkeys(partitions, 3)  # type: ignore[method-assign]
    monkeypatch.setattr(batch_reader, "ClusterView", lambda _: view(monkeypatch, brokers))
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a"}
    planned: list[Any] = list(batch_reader.BatchReader(SourceOptions.load(given)).partitions())
    assert [(one.where, one.start, one.end) for one in planned] == [(A0, 3, 9)]
